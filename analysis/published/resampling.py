"""A moving-block bootstrap over the iterations of one job (Künsch 1989, doi:10.1214/aos/1176347265)."""

from __future__ import annotations

import numpy as np

DRAWS = 2000
SEED = 0  # the same table gives the same interval
# Iterations in a block: four validations, which come every 49 iterations. Compression drifts over hundreds of
# iterations (its autocorrelation is still 0.1 after 200), so blocks of 49 would give Top-k intervals a third
# narrower; 34 blocks are left.
BLOCK = 196


def block_sums(columns: np.ndarray, stream: int, block: int = BLOCK, draws: int = DRAWS) -> np.ndarray:
    """Sums over resampled iterations, (1 + draws, m); the first row is of the iterations as they were.

    Blocks begin anywhere and go round the end, so that each iteration is drawn as often as the others. What
    follows from sums (means, ratios, slopes) is then the same arithmetic for the table and for each draw.

    Args:
        columns: (iterations, m)
        stream: of random numbers; jobs that ran apart are drawn apart.
    """
    n = len(columns)
    if block > n:
        raise ValueError(f"a block of {block} iterations is longer than the {n} there are")
    running = np.concatenate(
        [np.zeros((1, columns.shape[1])), np.cumsum([*columns, *columns[:block]], axis=0)]
    )
    of_block = running[block:][:n] - running[:n]  # (n, m), by where a block begins
    starts = np.random.default_rng([SEED, stream]).integers(0, n, (draws, round(n / block)))
    drawn = np.stack([of_block[:, column][starts].sum(axis=1) for column in range(columns.shape[1])], axis=1)
    return np.concatenate([columns.sum(axis=0, keepdims=True), drawn])
