"""A request for one run, before it is resolved.

Figures and the command line make it alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

RunSettings = Mapping[str, Any]  # by dotted key, as typed values
RunOrWords = Union["Run", RunSettings, Sequence[str]]


@dataclass(frozen=True)
class Run:
    """The settings of one run that are not left to their defaults.

        Run({"method": "topk", "method.density": 0.01, "seed": 0})
        Run({"task": "cnn_digits"}, variants={"dense": {"method": "dense"}, "sparse": {"method": "topk"}})
        Run.coerce(["method=topk", "method.density=0.01", "seed=0"])

    `compose.resolve` makes a `Config` of it, and refuses what is no setting or out of range.

    Attributes:
        settings: by dotted key, as typed values; a choice of a group has the group's name as its key.
        variants: by name, the settings in which each of those differs that take turns; the first is what the
            others are compared with.
    """

    settings: RunSettings = field(default_factory=dict)
    variants: Mapping[str, RunSettings] = field(default_factory=dict)

    @classmethod
    def coerce(cls, request: RunOrWords) -> Run:
        """Return the run that words of the command line or settings mean; a Run is returned as it is.

        Raises:
            ValueError: a word can't be read, or gives several values.
        """
        if isinstance(request, Run):
            return request
        if isinstance(request, Mapping):
            return cls(dict(request))
        from experiments.config import grammar  # Hydra takes its time, and who makes a Run needs none of it

        texts = dict(map(grammar.split_key_value, request))
        variants = grammar.parse_variants(texts.pop("variants", "{}"))
        return cls({key: grammar.parse_value(key, text) for key, text in texts.items()}, variants)

    def __or__(self, more: RunOrWords) -> Run:
        """Return this run with more settings, which replace its own; variants are replaced as a whole."""
        added = Run.coerce(more)
        return Run({**self.settings, **added.settings}, added.variants or self.variants)

    def without(self, *keys: str) -> Run:
        """Return this run without these settings; `part.` stands for all settings of a part."""
        parts = tuple(key for key in keys if key.endswith("."))
        keys_left = [key for key in self.settings if key not in keys and not key.startswith(parts)]
        return Run({key: self.settings[key] for key in keys_left}, self.variants)

    def to_words(self) -> list[str]:
        """Return the words of the command line that mean this run."""
        from experiments.config import choices, grammar

        words = [
            f"{key}={value if key in choices.GROUPS else grammar.format_hydra_value(value)}"
            for key, value in self.settings.items()
        ]
        if self.variants:
            words_by_variant = {
                name: " ".join(Run(settings).to_words()) for name, settings in self.variants.items()
            }
            words.append(f"variants={grammar.format_hydra_value(words_by_variant)}")
        return words
