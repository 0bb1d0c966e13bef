"""Shi et al. 2019, Understanding Top-k Sparsification in Distributed Deep Learning, arXiv:1911.08772."""

from experiments.figures._ledger import Statement

STATEMENTS = (
    Statement(
        20,
        "Gradients plus residuals of TopK-SGD are distributed like a bell",
        "section on gradient distributions",
        {"shi-distribution": ["the values of the"]},
    ),
    Statement(
        21,
        "What Top-k leaves out is less than (1 - k/d)^2 of the energy, where (1 - k/d) was known",
        "theorem on the bound",
        {"shi-bound": ["Top-k leaves out less"]},
    ),
    Statement(
        22,
        "TopK-SGD loses no obvious accuracy",
        "abstract",
        {
            "fig3": ["Top-k ends close"],
            "fig3-slim": ["Top-k at density 0.001 ends close"],
            "methods": ["Top-k global ends close"],
            "shi-convergence": ["Top-k loses no", "Gaussian-k loses no", "Top-k ends above"],
        },
    ),
    Statement(
        23,
        "An approximate selection by the distribution costs much less than an exact one on GPUs",
        "abstract",
        {"shi-selection": ["Gaussian-k as published selects in much less"]},
        why="No GPU has run it; on CPUs shi-selection says how many times as fast as torch.topk each is.",
    ),
    Statement(
        24,
        "So TopK-SGD scales better",
        "abstract",
        {"shi-scaling": ["Gaussian-k scales better", "Top-k with torch.topk scales better"]},
    ),
)
