"""Yoon and Oh 2022, Empirical Analysis on Top-k Gradient Sparsification for Distributed Deep Learning in a
Supercomputing Environment.
"""

from experiments.figures._ledger import Statement

LOGS = "; the authors' job logs"
STATEMENTS = (
    Statement(
        1,
        "An iteration of conventional averaging beside one of Top-k sparsification",
        "Fig. 1",
        why="A drawing of how both work; fig1 draws one measured iteration of each: nothing to judge.",
    ),
    Statement(
        2,
        "Validation loss ends at 0.420 (dense), 0.478 (Top-k), 0.816 (Random-k); Top-k's is slightly higher",
        f"Fig. 2 and the text under it{LOGS}",
        {"fig2": ["final validation loss", "Top-k ends slightly above", "Random-k ends above"]},
    ),
    Statement(
        3,
        "Top-1 ends at 92.99, 91.52 and 70.98 %: Top-k's is slightly lower than and near to the baseline's",
        f"Fig. 3 and the text under it{LOGS}",
        {
            "fig3": ["final top-1", "Top-k ends close", "dense ends above"],
            "fig3-logs": ["final top-1", "dense ends above"],
            "fig3-slim": ["Top-k at density 0.001 ends close", "dense ends above"],
        },
    ),
    Statement(
        4,
        "Random-k does not attain the level of convergence, because it selects at random",
        "text under Fig. 3",
        {
            "fig3": ["Random-k (no feedback) ends clearly below"],
            "fig3-slim": ["Random-k (no feedback) ends clearly below"],
        },
        why="That it ends below is judged; its cause is not: the Random-k that they ran drops what it does "
        "not send.",
    ),
    Statement(
        5,
        "8 A100 train at 17,387.49 (dense), 3,723.61 (Top-k) and 15,648.40 samples/s (Random-k)",
        "section on training speed",
        {
            "speed": [
                "training speed, dense, 8 A100",
                "training speed, Top-k, 8 A100",
                "training speed, Random-k",
            ]
        },
    ),
    Statement(
        6,
        "Dense is 4.67 times as fast as Top-k and 1.11 times as fast as Random-k",
        "section on training speed",
        {
            "speed": [
                "dense over Top-k",
                "dense over Random-k",
                "dense trains faster",
                "Random-k trains faster",
            ],
            "speed-logs": [
                "time per iteration without validation, Top-k / dense",
                "time per iteration without validation, Top-k / Random-k",
                "time per iteration without validation, Random-k / dense",
                "dense trains faster",
                "Random-k trains faster",
            ],
        },
    ),
    Statement(
        7,
        "Top-k is slow because sorting is slow on GPUs, and Random-k does not sort",
        "section on training speed",
        {"speed-fast": ["Top-k with torch.topk is slower than fused"]},
        why="Their own Random-k draws its indices by torch.randperm, which sorts 14.7 million keys on a "
        "GPU and costs 5 ms of backpropagation in their logs: sorting alone is not what is slow.",
    ),
    Statement(
        8,
        "Compression dominates Top-k's iteration: 211.78 of 275.00 ms",
        "Fig. 4 and the text under it",
        {
            "fig4": ["compression dominates", "compression per iteration"],
            "fig4-logs": ["compression dominates"],
        },
    ),
    Statement(
        9,
        "Communication is a small part of each iteration",
        "text under Fig. 4",
        {"fig4-logs": ["communication is a small part"]},
    ),
    Statement(
        10,
        "Communication takes 16.86 (Top-k), 1.00 (Random-k) and 1.24 ms (dense)",
        "text under Fig. 4",
        {
            "fig4": ["communication per iteration", "Top-k communicates longer"],
            "fig4-logs": ["communication per iteration", "Top-k's communication is longer"],
        },
    ),
    Statement(
        11,
        "Top-k communicates longer because messages of workers that compress late arrive late",
        "text under Fig. 4",
        {
            "fig4": ["Top-k's communication is mostly waiting"],
            "fig4-logs": ["late selection of the last rank", "Random-k's communication does not come"],
            "straggler": ["Top-k's communication grows", "lateness of one worker explains"],
        },
    ),
    Statement(
        12,
        "Communication will fall once compression is cheap",
        "section on future work",
        {"slow-links": ["communication of Top-k falls"]},
    ),
    Statement(
        13,
        "PCIe in place of NVLink costs Top-k 2 %: the bandwidth decides",
        "section on communication bandwidth",
        {
            "speed": ["Top-k on PCIe against NVLink"],
            "speed-logs": [
                "Top-k on the PCIe node",
                "dense on the PCIe node",
                "Top-k's change lies in the link",
            ],
        },
    ),
    Statement(
        14,
        "Where bandwidth is narrow, Top-k should be better than the baseline",
        "text under Fig. 4",
        {"slow-links": ["on 1 Gbit/s", "on 10 Gbit/s"]},
    ),
    Statement(
        15,
        "On 8 V100 dense is 3.38 times as fast as Top-k; dense on A100 is 1.37 times as fast as on V100",
        "section on GPU capability",
        {
            "speed": [
                "dense over Top-k, 8 V100",
                "dense, 8 A100 over 8 V100",
                "training speed, dense, 8 V100",
            ],
            "speed-logs": [
                "time per iteration without validation, Top-k / dense, V100",
                "time per iteration without validation, dense, V100 / A100",
            ],
        },
    ),
    Statement(
        16,
        "Top-k is no faster on A100 than on V100",
        "section on GPU capability",
        {
            "speed": ["training speed, Top-k, 8 V100"],
            "speed-logs": ["time per iteration without validation, Top-k, V100 / A100"],
            "fig4-logs": ["the A100 does not compress faster"],
        },
    ),
    Statement(
        17,
        "A100 and V100 compute 312 and 125 TFLOPS",
        "section on GPU capability",
        why="True of the data sheets, as peaks of half-precision tensor cores; these runs used fp32 and TF32 "
        "with peaks of 19.5 and 156 on the A100 and 15.7 on the V100.",
    ),
    Statement(
        18,
        "Quantisation compresses at most 32 times, sparsification 1,000 times",
        "introduction",
        {"stable-costs": ["words of topka"]},
        why="A density of 0.001 is 1,000 times fewer elements; with an index for each and the parts of 8 "
        "workers gathered, a worker sends 125 times fewer bytes than a ring's allreduce of all.",
    ),
    Statement(
        19,
        "Future work: a selection that costs little",
        "conclusion",
        {
            "fig4-fast": [
                "compression with torch.topk takes longer",
                "compression dominates",
                "fused compression",
            ],
            "speed-fast": ["dense trains faster than Top-k, fused", "Top-k with torch.topk is slower"],
        },
    ),
)
