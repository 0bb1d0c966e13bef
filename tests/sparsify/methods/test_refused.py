"""Hyperparameters that no method can work with."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import sparsify
from sparsify.methods import REGISTRY
from tests.sparsify.laws import parse_choices

NOT_DENSITIES = [0.0, -0.1, 1.5, math.nan, math.inf]
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "topk": {"density": NOT_DENSITIES, "scope": [0.0, -1.0, "block"]},
    "dgc": {"density_warmup": [[0.25, density] for density in NOT_DENSITIES], "sample": [0.0, 2.0]},
    "terngrad": {"clip": [0.0, math.nan]},
}
OTHERS_OUT_OF_RANGE = """
    dgc clip_norm=0.0
    dgc adaptations=-1
    dgc momentum=1.0
    adacomp conv_bin=0
    adacomp other_bin=16384
    gaussiank passes=0
    gaussiank slack=0.5
    hardthreshold threshold=0.0
    sidco first_ratio=1.0
    sidco tolerance=0.0
    sidco adapt_every=0
    stable_topk block=0
    stable_topk every=0
    scalecom beta=0.0
    sparcml dense_at=0.0
    sparcml bucket=0
    oktopk local_drift=0.9
    oktopk threshold_every=0
    micro threshold=0.0
    exdyna blocks=0
    qsgd block=0
    powersgd rank=0
    powersgd min_compression_rate=0.5
    signsgd scope=block
"""
UNKNOWN_WORDS = """
    topk feedback=sum | gradient, learning_rate, literal, none
    topk index=int8 | delta16, int32, int64
    topk value=fp8 | as_is, bf16, fp16, fp32
    blockrandomk exchange=gossip | allgather, allreduce
    gaussiank rule=exact | bounded, published
    hardthreshold send=signs | strom, values
    sidco fit=normal | exponential, gamma, pareto
    sidco adapt=never | published, reversing
    stable_topk score=sum | count, l1, l2, max
    gtopk leak=some | published, returned
    sparcml index=delta16 | int32, int64
    micro rule=paper | intended, published
    exdyna rule=paper | intended, published
    qsgd bits=3 | 2, 4, 8
    qsgd norm=l1 | l2, max
    qsgd feedback=literal | gradient, learning_rate, none
    terngrad sigma=mean | about_mean, about_zero
    efsignsgd feedback=none | gradient, learning_rate
    powersgd feedback=literal |
"""
WITHOUT_EFFECT = """
    gaussiank rule=published slack=3.0 | slack=3.0 has no effect
    hardthreshold send=strom value=fp16 | leave out index and value
    hardthreshold threshold=1.0 density_warmup=[0.1] | density_warmup has no effect
"""


def check_refused(name: str, values: dict[str, Any], sentence: str) -> None:
    """Check `build`, and the method's own function: its parts can be composed anew, and check themselves."""
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(name, **values)
    with pytest.raises(ValueError, match="|".join(values)):
        REGISTRY.import_function(name)(**values)


def test_values_out_of_range_are_refused() -> None:
    cases = [
        (name, {key: value})
        for name, values_by_key in OUT_OF_RANGE.items()
        for key, values in values_by_key.items()
        for value in values
    ]
    cases += map(parse_choices, OTHERS_OUT_OF_RANGE.strip().splitlines())
    for name, choice in cases:
        ((key, value),) = choice.items()
        shown = ".*" if isinstance(value, list) else re.escape(repr(value))
        check_refused(name, choice, f"{key}={shown} is out of range: it must be ")


def test_words_that_are_not_known_are_refused_and_the_known_ones_listed() -> None:
    for row in UNKNOWN_WORDS.strip().splitlines():
        words, known = row.split("|")
        name, choice = parse_choices(words)
        ((key, word),) = choice.items()
        check_refused(name, choice, f"no {key} '{word}'.*; there are:{known}")


def test_values_without_effect_are_refused() -> None:
    for row in WITHOUT_EFFECT.strip().splitlines():
        words, sentence = row.split(" | ")
        check_refused(*parse_choices(words), sentence)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("topk", {"density": "0.01"}, r"density='0.01' .*: it must be a number in \(0, 1\]"),
        ("topk", {"density_warmup": 0.25}, "density_warmup=0.25 is out of range: it must be a list"),
        ("topk", {"scope": "block"}, "it must be one of bucket, global, layer, or a bucket size in MB"),
    ],
)
def test_a_refusal_says_what_there_may_be(name: str, values: dict[str, Any], sentence: str) -> None:
    """Only `build` asks for types."""
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(name, **values)
