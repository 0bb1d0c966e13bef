"""Where a run is made: what joins its workers, the cluster, the container; their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from experiments.training.settings import Settings, setting
from slurm.emulated.network import LONG_DELAY_S
from sparsify.cost import Link, Network
from sparsify.ranges import Constraint, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

MESSAGE_START_S = 5e-5  # that starting a message takes where alpha is the way: as link=ethernet_1g has it
# A line break would be a second line of a batch script; a lone surrogate is no character, and in no record.
PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"
Text = Annotated[
    str, Constraint(pattern=rf"^(?=.*\S){PRINTABLE}", description="some text without control characters")
]
LongOption = Annotated[
    str, Constraint(pattern=rf"^--\w{PRINTABLE}", description="a long option such as --x=y")
]
PortRange = Annotated[
    str, Constraint(pattern=r"^[0-9]{1,5}-[0-9]{1,5}\Z", description="two numbers, such as 50000-50100")
]
LossShare = Annotated[float, Constraint(ge=0, lt=1)]  # if all is lost, nothing is joined
Threads = Annotated[int, Constraint(ge=1, le=1024)]
Minutes = Annotated[int, Constraint(ge=1, le=366 * 24 * 60)]
ArraySize = Annotated[int, Constraint(ge=1, le=4_000_001)]  # SLURM's own limit


@dataclass(frozen=True)
class AnyContainer(Settings):
    """The container that workers run in, or none."""

    name: Text = setting("none", "the file of conf/container")

    @classmethod
    def subclass_for(cls, values: Mapping[str, Any]) -> type[AnyContainer]:
        return AnyContainer if values.get("name", "none") == "none" else Container


@dataclass(frozen=True, kw_only=True)
class Container(AnyContainer):
    """An image, and what starts workers in it."""

    image: Annotated[Text, "its file in $SPARSIFY_IMAGES, else singularity/images; or a path in the checkout"]
    runtime: Literal["auto", "apptainer", "singularity", "pyxis"] = setting(
        "auto",
        "what starts it; auto: apptainer or singularity, which is there; pyxis: SLURM's srun, whose images "
        "are files of enroot's (x.sqsh) or names in a registry",
    )
    python: Text | None = setting(
        None, "a path in the image; null: the Python that starts the run, from outside"
    )
    binds: tuple[Text, ...] = setting(
        (), "further folders, as --bind takes them: /scratch or /scratch:/data:ro"
    )
    options: tuple[Text, ...] = setting((), "further words for the runtime's exec, or for pyxis's srun")


@dataclass(frozen=True)
class LinkSettings(Settings):
    """The link that joins workers.

    Where it is simulated, a message takes alpha + beta x bytes. From 1 ms on, alpha is a way that several
    messages travel at once.
    """

    name: Annotated[Text, "the file of conf/link"]
    alpha_s: NonNegativeFloat | None = setting(None, "seconds to start a message, for simulated runs")
    beta_s_per_byte: NonNegativeFloat | None = setting(
        None, "seconds a byte takes, of what a node sends, for simulated runs and emulated links"
    )
    down_s_per_byte: PositiveFloat | None = setting(
        None,
        "seconds a byte takes of what a node receives; null: as much (emulated links)",
        since="2026-11-27",
    )
    jitter_s: NonNegativeFloat = setting(
        0.0, "seconds that a packet takes longer at most, at random (emulated links)", since="2026-11-27"
    )
    loss: LossShare = setting(0.0, "share of packets that get lost (emulated links)", since="2026-11-27")

    def to_link(self, group: Literal["link", "inside"]) -> Link:
        """Return the cost model of this link, for simulated runs and predictions.

        Args:
            group: the word by which the link was chosen, for the error.

        Raises:
            ValueError: a number is missing.
        """
        if self.alpha_s is not None and self.beta_s_per_byte is not None:
            slower = max(self.beta_s_per_byte, self.down_s_per_byte or 0.0)
            if self.alpha_s < LONG_DELAY_S:
                return Link(self.alpha_s, slower)
            return Link(MESSAGE_START_S, slower, propagation_s=self.alpha_s)
        missing = [name for name in ("alpha_s", "beta_s_per_byte") if getattr(self, name) is None]
        raise ValueError(
            f"{group}={self.name} has no {' and no '.join(missing)}, and virtual ranks need a link "
            f"with alpha and beta; choose {group}=nvlink, pcie or ethernet, or set cluster.{group}."
            f"{missing[0]}"
        )


GpuModel = Annotated[
    Text, "the model that is checked for: a100, h100, ...; any: not checked; none: there is no GPU"
]


@dataclass(frozen=True, kw_only=True)
class AnyCluster(Settings):
    """The cluster that workers run on."""

    name: Annotated[Text, "the file of conf/cluster"]
    where: Text
    gpu: GpuModel = "none"
    link: LinkSettings

    @classmethod
    def subclass_for(cls, values: Mapping[str, Any]) -> type[AnyCluster]:
        return CLUSTERS.get(str(values.get("where")), LocalCluster)


@dataclass(frozen=True, kw_only=True)
class LocalCluster(AnyCluster):
    """Processes of this machine."""

    where: Annotated[Literal["local"], "as processes of this machine"]


@dataclass(frozen=True, kw_only=True)
class EmulatedCluster(AnyCluster):
    """Nodes on this machine, joined by links that are slowed down to what link= says."""

    where: Annotated[Literal["netns"], "as processes of this machine, in network namespaces"]
    workers_per_node: Threads = setting(
        1, "workers that share a network namespace, and its link to the others"
    )
    by: Literal["auto", "netem", "relay"] = setting(
        "auto", "what delays packets: the kernel's netem, our relay; auto: netem where the kernel has it"
    )
    windows: Literal["raised", "system"] = setting(
        "raised",
        "what TCP may have under way: raised to what the link holds, and kept in pauses; or the system's",
        since="2026-11-27",
    )


@dataclass(frozen=True, kw_only=True)
class VirtualCluster(AnyCluster):
    """Virtual ranks of one process, as if they were on a cluster."""

    where: Annotated[Literal["virtual"], "as virtual ranks of one process"]
    inside: LinkSettings | None = setting(
        None, "what joins the workers of one node, as inside=nvlink; null: link joins all"
    )
    workers_per_node: Threads = setting(8, "that `inside` joins; without it, it makes no difference")

    def to_network(self) -> Network:
        """Return the cost model of what joins the ranks, for simulated runs and predictions.

        Raises:
            ValueError: it lacks a number, or has nodes of one worker each and what joins those inside.
        """
        if self.inside and self.workers_per_node == 1:
            raise ValueError(
                f"inside={self.inside.name} joins the workers of a node, and cluster.workers_per_node=1; "
                "give a node more workers, or leave inside out"
            )
        between = self.link.to_link("link")
        if self.inside is None:
            return Network(between)
        return Network(between, self.inside.to_link("inside"), self.workers_per_node)


@dataclass(frozen=True, kw_only=True)
class SlurmCluster(AnyCluster):
    """A SLURM cluster; options that are null are left to its own defaults."""

    where: Annotated[Literal["slurm"], "as processes of SLURM's jobs"]
    gpu: GpuModel = "any"
    workers_per_node: Threads = setting(
        8, "at most, one GPU each; they are spread evenly over as few nodes as possible"
    )
    cpus_per_worker: Threads = setting(4, "cores of each")
    mem_gb: PositiveInt | None = setting(None, "memory of a node")
    partition: Text | None = setting(None, "what --partition gets")
    account: Text | None = setting(None, "what --account gets")
    qos: Text | None = setting(None, "what --qos gets")
    reservation: Text | None = setting(None, "what --reservation gets")
    constraint: Text | None = setting(None, "what --constraint gets")
    exclude: Text | None = setting(
        None, "nodes not to be used, as SLURM lists them; those that failed twice are added"
    )
    comment: Text | None = setting(None, "what --comment gets")
    gres: Text | None = setting(
        "gpu", "gpu asks for --gres=gpu:N, gpu:a100 for --gres=gpu:a100:N; null: --gpus-per-node=N"
    )
    exclusive: bool = setting(True, "nobody else on the nodes: shared nodes make timings worthless")
    time_min: Minutes = setting(
        120, "minutes of a job; what is not done by then is saved and goes on in the same job, requeued"
    )
    signal_delay_s: PositiveInt = setting(
        120, "seconds before the time limit at which the workers are told to save"
    )
    requeues: NonNegativeInt = setting(20, "how often a job may go on after a stop")
    max_array: ArraySize = setting(1000, "tasks of one array: MaxArraySize - 1 of `scontrol show config`")
    array_parallelism: ArraySize = setting(16, "tasks of one array that run at a time")
    srun: tuple[Text, ...] = setting((), "further words for srun: ['--mpi=none']")
    sbatch: tuple[LongOption, ...] = setting((), "further words for sbatch: ['--mail-type=END']")
    more_sbatch: tuple[LongOption, ...] = setting(
        (), "the same from the command line, where they stand behind `--`; both are given"
    )
    enter: tuple[Text, ...] = setting(
        (), "words that put a worker onto its node's emulated network; the link is then verified"
    )
    setup: tuple[Text, ...] = setting(
        (), "shell lines before srun, executed as they stand: [module load cuda]"
    )
    python: Text | None = setting(None, "on the nodes, with submitit; null: the Python that submits")
    slurm_conf: Text | None = setting(
        None, "what SLURM_CONF should be, where several clusters share a login node"
    )
    interface: Text | None = setting(
        None, "network interface through which workers meet, if the nodes have several"
    )
    ports: PortRange | None = setting(
        None, "TCP ports that are open between nodes, where others are closed: workers meet at one of them"
    )

    def port_range(self) -> range | None:
        """Return the range of ports that `ports` names; None where it names none.

        Raises:
            ValueError: they are none, or need root.
        """
        if self.ports is None:
            return None
        first, last = map(int, self.ports.split("-"))
        if not 1024 <= first <= last < 2**16:
            raise ValueError(
                f"cluster.ports={self.ports}: ports are from 1024 to 65535, the smaller one first"
            )
        return range(first, last + 1)


CLUSTERS: dict[str, type[AnyCluster]] = {
    "local": LocalCluster, "slurm": SlurmCluster, "netns": EmulatedCluster, "virtual": VirtualCluster,
}  # fmt: skip
