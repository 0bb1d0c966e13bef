"""GPUs and links against what the config says, from recorded texts; and what differs between two runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analysis.compare import EXPLAINS, NOT_RECORDED, NOTHING, PERHAPS, UNKNOWN, WITHIN, compare, text
from experiments import machine
from experiments.machine import NO_PEERS, PROBE_BYTES, MachineMismatch, bus_bandwidth, check, settings
from experiments.mismatch import Group, Worker, mismatches
from slurm import environment, gpus
from slurm.gpus import bus_id, is_model, nvlink_rates, parse, pcie_rate, topology
from sparsify.comm import virtual

# As drivers print them, shortened; a tab is written |. Eight V100 of a DGX-1, 2019:
DGX1 = """\
|GPU0|GPU1|GPU2|GPU3|GPU4|GPU5|GPU6|GPU7|mlx5_0|mlx5_2|mlx5_1|mlx5_3|CPU Affinity
GPU0| X |NV1|NV1|NV2|NV2|SYS|SYS|SYS|PIX|SYS|PHB|SYS|0-19,40-59
GPU1|NV1| X |NV2|NV1|SYS|NV2|SYS|SYS|PIX|SYS|PHB|SYS|0-19,40-59
GPU2|NV1|NV2| X |NV2|SYS|SYS|NV1|SYS|PHB|SYS|PIX|SYS|0-19,40-59
GPU3|NV2|NV1|NV2| X |SYS|SYS|SYS|NV1|PHB|SYS|PIX|SYS|0-19,40-59
GPU4|NV2|SYS|SYS|SYS| X |NV1|NV1|NV2|SYS|PIX|SYS|PHB|20-39,60-79
GPU5|SYS|NV2|SYS|SYS|NV1| X |NV2|NV1|SYS|PIX|SYS|PHB|20-39,60-79
GPU6|SYS|SYS|NV1|SYS|NV1|NV2| X |NV2|SYS|PHB|SYS|PIX|20-39,60-79
GPU7|SYS|SYS|SYS|NV1|NV2|NV1|NV2| X |SYS|PHB|SYS|PIX|20-39,60-79
mlx5_0|PIX|PIX|PHB|PHB|SYS|SYS|SYS|SYS| X |SYS|PHB|SYS|
mlx5_2|SYS|SYS|SYS|SYS|PIX|PIX|PHB|PHB|SYS| X |SYS|PHB|

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
""".replace("|", "\t")
# A newer driver: the header underlined, network cards numbered, one column more.
SWITCHED = """\
|\x1b[4mGPU0|GPU1|GPU2|NIC0|NIC1|CPU Affinity|NUMA Affinity|GPU NUMA ID\x1b[0m
GPU0| X |NV18|NV18|PXB|NODE|0-63,128-191|0||N/A
GPU1|NV18| X |NV18|NODE|PXB|0-63,128-191|0||N/A
GPU2|NV18|NV18| X |SYS|SYS|64-127,192-255|1||N/A
NIC0|PXB|NODE|SYS| X |NODE||||
NIC1|NODE|PXB|SYS|NODE| X ||||

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
""".replace("|", "\t")
# Pairs of A100 with a bridge, as somebody pasted it: tabs have become blanks.
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV12    NODE    NODE    0-31,64-95      0
GPU1    NV12     X      NODE    NODE    0-31,64-95      0
GPU2    NODE    NODE     X      NV12    0-31,64-95      0
GPU3    NODE    NODE    NV12     X      0-31,64-95      0
"""
ALONE = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"
# Four GPUs of four machines.
STATUS = """\
GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-0)
| Link 0: 25.781 GB/s
| Link 1: 25.781 GB/s
| Link 2: 25.781 GB/s
| Link 3: <inactive>
| Link 4: 25.781 GB/s
| Link 5: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-1)
| NVML: Unable to retrieve NVLink information as all links are inActive
GPU 2: NVIDIA RTX A6000 (UUID: GPU-2)
| Link 0: 14.062 GB/s
| Link 4: Inactive
GPU 3: Tesla T4 (UUID: GPU-3)
""".replace("|", "\t")
LISTING = """\
0, 00000000:18:00.0, NVIDIA H200, 143771, 550.54.15, 5, 16
1, 00000000:2A:00.0, NVIDIA H200, 143771, 550.54.15, 5, 16
2, 00000009:01:00.0, NVIDIA GH200 480GB, [N/A], 550.54.15, [N/A], [N/A]
"""
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_dgx1_has_nvlink_between_some_pairs_only() -> None:
    links = topology(DGX1)
    assert sorted(links) == list(range(8))
    assert links[0] == {1: "NV1", 2: "NV1", 3: "NV2", 4: "NV2", 5: "SYS", 6: "SYS", 7: "SYS"}
    assert all(sum(map(gpus.lanes, row.values())) == 6 for row in links.values())  # a V100 has six


def test_cards_escapes_and_affinities_are_not_taken_for_gpus() -> None:
    assert topology(SWITCHED) == {a: {b: "NV18" for b in range(3) if b != a} for a in range(3)}
    assert topology(BRIDGED)[2] == {0: "NODE", 1: "NODE", 3: "NV12"}
    assert topology(ALONE) == {0: {}}


@pytest.mark.parametrize("words", ["", "\n", "Failed to initialize NVML: Driver/library version mismatch\n"])
def test_what_is_no_matrix_tells_nothing(words: str) -> None:
    assert topology(words) == {}
    assert nvlink_rates(words) == {}
    assert parse("", words, words) == {}


def test_nvlinks_are_counted_active_and_idle() -> None:
    rates = nvlink_rates(STATUS)
    assert rates == {0: [25.781] * 3 + [0, 25.781, 0], 1: [], 2: [14.062, 0], 3: []}


def test_a_node_is_put_together_by_bus_id() -> None:
    node = parse(LISTING, SWITCHED, STATUS)
    first, second, grace = "00000000:18:00.0", "00000000:2A:00.0", "00000009:01:00.0"
    assert list(node) == [first, second, grace]
    assert node[first].links == {second: "NV18", grace: "NV18"}
    assert (node[first].nvlinks, node[first].idle_nvlinks) == ([25.781] * 4, 2)
    assert node[second].nvlinks == []
    assert (node[first].pcie, node[grace].pcie, node[grace].memory_mib) == (63.0, None, None)
    assert parse(LISTING, "", "")[first].nvlinks is None  # not asked is not none


def test_bus_ids_of_cuda_and_nvidia_smi_meet() -> None:
    assert bus_id(9, 1, 0) == "00000009:01:00.0"
    assert parse("0, 0000:2a:00.0, Tesla K80, 11441, 367.48, 3, 16\n", "", "").keys() == {bus_id(0, 42, 0)}


@pytest.mark.parametrize(
    ("generation", "width", "rate"),
    [(3, 16, 15.8), (4, 16, 31.5), (5, 16, 63.0), (4, 8, 15.8), (9, 16, None)],
)
def test_what_a_slot_can_carry(generation: int, width: int, rate: float | None) -> None:
    assert pcie_rate(generation, width) == rate


@pytest.mark.parametrize(
    ("claim", "name", "named"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100", "NVIDIA A100-PCIE-40GB", True),
        ("A100", "A100-SXM4-40GB", True),
        ("a100_80gb", "NVIDIA A100 80GB PCIe", True),
        ("a100_80gb", "NVIDIA A100-SXM4-40GB", False),
        ("v100", "Tesla V100-SXM2-32GB", True),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA GH200 480GB", False),
        ("gh200", "NVIDIA GH200 480GB", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("l40", "NVIDIA L40S", False),
        ("l40s", "NVIDIA L40S", True),
        ("a6000", "NVIDIA RTX A6000", True),
        ("3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_6000_ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("a100", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", False),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", True),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_word_names_a_gpu(claim: str, name: str, named: bool) -> None:
    assert is_model(claim, name) is named


@pytest.fixture
def fresh() -> Iterator[None]:
    """Surveys are kept for a process's life; a test wants its own."""
    gpus.survey.cache_clear()
    yield
    gpus.survey.cache_clear()


def test_nvidia_smi_is_asked(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("listing", LISTING), ("topo", SWITCHED), ("nvlink", STATUS)):
        (tmp_path / name).write_text(answer)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase $1 in --query*) set listing;; esac\nexec cat "{tmp_path}/$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus.survey() == parse(LISTING, SWITCHED, STATUS)


def test_a_node_without_nvidia_smi_has_no_gpus(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.survey() == {}


def test_pcie_is_made_true_where_there_is_nvlink() -> None:
    linked = parse(LISTING, SWITCHED, "")
    bare = parse(LISTING, SWITCHED.replace("NV18", "PHB"), "")
    active = parse(LISTING, "", STATUS)  # under SLURM a task may see no other GPU than its own
    assert settings("pcie", linked) == settings("pcie", active) == settings("pcie", {}) == NO_PEERS
    assert settings("pcie", bare) == settings("nvlink", linked) == settings("loopback", linked) == {}


def test_what_the_user_exported_stays_and_files_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "os.environ", {"NCCL_P2P_DISABLE": "0", "NCCL_TOPO_FILE": "/etc/topo.xml", "HOME": "/"}
    )
    environment.set_for_nccl(NO_PEERS)
    told = {"NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "0"}
    assert environment.nccl_settings() == {**told, "NCCL_TOPO_FILE": "a file"}


# What each worker of a machine sees.


def bus(index: int) -> str:
    return bus_id(0, 16 + index, 0)


def workers(
    matrix: str,
    chosen: tuple[int, ...] = (0, 1, 2, 3),
    *,
    model: str = "NVIDIA A100-SXM4-80GB",
    host: str = "gpu33",
    pcie: float | None = 31.5,
    nvlinks: list[float] | None = None,
    **nccl: str,
) -> list[Worker]:
    rows = topology(matrix)
    return [
        Worker(
            host=host,
            gpu=model,
            memory_gib=79.3,
            bus=bus(one),
            driver="535",
            pcie=pcie,
            nvlinks=nvlinks,
            idle_nvlinks=0,
            links={bus(other): entry for other, entry in rows.get(one, {}).items()},
            peers={bus(other): True for other in rows.get(one, {})},
            nccl=nccl,
        )
        for one in chosen
    ]


def full(entry: str, size: int = 4) -> str:
    """The matrix of a node with the same between all pairs."""
    names = [f"GPU{one}" for one in range(size)]
    rows = ["\t".join([a, *(" X " if a == b else entry for b in names), "0-15"]) for a in names]
    return "\n".join(["\t".join(["", *names, "CPU Affinity"]), *rows])


V100 = {"model": "Tesla V100-SXM2-32GB", "pcie": 15.8, "nvlinks": [25.781] * 6}
A100_LINKS = [25.0] * 12
OFF = {"NCCL_P2P_DISABLE": "1"}
APART = [Worker(f"n{one}", *workers(full("NV12"))[one][1:]) for one in range(2)]


@pytest.mark.parametrize(
    ("link", "group"),
    [
        ("nvlink", Group(workers(full("NV12"), nvlinks=A100_LINKS), 203.0)),
        ("nvlink", Group(workers(DGX1, tuple(range(8)), **V100), 110.0)),
        ("nvlink", Group(workers(DGX1, (0, 1), **V100), 14.0)),  # NV1: too slow for the probe to tell
        (
            "nvlink",
            Group(workers(full("NV4"), pcie=31.5, nvlinks=[14.062] * 4), 25.0),
        ),  # and a bridge of A6000
        ("nvlink", Group(workers("", nvlinks=A100_LINKS), 190.0)),  # each sees its own GPU only
        ("nvlink", Group(workers("", pcie=None), 1.0)),  # nothing is seen, nothing is held against it
        (
            "nvlink",
            Group(workers(full("NV12"), nvlinks=A100_LINKS) + workers(full("NV12"), host="gpu34"), 9.0),
        ),
        ("nvlink", Group(workers(full("SYS"), (0,)), None)),
        ("pcie", Group(workers(full("NV12"), **OFF), 18.0)),
        ("pcie", Group(workers(full("PIX")), 24.0)),
        ("ethernet", Group(APART, 1.0)),
        ("loopback", Group(workers(full("NV12")), 200.0)),
    ],
)
def test_true_claims_pass(link: str, group: Group) -> None:
    assert mismatches("any", link, group) == []
    assert mismatches("none", link, group) == []


@pytest.mark.parametrize(
    ("link", "group", "words"),
    [
        ("nvlink", Group(workers(full("SYS")), 9.0), ["0 and 1 on gpu33", "by SYS", "link=pcie"]),
        ("nvlink", Group(workers(BRIDGED), 9.0), ["workers 0 and 2", "NODE"]),
        ("nvlink", Group(workers(DGX1, (0, 5), **V100), 9.0), ["workers 0 and 1 on gpu33", "SYS"]),
        ("nvlink", Group(workers("", nvlinks=[]), 9.0), ["no NVLink"]),
        ("nvlink", Group(workers(full("NV12"), **OFF), 18.0), ["NCCL_P2P_DISABLE", "unset"]),
        ("nvlink", Group(workers(full("NV12"), NCCL_P2P_LEVEL="LOC"), 18.0), ["NCCL_P2P_LEVEL"]),
        (
            "nvlink",
            Group(workers(full("NV12"), nvlinks=A100_LINKS), 18.0),
            ["18.0 GB/s", "NVLink offers 300", "PCIe 31.5", "NCCL_DEBUG=INFO"],
        ),
        ("nvlink", Group(APART, 9.0), ["a node of its own", "link=ethernet"]),
        ("pcie", Group(workers(full("NV12"), NCCL_P2P_DISABLE="0"), 203.0), ["NVLink joins", "gpu33"]),
        ("pcie", Group(workers(full("NV12"), **OFF), 203.0), ["203.0 GB/s", "31.5", "link=nvlink"]),
        ("pcie", Group(APART, 9.0), ["a node of its own"]),
        ("ethernet", Group(workers(full("NV12")), 203.0), ["all workers are on gpu33", "link=nvlink or"]),
        ("loopback", Group(APART, 9.0), ["on 2 nodes", "link=ethernet"]),
    ],
)
def test_false_claims_are_one_sentence(link: str, group: Group, words: list[str]) -> None:
    (said,) = mismatches("any", link, group)
    for word in [f"link={link} was asked for, but", *words, "launch.on_mismatch=label"]:
        assert word in said


def test_nvlink_without_peer_access_is_none() -> None:
    shut = [one._replace(peers=dict.fromkeys(one.peers, False)) for one in workers(full("NV12"))]
    assert "NV12 without peer access" in mismatches("any", "nvlink", Group(shut, None))[0]


def test_another_gpu_is_named_with_its_nodes() -> None:
    mixed = [*workers(full("NV12"), (0,)), *workers(full("NV12"), (0,), host="gpu04", **V100)]
    assert mismatches("any", "loopback", Group(mixed[:1], None)) == []
    (said,) = mismatches("a100", "any", Group(mixed, None))
    assert said.startswith(
        "gpu=a100 was asked for, but gpu04 has Tesla V100-SXM2-32GB; choose another partition"
    )
    (said,) = mismatches("h200", "any", Group(mixed, None))
    assert "gpu33, gpu04 has NVIDIA A100-SXM4-80GB and Tesla V100-SXM2-32GB" in said


def test_bandwidth_is_that_of_nccl_tests_and_no_workers_wait_counts() -> None:
    """8 A100 on Azure: 64 MiB in 579.2 us are 202.78 GB/s. Seven workers came early and waited."""
    late = [[579.2e-6] * 5] + [[1.0] * 5] * 7
    assert bus_bandwidth(late) == 202.8
    assert PROBE_BYTES == 67108864


def test_the_probe_reduces_64_mib_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    reduced: list[int] = []

    def body(comm: virtual.VirtualComm) -> list[float]:
        reduce = comm.all_reduce
        comm.all_reduce = lambda tensor: reduced.append(tensor.nbytes) or reduce(tensor)
        return machine.probe(comm, CPU)

    seconds = virtual.run(2, body)
    assert [len(mine) for mine in seconds] == [5, 5]
    assert reduced == [PROBE_BYTES] * 14  # by two ranks, two to warm up and five
    assert waits == [CPU] * 28  # before and after
    assert bus_bandwidth(seconds) > 0


# The whole check, by virtual ranks that play the workers.


def config(**changes: Any) -> dict[str, Any]:
    cluster = {"where": "slurm", "gpu": "a100", "link": {"name": "nvlink"}, **changes.pop("cluster", {})}
    return {"cluster": cluster, "launch": {"on_mismatch": "stop"}, **changes}


def act(monkeypatch: pytest.MonkeyPatch, seen: list[Worker], asked: dict[str, Any]) -> list[Any]:
    """What each rank is given, where rank r sees `seen[r]` and the last comes late to every collective."""
    turn, exchange = itertools.count(), machine.exchange
    monkeypatch.setattr(machine, "facts", lambda device: seen[next(turn)])
    monkeypatch.setattr(machine, "exchange", lambda comm, mine, device: exchange(comm, mine, CPU))
    monkeypatch.setattr(machine, "probe", lambda comm, device: [(1 + comm.rank) * 1e-3] * 5)

    def body(comm: virtual.VirtualComm) -> Any:
        try:
            return check(asked, GPU, comm)
        except MachineMismatch as mismatch:
            return f"{mismatch.kind}: {mismatch}"

    return virtual.run(len(seen), body)


def test_the_fingerprint_is_complete_and_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = workers(full("NV12"), (2, 3), nvlinks=A100_LINKS, NCCL_DEBUG="INFO")
    first, second = act(monkeypatch, seen, config())
    assert first == second
    assert first["checked"] == ["gpu", "link"]
    assert first["hosts"] == ["gpu33"]
    assert [one["bus"] for one in first["workers"]] == [bus(2), bus(3)]
    assert first["topology"] == [["X", "NV12"], ["NV12", "X"]]
    assert first["peer_access"] == [["X", True], [True, "X"]]
    assert first["nccl"] == {"NCCL_DEBUG": "INFO"}
    assert first["bus_bandwidth"] == 67.1  # 64 MiB in a millisecond
    assert "mismatch" not in first


def test_one_worker_has_no_link_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = act(monkeypatch, workers(full("SYS"), (0,)), config())
    assert only["checked"] == ["gpu"]
    assert only["bus_bandwidth"] is None


def test_ranks_that_see_different_things_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [*workers(full("NV12"), (0,)), *workers(full("NV12"), (1,), host="gpu04", **V100)]
    first, second = act(monkeypatch, seen, config())
    assert first == second
    assert first.startswith("machine: gpu=a100 was asked for, but gpu04 has Tesla V100")
    assert "; link=nvlink was asked for, but every worker has a node of its own" in first


def test_a_forced_run_bears_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = workers(full("SYS"), (0, 1))
    first, second = act(monkeypatch, seen, config(launch={"on_mismatch": "label"}))
    assert first == second
    (said,) = first["mismatch"]
    assert said.startswith("link=nvlink was asked for, but workers 0 and 1 on gpu33 are joined by SYS")


class Silent:
    """A communicator that must not be used."""

    rank, size = 0, 2


@pytest.mark.parametrize("link", ["loopback", "ethernet"])
@pytest.mark.parametrize("where", ["local", "slurm", "virtual"])
def test_on_cpus_nobody_is_asked(where: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_ask", lambda *words: pytest.fail("nvidia-smi was asked"))
    asked = config(cluster={"where": where, "gpu": "none", "link": {"name": link}})
    machine.prepare(asked, CPU)
    assert check(asked, CPU, Silent()) == {"checked": []}
    old = {name: value for name, value in asked.items() if name != "launch"}
    assert check(old, CPU, Silent()) == {"checked": []}


def test_on_cpus_no_link_of_gpus_can_be_claimed() -> None:
    with pytest.raises(MachineMismatch, match=r"link=nvlink .* device=cpu; choose .* link=loopback"):
        check(config(), CPU, Silent())
    labelled = check(config(launch={"on_mismatch": "label"}), CPU, Silent())
    assert labelled["checked"] == ["link"]
    assert len(labelled["mismatch"]) == 1


def test_virtual_ranks_claim_a_gpu_but_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "facts", lambda device: workers(full("SYS"), (0,))[0])
    asked = config(cluster={"where": "virtual"})
    assert check(asked, GPU, Silent())["checked"] == ["gpu"]
    with pytest.raises(MachineMismatch, match="gpu=h200 was asked for, but gpu33 has NVIDIA A100"):
        check(config(cluster={"where": "virtual", "gpu": "h200"}), GPU, Silent())


def test_devices_are_found_by_their_bus_however_they_are_numbered(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES=2,1: CUDA's device 0 is nvidia-smi's GPU2."""
    listing = "".join(f"{one}, {bus(one)}, NVIDIA H200, 143771, 550, 5, 16\n" for one in range(3))
    monkeypatch.setattr(gpus, "survey", lambda: parse(listing, SWITCHED, STATUS))
    visible = [
        SimpleNamespace(
            name="NVIDIA H200", total_memory=2**37, pci_domain_id=0, pci_bus_id=16 + one, pci_device_id=0
        )
        for one in (2, 1)
    ]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: visible[getattr(device, "index", device)]
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    seen = machine.facts(GPU)
    assert (seen.bus, seen.nvlinks, seen.peers) == (bus(2), [14.062], {bus(1): True})
    assert seen.links == {bus(0): "NV18", bus(1): "NV18"}


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA has no such class")
def test_torch_tells_the_bus_of_a_device() -> None:
    told = dir(torch._C._CudaDeviceProperties)
    assert {"pci_domain_id", "pci_bus_id", "pci_device_id", "total_memory", "name"} <= set(told)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_what_nvidia_smi_says(fresh: None) -> None:
    seen, node = machine.facts(GPU), gpus.survey()
    assert node[seen.bus].name == seen.gpu.partition(" MIG ")[0]
    assert seen.driver
    asked = config(cluster={"where": "virtual", "gpu": "any"})
    assert check(asked, GPU, Silent())["workers"][0]["gpu"] == seen.gpu


# Comparing two runs.


def manifest(**provenance: Any) -> dict[str, Any]:
    machine_found = {
        "hosts": ["gpu33"],
        "workers": [{"gpu": "NVIDIA A100-SXM4-80GB", "bus": bus(one)} for one in range(8)],
        "bus_bandwidth": 203.0,
        "probe_s": [[1e-3] * 5] * 8,
    }
    before = {"load": 0.5, "gpu": {"clocks.sm": "1410", "driver_version": "535"}}
    common = {"host": "gpu33", "image": None, "commit": "abc", "machine": machine_found, "before": before}
    return {
        "schema": 1,
        "started": "2026-11-21T08:12:19Z",
        "config": {"method": {"name": "topk"}, "workers": 8},
        "provenance": {**common, **provenance},
    }


def weights(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return {one.field: one.weight for one in compare(a, b)}


def test_a_run_does_not_differ_from_itself() -> None:
    assert compare(manifest(), manifest()) == []
    assert "nothing that both runs recorded explains" in text([], "a", "b")


def test_what_can_explain_a_time_comes_first() -> None:
    other = manifest(commit="def", host="gpu34", slurm={"SLURM_JOB_ID": "7"})
    other["config"] = {"method": {"name": "dense"}, "workers": 8, "comm": "horovod"}
    other["provenance"]["machine"]["workers"] = [{"gpu": "Tesla V100-SXM2-32GB", "bus": bus(0)}] * 8
    other["started"] = "2026-11-22T08:12:19Z"
    found = compare(manifest(), other)
    assert [(one.field, one.weight) for one in found] == [
        ("config.comm", EXPLAINS),
        ("config.method.name", EXPLAINS),
        ("machine.workers.gpu", EXPLAINS),
        ("commit", EXPLAINS),
        ("host", EXPLAINS),
        ("slurm", UNKNOWN),
        ("machine.workers.bus", NOTHING),
        ("started", NOTHING),
    ]
    table = text(found, "RUN", "RUN2")
    assert "8 x NVIDIA A100-SXM4-80GB" in table
    assert "8 x Tesla V100-SXM2-32GB" in table
    assert table.index("config.comm") < table.index("commit") < table.index("started")
    assert "not set" in table
    assert table.splitlines()[:2] == ["A: RUN", "B: RUN2"]
    assert max(map(len, table.splitlines())) < 120


def test_drift_within_tolerance_is_said_to_be_the_same() -> None:
    other = manifest(before={"load": 0.5, "gpu": {"clocks.sm": "1380", "driver_version": "535"}})
    other["provenance"]["machine"]["bus_bandwidth"] = 190.0
    assert weights(manifest(), other) == {"before.gpu.clocks.sm": WITHIN, "machine.bus_bandwidth": WITHIN}
    other["provenance"]["before"]["gpu"]["clocks.sm"] = "1200"
    other["provenance"]["machine"]["bus_bandwidth"] = 18.0
    assert weights(manifest(), other) == {"before.gpu.clocks.sm": EXPLAINS, "machine.bus_bandwidth": EXPLAINS}
    other["provenance"]["before"]["gpu"]["clocks.sm"] = "[N/A]"
    assert weights(manifest(), other)["before.gpu.clocks.sm"] == EXPLAINS


def test_older_records_did_not_record_everything() -> None:
    old = manifest(platform="Linux")
    del old["provenance"]["machine"]
    found = compare(old, manifest(platform="Linux 6"))
    assert [(one.field, one.a, one.weight) for one in found] == [
        ("platform", "Linux", PERHAPS),
        ("machine", NOT_RECORDED, UNKNOWN),
    ]
    assert text(found, "old", "new").startswith("A: old\nB: new\n\nnothing that both runs recorded explains")


def test_an_image_is_compared_by_its_digest() -> None:
    with_image = manifest(image={"name": "cpu", "sha256": "12"})
    other = manifest(image={"name": "cpu", "sha256": "34"})
    assert weights(manifest(), with_image) == {"image": EXPLAINS}
    assert weights(with_image, other) == {"image.sha256": EXPLAINS}
