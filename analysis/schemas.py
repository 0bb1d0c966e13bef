"""What each file of results must look like: read with these, it is typed and in range, or refused.

Fields that are not named here may be there as well; older records lack those that have a default.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

SCHEMA = 1  # of a manifest, and of tables
# Of a whole number in a record: more would not fit a table's column.
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(gt=-1e18, lt=1e18)]
Seconds = Annotated[float, Meta(ge=0, lt=1e10)]
Name = Annotated[str, Meta(pattern=r"\A[^/\x00-\x1f]{1,255}\Z")]  # of a file or folder
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # SHA-256
Time = Annotated[datetime, Meta(tz=True)]  # of `records.now`
PHASE = re.compile(r"[a-z_]{1,40}")  # checked once a log, for it would double the time of reading one
State = Literal["planned", "submitted", "running", "ok", "failed", "preempted"]


class FileFacts(Struct, frozen=True):
    """What a file was when its attempt was finished."""

    bytes: Whole
    sha256: Digest


class Resumption(Struct, frozen=True):
    """Where a record continues after an interruption."""

    step: Whole
    at: Time | None = None
    host: str | None = None


class Data(Struct, frozen=True):
    name: str | None = None
    digest: str | None = None


class Host(Struct, frozen=True):
    host: str | None = None


class Machine(Struct, frozen=True):
    """What experiments/worker/hardware.py found."""

    mismatch: list[str] = []
    hosts: list[str] = []
    workers: list[Host] = []


class Provenance(Struct, frozen=True):
    """Of what experiments/worker/provenance.py writes, the part that is read again."""

    host: str | None = None
    cpu: str | None = None
    cores: Whole | None = None
    gpu: str | None = None
    precision: str | None = None  # what products were computed in, whatever was asked for
    data: Data = Data()
    versions: dict[str, str] = {}
    machine: Machine | None = None


class Searching(Struct, frozen=True):
    """Who searched for what to send: `training.loop.searched`."""

    kernel: str | None = None
    steps: Whole = 0
    fallbacks: Whole = 0


class VariantFacts(Struct, frozen=True):
    """What became of one variant of a run."""

    parameters: Whole | None = None
    tensors: Whole | None = None
    searching: Searching | None = None
    graph: str | None = None


class Alternated(Struct, frozen=True):
    """How the turns of a run's variants ended: `training.alternation.Ended`."""

    stopped: Literal["half-width", "limit"] | None = None
    half_width: Number | None = None
    blocks: Whole | None = None
    variants: dict[Name, VariantFacts] = {}


class Manifest(Struct, frozen=True):
    """run.json: an attempt's state, times and provenance."""

    state: State
    schema: int = 0
    key: str = ""
    run_id: Name | None = None
    attempt: Whole | None = None
    created: Time | None = None
    started: Time | None = None
    ended: Time | None = None
    files: dict[Name, FileFacts] = {}
    provenance: Provenance = Provenance()
    steps: Whole | None = None
    steps_per_epoch: Whole | None = None
    parameters: Whole | None = None
    tensors: Whole | None = None
    simulated: bool = False
    searching: Searching | None = None
    graph: str | None = None
    alternated: Alternated | None = None
    resumed: list[Resumption] = []
    step: Whole | None = None
    why: str | None = None
    failure: str | None = None
    sweep: Name | None = None
    array: str | None = None
    code: str | None = None
    sources: dict[str, str] = {}


class Named(Struct, frozen=True):
    name: Name


class Cluster(Struct, frozen=True):
    where: Name


class Config(Struct, frozen=True):
    """config.json: what names a run. The rest must have the hash that its id ends in."""

    method: Named
    task: Named
    cluster: Cluster
    workers: Whole


class Step(Struct, frozen=True, gc=False, tag_field="kind", tag="step"):
    """A line of a rank's log: one step."""

    step: Whole
    epoch: Whole
    start_s: Number
    step_s: Seconds
    phases: dict[str, Number] = {}
    spans: list[tuple[str, Number, Number]] = []
    wire_bytes: Number | None = None
    messages: Number | None = None
    predicted_s: Number | None = None
    host_syncs: Number | None = None
    density: Number | None = None
    update_density: Number | None = None
    residual_norm: float | None = None
    loss: float | None = None  # NaN where training diverged
    lr: Number | None = None
    variant: Name | None = None
    block: Whole | None = None  # in which its variant had its turn; 0: warm-up


class Epoch(Struct, frozen=True, gc=False, tag_field="kind", tag="epoch"):
    """A line of a rank's log: one epoch, as the worker that validated saw it."""

    epoch: Whole
    step: Whole
    train_loss: float | None = None
    val_loss: float | None = None
    val_top1: Number | None = None
    val_top5: Number | None = None
    wall_s: Number | None = None
    wire_bytes: Number | None = None
    host_syncs: Number | None = None
    density: Number | None = None
    update_density: Number | None = None
    captured_energy: Number | None = None
    variant: Name | None = None
    test_loss: float | None = None
    test_top1: Number | None = None


class Look(Struct, frozen=True, tag_field="kind", tag="look"):
    """A line of rank 0's log: what was seen of one tensor in one step; see experiments/training/looks.py."""

    step: Whole
    what: Name
    of: str
    xs: list[Number]
    values: list[Number]
    variant: Name | None = None


Line = Step | Epoch | Look


class Copy(Struct, frozen=True):
    """copy.json: what the tables of one attempt were when they were written."""

    files: dict[Name, FileFacts]


class Published(Struct, frozen=True):
    """digests.json beside tables of published facts: what they were when they were written, and from what."""

    source: str
    files: dict[Name, FileFacts]


class Index(Struct, frozen=True):
    """Which runs a figure was drawn from."""

    runs: list[Name]


class SweepJob(Struct, frozen=True):
    id: str | None = None
    runs: list[Name] = []


class SweepArray(Struct, frozen=True):
    nodes: Whole
    jobs: list[SweepJob]


class Sweep(Struct, frozen=True):
    """sweep.json: what was submitted."""

    name: Name
    created: str
    arrays: list[SweepArray]
    slurm_conf: str | None = None


class JobNote(Struct, frozen=True):
    """job.json: SLURM's id of an attempt's job."""

    id: str | None = None


class Progress(Struct, frozen=True):
    """progress.json: how far a start is."""

    step: Whole = 0
    steps: Whole | None = None
    loss: float | None = None  # of the last step whose loss was read
    top1: float | None = None  # percent, of the last validation


class WorkerNote(Struct, frozen=True):
    """worker<rank>.json: where a worker was started."""

    node: str


class Failure(Struct, frozen=True):
    """failure<rank>.json: why a worker ended."""

    rank: int
    kind: str
    why: str


class NodeFailure(Struct, frozen=True):
    """A line of node-failures.jsonl."""

    node: str
    at: datetime  # by the clock of SLURM's accounting, or of this code, which says so by a Z


class SavedPart(Struct, frozen=True):
    """One rank's part of a checkpoint."""

    log_bytes: Whole
    own: FileFacts
    same_as: Whole  # the rank whose shared part is this one's too
    shared: FileFacts | None


class Checkpoint(Struct, frozen=True):
    """whole.json: a checkpoint that all ranks have written."""

    format: int
    step: Whole
    ranks: list[SavedPart]


class Spread(Struct, frozen=True):
    """A ratio of two times."""

    median: Number
    low: Number
    high: Number


class BenchStart(Struct, frozen=True):
    """A line of the benchmark of selections: one invocation."""

    at: datetime
    flush_bytes: Whole


class BenchRow(Struct, frozen=True):
    """A line of it: what stands in each row of a case."""

    at: datetime
    device: str
    name: str
    torch: str
    n: Annotated[int, Meta(ge=1, le=2**53)]
    density: Annotated[float, Meta(gt=0, le=1)]
    distribution: str
    k: Whole
    source: str
    row: str
    what: str
    commit: str | None = None
    dirty: str | None = None


class BenchUnmade(BenchRow, frozen=True, kw_only=True):
    """One that was not run."""

    why: str


class BenchTimed(BenchRow, frozen=True, kw_only=True):
    """One that was."""

    repeats: Whole
    median_ms: Annotated[float, Meta(gt=0, lt=1e12)]
    low_ms: Number
    high_ms: Number
    spread: str
    host_syncs: Number
    bytes_words: str
    kernel: str | None = None
    cpu_ms: Spread | None = None
    over_add: Spread | None = None
    over_copy: Spread | None = None
    eager_over: Spread | None = None
    eager_hugepages_over: Spread | None = None
    cpu_over_add: Spread | None = None
    cpu_eager_over: Spread | None = None
    bytes_per_element: Number | None = None
    fallback_rate: Number | None = None
    selected_over_k: Number | None = None
