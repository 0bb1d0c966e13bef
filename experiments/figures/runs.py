"""The runs of items: which configs a figure needs, and which the words behind a command ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import figures
from experiments.config import compose, grid
from experiments.config.config import Config
from experiments.config.plan import PlannedRun, profile_of
from experiments.config.run import Run, RunOrWords
from experiments.figures.figure import Figure, file_prefix
from experiments.training.settings import Alternate

# What takes turns is launched several times, for launches differ by more than what one of them sees; the seed
# numbers them. Those that come with --all are to be of another occasion (`reproduce`).
LAUNCHES = {"smoke": (0, 1), "laptop": (0, 1, 2), "paper": (0, 1, 2)}
MORE_LAUNCHES = {"smoke": (), "laptop": (3, 4), "paper": (3, 4)}
BLOCKS = 10  # of each variant in a launch, at least


def configs_of(figure: Figure, profile: str, asked: RunOrWords = ()) -> list[Config]:
    """Return the configs of the runs that a figure needs, the first launch of all before the second of any.

    Args:
        asked: settings for all of them.
    """
    own = Run.of(asked)
    numbers = LAUNCHES[profile] if "seed" not in own.settings else (own.settings["seed"],)
    return _resolved(launched(figure.runs(profile), numbers), own)


def more_configs_of(figure: Figure, profile: str, asked: RunOrWords = ()) -> list[Config]:
    """Return the configs of the runs that make a figure firmer, with more seeds and launches.

    They are drawn where they are there. How long others take turns is none of a training's business.
    """
    own = Run.of(asked)
    more = figure.more_runs(profile)
    extra = [run for run in figure.runs(profile) if is_launched(run) and "seed" not in own.settings]
    trained = [run for run in more if not run.variants]
    timed = [run for run in more if run.variants]
    found = launched([*timed], LAUNCHES[profile]) + launched(extra, MORE_LAUNCHES[profile])
    return _resolved(found, own) + _resolved(trained, own.without("alternate.") if found else own)


def is_launched(run: Run) -> bool:
    """Tell whether variants take turns in it and it names no seed: then a launch is one of several."""
    return bool(run.variants) and "seed" not in run.settings


def launched(runs: Sequence[RunOrWords], numbers: Sequence[int]) -> list[Run]:
    """These runs, those in turns once for each number; the time that an item gives to its turns is that of
    its first launches together.
    """
    every = [Run.of(run) for run in runs]
    found = [run for run in every if not is_launched(run)]
    for number in numbers:
        for run in filter(is_launched, every):
            limit_min = run.settings.get("alternate.limit_min", Alternate().limit_min) / len(
                LAUNCHES["laptop"]
            )
            shorter = {"alternate.blocks": BLOCKS, **run.settings, "alternate.limit_min": limit_min}
            found.append(Run({**shorter, "seed": number}, run.variants))
    return found


def name_and_configs(words: Sequence[str], more: bool = False, many: bool = True) -> tuple[str, list[Config]]:
    """The runs that words ask for: those of figures (and those that make them firmer), else one, else a grid.

    The name is the sweep's (`sweep=thesis`) where the words name one.
    """
    sweep, words = grid.sweep_of(words)
    asked_figures = [figures.load(figures.find_item(word)) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for figure in asked_figures:
        figure.check_claims()
        if not figure.has_runs:
            raise ValueError(
                f"{figure.name} has no runs to queue: `reproduce {figure.name}` draws it from published "
                "tables"
            )
    if not asked_figures:
        return sweep or "runs", grid.configs(overrides, many)
    profile, asked = profile_of(overrides), Run.of(overrides)
    sources = (configs_of, more_configs_of) if more else (configs_of,)
    configs = [
        config for source in sources for figure in asked_figures for config in source(figure, profile, asked)
    ]
    return sweep or "-".join([*(file_prefix(figure.name) for figure in asked_figures), profile]), configs


def registering(planned: Sequence[PlannedRun], words: Sequence[str]) -> list[PlannedRun]:
    """These runs, which register the rules of all claims when they begin where the words are of figures."""
    is_of_figures = any("=" not in word for word in words)
    rules = figures.claim_rules() if planned and is_of_figures else {}  # which takes seconds
    return [replace(run, rules=rules) for run in planned]


def _resolved(runs: Sequence[RunOrWords], asked: Run) -> list[Config]:
    extra = asked.without("profile")
    return [compose.resolve(Run.of(run) | extra) for run in runs]
