"""A results folder may come from anybody: nothing in it is carried out.

docs/records.md has the list of ways from a results folder to code, and names these tests.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.records import schema
from analysis.records.configs import configs_by_variant, flatten, measured_config, run_key
from analysis.records.files import DamagedFileError, read_struct_if_there, write_json
from analysis.records.store import DAMAGED
from analysis.report import pages
from experiments import figures
from experiments.commands import new, report
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.figures.runs import requested_runs
from experiments.launch import arrays, bad_nodes, submission
from experiments.training import checkpoint
from slurm.batch_script import BatchScript
from tests.analysis import synthetic
from tests.commands import damage
from tests.conftest import ROOT, Command, fine, python, refused

ROOMS = ("analysis", "experiments", "slurm", "sparsify")
ON_SLURM = ["method=topk", "task=cnn_digits", "profile=smoke", "cluster=devcluster"]
IN_TURNS = [
    "variants={dense:'method=dense',sparse:'method=topk'}", "task=cnn_digits", "profile=smoke",
    "timing.mode=production",
]  # fmt: skip
FULL = compose.resolve(ON_SLURM).as_dict()
MEASURED = measured_config(FULL)
STARTING = [  # leaves that say where and how a run is started, of a cluster that has all of them
    name
    for name in flatten(FULL)
    if name.startswith(("cluster.", "container.", "data.", "launch.", "profile", "recipe"))
    and name not in (*flatten(MEASURED), "container.name")
]


# --- words: run again=, compare --save
# --------------------------------------------------------------------------------------


def forge(config: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with leaves that its key does not cover."""
    forged: dict[str, Any] = json.loads(json.dumps(config))
    for dotted, value in leaves.items():
        if dotted.startswith("container."):  # of which records have the name
            forged["container"] = {"name": config["container"]}
        damage.put(forged, dotted, value)
    assert run_key(forged) == run_key(config)
    return forged


def test_no_record_says_where_and_how_a_run_is_started(here: Command, tmp_path: Path) -> None:
    assert len(STARTING) > 30
    for leaf in STARTING:
        with pytest.raises(ValueError, match="where and how a run is started is for you to say"):
            compose.rebuild_recorded_run({"": forge(MEASURED, {leaf: "/tmp/evil"})}, run_key(MEASURED))
    attempt = synthetic.made(ResultFolders(tmp_path / "results").store, FULL)
    evil = {"cluster.setup": ["touch owned"], "cluster.python": "/tmp/evil"}
    write_json(attempt.path / "config.json", forge(MEASURED, evil))
    compared = ("compare", "cluster=devcluster", "x=method.density", "y=step_s", "--save", "thesis_owned")
    for words in (("run", f"again={attempt.run_id}"), compared):
        refused(here(*words), "cluster.python, cluster.setup", "no record of a run does")


def test_a_variant_adds_nothing_either() -> None:
    config = measured_config(compose.resolve(IN_TURNS).as_dict())
    config["variants"][1]["cluster"] = {"setup": ["touch owned"]}
    with pytest.raises(ValueError, match=r"holds cluster\.setup"):
        compose.rebuild_recorded_run(configs_by_variant(config), run_key(config))


def test_words_of_a_record_set_what_is_measured_alone() -> None:
    words = compose.rebuild_recorded_run({"": MEASURED}, run_key(MEASURED)).to_words()
    assert not {word.partition("=")[0] for word in words} & {*STARTING}


def test_a_figure_that_compare_saves_holds_texts_as_texts() -> None:
    for text in ('"]; print(1) #', "'''", '"""', "\\", "{{ 1 }}", "\n\nprint(1)", "\u2028", "a'b\"c"):
        written = new.render_comparison_figure("thesis_density", text, [[text]], {"x": text, "y": "step_s"})
        names: dict[str, Any] = {}
        exec(compile(written.replace("= Comparison(", "= dict("), "thesis_density.py", "exec"), names)
        assert (names["TITLE"], names["RUNS"], names["COMPARED"]["x"]) == (text, [[text]], text)


def test_a_command_to_type_quotes_the_name_of_a_folder(here: Command, tmp_path: Path) -> None:
    (tmp_path / "results" / "runs" / "a;touch owned").mkdir(parents=True)
    refused(here("trace", "a;touch"), "why 'a;touch owned'` says why")


# --- scripts of jobs, and words of SLURM's programs
# --------------------------------------------------------------------------------------


def test_no_ledger_writes_a_line_into_a_jobs_script(tmp_path: Path) -> None:
    configs = requested_runs(("fig3", "cluster=devcluster", "container=none"))[1]
    array, *_ = arrays.group_into_arrays(
        [PlannedRun(config, None) for config in configs], one_job_per_group=False
    )
    ledger = tmp_path / bad_nodes.LEDGER_FILE
    bad = ("n1\ntouch owned #", "n1 --wrap=owned", "--help", "$(touch owned)", "n1;touch owned", "", "n1,n2")
    for node in bad:
        for name, at in product((node, "n9"), ("2026-01-01T01:00:00Z", "2026-01-01T02:00:00Z")):
            bad_nodes.append_node_failure(ledger, name, "7", at)
        write_json(tmp_path / "worker0.json", {"node": node})
        assert bad_nodes.find_failure_time_by_node("7", tmp_path) == {}
    text = BatchScript(array.sbatch_options("a", tmp_path, tmp_path, ledger), [], [], []).text
    assert "#SBATCH --exclude=n9\n" in text
    assert "touch" not in text


def test_no_option_of_a_job_has_a_line_break() -> None:
    for name in ("partition", "chdir", "output"):
        with pytest.raises(ValueError, match="has a line break"):
            _ = BatchScript({"job-name": "a", name: "a\ntouch owned"}, [], [], []).text


def test_no_id_of_a_job_is_more_than_a_number(tmp_path: Path) -> None:
    attempt = synthetic.made(ResultFolders(tmp_path).store, FULL)
    for text in ("1 --wrap=owned", "--help", "1\n2", "$(touch owned)"):
        for job in ({"id": text}, {"id": "7", "cluster": f"{text}\n"}):
            write_json(attempt.path / "job.json", job)
            assert attempt.slurm_job.id is None
        array = {"nodes": 1, "jobs": [{"id": text, "runs": []}]}
        write_json(tmp_path / "sweep.json", {"name": "runs-001", "created": "", "arrays": [array]})
        with pytest.raises(DamagedFileError, match="is not as it was written"):
            read_struct_if_there(tmp_path / "sweep.json", schema.Sweep)


def test_a_submission_reads_nothing_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "runs-003").mkdir()
    (tmp_path / "runs-004").symlink_to(tmp_path)
    assert [submission._make_numbered_folder(tmp_path, "runs").name for _ in range(2)] == [
        "runs-005",
        "runs-006",
    ]


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
    with pytest.raises(checkpoint.DamagedStateError, match="holds more than numbers"):
        checkpoint.read_verified_state(path, {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    assert not Path("owned").exists()
    pickle.loads(pickle.dumps(Owning()))
    assert Path("owned").exists()  # as it would have been


def test_a_report_takes_no_name_of_a_file_from_what_was_kept(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    site = pages.ReportSite(folders.report)
    shipped = report.ShippedRecords(folders, [])
    made_from = {}
    for figure in map(figures.load, figures.files_by_item()):
        for profile in figure.profiles:
            stem = figure.file_stem(profile)
            made_from[stem] = report.digest_item_page(figure, profile, folders, shipped)
            site.store_for_next_report(stem, made_from[stem], [])
    for forged in (
        {"stem": "../../../owned"},
        {"name": "fig2"},
        {"files": {"png": "/etc/passwd"}},
    ):
        kept = {"name": "fig1", "stem": "fig1-smoke", "title": "A stranger's", **forged}
        site.store_for_next_report("fig1-smoke", made_from["fig1-smoke"], [kept])
        titles = [item.title for item in report.make_item_pages(site, folders, shipped, draws=False)]
        assert "A stranger's" not in titles


# --- names of files
# --------------------------------------------------------------------------------------


def test_no_name_leads_out_of_its_folder(tmp_path: Path) -> None:
    attempt = synthetic.made(ResultFolders(tmp_path).store, FULL)
    manifest = json.loads((attempt.path / "run.json").read_text())
    for name in ("..", ".", "a/b", "/etc", "a\nb", "", "a" * 256):
        for forged in ({"sweep": name}, {"files": {name: {"bytes": 1, "sha256": "0" * 64}}}):
            write_json(attempt.path / "run.json", manifest | forged)
            assert attempt.state == DAMAGED, forged
        write_json(tmp_path / "index.json", {"runs": [name]})
        with pytest.raises(DamagedFileError):
            read_struct_if_there(tmp_path / "index.json", schema.RunIdList)


# --- loading
# --------------------------------------------------------------------------------------


def test_no_source_loads_what_could_be_code() -> None:
    rules = "S102,S301,S302,S307,S506,S602,S604,S605"  # eval, exec, pickle, marshal, yaml, shells
    own_files = ("--per-file-ignores", "sparsify/core/spec.py:S102")  # it reads signatures of the checkout
    fine(python("-m", "ruff", "check", "--isolated", "--ignore-noqa", "--select", rules, *own_files, *ROOMS))
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"torch\.load\((?!.*weights_only=True)|allow_pickle=True", text), path
