"""What each column of the frames means: the one list, from which docs/records.md is written.

A name with a star stands for as many columns as there are settings of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from analysis.frames import PHASES


class Column(NamedTuple):
    """A column of one or several frames."""

    name: str
    unit: str  # empty: a word, a text, or a number without one
    meaning: str


RUNS = (
    Column("key", "", "the run, in every frame: digits of the hash of its configuration, and its variant"),
    Column("run_id", "", "the name of its folder: method, task, workers, kind of cluster, key"),
    Column("group", "", "the key of the run in which variants took turns"),
    Column("variant", "", "the name of this variant there"),
    Column("attempt", "", "which of its measurements this is; the newest whole one counts"),
    Column("source", "", "own: measured in this checkout; shipped: it came with the repository"),
    Column("items", "", "the figures and tables that are drawn from it"),
    Column("sweeps", "", "the sweeps that asked for it (`sweep=NAME`)"),
    Column("method.name", "", "the sparsification method"),
    Column("method.*", "", "its hyperparameters; `run method=NAME --help` explains them"),
    Column("task.name", "", "network and data set"),
    Column("task.batch_size", "samples", "per worker and step"),
    Column("task.*", "", "settings of its training: learning rate, decays, momentum; `run task=NAME --help`"),
    Column("workers", "", "number of workers"),
    Column("seed", "", "of initial weights, order of data and random selections"),
    Column("device", "", "cpu or cuda"),
    Column("threads", "", "threads of each worker"),
    Column("precision", "", "the precision that was asked for"),
    Column("select", "", "who searches for what to send: auto, torch or fused"),
    Column("overlap", "", "does aggregation overlap with backpropagation?"),
    Column("cuda_graph", "", "is a GPU's search captured in a CUDA graph?"),
    Column("cluster.name", "", "the cluster, a file of conf/cluster"),
    Column("cluster.where", "", "local, netns (slow links): processes; virtual: one of them; slurm"),
    Column("cluster.gpu", "", "the GPU that was asked for"),
    Column("cluster.link.name", "", "what joins the workers, a file of conf/link"),
    Column("cluster.link.alpha_s", "s", "latency of a message in the model of that link"),
    Column("cluster.link.beta_s_per_byte", "s/B", "time for a byte in the model of that link"),
    Column("cluster.inside.name", "", "what joins the workers of one simulated node, if not the link"),
    Column("cluster.inside.*", "", "the same of that link"),
    Column("cluster.workers_per_node", "", "workers of a node"),
    Column("timing.mode", "", "where clocks are read: serialised, production or as_published"),
    Column("timing.warmup_steps", "steps", "left out at the beginning, at least"),
    Column("timing.span_steps", "steps", "how many last steps have spans; without a number, all"),
    Column("late.draw", "", "how long workers do nothing on purpose: none, constant, uniform and so on"),
    Column("late.*", "", "of it: seconds, spread, and the only worker that is late"),
    Column("train.epochs", "epochs", "after which training ends"),
    Column("train.steps", "steps", "after which it ends, if that is earlier"),
    Column("train.epoch_steps", "steps", "of an epoch, where it is cut short"),
    Column("train.validate", "", "epoch: the run is there for its learning curve; never: for its times"),
    Column("train.held_out", "images", "of the training set that validation takes instead of the test set"),
    Column("train.validate_every", "epochs", "between two validations"),
    Column("train.look_every", "steps", "between two looks at what is selected from; empty: none"),
    Column("alternate.blocks", "turns", "of each variant, at least"),
    Column("alternate.block_steps", "steps", "of a turn"),
    Column("alternate.until", "", "the half-width of ratios at which turns end"),
    Column("alternate.limit_min", "min", "after which turns end anyway"),
    Column("alternated.blocks", "turns", "of each variant, that were taken"),
    Column("alternated.half_width", "", "the relative half-width of the least certain ratio at the end"),
    Column("alternated.stopped", "", "what ended the turns: half-width or limit"),
    Column("train_loss", "", "mean training loss of the last epoch"),
    Column("val_loss", "", "validation loss at the last epoch"),
    Column("val_top1", "%", "validation accuracy at the last epoch"),
    Column("val_top5", "%", "the right class among the first five, at the last epoch"),
    Column("step_s", "s", "mean time of a step on its slowest worker, without warm-up; may be `simulated`"),
    Column("samples_per_s", "1/s", "samples of all workers in a second, from `step_s`"),
    Column("wire_bytes", "B", "that a worker puts on the wire in a step, mean"),
    Column("sent_density", "", "share of the elements that a worker sends, mean"),
    Column("update_density", "", "share of the elements that an update changes, mean"),
    Column("took_s", "s", "from its first start to its end, interruptions included"),
    Column("test_loss", "", "loss on the test set at the end, of runs with held-out data"),
    Column("test_top1", "%", "accuracy on the test set at the end, of runs with held-out data"),
    Column("parameters", "", "number of parameters of the network"),
    Column("tensors", "", "number of tensors that they are in"),
    Column("steps_per_epoch", "steps", "of a whole epoch"),
    Column("steps_total", "steps", "that were made, of each variant"),
    Column("simulated", "", "are wait and transfer from the model of a link, not measured?"),
    Column("started", "", "when it was first started, UTC"),
    Column("ended", "", "when it ended, UTC"),
    Column("resumed", "", "the steps at which it went on after interruptions"),
    Column("searching.kernel", "", "who searched: torch, a native kernel or Triton"),
    Column("searching.*", "", "how often, among how many candidates, how often with a wrong guess"),
    Column("provenance.cpu", "", "the processor"),
    Column("provenance.cores", "", "that it could use"),
    Column("provenance.memory_gib", "GiB", "of the machine"),
    Column("provenance.precision", "", "what products were computed in"),
    Column("provenance.host", "", "the name of the machine; not of shipped runs"),
    Column("provenance.platform", "", "operating system"),
    Column("provenance.huge_pages", "", "Linux's setting of transparent huge pages"),
    Column("provenance.before.load", "", "load average before the run"),
    Column("provenance.commit", "", "the version of this code"),
    Column("provenance.data.name", "", "the data set that was read"),
    Column("provenance.data.digest", "", "SHA-256 of its images"),
    Column("provenance.machine.*", "", "what was checked of the machine before the run, and found"),
    Column("provenance.versions.*", "", "versions of Python and of packages"),
    Column("provenance.*", "", "more of the machine: GPU, NCCL, container image, SLURM's job, changed code"),
    Column("config_json", "", "the whole configuration, as JSON"),
    Column("provenance_json", "", "the whole provenance, as JSON"),
)  # fmt: skip
PHASE_MEANINGS = {
    "io": "loading the batch", "forward": "forward pass", "backward": "backpropagation",
    "late": "doing nothing, on purpose",
    "check": "looking for NaN and Inf", "select": "choosing what to send",
    "exchange": "preparing the messages", "wait": "waiting for the slowest worker",
    "transfer": "collective communication", "scatter": "adding up what was received",
    "update": "the optimiser's step",
    "synchronize": "communication and the wait for it, in mode as_published",
    "validate": "validation inside the timed loop, in mode as_published",
}  # fmt: skip
STEPS = (
    Column("key", "", "the run"),
    Column("rank", "", "the worker"),
    Column("step", "", "counted from 0"),
    Column("epoch", "", "counted from 1"),
    Column("start_s", "s", "when it began, by the worker's own clock"),
    Column("step_s", "s", "how long it took"),
    *(Column(f"{phase}_s", "s", f"of these for {PHASE_MEANINGS[phase]}") for phase in PHASES),
    Column("wire_bytes", "B", "that the worker put on the wire"),
    Column("messages", "", "latency terms of its collectives, as its backend carries them out"),
    Column("predicted_s", "s", "that they should take on the emulated link as it was found; 0 without one"),
    Column("host_syncs", "", "how often the host waited for the device"),
    Column("density", "", "share of the elements that it sent"),
    Column("update_density", "", "share of the elements that the update changed"),
    Column("residual_norm", "", "Euclidean norm of what it owes"),
    Column("loss", "", "training loss of its batch"),
    Column("lr", "", "learning rate"),
    Column("block", "", "in which turn, of variants that take turns; 0 is warm-up"),
)
EPOCHS = (
    Column("key", "", "the run"),
    Column("epoch", "", "counted from 1"),
    Column("step", "steps", "made until then"),
    Column("train_loss", "", "mean training loss since the last validation"),
    Column("val_loss", "", "validation loss"),
    Column("val_top1", "%", "validation accuracy"),
    Column("val_top5", "%", "the right class among the first five"),
    Column("wall_s", "s", "spent in steps until then"),
    Column("wire_bytes", "B", "that a worker put on the wire in a step, mean"),
    Column("host_syncs", "", "how often the host waited for the device in a step, mean"),
    Column("density", "", "share of the elements that it sent, mean"),
    Column("update_density", "", "share of the elements that an update changed, mean"),
    Column("captured_energy", "", "share of the squared norm that was sent, mean"),
    Column("test_loss", "", "loss on the test set, at the end"),
    Column("test_top1", "%", "accuracy on the test set, at the end"),
)
SPANS = (
    Column("key", "", "the run"),
    Column("rank", "", "the worker"),
    Column("step", "", "counted from 0"),
    Column("phase", "", "what it did"),
    Column("start_s", "s", "when it began, by the worker's own clock"),
    Column("duration_s", "s", "how long it took"),
)
LOOKS = (
    Column("key", "", "the run"),
    Column("step", "", "counted from 0"),
    Column("what", "", "size, histogram, left_out, heat, kept, shuffled: experiments/training/looks.py"),
    Column("of", "", "the tensor, or all of them; of kept and shuffled, the elements of a region too"),
    Column("x", "", "standard deviations, density, place or steps, as `what` says"),
    Column("value", "", "what was found there"),
)
COLUMNS = {"runs": RUNS, "steps": STEPS, "epochs": EPOCHS, "spans": SPANS, "looks": LOOKS}
ROWS = {
    "runs": "A row per run, or per variant of those that took turns.",
    "steps": "A row per run, worker and step.",
    "epochs": "A row per run and validation.",
    "spans": "A row per phase of the last steps of timed runs, as figures of single steps show them.",
    "looks": "A row per number that rank 0 looked for in what it selects from (`train.look_every`).",
}
BEGIN, END = "<!-- columns: written by `python -m analysis.columns` -->", "<!-- end of columns -->"
PAGE = Path(__file__).parent.parent / "docs" / "records.md"


def describe(frame: str, name: str) -> Column | None:
    """The description of a column: its own, else that of its kind."""
    own = [column for column in COLUMNS[frame] if column.name == name]
    kinds = (column for column in COLUMNS[frame] if "*" in column.name and fnmatchcase(name, column.name))
    return own[0] if own else next(kinds, None)


def unit(name: str) -> str:
    """The unit of a column of `runs`."""
    column = describe("runs", name)
    return column.unit if column else ""


def markdown() -> Iterator[str]:
    """All columns as tables, line by line."""
    for frame, columns in COLUMNS.items():
        yield from ("", f"### {frame}", "", ROWS[frame], "", "| column | unit | meaning |", "|---|---|---|")
        yield from (f"| `{column.name}` | {column.unit} | {column.meaning} |" for column in columns)


def page() -> str:
    """docs/records.md with these tables between its two marks."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{chr(10).join(markdown()).strip()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page())
