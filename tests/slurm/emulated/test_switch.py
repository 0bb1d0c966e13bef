"""The words that ip and tc get."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from slurm.emulated import switch

RATES = [10**exponent for exponent in range(6, 12)]  # bits per second


def numbers(rate: int) -> dict[str, int]:
    words = switch.bucket(rate).split()[1:]
    return {name: int(value.removesuffix("bit")) for name, value in zip(words[::2], words[1::2], strict=True)}


def test_bandwidth_is_the_inverse_of_beta_in_bits() -> None:
    assert switch.bandwidth(8e-9) == 10**9
    assert switch.bandwidth(8e-10) == 10**10


def test_every_bundle_fits_the_small_bucket_and_that_fits_the_large_one() -> None:
    for rate in RATES:
        said = numbers(rate)
        assert 1500 < switch.bundle(rate) < said["mtu"] <= said["burst"] < said["limit"]
        assert said["rate"] == rate < said["peakrate"] <= 1.1 * rate


def test_a_message_is_not_flattered_by_what_passes_after_a_pause() -> None:
    """At most 0.2 ms of data pass at once, and 1 ms of data at a tenth above the rate."""
    for rate in (10**9, 10**10):
        said = numbers(rate)
        assert 8 * said["mtu"] / rate <= 2.01e-4
        assert 8 * said["burst"] / rate <= 1.01e-3


def test_nodes_have_different_addresses_of_one_network() -> None:
    addresses = {switch.address(node) for node in range(switch.MOST_NODES)}
    assert len(addresses) == switch.MOST_NODES
    assert switch.address(0) == "10.77.0.1"
    assert switch.address(255) == "10.77.1.0"


def test_what_the_kernel_can_delay_is_delayed_and_what_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(program: str, lines: Iterable[str]) -> None:
        asked.extend(f"{program} {line}" for line in lines)

    monkeypatch.setattr(switch, "run", run)
    assert switch.delay(5e-5) == 5e-5
    assert asked == ["tc qdisc add dev eth0 parent 1:1 netem delay 50us limit 10000"]

    def refuse(program: str, lines: Iterable[str]) -> None:
        raise switch.SetUpFailed("tc: Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(switch, "run", refuse)
    assert switch.delay(5e-5) == 0.0


def test_why_something_can_not_be_made_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bridged(nodes: int, asked: switch.Cable) -> dict[str, Any]:
        raise switch.SetUpFailed("tc: Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(switch, "bridged", bridged)
    assert switch.main('{"nodes": 2, "alpha_s": 0, "beta_s_per_byte": 8e-9}') == 2
    assert capsys.readouterr().out == '{"why": "tc: Error: Specified qdisc kind is unknown."}\n'
