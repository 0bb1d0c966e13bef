"""Zhang, Stable Top-K: Exploiting Temporal Stability of Top-K Gradients (slides)."""

from experiments.figures._ledger import Statement

COSTS = "slide 'Current SOTA: Ok-Topk Sparsity', Table 1"
STATEMENTS = (
    Statement(
        25,
        "fp32 gradients of BERT-Large (345 million), GPT-NeoX (20 billion) and GPT-3 (175 billion) "
        "are 1.28, 74 "
        "and 652 GB",
        "slide 'Why Sparsity?'",
        why="Arithmetic: 4 bytes each are 1.38, 80 and 700 GB, or 1.29, 74.5 and 652 GiB: the unit is GiB, "
        "rounded down.",
    ),
    Statement(
        26,
        "Most gradient values are near zero",
        "slide 'Why Sparsity?', after Shi et al.",
        {"shi-distribution": ["most values of the"]},
    ),
    Statement(
        27,
        "How many values can go before convergence suffers: 90, 99 or 99.9 %?",
        "slide 'Why Sparsity?'",
        {"why-gap": ["a density of 0.1"], "fig3-slim": ["ten times the density"]},
    ),
    Statement(
        28,
        "DGC speeds training up on 1 Gbit/s Ethernet, and on 10 Gbit/s",
        "slide 'Previous SOTA: Deep Gradient Compression', charts after Lin et al.",
        {"stable-dgc": ["DGC is faster than dense on 1 Gbit/s", "DGC gains more on 1 than on 10"]},
    ),
    Statement(
        29,
        "DGC does not help much where links are fast, because selecting costs",
        "slide 'Previous SOTA: Deep Gradient Compression'",
        {"stable-dgc": ["DGC does not help on NVLink 3"]},
    ),
    Statement(
        30,
        "Overheads of dense and sparse allreduces: twelve formulas; they grow with the number of workers",
        COSTS,
        {"stable-costs": ["words of", "latency terms of", "Top-k's words grow"]},
    ),
    Statement(
        31,
        "Gradients of BERT are sparse, too",
        "slide after Table 1",
        {
            "shi-distribution": ["most values of the BERT"],
            "shi-bound": ["Top-k leaves out less than (1 - k/d)² of the BERT"],
        },
    ),
    Statement(
        32,
        "Ok-Topk and S-TopK on SQuAD, GLUE and ImageNet: 88.10, 89.96 and so on",
        "slides 'Shortcomings of Current SOTA' and the last table",
        {"stable-sweep": ["Stable Top-K (B"]},
        why="Takes BERT-Large and MAE on many GPUs for 10 to 84 hours; of the training loss alone a small "
        "model says something.",
    ),
    Statement(
        33,
        "Regions of large gradients are stable over time, single elements are not",
        "slides on BERT and MAE",
        {"stable-heatmap": ["regions of the", "single elements of the"]},
    ),
    Statement(
        34,
        "OpenFold's gradients are likewise",
        "slide on the hypothesis",
        why="OpenFold is not run here: its data fill terabytes and its training many GPUs.",
    ),
    Statement(
        35,
        "Buckets that are too small let training diverge",
        "slide on bucket size",
        {"stable-sweep": ["small buckets"]},
    ),
    Statement(
        36,
        "Selecting too seldom lets the stable regions decay",
        "slide on sampling frequency",
        {"stable-sweep": ["selecting seldom"]},
    ),
    Statement(
        37,
        "Stable Top-K trains in the shortest time",
        "slide on BERT and MAE",
        {
            "stable-throughput": [
                "a step of Stable Top-K is shorter",
                "Stable Top-K is down to the same loss",
                "Ok-Topk adds more to computing",
            ]
        },
        why="Simulated: of small models of both families, and of theirs without their computing, which the "
        "slides do not say.",
    ),
    Statement(
        38,
        "Hours of BERT-Large: 84.3, 52.4 with Ok-Topk, 41.8 with S-TopK; of MAE 20.3, 13.3 and 11.0",
        "last table",
        {"stable-throughput": ["hours of dense training over those of"]},
        why="The hours themselves take their GPUs, which the slides do not name; small models say a shape.",
    ),
)
