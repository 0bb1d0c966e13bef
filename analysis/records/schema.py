"""Schemas of each file of results: read with these, it is typed and in range, or refused.

Fields that are not named here may be there as well; older records lack those that have a default. A number of
a step or an epoch is its `FieldDescription` here and the line that measures it: frames, tables, outcomes of
runs and docs/records.md follow. One that is measured and not named is read, too: as a column of unknown
meaning.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, structs

SCHEMA = 1  # of a manifest, and of tables
SECOND_VERSION_DAY = "2026-11-22"  # most of what was recorded later is from this day
Dtype = Literal["object", "int64", "float64"]  # of a column
TEXT: Final = "object"
INTEGER: Final = "int64"
NUMBER: Final = "float64"
# Of a whole number in a record: more would not fit a table's column.
WholeNumber = Annotated[int, Meta(ge=0, le=2**53)]
Finite = Annotated[float, Meta(gt=-1e18, lt=1e18)]
FiniteOrNone = Finite | None
Duration = Annotated[float, Meta(ge=0, lt=1e10)]
# Of a file or folder, inside the one where it is looked for.
Name = Annotated[str, Meta(pattern=r"\A(?!\.\.?\Z)[^/\x00-\x1f]{1,255}\Z")]
JobId = Annotated[str, Meta(pattern=r"\A[0-9]{1,20}(_[0-9]{1,10})?\Z")]  # of SLURM, of an array's task
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # SHA-256
Timestamp = Annotated[datetime, Meta(tz=True)]  # of `store.utc_timestamp`
DONE, DIVERGED = "done", "diverged"  # what people are told of an attempt that is whole
RunState = Literal["planned", "submitted", "running", "ok", "failed", "preempted"]


class FieldDescription(Struct, frozen=True):
    """A description of a recorded fact: of a number in a log's line, of a column of a table."""

    unit: str = ""  # empty: a word, a text, or a number without one
    meaning: str = ""
    is_run_outcome: bool = False  # of a run, too: the mean over its steps, or its last epoch's
    since: str = ""  # the day from which on it is recorded; tables of before lack it
    former_name: str = ""  # its name until it got this one: records of before are read
    implied_value: Any = UNSET  # what it is in records of before it was recorded, where that can be told
    dtype: Dtype = TEXT  # of its column; of lines of logs it follows from the schema
    needs_float64: bool = False  # or are the seven digits of a float32 enough?


def field_descriptions_by_name(line: type[Struct]) -> dict[str, FieldDescription]:
    """Return the described fields of a kind of log line, by name; required fields come first."""
    field_by_name = {}
    for info in sorted(structs.fields(line), key=lambda info: not info.required):
        kind, *marks = get_args(info.type)
        for field in marks:
            if isinstance(field, FieldDescription):
                whole = int in (kind, *get_args(kind)) and info.required
                field_by_name[info.name] = structs.replace(field, dtype=INTEGER if whole else NUMBER)
    return field_by_name


class FileFacts(Struct, frozen=True):
    """Size and digest of a file when its attempt was finished."""

    bytes: WholeNumber
    sha256: Digest


class Resumption(Struct, frozen=True):
    """A step at which a record continues after an interruption."""

    step: WholeNumber
    at: Timestamp | None = None
    host: str | None = None


class DatasetFacts(Struct, frozen=True):
    """The data set that was read."""

    name: str | None = None
    digest: str | None = None


class WorkerHost(Struct, frozen=True):
    """A worker's machine."""

    host: str | None = None


class MachineFacts(Struct, frozen=True):
    """Findings of experiments/worker/hardware.py on the machines of a run."""

    mismatch: list[str] = []
    crowded: list[str] = []  # workers that share cores
    hosts: list[str] = []
    workers: list[WorkerHost] = []


class Provenance(Struct, frozen=True):
    """The part of what experiments/worker/provenance.py writes that is read again."""

    host: str | None = None
    cpu: str | None = None
    cores: WholeNumber | None = None
    gpu: str | None = None
    precision: str | None = None  # what products were computed in, whatever was asked for
    data: DatasetFacts = DatasetFacts()
    versions: dict[str, str] = {}
    machine: MachineFacts | None = None


class SelectionKernelFacts(Struct, frozen=True):
    """The kernel that selected what to send, in how many steps, and how often its guess was wrong."""

    kernel: str | None = None
    steps: WholeNumber = 0
    fallbacks: WholeNumber = 0


class VariantFacts(Struct, frozen=True):
    """Outcome of one variant of a run."""

    parameters: WholeNumber | None = None
    tensors: WholeNumber | None = None
    searching: SelectionKernelFacts | None = None
    graph: str | None = None


class AlternationEnd(Struct, frozen=True):
    """The end of the turns that a run's variants took: why, when, how precise."""

    stopped: Literal["half-width", "limit", "signal"] | None = None
    half_width: Finite | None = None
    blocks: WholeNumber | None = None
    variants: dict[Name, VariantFacts] = {}


class MemoryPeak(Struct, frozen=True):
    """The most memory that rank 0's process had."""

    host_gib: Finite | None = None
    gpu_gib: Finite | None = None


class Divergence(Struct, frozen=True):
    """End of a training whose gradient was not finite any more; its record is whole until there."""

    step: WholeNumber  # of the first such gradient
    made: WholeNumber  # steps, when it was noticed
    why: str


class Manifest(Struct, frozen=True):
    """The state, times and provenance of an attempt: run.json."""

    state: RunState
    schema: int = 0
    key: str = ""
    run_id: Name | None = None
    attempt: WholeNumber | None = None
    created: Timestamp | None = None
    started: Timestamp | None = None
    ended: Timestamp | None = None
    files: dict[Name, FileFacts] = {}
    provenance: Provenance = Provenance()
    steps: WholeNumber | None = None
    steps_per_epoch: WholeNumber | None = None
    parameters: WholeNumber | None = None
    tensors: WholeNumber | None = None
    simulated: bool = False
    searching: SelectionKernelFacts | None = None
    graph: str | None = None
    alternated: AlternationEnd | None = None
    diverged: Divergence | None = None
    memory: MemoryPeak | None = None
    relay: dict[Name, Finite] = {}  # what the relay of an emulated network did, see relay.cpp
    interface: dict[Name, Finite] = {}  # what its nodes' interfaces sent
    resumed: list[Resumption] = []
    step: WholeNumber | None = None
    why: str | None = None
    failure: str | None = None
    sweep: Name | None = None
    array: Annotated[str, Meta(pattern=r"\A[^/\x00-\x1f]{1,300}:\d{1,8}\Z")] | None = None
    code: str | None = None
    sources: dict[str, str] = {}
    rules: dict[str, str] = {}


class NamedSettings(Struct, frozen=True):
    """Settings of which only the name is looked into."""

    name: Name


class ClusterSettings(Struct, frozen=True):
    """Settings of a cluster that say its kind."""

    where: Name


class TaskSettings(NamedSettings, frozen=True):
    """Settings of a task that name it, or that outcomes are computed from."""

    batch_size: WholeNumber | None = None


class TimingSettings(Struct, frozen=True):
    """Settings of how steps are timed."""

    mode: Name
    warmup_steps: WholeNumber


class TrainingSettings(Struct, frozen=True):
    """Settings that say whether a run is there for its curve or its times."""

    validate: Name


class VariantSettings(Struct, frozen=True):
    """Settings of one variant that takes turns: its name, and where it differs from the others."""

    name: Name
    method: NamedSettings | UnsetType = UNSET
    task: dict[Name, Any] = {}
    timing: dict[Name, Any] = {}
    train: dict[Name, Any] = {}


class ConfigFile(Struct, frozen=True):
    """Content of config.json: what names a run, and what its outcomes follow from.

    The rest is not looked into, but must have the hash that the run's id ends in.
    """

    method: NamedSettings
    task: TaskSettings
    cluster: ClusterSettings
    workers: WholeNumber
    seed: WholeNumber
    timing: TimingSettings
    train: TrainingSettings
    variants: list[VariantSettings] = []
    alternate: dict[Name, Any] = {}


class RunRowCells(Struct, frozen=True):
    """The cells of a row of runs that every command relies on."""

    run_id: Name
    key: str
    config_json: str
    provenance_json: str
    rules_json: str | None = None
    created: Timestamp | None = None
    started: Timestamp | None = None
    ended: Timestamp | None = None


class StepOrEpochLine(Struct, frozen=True, gc=False):
    """Numbers in the lines of steps, whose means over an epoch are in the lines of epochs."""

    wire_bytes: Annotated[
        FiniteOrNone,
        FieldDescription("B", "that the worker put on the wire", is_run_outcome=True, needs_float64=True),
    ] = None
    host_syncs: Annotated[FiniteOrNone, FieldDescription("", "how often the host waited for the device")] = (
        None
    )
    sent_density: Annotated[
        FiniteOrNone,
        FieldDescription(
            "", "share of the elements that the worker sent", is_run_outcome=True, former_name="density"
        ),
    ] = None
    update_density: Annotated[
        FiniteOrNone,
        FieldDescription("", "share of the elements that the update changed", is_run_outcome=True),
    ] = None
    density: FiniteOrNone = None  # the older name of `sent_density`
    more: dict[str, float | str | bool | None] | None = (
        None  # what no field is for: see `log.move_unknown_fields_under_more`
    )


class StepLine(
    StepOrEpochLine,
    frozen=True,
    gc=False,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="step",
):
    """A line of a rank's log: one step."""

    step: Annotated[WholeNumber, FieldDescription("", "counted from 0")]
    epoch: Annotated[WholeNumber, FieldDescription("", "counted from 1")]
    start_s: Annotated[
        Finite, FieldDescription("s", "when it began, by the worker's own clock", needs_float64=True)
    ]
    step_s: Annotated[Duration, FieldDescription("s", "how long it took")]
    phases: dict[str, Finite] = {}
    spans: list[tuple[str, Finite, Finite]] = []
    residual_norm: Annotated[float | None, FieldDescription("", "Euclidean norm of what it owes")] = None
    loss: Annotated[float | None, FieldDescription("", "training loss of its batch")] = (
        None  # NaN where it diverged
    )
    lr: Annotated[FiniteOrNone, FieldDescription("", "learning rate")] = None
    block: Annotated[
        WholeNumber | None,
        FieldDescription(
            "", "in which turn, of variants that take turns; 0 is warm-up", since=SECOND_VERSION_DAY
        ),
    ] = None
    messages: Annotated[
        FiniteOrNone,
        FieldDescription(
            "",
            "latency terms of its collectives, as its backend carries them out",
            is_run_outcome=True,
            since=SECOND_VERSION_DAY,
        ),
    ] = None
    predicted_s: Annotated[
        FiniteOrNone,
        FieldDescription(
            "s",
            "that they should take on the emulated link as found; 0 without one",
            since=SECOND_VERSION_DAY,
        ),
    ] = None
    stops: Annotated[
        FiniteOrNone, FieldDescription("", "how often a worker was suspended in it", since="2026-11-24")
    ] = None
    variant: Name | None = None


class EpochLine(
    StepOrEpochLine,
    frozen=True,
    gc=False,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="epoch",
):
    """A line of a rank's log: one epoch, as the worker that validated saw it."""

    epoch: Annotated[WholeNumber, FieldDescription("", "counted from 1")]
    step: Annotated[WholeNumber, FieldDescription("steps", "made until then")]
    train_loss: Annotated[
        float | None,
        FieldDescription("", "mean training loss since the last validation", is_run_outcome=True),
    ] = None
    val_loss: Annotated[float | None, FieldDescription("", "validation loss", is_run_outcome=True)] = None
    val_top1: Annotated[FiniteOrNone, FieldDescription("%", "validation accuracy", is_run_outcome=True)] = (
        None
    )
    val_top5: Annotated[
        FiniteOrNone, FieldDescription("%", "the right class among the first five", is_run_outcome=True)
    ] = None
    wall_s: Annotated[FiniteOrNone, FieldDescription("s", "spent in steps until then")] = None
    captured_energy: Annotated[
        FiniteOrNone,
        FieldDescription("", "share of the squared norm that was sent, mean", since=SECOND_VERSION_DAY),
    ] = None
    test_loss: Annotated[
        float | None,
        FieldDescription(
            "",
            "loss on the test set, of runs with held-out data",
            is_run_outcome=True,
            since=SECOND_VERSION_DAY,
        ),
    ] = None
    test_top1: Annotated[
        FiniteOrNone,
        FieldDescription(
            "%",
            "accuracy on the test set, of runs with held-out data",
            is_run_outcome=True,
            since=SECOND_VERSION_DAY,
        ),
    ] = None
    variant: Name | None = None


# What looks at gradients are called in records: experiments/training/selection_observers.py takes them.
ALL = "all"  # in place of a tensor's name: the whole model
SLICES = 64  # of a tensor, in which is counted what was selected
REGIONS = (1, 10, 100, 1000)  # elements of a region


class SelectionObservationLine(Struct, frozen=True, tag_field="kind", tag="look"):
    """A line of rank 0's log: what `SelectionObserver` saw of one tensor in one step."""

    step: WholeNumber
    what: Name
    of: str
    xs: list[Finite]
    values: list[Finite]  # one for each of `xs`
    variant: Name | None = None

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.values):
            raise ValueError(f"{len(self.values)} values for {len(self.xs)} places")


LogLine = StepLine | EpochLine | SelectionObservationLine


class CachedBatchDigests(Struct, frozen=True):
    """Sizes and digests of the files of a cached batch of runs: its digests.json."""

    files: dict[Name, FileFacts]


class PublishedTableDigests(Struct, frozen=True):
    """Sizes and digests of tables of published facts, and their source: digests.json beside them."""

    source: str
    files: dict[Name, FileFacts]


class RunIdList(Struct, frozen=True):
    """The ids of the runs that a figure was drawn from, or that a sweep asked for."""

    runs: list[Name]


class SweepJob(Struct, frozen=True):
    """A job of an array, and its runs."""

    id: JobId | None = None
    runs: list[Name] = []


class SweepArray(Struct, frozen=True):
    """Jobs that need the same nodes."""

    nodes: WholeNumber
    jobs: list[SweepJob]


class Sweep(Struct, frozen=True):
    """The arrays of jobs that were submitted for a sweep: sweep.json."""

    name: Name
    created: str
    arrays: list[SweepArray]
    slurm_conf: str | None = None


class SlurmJobRecord(Struct, frozen=True):
    """SLURM's id of an attempt's job, the cluster that has it, the user who submitted it: job.json."""

    id: JobId | None = None
    cluster: Annotated[str, Meta(pattern=r"\A[\w.-]{1,64}\Z")] | None = None
    user: int | None = None  # a number of the system's


class Progress(Struct, frozen=True):
    """The step that a running attempt has reached, and its newest loss and accuracy: progress.json."""

    step: WholeNumber = 0
    steps: WholeNumber | None = None
    loss: float | None = None  # of the last step whose loss was read
    top1: float | None = None  # percent, of the last validation
