"""Hyperparameters that no method can work with."""

from __future__ import annotations

from typing import Any

import pytest

import sparsify
from sparsify.core.spec import function_of

OUT_OF_RANGE: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("topk", {"density": density}, r"density=.* is out of range: it must be a number in \(0, 1\]")
        for density in (0.0, -0.1, 1.5, float("nan"), float("inf"))
    ),
    *(
        ("dgc", {"density_warmup": [0.25, density]}, r"density_warmup=.* a number in \(0, 1\]")
        for density in (0.0, -0.1, 1.5, float("nan"), float("inf"))
    ),
    ("topk", {"scope": 0.0}, "scope=0.0 is out of range"),
    ("topk", {"scope": -1.0}, "scope=-1.0 is out of range"),
    (
        "topk",
        {"scope": "block"},
        "scope='block' .* must be one of bucket, global, layer, or a bucket size in MB",
    ),
    ("topk", {"feedback": "sum"}, "no feedback 'sum'; there are: gradient, learning_rate, literal, none"),
    ("topk", {"index": "int8"}, "no index 'int8' .*; there are: delta16, int32, int64"),
    ("topk", {"value": "fp8"}, "no value 'fp8'; there are: as_is, bf16, fp16, fp32"),
    ("dgc", {"clip_norm": 0.0}, "clip_norm=0.0 is out of range"),
    ("adacomp", {"conv_bin": 0}, "conv_bin=0 is out of range"),
    ("adacomp", {"other_bin": 2**14}, "other_bin=16384 is out of range"),
    ("blockrandomk", {"exchange": "gossip"}, "no exchange 'gossip'; there are: allgather, allreduce"),
    ("gaussiank", {"rule": "exact"}, "no rule 'exact'; there are: bounded, published"),
    ("gaussiank", {"rule": "published", "slack": 3.0}, "slack=3.0 has no effect"),
    ("gaussiank", {"passes": 0}, "passes=0 is out of range"),
    ("gaussiank", {"slack": 0.5}, "slack=0.5 is out of range"),
    ("hardthreshold", {"threshold": 0.0}, "threshold=0.0 is out of range"),
    ("hardthreshold", {"send": "signs"}, "no send 'signs'; there are: strom, values"),
    ("hardthreshold", {"send": "strom", "value": "fp16"}, "leave out index and value"),
    ("hardthreshold", {"threshold": 1.0, "density_warmup": [0.1]}, "density_warmup has no effect"),
    ("sidco", {"fit": "normal"}, "no fit 'normal'; there are: exponential, gamma, pareto"),
    ("sidco", {"adapt": "never"}, "no adapt 'never'; there are: published, reversing"),
    ("sidco", {"first_ratio": 1.0}, "first_ratio=1.0 is out of range"),
    ("sidco", {"tolerance": 0.0}, "tolerance=0.0 is out of range"),
    ("sidco", {"adapt_every": 0}, "adapt_every=0 is out of range"),
    ("stable_topk", {"score": "sum"}, "no score 'sum'; there are: count, l1, l2, max"),
    ("stable_topk", {"block": 0}, "block=0 is out of range"),
    ("stable_topk", {"every": 0}, "every=0 is out of range"),
    ("scalecom", {"beta": 0.0}, "beta=0.0 is out of range"),
    ("gtopk", {"leak": "some"}, "no leak 'some'; there are: published, returned"),
    ("sparcml", {"index": "delta16"}, "no index 'delta16'; there are: int32, int64"),
    ("sparcml", {"dense_at": 0.0}, "dense_at=0.0 is out of range"),
    ("sparcml", {"bucket": 0}, "bucket=0 is out of range"),
    ("oktopk", {"local_drift": 0.9}, "local_drift=0.9 is out of range"),
    ("oktopk", {"threshold_every": 0}, "threshold_every=0 is out of range"),
    ("micro", {"rule": "paper"}, "no rule 'paper'; there are: intended, published"),
    ("micro", {"threshold": 0.0}, "threshold=0.0 is out of range: it must be a finite number above 0"),
    ("exdyna", {"blocks": 0}, "blocks=0 is out of range: it must be a whole number, 1 or more"),
    ("exdyna", {"rule": "paper"}, "no rule 'paper'; there are: intended, published"),
    ("dgc", {"sample": 0.0}, "sample=0.0 is out of range"),
    ("dgc", {"sample": 2.0}, "sample=2.0 is out of range"),
    ("dgc", {"adaptations": -1}, "adaptations=-1 is out of range"),
    ("dgc", {"momentum": 1.0}, "momentum=1.0 is out of range"),
    ("qsgd", {"bits": 3}, "no bits '3'; there are: 2, 4, 8"),
    ("qsgd", {"block": 0}, "block=0 is out of range"),
    ("qsgd", {"norm": "l1"}, "no norm 'l1'; there are: l2, max"),
    ("qsgd", {"feedback": "literal"}, "no feedback 'literal'; there are: gradient, learning_rate, none"),
    ("terngrad", {"clip": 0.0}, "clip=0.0 is out of range"),
    ("terngrad", {"sigma": "mean"}, "no sigma 'mean'; there are: about_mean, about_zero"),
    ("efsignsgd", {"feedback": "none"}, "no feedback 'none'; there are: gradient, learning_rate"),
    ("powersgd", {"rank": 0}, "rank=0 is out of range"),
    ("powersgd", {"min_compression_rate": 0.5}, "min_compression_rate=0.5 is out of range"),
    ("powersgd", {"feedback": "literal"}, "no feedback 'literal'"),
    ("terngrad", {"clip": float("nan")}, "clip=nan is out of range"),
    ("signsgd", {"scope": "block"}, "scope='block' is out of range: it must be one of global, layer"),
]
OF_ANOTHER_TYPE: list[tuple[str, dict[str, Any], str]] = [
    ("topk", {"density": "0.01"}, "density='0.01' is out of range: it must be a number in"),
    ("topk", {"density_warmup": 0.25}, "density_warmup=0.25 is out of range: it must be a list"),
    ("topk", {"packed": 5}, "packed=5 is out of range: it must be true or false"),
]


@pytest.mark.parametrize(("name", "values", "sentence"), [*OUT_OF_RANGE, *OF_ANOTHER_TYPE])
def test_what_cannot_be_is_refused(name: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(name, **values)


@pytest.mark.parametrize(("name", "values"), [case[:2] for case in OUT_OF_RANGE])
def test_who_calls_the_method_s_own_function_is_refused_too(name: str, values: dict[str, Any]) -> None:
    """The types of `build` are not asked there, but its parts check themselves: they can be composed anew."""
    with pytest.raises(ValueError, match="|".join(values)):
        function_of("sparsify.methods", name)(**values)
