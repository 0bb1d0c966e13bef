from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from analysis.records.files import write_atomic
from experiments.commands._cluster_checks import Examined, Health
from experiments.commands._messages import say
from experiments.commands._arguments import SettingWords
from experiments.config import choices, compose
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import profile_of
from experiments.launch.attempt import checked_image_provenance, container_config
from experiments.launch.examination import ClusterExamination, GroupTestResult
from slurm import commands, environment, partition
from sparsify.ranges import Constraint, PositiveInt, format_argument

GROUP = "cluster"
Minutes = Annotated[float, Constraint(gt=0, le=24 * 60)]
INDENT = 12


def doctor(
    words: SettingWords, *, nodes: PositiveInt = 16, wait_min: Minutes = 10, write: bool = False
) -> int:
    """Find out what will not work on a cluster before the first sweep: doctor cluster=mine

    A probe goes to each node, on the way of a run; then workers of two nodes meet. What does not work is told
    with what to do, and what a cluster's file should say is printed. The exit code is 1 where something will
    not work.

    Args:
        words: cluster=NAME, and settings as for runs: container=, device=, cluster.partition= ...
        nodes: how many are probed, at most.
        wait_min: minutes that probes may wait for their nodes.
        write: put the fields that were found out into the cluster's own file in conf/local or $SPARSIFY_CONF.
    """
    config, folders = _config(words), Folders()
    file = _file_of(config.cluster.name) if write else None
    if isinstance(config.cluster, SlurmCluster):
        examined = _of_slurm(config, config.cluster, folders, nodes, 60 * wait_min)
    else:
        examination = ClusterExamination(config, folders, 60 * wait_min, say)
        probed = examination.probe_this_machine()
        examined = Examined(
            config,
            [probed],
            examination.try_group_on_this_machine() if probed.is_well else None,
            _no_container(config),
        )
    health = Health.of(examined)
    for finding in health.findings:
        print(f"{finding.verdict:5}  {finding.about:{INDENT}} {finding.text}")
    fields = _new(health.fields, config)
    if examined.cluster is not None and fields:
        if file is None:
            print(f"\n# for the file of cluster={config.cluster.name}; --write puts it there")
            print("".join(_lines(fields)), end="")
        else:
            write_atomic(file, _merged(file.read_text(), fields).encode())
            say(f"{file} says now: {'; '.join(line.strip() for line in _lines(fields))}")
    return 0 if health.is_well else 1


def _config(words: Sequence[str]) -> Config:
    """A run that fills one node of the cluster."""
    given = {text.partition("=")[0] for text in words}
    settings = [text for text in words if not text.startswith("profile=")]
    settings += [] if "method" in given else ["method=dense"]
    settings += [] if "task" in given else ["task=cnn_digits"]
    settings.append(f"profile={profile_of(words)}")
    config = compose.resolve(settings)
    if "workers" not in given and isinstance(config.cluster, SlurmCluster):
        config = compose.resolve([*settings, f"workers={config.cluster.workers_per_node}"])
    return config


def _of_slurm(config: Config, cluster: SlurmCluster, folders: Folders, most: int, wait_s: float) -> Examined:
    """Probes of the nodes of its partition, and a meeting of two of those that are well."""
    environment.use_slurm_conf(cluster.slurm_conf)
    known = partition.list_nodes(cluster.partition)
    left_out = commands.expand_nodes(cluster.exclude) if cluster.exclude else []
    names = [node.name for node in known if node.is_usable and node.name not in left_out]
    if not names:
        states = ", ".join(f"{node.name}: {node.state}" for node in known)
        raise ValueError(
            f"cluster={cluster.name}: SLURM has no node there that takes jobs ({states}); name another "
            "cluster.partition, or wait until one is back"
        )
    if len(names) > most:
        say(f"{len(names)} nodes take jobs, and {most} of them are asked; --nodes={len(names)} asks all")
    say(f"probes go to {', '.join(names[:most])}")
    examination = ClusterExamination(config, folders, wait_s, say)
    probes = examination.probe_nodes(names[:most])
    well = [each.node for each in probes if each.is_well and not any(f.container for f in each.facts)]
    met: GroupTestResult | None = None
    if well:
        say(f"workers of {' and '.join(well[:2])} try to meet")
        met = examination.try_group_on_nodes(well[:2])
    size = partition.slurm_setting("MaxArraySize") or ""
    return Examined(
        config, probes, met, _no_container(config), known, int(size) - 1 if size.isdigit() else None,
        partition.slurm_setting("AccountingStorageType"),
    )  # fmt: skip


def _no_container(config: Config) -> str:
    """Why runs in their container can't be started from here; empty where they can."""
    try:
        checked_image_provenance(container_config(config))
    except ValueError as error:
        return str(error)
    return ""


def _new(fields: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields that the cluster's file should have, and has not."""
    return {name: value for name, value in fields.items() if config.leaf(f"cluster.{name}") != value}


def _lines(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {format_argument(value)}\n" for name, value in fields.items()]


def _file_of(name: str) -> Any:
    """The cluster's file, if it is one of the user's.

    Raises:
        ValueError: it comes with the repository.
    """
    file = choices.files("cluster")[name]
    if file.is_relative_to(choices.CONF) and not file.is_relative_to(choices.CONF / "local"):
        raise ValueError(
            f"--write changes a file of your own, and {file} comes with the repository; `new cluster NAME` "
            "makes one of yours"
        )
    return file


def _merged(text: str, fields: Mapping[str, Any]) -> str:
    """The file's text with these fields, each in its old line, with its comment, or in a new one."""
    lines, left = list[str](), dict(zip(fields, _lines(fields), strict=True))
    for line in text.splitlines(keepends=True):
        name = line.partition(":")[0]
        if name in left:
            _, mark, comment = line.partition(" #")
            line = left.pop(name).rstrip() + (mark + comment if mark else "\n")
        lines.append(line if line.endswith("\n") else f"{line}\n")
    return "".join([*lines, *left.values()])
