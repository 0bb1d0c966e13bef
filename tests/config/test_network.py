"""What joins the workers: numbers from the files of conf/link, for one link or for two."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.configs import measured_config, run_key
from experiments.config import compose
from experiments.config.machines import NamedLink, VirtualCluster
from sparsify.cost import Link, Network
from tests.conftest import ROOT

LINKS: dict[str, NamedLink] = {
    name: compose.resolve({"link": name}).cluster.link for name in ("ethernet", "nvlink")
}
ETHERNET, NVLINK = (link.numbers("link") for link in LINKS.values())


def virtual(*words: str) -> VirtualCluster:
    found = compose.resolve(["link=ethernet", *words]).cluster
    assert isinstance(found, VirtualCluster)
    return found


def cluster(*words: str) -> Network:
    return virtual(*words).network()


def test_workers_are_joined_by_one_link_or_by_another_one_inside_a_node() -> None:
    assert cluster() == Network(ETHERNET)
    assert cluster("inside=nvlink") == Network(ETHERNET, NVLINK, 8)
    slower = Link(0.5, NVLINK.beta_s_per_byte)
    words = ("inside=nvlink", "cluster.workers_per_node=4", "cluster.inside.alpha_s=0.5")
    assert cluster(*words) == Network(ETHERNET, slower, 4)


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
