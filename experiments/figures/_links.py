"""Runs over emulated links: split by link, compared launch by launch, and where two methods take as long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from analysis.claims import Claim
from analysis.pictures import captions
from analysis.pictures.links import LINK_COLUMN
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_run_keys, select_runs
from analysis.records.steps import LAUNCHES
from analysis.stats import POSITIVE, Bounds, Estimate, IncomparableRunsError, estimate_mean
from experiments.figures.papers import make_claim

T = TypeVar("T")
BETA_COLUMN = "cluster.link.beta_s_per_byte"
ALPHA_COLUMN = "cluster.link.alpha_s"
BELOW_LINKS, ABOVE_LINKS = 0.0, np.inf  # a break-even bandwidth where no link is that slow, or that fast
# Percent of error that half, and nine tenths, of the predictions of exchanges may have.
MAX_MEDIAN_ERROR_PERCENT, MAX_P90_ERROR_PERCENT = 10.0, 25.0


@cache_by_frames
def split_by_link(frames: Frames) -> dict[str, Frames]:
    """Return the runs over each link by its name, the slowest link first."""
    if not len(frames.runs):
        return {}
    betas = frames.runs.groupby(LINK_COLUMN)[BETA_COLUMN].first().sort_values(ascending=False)
    return {
        str(link): select_runs(frames, find_run_keys(frames, {LINK_COLUMN: link})) for link in betas.index
    }


def quantity_by_launch(times: Mapping[int, T], quantity: Callable[[T], float]) -> pd.Series[float]:
    """Return a quantity of each launch's times."""
    return pd.Series({launch: quantity(value) for launch, value in times.items()}, dtype=float)


def mean_over_launches(samples: pd.Series[float], bounds: Bounds = POSITIVE) -> Estimate | None:
    """Return the mean of a number of each launch with its interval; None without any."""
    numbers = samples.dropna().to_numpy()
    return estimate_mean(numbers, bounds, LAUNCHES) if len(numbers) else None


def mean_ratio_over_launches(above: pd.Series[float], below: pd.Series[float]) -> Estimate | None:
    """Return the mean ratio of two numbers that are paired by launch; None where no launch has both."""
    return mean_over_launches(above / below)


# --- the bandwidth at which a ratio is 1


class BreakEvenBandwidths(NamedTuple):
    """Bandwidths at which a ratio is 1, by launch; `BELOW_LINKS` or `ABOVE_LINKS` outside the links."""

    gbit_s: pd.Series[float]
    link_gbit_s: pd.DataFrame  # bandwidths of the links: (launches, links)

    @classmethod
    def interpolate_between_links(
        cls, link_gbit_s: pd.DataFrame, ratios: pd.DataFrame
    ) -> BreakEvenBandwidths:
        """Return the bandwidth of each launch at which the ratio is 1.

        Args:
            link_gbit_s: bandwidths of the links, in Gbit/s: (launches, links).
            ratios: the ratio over each link, likewise; NaN where a launch did not go over it.
        """
        gbit_s = {}
        for launch in ratios.index:
            measured = ratios.loc[launch].dropna()
            gbit_s[launch] = break_even_gbit_s_or_zero_or_inf(
                link_gbit_s.loc[launch][measured.index], measured
            )
        return cls(pd.Series(gbit_s, dtype=float), link_gbit_s)

    @property
    def median_link_range_gbit_s(self) -> tuple[float, float]:
        """Slowest and fastest link, the medians over launches."""
        medians = self.link_gbit_s.median()
        return float(medians.min()), float(medians.max())

    @property
    def gbit_s_clipped_to_links(self) -> pd.Series[float]:
        """Bandwidths by launch, in place of one outside the nearest link of the launch."""
        return self.gbit_s.clip(self.link_gbit_s.min(axis=1), self.link_gbit_s.max(axis=1))

    def mean_if_within_links(self) -> Estimate | None:
        """Return the mean over launches; None where one of them lies outside, or there is none."""
        return mean_if_within_links(self.gbit_s)

    def describe_outside(self) -> str:
        """Return in words which launches lie outside: 'above 1.92 Gbit/s in 5 of 5 launches'."""
        slowest, fastest = map(format_number, self.median_link_range_gbit_s)
        counts = {
            f"below {slowest}": self.gbit_s == BELOW_LINKS,
            f"above {fastest}": self.gbit_s == ABOVE_LINKS,
        }
        texts = [
            f"{place} Gbit/s in {is_there.sum()} of {len(is_there)} launches"
            for place, is_there in counts.items()
            if is_there.any()
        ]
        return captions.join_with_and(texts or ["within the links"])


def mean_break_even_ratio(
    above: BreakEvenBandwidths, below: BreakEvenBandwidths, noun: str
) -> Estimate | None:
    """Return the mean ratio of two break-even bandwidths, paired by launch.

    In place of one that lies outside the links the nearest of them counts, which makes less of the ratio.

    Args:
        noun: what they are called where they can't be compared.

    Raises:
        IncomparableRunsError: in some launch both lie outside at the same end.
    """
    if not len(above.gbit_s) or not len(below.gbit_s):
        return None
    paired = pd.concat([above.gbit_s, below.gbit_s], axis="columns", join="inner")
    if any(paired.eq(end).all(axis="columns").any() for end in (BELOW_LINKS, ABOVE_LINKS)):
        places = f"{below.describe_outside()}, {above.describe_outside()}"
        raise IncomparableRunsError(f"no two {noun} to compare: {places}")
    return mean_ratio_over_launches(above.gbit_s_clipped_to_links, below.gbit_s_clipped_to_links)


def break_even_gbit_s_or_zero_or_inf(gbit_s: pd.Series[float], ratios: pd.Series[float]) -> float:
    """Return the bandwidth at which a ratio of step times is 1; 0 below all links, infinity above them.

    Linear in both logarithms between the two bandwidths around it, once the ratios are made to rise: a
    faster link helps dense more, so what falls is noise.
    """
    from scipy.optimize import isotonic_regression  # which commands that only list need not wait for

    order = np.argsort(np.asarray(gbit_s, dtype=float))
    x = np.log(np.asarray(gbit_s, dtype=float)[order])
    y = isotonic_regression(np.log(np.asarray(ratios, dtype=float)[order])).x
    if y[0] > 0:
        return BELOW_LINKS
    if y[-1] < 0:
        return ABOVE_LINKS
    above = int(np.argmax(y >= 0))
    return float(
        np.exp(np.interp(0.0, y[above - 1 : above + 1], x[above - 1 : above + 1]) if above else x[0])
    )


def mean_if_within_links(gbit_s: pd.Series[float]) -> Estimate | None:
    """Return the mean of bandwidths over launches; None where one lies outside the links."""
    return (
        mean_over_launches(gbit_s)
        if gbit_s.between(BELOW_LINKS, ABOVE_LINKS, inclusive="neither").all()
        else None
    )


# --- predictions of exchanges


def absolute_percent_errors(predicted: pd.Series[float], measured: pd.Series[float]) -> pd.Series[float]:
    """Return how far predictions are off, in percent of what was measured."""
    return 100 * (predicted / measured - 1).abs().astype(float)


def summarize_errors_by_group(errors: pd.Series[float], groups: pd.Series[Any]) -> pd.DataFrame:
    """Return number, median and 90th percentile of the errors of each group, in the order of the groups."""
    by_group = errors.groupby(groups, sort=False)
    summary: pd.DataFrame = pd.DataFrame({
        "cases": by_group.size(), "median error": by_group.median(),
        "90th percentile": by_group.quantile(0.9),
    })  # fmt: skip
    return summary


def prediction_error_claims(
    name: str, error_quantile: Callable[..., Estimate | None], **words: Any
) -> list[Claim]:
    """Return a claim that half, and one that nine tenths, of the predictions err by no more than the limits.

    Args:
        error_quantile: takes frames and a quantile, and gives that quantile of the errors in percent.
    """
    limits: Sequence[tuple[str, float, float]] = (
        ("half", 0.5, MAX_MEDIAN_ERROR_PERCENT), ("nine tenths", 0.9, MAX_P90_ERROR_PERCENT),
    )  # fmt: skip
    return [
        make_claim(name, error_quantile, quantile, case=share, share=share, tolerance=limit, **words)
        for share, quantile, limit in limits
    ]
