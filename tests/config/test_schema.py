"""Values that exclude each other."""

from __future__ import annotations

import pytest

from experiments.config import compose


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["comm=horovod"], "comm=horovod joins processes, and cluster=virtual runs all workers in one"),
        (["link=loopback"], "virtual ranks need a link with alpha and beta; choose link=nvlink"),
        (["cluster.link.alpha_s=null"], "virtual ranks need a link with alpha and beta"),
    ],
)
def test_what_virtual_ranks_can_not_have_processes_can(words: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compose.resolve(["cluster=virtual", *words])
    compose.resolve(["cluster=local", *words])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["link=loopback"], r"link=loopback has alpha_s=None, beta_s_per_byte=None; choose .* cluster=local"),
        (["cluster.link.beta_s_per_byte=0"], r"beta_s_per_byte=0; choose one with numbers"),
        (["cluster.link.beta_s_per_byte=-1"], r"cluster.link.beta_s_per_byte=-1"),
        (["cluster.link.alpha_s=null"], r"link=ethernet_1g has alpha_s=None"),
        (["workers=1"], r"workers=1 fit on one node .*take more workers, or cluster=local"),
        (["cluster.workers_per_node=2"], r"workers=2 fit on one node \(cluster.workers_per_node=2\)"),
        (["cluster.workers_per_node=0"], r"cluster.workers_per_node=0"),
        (["device=cuda"], r"cluster=netns emulates links for processes on the CPU; .* device=cpu"),
        (["comm=horovod"], r"comm=horovod with cluster=netns: .*leave comm=torch"),
        (["launch.probe=link"], r"launch.probe=link leaves .* give collectives=direct"),
    ],
)
def test_what_no_link_can_be_emulated_for_is_refused(words: list[str], why: str) -> None:
    compose.resolve(["cluster=netns", "profile=smoke"])
    with pytest.raises(ValueError, match=why):
        compose.resolve(["cluster=netns", "profile=smoke", *words])


def test_workers_that_do_not_fill_the_last_node_are_fine() -> None:
    config = compose.resolve(["cluster=netns", "workers=5", "cluster.workers_per_node=2"])
    assert config.num_nodes == 3
