"""Table 1 of Eghlidi and Jaggi 2020: accuracy of six schemes, two scopes and one to eight workers.

At a reduced scale every training sees the images as often, whatever the number of workers, and all cells have
one learning rate, at which all of them train; theirs grows with the number of workers, and diverges here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, find_keys
from analysis.stats import Estimate, estimate_mean, final_value
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import eghlidi2020_eghlidi_table1_published as published
from experiments.figures import papers
from experiments.figures._runs import MORE_SEEDS, SEEDS
from experiments.figures.eghlidi2020_eghlidi_table1_published import LOOKS, SCOPES, SPARSE, TABLE, WORKERS
from experiments.figures.papers import claim
from experiments.tasks import chance

TITLE = "Test accuracy by scheme, scope and number of workers"
COLUMN = "val_top1"
SCALE = published.SCALE
_DATA = papers.item("eghlidi2020.eghlidi-table1")
SCHEMES: dict[str, RunSettings] = _DATA["schemes"]
TRAININGS: dict[str, RunSettings] = _DATA["trainings"]
DENSE = "Standard SGD"
THEIR_RATES = {"layer-wise": 0.1, "global": 0.01}  # for each worker; of dense training the first
SCOPE_NAMES = {"layer-wise": "layer", "global": "global"}  # ours
# Their sparsified optimiser, released in mlbench-core (optim/pytorch/optim.py), has none; their text has 0.9.
NO_MOMENTUM = {"task.momentum": 0}
CELLS = list(product(TABLE, SCOPES, WORKERS))
ROWS = [(DENSE, SCOPES[0]), *product(SPARSE, SCOPES)]  # standard SGD has no scope
FEWEST, MOST = WORKERS[0], WORKERS[-1]
ASIDE = 1.035  # factor between the places of two schemes, so that their intervals do not cover each other
CHANCE = style.MethodStyle("chance", "#777777", "", "")
BySeed = Mapping[int, float]  # a number of each seed's trainings


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[Run]:
    shared = {
        "recipe": "eghlidi2020", "profile": profile, "cluster": "virtual", "timing.mode": "production",
        **TRAININGS[profile],
    }  # fmt: skip
    workers = (1, 2) if profile == "smoke" else WORKERS
    return [
        Run({**shared, **_cell(scheme, scope, size, profile), "workers": size, "seed": seed})
        for seed in seeds
        for size in workers
        for scheme, scope in ROWS
    ]


def _cell(scheme: str, scope: str, size: int, profile: str) -> RunSettings:
    """Settings of one cell of the table; at the paper's scale with the paper's rate and its momentum."""
    scoped = {} if scheme == DENSE else {"method.scope": SCOPE_NAMES[scope]}
    if profile != "paper":
        return {**SCHEMES[scheme], **NO_MOMENTUM, **scoped}
    momentum = {} if scheme == DENSE else NO_MOMENTUM
    return {**SCHEMES[scheme], **momentum, **scoped, "task.lr": round(THEIR_RATES[scope] * size, 2)}


def keys(frames: Frames, scheme: str, scope: str, size: int) -> list[str]:
    """The runs of one cell; standard SGD has no scope."""
    own = SCHEMES[scheme]
    chosen: dict[str, Any] = {"method.name": own["method"], "workers": size}
    if scheme != DENSE:
        chosen["method.scope"] = SCOPE_NAMES[scope]
    if "random" in own["method"]:
        chosen["method.exchange"] = own.get("method.exchange", "allgather")
    return find_keys(frames, chosen)


def cell(frames: Frames, scheme: str, scope: str, size: int) -> Estimate | None:
    return final_value(frames, keys(frames, scheme, scope, size), COLUMN)


# --- over the table: a number of each seed's trainings, so that the interval is over seeds


def block_loses(frames: Frames, scope: str) -> Estimate | None:
    """Block-random-k with allReduce: points lost from one worker to eight."""
    return _over_seeds([_lost(frames, "Block-random-k (allReduce)", scope)])


def allreduce_loses_more(frames: Frames, scope: str) -> Estimate | None:
    """The same less what it loses with allGather, whose trainings have the same rate and as many steps."""
    reduced, gathered = (
        _lost(frames, f"Block-random-k ({exchange})", scope) for exchange in ("allReduce", "allGather")
    )
    return _over_seeds([_less(reduced, gathered)])


def allreduce_below(frames: Frames, scheme: str) -> Estimate | None:
    """AllGather less allReduce with several workers, both scopes: the mean of six pairs."""
    both = [f"{scheme} ({exchange})" for exchange in ("allGather", "allReduce")]
    pairs = [
        _less(*(_ends(frames, each, scope, size) for each in both))
        for scope, size in product(SCOPES, WORKERS[1:])
    ]
    return _over_seeds(pairs, np.mean)


def layerwise_above(frames: Frames, *schemes: str) -> Estimate | None:
    """The least margin of layer-wise selection over global, of these schemes and all numbers of workers."""
    pairs = [
        _less(*(_ends(frames, scheme, scope, size) for scope in SCOPES))
        for scheme, size in product(schemes, WORKERS)
    ]
    return _over_seeds(pairs)


def topk_above(frames: Frames, scope: str) -> Estimate | None:
    """The least margin of Top-k over each other sparse scheme, with any number of workers."""
    pairs = [
        _less(_ends(frames, "Top-k", scope, size), _ends(frames, other, scope, size))
        for other, size in product(SPARSE[1:], WORKERS)
    ]
    return _over_seeds(pairs)


def every_row_loses(frames: Frames) -> Estimate | None:
    """The least that a row loses from one worker to eight."""
    return _over_seeds([_lost(frames, scheme, scope) for scheme, scope in ROWS])


def _over_seeds(found: Sequence[BySeed], of: Any = np.min) -> Estimate | None:
    """The least of several numbers of each seed, or what `of` makes of them; None where one is not there."""
    seeds = [seed for seed in found[0] if all(seed in each for each in found)]
    return estimate_mean([float(of([each[seed] for each in found])) for seed in seeds]) if seeds else None


def _lost(frames: Frames, scheme: str, scope: str) -> BySeed:
    return _less(*(_ends(frames, scheme, scope, size) for size in (FEWEST, MOST)))


def _less(here: BySeed, there: BySeed) -> BySeed:
    return {seed: here[seed] - there[seed] for seed in here if seed in there}


def _ends(frames: Frames, scheme: str, scope: str, size: int) -> BySeed:
    """Where each seed's training ends."""
    seeds = frames.runs.set_index("key").reindex(columns=["seed"])["seed"]
    found = {key: final_value(frames, [key], COLUMN) for key in keys(frames, scheme, scope, size)}
    return {int(seeds[key]): value.value for key, value in found.items() if value}


# --- shown


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError(plots.NOTHING_TO_DRAW)
    ours = [
        plots.curves_panel(
            [*(_line(frames, scheme, scope) for scheme in LOOKS), *_chance(frames)],
            sizes=WORKERS, title=f"{scope} selection", ylim=(0, None),
        )
        for scope in SCOPES
    ]  # fmt: skip
    theirs = [
        plots.curves_panel(
            [_placed(scheme, WORKERS, list(published.accuracy(scheme)[at])) for scheme in LOOKS],
            sizes=WORKERS, xlabel="Workers", title=f"Table 1 as printed: {scope}",
        )
        for at, scope in enumerate(SCOPES)
    ]  # fmt: skip
    how: dict[str, Any] = {"ncols": 4, "sharey": "row", "height_ratios": (1.5, 1)}
    return plots.compose_figure([*ours, *theirs], 5.4, rows=2, ylabel="Test accuracy (%)", **how)


def _chance(frames: Frames) -> list[plots.Curve]:
    """What guessing gets, across."""
    levels = filter(None, map(chance, captions.distinct_values(frames, "task.name")))
    return [
        plots.Curve(CHANCE._replace(label=f"chance: {format_number(level)} %"), None, Estimate(level))
        for level in levels
    ]


def _line(frames: Frames, scheme: str, scope: str) -> plots.Curve:
    values = {size: cell(frames, scheme, scope, size) for size in WORKERS}
    known = {size: value for size, value in values.items() if value is not None}
    return _placed(scheme, list(known), list(known.values()))


def _placed(scheme: str, sizes: Sequence[int], values: list[Any]) -> plots.Curve:
    """A scheme's line, a little aside of the other schemes'; dashed where all workers send the same."""
    aside = ASIDE ** (list(LOOKS).index(scheme) - (len(LOOKS) - 1) / 2)
    how = {"linestyle": "--" if "allReduce" in scheme else "-"}
    return plots.Curve(LOOKS[scheme], [size * aside for size in sizes], values, how)


def table(frames: Frames) -> Table:
    rows = [
        {
            "scheme": scheme, "scope": scope, "workers": size, "accuracy": cell(frames, scheme, scope, size),
            "paper": TABLE[scheme][scope][size],
        }
        for scheme, scope, size in CELLS
        if keys(frames, scheme, scope, size)
    ]  # fmt: skip
    return Table.from_rows("Test accuracy at the end", rows, {"accuracy": "%", "paper": "%"})


def caption(frames: Frames, profile: str) -> str:
    how = papers.words(f"eghlidi2020.eghlidi-table1.{profile}")
    passes, rates = (captions.distinct_values(frames, name) for name in ("train.epochs", "task.lr"))
    facts = {
        "how": how.format(
            passes=captions.join_words(passes), rates=captions.join_words(map(format_number, rates))
        ),
        "seeds": captions.join_words(captions.distinct_values(frames, "seed")),
    }  # fmt: skip
    return captions.fill_caption(papers.words("eghlidi2020.eghlidi-table1"), frames, facts)


def claims() -> list[Claim]:
    lost = {scope: _printed_loss("Block-random-k (allReduce)", scope) for scope in SCOPES}
    margins = published.scope_margins()
    return [
        *(
            claim(
                "eghlidi2020.accuracy", cell, scheme, scope, size, case=f"{scheme}.{scope}.{size}",
                scheme=scheme, scope=scope, size=size, paper=TABLE[scheme][scope][size],
            )
            for scheme, scope, size in CELLS
        ),
        *(
            claim(
                "eghlidi2020.block-loses-with-workers", block_loses, scope, case=scope, scope=scope,
                paper=lost[scope], answers=["eghlidi2020.44", *["eghlidi2020.45"] * (scope == "global")],
            )
            for scope in SCOPES
        ),
        *(
            claim(
                "eghlidi2020.block-loses-more-with-allreduce", allreduce_loses_more, scope, case=scope,
                scope=scope, paper=round(lost[scope] - _printed_loss("Block-random-k (allGather)", scope), 2),
            )
            for scope in SCOPES
        ),
        claim(
            "eghlidi2020.topk-layerwise-above", layerwise_above, "Top-k",
            paper=float(margins[SPARSE.index("Top-k")].min().round(2)),
        ),
        claim(
            "eghlidi2020.layerwise-above-in-every-pair", layerwise_above, *SPARSE,
            paper=float(margins.min().round(2)),
        ),
        *(
            claim("eghlidi2020.topk-above-others", topk_above, scope, case=scope, scope=scope)
            for scope in SCOPES
        ),
        claim("eghlidi2020.randomk-exchanges-alike", allreduce_below, "Random-k"),
        claim("eghlidi2020.every-row-loses", every_row_loses),
    ]  # fmt: skip


def _printed_loss(scheme: str, scope: str) -> float:
    return round(TABLE[scheme][scope][FEWEST] - TABLE[scheme][scope][MOST], 2)
