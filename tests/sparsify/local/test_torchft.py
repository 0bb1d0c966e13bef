"""What another program publishes of streaming DiLoCo, number by number.

Facts from the test fixtures of torchft (BSD 3-Clause, test_fixtures/*DiLoCoMockedUpdateTest*.json): two
replicas, a model of two parameters, each a fragment; every gradient is 2, the inner step subtracts it, the
outer step moves the anchor by twice the average drift, every 6 steps.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsify.comm import Comm, virtual
from sparsify.local.strategy import Local, Plain
from sparsify.method import Dense
from tests.sparsify.local.rounds import Worker

# By delay and mix: of the fragment that a step of 3, 6, 9, 12, 15 exchanges, the replica and its anchor then.
# Where the last anchor is missing, theirs stopped before it wrote it. Their mix of 1 is left out: no replica
# would ever see the others, which `Local` refuses.
PUBLISHED = {
    (0, 0.0): ((-11, -23, -35, -47, -59), (-11, -23, -35, -47)),
    (0, 0.5): ((-8, -17, -24.5, -32, -40.25), (-11, -23, -29, -35)),
    (1, 0.0): ((-7, -19, -27, -39, -47), (-7, -19, -27, -39, -47)),
    (1, 0.5): ((-6, -15, -21.5, -29, -35.75), (-7, -19, -25, -31, -38)),
}


@pytest.mark.parametrize(("delay", "mix"), PUBLISHED)
def test_fragments_delay_and_mix_give_torchfts_published_numbers(delay: int, mix: float) -> None:
    """Theirs takes the drift `delay` steps before it is due, ours when it is due and applies it later, as the
    paper does: the same but for the first round, so ours begins with as many steps that change nothing.
    """

    def body(comm: Comm) -> tuple[list[float], list[float]]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for p in model.parameters():
            nn.init.ones_(p)
        strategy = Local(6, Dense("layer"), Plain(2.0), fragments=2, delay=delay, mix=mix)
        worker = Worker(strategy, comm, lambda ps: torch.optim.SGD(ps, lr=1.0), model)
        own = list[float]()
        anchors = list[float]()
        for step in range(1 - delay, 16):
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0 if step > 0 else 0.0)
            worker.optimiser.step()
            if step > 0 and step % 3 == 0:
                which = 1 if step % 2 else 0  # ours exchanges the first fragment at the end of a round
                own.append(float(worker.own()[which]))
                anchors.append(float(worker.anchor()[which]))
        return own, anchors

    published = PUBLISHED[delay, mix]
    for own, anchors in virtual.run(2, body):
        assert own == [*published[0]]
        assert anchors[: len(published[1])] == [*published[1]]
