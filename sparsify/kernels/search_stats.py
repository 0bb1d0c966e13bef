"""What kernels count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SearchStats:
    """What a kernel's `topk` did so far."""

    steps: int = 0  # calls
    fallbacks: int = 0  # of these, how many found that their guessed bound was wrong
    candidates: int = 0  # elements that reached a guessed bound, all calls together
    selected: int = 0  # elements that were selected, all calls together

    def __add__(self, other: SearchStats) -> SearchStats:
        return SearchStats(
            self.steps + other.steps,
            self.fallbacks + other.fallbacks,
            self.candidates + other.candidates,
            self.selected + other.selected,
        )
