"""Override words in, one plain dict out; whoever misspells is told what there is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.records.configs import run_key
from experiments.config import choices, compose
from sparsify.methods import REGISTRY as METHODS
from tests.config.refusals import check_parts, check_refusals, read_answers
from tests.conftest import fine, python

# A line of 30 each of which is twice the one before.
DOUBLED = "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 31))
REFERRING = "".join(f"a{at}: ${{.a{at - 1}}}${{.a{at - 1}}}\n" for at in range(1, 31))


def method_of(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = compose.resolve(words)["method"]
    return found


def test_every_option_composes() -> None:
    for group in choices.GROUPS:
        for option in {*choices.option_names(group)} - {"loopback"}:  # it has no numbers, see test_network.py
            config = compose.resolve([f"{group}={option}"])
            json.dumps(config.as_dict())
            if group in ("method", "task"):
                assert config[group]["name"] in choices.option_names(group)


def test_a_signature_is_a_schema() -> None:
    for name in METHODS.names():
        expected = json.loads(json.dumps(METHODS.defaults(name)))  # as a list, what is a tuple
        assert method_of(f"method={name}") == {"name": name, **expected}


def test_presets_build_on_registered_methods() -> None:
    feedback = method_of("method=randomk_feedback")
    assert (feedback["name"], feedback["feedback"]) == ("randomk", "gradient")
    assert method_of("method=topk_layerwise")["scope"] == "layer"


def test_the_recipe_sets_densities_where_there_are_any_and_the_user_wins() -> None:
    assert method_of("recipe=yoon2022", "method=topk")["density_warmup"] == [0.015625, 0.004]
    assert method_of("recipe=yoon2022", "method=dense") == {"name": "dense", "scope": "global"}
    given = method_of("recipe=yoon2022", "method=topk", "method.density_warmup=[]", "method.density=0.5")
    assert (given["density_warmup"], given["density"]) == ([], 0.5)


def test_the_recipe_is_in_tf32_on_gpus_as_published_and_the_user_wins() -> None:
    def precision(*words: str) -> str:
        return str(compose.resolve(["recipe=yoon2022", "method=topk", *words])["precision"])

    assert precision("profile=paper") == precision("profile=laptop", "device=cuda") == "tf32"
    assert precision("profile=laptop") == precision("profile=paper", "device=cpu") == "fp32"
    assert precision("profile=paper", "precision=fp32") == "fp32"
    assert compose.resolve(["profile=paper", "method=topk"])["precision"] == "fp32"  # without the recipe
    with pytest.raises(ValueError, match="precision=tf32 is a matter of NVIDIA's GPUs, and device=cpu"):
        precision("precision=tf32")


def test_who_searches_is_part_of_what_is_measured_and_the_recipe_takes_the_published_operators() -> None:
    plain, fused, published = (
        compose.resolve(["method=topk", *words])
        for words in ([], ["select=fused"], ["recipe=yoon2022", "task=cnn_cifar10", "select=torch"])
    )
    assert plain["select"] == "auto"
    assert run_key(plain) != run_key(fused)
    assert compose.resolve(["recipe=yoon2022"])["select"] == "torch"
    # Records that are older than the choice were made with torch's operators, and keep their keys.
    older = {name: value for name, value in published.items() if name not in ("select", "overlap")}
    assert run_key(older) == run_key(published)


def test_a_method_with_momentum_inside_takes_the_optimisers() -> None:
    assert compose.resolve(["method=topk"])["task"]["momentum"] == 0.9
    assert compose.resolve(["method=dgc"])["task"]["momentum"] == 0
    with pytest.raises(ValueError, match=r"method=dgc applies momentum itself"):
        compose.resolve(["method=dgc", "task.momentum=0.9"])


def test_links_belong_to_clusters() -> None:
    assert compose.resolve(["cluster=local"])["cluster"]["link"]["name"] == "loopback"
    virtual = compose.resolve(["cluster=virtual", "link=ethernet", "cluster.link.alpha_s=1e-3"])
    expected = {"name": "ethernet", "alpha_s": 1e-3, "beta_s_per_byte": 8e-10}
    assert virtual["cluster"]["link"] == expected


BAD_WORDS = read_answers("""
method=topq -> no method 'topq' ... did you mean 'topk' ... dense,
task=imagenet -> no task 'imagenet' ... vgg16_cifar10
cluster=mars -> no cluster 'mars' ... local,  ... neuron_a100
profile=huge -> no profile 'huge' ... laptop, paper, smoke
recipe=shi -> no recipe 'shi' ... yoon2022
link=carrier_pigeon -> no link 'carrier_pigeon' ... ethernet
method.densty=0.1 -> no key 'method.densty' ... did you mean 'method.density' ... method.scope
task.rate=1 -> no key 'task.rate' ... task.lr
train.epoch=2 -> no key 'train.epoch' ... did you mean 'train.epochs'
wrokers=2 -> no key 'wrokers' ... did you mean 'workers'
method.name=dense -> 'method.name' ... choice of method=
workers -> not of the form key=value
method.density=[1 -> method.density=[1 can't be read: [ is not closed; ... in quotes
seed=1=2 -> seed=1=2 can't be read: = stands outside of quotes;
seed=a;b -> ; stands outside of quotes;
seed='a -> the quotation that ' begins does not end;
seed=1] -> ] closes nothing;
seed=[1,,2] -> a comma has nothing before or behind it;
seed=(1) -> ( follows no name of a function;
seed=foo(1) -> there is no function foo;
seed={1} -> {...} holds key:value
seed=[1]2 -> a list or a quotation has something else beside it;
timing.mode=fast -> no timing.mode 'fast' ... as_published, production, serialised
device=tpu -> no device 'tpu' ... cpu, cuda
method.density=0 -> density=0 ... (0, 1]
method.density=-0.1 -> density=-0.1 ... (0, 1]
method.density=1.01 -> density=1.01 ... (0, 1]
method.density=nan -> density=nan ... (0, 1]
method.density=much -> method.density='much' ... (0, 1]
method.density_warmup=[0.1,0] -> method.density_warmup=[0.1,0] ... a list ... (0, 1]
method.density_warmup=0.01 -> method.density_warmup=0.01 ... a list
method.index=int32,int64 -> method.index=int32,int64 is several values ... `plan`
method.index=[int32] -> no method.index '[int32]' ... delta16, int32, int64
method.packed=5 -> method.packed=5 ... true or false
method.scope=glob(*) -> method.scope=glob(*) is several values
task.lr=interval(0,1) -> task.lr=interval(0,1) is several values
task.channels_last=maybe -> task.channels_last='maybe' ... true or false
task.lr_warmup_epochs=nan -> task.lr_warmup_epochs=nan ... a finite number, 0 or more
task.lr_warmup_epochs=-5 -> task.lr_warmup_epochs=-5 ... 0 or more
task.lr_milestones=abc -> task.lr_milestones='abc' ... a list
task.lr_milestones=[1,x] -> task.lr_milestones=[1,x] ... a list
task.momentum=1 -> task.momentum=1 ... [0, 1)
task.batch_size=0 -> task.batch_size=0 ... 1 or more
task.batch_size=true -> task.batch_size=true ... a whole number
task.lr=inf -> task.lr=inf ... finite
workers=0 -> workers=0 ... from 1 to 100000
workers=1.5 -> workers=1.5 ... whole number
workers=999999999999999 -> workers=999999999999999 ... from 1 to 100000
workers=null -> workers=null ... whole number
workers={a:1} -> workers={'a': 1} ... whole number
seed=-1 -> seed=-1 ... from 0 to 4294967295
train.steps=0 -> train.steps=0 ... 1 or more
train.steps=3298534883328 -> a whole number, 1 or more, or null; the largest is 2147483647
select=quick -> no select 'quick' ... auto, fused, torch
overlap=often -> overlap='often' ... true or false
overlap=1 -> overlap=1 ... true or false
overlap=true -> overlap=true needs processes ... timing.mode=production
launch.checkpoint_min=-1 -> launch.checkpoint_min=-1 ... above 0 ... or null
link=loopback -> alpha and beta ... link=nvlink
cluster.link.alpha_s=-1 -> cluster.link.alpha_s=-1 ... 0 or more
cluster.link.beta_s_per_byte=null -> alpha and beta
cluster.link.name=fast -> 'cluster.link.name' ... choice of link=
data.root=5 -> data.root=5 ... text
data.root=${seed} -> data.root=${seed} ... only the files of conf/ may
+nothing=1 -> no key '+nothing'
++cluster.where=x/../../.. -> no key '++cluster.where'
~seed=0 -> no key '~seed'
hydra.run.dir=/tmp -> no key 'hydra.run.dir'
method@task=topk -> no key 'method@task'
seed=int(x) -> seed=int(x) ... can't be read
""") | {
    "seed=" + "[" * 900 + "]" * 900: "too many brackets within each other;",
    "seed=" + "9" * 3000: "seed=a number of 9966 bits ... whole number",
    "seed=" + "9" * 5000: "seed=999 ... 5005 characters",
    "data.root='a\nb'": "data.root='a\\nb' ... some text without control characters",
    "method.density\x1b[31m=1": "no key 'method.density\\x1b[31m'",
    "x" * 500 + "=1": "no key 'xxx ... ...",
    "seed=" + "[" * 900: "seed=[[[ ... can't be read",
}


def test_bad_words_are_answered_with_what_there_is() -> None:
    check_refusals(BAD_WORDS, "method=topk")


UNSAFE_WORDS = read_answers("""
cluster.ports=60000-50000 -> cluster.ports=60000-50000 ... the smaller one first
cluster.ports=80-90 -> cluster.ports=80-90 ... from 1024 to 65535
cluster.ports=1023-2000 -> cluster.ports=1023-2000 ... from 1024 to 65535
cluster.ports=50000 -> cluster.ports=50000 ... two numbers, such as 50000-50100
container.image=5 -> container.image=5 ... text
container.binds=/scratch -> container.binds='/scratch' ... a list
container.runtime=docker -> no container.runtime 'docker' ... auto, pyxis, singularity
cluster.exclude=[1] -> cluster.exclude=[1] ... text ... or null
cluster.gpu= -> cluster.gpu='' ... some text
cluster.account=1e3 -> cluster.account=1000.0 ... text in quotes ... account="'010'"
cluster.setup=[5] -> cluster.setup=[5] ... text in quotes
cluster.sbatch=[hold] -> cluster.sbatch=[hold] ... a long option
cluster.time_min=0 -> cluster.time_min=0 ... from 1 to
cluster.requeues=-1 -> cluster.requeues=-1 ... 0 or more
cluster.where=local -> 'cluster.where' ... choice of cluster=
""") | {
    "cluster.mem_gb='4\n#SBATCH --uid=0'": "cluster.mem_gb= ... a whole number, 1 or more, or null",
    "cluster.partition='a\nscancel 1'": "cluster.partition= ... without control characters",
    "cluster.partition='a\x1b[31m'": "cluster.partition= ... without control characters",
    "cluster.account='  '": "cluster.account='  ' ... some text",
    "cluster.sbatch=['--mail-user=x\nrm y']": "cluster.sbatch= ... a long option",
    "cluster.setup='module load'": "cluster.setup='module load' ... a list",
}


def test_what_would_reach_sbatch_or_a_container_is_checked_before() -> None:
    check_refusals(UNSAFE_WORDS, "cluster=devcluster", "profile=smoke")


SLURMS = "defaults: [generic_slurm]\n"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of conf/ that a test may add to."""
    monkeypatch.delenv("SPARSIFY_CONF", raising=False)
    without = shutil.ignore_patterns("local")  # what somebody has added
    copy = shutil.copytree(choices.CONF, tmp_path / "a 'b', c" / "conf", ignore=without)
    monkeypatch.setattr(choices, "CONF", copy)
    return copy


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("place", ["conf", "conf/local", "elsewhere"])
def test_a_file_of_ones_own_is_found_and_has_its_own_name_and_keys(
    conf: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = conf.parent / place
    put(folder / "cluster" / "mine.yaml", (conf / "cluster" / "generic_slurm.yaml").read_text())
    put(folder / "link" / "fast.yaml", (conf / "link" / "nvlink.yaml").read_text())
    put(folder / "method" / "few.yaml", "defaults: [topk]\ndensity: 1e-4\n")
    if place == "elsewhere":
        assert "mine" not in choices.option_names("cluster")
        monkeypatch.setenv("SPARSIFY_CONF", str(folder))
    assert "mine" in choices.option_names("cluster")
    mine = compose.resolve(["cluster=mine", "link=fast", "method=few"])
    assert mine["cluster"]["link"]["name"] == "fast"
    assert mine["method"] == {**method_of("method=topk"), "density": 1e-4}
    original = compose.resolve(["cluster=generic_slurm", "link=nvlink", "method=few"])
    copied = compose.resolve(["cluster=mine", "link=nvlink", "method=few"])
    assert {**copied["cluster"], "name": "generic_slurm"} == original["cluster"]
    assert run_key(mine) != run_key(original)


def test_folders_that_are_not_there_and_names_that_are_taken_are_refused(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(conf / "local" / "cluster" / "virtual.yaml", "where: virtual\n")
    with pytest.raises(ValueError, match=r"is in two files, .*/conf/cluster/.* and .*/local/"):
        compose.resolve(["cluster=virtual"])
    monkeypatch.setenv("SPARSIFY_CONF", str(conf / "nowhere"))
    with pytest.raises(ValueError, match=r"SPARSIFY_CONF names .*nowhere, and there is no such folder"):
        compose.resolve([])


# The text of a cluster's file, or what it adds to that of another, and the answer.
ADDED_TO_A_FILE = read_answers("""
partion: a -> no key 'cluster.partion' ... 'cluster.partition' ... a file of conf/
mem_gb: much -> cluster.mem_gb='much' ... a whole number
account: 010 -> mine.yaml, line 2: YAML reads 010 ... as 8 ... in quotes if it is text
account: 12:30:00 -> mine.yaml, line 2: YAML reads 12:30:00 ... as 45000
time_min: 1:30 -> mine.yaml, line 2: YAML reads 1:30 ... as 90 ... write the number
cpus_per_worker: 010 -> mine.yaml, line 2: YAML reads 010 ... as 8
account: 12345 -> cluster.account=12345 ... text in quotes: in its file ... account: '010'
account: 1e3 -> cluster.account=1000.0 ... text in quotes
qos: yes -> cluster.qos=true ... text in quotes
constraint: 0x1f -> cluster.constraint=31 ... text in quotes
setup: [off] -> cluster.setup=[false] ... text in quotes
account: [a] -> cluster.account=[a] is out of range ... control characters, or null
link: null -> cluster.link is null
""")
UNUSABLE_FILES = {
    **{f"{SLURMS}{' '.join(words)}\n": answer for words, answer in ADDED_TO_A_FILE.items()},
    "where: mars\ngpu: any\n": "no cluster.where 'mars'",
    **dict.fromkeys(("defaults: [nothing]", "a: [1", "- 1", "partition: ${nothing}"), "cluster=mine"),
    "": "cluster.where is missing",
    "defaults: [mine]\n": "cluster=mine ... include each other without end",
    "partition: " + "[" * 100 + "]" * 100: "mine.yaml ... more than 20 deep",
    "partition: &a [*a]\n": "mine.yaml, line 1: *a stands for a part that contains it",
    "a0: &a0 x\n" + DOUBLED: "mine.yaml comes to more than 2000 values, aliases replaced",
    "partition: " + "x" * 100_000: "mine.yaml has 100,011 bytes, and no such file has more than 65,536",
    "a0: x\n" + REFERRING: "refer 60 times to others as ${...}, of at most 20",
    "partition: a\npartition: b\n": "mine.yaml, line 2: found duplicate key partition",
    "partition: !!set {a}\n": "mine.yaml can't be read:  ... 'set'",
    "time_min: " + "9" * 5000: "mine.yaml can't be read:  ... 5000 digits",
}


def test_a_file_of_ones_own_that_can_not_be_used_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (text, answer) in enumerate(UNUSABLE_FILES.items()):
        folder = tmp_path / str(number)
        put(folder / "cluster" / "mine.yaml", text)
        monkeypatch.setenv("SPARSIFY_CONF", str(folder))
        with pytest.raises(ValueError, match=r".") as refusal:
            compose.resolve(["cluster=mine"])
        check_parts(str(refusal.value), answer)


def test_help_imports_neither_torch_nor_pandas() -> None:
    """That is what keeps it under a second."""
    script = (
        "import sys; from experiments.__main__ import main; code = main(['run', '--help']);"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules; sys.exit(code)"
    )
    done = fine(python("-c", script))
    for word in ("topk_layerwise", "method.density=0.001", "method.feedback=gradient", "virtual ranks"):
        assert word in done.stdout
