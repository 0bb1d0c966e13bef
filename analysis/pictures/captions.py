"""Sentences of captions on the records behind a figure: machine, data, protocol, samples, simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

import numpy as np
import pandas as pd

from analysis.pictures.links import LINK_COLUMN, describe_link, describe_links_in_text
from analysis.pictures.numbers import format_number
from analysis.pictures.style import METHOD_COLUMNS, method_id, method_style
from analysis.records.columns import is_relay_bottleneck
from analysis.records.frames import Frames, find_diverged_keys, run_labels_by_key, value_of_run
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
    values = dict.fromkeys(frames.runs[column].dropna())
    return sorted(map(_to_int_if_whole, values), key=lambda value: (isinstance(value, str), value))


def join_with_and(items: Iterable[object]) -> str:
    """Return 'a', 'a and b', 'a, b and c'; 'unknown' of nothing."""
    words = [str(item) for item in items]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "unknown"


def join_distinct_values(frames: Frames, column: str, format_value: Callable[[Any], str] = str) -> str:
    """Return the distinct values of a column of `frames.runs` as words: '2, 4 and 8'."""
    return join_with_and(map(format_value, distinct_values(frames, column)))


def has_simulated_times(frames: Frames) -> bool:
    """Return True where virtual ranks made times of some of these runs."""
    return any(distinct_values(frames, "simulated"))


def virtual_workers_remark(frames: Frames) -> str:
    """Return a remark that virtual ranks train as so many workers; empty where processes trained."""
    remark = " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
    return remark if has_simulated_times(frames) else ""


def simulated_suffix(frames: Frames) -> str:
    """Return ', simulated' for the name of a quantity whose times virtual ranks made."""
    return ", simulated" if has_simulated_times(frames) else ""


def is_entirely_on_gpu(frames: Frames, gpu_word: str) -> bool:
    """Return True where every run used a GPU whose name contains this word."""
    gpus = frames.runs.get("provenance.gpu", pd.Series(dtype=object))
    return len(gpus) > 0 and bool(gpus.notna().all()) and all(gpu_word in str(gpu) for gpu in gpus)


def is_entirely_over_link(frames: Frames, link: str) -> bool:
    """Return True where this link joined the workers of every run, on machines found to be as named."""
    links = distinct_values(frames, LINK_COLUMN)
    return links == [link.lower()] and not machine_mismatch_remark(frames)


def describe_machine(frames: Frames) -> str:
    """Return the GPUs, or without any the CPUs and their cores."""
    gpus = distinct_values(frames, "provenance.gpu")
    if gpus:
        return join_with_and(gpus)
    cores = join_distinct_values(frames, "provenance.cores")
    return f"{join_distinct_values(frames, 'provenance.cpu')} ({cores} cores)"


def describe_precision(frames: Frames) -> str:
    """Return the precision that runs multiplied in, or else the one that was asked for. A mixture is said."""
    precisions = sorted(set(used_precisions(frames.runs).dropna()))
    return join_with_and(precisions) + " (*mixed*)" * (len(precisions) > 1)


def describe_data_and_digest(frames: Frames) -> str:
    """Return the data sets, and the first digits of their digests."""
    digests = join_distinct_values(frames, "provenance.data.digest", lambda digest: str(digest)[:8])
    return f"{join_distinct_values(frames, 'provenance.data.name')} (digest {digests})"


def describe_workers_and_batch(frames: Frames) -> str:
    """Return '8 virtual workers x batch 16'; of a task without samples, '8 virtual workers'."""
    is_virtual = "virtual" in distinct_values(frames, "cluster.where")
    kind = "virtual workers" if is_virtual else "worker processes"
    batches = distinct_values(frames, "task.batch_size")
    batch = f" x batch {join_with_and(batches)}" if batches else ""
    return f"{join_distinct_values(frames, 'workers')} {kind}{batch}"


def describe_setting_with_remarks(frames: Frames) -> str:
    """Return a sentence: task, data, workers, machine, torch, precision; then all remarks on the runs."""
    remarks = (
        emulated_link_measurements_remark,
        machine_mismatch_remark,
        few_cores_remark,
        divergence_remark,
        code_versions_remark,
    )
    return (
        f"{join_distinct_values(frames, 'task.name')} on {describe_data_and_digest(frames)}, "
        f"{describe_workers_and_batch(frames)}, on {describe_machine(frames)}, "
        f"torch {join_distinct_values(frames, 'provenance.versions.torch')}, "
        f"{describe_precision(frames)}.{''.join(remark(frames) for remark in remarks)}"
    )


def divergence_remark(frames: Frames) -> str:
    """Return the trainings that ended because a gradient was not finite any more; empty without any."""
    keys = find_diverged_keys(frames)
    if not keys:
        return ""
    steps = frames.runs.set_index("key").loc[keys, "diverged"]
    labels = run_labels_by_key(frames.runs)[keys]
    ends = [f"{label} in step {step:.0f}" for label, step in zip(labels, steps, strict=True)]
    return f" {len(keys)} of {len(frames.runs)} runs diverged and have no end: {join_with_and(ends)}."


def describe_scale(frames: Frames) -> str:
    """Return model, data, density, workers and machine of these runs' numbers; empty without runs.

    For places that are far from their figure's caption.
    """
    if not len(frames.runs):
        return ""
    data = join_distinct_values(frames, "provenance.data.name")
    parts = [f"{join_distinct_values(frames, 'task.name')} on {data}"]
    if distinct_values(frames, "method.density"):
        parts.append(f"density {join_distinct_values(frames, 'method.density', format_number)}")
    return ", ".join([*parts, describe_workers_and_batch(frames), f"on {describe_machine(frames)}"])


def scale_label(frames: Frames) -> str:
    """Return model, density and workers: 'vgg16_cifar10:d0.001:w2'; of many values their number."""
    parts = []
    for column, letter in {"task.name": "", "method.density": "d", "workers": "w"}.items():
        values = distinct_values(frames, column)
        if len(values) > MAX_SPELLED_OUT:
            parts.append(f"{letter}{len(values)}values")
        elif values:
            parts.append(letter + "+".join(map(str, values)))
    return ":".join(parts)


def emulated_link_measurements_remark(frames: Frames) -> str:
    """Return bandwidths and latencies found of emulated links, and how busy a relay was; empty if none."""
    prefix = "provenance.machine.link."
    if f"{prefix}asked_gbit_s" not in frames.runs:
        return ""
    texts = []
    for _, runs in frames.runs.dropna(subset=[f"{prefix}asked_gbit_s"]).groupby(LINK_COLUMN):
        link = _columns_below(runs, prefix)
        pair_gbit_s = min(min(json.loads(text)) for text in link["pairs_gbit_s"])
        is_delayed = "delay_s" in link and bool((link["delay_s"] > 0).all())
        texts.append(
            f"{format_number(link['asked_gbit_s'].iloc[0])} Gbit/s asked, "
            f"{format_number(pair_gbit_s)} found between two "
            f"nodes, {format_number(link['together_gbit_s'].min())} with all sending at once, latency "
            f"{format_number(round(1e6 * link['latency_s'].max()))} us "
            f"({'' if is_delayed else 'not delayed; '}"
            f"{format_number(1e6 * link['asked_latency_s'].iloc[0])} us asked){_relay_remark(runs)}"
        )
    return f" Emulated links, as the workers found them: {'; '.join(texts)}." if texts else ""


def _relay_remark(runs: pd.DataFrame) -> str:
    """Return how much of a core the relay of these runs took, and how many packets it handed over late."""
    relay = _columns_below(runs, "relay.")
    if "packets" not in relay or not (relay["packets"] > 0).any():
        return ""
    busy_percent = 100 * float((relay["cpu_s"] / relay["seconds"]).max())
    late_percent = 100 * float((relay["late"] / relay["packets"]).max())
    is_overrun = any(map(is_relay_bottleneck, relay.dropna(subset=["packets"]).to_dict("records")))
    return (
        f" by a relay that took {busy_percent:.2g} % of a core at most, "
        f"with {late_percent:.2g} % of packets over 1 ms late"
        f"{': *the relay, not the link, was the bottleneck*' * is_overrun}"
    )


def _columns_below(runs: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Return the columns that begin with this prefix, without it."""
    names = [str(column) for column in runs if str(column).startswith(prefix)]
    below: pd.DataFrame = runs[names].rename(columns=lambda column: str(column).removeprefix(prefix))
    return below


def code_versions_remark(frames: Frames) -> str:
    """Return a remark on runs that were not all made with the same code; empty where all were."""
    facts = frames.runs.reindex(columns=["provenance.commit", "provenance.dirty"]).itertuples(index=False)
    versions = sorted({_version_text(commit, dirty) for commit, dirty in facts})
    several = f" *Measured with {len(versions)} versions of the code*: {join_with_and(versions)}."
    return several if len(versions) > 1 else ""


def _version_text(commit: Any, dirty: Any) -> str:
    """Return the first digits of the commit, and of the digest of what was changed since."""
    version = str(commit)[:8] if pd.notna(commit) else "unknown"
    return f"{version}+{str(dirty)[:8]}" if pd.notna(dirty) else version


def machine_mismatch_remark(frames: Frames) -> str:
    """Return how the machine differs from the configured one, if `launch.on_mismatch=label` let it."""
    return _machine_remark(frames, "mismatch", "Not the machine that was named")


def few_cores_remark(frames: Frames) -> str:
    """Return a remark on workers that had fewer cores than they computed with."""
    return _machine_remark(frames, "crowded", "Too few cores")


def _machine_remark(frames: Frames, fact: str, heading: str) -> str:
    reasons = [
        reason.partition("; ")[0]  # without what could be done about it
        for text in distinct_values(frames, f"provenance.machine.{fact}")
        for reason in json.loads(text)
    ]
    text = describe_links_in_text("; ".join(dict.fromkeys(reasons)))
    return f" *{heading}*: {text}." if reasons else ""


def describe_timing_and_samples(frames: Frames) -> str:
    """Return mode, number of steps and warm-up of timed runs, and whether their times are simulated."""
    modes = join_distinct_values(frames, "timing.mode", lambda mode: MODE_DESCRIPTIONS.get(mode, mode))
    warm_runs_by_method: dict[str, list[WarmSteps]] = {}
    for key in frames.runs["key"]:
        warm_runs_by_method.setdefault(method_style(_method_of_run(frames, key)).label, []).append(
            warm_steps(frames, key)
        )
    methods_by_text: dict[str, list[str]] = {}
    for method, warm_runs in warm_runs_by_method.items():
        methods_by_text.setdefault(_samples_text(warm_runs), []).append(method)
    samples = "; ".join(f"{join_with_and(methods)} {text}" for text, methods in methods_by_text.items())
    sentences = (
        f"Timing mode: {modes}. Steps per worker: {samples}.{turns_remark(frames)}{lateness_remark(frames)}"
    )
    if has_simulated_times(frames):
        sentences += f" {SIMULATED}{describe_links(frames)}."
    return sentences


def describe_links(frames: Frames) -> str:
    """Return what joins the workers: '1 Gbit/s Ethernet between nodes of 8, NVLink inside', or one link."""
    links = join_distinct_values(frames, LINK_COLUMN, describe_link)
    if not distinct_values(frames, "cluster.inside.name"):
        return links
    size = join_distinct_values(frames, "cluster.workers_per_node")
    inside = join_distinct_values(frames, "cluster.inside.name", describe_link)
    return f"{links} between nodes of {size}, {inside} inside"


def lateness_remark(frames: Frames) -> str:
    """Return a remark on workers that came late on purpose, with the settings; empty if none did."""
    draws = [draw for draw in distinct_values(frames, "late.draw") if draw != "none"]
    if not draws:
        return ""
    settings = [f"late.draw={join_with_and(draws)}"]
    for name in ("s", "spread", "rank"):
        values = distinct_values(frames, f"late.{name}")
        if any(values) or (values and name == "rank"):
            settings.append(f"late.{name}={join_with_and(map(format_number, values))}")
    return f" *Workers late on purpose*: {join_with_and(settings)}."


def turns_remark(frames: Frames) -> str:
    """Return the turns that variants took, and the reason for their end; empty where none did."""
    if not distinct_values(frames, "group"):
        return ""
    groups = frames.runs.dropna(subset=["group"]).drop_duplicates("group")  # the first variant of each
    ends = [*dict.fromkeys(map(_turns_end, groups.to_dict("records")))]
    end = join_with_and(ends) if len(ends) <= MAX_SPELLED_OUT else _turns_ends(groups)
    steps = join_distinct_values(frames, "alternate.block_steps")
    return (
        f" Measured in turns of {steps} steps in one group of processes, in an order drawn anew each round, "
        f"until {end}."
    )


def _turns_end(run: Mapping[Any, Any]) -> str:
    """Return the precision that a group had reached when its turns ended; `run` is its first variant."""
    width = run["alternated.half_width"]
    percent = f"{format_number(100 * width)} %" if width is not None and np.isfinite(width) else "unknown"
    baseline = method_style(run["variant"]).label
    end_by_reason = {
        "limit": f" at the limit of {format_number(run['alternate.limit_min'])} minutes",
        "signal": ", where somebody ended it",
    }
    end = end_by_reason.get(str(run["alternated.stopped"]), "")
    return f"the least certain ratio to {baseline} had a half-width of {percent}{end}"


def _turns_ends(groups: pd.DataFrame) -> str:
    """Return the precision that many groups had reached when their turns ended."""
    percents = pd.to_numeric(groups["alternated.half_width"]).dropna() * 100
    baselines = join_with_and(dict.fromkeys(method_style(name).label for name in groups["variant"]))
    text = (
        f"the least certain ratio to {baselines} had a half-width of {format_number(percents.min())} to "
        f"{format_number(percents.max())} %: {len(groups)} launches ended"
    )
    limited = groups[groups["alternated.stopped"] == "limit"]
    if len(limited):
        limits = join_with_and(map(format_number, sorted(set(limited["alternate.limit_min"]))))
        text += f", {len(limited)} of them by the limit of {limits} minutes"
    signalled = int((groups["alternated.stopped"] == "signal").sum())
    return f"{text}, {signalled} where somebody ended them" if signalled else text


def _samples_text(runs: list[WarmSteps]) -> str:
    """Return 'n = 16 (first 4 dropped as warm-up)'; n is summed over several runs."""
    dropped = sorted({run.dropped_at_start for run in runs})
    first = str(dropped[0]) if len(dropped) == 1 else f"{dropped[0]} to {dropped[-1]}"
    again = sum(run.dropped_after_resuming for run in runs)
    turns = sum(run.turn_count for run in runs)
    stopped = sum(run.dropped_suspended for run in runs)
    several = f" in {turns} turns" if turns else f" in {len(runs)} runs" if len(runs) > 1 else ""
    more = f", and {again} after interruptions" * bool(again) + ", and the first of each turn" * bool(turns)
    more += f", and {stopped} in which a worker was suspended" * bool(stopped)
    return f"n = {sum(run.step_count for run in runs)}{several} (first {first} dropped as warm-up{more})"


def describe_training_length_and_seeds(frames: Frames) -> str:
    """Return the length of the trainings behind a learning curve, and the number of seeds."""
    last = frames.epochs.groupby("key")[["epoch", "step"]].max()
    epochs, steps = (join_with_and(sorted(set(last[name]))) for name in ("epoch", "step"))
    seeds = _min_seeds_per_method(frames)
    count = f"{seeds} seed{'s' if seeds > 1 else ''} per method"
    band = ", bands are 95 % intervals of the mean" if seeds >= ENOUGH_LAUNCHES else ""
    return f"{epochs} epoch{'s' if epochs != '1' else ''} = {steps} optimiser steps; {count}{band}."


def fused_kernel_remark(frames: Frames) -> str:
    """Return the kernel of fused runs, and how often its guess was wrong; empty without fused runs."""
    if not {"searching.kernel", "select"} <= set(frames.runs):
        return ""
    fused = frames.runs[frames.runs["select"] == "fused"]
    if not len(fused):
        return ""
    wrong, searches = (int(fused[f"searching.{name}"].sum()) for name in ("fallbacks", "steps"))
    return (
        f" ({method_style('topk-fused').label}: kernel "
        f"{join_with_and(sorted(set(fused['searching.kernel'])))}; the guessed "
        f"bound was wrong in {wrong} of {searches} searches)"
    )


# What captions may have in braces, as sentences on the records.
SENTENCES = {
    "setting": describe_setting_with_remarks,
    "timing": describe_timing_and_samples,
    "training": describe_training_length_and_seeds,
    "turns": turns_remark,
    "virtual": virtual_workers_remark,
    "searched": fused_kernel_remark,
}


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
