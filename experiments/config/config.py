"""Config of a run: each setting with its type, its default and its meaning, in one place.

What the command line takes, what help and completion show, and what is recorded come from it. A new setting
is a field with the date of its addition as `since`, a row of analysis/records/columns.yaml, and the code that
uses it (CONTRIBUTING.md). Settings of machines are in `machines`, those that the training takes as they are
in `experiments.training.settings`, those of a method or a task in its signature and its docstring; conf/
holds choices, which give some of these fields other values.
What excludes each other stands at the end; what needs a model or data to be judged is judged in the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

from analysis.records.columns import IMPLIED_SETTINGS
from analysis.records.configs import configs_by_variant, flatten
from experiments.config.machines import (
    AnyCluster,
    AnyContainer,
    EmulatedCluster,
    LinkSettings,
    SlurmCluster,
    Text,
    Threads,
    VirtualCluster,
)
from experiments.tasks import REGISTRY as TASKS
from experiments.training.settings import (
    AlternationSettings,
    LatenessSettings,
    Settings,
    TrainSettings,
    iterate_setting_types,
    setting,
    to_plain,
)
from sparsify.methods import REGISTRY as METHODS
from sparsify.ranges import Constraint, NonNegativeInt, PositiveFloat

VARIANT_WORDS = Constraint(
    description="names with words, as {dense:'method=dense',sparse:'method=topk select=fused'}; a name is of "
    "letters, digits, - and _"
)


@dataclass(frozen=True)
class MethodOrTaskConfig(Settings):
    """A method or a task: its name, and the arguments of its function."""

    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MethodOrTaskConfig:
        return cls(values["name"], {key: to_plain(value) for key, value in values.items() if key != "name"})

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **{key: to_plain(value) for key, value in self.arguments.items()}}

    def get_setting(self, dotted: str) -> Any:
        return self.as_dict().get(dotted)

    def with_setting(self, dotted: str, value: Any) -> MethodOrTaskConfig:
        return replace(self, arguments={**self.arguments, dotted: to_plain(value)})


@dataclass(frozen=True)
class TimingSettings(Settings):
    """The clocks by which steps are timed; see sparsify/core/timer.py."""

    mode: Literal["serialised", "production", "as_published"] = setting(
        "serialised",
        "serialised: each phase is waited for; production: nothing is, as in use; as_published: as the "
        "code of Yoon and Oh 2022 times",
    )
    warmup_steps: NonNegativeInt = setting(10, "steps at the beginning that are never counted")
    span_steps: NonNegativeInt | None = setting(
        1, "steps after the warm-up of which every span is kept, for the timeline; null: all"
    )


@dataclass(frozen=True)
class DataSettings(Settings):
    """The folder of data sets."""

    root: Text | None = setting(
        None, "folder that holds cifar-10-batches-py; null: $DATA_ROOT, else data/ (downloaded there)"
    )
    fallback: Literal["digits", "refuse"] = setting(
        "digits", "where CIFAR-10 can't be had: take scikit-learn's digits and say so, or refuse to run"
    )


@dataclass(frozen=True)
class LaunchSettings(Settings):
    """The way in which runs are started and kept; no part of their key."""

    block: bool = setting(
        False,
        "all runs of a figure in one allocation, in random order, so that they compare on the same nodes",
    )
    checkpoint_min: PositiveFloat | None = setting(
        30, "minutes between two checkpoints; null: only when told to stop"
    )
    runs_per_gpu: Threads = setting(
        1, "so many trainings of virtual workers share this machine's GPU, which a small model leaves idle"
    )
    on_mismatch: Literal["stop", "label"] = setting(
        "stop", "where the machine is not as cluster.gpu and link say: stop, or record it and go on (label)"
    )
    probe: Literal["link", "collectives"] = setting(
        "collectives",
        "what a run over an emulated link asks first: bandwidth and delay, or collectives' times too",
    )


@dataclass(frozen=True)
class VariantConfig(Settings):
    """Config of a variant that takes turns with others in a run."""

    name: str
    config: Config  # as of a run of its own

    def as_dict(self) -> dict[str, Any]:
        return self.as_recorded_dict(self.config)

    def as_recorded_dict(self, first_variant: Config) -> dict[str, Any]:
        """Return the name, and the settings that records keep beside the first variant's."""
        parts: dict[str, Any] = {"name": self.name}
        recorded = self.config.as_dict()
        for dotted in KEYS_OF_VARIANTS:
            above, _, name = dotted.rpartition(".")
            value = self.config.get_setting(dotted)
            if dotted in RECORDED_IF_DIFFERENT and value == first_variant.get_setting(dotted):
                continue
            if value is not None and (above or name in recorded):
                (parts.setdefault(above, {}) if above else parts)[name] = value
        return parts


# Which settings each draw of lateness has a use for.
PARAMETERS_BY_DRAW = {
    "none": (), "constant": ("s", "rank"), "uniform": ("s", "rank"), "lognormal": ("s", "spread", "rank"),
    "published": (),
}  # fmt: skip
# In what variants may differ: all else belongs to the group of processes and to its data, which they share.
KEYS_OF_VARIANTS = (
    "method",
    "select",
    "collectives",
    "overlap",
    "cuda_graph",
    "timing.mode",
    "train.validate",
    "task.momentum",
    "task.lr",
    "task.optimiser",
    "task.weight_decay",
)
# Recorded only of a variant that has another value than the first.
RECORDED_IF_DIFFERENT = KEYS_OF_VARIANTS[-3:]


@dataclass(frozen=True)
class Config(Settings):
    """The configuration of one run, from `compose.resolve` or, of a recorded run, `from_record`."""

    cluster: AnyCluster
    container: AnyContainer
    method: MethodOrTaskConfig
    task: MethodOrTaskConfig
    workers: Annotated[int, Constraint(ge=1, le=100_000)] = setting(
        2, "processes of the group, or virtual ranks in one process"
    )
    seed: Annotated[int, Constraint(ge=0, le=2**32 - 1)] = setting(
        0, "of weights, order of data, and whatever else is drawn"
    )
    device: Literal["cpu", "cuda"] = setting("cpu", "what computes")
    threads: Threads = setting(1, "CPU threads of each process")
    comm: Literal["torch", "horovod"] = setting(
        "torch", "torch.distributed (gloo on CPUs, nccl on GPUs), or Horovod"
    )
    collectives: Literal["auto", "backend", "direct"] = setting(
        "auto",
        "how all-reduce and all-gather travel: as comm has them (backend: gloo's rings), to everybody at "
        "once (direct); auto: over an emulated link with distance what its probe finds quicker for a size; "
        "else backend",
        since="2026-11-27",
    )
    select: Literal["auto", "torch", "fused"] = setting(
        "auto",
        "who searches gradients: torch (torch.topk and the like, as published), fused (one pass over "
        "memory), or what suits (auto)",
    )
    overlap: bool = setting(
        False,
        "aggregate bucket after bucket while backpropagation goes on (timing.mode=production, processes)",
    )
    cuda_graph: bool = setting(
        True,
        "on a GPU, repeat forward and backward as one graph (timing.mode=production, no overlap): the "
        "same numbers",
    )
    precision: Literal["fp32", "fp64", "tf32", "bf16"] = setting(
        "fp32",
        "tf32: NVIDIA's reduced products, where the GPU has them, which change the numbers; bf16: products "
        "in bfloat16 (torch.autocast), parameters and gradients in fp32",
    )
    train: TrainSettings = TrainSettings()
    timing: TimingSettings = TimingSettings()
    late: LatenessSettings = LatenessSettings()
    variants: Annotated[
        tuple[VariantConfig, ...],
        "what takes turns in one group of processes, so that whatever drifts meets all alike; the others are "
        "compared with the first",
        VARIANT_WORDS,
    ] = ()
    alternate: AlternationSettings = AlternationSettings()
    data: DataSettings = DataSettings()
    launch: LaunchSettings = LaunchSettings()
    profile: Text = setting("laptop", "the file of conf/profile")
    recipe: Text = setting("none", "the file of conf/recipe")

    def as_dict(self) -> dict[str, Any]:
        return {
            **super().as_dict(),
            "variants": [variant.as_recorded_dict(self) for variant in self.variants] or {},
        }

    def get_setting(self, dotted: str) -> Any:
        return self.as_dict()["variants"] if dotted == "variants" else super().get_setting(dotted)

    @property
    def num_processes(self) -> int:
        """Number of processes of the run; virtual ranks share one."""
        return 1 if isinstance(self.cluster, VirtualCluster) else self.workers

    @property
    def workers_per_node(self) -> int:
        """Workers of a node, at most; all, where the cluster does not say it."""
        return int(getattr(self.cluster, "workers_per_node", self.workers))

    @property
    def num_nodes(self) -> int:
        """Number of nodes of that many workers."""
        return math.ceil(self.workers / self.workers_per_node)

    @classmethod
    def from_record(cls, recorded: Mapping[str, Any]) -> Config:
        """Return the configuration that `as_dict` recorded.

        What older records leave out gets the value that it meant then.

        It is taken as it stands: when it was resolved, it was checked.
        """
        values = {"select": IMPLIED_SETTINGS["select"], **recorded}  # else, what was implied is the default
        container = values.get("container", "none")
        if container == "none":
            values["container"] = {"name": container}
        elif isinstance(container, str):  # which image file was used is provenance; this is its usual name
            values["container"] = {"name": container, "image": f"{container}.sif"}
        variants = tuple(
            VariantConfig(name, cls.from_record(record))
            for name, record in configs_by_variant(recorded).items()
        )
        return replace(
            cls.from_dict({key: values[key] for key in values if key != "variants"}), variants=variants
        )


def setting_type_by_key(config: Config) -> dict[str, Any]:
    """Return the type of every setting of a configuration, by its dotted key."""
    inside = isinstance(config.cluster, VirtualCluster) and config.cluster.inside is not None
    return setting_type_by_key_for(
        config.method.name,
        config.task.name,
        type(config.cluster),
        type(config.container),
        has_inside_link=inside,
    )


def setting_type_by_key_for(
    method: str,
    task: str,
    cluster: type[Settings],
    container: type[Settings],
    *,
    has_inside_link: bool = False,
) -> dict[str, Any]:
    """Return the type of every setting, for a method, a task and kinds of cluster and container.

    Args:
        has_inside_link: nodes have a link of their own inside.
    """
    type_by_key = dict(_common_setting_types(cluster, container, has_inside_link))
    if cluster is VirtualCluster and not has_inside_link:
        type_by_key["cluster.inside"] = type(None)
    for registry, name in ((METHODS, method), (TASKS, task)):
        parameters = registry.parameters(name)
        type_by_key |= {f"{registry.noun}.{key}": argument.allowed for key, argument in parameters.items()}
        type_by_key[f"{registry.noun}.name"] = Text
    return type_by_key


@cache
def _common_setting_types(
    cluster: type[Settings], container: type[Settings], has_inside_link: bool
) -> tuple[tuple[str, Any], ...]:
    kinds = {
        "cluster": cluster, "container": container, "inside": LinkSettings if has_inside_link else None,
        METHODS.noun: None, TASKS.noun: None,
    }  # fmt: skip
    return tuple(iterate_setting_types(Config, kinds))


def check_compatibility(config: Config) -> None:
    """Refuse values that exclude each other.

    Raises:
        ValueError: which do, and what to take instead.
    """
    is_virtual = isinstance(config.cluster, VirtualCluster)
    if is_virtual and config.comm == "horovod":
        raise ValueError(
            "comm=horovod joins processes, and cluster=virtual runs all workers in one; take cluster=local"
        )
    if config.collectives == "direct" and is_virtual:
        raise ValueError(
            "collectives=direct is how processes send, and cluster=virtual has none: its link has no rings "
            "to replace; leave it out, or take cluster=local"
        )
    is_emulated = isinstance(config.cluster, EmulatedCluster) or getattr(config.cluster, "enter", None)
    if is_emulated and (config.launch.probe, config.collectives) == ("link", "auto"):
        raise ValueError("launch.probe=link leaves collectives=auto no times; give collectives=direct")
    if config.overlap and (is_virtual or config.timing.mode != "production"):
        raise ValueError(
            "overlap=true needs processes (cluster=local or a SLURM cluster) and timing.mode=production: "
            "virtual ranks work in turns, and the other modes take the phases apart that should overlap"
        )
    if config.precision == "tf32" and config.device != "cuda":
        raise ValueError(
            "precision=tf32 is a matter of NVIDIA's GPUs, and device=cpu; leave it out, or take device=cuda"
        )
    if isinstance(config.cluster, EmulatedCluster):
        _check_emulated(config, config.cluster)
    if isinstance(config.cluster, VirtualCluster):
        config.cluster.to_network()  # which it refuses to make where a number is missing
    if isinstance(config.cluster, SlurmCluster):
        config.cluster.port_range()
    elif getattr(config.container, "runtime", None) == "pyxis":
        raise ValueError(
            f"container.runtime=pyxis is SLURM's, and cluster={config.cluster.name} has none; take "
            "container.runtime=auto, container=none, or a SLURM cluster"
        )
    _check_late(config.late, config.workers)


def _check_emulated(config: Config, cluster: EmulatedCluster) -> None:
    link = cluster.link
    per_node = cluster.workers_per_node
    if not link.beta_s_per_byte or link.alpha_s is None:
        raise ValueError(
            f"cluster=netns slows a link down to 1 / beta_s_per_byte, and link={link.name} has "
            f"alpha_s={link.alpha_s}, beta_s_per_byte={link.beta_s_per_byte}; choose one with numbers, "
            "such as link=ethernet_1g, or cluster=local"
        )
    if config.workers <= per_node:
        raise ValueError(
            f"workers={config.workers} fit on one node (cluster.workers_per_node={per_node}), so "
            "nothing would cross the link; take more workers, or cluster=local"
        )
    if config.device == "cuda":
        raise ValueError(
            "cluster=netns emulates links for processes on the CPU; GPUs of one machine would exchange their "
            "data without them; take device=cpu, or cluster=virtual, which simulates the link"
        )
    if config.comm == "horovod":
        raise ValueError(
            "comm=horovod with cluster=netns: Horovod takes all processes of one machine for one node, and "
            "would go around the link; leave comm=torch"
        )


def _check_late(late: LatenessSettings, workers: int) -> None:
    used_names = PARAMETERS_BY_DRAW[late.draw]
    for name, value in (("s", late.s), ("spread", late.spread)):
        if bool(value) != (name in used_names):
            wants = "needs it: give it a number above 0" if not value else "makes no use of it; leave it out"
            raise ValueError(f"late.{name}={value}: late.draw={late.draw} {wants}")
    if late.rank is not None and "rank" not in used_names:
        raise ValueError(f"late.rank={late.rank}: late.draw={late.draw} is not of one worker; leave it out")
    if late.rank is not None and late.rank >= workers:
        raise ValueError(f"late.rank={late.rank}: there are workers={workers}, counted from 0")


def check_variants(config_by_variant: Mapping[str, Config]) -> None:
    """Refuse variants that can't take turns, because they differ in what they must share.

    Two may be the same: what differs between them then is noise.

    Raises:
        ValueError: which ones, and in what.
    """
    (name, first), *_ = config_by_variant.items()
    shared = _shared_settings(first)
    for other, config in config_by_variant.items():
        settings = _shared_settings(config)
        for dotted in settings.keys() | shared.keys():
            if settings.get(dotted) != shared.get(dotted):
                raise ValueError(
                    f"variants {name} and {other} differ in {dotted}, and variants may differ in "
                    f"{', '.join(KEYS_OF_VARIANTS)}; give {dotted} for all of them, or make two runs"
                )
    if len(config_by_variant) < 2:
        raise ValueError(f"variants={','.join(config_by_variant)}: to take turns there must be two or more")
    modes = {config.timing.mode for config in config_by_variant.values()}
    if len(modes) > 1 and isinstance(first.cluster, VirtualCluster) and first.device == "cuda":
        raise ValueError(
            f"timing.mode={','.join(sorted(modes))} in one run: virtual ranks on a GPU have one kind of "
            "clock; take one mode, or cluster=local"
        )


def _shared_settings(config: Config) -> dict[str, Any]:
    flat = flatten(config.as_dict())
    return {key: flat[key] for key in flat if key not in KEYS_OF_VARIANTS and not key.startswith("method.")}
