from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from analysis.records.files import write_atomic
from experiments.commands._arguments import SettingWords
from experiments.commands._cluster_checks import VERDICTS, ClusterObservations, judge_cluster
from experiments.commands._messages import say
from experiments.config import choices, compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import requested_or_default_profile
from experiments.config.run import Run
from experiments.launch.attempt import checked_image_provenance, container_config
from experiments.launch.cluster_prober import ClusterProber
from slurm import commands, environment, partition
from sparsify.ranges import Constraint, PositiveInt, format_argument

GROUP = "cluster"
Minutes = Annotated[float, Constraint(gt=0, le=24 * 60)]
SUBJECT_COLUMNS = 12


def doctor(
    words: SettingWords, *, nodes: PositiveInt = 16, wait_min: Minutes = 10, write: bool = False
) -> int:
    """Find out what will not work on a cluster before the first sweep: `doctor cluster=mine`.

    A probe runs on each node, in the same way as a run does. Then workers of two nodes form a group. For what
    does not work, the output says what to do; it also shows the fields that the cluster's file should have.
    The exit code is 1 where something will not work.

    Args:
        words: cluster=NAME, and settings as for runs: container=, device=, cluster.partition= ...
        nodes: the largest number of nodes that are probed.
        wait_min: minutes that probes may wait for their nodes.
        write: write the fields into the cluster's own file in conf/local or $SPARSIFY_CONF.
    """
    config = _resolve_full_node(words)
    name = config.cluster.name
    file = _find_own_file(name) if write else None
    make_prober = partial(ClusterProber, config, ResultFolders(), 60 * wait_min, say)
    if isinstance(config.cluster, SlurmCluster):
        observed = _observe_cluster(config, config.cluster, make_prober, nodes)
    else:
        this_machine = make_prober()
        probed = this_machine.probe_this_machine()
        group = this_machine.try_group_on_this_machine() if probed.has_all_facts else None
        observed = ClusterObservations(config, [probed], group, _explain_no_container(config))
    findings = judge_cluster(observed)
    for finding in sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)):
        print(f"{finding.verdict:5}  {finding.subject:{SUBJECT_COLUMNS}} {finding.text}")
    fields = dict(field for finding in findings for field in finding.suggested_fields.items())
    new_fields = {
        field: value for field, value in fields.items() if config.get_setting(f"cluster.{field}") != value
    }
    if observed.cluster is not None and new_fields:
        lines = [_format_field(*field) for field in new_fields.items()]
        if file is None:
            print(f"\n# for the file of cluster={name}; --write puts it there", *lines, sep="\n")
        else:
            write_atomic(file, merge_yaml_fields(file.read_text(), new_fields))
            say(f"{file} says now: {'; '.join(lines)}")
    return 1 if any(finding.verdict == "FAULT" for finding in findings) else 0


def _resolve_full_node(words: Sequence[str]) -> Config:
    """Return the config of a run that fills one node of the cluster."""
    requested = Run.coerce([word for word in words if not word.startswith("profile=")])
    run = (
        Run.coerce({"method": "dense", "task": "cnn_digits"})
        | requested
        | {"profile": requested_or_default_profile(words)}
    )
    config = compose.resolve(run)
    if "workers" not in run.settings and isinstance(config.cluster, SlurmCluster):
        config = compose.resolve(run | {"workers": config.cluster.workers_per_node})
    return config


def _observe_cluster(
    config: Config, cluster: SlurmCluster, make_prober: Callable[[], ClusterProber], max_nodes: int
) -> ClusterObservations:
    """Return what probes find on the nodes of the cluster's partition, and a group of two that are well."""
    environment.set_slurm_conf_variable_if_given(cluster.slurm_conf)
    nodes = partition.list_partition_nodes(cluster.partition)
    excluded = commands.expand_hostlist(cluster.exclude) if cluster.exclude else []
    names = [node.name for node in nodes if node.is_usable and node.name not in excluded]
    if not names:
        states = ", ".join(f"{node.name}: {node.state}" for node in nodes)
        raise ValueError(
            f"cluster={cluster.name}: SLURM has no node there that takes jobs ({states}); name another "
            "cluster.partition, or wait until one is back"
        )
    if len(names) > max_nodes:
        say(f"{len(names)} nodes take jobs, and {max_nodes} of them are asked; --nodes={len(names)} asks all")
    say(f"probes go to {', '.join(names[:max_nodes])}")
    prober = make_prober()
    probes = prober.probe_nodes(names[:max_nodes])
    well = [
        probe.node
        for probe in probes
        if probe.has_all_facts and not any(facts.container_error for facts in probe.facts)
    ]
    group = None
    if well:
        say(f"workers of {' and '.join(well[:2])} try to meet")
        group = prober.try_group_on_nodes(well[:2])
    array_size = partition.query_slurm_setting("MaxArraySize") or ""
    return ClusterObservations(
        config,
        probes,
        group,
        _explain_no_container(config),
        nodes,
        int(array_size) - 1 if array_size.isdigit() else None,
        partition.query_slurm_setting("AccountingStorageType"),
        partition.describe_untested_version(),
    )


def _explain_no_container(config: Config) -> str:
    """Return why this machine can't start runs in their container; empty where it can."""
    try:
        checked_image_provenance(container_config(config))
    except ValueError as error:
        return str(error)
    return ""


def _find_own_file(cluster: str) -> Path:
    """Return the file of a cluster that is one of the user's.

    Raises:
        ValueError: the file comes with the repository.
    """
    file = choices.files_by_option("cluster")[cluster]
    if file.is_relative_to(choices.CONF) and not file.is_relative_to(choices.CONF / "local"):
        raise ValueError(
            f"--write changes a file of your own, and {file} comes with the repository; `new cluster NAME` "
            "makes one of yours"
        )
    return file


def _format_field(name: str, value: Any) -> str:
    return f"{name}: {format_argument(value)}"


def merge_yaml_fields(text: str, fields: Mapping[str, Any]) -> str:
    """Return a file's text with these fields, each in its old line, with its comment, or in a new one."""
    for name, value in fields.items():
        line = _format_field(name, value)
        old_line = re.search(rf"^{name}:.*?(?= #|$)", text, re.MULTILINE)
        if old_line:
            text = text[: old_line.start()] + line + text[old_line.end() :]
        else:
            text = text.removesuffix("\n") + f"\n{line}\n"
    return text
