"""Captions: what they say comes from the records, and what was not recorded is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.pictures import captions
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty, restrict
from analysis.records.store import Store
from tests.analysis import synthetic


def timed(folder: Path, *runs: tuple[str, dict[str, Any]], **told: Any) -> Frames:
    """Timed runs of these methods with these settings, and what `synthetic.timed` takes besides."""
    store = Store(folder)
    for method, own in runs:
        synthetic.timed(store, synthetic.config(method) | own, **told)
    return from_attempts(store.all_valid())[0]


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    return timed(tmp_path, ("dense", {}), ("topk", {"workers": 4}))


@pytest.mark.parametrize(
    ("items", "text"),
    [([], "unknown"), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", 3], "a, b and 3")],
)
def test_lists_are_read_as_sentences(items: list[object], text: str) -> None:
    assert captions.listed(items) == text


def test_values_are_distinct_sorted_and_whole_where_they_are(frames: Frames) -> None:
    assert captions.values(frames, "workers") == [2, 4]
    assert captions.values(frames, "seed") == [0]
    assert captions.values(frames, "method.density") == [0.001]  # dense has none
    assert captions.values(frames, "no such column") == []


def test_a_setting_names_its_parts(frames: Frames) -> None:
    assert captions.setting(frames) == (
        "vgg16_cifar10 on synthetic (digest 01234567), 2 and 4 worker processes x batch 32, "
        "on synthetic CPU (2 cores), torch 0.0.0, fp32."
    )
    assert captions.machine(empty()) == "unknown (unknown cores)"


def test_precisions_are_those_that_were_got_and_are_not_mixed_in_silence(tmp_path: Path) -> None:
    for seed, got in enumerate((None, "fp32", "tf32")):
        asked = {"seed": seed, "precision": "tf32" if got else "fp32"}
        mixed = captions.setting(timed(tmp_path, ("topk", asked), precision=got))
        assert mixed.endswith(", fp32." if seed < 2 else ", fp32 and tf32 (*mixed*).")


def test_samples_are_counted_per_method(frames: Frames) -> None:
    assert captions.timing(frames) == (
        "Timing mode: serialised (synchronised at phase boundaries). "
        "Steps per worker: dense and Top-k n = 16 (first 4 dropped as warm-up)."
    )


def test_a_caption_says_that_the_code_changed_between_the_runs(tmp_path: Path) -> None:
    timed(tmp_path, ("dense", {}))
    frames = timed(tmp_path, ("topk", {}), commit="1" * 40)
    said = "*Measured with 2 versions of the code*: 00000000 and 11111111."
    assert said in captions.setting(frames)
    one = frames._replace(runs=frames.runs.iloc[:1])
    assert "versions of the code" not in captions.setting(one)


def test_changes_that_were_not_committed_are_another_version(tmp_path: Path) -> None:
    timed(tmp_path, ("dense", {}))
    frames = timed(tmp_path, ("topk", {}), dirty="abcdef123456")
    assert "2 versions of the code*: 00000000 and 00000000+abcdef12" in captions.setting(frames)


def test_a_run_without_a_gpu_is_on_none() -> None:
    none = empty()._replace(runs=pd.DataFrame({"provenance.gpu": ["NVIDIA H200", None]}))
    assert not captions.is_on(none, "")
    both = none._replace(runs=pd.DataFrame({"provenance.gpu": ["NVIDIA H200", "NVIDIA A100"]}))
    assert captions.is_on(both, "NVIDIA")
    assert not captions.is_on(both, "A100")


def test_an_emulated_link_is_told_with_the_least_that_was_found_in_any_run(tmp_path: Path) -> None:
    found = {
        "asked_gbit_s": 1.0, "pairs_gbit_s": [0.95, 0.9], "together_gbit_s": 0.8, "asked_latency_s": 5e-5,
        "latency_s": 6e-5, "delay_s": 0.0,
    }  # fmt: skip
    timed(tmp_path, ("dense", {}), machine={"link": found})
    frames = timed(tmp_path, ("topk", {}), machine={"link": found | {"together_gbit_s": 0.7}})
    assert captions.setting(frames).endswith(
        "fp32. Emulated links, as the workers found them: loopback 1 Gbit/s asked, 0.9 found between two "
        "nodes, 0.7 with all sending at once, latency 60 us (not delayed; 50 us asked)."
    )


@pytest.mark.parametrize(("cpu_s", "late", "is_told"), [(60, 3999, False), (70, 0, True), (1, 4100, True)])
def test_a_relay_that_was_the_bottleneck_is_called_so(cpu_s: float, late: int, is_told: bool) -> None:
    work = {"relay.cpu_s": cpu_s, "relay.seconds": 72.0, "relay.late": late, "relay.packets": 40_000}
    told = captions._relayed(pd.DataFrame([work]))
    assert ("the relay, not the link, was the bottleneck" in told) == is_told


def test_a_relay_is_told_with_the_most_that_it_had_to_do(tmp_path: Path) -> None:
    found = {
        "asked_gbit_s": 0.1, "pairs_gbit_s": [0.0995], "together_gbit_s": 0.0994, "asked_latency_s": 0.05,
        "latency_s": 0.0507, "delay_s": 0.05,
    }  # fmt: skip
    frames = timed(tmp_path, ("dense", {}), ("topk", {}), machine={"link": found})
    work = {"relay.cpu_s": 1.8, "relay.seconds": 72.0, "relay.late": 800, "relay.packets": 40_000}
    told = pd.concat([frames.runs, pd.DataFrame([work, work | {"relay.late": 900}])], axis="columns")
    assert captions.emulated(frames._replace(runs=told)).endswith(
        "latency 50,700 us (50,000 us asked) by a relay that took 2.5 % of a core at most, with 2.2 % of "
        "packets over 1 ms late."
    )


def test_a_label_says_what_was_found_and_not_what_to_do(tmp_path: Path) -> None:
    why = "gpu=a100 was asked for, but n1 has V100; choose another partition"
    frames = timed(tmp_path, ("dense", {}), machine={"mismatch": [why]})
    assert captions.label(frames) == (
        " *Not the machine that was named*: gpu=a100 was asked for, but n1 has V100."
    )


def test_lateness_on_purpose_is_told(tmp_path: Path) -> None:
    late = {"late": {"draw": "uniform", "s": 0.064, "spread": 0, "rank": 0}}
    frames = timed(tmp_path, ("dense", late), ("topk", late), ("dense", {}))
    said = " *Workers late on purpose*: late.draw=uniform, late.s=0.064 and late.rank=0."
    assert captions.late(frames) == said
    assert said in captions.timing(frames)
    assert captions.late(restrict(frames, list(frames.runs["key"][frames.runs["late.draw"].isna()]))) == ""


def test_what_joins_simulated_nodes_is_told(tmp_path: Path) -> None:
    base = synthetic.learning_config("dense")
    nvlink = {"name": "nvlink", "alpha_s": 1e-6, "beta_s_per_byte": 1e-12}
    nodes = base["cluster"] | {"inside": nvlink, "workers_per_node": 8}
    one = timed(tmp_path / "one", ("dense", {"cluster": base["cluster"]}))
    assert captions.joined(one) == "loopback"
    frames = timed(tmp_path / "other", ("dense", {"cluster": nodes}))
    assert captions.joined(frames) == "loopback between nodes of 8, nvlink inside"
    assert "model of link loopback between nodes of 8" in captions.timing(frames)


def test_braces_hold_facts_of_the_item_or_sentences_on_its_records(frames: Frames) -> None:
    told = captions.filled("Of {count}. {setting}", frames, {"count": 3})
    assert told == f"Of 3. {captions.setting(frames)}"
    assert captions.filled("{setting}", frames, {"setting": "here"}) == "here"


def test_seeds_are_counted_by_seed_whatever_else_runs_of_a_method_differ_in(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method, seeds in (("dense", 2), ("topk", 3)):
        for seed in range(seeds):
            for workers in (4, 8):
                synthetic.ended(store, synthetic.learning_config(method, seed, workers=workers), 50.0, 1.0)
    told = captions.training(from_attempts(store.all_valid())[0])
    assert "; 2 seeds per method." in told


def test_of_many_launches_the_turns_are_told_together_and_runs_of_no_group_are_left_out() -> None:
    groups = [f"g{at}" for at in range(captions.FEW + 1)]
    rows: list[dict[str, Any]] = [
        {"group": group, "variant": variant, "alternate.block_steps": 3, "alternate.limit_min": 1.0,
         "alternated.half_width": 0.01 * (at + 1), "alternated.stopped": "limit"}
        for at, group in enumerate(groups)
        for variant in ("dense", "topk")
    ]  # fmt: skip
    frames = empty()._replace(runs=pd.DataFrame([*rows, {"group": None, "variant": None}]))
    told = captions.turns(frames)
    assert f"half-width of 1 to {len(groups)} %: {len(groups)} launches ended" in told
    assert "ratio to dense had" in told
