"""What the items share that are drawn from published numbers: no runs of ours, and words of their
captions.
"""

from __future__ import annotations

from analysis import style
from analysis.numbers import number
from analysis.published import resampling

FROM_LOGS = (
    "*derived from the authors' own job logs* (github.com/kljp/topk_results; one run per "
    "configuration, no seeds; tables in results/published/yoon2022), not measured by this project."
)
LOGS = f"Numbers: {FROM_LOGS}"
INTERVALS = (
    f"Intervals: 95 %, {number(resampling.DRAWS)} draws of blocks of {resampling.BLOCK} iterations (four "
    "validations) within each job; how much another job would differ, they can't say."
)


def label(gpu: str, method: str, apart: str = " ") -> str:
    """'Top-k 8 A100'."""
    return f"{style.look(method).label}{apart}8 {gpu}"
