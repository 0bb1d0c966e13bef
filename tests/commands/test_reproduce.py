"""`reproduce`: missing runs, a picture, verdicts."""

from __future__ import annotations

from pathlib import Path

from experiments import figures
from tests.conftest import Command
from tests.worker.runs import end_command, manifests, start_command


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
    for out, _ in said:
        assert "Nothing here is judged" in out
    drawn = {path.name for path in (results / "figures").iterdir()}
    assert drawn == {f"fig1-smoke.{kind}" for kind in ("png", "pdf", "svg", "md", "csv", "tex", "bib")}

    assert all(manifest["rules"] == figures.rules() for manifest in manifests(results))

    again = here(*words)
    assert again.returncode == 0
    assert "2 runs, 0 missing" in again.stderr
    assert [(manifest["attempt"], manifest["state"]) for manifest in manifests(results)] == [(1, "ok")] * 2
