"""What `nvidia-smi` says of a node's GPUs. Texts go in, values come out; only `survey` runs the program."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from itertools import pairwise, takewhile
from typing import NamedTuple

QUERY = "index,pci.bus_id,name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max"
# GB/s of one lane, one way, after line coding, by generation: PCI-SIG base specifications 1.1 to 6.0.
PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
TIMEOUT_S = 60  # without persistence mode the driver wakes eight GPUs one after the other
UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # newer drivers underline the header of the matrix


class Gpu(NamedTuple):
    """One GPU of this node.

    The bus id names it: indices are renumbered by CUDA_VISIBLE_DEVICES, by SLURM and in containers.
    """

    bus: str  # 00000000:07:00.0
    name: str
    memory_mib: int | None
    driver: str
    pcie: float | None  # GB/s that its slot can carry, one way
    nvlinks: list[float] | None  # GB/s of each active NVLink, one way; None: the driver does not say
    idle_nvlinks: int  # by design on some PCIe cards, by a fault on others
    links: dict[str, str]  # to the others, by their bus ids: NV12, PIX, PXB, PHB, NODE, SYS


@cache  # nothing of it changes while a process lives
def survey() -> dict[str, Gpu]:
    """The GPUs that this process may see, by bus id; none where there is no nvidia-smi or no driver."""
    listing = _ask(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return parse(listing, _ask("topo", "-m"), _ask("nvlink", "--status")) if listing else {}


def parse(listing: str, matrix: str, status: str) -> dict[str, Gpu]:
    """The three answers put together, by bus id."""
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
    """`nvidia-smi topo -m`: what lies between each two GPUs, by index. Network cards are left out.

    Tabs in a pipe, blanks in what people paste; only affinities, at the right, can be empty.
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
    """`nvidia-smi nvlink --status`: GB/s of every link of each GPU, 0 for an inactive one."""
    rates: dict[int, list[float]] = {}
    current: list[float] = []
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            rates[int(gpu[1])] = current = []
        elif link := re.match(r"\s*Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", line, re.IGNORECASE):
            current.append(float(link[1] or 0))
    return rates


def pcie_rate(generation: int | None, width: int | None) -> float | None:
    """GB/s, one way; None where the driver does not know the slot."""
    return None if width is None or generation not in PCIE_LANE else round(PCIE_LANE[generation] * width, 1)


def bus_id(domain: int, bus: int, device: int) -> str:
    """As nvidia-smi writes it, from CUDA's numbers."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def lanes(entry: str | None) -> int:
    """How many NVLinks a matrix entry stands for: 12 for NV12, 0 for PIX."""
    return int(entry[2:]) if entry and re.fullmatch(r"NV\d+", entry) else 0


def is_model(claim: str, name: str) -> bool:
    """Does a config's word name this GPU? a100 and a100_80gb name 'NVIDIA A100 80GB PCIe', 3090 and rtx_3090
    'NVIDIA GeForce RTX 3090'; h200 does not name 'NVIDIA GH200 480GB'. A slice (MIG) must be named as one:
    a100_3g.20gb.
    """
    asked, words = re.split(r"[\s_-]+", claim.lower()), re.split(r"[\s-]+", name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    is_slice = "mig" in words
    return names.issuperset(asked) and (not is_slice or words[-1] in asked)


def _ask(*words: str) -> str:
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
