"""Values that exclude each other."""

from __future__ import annotations

from experiments.config import compose
from tests.config.refusals import check_refusals, read_answers


def test_what_virtual_ranks_can_not_have_processes_can() -> None:
    answers = read_answers("""
comm=horovod -> comm=horovod joins processes, and cluster=virtual runs all workers in one
link=loopback -> virtual ranks need a link with alpha and beta; choose link=nvlink
cluster.link.alpha_s=null -> virtual ranks need a link with alpha and beta
""")
    check_refusals(answers, "cluster=virtual")
    for words in answers:
        compose.resolve(["cluster=local", *words])


def test_what_no_link_can_be_emulated_for_is_refused() -> None:
    words = ("cluster=netns", "profile=smoke")
    compose.resolve(words)
    answers = read_answers("""
link=loopback -> link=loopback has alpha_s=None, beta_s_per_byte=None; choose ... cluster=local
cluster.link.beta_s_per_byte=0 -> beta_s_per_byte=0; choose one with numbers
cluster.link.beta_s_per_byte=-1 -> cluster.link.beta_s_per_byte=-1
cluster.link.alpha_s=null -> link=ethernet_1g has alpha_s=None
workers=1 -> workers=1 fit on one node ... take more workers, or cluster=local
cluster.workers_per_node=2 -> workers=2 fit on one node (cluster.workers_per_node=2)
cluster.workers_per_node=0 -> cluster.workers_per_node=0
device=cuda -> cluster=netns emulates links for processes on the CPU; ... device=cpu
comm=horovod -> comm=horovod with cluster=netns: ... leave comm=torch
launch.probe=link -> launch.probe=link leaves ... give collectives=direct
""")
    check_refusals(answers, *words)


def test_workers_that_do_not_fill_the_last_node_are_fine() -> None:
    config = compose.resolve(["cluster=netns", "workers=5", "cluster.workers_per_node=2"])
    assert config.num_nodes == 3
