from sparsify.local.strategy import AveragedState, LocalSteps, PlainStep
from sparsify.method import Dense
from sparsify.ranges import PositiveInt, check_arguments


@check_arguments
def desloc(
    every: PositiveInt = 30, first_moment: PositiveInt = 3, second_moment: PositiveInt = 6
) -> LocalSteps:
    """DES-LOC: local Adam whose parameters and moments are averaged at periods of their own.

    Iacob et al. 2025 (ICLR 2026), arXiv:2505.22549. A moment changes as slowly as its half-life, ln 0.5 / ln
    beta, is long, so it is averaged more rarely. The inner optimizer is the user's own, and must keep
    `exp_avg` and `exp_avg_sq`, as Adam and AdamW do.

    Args:
        every: steps between two averages of the parameters. More steps: fewer bytes, more drift.
        first_moment: the first moment is averaged every so many averages of the parameters.
        second_moment: the second moment, too; both factors as in the paper.
    """
    moments = ("exp_avg", first_moment), ("exp_avg_sq", second_moment)
    states = tuple(AveragedState(key, every * factor) for key, factor in moments)
    return LocalSteps(every, Dense("layer"), PlainStep(1.0), states=states)
