"""The arithmetic of local steps: by hand, and as the library's exchanges promise their bytes."""

from __future__ import annotations

import pytest
import torch

from analysis.records.frames import empty
from experiments import figures
from experiments.figures import survey_local_costs as costs
from experiments.figures.papers import value
from sparsify.core.codes import E3M0, SCALE, Int8, Levels, Symmetric2
from sparsify.core.packing import packed_nbytes, places_nbytes
from sparsify.method import Sparsifier
from sparsify.methods._chunked import ChunkGather
from sparsify.methods.demo import demo
from sparsify.methods.sparseloco import sparseloco

WORDS = {judged.claim.id: judged for judged in figures.judge("local-costs", empty())}


@pytest.mark.parametrize(("code", "bits"), [(Symmetric2(), "value"), (Int8(), "unpacked")])
def test_a_chunk_of_sparseloco_is_what_the_library_packs(code: Levels, bits: str) -> None:
    """Less the scales of its tensor. Values of 8 bits are those of 2 that are not packed."""
    k = costs.SPARSELOCO["chosen"]
    scales = SCALE.itemsize * code.num_scales
    sent = code.nbytes([k], torch.float32) - scales + places_nbytes(k)
    assert sent == costs.sparseloco_bytes(costs.SPARSELOCO[bits])
    assert (costs.PACKED, costs.UNPACKED) == (112, 160)


def test_the_library_s_defaults_are_those_of_the_papers() -> None:
    of_chunk = costs.SPARSELOCO["chosen"] / costs.CHUNK
    local, momentum = sparseloco(), demo()
    assert local.every == value("sarfi2025.every")
    assert isinstance(local.method, Sparsifier)
    assert local.method.density == of_chunk
    assert isinstance(local.method.exchange, ChunkGather)
    assert momentum.density == costs.DEMO["chosen"] / costs.DEMO["chunk"]


def test_four_bits_are_half_a_byte() -> None:
    assert packed_nbytes(1000, E3M0.bits) == 1000 * costs.FP4


def test_ratios_by_hand() -> None:
    found = {each.label: each for each in costs.ratios()}
    assert found["Covenant-72B, packed / fp32"].ours == pytest.approx(16384 / 112)
    assert found["the same, not packed"].ours == pytest.approx(102.4)
    assert found["DeMo, k 32 / fp32"].ours == pytest.approx(16384 / 384)
    assert costs.demo(16, costs.FP32) == costs.demo(8, costs.BF16) == pytest.approx(85.33, abs=0.01)
    assert found["Streaming, H 100, FP4 / bf16"].ours == 400
    assert found["DES-LOC / Local Adam"].ours == pytest.approx(2)
    assert found["ZeRO++"].ours == 4
    assert costs.upload_s(costs.PACKED) == pytest.approx(144.6, abs=0.1)
    assert costs.upload_s(costs.UNPACKED) == pytest.approx(206.5, abs=0.1)
    assert costs.bandwidths("diloco")[0] == pytest.approx(62)


def test_the_words_are_those_of_the_numbers() -> None:
    words = {name.removeprefix("local-costs."): verdict.word for name, verdict in WORDS.items()}
    unexpected = {name: word for name, word in words.items() if word != "re-derived"}
    assert unexpected == {
        "unpacked": "corrected",
        "bf16": "does not hold",
        "upload": "does not hold",
        "upload-unpacked": "does not hold",
        "demo-reference": "does not hold",
    }
