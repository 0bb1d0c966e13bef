"""Which rows of a case fit into memory, and how many bytes empty the caches."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.bench._case import Case, Timed
from experiments.worker.memory import free_bytes

TURNS, FEW_TURNS = 4, 2  # gradients that take turns; so few of them where they are large
LARGE = 30_000_000  # elements
SHARED = 2.5  # floats per element: magnitudes (twice) and mask of the plain operators, candidates
SHARE = 0.9  # of the free memory that may be used


def leave_out(case: Case, lines: dict[str, Timed], device: torch.device, flush: int) -> bool:
    """Mark the rows that do not fit into memory, the largest first. Does any fit?"""
    free = SHARE * free_bytes(device) - flush
    each = 4 * case.n
    kept = [timed.row for timed in lines.values()]
    for row in sorted(kept, key=lambda row: row.held + row.passing(device.type), reverse=True):
        of_rows = sum(each.held for each in kept) + max(each.passing(device.type) for each in kept)
        needed = each * (SHARED + 2 + turns(case.n) + of_rows)  # 2: residual and acc
        if needed <= free:
            break
        lines[row.name].why = f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        kept.remove(row)
    return bool(kept)


def turns(n: int) -> int:
    return TURNS if n <= LARGE else FEW_TURNS


def flush_bytes(device: torch.device) -> int:
    """More than the last cache holds."""
    if device.type == "cuda":
        return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2**26]  # where the system does not say
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) * 9 // 8
