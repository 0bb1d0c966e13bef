"""Claims of a config on its GPUs and links, against what the workers see."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.worker.hardware_claims import GroupHardware, WorkerHardware, describe_mismatches
from tests.config.refusals import check_parts
from tests.slurm.gpu_nodes import A100_LINKS, APART, BRIDGED, OFF, full, v100s, workers

NV12 = full("NV12")
SYS = full("SYS")
LINKED = workers(NV12, nvlinks=A100_LINKS)
BARRED = workers(NV12, nccl=OFF)
Claim = tuple[
    str, Sequence[WorkerHardware], float | None
]  # a link, what workers see, and the GB/s that they measured
TRUE_CLAIMS: list[Claim] = [
    ("nvlink3", LINKED, 203.0),
    ("nvlink", v100s(tuple(range(8))), 110.0),
    ("nvlink", v100s((0, 1)), 14.0),  # NV1: too slow for the probe to tell
    ("nvlink", workers(full("NV4"), pcie=31.5, nvlinks=[14.062] * 4), 25.0),  # and a bridge of A6000
    ("nvlink", workers("", nvlinks=A100_LINKS), 190.0),  # each sees its own GPU only
    ("nvlink", workers("", pcie=None), 1.0),  # nothing is seen, nothing is held against it
    ("nvlink", [*LINKED, *workers(NV12, host="gpu34")], 9.0),
    ("nvlink", workers(SYS, (0,)), None),
    ("pcie", BARRED, 18.0),
    ("pcie", workers(full("PIX")), 24.0),
    ("ethernet", APART, 1.0),
    ("infiniband_hdr", APART, 20.0),
    ("the_institute", APART, 1.0),  # of whom nothing is claimed
    ("loopback", workers(NV12), 200.0),
]
FALSE_CLAIMS: list[tuple[Claim, str]] = [
    (("nvlink4", workers(SYS), 9.0), "0 and 1 on gpu33 ... by SYS ... link=pcie"),
    (("nvlink", workers(BRIDGED), 9.0), "workers 0 and 2 ... NODE"),
    (("nvlink", v100s((0, 5)), 9.0), "workers 0 and 1 on gpu33 ... SYS"),
    (("nvlink", workers("", nvlinks=[]), 9.0), "no NVLink"),
    (("nvlink", BARRED, 18.0), "NCCL_P2P_DISABLE ... unset"),
    (("nvlink", workers(NV12, nccl={"NCCL_P2P_LEVEL": "LOC"}), 18.0), "NCCL_P2P_LEVEL"),
    (("nvlink", LINKED, 18.0), "18.0 GB/s ... NVLink offers 300 ... PCIe 31.5 ... NCCL_DEBUG=INFO"),
    (("nvlink", APART, 9.0), "a node of its own ... link=ethernet"),
    (("pcie", workers(NV12, nccl={"NCCL_P2P_DISABLE": "0"}), 203.0), "NVLink joins ... gpu33"),
    (("pcie", BARRED, 203.0), "203.0 GB/s ... 31.5 ... link=nvlink"),
    (("pcie4", APART, 9.0), "a node of its own"),
    (("ethernet", workers(NV12), 203.0), "all workers are on gpu33 ... link=nvlink or"),
    (("loopback", APART, 9.0), "on 2 nodes ... link=ethernet"),
    (("ethernet_10g", workers(NV12), 203.0), "all workers are on gpu33"),
]


def sentences(gpu: str, claim: Claim) -> list[str]:
    link, seen, measured = claim
    return describe_mismatches(gpu, link, GroupHardware([*seen], measured))


def test_true_claims_pass() -> None:
    for claim in TRUE_CLAIMS:
        assert sentences("any", claim) == sentences("none", claim) == [], claim


def test_false_claims_are_one_sentence() -> None:
    for claim, why in FALSE_CLAIMS:
        (said,) = sentences("any", claim)
        check_parts(said, f"link={claim[0]} was asked for, but ... {why} ... launch.on_mismatch=label")


def test_nvlink_without_peer_access_is_none() -> None:
    shut = [worker._replace(peers=dict.fromkeys(worker.peers, False)) for worker in workers(NV12)]
    assert "NV12 without peer access" in sentences("any", ("nvlink", shut, None))[0]


def test_another_gpu_is_named_with_its_nodes() -> None:
    mixed = [*workers(NV12, (0,)), *v100s((0,), "gpu04", NV12)]
    assert sentences("any", ("loopback", mixed[:1], None)) == []
    (said,) = sentences("a100", ("any", mixed, None))
    assert said.startswith(
        "gpu=a100 was asked for, but gpu04 has Tesla V100-SXM2-32GB; choose another partition"
    )
    (said,) = sentences("h200", ("any", mixed, None))
    assert "gpu33, gpu04 has NVIDIA A100-SXM4-80GB and Tesla V100-SXM2-32GB" in said
