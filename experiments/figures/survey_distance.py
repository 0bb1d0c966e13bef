"""What distance does to the exchanges of this library: 0 to 100 ms one way, 2, 4 and 8 workers.

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
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import LAUNCHES, warm_steps
from analysis.stats import POSITIVE, Value, over_units
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import papers
from experiments.figures import survey_link_model as link_model
from experiments.figures.papers import claim

TITLE = "What distance does to exchanges: 0 to 100 ms, 2 to 8 workers"
_DATA = papers.item("survey.distance")
LINK: str = _DATA["link"]
DENSITY: float = _DATA["density"]
ALSO: list[str] = _DATA["also by the backend"]  # what is exchanged by rings where nothing else is asked
DRAWN: Mapping[str, style.Look] = {name: style.Look(*look) for name, look in _DATA["drawn"].items()}
BACKEND, AUTO = "backend", "auto"  # values of `collectives`
FAR_S = 0.01  # from where on the model's errors are judged
MEDIAN, MOST = link_model.MEDIAN, link_model.MOST
AT = (0.05, 8)  # seconds and workers, of what is claimed of an exchange


def runs(profile: str) -> list[Run]:
    """One group of processes for each delay and number of workers; and one with the system's windows."""
    shared = {**_DATA["runs"][profile], "profile": profile, "link": LINK}
    cells = [
        Run({**shared, "cluster.link.alpha_s": delay, "workers": size}, variants())
        for size in _DATA["workers"][profile]
        for delay in _DATA["delays"][profile]
    ]
    windows = [
        Run({**shared, "cluster.windows": "system", "workers": size}, variants())
        for size in _DATA["windows"][profile]
    ]
    return [*cells, *windows]


def variants() -> dict[str, dict[str, Any]]:
    """Every exchange of link-model; some of them by the backend's collectives as well."""
    every = {name: own["settings"] for name, own in link_model.DENSE.items()}
    every |= {name: {**own["settings"], "method.density": DENSITY} for name, own in link_model.SPARSE.items()}
    rings = {f"{name}-{BACKEND}": {**every[name], "collectives": BACKEND} for name in ALSO}
    return every | rings


COLUMNS = [
    "exchange", "how", "delay", "workers", "windows", "seed", "bytes", "messages", "predicted", "measured",
]  # fmt: skip


@cache_by_frames
def cases(frames: Frames) -> pd.DataFrame:
    """A row per exchange, way to travel, delay, P and launch: what a worker spends in collectives, the median
    over turns. Workers are in step, so that a mean over them is what each of them spends.
    """
    rows = []
    for run in frames.runs.to_dict("records"):
        steps = warm_steps(frames, str(run["key"])).steps
        if not {"wait_s", "transfer_s"} <= {*steps} or not len(steps):
            continue
        spent = steps["wait_s"].fillna(0.0) + steps["transfer_s"]
        how, windows = run.get("collectives"), run.get("cluster.windows")  # records leave defaults out
        rows.append({
            "exchange": str(run["method.name"]), "how": how if isinstance(how, str) else AUTO,
            "delay": float(run["cluster.link.alpha_s"]), "workers": int(run["workers"]),
            "windows": windows if isinstance(windows, str) else "raised", "seed": int(run["seed"]),
            "bytes": steps["wire_bytes"].mean(), "messages": steps["messages"].mean(),
            "predicted": steps.groupby("step")["predicted_s"].max().mean(),
            "measured": float(spent.groupby(steps["block"]).mean().median()),
        })  # fmt: skip
    found: pd.DataFrame = pd.DataFrame(rows, columns=COLUMNS)
    return found


def raised(frames: Frames) -> pd.DataFrame:
    """The cases with windows that hold what the link does."""
    found = cases(frames)
    own: pd.DataFrame = found[found["windows"] == "raised"]
    return own


def seconds(of: pd.DataFrame, column: str = "measured") -> Value | None:
    """Over launches."""
    return over_units(list(of[column]), POSITIVE, LAUNCHES) if len(of) else None


def gain(frames: Frames, exchange: str, delay: float, size: int) -> Value | None:
    """An exchange's time by the backend's collectives over that as the probe found it quicker, by launch."""
    found = raised(frames)
    found = found[(found["exchange"] == exchange) & (found["delay"] == delay) & (found["workers"] == size)]
    each = found.pivot_table(index="seed", columns="how", values="measured")
    if not {AUTO, BACKEND} <= {*each}:
        return None
    pairs = (each[BACKEND] / each[AUTO]).dropna()
    return over_units(list(pairs), POSITIVE, LAUNCHES) if len(pairs) else None


def error(frames: Frames, quantile: float) -> Value | None:
    """This quantile of |predicted / measured - 1| in percent, over exchanges, delays and P; by launch."""
    found = raised(frames)
    far = found[found["delay"] >= FAR_S]
    if not len(far):
        return None
    errors = 100 * (far["predicted"] / far["measured"] - 1).abs()
    return over_units(list(errors.groupby(far["seed"]).quantile(quantile)), POSITIVE, LAUNCHES)


# --- picture and table


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = raised(frames)
    sizes = sorted(set(found["workers"]))
    if not sizes:
        raise ValueError(plots.EMPTY)
    panels = []
    for size in sizes:
        lines = list[plots.Curve]()
        for name, look in DRAWN.items():
            for how in (AUTO, BACKEND):
                of = found[(found["workers"] == size) & (found["exchange"] == name) & (found["how"] == how)]
                delays = sorted(set(of["delay"]))
                values = [seconds(of[of["delay"] == delay]) for delay in delays]
                named = look if how == AUTO else look._replace(label=f"{look.label}, gloo's rings")
                dashed = {} if how == AUTO else {"linestyle": (0, (4, 2)), "mfc": "white"}
                if delays:
                    lines.append(plots.Curve(named, [1e3 * delay for delay in delays], values, dashed))
        title = f"P = {size}"
        # A limit ends the scaling that panels share: only the last one knows how high all lines go.
        low: dict[str, Any] = {"ylim": (0, None)} if size == sizes[-1] else {}
        panels.append(plots.curves(lines, xlabel="One way (ms)", title=title, xlim=(0, None), **low))
    return plots.picture(panels, 3.4, ylabel="Seconds in collectives, a step", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Every exchange in every cell; errors of the predictions; and windows as the system has them."""
    found = cases(frames)
    cells = ["windows", "workers", "delay", "exchange", "how"]
    rows = [
        _row(frames, dict(zip(cells, cell, strict=True)), of) for cell, of in found.groupby(cells, sort=False)
    ]
    usual = [row for row in rows if row.pop("windows") == "raised"]
    units = {"one way": "ms", "in collectives": "ms", "predicted": "ms", "error": "%"}
    tables = [
        Table.of(
            "Errors of the predictions",
            _errors(raised(frames)),
            {"one way": "ms", "median error": "%", "90th percentile": "%"},
        ),
        Table.of("Every exchange", usual, units, papers.words("survey.distance.note")),
    ]
    if windows := _windows(found):
        both = dict.fromkeys(("raised", "as the system has them"), "ms")
        tables.append(Table.of("TCP's windows", windows, both, papers.words("survey.distance.windows")))
    return tables


def _windows(found: pd.DataFrame) -> list[dict[str, object]]:
    """Both kinds of windows side by side, where the system's were tried; their ratio is paired by launch."""
    auto = found[found["how"] == AUTO]
    cells = ["workers", "delay", "exchange"]
    by_launch = auto.pivot_table(index=[*cells, "seed"], columns="windows", values="measured")
    if not {"raised", "system"} <= {*by_launch}:
        return []
    rows = []
    for (size, _, name), of in by_launch.dropna().groupby(level=cells):
        both = {
            windows: over_units(list(of[windows]), POSITIVE, LAUNCHES) for windows in ("raised", "system")
        }
        ratio = over_units(list(of["system"] / of["raised"]), POSITIVE, LAUNCHES)
        rows.append({
            "exchange": _label(str(name)), "P": size, "raised": both["raised"].times(1e3),
            "as the system has them": both["system"].times(1e3), "times as long": ratio, "launches": len(of),
        })  # fmt: skip
    return rows


def _row(frames: Frames, cell: Mapping[str, Any], of: pd.DataFrame) -> dict[str, object]:
    took, expected = seconds(of), float(of["predicted"].mean())
    assert took is not None, "a cell has launches"
    is_far = cell["delay"] > 0
    return {
        "windows": cell["windows"], "exchange": _label(cell["exchange"]),
        "how": "gloo's rings" if cell["how"] == BACKEND else "the quicker one",
        "P": cell["workers"], "one way": 1e3 * cell["delay"], "in collectives": took.times(1e3),
        "ways": took.value / cell["delay"] if is_far else None,
        "predicted": 1e3 * expected, "error": 100 * abs(expected / took.value - 1),
        "rings / the quicker one": gain(frames, cell["exchange"], cell["delay"], cell["workers"])
        if cell["how"] == AUTO and cell["windows"] == "raised" else None,
    }  # fmt: skip


def _errors(found: pd.DataFrame) -> list[dict[str, object]]:
    """By delay."""
    errors = found.assign(error=100 * (found["predicted"] / found["measured"] - 1).abs())
    return [
        {
            "one way": 1e3 * float(of["delay"].iloc[0]), "cases": len(of),
            "median error": float(of["error"].median()), "90th percentile": float(of["error"].quantile(0.9)),
        }
        for _, of in errors.groupby("delay")
    ]  # fmt: skip


def _label(name: str) -> str:
    return link_model.LABELS.get(name, name)


def facts(frames: Frames) -> dict[str, object]:
    found = raised(frames)
    return {
        "delays": captions.listed(number(1e3 * float(delay)) for delay in sorted(set(found["delay"]))),
        "sizes": captions.listed(sorted(set(found["workers"]))), "density": number(DENSITY),
        "elements": captions.listed(map(number, captions.values(frames, "task.elements"))),
        "launches": len(captions.values(frames, "seed")), "far": number(1e3 * FAR_S),
        "median": number(MEDIAN), "most": number(MOST),
    }  # fmt: skip


def claims() -> list[Claim]:
    delay, size = AT
    aims = (("half", 0.5, MEDIAN), ("nine tenths", 0.9, MOST))
    errors = [
        claim("survey.distance.error", error, quantile, case=share, share=share, tolerance=limit,
              far=number(1e3 * FAR_S), link=LINK)
        for share, quantile, limit in aims
    ]  # fmt: skip
    gains = [
        claim("survey.distance.direct", gain, name, delay, size, case=name, exchange=_label(name), size=size,
              delay=number(1e3 * delay), link=LINK)
        for name in _DATA["claimed"]
    ]  # fmt: skip
    return [*errors, *gains]
