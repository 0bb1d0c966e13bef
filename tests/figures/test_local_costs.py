"""The arithmetic of local steps: by hand, and as the library's exchanges promise their bytes."""

from __future__ import annotations

import pytest
import torch

from experiments.figures import survey_local_costs as costs
from experiments.figures.papers import value
from sparsify.core.codes import E3M0, SCALE, Int8, Levels, Symmetric2
from sparsify.core.packing import packed_nbytes, places_nbytes
from sparsify.local.strategy import HeavyBall
from sparsify.method import Sparsifier
from sparsify.methods._chunked import ChunkGather
from sparsify.methods.demo import demo
from sparsify.methods.noloco import noloco
from sparsify.methods.sparseloco import sparseloco


@pytest.mark.parametrize(("code", "bits"), [(Symmetric2(), "value"), (Int8(), "unpacked")])
def test_a_chunk_of_sparseloco_is_what_the_library_packs(code: Levels, bits: str) -> None:
    """Less the scales of its tensor. Values of 8 bits are those of 2 that are not packed."""
    k = costs.SPARSELOCO["chosen"]
    scales = SCALE.itemsize * code.num_scales
    sent = code.nbytes([k], torch.float32) - scales + places_nbytes(k)
    assert sent == costs.sparseloco_bytes(costs.SPARSELOCO[bits])
    assert (costs.PACKED, costs.UNPACKED) == (112, 160)
    assert packed_nbytes(1000, E3M0.bits) == 1000 * costs.FP4


def test_the_library_s_defaults_are_those_of_the_papers() -> None:
    local, momentum, pairs = sparseloco(), demo(), noloco()
    assert local.every == value("sarfi2025.every")
    assert isinstance(local.method, Sparsifier)
    assert local.method.density == costs.SPARSELOCO["chosen"] / costs.CHUNK
    assert isinstance(local.method.exchange, ChunkGather)
    assert momentum.density == costs.DEMO["chosen"] / costs.DEMO["chunk"]
    assert isinstance(pairs.outer, HeavyBall)
    published = value("kolehmainen2025.configurations")["noloco"]
    assert {"every": pairs.every, "momentum": pairs.outer.momentum} == published


def test_ratios_by_hand() -> None:
    found = {each.label: each.ours for each in costs.ratios()}
    for label, expected in {
        "Covenant-72B, packed / fp32": 16384 / 112,
        "the same, not packed": 102.4,
        "DeMo, k 32 / fp32": 16384 / 384,
        "Streaming, H 100, FP4 / bf16": 400,
        "DES-LOC / Local Adam": 2,
        "ZeRO++": 4,
    }.items():
        assert found[label] == pytest.approx(expected), label
    assert costs.demo(16, costs.FP32) == costs.demo(8, costs.BF16) == pytest.approx(85.33, abs=0.01)
    assert costs.upload_s(costs.PACKED) == pytest.approx(144.6, abs=0.1)
    assert costs.upload_s(costs.UNPACKED) == pytest.approx(206.5, abs=0.1)
    assert costs.bandwidths("diloco")[0] == pytest.approx(62)
    assert costs.through_1_gbit_s() == pytest.approx([109 / 980, 0.11155, 0.11174], abs=1e-5)
    assert costs.peak() == 8
    assert costs.noloco() == {"every": 2, "bytes": 0.5}
