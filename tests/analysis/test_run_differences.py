"""Differences between two runs: what can explain a difference in time comes first."""

from __future__ import annotations

from typing import Any

from analysis.run_differences import (
    EXPLAINS,
    MAY_EXPLAIN,
    NOT_RECORDED,
    ONE_SIDED,
    WITHIN_TOLERANCE,
    differences_text,
    find_run_differences,
    shared_outcomes_text,
)


def manifest(**provenance: Any) -> dict[str, Any]:
    machine_found = {
        "hosts": ["gpu33"],
        "workers": [{"gpu": "NVIDIA A100-SXM4-80GB", "bus": f"00000000:{bus:02X}:00.0"} for bus in range(8)],
        "bus_bandwidth": 203.0,
        "probe_s": [[1e-3] * 5] * 8,
    }
    before = {"load": 0.5, "gpu": {"clocks.sm": "1410", "driver_version": "535"}}
    common = {"host": "gpu33", "image": None, "commit": "abc", "machine": machine_found, "before": before}
    return {
        "schema": 1, "started": "2026-11-21T08:12:19Z", "config": {"method": {"name": "topk"}, "workers": 8},
        "provenance": {**common, **provenance},
    }  # fmt: skip


def weights(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return {difference.field: difference.weight for difference in find_run_differences(a, b)}


def test_what_can_explain_a_time_comes_first() -> None:
    other = manifest(commit="def", host="gpu34", slurm={"SLURM_JOB_ID": "7"})
    other["config"] = {"method": {"name": "dense"}, "workers": 8, "comm": "horovod"}
    workers = [{"gpu": "Tesla V100-SXM2-32GB", "bus": "00000000:10:00.0"}] * 8
    other["provenance"]["machine"]["workers"] = workers
    other["started"] = "2026-11-22T08:12:19Z"
    assert (
        differences_text(find_run_differences(manifest(), other), "RUN", "RUN2")
        == """\
A: RUN
B: RUN2

can explain a difference in time
                       A                                   B
  config.comm          not set                             horovod
  config.method.name   topk                                dense
  machine.workers.gpu  8 x NVIDIA A100-SXM4-80GB           8 x Tesla V100-SXM2-32GB
  commit               abc                                 def
  host                 gpu33                               gpu34

recorded on one side only
                       A                                   B
  slurm                not recorded                        SLURM_JOB_ID 7

explains nothing: machine, started"""
    )


def test_drift_within_tolerance_is_listed_as_the_same() -> None:
    for clock, bandwidth, weight in (
        ("1380", 190.0, WITHIN_TOLERANCE),
        ("1200", 18.0, EXPLAINS),
        ("?", 18.0, EXPLAINS),
    ):
        other = manifest()
        other["provenance"]["before"]["gpu"]["clocks.sm"] = clock
        other["provenance"]["machine"]["bus_bandwidth"] = bandwidth
        assert weights(manifest(), other) == {"before.gpu.clocks.sm": weight, "machine.bus_bandwidth": weight}


def test_older_records_did_not_record_everything() -> None:
    old = manifest(platform="Linux")
    del old["provenance"]["machine"]
    found = find_run_differences(old, manifest(platform="Linux 6"))
    assert [(difference.field, difference.a, difference.weight) for difference in found] == [
        ("platform", "Linux", MAY_EXPLAIN),
        ("machine", NOT_RECORDED, ONE_SIDED),
    ]
    assert "nothing that both runs recorded explains" in differences_text(found, "old", "new")
    assert find_run_differences(old, old) == []


def test_an_image_is_compared_by_its_digest() -> None:
    plain, one, other = (manifest(image=sha and {"name": "cpu", "sha256": sha}) for sha in (None, "12", "34"))
    assert weights(plain, one) == {"image": EXPLAINS}
    assert weights(one, other) == {"image.sha256": EXPLAINS}


def test_outcomes_come_with_units_and_with_what_changed() -> None:
    here = {"val_top1": 50.0, "step_s": 0.2, "wire_bytes": 1000.0, "val_loss": float("nan")}
    there = {"val_top1": 48.5, "step_s": 0.1, "wire_bytes": 4000.0, "val_loss": 1.0}
    assert (
        shared_outcomes_text(here, there)
        == """\
what they came to
                        A                                   B                   from A to B
  top-1                 50 %                                48.5 %              -1.5 points
  step                  200 ms                              100 ms              x 0.5
  sent in a step        1 kB                                4 kB                x 4"""
    )
    assert "simulated" in shared_outcomes_text(here, {**there, "simulated": True})
    assert shared_outcomes_text({}, there) == ""
