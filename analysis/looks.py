"""What looks at gradients are called in records: see experiments/training/looks.py, which takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # workers take looks without it
    import pandas as pd

ALL = "all"  # in place of a tensor's name: the whole model
SLICES = 64  # of a tensor, in which is counted what was selected
REGIONS = (1, 10, 100, 1000)  # elements of a region


def largest_tensors(looks: pd.DataFrame) -> pd.Series[str]:
    """Of each run the name of its tensor with the most elements; of several the first by name."""
    sizes = looks[looks["what"].eq("size") & looks["of"].ne(ALL)]
    largest_first = sizes.sort_values(["value", "of"], ascending=[False, True])
    found: pd.Series[str] = largest_first.groupby("key")["of"].first()
    return found
