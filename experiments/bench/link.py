"""What a link really is: alpha and beta, with intervals, from ping-pong and collectives over it.

make bench BENCH=link [ARGS="cluster=netns link=ethernet_1g workers=4 --name office"]

Words before the options are settings of a run: workers, on loopback (cluster=local), over an emulated link
(cluster=netns link=...), on GPUs (device=cuda). Processes that torchrun or srun starts with this command are
the workers themselves, so that a cluster's own link is measured:

    srun python -m experiments.bench.link cluster=mine workers=8 --name mine

Times are means over the workers, each repetition in another order; no size is measured that takes longer than
0.2 s. Latency terms and bytes are those of `sparsify.cost`, by the backend's algorithms. A fit minimises the
squares of relative errors; intervals are bootstraps over repetitions. `--name NAME` writes the joint fit to
conf/local/link/NAME.yaml: say link=NAME.

The last line is one JSON object; the same line, with all samples, is appended to results/bench/link.jsonl.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from analysis.files import read_json, write_atomic, write_json
from analysis.records import now
from experiments.bench import _link_worker
from experiments.bench._link_fit import Fit, Number, fit, together
from experiments.bench.launch import append, positive
from experiments.config import code_version, compose
from experiments.config.folders import ROOT, Folders
from experiments.config.plan import PlannedRun
from experiments.launch.local import network_of
from experiments.worker import connect, lifeline
from experiments.worker.provenance import provenance
from experiments.worker.run import prepare_device
from slurm import environment
from slurm.local import LocalWorkers
from slurm.worker_process import WorkerCommand
from sparsify.cost import Cost

SMALLEST, LARGEST, STEP = 2**10, 2**26, 4  # bytes
REPEATS = 15
POLL_S = 0.05
LOCAL = ROOT / "conf" / "local" / "link"
PUBLIC = ("cpu", "cores", "memory_gib", "gpu", "platform", "versions", "commit", "dirty")
DEFAULTS = ("task=vector", "train.validate=never", "cluster=local", "link=loopback", "workers=2")


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=link", description=__doc__.partition("\n")[0])
    words.add_argument("settings", nargs="*", help="of a run: cluster=, link=, workers=, device=")
    words.add_argument("--repeats", type=positive, default=REPEATS, help="of each size")
    words.add_argument("--largest", type=positive, default=LARGEST, help="bytes")
    words.add_argument("--name", help="of the link file to write")
    asked = words.parse_intermixed_args()
    try:
        config = configured(asked.settings)
        if asked.name:
            check_name(asked.name)
        found = measure(config, sizes(asked.largest), asked.repeats)
    except ValueError as error:
        words.error(str(error))
    if found is None:  # of a group that somebody else started, and not its first
        return 0
    report(config, found, asked.name)
    return 0


def configured(settings: Sequence[str]) -> dict[str, Any]:
    """The config that these words mean, on loopback unless they say another cluster or link.

    Raises:
        ValueError: a word that is wrong, or virtual ranks, whose link is a model.
    """
    given = {word.partition("=")[0] for word in settings}
    defaults = [word for word in DEFAULTS if word.partition("=")[0] not in given]
    if "cluster" in given:
        defaults = [word for word in defaults if not word.startswith("link=")]
    config = compose.resolve([*defaults, *settings])
    if config["cluster"]["where"] == "virtual":
        raise ValueError(
            "cluster=virtual has no link that could be measured; take cluster=local, or cluster=netns"
        )
    if config["workers"] < 2:
        raise ValueError(f"workers={config['workers']}: a link joins at least 2")
    return config


def sizes(largest: int) -> list[int]:
    steps = math.floor(math.log(max(largest, SMALLEST) / SMALLEST, STEP) + 1e-9)
    return [SMALLEST * STEP**at for at in range(steps + 1)]


def measure(config: Mapping[str, Any], sizes: list[int], repeats: int) -> list[dict[str, Any]] | None:
    """See `_link_worker.measure`; None on all but the first of workers that somebody else started.

    Raises:
        ValueError: these workers can't be, or they failed.
    """
    cluster = config["cluster"]
    per_node = cluster.get("workers_per_node", config["workers"])
    if group := environment.joined():
        lifeline.end_with_parent()
        device = prepare_device(config, group.place)
        meeting = Folders().scratch / "joined" / environment.step_name()
        comm = connect.join(config, group, meeting, device)
        found = _link_worker.measure(comm, device, sizes, repeats, per_node)
        comm.barrier()
        comm.close()
        return found if group.place.rank == 0 else None
    if cluster["where"] == "slurm":
        raise ValueError(
            f"cluster={cluster['name']}: start the workers in an allocation, as in srun --ntasks="
            f"{config['workers']} python -m experiments.bench.link cluster={cluster['name']} "
            f"workers={config['workers']}"
        )
    orders = {"config": config, "sizes": sizes, "repeats": repeats, "per_node": per_node, "meet": "file"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "orders.json", orders)
        run(config, folder)
        told = read_json(folder / "found.json")
        assert told is not None, "a worker that ended well has written it"
        return list(told["cases"])


def run(config: Mapping[str, Any], folder: Path) -> None:
    """Start the workers on this machine, and wait for them.

    Raises:
        ValueError: one failed, with the last line that it said.
    """
    command = WorkerCommand(
        [sys.executable, "-m", "experiments.bench._link_worker"],
        str(ROOT), config["threads"], {"name": "none"}, [], config["device"] == "cuda",
    )  # fmt: skip
    network = network_of(PlannedRun(dict(config), None))
    workers = LocalWorkers(
        command, str(folder / "orders.json"), folder, config["workers"], network,
        config["cluster"].get("workers_per_node", config["workers"]),
    )  # fmt: skip
    try:
        while (ended := workers.poll()) is None:
            time.sleep(POLL_S)
    except BaseException:
        workers.cancel()
        raise
    if not ended.ok:
        logs = [path.read_text().strip().splitlines() for path in sorted(folder.glob("worker*_log.err"))]
        said = [lines[-1] for lines in logs if lines] or ["without a word"]
        raise ValueError(f"a worker failed: {said[0]}")


def report(config: Mapping[str, Any], found: list[dict[str, Any]], name: str | None) -> None:
    """Print the fits, record them, and write the link file."""
    kinds: dict[str, tuple[list[Cost], list[list[float]]]] = {}
    for row in found:
        costs, samples = kinds.setdefault(row["kind"], ([], []))
        costs.append(Cost(row["messages"], row["sent_bytes"]))
        samples.append(row["seconds"])
    fits = {kind: fit(*of_kind) for kind, of_kind in kinds.items()} | {"all together": together(kinds)}
    about = provenance("", "", torch.device(config["device"]))
    cluster = config["cluster"]
    where = (
        f"{cluster['name']}, link={cluster['link']['name']}, {config['workers']} workers on {about['cpu']}"
    )
    print(f"{where}\n\n{table(fits)}\n{residuals(found, fits)}")
    line = {
        "bench": "link",
        "cluster": cluster["name"],
        "link": cluster["link"]["name"],
        "workers": config["workers"],
        "device": config["device"],
        "fits": {kind: each._asdict() for kind, each in fits.items()},
    }
    public = {field: value for field, value in about.items() if field in PUBLIC}
    facts = {"at": now(), "kind": "link", **code_version.origin(), "provenance": public, "samples": found}
    append(Folders().results / "bench" / "link.jsonl", facts | line)
    if name:
        path = LOCAL / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, link_file(fits["all together"], where))
        print(f"wrote {path}: say link={name}")
    print(json.dumps(line))


def table(fits: Mapping[str, Fit]) -> str:
    """As Markdown: alpha, bandwidth and the errors of each fit."""
    out = [
        "| | alpha (us) | bandwidth (Gbit/s) | median error | largest error |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, each in fits.items():
        beta = each.beta_s_per_byte
        gbit = Number(*(8e-9 / value if value else math.inf for value in (beta.value, beta.high, beta.low)))
        errors = sorted(abs(residual) for residual in each.residuals)
        alpha = Number(*(1e6 * value for value in each.alpha_s))
        percents = (100 * errors[len(errors) // 2], 100 * errors[-1])
        cells = [kind, interval(alpha), interval(gbit), *(f"{percent:.1f} %" for percent in percents)]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def interval(number: Number) -> str:
    return f"{number.value:.3g} [{number.low:.3g}, {number.high:.3g}]"


def residuals(found: Sequence[Mapping[str, Any]], fits: Mapping[str, Fit]) -> str:
    """As Markdown: of each size what was measured, and how far both fits are from it."""
    out = ["| | bytes | median (ms) | own fit | all together |", "|---|---:|---:|---:|---:|"]
    own = {kind: iter(each.residuals) for kind, each in fits.items()}
    for row in found:
        median = sorted(row["seconds"])[len(row["seconds"]) // 2]
        errors = (100 * next(own[kind]) for kind in (row["kind"], "all together"))
        percents = " | ".join(f"{error:+.1f} %" for error in errors)
        out.append(f"| {row['kind']} | {row['size']:,} | {1e3 * median:.3f} | {percents} |")
    return "\n".join(out) + "\n"


def check_name(name: str) -> None:
    """
    Raises:
        ValueError: no file of conf/link can be called so.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"--name {name}: take small letters, digits and _, a letter first, as in office_10g")
    if (ROOT / "conf" / "link" / f"{name}.yaml").exists():
        raise ValueError(f"--name {name}: conf/link has a link of that name; take another one")


def link_file(found: Fit, where: str) -> str:
    """What conf/link can use."""
    alpha, beta = found.alpha_s, found.beta_s_per_byte
    return (
        "# @package cluster.link\n"
        f"# Measured {now()[:10]} by `make bench BENCH=link`: {where}.\n"
        f"# 95 % intervals: alpha {alpha.low:.3g} to {alpha.high:.3g} s, beta {beta.low:.3g} to "
        f"{beta.high:.3g} s.\n"
        f"alpha_s: {alpha.value:.4e}\nbeta_s_per_byte: {beta.value:.4e}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
