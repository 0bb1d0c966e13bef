"""What a config claims of its GPUs and links, against what the workers see."""

from __future__ import annotations

import pytest

from experiments.worker.hardware_claims import WorkerGroup, mismatches
from tests.slurm.gpu_nodes import A100_LINKS, APART, BRIDGED, OFF, full, v100s, workers


@pytest.mark.parametrize(
    ("link", "group"),
    [
        ("nvlink", WorkerGroup(workers(full("NV12"), nvlinks=A100_LINKS), 203.0)),
        ("nvlink", WorkerGroup(v100s(tuple(range(8))), 110.0)),
        ("nvlink", WorkerGroup(v100s((0, 1)), 14.0)),  # NV1: too slow for the probe to tell
        (
            "nvlink",
            WorkerGroup(workers(full("NV4"), pcie=31.5, nvlinks=[14.062] * 4), 25.0),
        ),  # and a bridge of A6000
        ("nvlink", WorkerGroup(workers("", nvlinks=A100_LINKS), 190.0)),  # each sees its own GPU only
        ("nvlink", WorkerGroup(workers("", pcie=None), 1.0)),  # nothing is seen, nothing is held against it
        (
            "nvlink",
            WorkerGroup(workers(full("NV12"), nvlinks=A100_LINKS) + workers(full("NV12"), host="gpu34"), 9.0),
        ),
        ("nvlink", WorkerGroup(workers(full("SYS"), (0,)), None)),
        ("nvlink3", WorkerGroup(workers(full("NV12"), nvlinks=A100_LINKS), 203.0)),
        ("pcie", WorkerGroup(workers(full("NV12"), nccl=OFF), 18.0)),
        ("pcie", WorkerGroup(workers(full("PIX")), 24.0)),
        ("ethernet", WorkerGroup(APART, 1.0)),
        ("infiniband_hdr", WorkerGroup(APART, 20.0)),
        ("the_institute", WorkerGroup(APART, 1.0)),  # of whom nothing is claimed
        ("loopback", WorkerGroup(workers(full("NV12")), 200.0)),
    ],
)
def test_true_claims_pass(link: str, group: WorkerGroup) -> None:
    assert mismatches("any", link, group) == []
    assert mismatches("none", link, group) == []


@pytest.mark.parametrize(
    ("link", "group", "words"),
    [
        ("nvlink", WorkerGroup(workers(full("SYS")), 9.0), ["0 and 1 on gpu33", "by SYS", "link=pcie"]),
        ("nvlink", WorkerGroup(workers(BRIDGED), 9.0), ["workers 0 and 2", "NODE"]),
        ("nvlink", WorkerGroup(v100s((0, 5)), 9.0), ["workers 0 and 1 on gpu33", "SYS"]),
        ("nvlink", WorkerGroup(workers("", nvlinks=[]), 9.0), ["no NVLink"]),
        ("nvlink", WorkerGroup(workers(full("NV12"), nccl=OFF), 18.0), ["NCCL_P2P_DISABLE", "unset"]),
        (
            "nvlink",
            WorkerGroup(workers(full("NV12"), nccl={"NCCL_P2P_LEVEL": "LOC"}), 18.0),
            ["NCCL_P2P_LEVEL"],
        ),
        (
            "nvlink",
            WorkerGroup(workers(full("NV12"), nvlinks=A100_LINKS), 18.0),
            ["18.0 GB/s", "NVLink offers 300", "PCIe 31.5", "NCCL_DEBUG=INFO"],
        ),
        ("nvlink", WorkerGroup(APART, 9.0), ["a node of its own", "link=ethernet"]),
        (
            "pcie",
            WorkerGroup(workers(full("NV12"), nccl={"NCCL_P2P_DISABLE": "0"}), 203.0),
            ["NVLink joins", "gpu33"],
        ),
        ("pcie", WorkerGroup(workers(full("NV12"), nccl=OFF), 203.0), ["203.0 GB/s", "31.5", "link=nvlink"]),
        ("pcie", WorkerGroup(APART, 9.0), ["a node of its own"]),
        (
            "ethernet",
            WorkerGroup(workers(full("NV12")), 203.0),
            ["all workers are on gpu33", "link=nvlink or"],
        ),
        ("loopback", WorkerGroup(APART, 9.0), ["on 2 nodes", "link=ethernet"]),
        ("nvlink4", WorkerGroup(workers(full("SYS")), 9.0), ["0 and 1 on gpu33", "by SYS"]),
        ("pcie4", WorkerGroup(APART, 9.0), ["a node of its own"]),
        ("ethernet_10g", WorkerGroup(workers(full("NV12")), 203.0), ["all workers are on gpu33"]),
    ],
)
def test_false_claims_are_one_sentence(link: str, group: WorkerGroup, words: list[str]) -> None:
    (said,) = mismatches("any", link, group)
    for word in [f"link={link} was asked for, but", *words, "launch.on_mismatch=label"]:
        assert word in said


def test_nvlink_without_peer_access_is_none() -> None:
    shut = [worker._replace(peers=dict.fromkeys(worker.peers, False)) for worker in workers(full("NV12"))]
    assert "NV12 without peer access" in mismatches("any", "nvlink", WorkerGroup(shut, None))[0]


def test_another_gpu_is_named_with_its_nodes() -> None:
    mixed = [*workers(full("NV12"), (0,)), *v100s((0,), "gpu04", full("NV12"))]
    assert mismatches("any", "loopback", WorkerGroup(mixed[:1], None)) == []
    (said,) = mismatches("a100", "any", WorkerGroup(mixed, None))
    assert said.startswith(
        "gpu=a100 was asked for, but gpu04 has Tesla V100-SXM2-32GB; choose another partition"
    )
    (said,) = mismatches("h200", "any", WorkerGroup(mixed, None))
    assert "gpu33, gpu04 has NVIDIA A100-SXM4-80GB and Tesla V100-SXM2-32GB" in said
