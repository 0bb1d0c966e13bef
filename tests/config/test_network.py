"""Links between workers: the files of conf/link, and their numbers for one link or for two."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from analysis.records.configs import measured_config, run_key
from experiments.config import choices, compose
from experiments.config.machines import LinkSettings, VirtualCluster
from sparsify.cost import Link, Network
from tests.config.refusals import check_refusals, read_answers
from tests.conftest import ROOT

LINKS: dict[str, LinkSettings] = {
    name: compose.resolve({"link": name}).cluster.link for name in ("ethernet", "nvlink")
}
ETHERNET, NVLINK = (link.to_link("link") for link in LINKS.values())
FASTEST_FIRST = """
nvlink4 nvlink3 pcie5 infiniband_ndr pcie4 infiniband_hdr ethernet_100g pcie3 ethernet_25g ethernet_10g
ethernet_2g ethernet_1g ethernet_500m ethernet_200m ethernet_100m
"""


def virtual(*words: str) -> VirtualCluster:
    cluster = compose.resolve(["link=ethernet", *words]).cluster
    assert isinstance(cluster, VirtualCluster)
    return cluster


def network(*words: str) -> Network:
    return virtual(*words).to_network()


def test_workers_are_joined_by_one_link_or_by_another_one_inside_a_node() -> None:
    assert network() == Network(ETHERNET)
    assert network("inside=nvlink") == Network(ETHERNET, NVLINK, 8)
    slower = Link(5e-4, NVLINK.beta_s_per_byte)
    words = ("inside=nvlink", "cluster.workers_per_node=4", "cluster.inside.alpha_s=5e-4")
    assert network(*words) == Network(ETHERNET, slower, 4)
    # What takes longer than a message takes to start is a way.
    far = network("cluster.link.alpha_s=0.05", "cluster.link.down_s_per_byte=1e-6").inter_node
    assert (far.alpha_s, far.propagation_s, far.beta_s_per_byte) == (5e-5, 0.05, 1e-6)


def test_a_file_of_a_cluster_names_its_link_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    mine = (ROOT / "conf" / "cluster" / "virtual.yaml").read_text().replace("null", "nvlink")
    (folder / "mine.yaml").write_text(mine)
    (folder / "short.yaml").write_text("where: virtual\ngpu: none\n")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path))
    assert virtual("cluster=mine").inside == LINKS["nvlink"]
    assert network("cluster=short") == Network(ETHERNET)


def test_one_link_alone_leaves_the_key_of_a_run_as_it_was() -> None:
    def key(*words: str) -> str:
        return run_key(compose.resolve(words))

    assert not {"inside", "workers_per_node"} & measured_config(compose.resolve([]))["cluster"].keys()
    assert key() == key("cluster.workers_per_node=2")
    assert key() != key("inside=nvlink") != key("inside=pcie")
    assert key("inside=nvlink") != key("inside=nvlink", "cluster.workers_per_node=2")


def test_a_description_that_lacks_something_is_refused() -> None:
    answers = read_answers("""
inside=loopback -> inside=loopback has no alpha_s and no beta_s_per_byte
cluster.link.beta_s_per_byte=null -> link=nvlink has no beta_s_per_byte, ... cluster.link.beta_s_per_byte
inside=nvlnk -> no inside 'nvlnk' (did you mean 'nvlink'
inside=nvlink cluster.workers_per_node=1 -> per_node=1; give a node more workers
inside=nvlink cluster=local -> cluster=local has nodes of its own
cluster.inside=nvlink -> comes with the choice of inside=
inside=nvlink cluster.inside.alpha_s=-1 -> cluster.inside.alpha_s=-1 is out of range
link=ethernet_1g cluster.link.beta_s_per_byte=-1e-9 -> beta_s_per_byte=-1e-09 is out of range
link=ethernet_1g cluster.link.beta_s_per_byte=.inf -> cluster.link.beta_s_per_byte= ... number
link=ethernet_1g cluster.link.beta_s_per_byte=.nan -> cluster.link.beta_s_per_byte= ... number
""")
    check_refusals(answers)


def test_links_are_found_by_name_and_as_fast_as_their_names_promise() -> None:
    links = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf" / "link").glob("*.yaml")}
    assert links.keys() <= {*choices.option_names("link")}
    betas = [links[name]["beta_s_per_byte"] for name in FASTEST_FIRST.split()]
    assert betas == sorted(betas)
    for rate in (1, 10, 25, 100):
        assert links[f"ethernet_{rate}g"]["beta_s_per_byte"] * rate == pytest.approx(8e-9)
