"""Settings as fields of frozen dataclasses: their records, their types by dotted keys, other values.

Those that trainings take as they are stand at the end: `train`, `late` and `alternate` of a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sparsify.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

SettingsT = TypeVar("SettingsT", bound="Settings")


def setting(default: Any, meaning: str, since: str = "") -> Any:
    """Return a field of `Settings` with its default and the meaning that help shows.

    Args:
        since: the date when it was added, if runs had been recorded before. Records leave it out where it
            has its default, so that runs of before keep their keys. What reads records learns the default
            from the `implied_value` of the setting's row in analysis/records/columns.yaml.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "since": since})


class Settings(Mapping[str, Any]):
    """Several settings: a frozen dataclass.

    As a mapping it is what `as_dict` records, for `analysis`, which knows records and none of these classes.
    """

    @classmethod
    def subclass_for(cls, values: Mapping[str, Any]) -> type[Settings]:
        """Return the subclass whose fields these values are for."""
        return cls

    @classmethod
    def from_dict(cls: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
        """Return settings with these values, nested, and the defaults of all others.

        Names that the class lacks are ignored.
        """
        kind = cls.subclass_for(values)
        arguments = {}
        for name, allowed in type_by_field(kind).items():
            if name in values:
                value = values[name]
                inner = nested_settings_class(allowed)
                arguments[name] = (
                    inner.from_dict(value) if inner and isinstance(value, Mapping) else _freeze(value)
                )
        settings: SettingsT = kind(**arguments)  # type: ignore[assignment]  # `kind` is a subclass
        return settings

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as records have them: nested dicts, lists, numbers, words."""
        added = _defaults_of_added_fields(type(self))
        values = {name: getattr(self, name) for name in type_by_field(type(self))}
        return {name: to_plain(value) for name, value in values.items() if value != added.get(name, MISSING)}

    def get_setting(self, dotted: str) -> Any:
        """Return the value of a dotted key, as `as_dict` has it; None where there is none."""
        name, _, rest = dotted.partition(".")
        value = getattr(self, name, None)
        if rest:
            return value.get_setting(rest) if isinstance(value, Settings) else None
        return to_plain(value)

    def with_setting(self: SettingsT, dotted: str, value: Any) -> SettingsT:
        """Return a copy with another value for a dotted key."""
        name, _, rest = dotted.partition(".")
        changed: SettingsT = replace(  # type: ignore[type-var]  # each kind of Settings is a dataclass
            self, **{name: getattr(self, name).with_setting(rest, value) if rest else _freeze(value)}
        )
        return changed

    @cached_property
    def _recorded(self) -> dict[str, Any]:
        return self.as_dict()

    def __getitem__(self, key: str) -> Any:
        return self._recorded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorded)

    def __len__(self) -> int:
        return len(self._recorded)


def iterate_setting_types(
    settings_class: Any, class_by_part: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key and its type, annotated with its meaning.

    Args:
        class_by_part: the class of a part, by its name; None where the part is left out.
    """
    for key, allowed in type_by_field(settings_class).items():
        inner = nested_settings_class(allowed)
        part_class = class_by_part.get(key, inner)
        if inner is None:
            yield prefix + key, allowed
        elif part_class is not None:
            yield from iterate_setting_types(part_class, class_by_part, f"{prefix}{key}.")


def setting_meaning(allowed: Any) -> str:
    """Return the meaning of a setting, which its type is annotated with."""
    annotations = get_args(allowed) if get_origin(allowed) is Annotated else ()
    return next((part for part in annotations if isinstance(part, str)), "")


@cache
def type_by_field(settings_class: Any) -> dict[str, Any]:
    """Return the fields of a class and their types, annotated with their meanings."""
    types = get_type_hints(settings_class, include_extras=True)
    for field in fields(settings_class):
        if "meaning" in field.metadata:
            types[field.name] = Annotated[types[field.name], field.metadata["meaning"]]
    return {field.name: types[field.name] for field in fields(settings_class)}


def nested_settings_class(allowed: Any) -> type[Settings] | None:
    """Return the class of a part, from the type of its field; None where the field is a single setting."""
    if get_origin(allowed) in (Annotated, Union, UnionType):
        return next(filter(None, map(nested_settings_class, get_args(allowed))), None)
    # Python 3.10 calls tuple[int] a type.
    is_class = isinstance(allowed, type) and get_origin(allowed) is None
    return allowed if is_class and issubclass(allowed, Settings) else None


@cache
def _defaults_of_added_fields(kind: Any) -> dict[str, Any]:
    """Return the defaults of fields that were added after runs had been recorded."""
    return {field.name: field.default for field in fields(kind) if field.metadata.get("since")}


def to_plain(value: Any) -> Any:
    """Return a value as records have it."""
    if isinstance(value, Settings):
        return value.as_dict()
    return list(map(to_plain, value)) if isinstance(value, list | tuple) else value


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class TrainSettings(Settings):
    """The length of the training, and when it is validated."""

    epochs: PositiveInt = setting(10, "epochs of the schedule's clock")
    lr_decay_epochs: NonNegativeFloat = setting(
        0,
        "in so many last epochs the learning rate falls linearly to 0, whatever the task's schedule is; 0: "
        "it does not",
        since="2026-11-30",
    )
    epoch_steps: PositiveInt | None = setting(
        None, "steps of an epoch of this clock; null: ceil(images / (batch size x workers))"
    )
    steps: PositiveInt | None = setting(None, "end the run after so many steps")
    validate: Literal["epoch", "never"] = setting("epoch", "after epochs, or never")
    validate_every: PositiveInt = setting(
        1, "epochs between two validations; after the last epoch there always is one"
    )
    held_out: NonNegativeInt = setting(
        0,
        "for tuning: validate on so many training images, which are not trained on; on the test set at "
        "the end only",
    )
    validate_on: PositiveInt | None = setting(
        None,
        "validate, and test, on so many examples at most, always the same; null: on all",
        since="2026-11-27",
    )
    evaluate: Literal["anchor", "replica"] = setting(
        "anchor",
        "what is validated where workers step by themselves: what all have in common (anchor), or what "
        "rank 0 has made of it since (replica)",
        since="2026-11-26",
    )
    look_every: PositiveInt | None = setting(
        None,
        "steps between two looks at what rank 0 selects from and selects: distributions, energy left "
        "out, whether places stay; null: never",
    )

    def lr_decay_factor(self, step: int, steps_per_epoch: int) -> float:
        """Return the factor of the learning rate in a step, counted from 0: 1 before the last epochs.

        With a constant rate before, it is the schedule of Hagele et al. (NeurIPS 2024, section 3): trainings
        of different lengths are alike until the first of them decays.
        """
        if not self.lr_decay_epochs:
            return 1.0
        epochs_left = self.epochs - step / steps_per_epoch
        return min(1.0, max(0.0, epochs_left / self.lr_decay_epochs))


@dataclass(frozen=True)
class LatenessSettings(Settings):
    """Workers that come late on purpose, idle at the end of backward."""

    draw: Literal["none", "constant", "uniform", "lognormal", "published"] = setting(
        "none",
        "how long: constant; uniform, from 0; lognormal; published: as the paper's workers in compression",
    )
    s: NonNegativeFloat = setting(
        0, "seconds: constant; the most, where uniform; the median, where lognormal"
    )
    spread: NonNegativeFloat = setting(0, "standard deviation of the logarithm, where lognormal")
    rank: NonNegativeInt | None = setting(None, "the only worker that is late; null: each draws for itself")


@dataclass(frozen=True)
class AlternationSettings(Settings):
    """The turns that variants take."""

    blocks: PositiveInt = setting(
        30, "turns of each variant at least; a round has one of each, in an order drawn anew"
    )
    block_steps: PositiveInt = setting(
        3, "steps of a turn; the first one after a change of variants is not counted"
    )
    until: PositiveFloat = setting(
        0.05,
        "half-width of the 95 % interval of the logarithm of each ratio to the first variant's step time",
    )
    limit_min: PositiveFloat = setting(
        15, "minutes after which it ends, whether that width is reached or not"
    )
