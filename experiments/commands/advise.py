from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

import sparsify
from analysis import captions, loading, style, tables
from analysis.files import write_atomic
from analysis.frames import Frames, restrict
from analysis.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB, estimate
from analysis.steps import breakdown
from experiments.commands import _advice
from experiments.commands._advice import Prediction, Question, Range
from experiments.commands._make import say
from experiments.commands._terminal import show
from experiments.commands._words import Settings
from experiments.config import compose
from experiments.config.folders import Folders
from sparsify.cost import Link, Network
from sparsify.ranges import shown, unknown
from sparsify.replay import sparse_part
from sparsify.selections import SLICES

GROUP = "results"
OWN = ("compute_s", "parameters", "density", "overlap", "skew", "methods")  # words that no run has
SELECT = "select_s."
DENSITY = 0.001
# Elements of models that others published: torchvision's documentation; Devlin et al. 2019.
MODELS = {
    "resnet50": 25_557_032, "vgg16_imagenet": 138_357_544, "vgg16_cifar10": 14_728_266,
    "resnet18_cifar10": 11_173_962, "bert_large": 340_000_000,
}  # fmt: skip
SELECTING = ("select", "exchange", "scatter")  # phases: searching, packing, merging
COMMUNICATING = ("wait", "transfer", "synchronize")
PUBLISHED = ("vgg16_cifar10", 128)  # task and batch of Yoon and Oh's logs
# Methods that search as another one does, whose time stands for theirs.
SEARCH_AS = {"gtopk": "topk", "sparcml": "topk", "scalecom": "topk"}


def advise(words: Settings, *, save: str | None = None) -> int:
    """Which method would be the fastest on a cluster, predicted: advise cluster=mine task=vgg16_cifar10

    A step's time is that of computing, selecting and communicating. Computing and selecting are taken from
    stored records of like runs, where there are any; communicating is simulated on the cluster's link by the
    alpha-beta model. What is not known is asked for.

    Args:
        words: settings of a run: cluster=, task=, workers=, link=, inside= and so on. Besides: compute_s=,
            seconds of a step but for selecting and communicating; select_s.METHOD=, seconds that a method
            selects; both may be a range, as 0.1..0.2; parameters=, elements of the model, or the name of a
            published one; density=, k/n; overlap=, what two workers' selections have in common, and skew=;
            methods=, which, with commas (topk-fused: with the fused kernel).
        save: the name of the files that are written.
    """
    config, given = _split(words)
    model = given["parameters"] if given.get("parameters") in MODELS else str(config["task"]["name"])
    folders = Folders()
    records = _measured(loading.load(folders.results, ("runs", "steps")))
    question, left_out = _question(config, given, records)
    found = _advice.ranked(question)
    table = _table(found, question, config, model, left_out)
    show(table)
    name = save or _file_name(config, model)
    tables.save([table], folders.figures, name)
    write_atomic(folders.figures / f"{name}.md", f"# {table.title}\n\n{table.markdown()}")
    say(str(folders.figures / f"{name}.md"))
    return 0


def _split(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings as a run's config, and the words that are this command's own.

    Raises:
        ValueError: an unknown word.
    """
    pairs = [compose.pair(word) for word in words]
    own = {key: value for key, value in pairs if key in OWN or key.startswith(SELECT)}
    settings = [f"{key}={value}" for key, value in pairs if key not in (*own, "inside")]
    try:
        config = compose.resolve(settings)
    except ValueError as error:
        more = f"; advise also takes {', '.join(OWN)} and {SELECT}METHOD" if "no key" in str(error) else ""
        raise ValueError(f"{error}{more}") from error
    if fast := dict(pairs).get("inside"):  # a run has it on virtual ranks only: real nodes have their own
        config["cluster"]["inside"] = compose.resolve(["cluster=virtual", f"inside={fast}"])["cluster"][
            "inside"
        ]
    if config["cluster"]["where"] == "slurm" and not any(key == "workers" for key, _ in pairs):
        config["workers"] = config["cluster"]["workers_per_node"]
    return config, own


def _question(
    config: Mapping[str, Any], given: Mapping[str, str], records: Frames
) -> tuple[Question, list[str]]:
    """What is to be predicted, and the methods that can't be.

    Raises:
        ValueError: a number is missing, or makes no sense.
    """
    network = _network(config)
    overlap, skew = _number(given, "overlap", 0, 1), _number(given, "skew", 1, SLICES)
    density = _number(given, "density", 0, 1)
    like = _on_machine(records, config)
    compute_s = _compute_s(config, given, like)
    wanted = given["methods"].split(",") if "methods" in given else None
    for name in wanted or []:
        _check_method(name)
    elements = _elements(config, given, records)
    select_s = _select_s(config, given, like, records, elements)
    for name in wanted or []:
        if name not in select_s and name != "dense":
            raise ValueError(
                f"how long {name} takes to select on {_machine(config)} is not known, for no such run is "
                f"stored: give {SELECT}{name}=SECONDS"
            )
    chosen = {name: each for name, each in select_s.items() if wanted is None or name in wanted}
    question = Question(
        elements,
        config["workers"],
        density or DENSITY,
        network,
        compute_s,
        chosen,
        _advice.OVERLAP if overlap is None else (overlap, overlap, overlap),
        _advice.SKEW if skew is None else skew,
    )
    return question, [name for name in LISTED if name not in select_s]


LISTED = (
    "topk", "topk-fused", "randomk", "randomk-hash", "blockrandomk", "gaussiank", "dgc", "gtopk", "oktopk",
    "sparcml", "scalecom", "stable_topk",
)  # fmt: skip


def _check_method(name: str) -> None:
    method = name.partition("-")[0]
    if method not in sparsify.names():
        raise ValueError(unknown("method", method, sparsify.names()))
    sparse_part(sparsify.build(method))


def _network(config: Mapping[str, Any]) -> Network:
    cluster, link = config["cluster"], config["cluster"]["link"]
    if None in (link["alpha_s"], link["beta_s_per_byte"]):
        raise ValueError(
            f"cluster={cluster['name']}: link={link['name']} has no alpha and beta, so what communication "
            "takes can't be predicted; choose another link=, as ethernet_10g or nvlink3"
        )
    inside = cluster.get("inside")
    fast = Link(inside["alpha_s"], inside["beta_s_per_byte"]) if inside else None
    return Network(Link(link["alpha_s"], link["beta_s_per_byte"]), fast, _per_node(config))


def _per_node(config: Mapping[str, Any]) -> int:
    return int(config["cluster"].get("workers_per_node") or 1)


def _number(given: Mapping[str, str], name: str, low: float, high: float) -> float | None:
    """A word's number, where it was given."""
    if name not in given:
        return None
    value = _float(name, given[name])
    if not low <= value <= high or (name == "density" and not value):
        raise ValueError(f"{name}={given[name]} is out of range: it lies between {low:g} and {high:g}")
    return value


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={shown(text)} is no number") from None


def _seconds(name: str, text: str) -> Range:
    """A number, or a range of two: 0.1..0.2."""
    low, dots, high = text.partition("..")
    ends = [_float(name, low), _float(name, high)] if dots else [_float(name, text)]
    if not all(end > 0 for end in ends) or ends != sorted(ends):
        raise ValueError(
            f"{name}={shown(text)} is out of range: seconds above 0, or a range such as 0.1..0.2"
        )
    if not dots:
        return Range.around(ends[0], "given")
    return Range(ends[0], (ends[0] * ends[1]) ** 0.5, ends[1], "given")


# --- where the numbers come from
# -------------------------------------------------------------------------------------------------


def _measured(frames: Frames) -> Frames:
    """Runs whose phases were timed one by one, by real processes."""
    runs = frames.runs
    if not len(runs):
        return frames
    simulated = runs["simulated"].fillna(False).astype(bool) if "simulated" in runs else False
    whole = runs["timing.mode"].eq("serialised") & ~simulated & runs["key"].isin(frames.steps["key"])
    return restrict(frames, runs.loc[whole, "key"])


def _on_machine(frames: Frames, config: Mapping[str, Any]) -> Frames:
    """Those on the accelerator that the cluster names; without one those on a CPU."""
    runs, gpu = frames.runs, config["cluster"]["gpu"]
    names = runs.get("provenance.gpu", pd.Series(None, runs.index, dtype=object))
    if gpu == "none":
        return restrict(frames, runs.loc[names.isna(), "key"])
    like = names.fillna("").str.lower().str.contains("" if gpu == "any" else gpu, regex=False) & names.notna()
    return restrict(frames, runs.loc[like, "key"])


def _machine(config: Mapping[str, Any]) -> str:
    gpu = config["cluster"]["gpu"]
    return {"none": "CPUs", "any": "GPUs"}.get(gpu) or str(gpu).upper()


def _elements(config: Mapping[str, Any], given: Mapping[str, str], records: Frames) -> int:
    if "parameters" in given:
        text = given["parameters"]
        value = MODELS.get(text) or _float("parameters", text)
        if value < 1 or value != int(value):
            raise ValueError(f"parameters={shown(text)}: a whole number, or one of {', '.join(MODELS)}")
        return int(value)
    task = config["task"]
    if "elements" in task:
        return int(task["elements"])
    found: int | None = elements_of(records, task["name"]) or MODELS.get(task["name"])
    if found is None:
        raise ValueError(
            f"how many parameters task={task['name']} has is not known, for no dense run of it is stored: "
            f"give parameters=NUMBER, or one of {', '.join(MODELS)}"
        )
    return found


def elements_of(records: Frames, task: str) -> int | None:
    """n of a task, from what dense allreduces of it sent: 2 (P-1)/P n words."""
    runs = records.runs
    if not len(runs):
        return None
    dense = runs[runs["task.name"].eq(task) & runs["method.name"].eq("dense") & runs["workers"].gt(1)]
    for run in dense.to_dict("records"):
        sent = records.steps.loc[records.steps["key"] == run["key"], "wire_bytes"].median()
        size = int(run["workers"])
        return round(float(sent) * size / (2 * (size - 1) * 4))
    return None


def _compute_s(config: Mapping[str, Any], given: Mapping[str, str], like: Frames) -> Range:
    """A dense step's time but for what communicating takes."""
    if "compute_s" in given:
        return _seconds("compute_s", given["compute_s"])
    task, batch = config["task"]["name"], config["task"].get("batch_size")
    keys = [key for key in _keys(like, "dense") if _is_of(like, key, task, batch)]
    if keys:
        rest = [
            sum(took for phase, took in _phases(like, key) if phase not in (*SELECTING, *COMMUNICATING))
            for key in keys
        ]
        return _spread(rest, f"{len(keys)} stored runs of task={task}")
    if (task, batch) == PUBLISHED and (found := _published(config)):
        return found["dense"]
    raise ValueError(
        f"how long task={task} computes on {_machine(config)} is not known, for no dense run of it with "
        f"task.batch_size={batch} and timing.mode=serialised is stored: give compute_s=SECONDS of a step's "
        "forward and backward pass and update"
    )


def _select_s(
    config: Mapping[str, Any], given: Mapping[str, str], like: Frames, records: Frames, elements: int
) -> dict[str, Range]:
    """By method: as given, as stored runs on such a machine took (in proportion to the elements), as `make
    bench BENCH=methods` found it, or as published.
    """
    found = dict[str, Range]()
    for name, (seconds, source) in {
        **_benched(config, elements),
        **_recorded(like, records, elements),
    }.items():
        found[name] = _spread(seconds, source)
    if config["task"]["name"] == PUBLISHED[0]:
        found |= {name: took for name, took in (_published(config) or {}).items() if name != "dense"}
    for key, text in given.items():
        if key.startswith(SELECT):
            _check_method(key.removeprefix(SELECT))
            found[key.removeprefix(SELECT)] = _seconds(key, text)
    for name, other in SEARCH_AS.items():
        if name not in found and other in found:
            found[name] = found[other]._replace(
                source=f"as {style.look(other).label}'s, which searches alike"
            )
    return {name: found[name] for name in sorted(found)}


def _recorded(like: Frames, records: Frames, elements: int) -> dict[str, tuple[list[float], str]]:
    found = dict[str, tuple[list[float], str]]()
    for run in like.runs.to_dict("records"):
        name = _name(run)
        task = str(run["task.name"])
        own = int(run["task.elements"]) if task == "vector" else elements_of(records, task)
        if name is None or own is None:
            continue
        took = sum(seconds for phase, seconds in _phases(like, run["key"]) if phase in SELECTING)
        samples, _ = found.setdefault(name, ([], ""))
        samples.append(took * elements / own)
        found[name] = samples, f"{len(samples)} stored runs"
    return found


def _benched(config: Mapping[str, Any], elements: int) -> dict[str, tuple[list[float], str]]:
    """Rows of results/bench/methods.json, of the number of elements that is nearest."""
    path = Folders().results / "bench" / "methods.json"
    if not path.exists() or config["cluster"]["gpu"] not in ("none", "any"):
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["device"].startswith("cpu") == (config["cluster"]["gpu"] == "none")]
    found = dict[str, tuple[list[float], str]]()
    for row in sorted(rows, key=lambda row: abs(row["n"] - elements), reverse=True):
        took = sum(row[part] for part in ("select", "exchange", "retain", "scatter"))
        found[row["method"]] = ([took * elements / row["n"]], f"make bench BENCH=methods, n = {row['n']:,}")
    return found


def _published(config: Mapping[str, Any]) -> dict[str, Range] | None:
    """Of Yoon and Oh 2022, from their own logs: VGG-16, batch 128, 8 A100 or V100, validation taken out."""
    gpu = str(config["cluster"]["gpu"]).upper()
    jobs = {method: job for (machine, method), job in JOB.items() if machine == gpu}
    if not jobs:
        return None
    source = f"published: logs of Yoon and Oh 2022, 8 {gpu}"
    dense = rederived.iteration_ms(jobs["dense"]) - rederived.communication_ms(jobs["dense"])
    found = {"dense": Range.of(estimate(dense).times(1e-3), source)}
    for method, job in jobs.items():
        if method != "dense":
            # What an iteration takes beyond computing and communicating, wherever their clock put it.
            beyond = rederived.iteration_ms(job) - rederived.communication_ms(job) - dense
            found[method] = Range.of(estimate(beyond).times(1e-3), source)
    return found


def _keys(frames: Frames, name: str) -> list[str]:
    return [str(run["key"]) for run in frames.runs.to_dict("records") if style.method_id(run) == name]


def _is_of(frames: Frames, key: str, task: str, batch: int | None) -> bool:
    run = frames.runs[frames.runs["key"] == key].iloc[0]
    return bool(run["task.name"] == task and (batch is None or run.get("task.batch_size") == batch))


def _name(run: Mapping[Any, Any]) -> str | None:
    """The method as it is called here; None of one that can't be replayed."""
    name = style.method_id(run)
    if name.partition("-")[0] != run["method.name"] or name not in LISTED:
        return None
    return name


def _phases(frames: Frames, key: str) -> Iterator[tuple[str, float]]:
    """Mean seconds of each phase, and `unaccounted`."""
    for phase, took in breakdown(frames, [key]).items():
        if phase != "step":
            yield str(phase), float(took)


def _spread(seconds: Sequence[float], source: str) -> Range:
    """The median, from the quickest to the slowest run."""
    if len(seconds) == 1:
        return Range.around(seconds[0], source)
    ordered = sorted(seconds)
    return Range(ordered[0], float(pd.Series(ordered).median()), ordered[-1], source)


# --- what is told
# -------------------------------------------------------------------------------------------------


def _table(
    found: Sequence[Prediction],
    question: Question,
    config: Mapping[str, Any],
    model: str,
    left_out: Sequence[str],
) -> tables.Table:
    rows = [
        {
            "method": style.look(one.method).label,
            "step": one.step.times(1e3),
            "computing": 1e3 * one.compute_s,
            "selecting": 1e3 * one.select_s,
            "communicating": 1e3 * one.transfer_s,
            "speed-up over dense": one.speedup,
            "density": 1.0 if one.method == "dense" else question.density,
            "matters most": one.matters,
        }
        for one in found
    ]
    units = dict.fromkeys(("step", "computing", "selecting", "communicating"), "ms")
    cluster = config["cluster"]
    inside = f", inside={cluster['inside']['name']}" if cluster.get("inside") else ""
    title = (
        f"Predicted step times: {model}, {number(question.elements)} parameters, {question.workers} workers, "
        f"cluster={cluster['name']}, link={cluster['link']['name']}{inside}"
    )
    return tables.Table(title, pd.DataFrame(rows), units, _note(question, config, left_out))


def _note(question: Question, config: Mapping[str, Any], left_out: Sequence[str]) -> str:
    sources = {f"computing: {question.compute_s.source}": None}
    for name, each in question.select_s.items():
        sources[f"{style.look(name).label}: {each.source}"] = None
    missing = (
        f" Not ranked, for their selection was not measured on {_machine(config)}: "
        f"{captions.listed(style.look(name).label for name in left_out)} ({SELECT}METHOD=SECONDS gives it)."
        if left_out
        else ""
    )
    least, _, most = question.overlap
    nodes = -(-question.workers // _per_node(config))
    flat = (
        f" The link joins all workers alike, also those of one of the {nodes} nodes: inside= says what "
        "these have."
        if config["cluster"]["where"] == "slurm" and nodes > 1 and question.network.inside is None
        else ""
    )
    return (
        "Predicted, not measured; nothing overlaps, nobody is late. Where numbers come from: "
        f"{'; '.join(sources)}. Communicating: simulated by the alpha-beta model. Intervals: what the inputs "
        f"may be off by, latency by a factor of {_advice.LATENCY:g}, bandwidth of {_advice.BANDWIDTH:g}, a "
        f"single measurement or a given number of {_advice.GIVEN:g}, the others from the slowest to the "
        f"quickest run; overlap of two workers' selections {least:g} to {most:g}."
        f"{flat}{missing}"
    )


def _file_name(config: Mapping[str, Any], model: str) -> str:
    cluster = config["cluster"]
    return f"advise-{cluster['name']}-{cluster['link']['name']}-{model}-{config['workers']}w"
