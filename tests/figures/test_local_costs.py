"""The arithmetic of local steps: by hand, and as the library's exchanges promise their bytes."""

from __future__ import annotations

import pytest
import torch

from experiments.figures import survey_local_costs as costs
from experiments.figures.papers import published_value
from sparsify.core.codes import E3M0, SCALE, Int8, LevelCode, Symmetric2
from sparsify.core.packing import packed_nbytes, packed_places_nbytes
from sparsify.local.strategy import HeavyBall
from sparsify.method import Sparsifier
from sparsify.methods._chunked import ChunkGather
from sparsify.methods.demo import demo
from sparsify.methods.noloco import noloco
from sparsify.methods.sparseloco import sparseloco


@pytest.mark.parametrize(("code", "bits"), [(Symmetric2(), "value"), (Int8(), "unpacked")])
def test_a_chunk_of_sparseloco_is_what_the_library_packs(code: LevelCode, bits: str) -> None:
    """Less the scales of its tensor. Values of 8 bits are those of 2 that are not packed."""
    k = costs.SPARSELOCO["chosen"]
    scales = SCALE.itemsize * code.num_scales
    sent = code.nbytes([k], torch.float32) - scales + packed_places_nbytes(k)
    assert sent == costs.sparseloco_chunk_bytes(costs.SPARSELOCO[bits])
    assert (costs.PACKED, costs.UNPACKED) == (112, 160)
    assert packed_nbytes(1000, E3M0.bits) == 1000 * costs.FP4


def test_the_library_s_defaults_are_those_of_the_papers() -> None:
    local, momentum, pairs = sparseloco(), demo(), noloco()
    assert local.every == published_value("sarfi2025.every")
    assert isinstance(local.method, Sparsifier)
    assert local.method.density == costs.SPARSELOCO["chosen"] / costs.CHUNK
    assert isinstance(local.method.exchange, ChunkGather)
    assert momentum.density == costs.DEMO["chosen"] / costs.DEMO["chunk"]
    assert isinstance(pairs.outer, HeavyBall)
    published = published_value("kolehmainen2025.configurations")["noloco"]
    assert {"every": pairs.every, "momentum": pairs.outer.momentum} == published
