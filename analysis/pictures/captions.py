"""What a caption says about the records behind a figure: machine, data, protocol, samples, simulation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

import numpy as np
import pandas as pd

from analysis.pictures.numbers import brief, number
from analysis.pictures.style import TELLING, look, method_id
from analysis.records.columns import is_relay_bottleneck
from analysis.records.frames import Frames, value_of_run
from analysis.records.frames import find_diverged_keys as diverged_in
from analysis.records.frames import label_runs as label_of
from analysis.records.steps import ENOUGH_LAUNCHES, WarmSteps, used_precisions, warm_steps

SIMULATED = (
    "*Simulated* times: ranks are virtual; compute is measured, wait and transfer follow the alpha-beta "
    "model of link "
)
FEW = 3  # values that a name or a sentence spells out
MODES = {
    "serialised": "serialised (synchronised at phase boundaries)",
    "production": "production (nothing synchronises inside a step)",
    "as_published": "as published (host clocks, validation inside the timed loop)",
}


def values(frames: Frames, column: str) -> list[Any]:
    """The distinct values of a column of `frames.runs`, sorted, numbers first; empty if it was not recorded.

    Whole numbers are integers, although pandas keeps a column with gaps as floats.
    """
    if column not in frames.runs:
        return []
    found = list(dict.fromkeys(frames.runs[column].dropna()))
    return sorted(map(_whole, found), key=lambda value: (isinstance(value, str), value))


def listed(items: Iterable[object]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    words = [str(item) for item in items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "unknown"


def is_simulated(frames: Frames) -> bool:
    return any(values(frames, "simulated"))


def virtual(frames: Frames) -> str:
    """A remark that a training of virtual ranks is that of as many workers; empty where processes trained."""
    told = " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
    return told if is_simulated(frames) else ""


def simulated(frames: Frames) -> str:
    """Behind the name of a quantity: ', simulated' where virtual ranks made its times."""
    return ", simulated" if is_simulated(frames) else ""


def is_on(frames: Frames, hardware: str) -> bool:
    """True where every run used a GPU whose name contains this word."""
    gpus = frames.runs.get("provenance.gpu", pd.Series(dtype=object))
    return len(gpus) > 0 and bool(gpus.notna().all()) and all(hardware in str(gpu) for gpu in gpus)


def is_linked(frames: Frames, link: str) -> bool:
    """True where this link joined the workers of every run, on machines found to be what was named."""
    return values(frames, "cluster.link.name") == [link.lower()] and not label(frames)


def machine(frames: Frames) -> str:
    """The GPUs, or without any the CPUs and their cores."""
    if gpus := values(frames, "provenance.gpu"):
        return listed(gpus)
    cores = listed(values(frames, "provenance.cores"))
    return f"{listed(values(frames, 'provenance.cpu'))} ({cores} cores)"


def precision(frames: Frames) -> str:
    """The precision that runs multiplied in, or else the one that was asked for. A mixture is said."""
    found = sorted(set(used_precisions(frames.runs).dropna()))
    return listed(found) + " (*mixed*)" * (len(found) > 1)


def data(frames: Frames) -> str:
    """The data sets, and the first digits of their digests."""
    names, digests = values(frames, "provenance.data.name"), values(frames, "provenance.data.digest")
    return f"{listed(names)} (digest {listed([str(digest)[:8] for digest in digests])})"


def workers(frames: Frames) -> str:
    """'8 virtual workers x batch 16'; of a task without samples, '8 virtual workers'."""
    virtual = "virtual" in values(frames, "cluster.where")
    kind = "virtual workers" if virtual else "worker processes"
    batches = values(frames, "task.batch_size")
    return f"{listed(values(frames, 'workers'))} {kind}{f' x batch {listed(batches)}' if batches else ''}"


def setting(frames: Frames) -> str:
    """One sentence: task, data, workers, machine, torch, precision; then what else must be said, if any."""
    torch = listed(values(frames, "provenance.versions.torch"))
    return (
        f"{listed(values(frames, 'task.name'))} on {data(frames)}, {workers(frames)}, on {machine(frames)}, "
        f"torch {torch}, {precision(frames)}.{emulated(frames)}{label(frames)}{crowded(frames)}"
        f"{diverged(frames)}{code(frames)}"
    )


def diverged(frames: Frames) -> str:
    """The trainings that ended because a gradient was not finite any more; empty without any."""
    if not (keys := diverged_in(frames)):
        return ""
    ended = frames.runs.set_index("key").loc[keys, "diverged"]
    names = [
        f"{name} in step {step:.0f}" for name, step in zip(label_of(frames.runs)[keys], ended, strict=True)
    ]
    return f" {len(keys)} of {len(frames.runs)} runs diverged and have no end: {listed(names)}."


def scale(frames: Frames) -> str:
    """What any number of these runs is of, where its figure's caption is far: model, data, density, workers,
    machine. Empty without runs.
    """
    if not len(frames.runs):
        return ""
    names = listed(values(frames, "provenance.data.name"))
    densities = values(frames, "method.density")
    return ", ".join([
        f"{listed(values(frames, 'task.name'))} on {names}",
        *([f"density {listed(map(number, densities))}"] if densities else []),
        workers(frames),
        f"on {machine(frames)}",
    ])  # fmt: skip


def scale_label(frames: Frames) -> str:
    """Model, density and workers for a name: 'vgg16_cifar10:d0.001:w2'; of many values their number."""
    columns = {"task.name": "", "method.density": "d", "workers": "w"}
    found = {letter: values(frames, column) for column, letter in columns.items()}
    return ":".join(
        letter + ("+".join(map(str, parts)) if len(parts) <= FEW else f"{len(parts)}values")
        for letter, parts in found.items()
        if parts
    )


def emulated(frames: Frames) -> str:
    """Bandwidth and latency that were found of emulated links, and how busy a relay was; empty if none."""
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
            f"{name} {number(seen['asked_gbit_s'].iloc[0])} Gbit/s asked, {number(pairs)} found between two "
            f"nodes, {number(seen['together_gbit_s'].min())} with all sending at once, latency "
            f"{number(round(1e6 * seen['latency_s'].max()))} us ({'' if delayed else 'not delayed; '}"
            f"{number(1e6 * seen['asked_latency_s'].iloc[0])} us asked){_relayed(runs)}"
        )
    return f" Emulated links, as the workers found them: {'; '.join(found)}." if found else ""


def _relayed(runs: pd.DataFrame) -> str:
    """How much of a core the relay of these runs took, and how many packets it handed over late."""
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


def code(frames: Frames) -> str:
    """A remark on runs that were not all made with the same code, where they were not."""
    facts = frames.runs.reindex(columns=["provenance.commit", "provenance.dirty"]).itertuples(index=False)
    versions = sorted({_version(commit, dirty) for commit, dirty in facts})
    several = f" *Measured with {len(versions)} versions of the code*: {listed(versions)}."
    return several if len(versions) > 1 else ""


def _version(commit: Any, dirty: Any) -> str:
    """The first digits of the commit, and of the digest of what was changed since."""
    known = str(commit)[:8] if pd.notna(commit) else "unknown"
    return f"{known}+{str(dirty)[:8]}" if pd.notna(dirty) else known


def label(frames: Frames) -> str:
    """Differences of the machine from the configured one that `launch.on_mismatch=label` accepted."""
    return _told(frames, "mismatch", "Not the machine that was named")


def crowded(frames: Frames) -> str:
    """A remark on workers that had fewer cores than they computed with."""
    return _told(frames, "crowded", "Too few cores")


def _told(frames: Frames, what: str, heading: str) -> str:
    found = [
        why.partition("; ")[0]  # without what could be done about it
        for text in values(frames, f"provenance.machine.{what}")
        for why in json.loads(text)
    ]
    return f" *{heading}*: {'; '.join(dict.fromkeys(found))}." if found else ""


def timing(frames: Frames) -> str:
    """Mode, number of steps and warm-up of timed runs, and whether their times are simulated."""
    modes = listed([MODES.get(mode, mode) for mode in values(frames, "timing.mode")])
    runs: dict[str, list[WarmSteps]] = {}  # by method
    for key in frames.runs["key"]:
        runs.setdefault(look(_method(frames, key)).label, []).append(warm_steps(frames, key))
    counts: dict[str, list[str]] = {}  # sentence about the samples -> the methods for which it is true
    for method, warm_runs in runs.items():
        counts.setdefault(_samples(warm_runs), []).append(method)
    samples = "; ".join(f"{listed(methods)} {count}" for count, methods in counts.items())
    sentences = f"Timing mode: {modes}. Steps per worker: {samples}.{turns(frames)}{late(frames)}"
    if is_simulated(frames):
        sentences += f" {SIMULATED}{joined(frames)}."
    return sentences


def joined(frames: Frames) -> str:
    """The links between workers: 'ethernet between nodes of 8, nvlink inside', or 'ethernet' alone."""
    links = listed(values(frames, "cluster.link.name"))
    if not (inside := values(frames, "cluster.inside.name")):
        return links
    size = listed(values(frames, "cluster.workers_per_node"))
    return f"{links} between nodes of {size}, {listed(inside)} inside"


def late(frames: Frames) -> str:
    """A remark on workers that came late on purpose, with the settings; empty where none did."""
    draws = [draw for draw in values(frames, "late.draw") if draw != "none"]
    if not draws:
        return ""
    settings = [
        f"late.{name}={listed(map(number, found))}"
        for name in ("s", "spread", "rank")
        if (found := values(frames, f"late.{name}")) and (any(found) or name == "rank")
    ]
    return f" *Workers late on purpose*: {listed([f'late.draw={listed(draws)}', *settings])}."


def turns(frames: Frames) -> str:
    """The turns that variants took, and the reason for their end; empty where none did."""
    if not values(frames, "group"):
        return ""
    groups = frames.runs.dropna(subset=["group"]).drop_duplicates("group")
    ends = [*dict.fromkeys(_end(frames, run) for run in groups.to_dict("records"))]
    ends = ends if len(ends) <= FEW else [_ends(frames, groups)]
    steps = listed(values(frames, "alternate.block_steps"))
    return (
        f" Measured in turns of {steps} steps in one group of processes, in an order drawn anew each round, "
        f"until {listed(ends)}."
    )


def _end(frames: Frames, run: dict[Any, Any]) -> str:
    """The precision that a group had reached when its turns ended."""
    variants = frames.runs[frames.runs["group"] == run["group"]]["variant"]
    width = run["alternated.half_width"]
    known = f"{number(100 * width)} %" if width is not None and np.isfinite(width) else "unknown"
    reached: str = f"the least certain ratio to {look(variants.iloc[0]).label} had a half-width of {known}"
    ends = {
        "limit": f" at the limit of {number(run['alternate.limit_min'])} minutes",
        "signal": ", where somebody ended it",
    }
    return reached + ends.get(str(run["alternated.stopped"]), "")


def _ends(frames: Frames, groups: pd.DataFrame) -> str:
    """The same of many groups."""
    widths = pd.to_numeric(groups["alternated.half_width"]).dropna() * 100
    baselines = groups["variant"]  # the first of each; other runs are in no group
    limited = groups[groups["alternated.stopped"] == "limit"]
    limits = listed(map(number, sorted(set(limited["alternate.limit_min"]))))
    at_limit = f", {len(limited)} of them by the limit of {limits} minutes" * bool(len(limited))
    told = int((groups["alternated.stopped"] == "signal").sum())
    at_limit += f", {told} where somebody ended them" * bool(told)
    dense, ended = (
        listed(dict.fromkeys(look(name).label for name in baselines)),
        f"{len(groups)} launches ended",
    )
    return (
        f"the least certain ratio to {dense} had a half-width of {brief(widths.min())} to "
        f"{brief(widths.max())} %: {ended}{at_limit}"
    )


def _samples(runs: list[WarmSteps]) -> str:
    """'n = 16 (first 4 dropped as warm-up)'; n is summed over several runs."""
    dropped = sorted({run.dropped for run in runs})
    first = str(dropped[0]) if len(dropped) == 1 else f"{dropped[0]} to {dropped[-1]}"
    several = f" in {len(runs)} runs" if len(runs) > 1 else ""
    again, turns = sum(run.again for run in runs), sum(run.turns for run in runs)
    stopped = sum(run.stopped for run in runs)
    several = f" in {turns} turns" if turns else several
    more = f", and {again} after interruptions" * bool(again) + ", and the first of each turn" * bool(turns)
    more += f", and {stopped} in which a worker was suspended" * bool(stopped)
    return f"n = {sum(run.n for run in runs)}{several} (first {first} dropped as warm-up{more})"


def training(frames: Frames) -> str:
    """Length of the trainings behind a learning curve, and the number of seeds."""
    last = frames.epochs.groupby("key")[["epoch", "step"]].max()
    epochs, steps = (listed(sorted(set(last[name]))) for name in ("epoch", "step"))
    seeds = _fewest_seeds(frames)
    count = f"{seeds} seed{'s' if seeds > 1 else ''} per method"
    band = ", bands are 95 % intervals of the mean" if seeds >= ENOUGH_LAUNCHES else ""
    return f"{epochs} epoch{'s' if epochs != '1' else ''} = {steps} optimiser steps; {count}{band}."


def searched(frames: Frames) -> str:
    """The kernel by which fused runs searched, and how often its guess was wrong; empty where none ran."""
    if not {"searching.kernel", "select"} <= set(frames.runs):
        return ""
    fused = frames.runs[frames.runs["select"] == "fused"]
    if not len(fused):
        return ""
    wrong, searches = (int(fused[f"searching.{name}"].sum()) for name in ("fallbacks", "steps"))
    return (
        f" ({look('topk-fused').label}: kernel {listed(sorted(set(fused['searching.kernel'])))}; the guessed "
        f"bound was wrong in {wrong} of {searches} searches)"
    )


# What captions may have in braces, as sentences on the records.
SENTENCES = {
    "setting": setting, "timing": timing, "training": training, "turns": turns, "virtual": virtual,
    "searched": searched,
}  # fmt: skip


def filled(text: str, frames: Frames, facts: Mapping[str, object]) -> str:
    """A caption whose braces hold names of these facts, or of `SENTENCES`."""
    names = {name for _, name, _, _ in Formatter().parse(text) if name}
    return text.format(**{name: facts[name] if name in facts else SENTENCES[name](frames) for name in names})


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float | np.floating) and float(value).is_integer() else value


def _fewest_seeds(frames: Frames) -> int:
    """Seeds of the method that has fewest: runs of one method may also differ in task, workers or density."""
    by_method = frames.runs.assign(method=[_method(frames, key) for key in frames.runs["key"]])
    return int(by_method.groupby("method")["seed"].nunique().min())


def _method(frames: Frames, key: str) -> str:
    return method_id({name: value_of_run(frames, key, name) for name in TELLING if name in frames.runs})
