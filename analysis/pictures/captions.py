"""What a caption says about the records behind a figure: machine, data, protocol, samples, simulation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

import numpy as np
import pandas as pd

from analysis.pictures.numbers import format_brief, format_number
from analysis.pictures.style import METHOD_COLUMNS, method_id, method_style
from analysis.records.columns import is_relay_bottleneck
from analysis.records.frames import Frames, value_of_run
from analysis.records.frames import find_diverged_keys as diverged_in
from analysis.records.frames import label_runs as label_of
from analysis.records.steps import ENOUGH_LAUNCHES, WarmSteps, used_precisions, warm_steps

SIMULATED = (
    "*Simulated* times: ranks are virtual; compute is measured, wait and transfer follow the alpha-beta "
    "model of link "
)
MAX_SPELLED_OUT = 3  # values that a name or a sentence spells out
MODE_DESCRIPTIONS = {
    "serialised": "serialised (synchronised at phase boundaries)",
    "production": "production (nothing synchronises inside a step)",
    "as_published": "as published (host clocks, validation inside the timed loop)",
}


def distinct_values(frames: Frames, column: str) -> list[Any]:
    """Return the distinct values of a column of `frames.runs`, sorted, numbers first; empty if not recorded.

    Whole numbers are integers, although pandas keeps a column with gaps as floats.
    """
    if column not in frames.runs:
        return []
    found = list(dict.fromkeys(frames.runs[column].dropna()))
    return sorted(map(_to_int_if_whole, found), key=lambda value: (isinstance(value, str), value))


def join_words(items: Iterable[object]) -> str:
    """Return 'a', 'a and b', 'a, b and c'; 'unknown' of nothing."""
    words = [str(item) for item in items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "unknown"


def is_simulated(frames: Frames) -> bool:
    """Return True where virtual ranks made times of some of these runs."""
    return any(distinct_values(frames, "simulated"))


def virtual_workers_remark(frames: Frames) -> str:
    """Return a remark that virtual ranks train as so many workers; empty where processes trained."""
    told = " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
    return told if is_simulated(frames) else ""


def simulated_suffix(frames: Frames) -> str:
    """Return ', simulated' for the name of a quantity whose times virtual ranks made."""
    return ", simulated" if is_simulated(frames) else ""


def is_on_gpu(frames: Frames, hardware: str) -> bool:
    """Return True where every run used a GPU whose name contains this word."""
    gpus = frames.runs.get("provenance.gpu", pd.Series(dtype=object))
    return len(gpus) > 0 and bool(gpus.notna().all()) and all(hardware in str(gpu) for gpu in gpus)


def is_over_link(frames: Frames, link: str) -> bool:
    """Return True where this link joined the workers of every run, on machines found to be as named."""
    return distinct_values(frames, "cluster.link.name") == [link.lower()] and not mismatch_remark(frames)


def describe_machine(frames: Frames) -> str:
    """Return the GPUs, or without any the CPUs and their cores."""
    if gpus := distinct_values(frames, "provenance.gpu"):
        return join_words(gpus)
    cores = join_words(distinct_values(frames, "provenance.cores"))
    return f"{join_words(distinct_values(frames, 'provenance.cpu'))} ({cores} cores)"


def describe_precision(frames: Frames) -> str:
    """Return the precision that runs multiplied in, or else the one that was asked for. A mixture is said."""
    found = sorted(set(used_precisions(frames.runs).dropna()))
    return join_words(found) + " (*mixed*)" * (len(found) > 1)


def describe_data(frames: Frames) -> str:
    """Return the data sets, and the first digits of their digests."""
    names, digests = (
        distinct_values(frames, "provenance.data.name"),
        distinct_values(frames, "provenance.data.digest"),
    )
    return f"{join_words(names)} (digest {join_words([str(digest)[:8] for digest in digests])})"


def describe_workers(frames: Frames) -> str:
    """Return '8 virtual workers x batch 16'; of a task without samples, '8 virtual workers'."""
    virtual = "virtual" in distinct_values(frames, "cluster.where")
    kind = "virtual workers" if virtual else "worker processes"
    batches = distinct_values(frames, "task.batch_size")
    return (
        f"{join_words(distinct_values(frames, 'workers'))} "
        f"{kind}{f' x batch {join_words(batches)}' if batches else ''}"
    )


def describe_setting(frames: Frames) -> str:
    """Return a sentence: task, data, workers, machine, torch, precision; then all remarks on the runs."""
    torch = join_words(distinct_values(frames, "provenance.versions.torch"))
    return (
        f"{join_words(distinct_values(frames, 'task.name'))} on {describe_data(frames)}, "
        f"{describe_workers(frames)}, on {describe_machine(frames)}, "
        f"torch {torch}, "
        f"{describe_precision(frames)}.{emulated_links_remark(frames)}{mismatch_remark(frames)}{few_cores_remark(frames)}"
        f"{divergence_remark(frames)}{code_versions_remark(frames)}"
    )


def divergence_remark(frames: Frames) -> str:
    """Return the trainings that ended because a gradient was not finite any more; empty without any."""
    if not (keys := diverged_in(frames)):
        return ""
    ended = frames.runs.set_index("key").loc[keys, "diverged"]
    names = [
        f"{name} in step {step:.0f}" for name, step in zip(label_of(frames.runs)[keys], ended, strict=True)
    ]
    return f" {len(keys)} of {len(frames.runs)} runs diverged and have no end: {join_words(names)}."


def describe_scale(frames: Frames) -> str:
    """Return model, data, density, workers and machine of these runs' numbers; empty without runs.

    For places that are far from their figure's caption.
    """
    if not len(frames.runs):
        return ""
    names = join_words(distinct_values(frames, "provenance.data.name"))
    densities = distinct_values(frames, "method.density")
    return ", ".join([
        f"{join_words(distinct_values(frames, 'task.name'))} on {names}",
        *([f"density {join_words(map(format_number, densities))}"] if densities else []),
        describe_workers(frames),
        f"on {describe_machine(frames)}",
    ])  # fmt: skip


def scale_label(frames: Frames) -> str:
    """Return model, density and workers for a name: 'vgg16_cifar10:d0.001:w2'; of many values their number."""
    columns = {"task.name": "", "method.density": "d", "workers": "w"}
    found = {letter: distinct_values(frames, column) for column, letter in columns.items()}
    return ":".join(
        letter + ("+".join(map(str, parts)) if len(parts) <= MAX_SPELLED_OUT else f"{len(parts)}values")
        for letter, parts in found.items()
        if parts
    )


def emulated_links_remark(frames: Frames) -> str:
    """Return what was found of emulated links, and how busy a relay was; empty if none."""
    prefix = "provenance.machine.link."
    if f"{prefix}asked_gbit_s" not in frames.runs:
        return ""
    found = []
    for name, runs in frames.runs.dropna(subset=[f"{prefix}asked_gbit_s"]).groupby("cluster.link.name"):
        seen = runs[[column for column in runs if str(column).startswith(prefix)]]
        seen = seen.rename(columns=lambda column: str(column).removeprefix(prefix))
        pairs = min(min(json.loads(text)) for text in seen["pairs_gbit_s"])
        delayed = "delay_s" in seen and bool((seen["delay_s"] > 0).all())
        found.append(
            f"{name} {format_number(seen['asked_gbit_s'].iloc[0])} Gbit/s asked, "
            f"{format_number(pairs)} found between two "
            f"nodes, {format_number(seen['together_gbit_s'].min())} with all sending at once, latency "
            f"{format_number(round(1e6 * seen['latency_s'].max()))} us ({'' if delayed else 'not delayed; '}"
            f"{format_number(1e6 * seen['asked_latency_s'].iloc[0])} us asked){_relay_remark(runs)}"
        )
    return f" Emulated links, as the workers found them: {'; '.join(found)}." if found else ""


def _relay_remark(runs: pd.DataFrame) -> str:
    """Return how much of a core the relay of these runs took, and how many packets it handed over late."""
    if "relay.packets" not in runs or not (runs["relay.packets"] > 0).any():
        return ""
    busy = 100 * float((runs["relay.cpu_s"] / runs["relay.seconds"]).max())
    late = 100 * float((runs["relay.late"] / runs["relay.packets"]).max())
    told = runs[[column for column in runs if str(column).startswith("relay.")]]
    told = told.rename(columns=lambda column: str(column).removeprefix("relay."))
    is_overrun = any(map(is_relay_bottleneck, told.dropna(subset=["packets"]).to_dict("records")))
    return (
        f" by a relay that took {busy:.2g} % of a core at most, with {late:.2g} % of packets over 1 ms late"
        f"{': *the relay, not the link, was the bottleneck*' * is_overrun}"
    )


def code_versions_remark(frames: Frames) -> str:
    """Return a remark on runs that were not all made with the same code; empty where all were."""
    facts = frames.runs.reindex(columns=["provenance.commit", "provenance.dirty"]).itertuples(index=False)
    versions = sorted({_version_text(commit, dirty) for commit, dirty in facts})
    several = f" *Measured with {len(versions)} versions of the code*: {join_words(versions)}."
    return several if len(versions) > 1 else ""


def _version_text(commit: Any, dirty: Any) -> str:
    """Return the first digits of the commit, and of the digest of what was changed since."""
    known = str(commit)[:8] if pd.notna(commit) else "unknown"
    return f"{known}+{str(dirty)[:8]}" if pd.notna(dirty) else known


def mismatch_remark(frames: Frames) -> str:
    """Return how the machine differs from the configured one, if `launch.on_mismatch=label` let it."""
    return _machine_remark(frames, "mismatch", "Not the machine that was named")


def few_cores_remark(frames: Frames) -> str:
    """Return a remark on workers that had fewer cores than they computed with."""
    return _machine_remark(frames, "crowded", "Too few cores")


def _machine_remark(frames: Frames, what: str, heading: str) -> str:
    found = [
        why.partition("; ")[0]  # without what could be done about it
        for text in distinct_values(frames, f"provenance.machine.{what}")
        for why in json.loads(text)
    ]
    return f" *{heading}*: {'; '.join(dict.fromkeys(found))}." if found else ""


def describe_timing(frames: Frames) -> str:
    """Return mode, number of steps and warm-up of timed runs, and whether their times are simulated."""
    modes = join_words([MODE_DESCRIPTIONS.get(mode, mode) for mode in distinct_values(frames, "timing.mode")])
    runs: dict[str, list[WarmSteps]] = {}  # by method
    for key in frames.runs["key"]:
        runs.setdefault(method_style(_method_of_run(frames, key)).label, []).append(warm_steps(frames, key))
    counts: dict[str, list[str]] = {}  # sentence about the samples -> the methods for which it is true
    for method, warm_runs in runs.items():
        counts.setdefault(_samples_text(warm_runs), []).append(method)
    samples = "; ".join(f"{join_words(methods)} {count}" for count, methods in counts.items())
    sentences = (
        f"Timing mode: {modes}. Steps per worker: {samples}.{turns_remark(frames)}{lateness_remark(frames)}"
    )
    if is_simulated(frames):
        sentences += f" {SIMULATED}{describe_links(frames)}."
    return sentences


def describe_links(frames: Frames) -> str:
    """Return the links between workers: 'ethernet between nodes of 8, nvlink inside', or 'ethernet' alone."""
    links = join_words(distinct_values(frames, "cluster.link.name"))
    if not (inside := distinct_values(frames, "cluster.inside.name")):
        return links
    size = join_words(distinct_values(frames, "cluster.workers_per_node"))
    return f"{links} between nodes of {size}, {join_words(inside)} inside"


def lateness_remark(frames: Frames) -> str:
    """Return a remark on workers that came late on purpose, with the settings; empty if none did."""
    draws = [draw for draw in distinct_values(frames, "late.draw") if draw != "none"]
    if not draws:
        return ""
    settings = [
        f"late.{name}={join_words(map(format_number, found))}"
        for name in ("s", "spread", "rank")
        if (found := distinct_values(frames, f"late.{name}")) and (any(found) or name == "rank")
    ]
    return f" *Workers late on purpose*: {join_words([f'late.draw={join_words(draws)}', *settings])}."


def turns_remark(frames: Frames) -> str:
    """Return the turns that variants took, and the reason for their end; empty where none did."""
    if not distinct_values(frames, "group"):
        return ""
    groups = frames.runs.dropna(subset=["group"]).drop_duplicates("group")
    ends = [*dict.fromkeys(_turns_end(frames, run) for run in groups.to_dict("records"))]
    ends = ends if len(ends) <= MAX_SPELLED_OUT else [_turns_ends(frames, groups)]
    steps = join_words(distinct_values(frames, "alternate.block_steps"))
    return (
        f" Measured in turns of {steps} steps in one group of processes, in an order drawn anew each round, "
        f"until {join_words(ends)}."
    )


def _turns_end(frames: Frames, run: dict[Any, Any]) -> str:
    """Return the precision that a group had reached when its turns ended."""
    variants = frames.runs[frames.runs["group"] == run["group"]]["variant"]
    width = run["alternated.half_width"]
    known = f"{format_number(100 * width)} %" if width is not None and np.isfinite(width) else "unknown"
    reached: str = (
        f"the least certain ratio to {method_style(variants.iloc[0]).label} had a half-width of {known}"
    )
    ends = {
        "limit": f" at the limit of {format_number(run['alternate.limit_min'])} minutes",
        "signal": ", where somebody ended it",
    }
    return reached + ends.get(str(run["alternated.stopped"]), "")


def _turns_ends(frames: Frames, groups: pd.DataFrame) -> str:
    """Return the precision that many groups had reached when their turns ended."""
    widths = pd.to_numeric(groups["alternated.half_width"]).dropna() * 100
    baselines = groups["variant"]  # the first of each; other runs are in no group
    limited = groups[groups["alternated.stopped"] == "limit"]
    limits = join_words(map(format_number, sorted(set(limited["alternate.limit_min"]))))
    at_limit = f", {len(limited)} of them by the limit of {limits} minutes" * bool(len(limited))
    told = int((groups["alternated.stopped"] == "signal").sum())
    at_limit += f", {told} where somebody ended them" * bool(told)
    dense, ended = (
        join_words(dict.fromkeys(method_style(name).label for name in baselines)),
        f"{len(groups)} launches ended",
    )
    return (
        f"the least certain ratio to {dense} had a half-width of {format_brief(widths.min())} to "
        f"{format_brief(widths.max())} %: {ended}{at_limit}"
    )


def _samples_text(runs: list[WarmSteps]) -> str:
    """Return 'n = 16 (first 4 dropped as warm-up)'; n is summed over several runs."""
    dropped = sorted({run.dropped for run in runs})
    first = str(dropped[0]) if len(dropped) == 1 else f"{dropped[0]} to {dropped[-1]}"
    several = f" in {len(runs)} runs" if len(runs) > 1 else ""
    again, turns = sum(run.again for run in runs), sum(run.turns for run in runs)
    stopped = sum(run.stopped for run in runs)
    several = f" in {turns} turns" if turns else several
    more = f", and {again} after interruptions" * bool(again) + ", and the first of each turn" * bool(turns)
    more += f", and {stopped} in which a worker was suspended" * bool(stopped)
    return f"n = {sum(run.n for run in runs)}{several} (first {first} dropped as warm-up{more})"


def describe_training(frames: Frames) -> str:
    """Return the length of the trainings behind a learning curve, and the number of seeds."""
    last = frames.epochs.groupby("key")[["epoch", "step"]].max()
    epochs, steps = (join_words(sorted(set(last[name]))) for name in ("epoch", "step"))
    seeds = _min_seeds_per_method(frames)
    count = f"{seeds} seed{'s' if seeds > 1 else ''} per method"
    band = ", bands are 95 % intervals of the mean" if seeds >= ENOUGH_LAUNCHES else ""
    return f"{epochs} epoch{'s' if epochs != '1' else ''} = {steps} optimiser steps; {count}{band}."


def kernel_remark(frames: Frames) -> str:
    """Return the kernel of fused runs, and how often its guess was wrong; empty without fused runs."""
    if not {"searching.kernel", "select"} <= set(frames.runs):
        return ""
    fused = frames.runs[frames.runs["select"] == "fused"]
    if not len(fused):
        return ""
    wrong, searches = (int(fused[f"searching.{name}"].sum()) for name in ("fallbacks", "steps"))
    return (
        f" ({method_style('topk-fused').label}: kernel "
        f"{join_words(sorted(set(fused['searching.kernel'])))}; the guessed "
        f"bound was wrong in {wrong} of {searches} searches)"
    )


# What captions may have in braces, as sentences on the records.
SENTENCES = {
    "setting": describe_setting, "timing": describe_timing, "training": describe_training,
    "turns": turns_remark, "virtual": virtual_workers_remark,
    "searched": kernel_remark,
}  # fmt: skip


def fill_caption(text: str, frames: Frames, facts: Mapping[str, object]) -> str:
    """Return a caption whose braces hold names of these facts, or of `SENTENCES`."""
    names = {name for _, name, _, _ in Formatter().parse(text) if name}
    return text.format(**{name: facts[name] if name in facts else SENTENCES[name](frames) for name in names})


def _to_int_if_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float | np.floating) and float(value).is_integer() else value


def _min_seeds_per_method(frames: Frames) -> int:
    """Return the seeds of the method that has fewest.

    Runs of one method may also differ in task, workers or density.
    """
    by_method = frames.runs.assign(method=[_method_of_run(frames, key) for key in frames.runs["key"]])
    return int(by_method.groupby("method")["seed"].nunique().min())


def _method_of_run(frames: Frames, key: str) -> str:
    return method_id(
        {name: value_of_run(frames, key, name) for name in METHOD_COLUMNS if name in frames.runs}
    )
