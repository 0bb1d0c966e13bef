"""Captions: what they say comes from the records, and what was not recorded is unknown."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.pictures import captions
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty, restrict
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config("dense"))
    synthetic.timed(store, synthetic.config("topk") | {"workers": 4})
    return from_attempts(store.all_valid())[0]


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
    store = Store(tmp_path)
    for seed, got in enumerate((None, "fp32", "tf32")):
        asked = synthetic.config("topk") | {"seed": seed, "precision": "tf32" if got else "fp32"}
        synthetic.timed(store, asked, precision=got)
        mixed = captions.setting(from_attempts(store.all_valid())[0])
        assert mixed.endswith(", fp32." if seed < 2 else ", fp32 and tf32 (*mixed*).")


def test_samples_are_counted_per_method(frames: Frames) -> None:
    assert captions.timing(frames) == (
        "Timing mode: serialised (synchronised at phase boundaries). "
        "Steps per worker: dense and Top-k n = 16 (first 4 dropped as warm-up)."
    )


def test_a_caption_says_that_the_code_changed_between_the_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config("dense"))
    synthetic.timed(store, synthetic.config("topk"), commit="1" * 40)
    frames, _ = from_attempts(store.all_valid())
    said = "*Measured with 2 versions of the code*: 00000000 and 11111111."
    assert said in captions.setting(frames)
    one = frames._replace(runs=frames.runs.iloc[:1])
    assert "versions of the code" not in captions.setting(one)


def test_changes_that_were_not_committed_are_another_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config("dense"))
    synthetic.timed(store, synthetic.config("topk"), dirty="abcdef123456")
    frames, _ = from_attempts(store.all_valid())
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
    store = Store(tmp_path)
    for method, together in (("dense", 0.8), ("topk", 0.7)):
        link = found | {"together_gbit_s": together}
        synthetic.timed(store, synthetic.config(method), machine={"link": link})
    said = captions.setting(from_attempts(store.all_valid())[0])
    assert said.endswith(
        "fp32. Emulated links, as the workers found them: loopback 1 Gbit/s asked, 0.9 found between two "
        "nodes, 0.7 with all sending at once, latency 60 us (not delayed; 50 us asked)."
    )


def test_a_label_says_what_was_found_and_not_what_to_do(tmp_path: Path) -> None:
    store, why = Store(tmp_path), "gpu=a100 was asked for, but n1 has V100; choose another partition"
    synthetic.timed(store, synthetic.config("dense"), machine={"mismatch": [why]})
    frames = from_attempts(store.all_valid())[0]
    assert captions.label(frames) == (
        " *Not the machine that was named*: gpu=a100 was asked for, but n1 has V100."
    )


def test_lateness_on_purpose_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    late = {"draw": "uniform", "s": 0.064, "spread": 0, "rank": 0}
    for method, told in (("dense", {"late": late}), ("topk", {"late": late}), ("dense", {})):
        synthetic.timed(store, synthetic.config(method) | told)
    frames = from_attempts(store.all_valid())[0]
    said = " *Workers late on purpose*: late.draw=uniform, late.s=0.064 and late.rank=0."
    assert captions.late(frames) == said
    assert said in captions.timing(frames)
    assert captions.late(restrict(frames, list(frames.runs["key"][frames.runs["late.draw"].isna()]))) == ""


def test_what_joins_simulated_nodes_is_told(tmp_path: Path) -> None:
    store, base = Store(tmp_path), synthetic.learning_config("dense")
    nvlink = {"name": "nvlink", "alpha_s": 1e-6, "beta_s_per_byte": 1e-12}
    nodes = base["cluster"] | {"inside": nvlink, "workers_per_node": 8}
    synthetic.timed(store, synthetic.config("dense") | {"cluster": base["cluster"]})
    assert captions.joined(from_attempts(store.all_valid())[0]) == "loopback"
    other = Store(tmp_path / "other")
    synthetic.timed(other, synthetic.config("dense") | {"cluster": nodes})
    frames = from_attempts(other.all_valid())[0]
    assert captions.joined(frames) == "loopback between nodes of 8, nvlink inside"
    assert "model of link loopback between nodes of 8" in captions.timing(frames)
