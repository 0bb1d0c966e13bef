"""The runs of items: which configs a figure needs, and which the words behind a command ask for."""

from __future__ import annotations

from collections.abc import Sequence

from experiments import figures
from experiments.config import compose, grid
from experiments.config.config import Config
from experiments.config.plan import profile_of
from experiments.config.run import Run, RunOrWords


def configs_of(item: str, profile: str, asked: RunOrWords = ()) -> list[Config]:
    """The configs of the runs that a figure needs.

    Args:
        asked: settings for all of them.
    """
    return _resolved(figures.load(item).runs(profile), Run.of(asked))


def more_configs_of(item: str, profile: str, asked: RunOrWords = ()) -> list[Config]:
    """The configs of the runs that make a figure firmer, mostly with more seeds: drawn where they are there.
    How long the item's other runs take turns is none of their business.
    """
    figure, own = figures.load(item), Run.of(asked)
    if not hasattr(figure, "more_runs"):
        return []
    runs = figure.more_runs(profile)
    if _in_turns(figure.runs(profile)) and not _in_turns(runs):
        own = own.without("alternate.")
    return _resolved(runs, own)


def name_and_configs(words: Sequence[str], more: bool = False, many: bool = True) -> tuple[str, list[Config]]:
    """The runs that words ask for: those of figures (and those that make them firmer), else one, else a grid.

    The name is the sweep's (`sweep=thesis`) where the words name one.
    """
    sweep, words = grid.sweep_of(words)
    items = [figures.find(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for item in items:
        figures.check(item)
        if not figures.has_runs(item):
            raise ValueError(
                f"{item} has no runs to queue: `reproduce {item}` draws it from published tables"
            )
    if not items:
        return sweep or "runs", grid.configs(overrides, many)
    profile, asked = profile_of(overrides), Run.of(overrides)
    sources = (configs_of, more_configs_of) if more else (configs_of,)
    found = [config for of in sources for item in items for config in of(item, profile, asked)]
    return sweep or "-".join([*map(figures.file_name, items), profile]), found


def rules_for(words: Sequence[str]) -> dict[str, str]:
    """The rules that runs register which words ask for: those of all claims, where they are of figures."""
    return figures.rules() if any("=" not in word for word in words) else {}


def _in_turns(runs: Sequence[RunOrWords]) -> bool:
    return any(Run.of(run).variants for run in runs)


def _resolved(runs: Sequence[RunOrWords], asked: Run) -> list[Config]:
    extra = asked.without("profile")
    return [compose.resolve(Run.of(run) | extra) for run in runs]
