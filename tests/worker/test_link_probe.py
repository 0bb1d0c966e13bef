"""What workers find out about an emulated link, and what becomes of a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from experiments.config.config import Config
from experiments.config.machines import NamedLink
from experiments.worker import hardware, link_probe
from experiments.worker.hardware import MachineMismatch
from experiments.worker.link_probe import Meter, ProbedLink, mismatches
from slurm.emulated import counters
from slurm.emulated.counters import Counters
from sparsify.comm import virtual
from sparsify.comm.direct import KINDS, DirectComm
from sparsify.cost import TEXTBOOK

LINK = {"name": "ethernet_1g", "alpha_s": 5e-5, "beta_s_per_byte": 8e-9}
FOUND = ProbedLink(
    asked_gbit_s=1.0,
    pairs_gbit_s=[0.95, 0.96],
    together_gbit_s=0.94,
    asked_latency_s=5e-5,
    latency_s=6e-5,
    kinds={"all_reduce": (1e-4, 8e-9)},
    computing_s=1e-3,
    direct={"all_gather": (1e-5, 9e-9)},
    direct_bytes={"all_gather": 1000.0},
)


@pytest.mark.parametrize(("pairs", "together"), [([0.95, 0.96], 0.91), ([1.09, 1.0], 1.0)])
def test_headers_and_noise_are_no_difference(pairs: list[float], together: float) -> None:
    assert mismatches("ethernet_1g", FOUND._replace(pairs_gbit_s=pairs, together_gbit_s=together)) == []


@pytest.mark.parametrize(
    ("pairs", "together", "worst"), [([0.95, 0.4], 0.95, "0.4"), ([0.95, 0.95], 0.7, "0.7"), ([3, 3], 3, "3")]
)
def test_a_tenth_off_is_said_with_the_worst_that_was_found(
    pairs: list[float], together: float, worst: str
) -> None:
    slow = FOUND._replace(pairs_gbit_s=pairs, together_gbit_s=together)
    assert bool(mismatches("wifi", slow, loses=True)) == (slow.gbit_s > FOUND.asked_gbit_s)
    (said,) = mismatches("ethernet_1g", FOUND._replace(pairs_gbit_s=pairs, together_gbit_s=together))
    assert said.startswith(
        f"link=ethernet_1g was asked for, 1 Gbit/s, and the workers found {worst} between nodes; choose"
    )
    assert said.endswith("launch.on_mismatch=label to go on and have it recorded as a label")


def config(on_mismatch: str = "stop", **cluster: Any) -> Config:
    described = {"name": "netns", "where": "netns", "gpu": "none", "link": LINK, "workers_per_node": 1}
    names = {group: {"name": "none"} for group in ("container", "method", "task")}
    return Config.built({"cluster": described | cluster, "launch": {"on_mismatch": on_mismatch}, **names})


@pytest.mark.parametrize("cluster", [{}, {"where": "slurm", "enter": ["slurm/devcluster/enter"]}])
def test_a_slower_link_stops_the_run_or_labels_its_record(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any]
) -> None:
    slow = FOUND._replace(together_gbit_s=0.5)
    monkeypatch.setattr(link_probe, "probe", lambda comm, link, per_node, collectives: slow)

    def check(how: str) -> Any:
        comm: Any = type("Group", (), {"rank": 0, "size": 2})()
        return hardware.check(config(how, **cluster), torch.device("cpu"), comm, {"delay_s": 0.0})

    with pytest.raises(MachineMismatch, match=r"workers found 0\.5 between nodes"):
        check("stop")
    found = check("label")
    assert found["checked"] == ["link"]
    assert found["link"] == {**slow._asdict(), **hardware.core_facts(), "delay_s": 0.0}
    assert len(found["mismatch"]) == 1


@pytest.mark.parametrize(
    ("alpha_s", "at_once"),
    [(5e-5, [((0, 2),), ((2, 4),), ((4, 0),)]), (0.05, [((0, 2), (4, 0)), ((2, 4),)])],
)
def test_every_pair_of_neighbours_is_asked_once_and_all_find_the_same(
    alpha_s: float, at_once: list[tuple[tuple[int, int], ...]]
) -> None:
    """Over virtual ranks, whose transfers are copies: how fast they are says nothing. Over a long way, pairs
    that share no direction of a node are asked at once.
    """
    routes: list[Any] = []

    def body(comm: virtual.VirtualComm) -> ProbedLink:
        permute = comm.permute

        def spied(data: torch.Tensor, route: Any) -> torch.Tensor | None:
            if comm.rank == 0:
                routes.append(tuple(route))
            return permute(data, route)

        comm.permute = spied  # type: ignore[method-assign, assignment]
        return link_probe.probe(comm, NamedLink("slow", alpha_s, 1e-6), per_node=2, collectives=False)

    first, *others = virtual.run(6, body)
    assert len(first.pairs_gbit_s) == len(at_once)
    assert all(found == first for found in others)
    assert first.latency_s > 0
    assert first.asked_gbit_s == 0.008
    back = [tuple((receiver, sender) for sender, receiver in those) for those in at_once]
    assert {*routes} == {((0, 2), (2, 4), (4, 0)), *at_once, *back}


def test_of_the_link_alone_nothing_is_recorded_of_collectives() -> None:
    link = NamedLink("slow", 5e-5, 1e-6)
    found, *_ = virtual.run(2, lambda comm: link_probe.probe(comm, link, per_node=1, collectives=False))
    assert len(found.pairs_gbit_s) == 2
    assert {*found.recorded()}.isdisjoint(vars(link_probe.Calibrated({})))
    assert link_probe.links_of(found.recorded(), "kinds") == {}


def of_ways(own: list[float], direct: list[float]) -> Any:
    """Seconds of all cases: of the backend's own collectives, and of those that are sent directly."""
    return np.array(own * len(TEXTBOOK) + direct * len(KINDS), dtype=float)


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        ([2, 1, 2, 1, 2, 1], 3 * 4000.0),  # of each size the backend's own, then the direct one
        ([2, 1, 2, 1, 1, 2], 3 * 400.0),
        ([1, 2, 2, 1, 2, 1], None),
    ],
)
def test_a_collective_is_sent_directly_up_to_where_that_was_quicker_at_every_size(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], most: float | None
) -> None:
    monkeypatch.setattr(link_probe, "_measured", lambda *_, **__: of_ways(seconds[::2], seconds[1::2]))
    effort = link_probe.Effort(1, 1, (40, 400, 4000), 1, small=0, direct=True)

    def body(comm: virtual.VirtualComm) -> Any:
        found = link_probe.calibrated(comm, (0, 1), effort)
        return found.direct, found.direct_bytes

    for fits, found in virtual.run(3, body):
        assert fits.keys() == found.keys() == ({"all_reduce", "all_gather"} if most else set())
        assert found.get("all_reduce") == most
        assert found.get("all_gather") == (most / 3 if most else None)  # its own part of three


def test_two_workers_always_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are fitted, also where noise had the backend's own a little quicker."""
    monkeypatch.setattr(link_probe, "_measured", lambda *_, **__: of_ways([1, 2], [2, 1]))
    effort = link_probe.Effort(1, 1, (40, 4000), 1, small=0, direct=True)
    for found in virtual.run(2, lambda comm: link_probe.calibrated(comm, (0, 1), effort)):
        assert found.direct.keys() == {"all_reduce", "all_gather"}
        assert found.direct_bytes == {"all_reduce": 2 * 4000, "all_gather": 4000}


def test_the_word_collectives_decides_how_they_travel() -> None:
    def body(comm: virtual.VirtualComm) -> list[list[bool]]:
        found = FOUND._asdict()
        near = found | {"direct": {}, "direct_bytes": {}}
        cases = [("backend", found), ("auto", near), ("auto", None), ("auto", found), ("direct", None)]
        sizes = (10, 2000)
        return [
            [isinstance(of, DirectComm) and of.is_direct("all_gather", size) for size in sizes]
            for of in (link_probe.over_link(comm, *case) for case in cases)
        ]

    no, some, every = [False, False], [True, False], [True, True]
    assert virtual.run(3, body) == [[no, no, no, some, every]] * 3
    assert virtual.run(2, body) == [[no, no, no, every, every]] * 2


def test_a_meter_counts_what_each_worker_really_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "read", lambda: Counters(1000, 3))

    def body(comm: virtual.VirtualComm) -> Any:
        meter, ten = Meter(comm), torch.zeros(10)  # 40 bytes
        DirectComm(meter).all_gather(ten)  # to three others
        meter.all_reduce(ten)  # 60 bytes each
        meter.permute(ten, [(0, 1), (2, 3)])  # of two workers
        meter.broadcast(ten)  # to three others, by whomever
        meter.barrier()
        return meter.found(), meter.sent_bytes

    for found, textbook in virtual.run(4, body):
        assert found == {
            "sent_bytes": 0,
            "counted_bytes": 4 * 120 + 4 * 60 + 80 + 120,
            "resent": 0,
            "calls": 20,
        }
        assert textbook == 120 + 60 + 40 + 80


def test_without_a_node_of_its_own_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "read", lambda: None)
    assert virtual.run(2, lambda comm: Meter(comm).found()) == [None, None]


@pytest.mark.parametrize(
    ("sent", "resent", "is_told"),
    [
        (1_000_000, 0, False),
        (1_070_000, 0, False),
        (1_300_000, 0, True),
        (1_300_000, 4, False),
        (990_000, 0, True),
    ],
)
def test_more_than_headers_is_told_and_so_is_less_than_was_counted(
    sent: float, resent: float, is_told: bool
) -> None:
    found = {"sent_bytes": sent, "counted_bytes": 1_000_000.0, "resent": resent, "calls": 5.0}
    assert bool(why := counters.uncounted(found, 2)) == is_told
    assert not is_told or f"sent {sent:,.0f} bytes, and 1,000,000 were counted" in why
