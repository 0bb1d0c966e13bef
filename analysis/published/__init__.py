"""What authors published besides their papers, as tables of facts that the repository ships, and what
follows.

results/published/yoon2022 holds facts from the public job logs of Yoon and Oh 2022
(github.com/kljp/topk_results): one run per configuration, no seeds. `python -m analysis.published CLONE`
makes the tables again from a clone.
"""

from __future__ import annotations

from analysis.published.tables import (
    band,
    by_machine,
    decays,
    epochs,
    iterations,
    jobs,
    over_machines,
    windows,
)

__all__ = ["band", "by_machine", "decays", "epochs", "iterations", "jobs", "over_machines", "windows"]
