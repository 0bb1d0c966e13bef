"""A results folder may come from anybody: nothing in it is carried out.

docs/records.md has the list of ways from a results folder to code, and names these tests.
"""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.records import schema
from analysis.records.configs import flatten, measured_config, run_key, variant_configs
from analysis.records.files import Damaged, read_as, write_json
from analysis.records.store import DAMAGED, Attempt
from analysis.report import pages
from experiments import figures
from experiments.commands import new, report
from experiments.commands._again import asked
from experiments.config import compose
from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun
from experiments.figures.runs import name_and_configs
from experiments.launch import arrays, bad_nodes, submission
from experiments.training import checkpoint
from slurm.submit import sbatch_text
from tests.analysis import synthetic
from tests.conftest import ROOT, Command, environment_for, fine, process, refused

ROOMS = ("analysis", "experiments", "slurm", "sparsify")
ON_SLURM = ["method=topk", "task=cnn_digits", "profile=smoke", "cluster=devcluster"]
IN_TURNS = [
    "variants={dense:'method=dense',sparse:'method=topk'}", "task=cnn_digits", "profile=smoke",
    "timing.mode=production",
]  # fmt: skip
EVIL = {"cluster.setup": ["touch owned"], "cluster.python": "/tmp/evil"}
FULL = compose.resolve(ON_SLURM).as_dict()
STARTING = [  # leaves that say where and how a run is started, of a cluster that has all of them
    name
    for name in flatten(FULL)
    if name.startswith(("cluster.", "container.", "data.", "launch.", "profile", "recipe"))
    and name not in (*flatten(measured_config(FULL)), "container.name")
]


def forged(folders: Folders, words: list[str], leaves: dict[str, Any]) -> Attempt:
    """A record to whose configuration leaves were added that its key does not cover."""
    attempt = synthetic.made(folders.store, compose.resolve(words).as_dict())
    path = attempt.path / "config.json"
    config = json.loads(path.read_text())
    key = run_key(config)
    for dotted, value in leaves.items():
        *above, name = dotted.split(".")
        part = config
        for each in above:
            if isinstance(part.get(each), str):  # of a container, records have the name
                part[each] = {"name": part[each]}
            part = part.setdefault(each, {})
        part[name] = value
    assert run_key(config) == key
    path.write_text(json.dumps(config))
    return attempt


# --- words: run again=, compare --save
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", STARTING)
def test_no_record_says_where_and_how_a_run_is_started(leaf: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    attempt = forged(folders, ON_SLURM, {leaf: "/tmp/evil"})
    with pytest.raises(ValueError, match="where and how a run is started is for you to say"):
        asked([f"again={attempt.run_id}"], folders)


def test_what_a_record_adds_to_its_settings_is_refused_in_a_sentence(here: Command, tmp_path: Path) -> None:
    attempt = forged(Folders(tmp_path / "results"), ON_SLURM, EVIL)
    refused(
        here("run", f"again={attempt.run_id}"), "cluster.python, cluster.setup", "no record of a run does"
    )
    where = ("compare", "cluster=devcluster", "x=method.density", "y=step_s", "--save", "thesis_owned")
    refused(here(*where), "cluster.python, cluster.setup", "no record of a run does")


def test_a_variant_adds_nothing_either(tmp_path: Path) -> None:
    config = measured_config(compose.resolve(IN_TURNS).as_dict())
    config["variants"][1]["cluster"] = {"setup": ["touch owned"]}
    with pytest.raises(ValueError, match=r"holds cluster\.setup"):
        compose.asked_again(variant_configs(config), run_key(config))


def test_words_of_a_record_set_what_is_measured_alone() -> None:
    config = measured_config(compose.resolve(ON_SLURM).as_dict())
    words = compose.asked_again({"": config}, run_key(config)).words()
    assert {word.partition("=")[0] for word in words} & {*STARTING} == set()


TEXTS = ['"]; print(1) #', "'''", '"""', "\\", "{{ 1 }}", "\n\nprint(1)", "\u2028", "a'b\"c"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_figure_that_compare_saves_holds_texts_as_texts(text: str) -> None:
    written = new.figure("thesis_density", text, [[text]], {"x": text, "y": "step_s"})
    names: dict[str, Any] = {}
    exec(compile(written.replace("= Comparison(", "= dict("), "thesis_density.py", "exec"), names)
    assert (names["TITLE"], names["RUNS"], names["COMPARED"]["x"]) == (text, [[text]], text)


# --- scripts of jobs, and words of SLURM's programs
# --------------------------------------------------------------------------------------

NO_NODES = ["n1\ntouch owned #", "n1 --wrap=owned", "--help", "$(touch owned)", "n1;touch owned", "", "n1,n2"]


@pytest.mark.parametrize("node", NO_NODES)
def test_no_ledger_writes_a_line_into_a_jobs_script(node: str, tmp_path: Path) -> None:
    ledger, start = tmp_path / bad_nodes.LEDGER, tmp_path / "start"
    for hour in (1, 2):
        bad_nodes.note_failure(ledger, node, "7", f"2026-01-01T0{hour}:00:00Z")
        bad_nodes.note_failure(ledger, "n9", "7", f"2026-01-01T0{hour}:00:00Z")
    words = ("fig3", "cluster=devcluster", "container=none")
    (array, *_) = arrays.arrays([PlannedRun(config, None) for config in name_and_configs(words)[1]], False)
    text = sbatch_text(tmp_path, array.options("a", tmp_path, tmp_path, ledger), "python", 1)
    assert "#SBATCH --exclude=n9\n" in text
    assert "touch" not in text
    start.mkdir()
    (start / "worker0.json").write_text(json.dumps({"node": node}))
    assert bad_nodes.failed_nodes("7", start) == {}


@pytest.mark.parametrize("name", ["partition", "exclude", "comment", "additional_parameters"])
def test_no_option_of_a_job_has_a_line_break(name: str, tmp_path: Path) -> None:
    value = {"chdir": "a\ntouch owned"} if name == "additional_parameters" else "a\ntouch owned"
    with pytest.raises(ValueError, match="has a line break"):
        sbatch_text(tmp_path, {"job_name": "a", "time": 5, name: value}, "python", 1)
    with pytest.raises(ValueError, match="has a line break"):
        sbatch_text(tmp_path / "a\nb", {"job_name": "a", "time": 5}, "python", 1)


# --- a person's shell
# --------------------------------------------------------------------------------------


def test_no_folders_name_reaches_a_shell_at_a_tab(tmp_path: Path) -> None:
    names = [
        "$(touch owned)",
        "`touch owned`",
        "a;touch owned",
        "-rf",
        "a b",
        "a\nb",
        "*",
        "~",
        "none-0-abcd",
    ]
    for parent in ("runs", "sweeps"):
        for name in names:
            (tmp_path / parent / name).mkdir(parents=True)
    python, line = shlex.quote(sys.executable), "python -m experiments why "
    script = (
        f'eval "$({python} -m experiments completion bash)"; COMP_WORDS=({line} ""); COMP_LINE={line!r};'
        f"COMP_POINT={len(line)}; _python_m_experiments {python} 2>&1; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = fine(process("bash", "-c", script, env=environment_for(tmp_path)))
    offered = {word.strip() for word in done.stdout.splitlines() if not word.startswith("-")}
    assert offered == {"none-0-abcd"}


def test_a_command_to_type_quotes_the_name_of_a_folder(here: Command, tmp_path: Path) -> None:
    (tmp_path / "results" / "runs" / "a;touch owned").mkdir(parents=True)
    refused(here("trace", "a;touch"), "why 'a;touch owned'` says why")


# --- what is kept to save time
# --------------------------------------------------------------------------------------


class Owning:
    """A pickle that runs a program where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", "owned"],)


def test_a_checkpoint_is_read_as_numbers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rank0.pt"
    torch.save({"weights": Owning()}, path)
    raw = path.read_bytes()
    with pytest.raises(checkpoint.Faulty, match="holds more than numbers"):
        checkpoint.read_state(path, {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    assert not Path("owned").exists()
    pickle.loads(pickle.dumps(Owning()))
    assert Path("owned").exists()  # as it would have been


OF_STRANGER = {"name": "fig1", "stem": "fig1-smoke", "title": "A stranger's"}
KEPT = {
    "a page elsewhere": OF_STRANGER | {"stem": "../../../owned"},
    "another figure": OF_STRANGER | {"name": "fig2"},
    "a file of somebody's": OF_STRANGER | {"files": {"png": "/etc/passwd"}},
}


@pytest.mark.parametrize("what", KEPT)
def test_a_report_takes_no_name_of_a_file_from_what_was_kept(what: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    site, shipped = pages.Site(folders.report), report.Shipped(folders, [])
    for item in figures.items():
        for profile in figures.profiles(item):
            rows = [KEPT[what]] if (item, profile) == ("fig1", "smoke") else []
            made_from = report._made_from(item, profile, folders, shipped)
            site.keep(figures.stem(item, profile), made_from, rows)
    titles = [item.title for item in report._items(site, folders, shipped, draws=False)]
    assert "A stranger's" not in titles


@pytest.mark.parametrize("text", ["1 --wrap=owned", "--help", "1;touch owned", "1\n2", "$(touch owned)", "x"])
def test_no_id_of_a_job_is_more_than_a_number(text: str, tmp_path: Path) -> None:
    attempt = synthetic.made(Folders(tmp_path).store, compose.resolve(ON_SLURM).as_dict())
    (attempt.path / "job.json").write_text(json.dumps({"id": text}))
    assert attempt.job.id is None
    (attempt.path / "job.json").write_text(json.dumps({"id": "7", "cluster": f"{text}\n"}))
    assert attempt.job.id is None
    array = {"nodes": 1, "jobs": [{"id": text, "runs": []}]}
    sweep = {"name": "runs-001", "created": "", "arrays": [array]}
    write_json(tmp_path / "sweep.json", sweep)
    with pytest.raises(Damaged, match="is not as it was written"):
        read_as(tmp_path / "sweep.json", schema.Sweep)


def test_a_submission_reads_nothing_that_was_there(tmp_path: Path) -> None:
    for name in ("runs-001", "runs-003"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs-004").symlink_to(tmp_path)
    assert [submission._new_folder(tmp_path, "runs").name for _ in range(2)] == ["runs-005", "runs-006"]


# --- names of files
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/etc", "a\nb", "", "../../owned", "a" * 256])
def test_no_name_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    attempt = synthetic.made(Folders(tmp_path).store, compose.resolve(ON_SLURM).as_dict())
    manifest = json.loads((attempt.path / "run.json").read_text())
    for field, value in (("sweep", name), ("files", {name: {"bytes": 1, "sha256": "0" * 64}})):
        write_json(attempt.path / "run.json", manifest | {field: value})
        assert attempt.state == DAMAGED, field
    write_json(tmp_path / "index.json", {"runs": [name]})
    with pytest.raises(Damaged):
        read_as(tmp_path / "index.json", schema.RunIndex)


# --- loading
# --------------------------------------------------------------------------------------

# Of a call the name, and the argument by which it is harmless, if any does that.
LOADING: dict[str, str | None] = {
    "eval": None, "exec": None, "pickle.load": None, "pickle.loads": None, "marshal.loads": None,
    "shelve.open": None, "os.system": None, "os.popen": None, "pd.read_pickle": None, "yaml.load": None,
    "yaml.unsafe_load": None, "torch.load": "weights_only",
}  # fmt: skip


def test_no_source_loads_what_could_be_code() -> None:
    faults = list[str]()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                name, is_shell = ast.unparse(node.func), given.get("shell") == "True"
                is_loading = name in LOADING and given.get(LOADING[name]) != "True"
                if is_loading or is_shell or given.get("allow_pickle") == "True":
                    faults.append(f"{path}:{node.lineno}: {name}")
    assert faults == []
