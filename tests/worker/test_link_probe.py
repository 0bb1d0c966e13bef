"""What workers find out about an emulated link, and what becomes of a difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.config.config import Config
from experiments.config.machines import NamedLink
from experiments.worker import hardware, link_probe
from experiments.worker.hardware import MachineMismatch
from experiments.worker.link_probe import ProbedLink, mismatches
from sparsify.comm import virtual

LINK = {"name": "ethernet_1g", "alpha_s": 5e-5, "beta_s_per_byte": 8e-9}
FOUND = ProbedLink(
    asked_gbit_s=1.0,
    pairs_gbit_s=[0.95, 0.96],
    together_gbit_s=0.94,
    asked_latency_s=5e-5,
    latency_s=6e-5,
    kinds={"all_reduce": (1e-4, 8e-9)},
    computing_s=1e-3,
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
    monkeypatch.setattr(link_probe, "probe", lambda comm, link, per_node: slow)

    def check(how: str) -> Any:
        comm: Any = type("Group", (), {"rank": 0, "size": 2})()
        return hardware.check(config(how, **cluster), torch.device("cpu"), comm, {"delay_s": 0.0})

    with pytest.raises(MachineMismatch, match=r"workers found 0\.5 between nodes"):
        check("stop")
    found = check("label")
    assert found["checked"] == ["link"]
    assert found["link"] == {**slow._asdict(), **hardware.core_facts(), "delay_s": 0.0}
    assert len(found["mismatch"]) == 1


def test_every_pair_of_neighbours_is_asked_once_and_all_find_the_same() -> None:
    """Over virtual ranks, whose transfers are copies: how fast they are says nothing."""
    routes: list[Any] = []

    def body(comm: virtual.VirtualComm) -> ProbedLink:
        permute = comm.permute

        def spied(data: torch.Tensor, route: Any) -> torch.Tensor | None:
            if comm.rank == 0:
                routes.append(tuple(route))
            return permute(data, route)

        comm.permute = spied  # type: ignore[method-assign, assignment]
        return link_probe.probe(comm, NamedLink("slow", 5e-5, 1e-6), per_node=2)

    first, *others = virtual.run(6, body)
    assert len(first.pairs_gbit_s) == 3
    assert all(found == first for found in others)
    assert first.latency_s > 0
    assert first.asked_gbit_s == 0.008
    ring = ((0, 2), (2, 4), (4, 0))
    assert {route for route in routes if len(route) == 1} == {((a, b),) for a, b in ring} | {
        ((b, a),) for a, b in ring
    }
    assert {route for route in routes if len(route) > 1} == {ring}
