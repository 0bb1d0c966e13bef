"""The help of one command: what it does and every word it takes."""

from __future__ import annotations

from experiments import commands, figures
from experiments.commands._words import Kind, kinds
from experiments.config import compose, schema
from experiments.tasks import REGISTRY as TASKS
from sparsify.methods import REGISTRY as METHODS


def explain(command: str) -> str:
    """The words behind a command: its items, choices, leaves and hyperparameters."""
    parameters, text = commands.REGISTRY.parameters(command), ""
    taken = {kind for parameter in parameters.values() for kind in kinds(parameter.allowed)}
    if Kind.ITEM in taken:
        text += f"items: {', '.join(figures.items())}\n"
    if Kind.SETTING in taken:
        text += f"\nchoices (group=option):\n{_choices()}"
        text += f"\nleaves (key=value), with the defaults of a bare `run`:\n{_leaves()}"
        text += f"\nhyperparameters:\n{_hyperparameters()}"
    return text


def _choices() -> str:
    return "".join(f"  {group:9} {', '.join(compose.options(group))}\n" for group in compose.GROUPS)


def _leaves() -> str:
    config = compose.resolve([])
    known = {name: schema.leaf(config, name) for name in compose.leaves(config)}
    return "".join(f"  {name}={_word(value)}\n" for name, value in known.items())


def _hyperparameters() -> str:
    text = ""
    for registry in (METHODS, TASKS):
        for name in registry.names():
            if why := registry.why_broken(name):
                text += f"  {registry.noun}={name} can't be read: {why}\n"
                continue
            values = " ".join(f"{key}={_word(value)}" for key, value in registry.defaults(name).items())
            text += f"  {registry.noun}={name}: {registry.summary(name)}\n      {values}\n"
    return text


def _word(value: object) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    return str(value).replace(" ", "").replace("(", "[").replace(",)", "]").replace(")", "]")
