"""Captions: what they say comes from the records, and what was not recorded is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.pictures import captions
from analysis.records.frames import Frames, empty_frames
from analysis.records.store import Store
from tests.analysis import synthetic


def timed(folder: Path, *runs: tuple[str, dict[str, Any]], **provenance: Any) -> Frames:
    """Add timed runs of these methods with these settings; return all runs of the folder."""
    store = Store(folder)
    for method, settings in runs:
        synthetic.timed(store, synthetic.config(method) | settings, **provenance)
    return synthetic.frames_of(store)


DENSE: tuple[str, dict[str, Any]] = ("dense", {})
TOPK: tuple[str, dict[str, Any]] = ("topk", {})


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    return timed(tmp_path, DENSE, ("topk", {"workers": 4}))


def test_a_setting_names_its_parts(frames: Frames) -> None:
    assert captions.describe_setting_with_remarks(frames) == (
        "vgg16_cifar10 on synthetic (digest 01234567), 2 and 4 worker processes x batch 32, "
        "on synthetic CPU (2 cores), torch 0.0.0, fp32."
    )
    assert captions.describe_machine(empty_frames()) == "unknown (unknown cores)"
    assert captions.distinct_values(frames, "method.density") == [0.001]  # dense has none
    assert captions.describe_timing_and_samples(frames) == (
        "Timing mode: serialised (synchronised at phase boundaries). "
        "Steps per worker: dense and Top-k n = 16 (first 4 dropped as warm-up)."
    )
    filled = captions.fill_caption("Of {count}. {setting} {label}", frames, {"count": 3, "label": "here"})
    assert filled == f"Of 3. {captions.describe_setting_with_remarks(frames)} here"


def test_precisions_are_those_that_were_got_and_are_not_mixed_in_silence(tmp_path: Path) -> None:
    for seed, got in enumerate((None, "fp32", "tf32")):
        asked = {"seed": seed, "precision": "tf32" if got else "fp32"}
        mixed = captions.describe_setting_with_remarks(timed(tmp_path, ("topk", asked), precision=got))
        assert mixed.endswith(", fp32." if seed < 2 else ", fp32 and tf32 (*mixed*).")


def test_a_caption_says_that_the_code_changed_between_the_runs(tmp_path: Path) -> None:
    assert "versions of the code" not in captions.describe_setting_with_remarks(timed(tmp_path, DENSE))
    uncommitted = timed(tmp_path, TOPK, dirty="abcdef123456")
    assert (
        "2 versions of the code*: 00000000 and 00000000+abcdef12"
        in captions.describe_setting_with_remarks(uncommitted)
    )
    three = timed(tmp_path, ("randomk", {}), commit="1" * 40)
    assert (
        "3 versions of the code*: 00000000, 00000000+abcdef12 and 11111111."
        in captions.describe_setting_with_remarks(three)
    )


def test_an_emulated_link_is_told_with_the_least_that_was_found_in_any_run(tmp_path: Path) -> None:
    found = {
        "asked_gbit_s": 1.0, "pairs_gbit_s": [0.95, 0.9], "together_gbit_s": 0.8, "asked_latency_s": 5e-5,
        "latency_s": 6e-5, "delay_s": 0.0,
    }  # fmt: skip
    timed(tmp_path, DENSE, machine={"link": found})
    frames = timed(tmp_path, TOPK, machine={"link": found | {"together_gbit_s": 0.7}})
    assert captions.describe_setting_with_remarks(frames).endswith(
        "fp32. Emulated links, as the workers found them: 1 Gbit/s asked, 0.9 found between two "
        "nodes, 0.7 with all sending at once, latency 60 us (not delayed; 50 us asked)."
    )
    for cpu_s, late, words in (  # of the relay, with the most that it had to do
        ([1.8, 1.7], [800, 900], "2.5 % of a core at most, with 2.2 % of packets over 1 ms late."),
        ([60, 70], [0, 0], "the relay, not the link, was the bottleneck"),
        ([1, 1], [0, 4100], "the relay, not the link, was the bottleneck"),
    ):
        relay = {"relay.cpu_s": cpu_s, "relay.late": late, "relay.seconds": 72.0, "relay.packets": 40_000}
        assert words in captions.emulated_link_measurements_remark(
            frames._replace(runs=frames.runs.assign(**relay))
        )


def test_a_label_says_what_was_found_and_not_what_to_do(tmp_path: Path) -> None:
    why = "gpu=a100 was asked for, but n1 has V100; choose another partition"
    frames = timed(tmp_path, DENSE, machine={"mismatch": [why]})
    assert captions.machine_mismatch_remark(frames) == (
        " *Not the machine that was named*: gpu=a100 was asked for, but n1 has V100."
    )


def test_lateness_on_purpose_is_told(tmp_path: Path) -> None:
    assert captions.lateness_remark(timed(tmp_path, DENSE)) == ""
    late = {"late": {"draw": "uniform", "s": 0.064, "spread": 0, "rank": 0}}
    frames = timed(tmp_path, ("dense", late), ("topk", late))
    text = " *Workers late on purpose*: late.draw=uniform, late.s=0.064 and late.rank=0."
    assert captions.lateness_remark(frames) == text
    assert text in captions.describe_timing_and_samples(frames)


def test_what_joins_simulated_nodes_is_told(tmp_path: Path) -> None:
    cluster = synthetic.learning_config()["cluster"]
    assert captions.describe_links(timed(tmp_path / "one", ("dense", {"cluster": cluster}))) == "loopback"
    nvlink = {"name": "nvlink", "alpha_s": 1e-6, "beta_s_per_byte": 1e-12}
    nodes = cluster | {"inside": nvlink, "workers_per_node": 8}
    frames = timed(tmp_path / "other", ("dense", {"cluster": nodes}))
    assert captions.describe_links(frames) == "loopback between nodes of 8, NVLink inside"
    assert "model of link loopback between nodes of 8" in captions.describe_timing_and_samples(frames)


def test_of_many_launches_the_turns_are_told_together_and_runs_of_no_group_are_left_out() -> None:
    launches = captions.MAX_SPELLED_OUT + 1
    of_group = pd.DataFrame({"group": [f"g{at}" for at in range(launches)], "alternated.stopped": "limit"})
    of_group["alternated.half_width"] = 0.01 * (1 + of_group.index)
    of_group[["alternate.block_steps", "alternate.limit_min"]] = (3, 1.0)
    runs = pd.concat([of_group.assign(variant="dense"), of_group.assign(variant="topk"), pd.DataFrame([{}])])
    text = captions.turns_remark(empty_frames()._replace(runs=runs))
    assert f"half-width of 1 to {launches} %: {launches} launches ended" in text
    assert "ratio to dense had" in text
