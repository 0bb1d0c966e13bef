"""Links of conf/link: what can be simulated, and what can't be."""

from __future__ import annotations

import pytest
import yaml

from experiments.config import choices, compose
from experiments.config.folders import ROOT

SHIPPED = sorted(path.stem for path in (ROOT / "conf" / "link").glob("*.yaml"))
FASTEST_FIRST = (
    "nvlink4", "nvlink3", "pcie5", "infiniband_ndr", "pcie4", "infiniband_hdr", "ethernet_100g", "pcie3",
    "ethernet_25g", "ethernet_10g", "ethernet_1g",
)  # fmt: skip


def link(name: str) -> dict[str, float]:
    numbers: dict[str, float] = yaml.safe_load((ROOT / "conf" / "link" / f"{name}.yaml").read_text())
    return numbers


def test_links_are_found_by_name() -> None:
    assert set(SHIPPED) <= set(choices.options("link"))
    assert set(FASTEST_FIRST) <= set(SHIPPED)


def test_links_are_as_fast_as_their_names_promise() -> None:
    betas = [link(name)["beta_s_per_byte"] for name in FASTEST_FIRST]
    assert betas == sorted(betas)
    assert [
        link(f"ethernet_{rate}g")["beta_s_per_byte"] * rate for rate in (1, 10, 25, 100)
    ] == pytest.approx([8e-9] * 4)


def test_links_that_runs_are_keyed_by_keep_their_numbers() -> None:
    assert link("nvlink") == {"alpha_s": 5e-6, "beta_s_per_byte": 4.35e-12}
    assert link("pcie") == {"alpha_s": 1e-5, "beta_s_per_byte": 5e-11}
    assert link("ethernet") == {"alpha_s": 5e-5, "beta_s_per_byte": 8e-10}
    assert link("loopback") == {"alpha_s": None, "beta_s_per_byte": None}


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "loopback"])
def test_links_say_where_their_numbers_are_from(name: str) -> None:
    text = (ROOT / "conf" / "link" / f"{name}.yaml").read_text()
    assert any(word in text for word in ("NVIDIA/nccl", "IEEE 802.3", "Assumed"))


@pytest.mark.parametrize("value", ["-1e-9", ".inf", ".nan"])
def test_a_negative_or_zero_bandwidth_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.link\.beta_s_per_byte.*out of range|number"):
        compose.resolve(["link=ethernet_1g", f"cluster.link.beta_s_per_byte={value}"])
