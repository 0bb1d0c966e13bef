"""The runs of items: which configs a figure needs, and which the words behind a command ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments import figures
from experiments.config import compose, grid
from experiments.config.config import Config
from experiments.config.plan import PlannedRun, requested_or_default_profile
from experiments.config.run import Run, RunOrWords
from experiments.figures.figure import Figure, file_prefix
from experiments.training.settings import AlternationSettings

# What takes turns is launched several times, for launches differ by more than what one of them sees; the seed
# numbers them. Those that come with --all are to be of another occasion (`reproduce`).
LAUNCH_SEEDS = {"smoke": (0, 1), "laptop": (0, 1, 2), "paper": (0, 1, 2)}
MORE_LAUNCH_SEEDS = {"smoke": (), "laptop": (3, 4), "paper": (3, 4)}
MIN_BLOCKS = 10  # of each variant in a launch


class RequestedRuns(NamedTuple):
    """The runs that words on the command line ask for, and the name of their sweep."""

    sweep: str  # its name
    configs: list[Config]


def required_configs(figure: Figure, profile: str, overrides: RunOrWords = ()) -> list[Config]:
    """Return the configs of the runs that a figure needs, the first launch of all before the second of any.

    Args:
        overrides: settings for all of them.
    """
    settings = Run.coerce(overrides)
    seeds = (settings.settings["seed"],) if "seed" in settings.settings else LAUNCH_SEEDS[profile]
    return _resolve(repeat_alternating_runs(figure.runs(profile), seeds), settings)


def additional_configs(figure: Figure, profile: str, overrides: RunOrWords = ()) -> list[Config]:
    """Return the configs of the runs that make a figure firmer, with more seeds and launches.

    They are drawn where they are there. How long others take turns is none of a training's business.
    """
    settings = Run.coerce(overrides)
    more = figure.more_runs(profile)
    trained = [run for run in more if not run.variants]
    timed = repeat_alternating_runs((run for run in more if run.variants), LAUNCH_SEEDS[profile])
    if "seed" not in settings.settings:
        numbered = filter(has_variants_without_seed, figure.runs(profile))
        timed += repeat_alternating_runs(numbered, MORE_LAUNCH_SEEDS[profile])
    return _resolve(timed, settings) + _resolve(
        trained, settings.without("alternate.") if timed else settings
    )


def has_variants_without_seed(run: Run) -> bool:
    """Tell whether variants take turns in the run and it names no seed: then a launch is one of several."""
    return bool(run.variants) and "seed" not in run.settings


def repeat_alternating_runs(runs: Iterable[Run], seeds: Sequence[int]) -> list[Run]:
    """Return trainings once, and then the runs whose variants alternate once for each of these seeds.

    The time that an item gives to its turns is that of its first launches together.
    """
    planned = list(runs)
    repeated = [run for run in planned if not has_variants_without_seed(run)]
    for seed in seeds:
        for run in filter(has_variants_without_seed, planned):
            total_min = run.settings.get("alternate.limit_min", AlternationSettings().limit_min)
            limit = {"alternate.limit_min": total_min / len(LAUNCH_SEEDS["laptop"])}
            settings = {"alternate.blocks": MIN_BLOCKS, **run.settings, **limit, "seed": seed}
            repeated.append(Run(settings, run.variants))
    return repeated


def requested_runs(
    words: Sequence[str], *, include_additional: bool = False, allow_many: bool = True
) -> RequestedRuns:
    """Return the runs that words ask for: those of figures, else one run, else a grid.

    The sweep has the name that the words give (`sweep=thesis`), else that of the figures.

    Args:
        include_additional: also the runs that make figures firmer.
        allow_many: allow a grid of very many runs.
    """
    sweep, words = grid.split_sweep_name(words)
    requested = [figures.load(figures.find_item(word)) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for figure in requested:
        figure.check_claims()
        if not figure.needs_runs:
            raise ValueError(
                f"{figure.name} has no runs to queue: `reproduce {figure.name}` draws it from published "
                "tables"
            )
    if not requested:
        return RequestedRuns(sweep or "runs", grid.resolve_grid(overrides, allow_many=allow_many))
    profile = requested_or_default_profile(overrides)
    settings = Run.coerce(overrides)
    configs = [config for figure in requested for config in required_configs(figure, profile, settings)]
    if include_additional:
        for figure in requested:
            configs += additional_configs(figure, profile, settings)
    name = "-".join([*(file_prefix(figure.name) for figure in requested), profile])
    return RequestedRuns(sweep or name, configs)


def attach_claim_rules(planned: Sequence[PlannedRun], words: Sequence[str]) -> list[PlannedRun]:
    """Return the runs with the rules of all claims, which they register when they begin.

    Without rules where words name no figure.
    """
    names_figures = any("=" not in word for word in words)
    rules = figures.claim_rule_digests() if planned and names_figures else {}  # which takes seconds
    return [replace(run, rule_digest_by_claim=rules) for run in planned]


def _resolve(runs: Iterable[Run], overrides: Run) -> list[Config]:
    shared = overrides.without("profile")
    return [compose.resolve(run | shared) for run in runs]
