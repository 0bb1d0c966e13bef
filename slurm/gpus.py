"""A node's GPUs and the links between them, from `nvidia-smi`.

Only `survey` runs the program; the other functions parse its output.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from itertools import pairwise, takewhile
from typing import NamedTuple

QUERY = "index,pci.bus_id,name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max"
# Generation -> GB/s of one lane in one direction, after line coding: PCI-SIG base specifications 1.1 to 6.0.
PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
TIMEOUT_S = 60  # without persistence mode the driver initialises eight GPUs one after the other
UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # newer drivers underline the header of the matrix


class Gpu(NamedTuple):
    """One GPU of this node.

    Its bus id identifies it: indices change with CUDA_VISIBLE_DEVICES, under SLURM and in containers.
    """

    bus: str  # 00000000:07:00.0
    name: str
    memory_mib: int | None
    driver: str
    pcie: float | None  # GB/s of its slot in one direction
    nvlinks: list[float] | None  # GB/s of each active NVLink in one direction; None: unknown to the driver
    idle_nvlinks: int  # normal on some PCIe cards, a fault on others
    links: dict[str, str]  # bus id of another GPU -> the connection: NV12, PIX, PXB, PHB, NODE, SYS


@cache  # nothing of it changes during the life of a process
def survey() -> dict[str, Gpu]:
    """The GPUs that this process may use, by bus id; empty without nvidia-smi or without a driver."""
    listing = _ask(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return parse(listing, _ask("topo", "-m"), _ask("nvlink", "--status")) if listing else {}


def parse(listing: str, matrix: str, status: str) -> dict[str, Gpu]:
    """The GPUs, by bus id, from the outputs of --query-gpu, topo -m and nvlink --status."""
    rows = {int(row[0]): row for row in (line.split(", ") for line in listing.splitlines() if line.strip())}
    bus = {index: _bus_id(row[1]) for index, row in rows.items()}
    links, nvlinks = topology(matrix), nvlink_rates(status)
    found = {}
    for index, (_, _, name, memory, driver, generation, width) in rows.items():
        rates = nvlinks.get(index)
        found[bus[index]] = Gpu(
            bus[index],
            name,
            _number(memory),
            driver,
            pcie_rate(_number(generation), _number(width)),
            [rate for rate in rates if rate] if rates is not None else None,
            rates.count(0.0) if rates else 0,
            {bus[other]: entry for other, entry in links.get(index, {}).items() if other in bus},
        )
    return found


def topology(text: str) -> dict[int, dict[int, str]]:
    """`nvidia-smi topo -m`: the connection between every two GPUs, by their indices, without network cards.

    Columns are separated by tabs, or by blanks in pasted output; only affinities, on the right, may be empty.
    """
    lines = [line.split() for line in UNDERLINE.sub("", text).splitlines() if line.strip()]
    if not lines or lines[0][0] != "GPU0":
        return {}
    columns = [_index(word) for word in takewhile(lambda word: word != "CPU", lines[0])]
    return {
        row: {
            column: entry
            for column, entry in zip(columns, words[1:], strict=False)
            if column not in (None, row)
        }
        for words in lines[1:]
        if (row := _index(words[0])) is not None
    }


def nvlink_rates(text: str) -> dict[int, list[float]]:
    """`nvidia-smi nvlink --status`: index -> GB/s of every link of the GPU, 0 for an inactive one."""
    rates: dict[int, list[float]] = {}
    current: list[float] = []
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            rates[int(gpu[1])] = current = []
        elif link := re.match(r"\s*Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", line, re.IGNORECASE):
            current.append(float(link[1] or 0))
    return rates


def pcie_rate(generation: int | None, width: int | None) -> float | None:
    """GB/s in one direction; None where the driver does not know the slot."""
    return None if width is None or generation not in PCIE_LANE else round(PCIE_LANE[generation] * width, 1)


def bus_id(domain: int, bus: int, device: int) -> str:
    """A bus id in the format of nvidia-smi, from CUDA's numbers."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def lanes(entry: str | None) -> int:
    """The number of NVLinks in an entry of the matrix: 12 for NV12, 0 for PIX."""
    return int(entry[2:]) if entry and re.fullmatch(r"NV\d+", entry) else 0


def is_model(claim: str, name: str) -> bool:
    """Does a config's word name this GPU?

    a100 and a100_80gb name 'NVIDIA A100 80GB PCIe'; 3090 and rtx_3090 name 'NVIDIA GeForce RTX 3090'; h200
    does not name 'NVIDIA GH200 480GB'. A slice (MIG) needs its own name: a100_3g.20gb.
    """
    asked, words = re.split(r"[\s_-]+", claim.lower()), re.split(r"[\s-]+", name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    is_slice = "mig" in words
    return names.issuperset(asked) and (not is_slice or words[-1] in asked)


def _ask(*words: str) -> str:
    """What nvidia-smi prints; empty where it fails."""
    try:
        done = subprocess.run(("nvidia-smi", *words), capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _index(word: str) -> int | None:
    return int(word[3:]) if re.fullmatch(r"GPU\d+", word) else None


def _bus_id(text: str) -> str:
    domain, _, rest = text.upper().partition(":")
    return f"{domain:0>8}:{rest}"


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # [N/A] where the driver does not know
