"""Nodes with GPUs as their drivers print them, and what workers on them see."""

from __future__ import annotations

from experiments.worker.hardware_claims import Worker
from slurm.gpus import bus_id, topology

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
    nccl: dict[str, str] | None = None,
) -> list[Worker]:
    """The workers of a node: worker r has the GPU `chosen[r]` of the matrix."""
    rows = topology(matrix)
    return [
        Worker(
            host=host,
            gpu=model,
            memory_gib=79.3,
            bus=bus(index),
            driver="535",
            pcie=pcie,
            nvlinks=nvlinks,
            idle_nvlinks=0,
            links={bus(other): entry for other, entry in rows.get(index, {}).items()},
            peers={bus(other): True for other in rows.get(index, {})},
            nccl=nccl or {},
        )
        for index in chosen
    ]


def full(entry: str, size: int = 4) -> str:
    """The matrix of a node with the same between all pairs."""
    names = [f"GPU{index}" for index in range(size)]
    rows = ["\t".join([a, *(" X " if a == b else entry for b in names), "0-15"]) for a in names]
    return "\n".join(["\t".join(["", *names, "CPU Affinity"]), *rows])


A100_LINKS = [25.0] * 12
OFF = {"NCCL_P2P_DISABLE": "1"}
APART = [Worker(f"n{rank}", *workers(full("NV12"))[rank][1:]) for rank in range(2)]


def v100s(chosen: tuple[int, ...], host: str = "gpu33", matrix: str = DGX1) -> list[Worker]:
    """Workers on a DGX-1."""
    return workers(matrix, chosen, model="Tesla V100-SXM2-32GB", host=host, pcie=15.8, nvlinks=[25.781] * 6)
