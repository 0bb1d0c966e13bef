"""Which share of its time a worker computes: every step averaged or every H steps, by bandwidth and delay.

Not a figure of a paper; beside it stands Table 4 of Streaming DiLoCo, which its authors simulated. What steps
take with an exchange and without is measured at one H, and composed for all others; over one of the links
another H is measured as well, which says what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.links import FOUND_GBIT_S_COLUMN
from analysis.pictures.numbers import format_number, format_with_interval
from analysis.records.frames import Frames, cache_by_frames, find_run_keys
from analysis.records.steps import warm_steps
from analysis.stats import Estimate, IncomparableRunsError
from analysis.tables import Table
from analysis.times import exchange_rounds
from analysis.times.exchange_rounds import LocalAndExchangingSeconds
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._links import (
    ABOVE_LINKS,
    ALPHA_COLUMN,
    BELOW_LINKS,
    BETA_COLUMN,
    BreakEvenBandwidths,
    mean_break_even_ratio,
    mean_over_launches,
    mean_ratio_over_launches,
    quantity_by_launch,
)
from experiments.figures._runs import TIMED, scaled_settings, setting_values_text
from experiments.figures.papers import make_claim, text_template_or_empty

TITLE = "Share of time computing, by bandwidth, delay and local steps"
SCALE = {"task.name": "a transformer of 1 billion parameters, simulated"}
_DATA = papers.item_settings("survey.utilisation")
LINK: str = _DATA["link"]
TIMED_AS: Mapping[str, RunSettings] = _DATA["timed"]
FRAGMENTS: int = _DATA["fragments"]  # exchanges in a round of streaming
LOOKS: Mapping[str, style.MethodStyle] = {
    name: style.MethodStyle(*look) for name, look in _DATA["looks"].items()
}
EVERY: list[int] = _DATA["every"]  # H, of those with local steps
CHECKED: Mapping[str, int] = _DATA["checked"]  # by profile the H at which composing is checked
DENSE, DILOCO, SPARSELOCO, STREAMING = "dense", "diloco", "sparseloco", "streaming_diloco"
SHARES = (50, 80, 90, 95, 99)  # % of Table 4
TABLE_4_EVERY = 100  # H of Table 4
TABLE_4 = {DENSE: "parallel", DILOCO: "diloco", STREAMING: "streaming"}
MOST = 0.999  # of a share: by noise a step with an exchange may seem the shorter one
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # Gbit/s


class RequestedLink(NamedTuple):
    """A link as it was asked for."""

    gbit_s: float
    delay_s: float  # of a way

    @property
    def run_settings(self) -> RunSettings:
        """Settings of a run over it."""
        return {BETA_COLUMN: 8e-9 / self.gbit_s, ALPHA_COLUMN: self.delay_s}


CLAIMED = RequestedLink(0.1, 0.05)  # the link that is claimed about


class MethodWithPeriod(NamedTuple):
    """A method and its H; None averages every step."""

    method: str
    every: int | None

    @property
    def label(self) -> str:
        """Name in pictures and tables."""
        return LOOKS[self.method].label + (f", H = {self.every}" if self.every else "")


def runs(profile: str) -> list[Run]:
    """Return a group of processes for each link, and one at the H at which composing is checked."""
    shared = scaled_settings(TIMED, "utilisation", profile) | {"link": LINK, "timing.mode": "production"}
    timed = [
        Run({**shared, **RequestedLink(gbit_s, delay_s).run_settings}, TIMED_AS)
        for delay_s in _DATA["delays"][profile]
        for gbit_s in _DATA["gbit_s"][profile]
    ]
    every = CHECKED[profile]
    link = RequestedLink(CLAIMED.gbit_s, _DATA["delays"][profile][-1])
    turns: RunSettings = {"timing.warmup_steps": every, "alternate.block_steps": every}  # a round each
    variants = {name: {**TIMED_AS[name], "method.every": every} for name in (DILOCO, SPARSELOCO)}
    return [*timed, Run({**shared, **turns, **link.run_settings}, variants)]


# --- what was measured over a link


@cache_by_frames
def measured_links(frames: Frames) -> list[RequestedLink]:
    """Return the links that were measured, the slowest first."""
    if BETA_COLUMN not in frames.runs:
        return []
    pairs = frames.runs[[BETA_COLUMN, ALPHA_COLUMN]].dropna().astype(float).to_numpy().tolist()
    return sorted({RequestedLink(round(8e-9 / beta, 6), alpha) for beta, alpha in pairs})


@cache_by_frames
def launch_run_keys(
    frames: Frames, method: str, link: RequestedLink, timed_at_period: int | None = None
) -> list[str]:
    """Return the launches of a method over a link.

    Args:
        timed_at_period: of launches at another H than the one from which all others are composed.
    """
    every = timed_at_period or TIMED_AS[method].get("method.every")
    return find_run_keys(
        frames, {"method.name": method, **link.run_settings, **({"method.every": every} if every else {})}
    )


@cache_by_frames
def found_or_requested_gbit_s_by_launch(frames: Frames, link: RequestedLink) -> pd.Series[float]:
    """Return by launch the bandwidth found while all nodes send; as asked where none was found."""
    keys = [key for method in TIMED_AS for key in launch_run_keys(frames, method, link)]
    timed = frames.runs[frames.runs["key"].isin(keys)].reindex(columns=["seed", FOUND_GBIT_S_COLUMN])
    medians: pd.Series[float] = timed[FOUND_GBIT_S_COLUMN].astype(float).groupby(timed["seed"]).median()
    return medians.fillna(link.gbit_s)


@cache_by_frames
def method_step_seconds_by_launch(
    frames: Frames, method: str, link: RequestedLink, timed_at_period: int | None = None
) -> dict[int, LocalAndExchangingSeconds]:
    """Return the seconds of steps without an exchange and with one, by launch; see `launch_run_keys`."""
    return exchange_rounds.step_seconds_by_launch(
        frames, launch_run_keys(frames, method, link, timed_at_period), exchanges_per_round(method)
    )


def exchanges_per_round(method: str) -> int:
    """Return how often a method exchanges in a round."""
    return FRAGMENTS if method == STREAMING else 1


def mean_step_s_by_launch(
    frames: Frames, method: str, every: int | None, link: RequestedLink, timed_at_period: int | None = None
) -> pd.Series[float]:
    """Return the seconds of the mean step at this H, by launch."""
    return quantity_by_launch(
        method_step_seconds_by_launch(frames, method, link, timed_at_period),
        lambda times: times.mean_step_s(every),
    )


@cache_by_frames
def local_step_s_by_launch(frames: Frames, method: str, link: RequestedLink) -> pd.Series[float]:
    """Return the seconds of a method's step without an exchange, by launch.

    Of dense, which has none, the mean over the other methods.
    """
    times = method_step_seconds_by_launch(frames, method, link)
    if method != DENSE:
        return quantity_by_launch(times, lambda launch: launch.local_s or np.nan)
    by_method = {name: local_step_s_by_launch(frames, name, link) for name in TIMED_AS if name != DENSE}
    means: pd.Series[float] = pd.DataFrame(by_method).mean(axis="columns").reindex([*times])
    return means


@cache_by_frames
def computing_share_by_launch(
    frames: Frames, method: str, every: int | None, link: RequestedLink
) -> pd.Series[float]:
    """Return the share of time computing, by launch."""
    ratios = local_step_s_by_launch(frames, method, link) / mean_step_s_by_launch(frames, method, every, link)
    return ratios.clip(upper=MOST).dropna()


def mean_computing_share(
    frames: Frames, method: str, every: int | None, link: RequestedLink
) -> Estimate | None:
    """Return the share of time computing, the mean over launches."""
    return mean_over_launches(computing_share_by_launch(frames, method, every, link), (0.0, 1.0))


@cache_by_frames
def mean_sent_bytes_per_exchange_or_zero(frames: Frames, method: str, link: RequestedLink) -> float:
    """Return the mean bytes that a worker sends in an exchange; 0 without runs."""
    sent = [warm_steps(frames, key).steps["wire_bytes"] for key in launch_run_keys(frames, method, link)]
    return float(np.mean([nbytes[nbytes > 0].mean() for nbytes in sent])) if sent else 0.0


@cache_by_frames
def arithmetic_share_by_launch(
    frames: Frames, method: str, every: int | None, link: RequestedLink
) -> pd.Series[float]:
    """Return the share by bytes over the bandwidth found alone, by launch, with its seconds of computing.

    So tables are made that nobody measured: no latency, no selecting, no packing.
    """
    gbit = (
        exchanges_per_round(method)
        * mean_sent_bytes_per_exchange_or_zero(frames, method, link)
        * 8e-9
        / (every or 1)
    )
    seconds = local_step_s_by_launch(frames, method, link)
    return (
        (seconds / (seconds + gbit / found_or_requested_gbit_s_by_launch(frames, link)))
        .clip(upper=MOST)
        .dropna()
    )


def computing_share_ratio(
    frames: Frames, above: MethodWithPeriod, below: MethodWithPeriod, link: RequestedLink
) -> Estimate | None:
    """Return one share over another, paired by launch."""
    return mean_ratio_over_launches(
        computing_share_by_launch(frames, *above, link), computing_share_by_launch(frames, *below, link)
    )


def arithmetic_over_measured_share(
    frames: Frames, method: str, every: int | None, link: RequestedLink
) -> Estimate | None:
    """Return the share by arithmetic over the measured one, paired by launch."""
    return mean_ratio_over_launches(
        arithmetic_share_by_launch(frames, method, every, link),
        computing_share_by_launch(frames, method, every, link),
    )


# --- is composing right?


def _composed_over_measured(frames: Frames, method: str, every: int, link: RequestedLink) -> pd.Series[float]:
    """Return the mean step as composed of those at another H over that of whole rounds, by launch."""
    composed = mean_step_s_by_launch(frames, method, every, link)
    return composed / mean_step_s_by_launch(frames, method, every, link, timed_at_period=every)


def composed_over_measured_step(
    frames: Frames, method: str, every: int, link: RequestedLink
) -> Estimate | None:
    """Return the mean step as composed of those at another H over that of whole rounds of this H."""
    return mean_over_launches(_composed_over_measured(frames, method, every, link))


def composing_error_factor(frames: Frames, method: str, every: int, link: RequestedLink) -> Estimate | None:
    """Return the factor between the two mean steps, in each launch whichever is the larger."""
    ratios = _composed_over_measured(frames, method, every, link)
    return mean_over_launches(ratios.where(ratios > 1, 1 / ratios))


# --- the bandwidth that a share takes


@cache_by_frames
def bandwidths_at_utilisation(
    frames: Frames, method: str, percent: int, delay_s: float
) -> BreakEvenBandwidths:
    """Return the bandwidths at which a method with Table 4's H computes for this share of its time.

    Linear between two links in the logarithms of bandwidth and of computing over the rest, as arithmetic has
    it.
    """
    every = None if method == DENSE else TABLE_4_EVERY
    links = [link for link in measured_links(frames) if link.delay_s == delay_s]
    table = pd.DataFrame(
        {link.gbit_s: computing_share_by_launch(frames, method, every, link) for link in links}
    )
    link_gbit_s = pd.DataFrame(
        {link.gbit_s: found_or_requested_gbit_s_by_launch(frames, link) for link in links}
    )
    return BreakEvenBandwidths.interpolate_between_links(
        link_gbit_s, table / (1 - table) * (100 - percent) / percent
    )


def bandwidth_at_utilisation_cell(
    frames: Frames, method: str, percent: int, delay_s: float
) -> Estimate | str:
    """Return the mean bandwidth for a share over launches, or in words that it lies outside the links."""
    crossings = bandwidths_at_utilisation(frames, method, percent, delay_s)
    if not len(crossings.gbit_s):
        return "-"
    slowest, fastest = crossings.median_link_range_gbit_s
    one_end = {
        (BELOW_LINKS,): f"below {format_number(slowest)}",
        (ABOVE_LINKS,): f"above {format_number(fastest)}",
    }
    return (
        crossings.mean_if_within_links()
        or one_end.get(tuple(crossings.gbit_s.unique()))
        or crossings.describe_outside()
    )


def dense_over_method_clipped_bandwidth(
    frames: Frames, method: str, percent: int, delay_s: float
) -> Estimate | None:
    """Return how many times less bandwidth a method needs than averaging every step, paired by launch.

    A bandwidth outside the links counts as the nearest of them. None without launches.

    Raises:
        IncomparableRunsError: in some launch both bandwidths lie outside the links at the same end.
    """
    dense, other = (bandwidths_at_utilisation(frames, name, percent, delay_s) for name in (DENSE, method))
    return mean_break_even_ratio(dense, other, "bandwidths")


def _times_less_cell(frames: Frames, method: str, percent: int, delay_s: float) -> Estimate | str | None:
    """Return how many times less bandwidth for a table: at least so many where one lies outside."""
    try:
        value = dense_over_method_clipped_bandwidth(frames, method, percent, delay_s)
    except IncomparableRunsError:
        return "-"
    if value is None or all(
        bandwidths_at_utilisation(frames, name, percent, delay_s).mean_if_within_links()
        for name in (DENSE, method)
    ):
        return value
    return f"{'at least' if value.value > 1 else 'at most'} {format_number(value.value)}"


# --- picture and table


def method_at_drawn_periods(method: str) -> Sequence[MethodWithPeriod]:
    """Return the method with each H that is drawn."""
    if method == DENSE:
        return [MethodWithPeriod(method, None)]
    return [MethodWithPeriod(method, every) for every in EVERY if method != STREAMING or every >= FRAGMENTS]


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(frames, delay_s) for delay_s in _delays(frames)]
    return plots.compose_figure(panels, 3.6, ylabel="Share of time computing (%)", sharey=True)


def _delays(frames: Frames) -> list[float]:
    return sorted({link.delay_s for link in measured_links(frames)})


def _panel(frames: Frames, delay_s: float) -> plots.Panel:
    links = [link for link in measured_links(frames) if link.delay_s == delay_s]
    x = [float(found_or_requested_gbit_s_by_launch(frames, link).median()) for link in links]
    curves = []
    for method in TIMED_AS:
        lines = method_at_drawn_periods(method)
        for rank, line in enumerate(lines):
            alpha = 1 - 0.6 * rank / max(1, len(lines) - 1)
            measured = [_percent(mean_computing_share(frames, *line, link)) for link in links]
            simple = [mean_over_launches(arithmetic_share_by_launch(frames, *line, link)) for link in links]
            levels = [100 * share.value if share else np.nan for share in simple]
            thin = {"linestyle": (0, (4, 2)), "marker": "", "alpha": alpha, "label": None, "linewidth": 1}
            look = LOOKS[method]._replace(label=line.label)
            curves.append(plots.Curve(look, x, measured, {"alpha": alpha, "ms": 3}))
            curves.append(plots.Curve(look, x, levels, thin))
    title = f"one way {format_number(1e3 * delay_s)} ms" if delay_s else "no delay"
    ticks = [tick for tick in TICKS if min(x) / 1.3 <= tick <= 1.3 * max(x)]
    return plots.curves_panel(
        curves, doubling_x_ticks=ticks, xlabel="Gbit/s found", title=title, ylim=(0, 105)
    )


def _percent(share: Estimate | None) -> Estimate | None:
    return share and share.scale_by(100)


def table(frames: Frames) -> list[Table]:
    """Return shares by link, bandwidths for Table 4's shares beside theirs, and composing's worth."""
    share_rows = [
        {
            "asked": link.gbit_s, **_link_columns(frames, link), "method": line.label,
            "computing": _percent(mean_computing_share(frames, *line, link)),
            "by arithmetic": _percent(mean_over_launches(arithmetic_share_by_launch(frames, *line, link))),
            "arithmetic / measured": arithmetic_over_measured_share(frames, *line, link),
        }
        for link in measured_links(frames)
        for method in TIMED_AS
        for line in method_at_drawn_periods(method)
    ]  # fmt: skip
    units = {"asked": "Gbit/s", "found": "Gbit/s", "one way": "ms", "computing": "%", "by arithmetic": "%"}
    pairs = [(delay_s, method) for delay_s in _delays(frames) for method in TIMED_AS]
    bandwidth_rows = [
        {
            "method": LOOKS[method].label,
            "one way": 1e3 * delay_s,
            **{
                f"{percent} %": bandwidth_at_utilisation_cell(frames, method, percent, delay_s)
                for percent in SHARES
            },
        }
        for delay_s, method in pairs
    ]
    gbit_s = papers.published_value("douillard2025.gbit")
    ratio_rows = [
        {"method": LOOKS[method].label, "measured with": f"{format_number(1e3 * delay_s)} ms one way",
         **{f"{percent} %": _times_less_cell(frames, method, percent, delay_s) for percent in SHARES}}
        for delay_s, method in pairs
        if method != DENSE
    ] + [
        {"method": LOOKS[method].label, "measured with": "Table 4, simulated",
         **{f"{share} %": gbit_s["parallel"][share] / gbit_s[row][share] for share in SHARES}}
        for method, row in TABLE_4.items()
        if method != DENSE
    ]  # fmt: skip
    published_rows = [
        {
            "method": LOOKS[method].label,
            **{f"{share} %": format_number(gbit_s[row][share]) for share in SHARES},
        }
        for method, row in TABLE_4.items()
    ]
    tables = [
        Table.from_rows("Share of time computing, composed but for every step's", share_rows, units),
        Table.from_rows(f"Gbit/s for a share of time computing, H = {TABLE_4_EVERY}", bandwidth_rows,
                 {"one way": "ms"}),
        Table.from_rows("The same of 1 billion parameters, simulated by the authors of Streaming DiLoCo",
                 published_rows, note=text_template_or_empty("survey.utilisation.theirs")),
        Table.from_rows(f"Times less bandwidth than every step's, H = {TABLE_4_EVERY}", ratio_rows,
                 note=text_template_or_empty("survey.utilisation.less")),
    ]  # fmt: skip
    checked_rows = [
        {"method": line.label, **_link_columns(frames, link), "step, composed / measured": ratio}
        for line, link, ratio in checked_composition_ratios(frames)
    ]
    if checked_rows:
        checked_units = {"found": "Gbit/s", "one way": "ms"}
        tables.append(Table.from_rows("What composing is worth", checked_rows, checked_units))
    return tables


def _link_columns(frames: Frames, link: RequestedLink) -> dict[str, Any]:
    return {
        "found": float(found_or_requested_gbit_s_by_launch(frames, link).median()),
        "one way": 1e3 * link.delay_s,
    }


def checked_composition_ratios(frames: Frames) -> list[tuple[MethodWithPeriod, RequestedLink, Estimate]]:
    """Return the methods and links for which whole rounds were measured, and composed over measured."""
    return [
        (MethodWithPeriod(method, every), link, ratio)
        for link in measured_links(frames)
        for every in sorted({*CHECKED.values()})
        for method in (DILOCO, SPARSELOCO)
        if (ratio := composed_over_measured_step(frames, method, every, link))
    ]


def facts(frames: Frames) -> dict[str, object]:
    checks = [
        f"{format_with_interval(ratio)} for {line.label}"
        for line, _, ratio in checked_composition_ratios(frames)
    ]
    joined = captions.join_with_and(checks)
    worth = f"Over one link, the mean step as composed over that of whole rounds: {joined}."
    periods = {settings["method.every"]: None for settings in TIMED_AS.values() if "method.every" in settings}
    return {
        "parameters": setting_values_text(frames, "parameters"),
        "workers": setting_values_text(frames, "workers"),
        "measured": captions.join_with_and(periods),
        "composed": worth * bool(checks),
        "launches": len(captions.distinct_values(frames, "seed")),
    }


def claims() -> list[Claim]:
    words_on_link: dict[str, Any] = {"delay": format_number(1e3 * CLAIMED.delay_s), "link": LINK}
    too_good = [
        make_claim(
            "survey.utilisation.too-good",
            arithmetic_over_measured_share,
            *line,
            CLAIMED,
            case=line.method,
            method=line.label,
            derived=line.every is not None,
            **words_on_link,
        )
        for line in (
            MethodWithPeriod(DENSE, None),
            MethodWithPeriod(DILOCO, 8),
            MethodWithPeriod(SPARSELOCO, 8),
        )
    ]
    larger = [
        make_claim(
            "survey.utilisation.more",
            computing_share_ratio,
            first,
            second,
            CLAIMED,
            case=first.method,
            method=first.label,
            other=second.label,
            **words_on_link,
        )
        for first, second in (
            (MethodWithPeriod(DILOCO, 32), MethodWithPeriod(DENSE, None)),
            (MethodWithPeriod(SPARSELOCO, 32), MethodWithPeriod(DILOCO, 32)),
        )
    ]
    every = CHECKED["laptop"]
    percent = SHARES[0]
    saving = make_claim(
        "survey.utilisation.diloco-less", dense_over_method_clipped_bandwidth, DILOCO, percent, 0.0,
        every=TABLE_4_EVERY, share=percent, link=LINK,
    )  # fmt: skip
    composed = [
        make_claim("survey.utilisation.composed", composing_error_factor, method, every, CLAIMED, case=method,
              method=MethodWithPeriod(method, every).label, **words_on_link)
        for method in (DILOCO, SPARSELOCO)
    ]  # fmt: skip
    return [*too_good, *larger, saving, *composed]
