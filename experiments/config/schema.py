"""What every leaf of a configuration may be, and which values exclude each other.

The keys of conf/ stand here once more, each with its type and range; those of a method or a task stand in its
signature. What needs a model or data to be judged is judged in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, get_type_hints, is_typeddict

from msgspec import Meta

from experiments.tasks import REGISTRY as TASKS
from sparsify import ranges
from sparsify.methods import REGISTRY as METHODS
from sparsify.ranges import Count, Natural, NotNegative, Positive
from sparsify.registry import REQUIRED

# A line break would be a second line of a batch script; a lone surrogate is no character, and in no record.
SHOWN = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"
Text = Annotated[str, Meta(pattern=rf"^(?=.*\S){SHOWN}", description="some text without control characters")]
LongOption = Annotated[str, Meta(pattern=rf"^--\w{SHOWN}", description="a long option such as --x=y")]
Workers = Annotated[int, Meta(ge=1, le=100_000)]
Threads = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Minutes = Annotated[int, Meta(ge=1, le=366 * 24 * 60)]
VariantName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w-]{0,39}\Z")]
Variants = Annotated[
    dict[VariantName, Text],
    Meta(
        description="names with words, as {dense:'method=dense',sparse:'method=topk select=fused'}; a name "
        "is of letters, digits, - and _"
    ),
]
ArraySize = Annotated[int, Meta(ge=1, le=4_000_001)]  # SLURM's own limit


class Train(TypedDict):
    epochs: Count
    epoch_steps: Count | None
    steps: Count | None
    validate: Literal["epoch", "never"]
    validate_every: Count
    held_out: Natural


class Timing(TypedDict):
    mode: Literal["serialised", "production", "as_published"]
    warmup_steps: Natural
    span_steps: Natural | None


class Alternate(TypedDict):
    blocks: Count
    block_steps: Count
    until: Positive
    limit_min: Positive


class Data(TypedDict):
    root: Text | None
    fallback: Literal["digits", "refuse"]


class Launch(TypedDict):
    block: bool
    checkpoint_min: Positive | None
    runs_per_gpu: Threads
    on_mismatch: Literal["stop", "label"]


class NoContainer(TypedDict):
    name: Text


class Container(NoContainer):
    image: Text
    runtime: Literal["auto", "apptainer", "singularity"]
    python: Text | None
    binds: list[Text]
    options: list[Text]


class Link(TypedDict):
    name: Text
    alpha_s: NotNegative | None
    beta_s_per_byte: NotNegative | None


class Machine(TypedDict):
    name: Text
    where: Literal["local", "virtual"]
    gpu: Text
    link: Link


class SlurmCluster(TypedDict):
    name: Text
    where: Literal["slurm"]
    gpu: Text
    link: Link
    workers_per_node: Threads
    cpus_per_worker: Threads
    mem_gb: Count | None
    partition: Text | None
    account: Text | None
    qos: Text | None
    reservation: Text | None
    constraint: Text | None
    exclude: Text | None
    comment: Text | None
    gres: Text | None
    exclusive: bool
    time_min: Minutes
    signal_delay_s: Count
    requeues: Natural
    max_array: ArraySize
    array_parallelism: ArraySize
    srun: list[Text]
    sbatch: list[LongOption]
    setup: list[Text]
    python: Text | None
    slurm_conf: Text | None
    interface: Text | None


class Run(TypedDict):
    """One run. `method` and `task` are their functions' arguments, and a name."""

    method: dict[str, Any]
    task: dict[str, Any]
    cluster: Machine
    container: NoContainer
    train: Train
    timing: Timing
    variants: Variants
    alternate: Alternate
    data: Data
    launch: Launch
    workers: Workers
    seed: Seed
    device: Literal["cpu", "cuda"]
    threads: Threads
    comm: Literal["torch", "horovod"]
    select: Literal["auto", "torch", "fused"]
    overlap: bool
    cuda_graph: bool
    precision: Literal["fp32", "fp64", "tf32"]
    profile: Text
    recipe: Text


def leaf(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def types(config: Mapping[str, Any]) -> dict[str, Any]:
    """The type of every leaf that a configuration like this one has, by its dotted key."""
    cluster = SlurmCluster if config["cluster"].get("where") == "slurm" else Machine
    container = NoContainer if config["container"].get("name") == "none" else Container
    found = dict(_common(cluster, container))
    for registry in (METHODS, TASKS):
        arguments = registry.parameters(config[registry.noun]["name"])
        found |= {f"{registry.noun}.{key}": argument.allowed for key, argument in arguments.items()}
        found[f"{registry.noun}.name"] = Text
    return found


@cache
def _common(cluster: Any, container: Any) -> tuple[tuple[str, Any], ...]:
    """The leaves that all methods and tasks have in common."""
    return tuple(_leaves(Run, {"cluster": cluster, "container": container}))


def _leaves(kind: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, allowed in get_type_hints(kind, include_extras=True).items():
        described = parts.get(key, allowed)
        if is_typeddict(described):
            yield from _leaves(described, {}, f"{prefix}{key}.")
        elif key not in (METHODS.noun, TASKS.noun):
            yield prefix + key, allowed


def check(config: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a leaf too many or too few, a value of another type or out of range, or two values that
            exclude each other.
    """
    allowed, there = types(config), dict(values(config))
    for dotted in there:
        if dotted not in allowed:
            why = ranges.unknown("key", dotted, related(dotted, list(allowed)))
            raise ValueError(f"{why} (a file of conf/ sets it)")
    for dotted, kind in allowed.items():
        if dotted not in there:
            raise ValueError(
                f"{dotted} is missing: a file of conf/ leaves it out, or sets what it belongs to"
            )
        if there[dotted] == REQUIRED:
            raise ValueError(f"{dotted} has no default: give it a value")
        ranges.check(dotted, there[dotted], kind)
    _check_together(config)


def values(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted key; an empty mapping is one."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def related(dotted: str, known: list[str]) -> list[str]:
    """Of a long list of keys, those of the part that this one belongs to; all where there is no such part."""
    return [name for name in known if name.partition(".")[0] == dotted.partition(".")[0]] or known


def _check_together(config: Mapping[str, Any]) -> None:
    """Refuse values that exclude each other."""
    where, mode = config["cluster"]["where"], config["timing"]["mode"]
    if where == "virtual" and config["comm"] == "horovod":
        raise ValueError(
            "comm=horovod joins processes, and cluster=virtual runs all workers in one; take cluster=local"
        )
    if config["overlap"] and (where == "virtual" or mode != "production"):
        raise ValueError(
            "overlap=true needs processes (cluster=local or a SLURM cluster) and timing.mode=production: "
            "virtual ranks work in turns, and the other modes take the phases apart that should overlap"
        )
    if config["precision"] == "tf32" and config["device"] != "cuda":
        raise ValueError(
            "precision=tf32 is a matter of NVIDIA's GPUs, and device=cpu; leave it out, or take device=cuda"
        )
    link = config["cluster"]["link"]
    if where == "virtual" and None in (link["alpha_s"], link["beta_s_per_byte"]):
        raise ValueError(
            "virtual ranks need a link with alpha and beta; choose link=nvlink, pcie or ethernet"
        )
