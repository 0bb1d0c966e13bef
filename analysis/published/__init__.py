"""Facts that authors published besides their papers, as tables that the repository ships, and results.

results/published/yoon2022 holds facts from the public job logs of Yoon and Oh 2022
(github.com/kljp/topk_results): one run per configuration, no seeds. `python -m analysis.published CLONE`
makes the tables again from a clone.
"""

from __future__ import annotations

from analysis.published.tables import (
    epoch_column_per_machine,
    epoch_table,
    iteration_table,
    job_table,
    learning_rate_decay_epochs,
    mean_and_range_over_columns,
    mean_and_range_over_machines,
    window_table,
)

__all__ = [
    "epoch_column_per_machine",
    "epoch_table",
    "iteration_table",
    "job_table",
    "learning_rate_decay_epochs",
    "mean_and_range_over_columns",
    "mean_and_range_over_machines",
    "window_table",
]
