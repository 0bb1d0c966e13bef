"""What items on local steps share: trainings that differ from SparseLoCo's in named settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from analysis.pictures import captions
from analysis.pictures.numbers import number
from analysis.records.columns import OUTCOMES
from analysis.records.frames import Frames, keys_of
from analysis.records.steps import with_outcomes
from analysis.stats import Value, final
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TRAINED, scale

_DATA = papers.item("survey.local-why")
# Settings of SparseLoCo in which a training may differ, and DiLoCo's.
SPARSELOCO: RunSettings = _DATA["sparseloco"]
DILOCO: RunSettings = _DATA["diloco"]
COLUMN = "val_loss"
LARGEST = 20.0  # nats, to which perplexity is told: e to them is more than any vocabulary has entries
KILO = 1e-3
# Streaming DiLoCo's smallest model, Table 5, as columns of the records.
SCALE = {"task.name": "a transformer of 35 M parameters on C4"}
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2, 3, 4], "paper": [3, 4]}


def whole(own: RunSettings) -> RunSettings:
    """All settings by which a training is told from the others, given those in which it differs."""
    return {**(DILOCO if own.get("method") == "diloco" else SPARSELOCO), **own}


def trainings(profile: str, differ: Sequence[RunSettings], seeds: Sequence[int]) -> list[Run]:
    """All of a seed before the next seed."""
    shared: RunSettings = {**TRAINED, "profile": profile, **scale("local-why", profile)}
    return [Run({**shared, **whole(own), "seed": seed}) for seed in seeds for own in differ]


def keys(frames: Frames, own: RunSettings) -> list[str]:
    """The runs of a training, one a seed."""
    return keys_of(frames, _columns(whole(own)))


def loss(frames: Frames, own: Sequence[str]) -> dict[str, object]:
    """Cells of a table: the loss at the end, and e to it."""
    found = final(frames, own, COLUMN)
    return {"loss": found, "perplexity": _perplexity(found) if found and found.value <= LARGEST else None}


def _perplexity(loss: Value) -> Value:
    """Among how many characters the next one is left to guess, with the interval of the loss; without one
    where two seeds say so little that it has no end.
    """
    low, high = loss.low, loss.high
    low, high = (None, None) if high is None or high > LARGEST else (math.exp(low or 0.0), math.exp(high))
    return loss._replace(value=math.exp(loss.value), low=low, high=high, floor=1.0)


def told(frames: Frames) -> Frames:
    """These frames, whose runs have their outcomes: records from before one was added lack it."""
    return frames if {*OUTCOMES} <= {*frames.runs} else with_outcomes(frames)


def outcome(frames: Frames, own: Sequence[str], column: str) -> float | None:
    """An outcome of `told` runs, the mean over seeds; None where it was not recorded."""
    mean = float(frames.runs.loc[frames.runs["key"].isin(own), column].astype(float).mean())
    return None if math.isnan(mean) else mean


def round_kb(frames: Frames, own: Sequence[str]) -> float | None:
    """Kilobytes that a worker sent in a round."""
    nbytes = outcome(frames, own, "round_bytes")
    return None if nbytes is None else KILO * nbytes


def facts(frames: Frames) -> dict[str, object]:
    """How long, how often exchanged, with which seeds and rates was trained."""
    steps, every = int(frames.epochs["step"].max()), int(SPARSELOCO["method.every"])
    return {
        "steps": f"{steps:,}", "every": every, "rounds": f"{steps // every:,}",
        "seeds": captions.listed(captions.values(frames, "seed")),
        "rates": captions.listed(map(number, captions.values(frames, "task.lr"))),
    }  # fmt: skip


def _columns(settings: RunSettings) -> Mapping[str, object]:
    return {"method.name" if name == "method" else name: value for name, value in settings.items()}
