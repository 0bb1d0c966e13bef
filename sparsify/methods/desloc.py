from sparsify.local.strategy import AveragedState, LocalSteps, PlainStep
from sparsify.method import Dense
from sparsify.ranges import PositiveInt, check_arguments


@check_arguments
def desloc(
    every: PositiveInt = 30, first_moment: PositiveInt = 3, second_moment: PositiveInt = 6
) -> LocalSteps:
    """DES-LOC: local Adam, its moments averaged at periods of their own. Iacob et al. 2025 (ICLR 2026).

    arXiv:2505.22549. In step t:

    1. Each worker takes a step of its own Adam.
    2. If `every` divides t, the parameters are averaged over the workers.
    3. If `every` x `first_moment` divides t, the first moments are averaged.
    4. If `every` x `second_moment` divides t, the second moments are averaged.

    The longer the half-life of a moment, ln 0.5 / ln beta,
    the more slowly it changes, and the more rarely it is averaged. The inner optimizer is the user's own, and
    must keep `exp_avg` and `exp_avg_sq`, as Adam and AdamW do.

    Args:
        every: steps between two averages of the parameters. More steps: fewer bytes, more drift.
        first_moment: averages of the parameters for each average of the first moment; 3 in the paper. Higher:
            fewer bytes, and moments drift further apart.
        second_moment: averages of the parameters for each average of the second moment; 6 in the paper.
    """
    moments = (
        AveragedState("exp_avg", every * first_moment),
        AveragedState("exp_avg_sq", every * second_moment),
    )
    return LocalSteps(every, Dense("layer"), PlainStep(1.0), states=moments)
