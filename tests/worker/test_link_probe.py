"""Measurements by workers of an emulated link, and the handling of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from experiments.config.machines import LinkSettings
from experiments.worker import hardware, link_probe
from experiments.worker.hardware import MachineMismatch
from experiments.worker.link_probe import ProbedLink, TrafficMeter, describe_bandwidth_mismatch
from slurm.emulated import counters
from slurm.emulated.counters import InterfaceCounters
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.comm.direct import DIRECT_KINDS, DirectComm
from sparsify.cost import TEXTBOOK
from tests.config.refusals import check_parts
from tests.worker.runs import claiming

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


def probed(gbit_s: Sequence[float], together: float) -> ProbedLink:
    return FOUND._replace(pairs_gbit_s=[*gbit_s], together_gbit_s=together)


def test_a_tenth_off_and_no_less_is_said_with_the_worst_that_was_found() -> None:
    for most, least in ((0.96, 0.91), (1.09, 0.95)):  # headers and noise
        assert describe_bandwidth_mismatch("ethernet_1g", probed([0.95, most], least)) == []
    for gbit_s, together, worst in (([0.95, 0.4], 0.95, 0.4), ([0.95, 0.95], 0.7, 0.7), ([3.0, 3.0], 3.0, 3)):
        link = probed(gbit_s, together)
        assert bool(describe_bandwidth_mismatch("wifi", link, loses_packets=True)) == (worst > 1)
        (said,) = describe_bandwidth_mismatch("ethernet_1g", link)
        check_parts(
            said, f"link=ethernet_1g was asked for, 1 Gbit/s, ... found {worst} ... on_mismatch=label"
        )


def test_a_slower_link_stops_the_run_or_labels_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = probed([0.95], 0.5)
    monkeypatch.setattr(link_probe, "probe_link", lambda *_: slow)
    pair = cast(Comm, SimpleNamespace(rank=0, size=2))

    def check(on_mismatch: str) -> dict[str, Any]:
        emulated = {"where": "slurm", "enter": ["devcluster/enter"], "workers_per_node": 1}
        asked = claiming(on_mismatch, name="mine", gpu="none", link=LINK, **emulated)
        return hardware.verify_machine_and_collect_facts(asked, torch.device("cpu"), pair, {"delay_s": 0.0})

    with pytest.raises(MachineMismatch, match=r"workers found 0\.5 between nodes"):
        check("stop")
    noted = check("label")
    assert (noted["checked"], len(noted["mismatch"])) == (["link"], 1)
    assert noted["link"] == {**slow._asdict(), **hardware.describe_time_slice_and_cores(), "delay_s": 0.0}


@pytest.mark.parametrize(
    ("alpha_s", "at_once"),
    [(5e-5, [((0, 2),), ((2, 4),), ((4, 0),)]), (0.05, [((0, 2), (4, 0)), ((2, 4),)])],
)
def test_every_pair_of_neighbours_is_asked_once_and_all_find_the_same(
    alpha_s: float, at_once: list[tuple[tuple[int, int], ...]]
) -> None:
    """Virtual ranks' transfers are copies: how fast they are says nothing.

    Over a long way, pairs that share no direction of a node are asked at once.
    """
    routes = set[Any]()

    class Noting(CountingComm):
        def permute(self, data: torch.Tensor, route: Any) -> torch.Tensor | None:
            routes.add(tuple(route))
            return super().permute(data, route)

    link = LinkSettings("slow", alpha_s, 1e-6)
    first, *others = virtual.run(
        6,
        lambda comm: link_probe.probe_link(Noting(comm), link, workers_per_node=2, probes_collectives=False),
    )
    assert all(other == first for other in others)
    assert len(first.pairs_gbit_s) == len(at_once)
    assert first.latency_s > 0
    # Of the link alone nothing is recorded of collectives.
    assert {*first.to_record()}.isdisjoint(vars(link_probe.CollectiveFits({})))
    back = [tuple((receiver, sender) for sender, receiver in pairs) for pairs in at_once]
    assert routes == {((0, 2), (2, 4), (4, 0)), *at_once, *back}


def calibrate(
    monkeypatch: pytest.MonkeyPatch, size: int, own: Sequence[float], direct: Sequence[float]
) -> link_probe.CollectiveFits:
    """Return what workers find where collectives take these seconds at each of some sizes.

    The seconds are of the backend's own collectives, and of those that are sent directly.
    """
    seconds = np.array([*own] * len(TEXTBOOK) + [*direct] * len(DIRECT_KINDS), dtype=float)
    monkeypatch.setattr(link_probe, "_median_seconds", lambda *_, **__: seconds)
    effort = link_probe.ProbeEffort(
        1, 1, (40, 400, 4000)[: len(own)], 1, num_sizes_beside_computing=0, tries_direct=True
    )
    first, *others = virtual.run(
        size, lambda comm: link_probe.measure_and_fit_collectives(comm, (0, 1), effort)
    )
    assert all(other == first for other in others)
    return first


def test_a_collective_is_sent_directly_up_to_where_that_was_quicker_at_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for own, direct, most in (
        ([2, 2, 2], [1, 1, 1], 4000.0),
        ([2, 2, 1], [1, 1, 2], 400.0),
        ([1, 2, 2], [2, 1, 1], None),
    ):
        fits = calibrate(monkeypatch, 3, own, direct)
        assert fits.direct.keys() == fits.direct_bytes.keys()
        # An all-gather's part is one of three.
        assert fits.direct_bytes == ({"all_reduce": 3 * most, "all_gather": most} if most else {})
    # Two workers always swap: all sizes are fitted, also where noise had the backend's own a little quicker.
    fits = calibrate(monkeypatch, 2, own=[1, 2], direct=[2, 1])
    assert fits.direct.keys() == {"all_reduce", "all_gather"}
    assert fits.direct_bytes == {"all_reduce": 2 * 400, "all_gather": 400}


def test_collectives_of_torchcomms_are_not_tried_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual.VirtualComm, "uses_torchcomms", lambda comm: True)
    assert not calibrate(monkeypatch, 2, own=[2, 2], direct=[]).direct


def test_the_word_collectives_decides_how_they_travel() -> None:
    probed = FOUND._asdict()
    near = {**probed, "direct": {}, "direct_bytes": {}}
    cases = [("backend", probed), ("auto", near), ("auto", None), ("auto", probed), ("direct", None)]

    def body(comm: virtual.VirtualComm) -> list[list[int]]:
        """Return which of two sizes are sent directly, in each case."""
        ways = [link_probe.choose_comm_for_collectives(comm, *case) for case in cases]
        return [
            [size for size in (10, 2000) if isinstance(way, DirectComm) and way.is_direct("all_gather", size)]
            for way in ways
        ]

    assert virtual.run(3, body) == [[[], [], [], [10], [10, 2000]]] * 3
    assert virtual.run(2, body) == [[[], [], [], [10, 2000], [10, 2000]]] * 2


def test_a_meter_counts_what_each_worker_really_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "read_interface_counters", lambda: InterfaceCounters(1000, 3))

    def body(comm: virtual.VirtualComm) -> Any:
        meter = TrafficMeter(comm)
        ten = torch.zeros(10)  # 40 bytes
        DirectComm(meter).all_gather(ten)  # to three others
        meter.all_reduce(ten)  # 60 bytes each
        meter.permute(ten, [(0, 1), (2, 3)])  # of two workers
        meter.broadcast(ten)  # to three others, by whomever
        DirectComm(meter).barrier()
        return meter.gather_traffic_totals(), meter.sent_bytes

    counted = 4 * 120 + 4 * 60 + 80 + 120
    found = {"sent_bytes": 0, "counted_bytes": counted, "resent": 0, "calls": 20}
    assert virtual.run(4, body) == [(found, 120 + 60 + 40 + 80)] * 4


def test_without_a_node_of_its_own_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "read_interface_counters", lambda: None)
    assert virtual.run(2, lambda comm: TrafficMeter(comm).gather_traffic_totals()) == [None, None]


def test_more_than_headers_is_told_and_so_is_less_than_was_counted() -> None:
    def told(sent_bytes: float, resent: float = 0) -> str:
        counted = {"sent_bytes": sent_bytes, "counted_bytes": 1e6, "resent": resent, "calls": 5.0}
        return counters.explain_uncounted_bytes(counted, 2)

    assert told(1_000_000) == told(1_070_000) == told(1_300_000, resent=4) == ""
    for sent in (1_300_000, 990_000):
        assert f"sent {sent:,} bytes, and 1,000,000 were counted" in told(sent)
