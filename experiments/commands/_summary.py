"""One attempt in a few lines: its state, why it failed, its steps, who selected, and where it is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import schemas
from analysis.files import Damaged, read_lines_as
from analysis.records import DAMAGED, Attempt, variant_configs


def summary(attempt: Attempt) -> str:
    fault = attempt.fault()
    lines = [f"{attempt.run_id} attempt {attempt.number}: {DAMAGED if fault else attempt.state}"]
    lines += [f"  why: {fault}; it does not count"] if fault else []
    try:
        return "\n".join([*lines, *_described(attempt), f"  {_relative(attempt.path)}"])
    except Damaged:
        return "\n".join([*lines, f"  {_relative(attempt.path)}"])


def _described(attempt: Attempt) -> list[str]:
    manifest, lines = attempt.manifest, list[str]()
    if manifest.get("why"):
        lines.append(f"  why: {manifest['why']}")
    if manifest["state"] == "running":
        writer = attempt.writer()
        lines.append(
            f"  written by {writer}"
            if writer
            else "  but nobody is seen to write it: its processes may have ended"
        )
    return [*lines, *_measured(attempt), *_selected(manifest)]


def _measured(attempt: Attempt) -> list[str]:
    ranks = attempt.rank_paths()
    if not ranks:
        return []
    found: list[schemas.Line]
    found, others = read_lines_as(ranks[0], schemas.Line)
    steps = [line for line in found if isinstance(line, schemas.Step)]
    epochs = [line for line in found if isinstance(line, schemas.Epoch)]
    broken = f", {others} broken" * bool(others)
    lines = [f"  {len(steps)} steps recorded on each of {len(ranks)} ranks{broken}"]
    if variants := variant_configs(attempt.config):
        lines += [_median_of_turns(attempt, name, steps) for name in variants]
        lines += _ended(attempt)
    elif steps:
        lines.append(_median_step(attempt, [step.step_s for step in steps]))
    if epochs and epochs[-1].val_top1 is not None:
        lines.append(f"  top-1 {epochs[-1].val_top1:.2f} % after {epochs[-1].step} steps")
    elif epochs and epochs[-1].val_loss is not None:
        lines.append(f"  validation loss {epochs[-1].val_loss:.4g} after {epochs[-1].step} steps")
    return lines


def _median_step(attempt: Attempt, step_s: Sequence[float]) -> str:
    """Of what remains after the warm-up, as in figures; times of virtual ranks are called what they are."""
    from analysis.steps import warm_up  # pandas comes with it

    timing = attempt.config.get("timing", {})
    cold = warm_up(step_s, int(timing.get("warmup_steps", 0)))
    simulated = "*simulated*, " * bool(attempt.manifest.get("simulated"))
    return (
        f"  median step {1e3 * statistics.median(step_s[cold:]):.1f} ms on rank 0 ({simulated}"
        f"{timing.get('mode')}, n = {len(step_s) - cold}, {cold} steps of warm-up left out)"
    )


def _median_of_turns(attempt: Attempt, variant: str, steps: Sequence[schemas.Step]) -> str:
    """Of one variant's steps after its warm-up, but for the first of each turn."""
    mine = [step for step in steps if step.variant == variant]
    mode = variant_configs(attempt.config)[variant]["timing"]["mode"]
    is_single = attempt.config["alternate"]["block_steps"] == 1
    firsts = {step.block: step.step for step in reversed(mine)}
    counted = [step.step_s for step in mine if step.block and (is_single or step.step != firsts[step.block])]
    simulated = "*simulated*, " * bool(attempt.manifest.get("simulated"))
    median = f"{1e3 * statistics.median(counted):.1f} ms" if counted else "not known"
    return f"  {variant}: median step {median} on rank 0 ({simulated}{mode}, n = {len(counted)})"


def _ended(attempt: Attempt) -> list[str]:
    ended = attempt.manifest.get("alternated")
    if not ended:
        return []
    width = "unknown" if ended["half_width"] is None else f"{100 * ended['half_width']:.1f} %"
    return [
        f"  {ended['blocks']} turns each, ended by the {ended['stopped']}; half-width of the ratios {width}"
    ]


def _selected(manifest: dict[str, Any]) -> list[str]:
    searching = manifest.get("searching") or {}
    if not searching.get("kernel"):
        return []
    wrong = f", the guessed bound wrong in {searching['fallbacks']} of {searching['steps']} searches"
    return [f"  searched by {searching['kernel']}" + wrong * (searching["kernel"] != "torch")]


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
