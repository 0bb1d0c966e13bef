"""Foroutan Eghlidi and Jaggi 2020, Sparse Communication for Training Deep Networks."""

from experiments.figures._ledger import Statement

TABLE1 = "section 4.2.1 on their Table 1"
STATEMENTS = (
    Statement(
        39,
        "Test accuracy during training",
        "Fig. 1",
        why="Its curves end where Table 1's numbers are, which statement 40 judges.",
    ),
    Statement(
        40,
        "Test accuracies of six schemes, two scopes and one to eight workers: 48 cells",
        "Table 1",
        {"eghlidi-table1": ["test accuracy,"], "methods": ["Top-k global ends close"]},
    ),
    Statement(
        41,
        "Layer-wise selection is always better than global",
        TABLE1,
        {
            "eghlidi-table1-published": ["layer-wise selection is above global"],
            "eghlidi-table1": ["Top-k layer-wise ends above"],
            "methods": ["Top-k layer-wise ends above"],
        },
    ),
    Statement(
        42,
        "Top-k is best across the board",
        TABLE1,
        {"eghlidi-table1-published": ["Top-k is the best sparse method"]},
    ),
    Statement(
        43,
        "For Random-k, allGather and allReduce make no considerable difference",
        TABLE1,
        {"eghlidi-table1-published": ["allGather and allReduce give Random-k"]},
    ),
    Statement(
        44,
        "With allReduce, Block-random-k loses accuracy as workers are added",
        TABLE1,
        {
            "eghlidi-table1-published": ["Block-random-k loses with allReduce"],
            "methods": ["Block-random-k with allreduce, global"],
        },
    ),
    Statement(
        45,
        "Globally, Block-random-k with allReduce falls from 91.18 with one worker to 78.11 with eight",
        TABLE1,
        {"eghlidi-table1": ["Block-random-k with allReduce, global, loses"]},
    ),
    Statement(
        46,
        "Accuracy falls with the number of workers for all configurations",
        TABLE1,
        {"eghlidi-table1-published": ["rows in which every doubling", "rows that end lower"]},
    ),
    Statement(
        47,
        "Only Block-random-k takes less time than standard SGD; Top-k spends most of its step on coding",
        "section 4.2.2 on their Table 2",
        {
            "eghlidi-table2": [
                "standard SGD takes longer",
                "Top-k takes longer",
                "Random-k",
                "Top-k's gradients",
                "Top-k spends",
            ]
        },
    ),
    Statement(
        48,
        "Forward and backward passes take the same time with every scheme",
        "section 4.2.2 on their Table 2",
        {"eghlidi-table2": ["forward and backward passes"]},
    ),
    Statement(
        49,
        "The gain grows with the number of workers",
        "section 4.2.2",
        {"shi-scaling": ["Top-k with torch.topk scales better"]},
        why="By simulation only.",
    ),
    Statement(
        50,
        "Algorithm 1, line 11: the residual is what was selected from less the aggregated update",
        "Algorithm 1",
        why="Taken literally it is wrong: each worker must subtract what it sent itself, as the text says. "
        "method.feedback=literal does what is printed.",
    ),
)
