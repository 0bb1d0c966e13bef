"""Entries that take part, and the runs that each of them is made of."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, convert, yaml

from analysis.benchmark.statement import NAME_PATTERN
from experiments.config.run import Run, RunSettings
from experiments.figures.benchmark.rules import (
    FrozenTask,
    Tier,
    launch_settings,
    rules,
    training_settings,
)
from sparsify import ranges
from sparsify.core.spec import REQUIRED, read_constant
from sparsify.methods import REGISTRY as METHODS

FILE = Path(__file__).with_name("entries.yaml")
SEARCH, ON = "SEARCH", "ON"  # constants of a method's file: what is searched; what tasks need besides
OF_TASKS = ("task.lr", "task.momentum", "task.optimiser", "task.weight_decay")
MOST_VALUES = 10


class Entrant(Struct, frozen=True):
    """A method as it takes part."""

    name: str
    settings: Mapping[str, Any]  # its method, and what stays fixed
    about: str = ""
    search: Mapping[str, Sequence[float]] = {}  # by the method's parameter, the default first
    on: Mapping[str, Mapping[str, Any]] = {}  # by task
    timed: Mapping[str, Any] = {}
    claims: Sequence[str] = ()
    seeds: Sequence[int] = ()  # of its trainings, where they are not the rules'

    @property
    def method(self) -> str:
        """The name of its method."""
        return str(self.settings["method"])


class Trial(NamedTuple):
    """Training on which an entry is tuned."""

    task: str
    lr_factor: float  # times the task's learning rate
    searched: RunSettings
    run: Run


@cache
def shipped_entrants_by_name() -> dict[str, Entrant]:
    """Return the entries of the repository, by name."""
    found = yaml.decode(FILE.read_bytes())
    return {name: convert({"name": name, **own}, Entrant) for name, own in found.items()}


def find_or_make_entrant(name: str, fixed: RunSettings | None = None) -> Entrant:
    """Return the entry of this name: the repository's, or a method as its file has it.

    Args:
        fixed: settings of the method; then the entry is its author's own, and `name` may be new if they name
            a method.

    Raises:
        ValueError: no such entry or method; a setting that is not the method's, or a search that breaks the
            rules.
    """
    fixed = fixed or {}
    if name in shipped_entrants_by_name() and not fixed:
        return shipped_entrants_by_name()[name]
    if name in shipped_entrants_by_name():
        raise ValueError(
            f"{name} is an entry of the repository, with settings of its own: give yours another name, as in "
            f"`enter {name}-mine method={shipped_entrants_by_name()[name].method} ...`"
        )
    method = str(fixed.get("method", name))
    if method not in METHODS.names():
        known = sorted({*shipped_entrants_by_name(), *METHODS.names()})
        raise ValueError(ranges.describe_unknown("entry or method", method, known))
    if strangers := [key for key in fixed if key != "method" and not key.startswith("method.")]:
        raise ValueError(
            f"{strangers[0]} is not for an entry to choose: tasks, links and workers are the rules' "
            "(docs/benchmark.md); give settings of the method, such as method.density=0.01"
        )
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"{ranges.quote(name)} can't be an entry's name: letters, digits, - and _ may be in it"
        )
    searched, on = _searched(method, fixed), _on(method)
    _check_values(method, fixed, searched)
    return Entrant(name, {"method": method, **fixed}, METHODS.summary(method), searched, on)


def _check_values(method: str, fixed: RunSettings, searched: Mapping[str, Sequence[Any]]) -> None:
    """Refuse values that the method does not take, that it lacks, and rounds that no block has whole."""
    values = {key.removeprefix("method."): value for key, value in fixed.items() if key != "method"}
    METHODS.check_hyperparameters(method, values, "method.")
    open_ = [name for name, default in METHODS.defaults(method).items() if default == REQUIRED]
    if missing := [name for name in open_ if name not in values and name not in searched]:
        raise ValueError(f"{method} needs {missing[0]}: fix it, method.{missing[0]}=..., or search it")
    defaults = METHODS.defaults(method)
    if "every" in defaults:
        for every in searched.get("every", [values.get("every", defaults["every"])]):
            if rules().round_steps % every:
                raise ValueError(
                    f"method.every={every}: times are of {rules().round_steps} steps in turn, which must be "
                    "whole rounds; fix an H that divides it, such as 5"
                )


def _on(method: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings that a task needs besides, as the method's file says."""
    path = METHODS.folder / f"{method}.py"
    given = read_constant(path, ON) if path.exists() else None
    if given is None:
        return {}
    where = f"{ON} in {path.name}"
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise ValueError(f"{where} must be a dict of tasks, each with a dict of its settings")
    known = sorted({name for tier in rules().tiers.values() for name in tier.tasks})
    for task, own in given.items():
        if task not in known:
            raise ValueError(f"{where}: {ranges.describe_unknown('task of the benchmark', task, known)}")
        if strangers := [key for key in own if key not in OF_TASKS]:
            raise ValueError(f"{where}: {task} has {strangers[0]}; there may be {', '.join(OF_TASKS)}")
    return dict(given)


def _searched(method: str, fixed: RunSettings) -> dict[str, Sequence[float]]:
    """Return the parameters that are searched, as the method's file says, without those that are fixed."""
    path = METHODS.folder / f"{method}.py"
    given = read_constant(path, SEARCH) if path.exists() else None
    if given is None:
        return {}
    parameters, where = METHODS.parameters(method), f"{SEARCH} in {path.name}"
    if not isinstance(given, Mapping) or len(given) > rules().most_numbers:
        raise ValueError(
            f"{where} must be a dict of at most {rules().most_numbers} of the method's parameters, each with "
            "the values to try"
        )
    for name, values in given.items():
        if name not in parameters:
            raise ValueError(f"{where}: {ranges.describe_unknown('parameter', name, list(parameters))}")
        if not isinstance(values, list | tuple) or not 0 < len(values) <= MOST_VALUES:
            raise ValueError(
                f"{where}: {name} must have a list of values, the default first, at most {MOST_VALUES}"
            )
        for value in values:
            ranges.check_value(f"{where}: {name}", value, parameters[name].allowed)
        default = METHODS.defaults(method)[name]
        if default not in (REQUIRED, values[0]):
            raise ValueError(
                f"{where}: {name} begins with {values[0]}, and its default is {default}: put that first"
            )
    return {name: values for name, values in given.items() if f"method.{name}" not in fixed}


def base_lr(entry: Entrant, name: str, task: FrozenTask) -> float:
    """Return the learning rate that those of the trials are multiples of."""
    return float(entry.on.get(name, {}).get("task.lr", task.lr))


def trial_lr(entry: Entrant, name: str, task: FrozenTask, lr_factor: float) -> float:
    """Return the learning rate of a trial."""
    return float(f"{base_lr(entry, name, task) * lr_factor:.6g}")


def entrant_settings_without_lr(entry: Entrant, name: str) -> RunSettings:
    """Return an entry's settings on a task, without the learning rate."""
    both = {**entry.settings, **entry.on.get(name, {})}
    return {key: value for key, value in both.items() if key != "task.lr"}


def plan_trials(entry: Entrant, tier: Tier) -> list[Trial]:
    """Return all trials: on each task each rate once, with values drawn from the space.

    The first has what is default. What is drawn follows from the version, the entry's name and the task.
    """
    return [trial for name, task in tier.tasks.items() for trial in _trials_on(entry, tier, name, task)]


def _trials_on(entry: Entrant, tier: Tier, name: str, task: FrozenTask) -> Iterator[Trial]:
    how = rules().trials
    points = [dict(zip(entry.search, point, strict=True)) for point in product(*entry.search.values())]
    drawn = random.Random(f"{rules().version} {entry.name} {name}")
    # The default first, then all points in turns, in an order drawn anew for each turn.
    order = [points[0]]
    while len(order) < how.number:
        order += drawn.sample(points, len(points))
    shared = {
        **training_settings(tier, task, how.workers, tier.baseline_length),
        **entrant_settings_without_lr(entry, name),
    }
    for lr_factor, point in islice(zip(rules().rates, order, strict=False), how.number):
        values: RunSettings = {f"method.{key}": value for key, value in point.items()}
        tuned = {
            "train.held_out": task.held_out, "seed": how.seed,
            "task.lr": trial_lr(entry, name, task, lr_factor),
        }  # fmt: skip
        yield Trial(name, lr_factor, values, Run({**shared, **values, **tuned}))


class BestSettings(NamedTuple):
    """An entry's own best settings on a task."""

    lr: float
    searched: RunSettings


class TrainingPlace(NamedTuple):
    """A task, a number of workers, and a length: an entry is trained there once for each seed."""

    task: str
    workers: int
    length: int  # steps


def training_runs(entry: Entrant, tier: Tier, place: TrainingPlace, best: BestSettings) -> list[Run]:
    """Return the trainings of a place that count, one for each seed."""
    task = tier.tasks[place.task]
    settings = {
        **training_settings(tier, task, place.workers, place.length),
        **entrant_settings_without_lr(entry, place.task),
        **best.searched,
        "task.lr": best.lr,
    }
    return [Run({**settings, "seed": seed}) for seed in entry.seeds or rules().seeds]


class LaunchPlace(NamedTuple):
    """A task, a number of workers, and a link over which launches are timed."""

    task: str
    workers: int
    link: str


def launch_places(tier: Tier) -> list[LaunchPlace]:
    """Return the places of a tier, link by link."""
    return [
        LaunchPlace(task, workers, link)
        for link, link_rules in tier.links.items()
        for task in tier.tasks
        for workers in link_rules.workers
    ]


def launch_run(
    entries: Sequence[Entrant],
    tier: Tier,
    place: LaunchPlace,
    number: int,
    best_by_entry_and_task: Mapping[str, Mapping[str, BestSettings]],
) -> Run:
    """Return a launch: a group of processes in which the entries take turns, the baseline first."""
    task = tier.tasks[place.task]
    return Run(
        {**launch_settings(tier, task, place.workers, place.link), "seed": number},
        {
            entry.name: turn_settings(entry, tier, place.task, best_by_entry_and_task[entry.name][place.task])
            for entry in entries
        },
    )


def turn_settings(entry: Entrant, tier: Tier, name: str, best: BestSettings) -> RunSettings:
    """Return the settings in which an entry differs from the others.

    Virtual workers of one GPU overlap nothing.
    """
    own = {**entrant_settings_without_lr(entry, name), **best.searched, "task.lr": best.lr, **entry.timed}
    if tier.is_virtual:
        own.pop("overlap", None)
    return own
