"""What each column of the frames means: the one list, from which docs/records.md is written.

A name with a star stands for as many columns as there are settings of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records.phases import PHASES
from analysis.records.schema import NUMBER, SECOND, WHOLE, Averaged, EpochLine, Field, StepLine, fields_of


def _of_run(fields: Mapping[str, Field], when: str) -> dict[str, Field]:
    """The outcomes of a run among a line's fields."""
    found = {name: field for name, field in fields.items() if field.of_run}
    return {name: field._replace(meaning=f"{field.meaning}, {when}", was="") for name, field in found.items()}


_STEP, _EPOCH = fields_of(StepLine), fields_of(EpochLine)
MEANS = _of_run(_STEP, "mean of its steps")
LAST = {name: field for name, field in _of_run(_EPOCH, "at the last epoch").items() if name not in MEANS}
RUNS = {
    "key": Field("", "the run, in every frame: digits of the hash of its configuration, and its variant"),
    "run_id": Field("", "the name of its folder: method, task, workers, kind of cluster, key"),
    "group": Field("", "the key of the run in which variants took turns", since=SECOND),
    "variant": Field("", "the name of this variant there", since=SECOND),
    "attempt": Field("", "which of its measurements this is; the newest whole one counts"),
    "source": Field("", "own: measured in this checkout; shipped: it came with the repository"),
    "items": Field("", "the figures and tables that are drawn from it"),
    "sweeps": Field("", "the sweeps that asked for it (`sweep=NAME`)"),
    "method.name": Field("", "the sparsification method"),
    "method.*": Field("", "its hyperparameters; `run method=NAME --help` explains them"),
    "task.name": Field("", "network and data set"),
    "task.batch_size": Field("samples", "per worker and step"),
    "task.*": Field("", "settings of its training: learning rate, decays, momentum; `run task=NAME --help`"),
    "workers": Field("", "number of workers"),
    "seed": Field("", "of initial weights, order of data and random selections"),
    "device": Field("", "cpu or cuda"),
    "threads": Field("", "threads of each worker"),
    "precision": Field("", "the precision that was asked for"),
    "select": Field("", "who searches for what to send: auto, torch or fused", implied="torch"),
    "overlap": Field("", "does aggregation overlap with backpropagation?", implied=False),
    "cuda_graph": Field("", "is a GPU's search captured in a CUDA graph?", implied=True),
    "cluster.name": Field("", "the cluster, a file of conf/cluster"),
    "cluster.where": Field("", "local, netns (slow links): processes; virtual: one of them; slurm"),
    "cluster.gpu": Field("", "the GPU that was asked for"),
    "cluster.link.name": Field("", "what joins the workers, a file of conf/link"),
    "cluster.link.alpha_s": Field("s", "latency of a message in the model of that link"),
    "cluster.link.beta_s_per_byte": Field("s/B", "time for a byte in the model of that link"),
    "cluster.inside.name": Field("", "what joins the workers of one simulated node, if not the link"),
    "cluster.inside.*": Field("", "the same of that link"),
    "cluster.workers_per_node": Field("", "workers of a node"),
    "timing.mode": Field("", "where clocks are read: serialised, production or as_published"),
    "timing.warmup_steps": Field("steps", "left out at the beginning, at least"),
    "timing.span_steps": Field("steps", "how many last steps have spans; without a number, all"),
    "timing.*": Field("", "more of how steps are timed; `run --help` explains it; empty: the default"),
    "train.epochs": Field("epochs", "after which training ends"),
    "train.steps": Field("steps", "after which it ends, if that is earlier"),
    "train.epoch_steps": Field("steps", "of an epoch, where it is cut short", implied=None),
    "train.validate": Field("", "epoch: the run is there for its learning curve; never: for its times"),
    "train.validate_every": Field("epochs", "between two validations", implied=1),
    "train.held_out": Field("images", "of the training set, for validation", implied=0),
    "train.look_every": Field("steps", "between looks at what is selected from; empty: none", implied=None),
    "train.*": Field("", "more of the training; `run --help` explains it; empty: the default"),
    "late.draw": Field("", "how long workers do nothing on purpose: none, constant, uniform", implied="none"),
    "late.*": Field("", "of it: seconds, spread, and the only worker that is late"),
    "alternate.blocks": Field("turns", "of each variant, at least"),
    "alternate.block_steps": Field("steps", "of a turn"),
    "alternate.until": Field("", "the half-width of ratios at which turns end"),
    "alternate.limit_min": Field("min", "after which turns end anyway"),
    "alternated.blocks": Field("turns", "of each variant, that were taken"),
    "alternated.half_width": Field("", "the relative half-width of the least certain ratio at the end"),
    "alternated.stopped": Field("", "what ended the turns: half-width or limit"),
    **LAST,
    "step_s": Field("s", "mean time of a step on its slowest worker, without warm-up; may be `simulated`"),
    "samples_per_s": Field("1/s", "samples of all workers in a second, from `step_s`"),
    **MEANS,
    "took_s": Field("s", "from its first start to its end, interruptions included"),
    "parameters": Field("", "number of parameters of the network"),
    "tensors": Field("", "number of tensors that they are in"),
    "steps_per_epoch": Field("steps", "of a whole epoch"),
    "steps_total": Field("steps", "that were made, of each variant"),
    "simulated": Field("", "are wait and transfer from the model of a link, not measured?"),
    "started": Field("", "when it was first started, UTC"),
    "ended": Field("", "when it ended, UTC"),
    "resumed": Field("", "the steps at which it went on after interruptions"),
    "searching.kernel": Field("", "who searched: torch, a native kernel or Triton"),
    "searching.*": Field("", "how often, among how many candidates, how often with a wrong guess"),
    "provenance.cpu": Field("", "the processor"),
    "provenance.cores": Field("", "that it could use"),
    "provenance.memory_gib": Field("GiB", "of the machine"),
    "provenance.precision": Field("", "what products were computed in"),
    "provenance.host": Field("", "the name of the machine; not of shipped runs"),
    "provenance.platform": Field("", "operating system"),
    "provenance.huge_pages": Field("", "Linux's setting of transparent huge pages"),
    "provenance.before.load": Field("", "load average before the run"),
    "provenance.commit": Field("", "the version of this code"),
    "provenance.data.name": Field("", "the data set that was read"),
    "provenance.data.digest": Field("", "SHA-256 of its images"),
    "provenance.machine.*": Field("", "what was checked of the machine before the run, and found"),
    "provenance.versions.*": Field("", "versions of Python and of packages"),
    "provenance.*": Field("", "more of the machine: GPU, NCCL, container image, SLURM's job, changed code"),
    "config_json": Field("", "the whole configuration, as JSON"),
    "provenance_json": Field("", "the whole provenance, as JSON"),
}  # fmt: skip
OUTCOMES = (*LAST, "step_s", "samples_per_s", *MEANS, "took_s")


class Title(NamedTuple):
    """How an outcome is called where people read it; "" where it is not shown."""

    label: str  # in a sentence, along an axis
    beside: str = ""  # before the values of two runs
    listed: str = ""  # above the values of many runs
    factor: float = 1.0  # of what is shown there
    unit: str = ""  # of it
    per: str = ""  # behind the unit, where the title does not say it


TITLES = {
    "val_top1": Title("validation accuracy", "top-1", "top-1", unit="%"),
    "val_top5": Title("validation top-5 accuracy"),
    "test_top1": Title("test accuracy", "top-1 on the test set", "test top-1", unit="%"),
    "val_loss": Title("validation loss", "validation loss", "loss"),
    "train_loss": Title("training loss", "training loss"),
    "test_loss": Title("test loss"),
    "step_s": Title("time of a step", "step", "step", 1e3, "ms"),
    "samples_per_s": Title("samples per second"),
    "wire_bytes": Title("bytes sent in a step", "sent in a step", "sent", 1e-3, "kB", "/step"),
    "sent_density": Title("share that is sent"),
    "update_density": Title("share that an update changes"),
    "took_s": Title("duration of the run", "duration of the run", unit="s"),
}
KEY, RANK = Field("", "the run"), Field("", "the worker", type=WHOLE)
STEPS = {
    "key": KEY,
    "rank": RANK,
    **{name: _STEP[name] for name in ("step", "epoch", "start_s", "step_s")},
    **{
        f"{phase.name}_s": Field("s", f"of these for {phase.meaning}", since=phase.since, type=NUMBER)
        for phase in PHASES
    },
    **_STEP,
}
EPOCHS = {
    "key": KEY,
    **_EPOCH,
    **{name: _EPOCH[name]._replace(meaning=f"{_EPOCH[name].meaning}, mean") for name in fields_of(Averaged)},
}
SPANS = {
    "key": KEY,
    "rank": RANK,
    "step": _STEP["step"],
    "phase": Field("", "what it did"),
    "start_s": _STEP["start_s"],
    "duration_s": _STEP["step_s"],
}
LOOKS = {
    "key": KEY,
    "step": _STEP["step"],
    "what": Field("", "size, histogram, left_out, heat, kept, shuffled: experiments/training/looks.py"),
    "of": Field("", "the tensor, or all of them; of kept and shuffled, the elements of a region too"),
    "x": Field("", "standard deviations, density, place or steps, as `what` says", type=NUMBER),
    "value": Field("", "what was found there", type=NUMBER),
}
COLUMNS: dict[str, dict[str, Field]] = {
    "runs": RUNS, "steps": STEPS, "epochs": EPOCHS, "spans": SPANS, "looks": LOOKS
}  # fmt: skip
# Those that every table has, also one without rows; of runs the others follow from their configurations.
ALWAYS = {**COLUMNS, "runs": {name: RUNS[name] for name in ("key", "run_id", "group", "variant")}}
# What settings mean that records of before they were added lack; so these keep their keys.
IMPLIED: dict[str, Any] = {
    "comm": "torch", "container": "none",
    **{name: field.implied for name, field in RUNS.items() if field.implied is not ...},
    "variants": {}, "late": {"draw": "none", "s": 0, "spread": 0, "rank": None},
}  # fmt: skip
ROWS = {
    "runs": "A row per run, or per variant of those that took turns.",
    "steps": "A row per run, worker and step.",
    "epochs": "A row per run and validation.",
    "spans": "A row per phase of the last steps of timed runs, as figures of single steps show them.",
    "looks": "A row per number that rank 0 looked for in what it selects from (`train.look_every`).",
}
BEGIN, END = "<!-- columns: written by `python -m analysis.records.columns` -->", "<!-- end of columns -->"
PAGE = Path(__file__).parent.parent.parent / "docs" / "records.md"


def describe(frame: str, name: str) -> Field | None:
    """The field of a column, else that of its kind; None where nothing tells what it means."""
    listed = COLUMNS[frame]
    kinds = (field for kind, field in listed.items() if "*" in kind and fnmatchcase(name, kind))
    return listed.get(name) or next(kinds, None)


def unit(name: str) -> str:
    """The unit of a column of `runs`."""
    field = describe("runs", name)
    return field.unit if field else ""


def markdown() -> Iterator[str]:
    """All columns as tables, line by line."""
    for frame, listed in COLUMNS.items():
        yield from ("", f"### {frame}", "", ROWS[frame], "", "| column | unit | meaning |", "|---|---|---|")
        yield from (f"| `{name}` | {field.unit} | {field.meaning} |" for name, field in listed.items())


def page() -> str:
    """docs/records.md with these tables between its two marks."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{chr(10).join(markdown()).strip()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page())
