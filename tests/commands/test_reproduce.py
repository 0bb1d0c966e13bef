"""`reproduce`: missing runs, a picture, verdicts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from experiments import figures
from tests.conftest import Command, fine
from tests.launch.troubled import await_
from tests.worker.runs import end_command, manifests, start_command, wait_for

SECOND_ROUND = 10  # steps of both variants: of the smallest runs, two each of warm-up and in each round


@pytest.mark.extended
def test_two_processes_reproduce_a_figure_together_and_then_it_is_only_redrawn(
    here: Command, tmp_path: Path
) -> None:
    results, words = tmp_path / "results", ("reproduce", "fig1", "profile=smoke")
    both = [start_command(results, *words) for _ in range(2)]
    try:
        said = [process.communicate(timeout=200) for process in both]
    finally:
        for process in both:
            end_command(process)
    assert [process.returncode for process in both] == [0, 0], said
    assert any("2 runs, 2 missing" in err for _, err in said)
    assert any("another process is measuring this run" in err for _, err in said)
    assert all("Nothing here is judged" in out for out, _ in said)
    assert (results / "figures" / "fig1-smoke.png").is_file()
    assert all(manifest["rules"] == figures.claim_rule_digests() for manifest in manifests(results))

    assert "2 runs, 0 missing" in fine(here(*words)).stderr
    assert [(manifest["attempt"], manifest["state"]) for manifest in manifests(results)] == [(1, "ok")] * 2


@pytest.mark.extended
def test_ctrl_c_in_a_launch_leaves_its_picture_once_it_has_as_many_turns_as_asked(tmp_path: Path) -> None:
    results = tmp_path / "results"
    endless = ("alternate.blocks=1", "alternate.until=1e-9", "alternate.limit_min=60")
    process = start_command(results, "reproduce", "fig1", "profile=smoke", *endless)
    try:
        wait_for(results, "launch/*/progress.json")
        (note,) = results.glob("launch/*/progress.json")
        await_(lambda: json.loads(note.read_text())["step"] >= SECOND_ROUND, "the second round", 100)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, err = process.communicate(timeout=100)
    finally:
        end_command(process)
    assert process.returncode == 1
    assert "Traceback" not in out + err
    (manifest,) = manifests(results)
    assert (manifest["state"], manifest["alternated"]["stopped"]) == ("ok", "signal")
    assert "fig1-smoke.png, from 1 of 2 runs" in err
    caption = (results / "figures" / "fig1-smoke.md").read_text()
    assert "where somebody ended it" in caption
