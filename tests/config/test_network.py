"""What joins the workers: the files of conf/link, and their numbers for one link or for two."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from analysis.records.configs import measured_config, run_key
from experiments.config import choices, compose
from experiments.config.machines import NamedLink, VirtualCluster
from sparsify.cost import Link, Network
from tests.conftest import ROOT

LINKS: dict[str, NamedLink] = {
    name: compose.resolve({"link": name}).cluster.link for name in ("ethernet", "nvlink")
}
ETHERNET, NVLINK = (link.numbers("link") for link in LINKS.values())
SHIPPED = sorted(path.stem for path in (ROOT / "conf" / "link").glob("*.yaml"))
FASTEST_FIRST = (
    "nvlink4", "nvlink3", "pcie5", "infiniband_ndr", "pcie4", "infiniband_hdr", "ethernet_100g", "pcie3",
    "ethernet_25g", "ethernet_10g", "ethernet_2g", "ethernet_1g", "ethernet_500m", "ethernet_200m",
    "ethernet_100m",
)  # fmt: skip


def virtual(*words: str) -> VirtualCluster:
    found = compose.resolve(["link=ethernet", *words]).cluster
    assert isinstance(found, VirtualCluster)
    return found


def cluster(*words: str) -> Network:
    return virtual(*words).network()


def test_workers_are_joined_by_one_link_or_by_another_one_inside_a_node() -> None:
    assert cluster() == Network(ETHERNET)
    assert cluster("inside=nvlink") == Network(ETHERNET, NVLINK, 8)
    slower = Link(5e-4, NVLINK.beta_s_per_byte)
    words = ("inside=nvlink", "cluster.workers_per_node=4", "cluster.inside.alpha_s=5e-4")
    assert cluster(*words) == Network(ETHERNET, slower, 4)
    # What takes longer than a message takes to start is a way.
    far = cluster("cluster.link.alpha_s=0.05", "cluster.link.down_s_per_byte=1e-6").between
    assert (far.alpha_s, far.way_s, far.beta_s_per_byte) == (5e-5, 0.05, 1e-6)


def test_a_file_of_a_cluster_names_its_link_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster").mkdir()
    mine = (ROOT / "conf" / "cluster" / "virtual.yaml").read_text().replace("null", "nvlink")
    (tmp_path / "cluster" / "mine.yaml").write_text(mine)
    (tmp_path / "cluster" / "short.yaml").write_text("where: virtual\ngpu: none\n")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path))
    assert virtual("cluster=mine").inside == LINKS["nvlink"]
    assert cluster("cluster=short") == Network(ETHERNET)


def test_one_link_alone_leaves_the_key_of_a_run_as_it_was() -> None:
    flat, nodes = (compose.resolve([*words]) for words in ([], ["inside=nvlink"]))
    assert not {"inside", "workers_per_node"} & measured_config(flat)["cluster"].keys()
    assert run_key(flat) == run_key(compose.resolve(["cluster.workers_per_node=2"]))
    assert run_key(flat) != run_key(nodes) != run_key(compose.resolve(["inside=pcie"]))
    assert run_key(nodes) != run_key(compose.resolve(["inside=nvlink", "cluster.workers_per_node=2"]))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["inside=loopback"], "inside=loopback has no alpha_s and no beta_s_per_byte"),
        (
            ["cluster.link.beta_s_per_byte=null"],
            "link=nvlink has no beta_s_per_byte, .* set cluster.link.beta",
        ),
        (["inside=nvlnk"], r"no inside 'nvlnk' \(did you mean 'nvlink'"),
        (["inside=nvlink", "cluster.workers_per_node=1"], "per_node=1; give a node more workers"),
        (["inside=nvlink", "cluster=local"], "cluster=local has nodes of its own"),
        (["cluster.inside=nvlink"], "comes with the choice of inside="),
        (["inside=nvlink", "cluster.inside.alpha_s=-1"], "cluster.inside.alpha_s=-1 is out of range"),
    ],
)
def test_a_description_that_lacks_something_is_refused(words: list[str], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        compose.resolve(words)


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
    assert any(word in text for word in ("NVIDIA/nccl", "IEEE 802.3", "Assumed", "arXiv", "INFOCOM"))


@pytest.mark.parametrize("value", ["-1e-9", ".inf", ".nan"])
def test_a_negative_or_zero_bandwidth_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.link\.beta_s_per_byte.*out of range|number"):
        compose.resolve(["link=ethernet_1g", f"cluster.link.beta_s_per_byte={value}"])
