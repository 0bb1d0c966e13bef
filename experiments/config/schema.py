"""What every leaf of a configuration may be, and which values exclude each other.

The keys of conf/ stand here once more, each with its type and range, and its meaning, which help shows; those
of a method or a task stand in its signature and its docstring. What needs a model or data to be judged is
judged in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from experiments.config.network import network
from experiments.tasks import REGISTRY as TASKS
from sparsify import ranges
from sparsify.methods import REGISTRY as METHODS
from sparsify.ranges import Count, Meta, Natural, NotNegative, Positive
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
    """How long the training goes on, and when it is validated."""

    epochs: Annotated[Count, "epochs of the schedule's clock"]
    epoch_steps: Annotated[
        Count | None, "steps of an epoch of this clock; null: ceil(images / (batch size x workers))"
    ]
    steps: Annotated[Count | None, "end the run after so many steps"]
    validate: Annotated[Literal["epoch", "never"], "after epochs, or never"]
    validate_every: Annotated[
        Count, "epochs between two validations; after the last epoch there always is one"
    ]
    held_out: Annotated[
        Natural,
        "for tuning: validate on so many training images, which are not trained on; on the test set at the "
        "end only",
    ]
    look_every: Annotated[
        Count | None,
        "steps between two looks at what rank 0 selects from and selects: distributions, energy left out, "
        "whether places stay; null: never",
    ]


class Timing(TypedDict):
    """How steps are timed; see sparsify/timer.py."""

    mode: Annotated[
        Literal["serialised", "production", "as_published"],
        "serialised: each phase is waited for; production: nothing is, as in use; as_published: as the code "
        "of Yoon and Oh 2022 times",
    ]
    warmup_steps: Annotated[Natural, "steps at the beginning that are never counted"]
    span_steps: Annotated[
        Natural | None,
        "steps after the warm-up of which every span is kept, for the timeline; null: all",
    ]


class Late(TypedDict):
    """Workers that come late on purpose, idle at the end of backward."""

    draw: Annotated[
        Literal["none", "constant", "uniform", "lognormal", "published"],
        "how long: constant; uniform, from 0; lognormal; published: as the paper's workers in compression",
    ]
    s: Annotated[NotNegative, "seconds: constant; the most, where uniform; the median, where lognormal"]
    spread: Annotated[NotNegative, "standard deviation of the logarithm, where lognormal"]
    rank: Annotated[Natural | None, "the only worker that is late; null: each draws for itself"]


class Alternate(TypedDict):
    """How long variants take turns."""

    blocks: Annotated[
        Count, "turns of each variant at least; a round has one of each, in an order drawn anew"
    ]
    block_steps: Annotated[Count, "steps of a turn; the first one after a change of variants is not counted"]
    until: Annotated[
        Positive,
        "half-width of the 95 % interval of the logarithm of each ratio to the first variant's step time",
    ]
    limit_min: Annotated[Positive, "minutes after which it ends, whether that width is reached or not"]


class Data(TypedDict):
    """Where data sets are."""

    root: Annotated[
        Text | None,
        "folder that holds cifar-10-batches-py; null: $DATA_ROOT, else data/ (downloaded there)",
    ]
    fallback: Annotated[
        Literal["digits", "refuse"],
        "where CIFAR-10 can't be had: take scikit-learn's digits and say so, or refuse to run",
    ]


class Launch(TypedDict):
    """How runs are started and kept; no part of their key."""

    block: Annotated[
        bool,
        "all runs of a figure in one allocation, in random order, so that they compare on the same nodes",
    ]
    checkpoint_min: Annotated[
        Positive | None, "minutes between two checkpoints; null: only when told to stop"
    ]
    runs_per_gpu: Annotated[
        Threads,
        "so many trainings of virtual workers share this machine's GPU, which a small model leaves idle",
    ]
    on_mismatch: Annotated[
        Literal["stop", "label"],
        "where the machine is not as cluster.gpu and link say: stop, or record it and go on (label)",
    ]


class NoContainer(TypedDict):
    """What the workers run in."""

    name: Annotated[Text, "the file of conf/container"]


class Container(NoContainer):
    image: Annotated[Text, "its file in $SPARSIFY_IMAGES, else singularity/images; or a path in the checkout"]
    runtime: Annotated[Literal["auto", "apptainer", "singularity"], "what starts it; auto: what is there"]
    python: Annotated[Text | None, "a path in the image; null: the Python that starts the run, from outside"]
    binds: Annotated[list[Text], "further folders, as --bind takes them: /scratch or /scratch:/data:ro"]
    options: Annotated[list[Text], "further words for the runtime's exec"]


class Link(TypedDict):
    """What joins the workers; a message of so many bytes takes alpha + beta x bytes where it is simulated."""

    name: Annotated[Text, "the file of conf/link"]
    alpha_s: Annotated[NotNegative | None, "seconds to start a message, for simulated runs"]
    beta_s_per_byte: Annotated[NotNegative | None, "seconds a byte takes, for simulated runs"]


Gpu = Annotated[
    Text, "the model that is checked for: a100, h100, ...; any: not checked; none: there is no GPU"
]


class Machine(TypedDict):
    """Where workers run."""

    name: Annotated[Text, "the file of conf/cluster"]
    where: Annotated[Literal["local"], "as processes of this machine"]
    gpu: Gpu
    link: Link


class Emulated(TypedDict):
    """Nodes on this machine, joined by links that are slowed down to what link= says."""

    name: Annotated[Text, "the file of conf/cluster"]
    where: Annotated[Literal["netns"], "as processes of this machine, in network namespaces"]
    gpu: Gpu
    link: Link
    workers_per_node: Annotated[Threads, "workers that share a network namespace, and its link to the others"]


class VirtualCluster(TypedDict):
    """Virtual ranks of one process, as if they were on a cluster."""

    name: Annotated[Text, "the file of conf/cluster"]
    where: Annotated[Literal["virtual"], "as virtual ranks of one process"]
    gpu: Gpu
    link: Link
    inside: Annotated[None, "what joins the workers of one node, as inside=nvlink; null: link joins all"]
    workers_per_node: Annotated[Threads, "that `inside` joins; without it, it makes no difference"]


class VirtualNodes(VirtualCluster):
    """The same, with nodes."""

    inside: Link  # type: ignore[misc]  # a link in place of none


class SlurmCluster(TypedDict):
    """A SLURM cluster; options that are null are left to its own defaults."""

    name: Annotated[Text, "the file of conf/cluster"]
    where: Annotated[Literal["slurm"], "as processes of SLURM's jobs"]
    gpu: Gpu
    link: Link
    workers_per_node: Annotated[
        Threads, "at most, one GPU each; they are spread evenly over as few nodes as possible"
    ]
    cpus_per_worker: Annotated[Threads, "cores of each"]
    mem_gb: Annotated[Count | None, "memory of a node"]
    partition: Annotated[Text | None, "what --partition gets"]
    account: Annotated[Text | None, "what --account gets"]
    qos: Annotated[Text | None, "what --qos gets"]
    reservation: Annotated[Text | None, "what --reservation gets"]
    constraint: Annotated[Text | None, "what --constraint gets"]
    exclude: Annotated[
        Text | None, "nodes not to be used, as SLURM lists them; those that failed twice are added"
    ]
    comment: Annotated[Text | None, "what --comment gets"]
    gres: Annotated[
        Text | None,
        "gpu asks for --gres=gpu:N, gpu:a100 for --gres=gpu:a100:N; null: --gpus-per-node=N",
    ]
    exclusive: Annotated[bool, "nobody else on the nodes: shared nodes make timings worthless"]
    time_min: Annotated[
        Minutes, "minutes of a job; what is not done by then is saved and goes on in the same job, requeued"
    ]
    signal_delay_s: Annotated[Count, "seconds before the time limit at which the workers are told to save"]
    requeues: Annotated[Natural, "how often a job may go on after a stop"]
    max_array: Annotated[ArraySize, "tasks of one array: MaxArraySize - 1 of `scontrol show config`"]
    array_parallelism: Annotated[ArraySize, "tasks of one array that run at a time"]
    srun: Annotated[list[Text], "further words for srun: [--mpi=none]"]
    sbatch: Annotated[list[LongOption], "further words for sbatch: [--mail-type=END]"]
    enter: Annotated[
        list[Text],
        "words that put a worker onto its node's emulated network; the link is then verified",
    ]
    setup: Annotated[list[Text], "shell lines before srun, executed as they stand: [module load cuda]"]
    python: Annotated[Text | None, "on the nodes, with submitit; null: the Python that submits"]
    slurm_conf: Annotated[Text | None, "what SLURM_CONF should be, where several clusters share a login node"]
    interface: Annotated[
        Text | None, "network interface through which workers meet, if the nodes have several"
    ]


# By cluster.where; others are a Machine.
CLUSTERS: dict[str, Any] = {"slurm": SlurmCluster, "netns": Emulated, "virtual": VirtualCluster}


class Run(TypedDict):
    """One run. `method` and `task` are their functions' arguments, and a name."""

    method: dict[str, Any]
    task: dict[str, Any]
    cluster: Machine
    container: NoContainer
    train: Train
    timing: Timing
    late: Late
    variants: Annotated[
        Variants,
        "what takes turns in one group of processes, so that whatever drifts meets all alike; the others are "
        "compared with the first",
    ]
    alternate: Alternate
    data: Data
    launch: Launch
    workers: Annotated[Workers, "processes of the group, or virtual ranks in one process"]
    seed: Annotated[Seed, "of weights, order of data, and whatever else is drawn"]
    device: Annotated[Literal["cpu", "cuda"], "what computes"]
    threads: Annotated[Threads, "CPU threads of each process"]
    comm: Annotated[Literal["torch", "horovod"], "torch.distributed (gloo on CPUs, nccl on GPUs), or Horovod"]
    select: Annotated[
        Literal["auto", "torch", "fused"],
        "who searches gradients: torch (torch.topk and the like, as published), fused (one pass over "
        "memory), or what suits (auto)",
    ]
    overlap: Annotated[
        bool,
        "aggregate bucket after bucket while backpropagation goes on (timing.mode=production, processes)",
    ]
    cuda_graph: Annotated[
        bool,
        "on a GPU, repeat forward and backward as one graph (timing.mode=production, no overlap): the same "
        "numbers",
    ]
    precision: Annotated[
        Literal["fp32", "fp64", "tf32"],
        "tf32: NVIDIA's reduced products, where the GPU has them, which change the numbers",
    ]
    profile: Annotated[Text, "the file of conf/profile"]
    recipe: Annotated[Text, "the file of conf/recipe"]


# Which settings each draw of lateness has a use for.
USED_OF_LATE = {
    "none": (), "constant": ("s", "rank"), "uniform": ("s", "rank"), "lognormal": ("s", "spread", "rank"),
    "published": (),
}  # fmt: skip


def leaf(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def types(config: Mapping[str, Any]) -> dict[str, Any]:
    """The type of every leaf that a configuration like this one has, by its dotted key."""
    cluster = CLUSTERS.get(str(config["cluster"].get("where")), Machine)
    if cluster is VirtualCluster and config["cluster"].get("inside"):
        cluster = VirtualNodes
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


def meaning(allowed: Any) -> str:
    """What a leaf's type says that it is for."""
    said = get_args(allowed) if get_origin(allowed) is Annotated else ()
    return next((part for part in said if isinstance(part, str)), "")


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
    if where == "netns":
        _check_emulated(config)
    if where == "virtual":
        network(config["cluster"])
    _check_late(config["late"], config["workers"])


def _check_emulated(config: Mapping[str, Any]) -> None:
    link, per_node = config["cluster"]["link"], config["cluster"]["workers_per_node"]
    if not link["beta_s_per_byte"] or link["alpha_s"] is None:
        raise ValueError(
            f"cluster=netns slows a link down to 1 / beta_s_per_byte, and link={link['name']} has "
            f"alpha_s={link['alpha_s']}, beta_s_per_byte={link['beta_s_per_byte']}; choose one with numbers, "
            "such as link=ethernet_1g, or cluster=local"
        )
    if config["workers"] <= per_node:
        raise ValueError(
            f"workers={config['workers']} fit on one node (cluster.workers_per_node={per_node}), so "
            "nothing would cross the link; take more workers, or cluster=local"
        )
    if config["device"] == "cuda":
        raise ValueError(
            "cluster=netns emulates links for processes on the CPU; GPUs of one machine would exchange their "
            "data without them; take device=cpu, or cluster=virtual, which simulates the link"
        )
    if config["comm"] == "horovod":
        raise ValueError(
            "comm=horovod with cluster=netns: Horovod takes all processes of one machine for one node, and "
            "would go around the link; leave comm=torch"
        )


def _check_late(late: Mapping[str, Any], workers: int) -> None:
    used = USED_OF_LATE[late["draw"]]
    for name in ("s", "spread"):
        if bool(late[name]) != (name in used):
            wants = (
                "needs it: give it a number above 0" if name in used else "makes no use of it; leave it out"
            )
            raise ValueError(f"late.{name}={late[name]}: late.draw={late['draw']} {wants}")
    if late["rank"] is None:
        return
    if "rank" not in used:
        raise ValueError(
            f"late.rank={late['rank']}: late.draw={late['draw']} is not of one worker; leave it out"
        )
    if late["rank"] >= workers:
        raise ValueError(f"late.rank={late['rank']}: there are workers={workers}, counted from 0")
