"""Table 1 of Eghlidi and Jaggi 2020: accuracy of six schemes, two scopes and one to eight workers.

At a reduced scale every training sees the images as often, whatever the number of workers, and all cells have
one learning rate, at which all of them train; theirs grows with the number of workers, and diverges here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, find_run_keys, value_of_run
from analysis.stats import Estimate, estimate_mean, final_mean
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import eghlidi2020_eghlidi_table1_published as published
from experiments.figures import papers
from experiments.figures._runs import MORE_SEEDS, SEEDS, setting_values_text
from experiments.figures.eghlidi2020_eghlidi_table1_published import LOOKS, SCOPES, SPARSE, TABLE, WORKERS
from experiments.figures.papers import make_claim
from experiments.tasks import chance_top1_percent

TITLE = "Test accuracy by scheme, scope and number of workers"
COLUMN = "val_top1"
SCALE = published.SCALE
_DATA = papers.item_settings("eghlidi2020.eghlidi-table1")
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


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    shared = {
        "recipe": "eghlidi2020", "profile": profile, "cluster": "virtual", "timing.mode": "production",
        **TRAININGS[profile],
    }  # fmt: skip
    worker_counts = (1, 2) if profile == "smoke" else WORKERS
    return [
        Run({**shared, **_cell_settings(scheme, scope, workers, profile), "workers": workers, "seed": seed})
        for seed in seeds_by_profile[profile]
        for workers in worker_counts
        for scheme, scope in ROWS
    ]


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def _cell_settings(scheme: str, scope: str, workers: int, profile: str) -> RunSettings:
    """Return the settings of a cell of the table; at the paper's scale with its rate and its momentum."""
    scoped = {} if scheme == DENSE else {"method.scope": SCOPE_NAMES[scope]}
    if profile != "paper":
        return {**SCHEMES[scheme], **NO_MOMENTUM, **scoped}
    momentum = {} if scheme == DENSE else NO_MOMENTUM
    return {**SCHEMES[scheme], **momentum, **scoped, "task.lr": round(THEIR_RATES[scope] * workers, 2)}


def cell_run_keys(frames: Frames, scheme: str, scope: str, workers: int) -> list[str]:
    """Return the runs of one cell; standard SGD has no scope."""
    settings = SCHEMES[scheme]
    columns: dict[str, Any] = {"method.name": settings["method"], "workers": workers}
    if scheme != DENSE:
        columns["method.scope"] = SCOPE_NAMES[scope]
    if "random" in settings["method"]:
        columns["method.exchange"] = settings.get("method.exchange", "allgather")
    return find_run_keys(frames, columns)


def final_cell_accuracy(frames: Frames, scheme: str, scope: str, workers: int) -> Estimate | None:
    """Return the accuracy at the end of one cell, over seeds."""
    return final_mean(frames, cell_run_keys(frames, scheme, scope, workers), COLUMN)


# --- over the table: differences of each seed's trainings, so that the interval is over seeds


def extra_allreduce_accuracy_drop(frames: Frames, scope: str) -> Estimate | None:
    """Return by how many points more Block-random-k loses with allReduce than with allGather.

    The trainings of both have the same rate and as many steps.
    """
    reduced, gathered = (
        _accuracy_drop_by_seed(frames, f"Block-random-k ({exchange})", scope)
        for exchange in ("allReduce", "allGather")
    )
    return _mean_over_seeds([reduced - gathered])


def mean_allgather_margin_over_allreduce(frames: Frames, scheme: str) -> Estimate | None:
    """Return allGather less allReduce with several workers, both scopes: the mean of six pairs."""
    return _mean_over_seeds(
        [
            _final_accuracy_by_seed(frames, f"{scheme} (allGather)", scope, workers)
            - _final_accuracy_by_seed(frames, f"{scheme} (allReduce)", scope, workers)
            for scope, workers in product(SCOPES, WORKERS[1:])
        ],
        "mean",
    )


def least_layerwise_margin_over_global(frames: Frames, *schemes: str) -> Estimate | None:
    """Return the least margin of layer-wise selection over global, of these schemes and any workers."""
    return _mean_over_seeds(
        [
            _final_accuracy_by_seed(frames, scheme, SCOPES[0], workers)
            - _final_accuracy_by_seed(frames, scheme, SCOPES[1], workers)
            for scheme, workers in product(schemes, WORKERS)
        ]
    )


def least_topk_margin_over_others(frames: Frames, scope: str) -> Estimate | None:
    """Return the least margin of Top-k over each other sparse scheme, with any number of workers."""
    return _mean_over_seeds(
        [
            _final_accuracy_by_seed(frames, "Top-k", scope, workers)
            - _final_accuracy_by_seed(frames, other, scope, workers)
            for other, workers in product(SPARSE[1:], WORKERS)
        ]
    )


def least_accuracy_drop(frames: Frames) -> Estimate | None:
    """Return the least that a row loses from one worker to eight."""
    return _mean_over_seeds([_accuracy_drop_by_seed(frames, scheme, scope) for scheme, scope in ROWS])


def _mean_over_seeds(
    differences: Sequence[pd.Series[float]], statistic: Literal["min", "mean"] = "min"
) -> Estimate | None:
    """Return the mean of the least difference of each seed; None where no seed has all differences."""
    complete = pd.concat(differences, axis="columns").dropna()
    samples = complete.agg(statistic, axis="columns").to_numpy()
    return estimate_mean(samples) if len(complete) else None


def _accuracy_drop_by_seed(frames: Frames, scheme: str, scope: str) -> pd.Series[float]:
    return _final_accuracy_by_seed(frames, scheme, scope, FEWEST) - _final_accuracy_by_seed(
        frames, scheme, scope, MOST
    )


def _final_accuracy_by_seed(frames: Frames, scheme: str, scope: str, workers: int) -> pd.Series[float]:
    """Return the accuracy at the end of each training of a cell, by seed."""
    ends = {}
    for key in cell_run_keys(frames, scheme, scope, workers):
        end = final_mean(frames, [key], COLUMN)
        if end:
            ends[value_of_run(frames, key, "seed")] = end.value
    by_seed: pd.Series[float] = pd.Series(ends, dtype=float)
    return by_seed


# --- shown


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError(plots.NOTHING_TO_DRAW)
    ours = []
    theirs = []
    for row, scope in enumerate(SCOPES):
        lines = []
        printed = list[plots.Curve]()
        for scheme in LOOKS:
            cells = {workers: final_cell_accuracy(frames, scheme, scope, workers) for workers in WORKERS}
            measured = {workers: end for workers, end in cells.items() if end is not None}
            lines.append(_scheme_line(scheme, list(measured), list(measured.values())))
            printed.append(_scheme_line(scheme, WORKERS, list(published.scheme_accuracies(scheme)[row])))
        lines += _chance_lines(frames)
        ours.append(
            plots.curves_panel(lines, doubling_x_ticks=WORKERS, title=f"{scope} selection", ylim=(0, None))
        )
        title = f"Table 1 as printed: {scope}"
        theirs.append(plots.curves_panel(printed, doubling_x_ticks=WORKERS, xlabel="Workers", title=title))
    layout: dict[str, Any] = {"legend_columns": 4, "sharey": "row", "height_ratios": (1.5, 1)}
    return plots.compose_figure([*ours, *theirs], 5.4, num_rows=2, ylabel="Test accuracy (%)", **layout)


def _chance_lines(frames: Frames) -> list[plots.Curve]:
    """Return what guessing gets, across."""
    levels = filter(None, map(chance_top1_percent, captions.distinct_values(frames, "task.name")))
    return [
        plots.Curve(CHANCE._replace(label=f"chance: {format_number(level)} %"), None, Estimate(level))
        for level in levels
    ]


def _scheme_line(scheme: str, sizes: Sequence[int], values: list[Any]) -> plots.Curve:
    """Return a scheme's line, a little aside of the others'; dashed where all workers send the same."""
    aside = ASIDE ** (list(LOOKS).index(scheme) - (len(LOOKS) - 1) / 2)
    how = {"linestyle": "--" if "allReduce" in scheme else "-"}
    return plots.Curve(LOOKS[scheme], [workers * aside for workers in sizes], values, how)


def table(frames: Frames) -> Table:
    rows = [
        {
            "scheme": scheme, "scope": scope, "workers": workers,
            "accuracy": final_cell_accuracy(frames, scheme, scope, workers),
            "paper": TABLE[scheme][scope][workers],
        }
        for scheme, scope, workers in CELLS
        if cell_run_keys(frames, scheme, scope, workers)
    ]  # fmt: skip
    return Table.from_rows("Test accuracy at the end", rows, {"accuracy": "%", "paper": "%"})


def caption(frames: Frames, profile: str) -> str:
    how = papers.text_template_or_empty(f"eghlidi2020.eghlidi-table1.{profile}")
    passes, rates = (setting_values_text(frames, name) for name in ("train.epochs", "task.lr"))
    facts = {"how": how.format(passes=passes, rates=rates), "seeds": setting_values_text(frames, "seed")}
    return captions.fill_caption(papers.text_template_or_empty("eghlidi2020.eghlidi-table1"), frames, facts)


def claims() -> list[Claim]:
    lost = {scope: _printed_accuracy_drop("Block-random-k (allReduce)", scope) for scope in SCOPES}
    margins = published.layerwise_margins_over_global()
    return [
        *(
            make_claim(
                "eghlidi2020.accuracy",
                final_cell_accuracy,
                scheme,
                scope,
                workers,
                case=f"{scheme}.{scope}.{workers}",
                scheme=scheme,
                scope=scope,
                size=workers,
                paper=TABLE[scheme][scope][workers],
            )
            for scheme, scope, workers in CELLS
        ),
        *(
            make_claim(
                "eghlidi2020.block-loses-more-with-allreduce",
                extra_allreduce_accuracy_drop,
                scope,
                case=scope,
                scope=scope,
                paper=round(lost[scope] - _printed_accuracy_drop("Block-random-k (allGather)", scope), 2),
            )
            for scope in SCOPES
        ),
        make_claim(
            "eghlidi2020.topk-layerwise-above",
            least_layerwise_margin_over_global,
            "Top-k",
            paper=float(margins[SPARSE.index("Top-k")].min().round(2)),
        ),
        make_claim(
            "eghlidi2020.layerwise-above-in-every-pair",
            least_layerwise_margin_over_global,
            *SPARSE,
            paper=float(margins.min().round(2)),
        ),
        *(
            make_claim(
                "eghlidi2020.topk-above-others", least_topk_margin_over_others, scope, case=scope, scope=scope
            )
            for scope in SCOPES
        ),
        make_claim("eghlidi2020.randomk-exchanges-alike", mean_allgather_margin_over_allreduce, "Random-k"),
        make_claim("eghlidi2020.every-row-loses", least_accuracy_drop),
    ]


def _printed_accuracy_drop(scheme: str, scope: str) -> float:
    return round(TABLE[scheme][scope][FEWEST] - TABLE[scheme][scope][MOST], 2)
