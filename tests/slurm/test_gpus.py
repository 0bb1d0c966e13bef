"""The GPUs of a node and what joins them, from what nvidia-smi prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import gpus
from slurm.gpus import bus_id, is_model, nvlink_rates, parse, pcie_rate, topology
from tests.gpu_nodes import ALONE, BRIDGED, DGX1, LISTING, STATUS, SWITCHED


def test_a_dgx1_has_nvlink_between_some_pairs_only() -> None:
    links = topology(DGX1)
    assert sorted(links) == list(range(8))
    assert links[0] == {1: "NV1", 2: "NV1", 3: "NV2", 4: "NV2", 5: "SYS", 6: "SYS", 7: "SYS"}
    assert all(sum(map(gpus.lanes, row.values())) == 6 for row in links.values())  # a V100 has six


def test_cards_escapes_and_affinities_are_not_taken_for_gpus() -> None:
    assert topology(SWITCHED) == {a: {b: "NV18" for b in range(3) if b != a} for a in range(3)}
    assert topology(BRIDGED)[2] == {0: "NODE", 1: "NODE", 3: "NV12"}
    assert topology(ALONE) == {0: {}}


@pytest.mark.parametrize("words", ["", "\n", "Failed to initialize NVML: Driver/library version mismatch\n"])
def test_what_is_no_matrix_tells_nothing(words: str) -> None:
    assert topology(words) == {}
    assert nvlink_rates(words) == {}
    assert parse("", words, words) == {}


def test_nvlinks_are_counted_active_and_idle() -> None:
    rates = nvlink_rates(STATUS)
    assert rates == {0: [25.781] * 3 + [0, 25.781, 0], 1: [], 2: [14.062, 0], 3: []}


def test_a_node_is_put_together_by_bus_id() -> None:
    node = parse(LISTING, SWITCHED, STATUS)
    first, second, grace = "00000000:18:00.0", "00000000:2A:00.0", "00000009:01:00.0"
    assert list(node) == [first, second, grace]
    assert node[first].links == {second: "NV18", grace: "NV18"}
    assert (node[first].nvlinks, node[first].idle_nvlinks) == ([25.781] * 4, 2)
    assert node[second].nvlinks == []
    assert (node[first].pcie, node[grace].pcie, node[grace].memory_mib) == (63.0, None, None)
    assert parse(LISTING, "", "")[first].nvlinks is None  # not asked is not none


def test_bus_ids_of_cuda_and_nvidia_smi_meet() -> None:
    assert bus_id(9, 1, 0) == "00000009:01:00.0"
    assert parse("0, 0000:2a:00.0, Tesla K80, 11441, 367.48, 3, 16\n", "", "").keys() == {bus_id(0, 42, 0)}


@pytest.mark.parametrize(
    ("generation", "width", "rate"),
    [(3, 16, 15.8), (4, 16, 31.5), (5, 16, 63.0), (4, 8, 15.8), (9, 16, None)],
)
def test_what_a_slot_can_carry(generation: int, width: int, rate: float | None) -> None:
    assert pcie_rate(generation, width) == rate


@pytest.mark.parametrize(
    ("claim", "name", "named"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100", "NVIDIA A100-PCIE-40GB", True),
        ("A100", "A100-SXM4-40GB", True),
        ("a100_80gb", "NVIDIA A100 80GB PCIe", True),
        ("a100_80gb", "NVIDIA A100-SXM4-40GB", False),
        ("v100", "Tesla V100-SXM2-32GB", True),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA GH200 480GB", False),
        ("gh200", "NVIDIA GH200 480GB", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("l40", "NVIDIA L40S", False),
        ("l40s", "NVIDIA L40S", True),
        ("a6000", "NVIDIA RTX A6000", True),
        ("3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_6000_ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("a100", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", False),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", True),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_word_names_a_gpu(claim: str, name: str, named: bool) -> None:
    assert is_model(claim, name) is named


@pytest.fixture
def fresh() -> Iterator[None]:
    """Surveys are kept for a process's life; a test wants its own."""
    gpus.survey.cache_clear()
    yield
    gpus.survey.cache_clear()


def test_nvidia_smi_is_asked(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("listing", LISTING), ("topo", SWITCHED), ("nvlink", STATUS)):
        (tmp_path / name).write_text(answer)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase $1 in --query*) set listing;; esac\nexec cat "{tmp_path}/$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus.survey() == parse(LISTING, SWITCHED, STATUS)


def test_a_node_without_nvidia_smi_has_no_gpus(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.survey() == {}
