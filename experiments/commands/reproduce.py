from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from analysis.records import run_id
from experiments import figures
from experiments.commands._draw import Drawn, draw_local
from experiments.commands._make import is_forced, or_exit, say
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import configs_of, plan_runs, profile_of
from experiments.launch.dispatch import run_all


def reproduce(words: list[str], options: set[str]) -> int:
    """Figures of a paper: their missing runs, pictures and verdicts."""
    items = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not items:
        raise ValueError(f"reproduce what? There are: {', '.join(figures.items())}")
    for item in items:
        figures.check(item)
    force = is_forced(options)
    drawn = [or_exit(partial(reproduce_item, item, overrides, Folders(), force)) for item in items]
    for figure in drawn:
        print(f"\n{figure.table}\n\n{figure.item}: {figure.picture}")
    return 0


def reproduce_item(item: str, overrides: Sequence[str], folders: Folders, force: bool = False) -> Drawn:
    """Make what is missing, then draw."""
    profile = profile_of(overrides)
    planned = plan_runs(configs_of(item, profile, overrides), say)
    todo = planned if force else missing(planned, folders, say)
    say(f"{item} ({profile}): {len(planned)} runs, {len(todo)} missing")
    run_all(todo, folders, f"{item}-{profile}", [item, *overrides], say, force)
    return draw_local(item, profile, [run_id(run.config) for run in planned], folders)
