"""Effect of distance on the exchanges of this library: 0 to 100 ms one way, 2, 4 and 8 workers.

Not a figure of a paper. A step of a vector, of which nearly all is the exchange, with collectives as gloo has
them and as the probe found them quicker. Predictions are those of link-model: fitted to a few sizes that the
same workers measured before, none of which is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import warm_steps
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import papers
from experiments.figures import survey_link_model as link_model
from experiments.figures._links import (
    MAX_MEDIAN_ERROR_PERCENT,
    MAX_P90_ERROR_PERCENT,
    absolute_percent_errors,
    mean_over_launches,
    mean_ratio_over_launches,
    prediction_error_claims,
    summarize_errors_by_group,
)
from experiments.figures._runs import setting_values_text
from experiments.figures.papers import make_claim

TITLE = "What distance does to exchanges: 0 to 100 ms, 2 to 8 workers"
_DATA = papers.item_settings("survey.distance")
LINK: str = _DATA["link"]
DENSITY: float = _DATA["density"]
ALSO_BY_BACKEND: list[str] = _DATA["also by the backend"]  # exchanged by rings where nothing else is asked
DRAWN: Mapping[str, style.MethodStyle] = {
    name: style.MethodStyle(*look) for name, look in _DATA["drawn"].items()
}
BACKEND, AUTO = "backend", "auto"  # values of `collectives`
RAISED, SYSTEM = "raised", "system"  # windows that hold what the link does, and those of the system
FAR_S = 0.01  # from where on the model's errors are judged
CLAIMED_DELAY_S = 0.05  # of what is claimed of an exchange
CLAIMED_WORKERS = 8  # likewise


def runs(profile: str) -> list[Run]:
    """Return a group of processes for each delay and number of workers; and one with the system's windows."""
    shared = {**_DATA["runs"][profile], "profile": profile, "link": LINK}
    delayed = [
        {"cluster.link.alpha_s": delay_s, "workers": size}
        for size in _DATA["workers"][profile]
        for delay_s in _DATA["delays"][profile]
    ]
    windows = [{"cluster.windows": SYSTEM, "workers": size} for size in _DATA["windows"][profile]]
    return [Run({**shared, **settings}, settings_by_variant()) for settings in (*delayed, *windows)]


def settings_by_variant() -> dict[str, dict[str, Any]]:
    """Return every exchange of link-model; some of them by the backend's collectives as well."""
    exchanges = {name: entry["settings"] for name, entry in link_model.DENSE.items()}
    for name, entry in link_model.SPARSE.items():
        exchanges[name] = {**entry["settings"], "method.density": DENSITY}
    rings = {f"{name}-{BACKEND}": {**exchanges[name], "collectives": BACKEND} for name in ALSO_BY_BACKEND}
    return exchanges | rings


CELL = ["workers", "delay", "exchange"]
COLUMNS = ["windows", *CELL, "how", "seed", "bytes", "messages", "predicted", "measured"]


@cache_by_frames
def exchange_case_table(frames: Frames) -> pd.DataFrame:
    """Return a row per exchange, way to travel, delay, P and launch, with its seconds in collectives.

    The median over turns. Workers are in step, so that a mean over them is what each of them spends.
    """
    rows = []
    for run in frames.runs.to_dict("records"):
        steps = warm_steps(frames, str(run["key"])).steps
        if not {"wait_s", "transfer_s"} <= {*steps} or not len(steps):
            continue
        spent_s = steps["wait_s"].fillna(0.0) + steps["transfer_s"]
        how = run.get("collectives")
        windows = run.get("cluster.windows")  # records leave defaults out
        rows.append({
            "exchange": str(run["method.name"]), "how": how if isinstance(how, str) else AUTO,
            "delay": float(run["cluster.link.alpha_s"]), "workers": int(run["workers"]),
            "windows": windows if isinstance(windows, str) else RAISED, "seed": int(run["seed"]),
            "bytes": steps["wire_bytes"].mean(), "messages": steps["messages"].mean(),
            "predicted": steps.groupby("step")["predicted_s"].max().mean(),
            "measured": float(spent_s.groupby(steps["block"]).mean().median()),
        })  # fmt: skip
    cases: pd.DataFrame = pd.DataFrame(rows, columns=COLUMNS)
    return cases


def exchange_cases_with_raised_windows(frames: Frames) -> pd.DataFrame:
    """Return the cases whose windows hold what the link does."""
    cases: pd.DataFrame = exchange_case_table(frames).query("windows == @RAISED")
    return cases


def backend_rings_over_auto_collectives(
    frames: Frames, exchange: str, delay_s: float, workers: int
) -> Estimate | None:
    """Return an exchange's time by the backend's collectives over that of the quicker ones, by launch."""
    cases = exchange_cases_with_raised_windows(frames)
    cell = cases.query("exchange == @exchange and delay == @delay_s and workers == @workers")
    by_way = cell.pivot_table(index="seed", columns="how", values="measured")
    return mean_ratio_over_launches(by_way[BACKEND], by_way[AUTO]) if {AUTO, BACKEND} <= {*by_way} else None


def percent_error_quantile(frames: Frames, quantile: float) -> Estimate | None:
    """Return this quantile of the errors over exchanges, delays and P, in percent; by launch."""
    far = exchange_cases_with_raised_windows(frames).query("delay >= @FAR_S")
    errors = absolute_percent_errors(far["predicted"], far["measured"])
    return mean_over_launches(errors.groupby(far["seed"]).quantile(quantile))


# --- picture and table


def draw(frames: Frames, profile: str) -> plots.Figure:
    cases = exchange_cases_with_raised_windows(frames)
    sizes = sorted(set(cases["workers"]))
    panels = []
    for size in sizes:
        # A limit ends the scaling that panels share: only the last one knows how high all lines go.
        low: dict[str, Any] = {"ylim": (0, None)} if size == sizes[-1] else {}
        lines = _lines(cases[cases["workers"] == size])
        panels.append(
            plots.curves_panel(lines, xlabel="One way (ms)", title=f"P = {size}", xlim=(0, None), **low)
        )
    return plots.compose_figure(panels, 3.4, ylabel="Seconds in collectives, a step", sharey=True)


def _lines(cases: pd.DataFrame) -> list[plots.Curve]:
    """Return a line for each exchange and way to travel, over delays."""
    lines = []
    for name, look in DRAWN.items():
        for how in (AUTO, BACKEND):
            by_delay = cases[(cases["exchange"] == name) & (cases["how"] == how)].groupby("delay")["measured"]
            x = [1e3 * float(delay_s) for delay_s in by_delay.groups]
            values = [mean_over_launches(measured) for _, measured in by_delay]
            if how == AUTO:
                lines.append(plots.Curve(look, x, values))
            else:
                label = f"{look.label}, gloo's rings"
                dashed = {"linestyle": (0, (4, 2)), "mfc": "white"}
                lines.append(plots.Curve(look._replace(label=label), x, values, dashed))
    return lines


def table(frames: Frames) -> list[Table]:
    """Return errors of the predictions, every exchange in every cell, and windows as the system has them."""
    cases = exchange_cases_with_raised_windows(frames)
    rows = [
        _row(frames, dict(zip([*CELL, "how"], cell, strict=True)), launches)
        for cell, launches in cases.groupby([*CELL, "how"], sort=False)
    ]
    units = {"one way": "ms", "in collectives": "ms", "predicted": "ms", "error": "%"}
    ordered = cases.sort_values("delay", kind="stable")
    errors = summarize_errors_by_group(
        absolute_percent_errors(ordered["predicted"], ordered["measured"]), ordered["delay"]
    )
    errors.insert(0, "one way", 1e3 * errors.index.to_numpy())
    error_units = {"one way": "ms", "median error": "%", "90th percentile": "%"}
    tables = [
        Table("Errors of the predictions", errors, error_units),
        Table.from_rows("Every exchange", rows, units, papers.text_template_or_empty("survey.distance.note")),
    ]
    windows = _window_rows(exchange_case_table(frames))
    if windows:
        both = dict.fromkeys(("raised", "as the system has them"), "ms")
        tables.append(
            Table.from_rows(
                "TCP's windows", windows, both, papers.text_template_or_empty("survey.distance.windows")
            )
        )
    return tables


def _window_rows(cases: pd.DataFrame) -> list[dict[str, object]]:
    """Return both kinds of windows side by side, where the system's were tried, and their ratio."""
    auto = cases[cases["how"] == AUTO]
    by_launch = auto.pivot_table(index=[*CELL, "seed"], columns="windows", values="measured")
    if not {RAISED, SYSTEM} <= {*by_launch}:
        return []
    return [
        {
            "exchange": _label(str(name)),
            "P": size,
            "raised": mean_over_launches(1e3 * launches[RAISED]),
            "as the system has them": mean_over_launches(1e3 * launches[SYSTEM]),
            "times as long": mean_ratio_over_launches(launches[SYSTEM], launches[RAISED]),
            "launches": len(launches),
        }
        for (size, _, name), launches in by_launch.dropna().groupby(level=CELL)
    ]


def _row(frames: Frames, cell: Mapping[str, Any], launches: pd.DataFrame) -> dict[str, object]:
    measured = mean_over_launches(launches["measured"])
    predicted_s = float(launches["predicted"].mean())
    assert measured is not None, "a cell has launches"
    exchange = cell["exchange"]
    delay_s = cell["delay"]
    size = cell["workers"]
    is_quicker = cell["how"] == AUTO
    return {
        "exchange": _label(exchange), "how": "the quicker one" if is_quicker else "gloo's rings",
        "P": size, "one way": 1e3 * delay_s, "in collectives": measured.scale_by(1e3),
        "ways": measured.value / delay_s if delay_s > 0 else None,
        "predicted": 1e3 * predicted_s, "error": 100 * abs(predicted_s / measured.value - 1),
        "rings / the quicker one":
            backend_rings_over_auto_collectives(frames, exchange, delay_s, size) if is_quicker else None,
    }  # fmt: skip


def _label(exchange: str) -> str:
    return link_model.LABELS.get(exchange, exchange)


def facts(frames: Frames) -> dict[str, object]:
    cases = exchange_cases_with_raised_windows(frames)
    return {
        "delays": captions.join_with_and(
            format_number(1e3 * float(delay_s)) for delay_s in sorted(set(cases["delay"]))
        ),
        "sizes": captions.join_with_and(sorted(set(cases["workers"]))), "density": format_number(DENSITY),
        "elements": setting_values_text(frames, "task.elements"),
        "launches": len(captions.distinct_values(frames, "seed")), "far": format_number(1e3 * FAR_S),
        "median": format_number(MAX_MEDIAN_ERROR_PERCENT), "most": format_number(MAX_P90_ERROR_PERCENT),
    }  # fmt: skip


def claims() -> list[Claim]:
    gains = [
        make_claim(
            "survey.distance.direct",
            backend_rings_over_auto_collectives,
            name,
            CLAIMED_DELAY_S,
            CLAIMED_WORKERS,
            case=name,
            exchange=_label(name),
            size=CLAIMED_WORKERS,
            delay=format_number(1e3 * CLAIMED_DELAY_S),
            link=LINK,
        )
        for name in _DATA["claimed"]
    ]
    far = format_number(1e3 * FAR_S)
    return [
        *prediction_error_claims("survey.distance.error", percent_error_quantile, far=far, link=LINK),
        *gains,
    ]
