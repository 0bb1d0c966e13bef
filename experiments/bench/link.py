"""Alpha and beta of a link, by relative least squares, from what messages and collectives take, by size; with
bootstrap intervals. As a program, a worker of it.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from analysis.records.files import read_json_or_none, write_atomic, write_json
from analysis.records.store import utc_now
from experiments.bench._runner import Bench, Record, heading, measured_before
from experiments.bench._timing import facts, synchronise
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import ROOT, Folders
from experiments.config.plan import PlannedRun
from experiments.config.run import Run
from experiments.launch.local import emulation_request, hold_emulation_lock, start_network
from experiments.worker import connect, hardware
from experiments.worker.build import prepare_device
from experiments.worker.link_probe import ProbeCase, fitted, there_and_back
from slurm import environment, worker_process
from slurm.local import LocalWorkers
from slurm.worker_process import WorkerCommand
from sparsify.comm import Comm, gather_json
from sparsify.cost import CollectiveCost, Link
from sparsify.ranges import PositiveInt

SMALLEST, STEP = 2**10, 4  # bytes
POLL_S = 0.05
LOCAL = ROOT / "conf" / "local" / "link"
DEFAULTS = {"task": "vector", "train.validate": "never", "cluster": "local", "link": "loopback", "workers": 2}
LONGEST_S = 0.2  # no larger size of a kind is measured once one takes so long
RESAMPLES = 500
PING_PONG, TOGETHER = "ping-pong", "all together"
KINDS = (PING_PONG, "all_reduce", "all_gather", "all_to_all")


def link(
    settings: Sequence[str] = (),
    *,
    repeats: PositiveInt = 15,
    largest: PositiveInt = 2**26,
    name: str | None = None,
) -> Bench | int:
    """The alpha and beta of a link, as it really is, with intervals, from ping-pong and collectives over it.

    Words before the options are settings of a run: workers, on loopback (cluster=local), over an emulated
    link (cluster=netns link=ethernet_1g workers=4), on GPUs (device=cuda). Processes that torchrun or srun
    starts with this command are the workers themselves, so that a cluster's own link is measured:

    `srun python -m experiments bench link cluster=mine workers=8 --name mine`

    Times are means over the workers, each repetition in another order; no size is measured that takes longer
    than 0.2 s. Latency terms and bytes are those of `sparsify.cost`, by the backend's algorithms. A fit
    minimises the squares of relative errors; intervals are bootstraps over repetitions.

    Args:
        settings: of a run: cluster=, link=, workers=, device=.
        repeats: of each size.
        largest: bytes.
        name: of the link file to write, with the joint fit: conf/local/link/NAME.yaml, for link=NAME.
    """
    config = configured(settings)
    if name and not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"--name {name}: take small letters, digits and _, a letter first, as in office_10g")
    if name and (ROOT / "conf" / "link" / f"{name}.yaml").exists():
        raise ValueError(f"--name {name}: conf/link has a link of that name; take another one")
    if group := environment.find_launcher_group():
        found = joined(config, group, sizes(largest), repeats)
        if group.place.rank:
            return 0
    cluster, device = config["cluster"], torch.device(config["device"])
    about = facts(device)
    where = (
        f"{cluster['name']}, link={cluster['link']['name']}, {config['workers']} workers on {about['cpu']}"
    )
    case = {"cluster": cluster["name"], "link": cluster["link"]["name"], "workers": config["workers"]}

    def last(rows: list[Record]) -> Record:
        fits = fits_of(rows)
        print(f"\n{table(fits)}")
        if name:
            print(f"wrote {written(name, fits[TOGETHER], where)}: say link={name}")
        return case | {"fits": {kind: each._asdict() for kind, each in fits.items()}}

    return Bench(
        about=about,
        head=where,
        cases=[case],
        setting={"sizes": sizes(largest), "repeats": repeats, "words": [*settings]},
        measure=lambda case: found if group else measured(config, sizes(largest), repeats),
        settled=lambda rows: group is None and measured_before(rows),
        text=residuals,
        last=last,
    )


def configured(settings: Sequence[str]) -> Config:
    """The config that these words mean, on loopback unless they say another cluster or link.

    Raises:
        ValueError: a word that is wrong, or virtual ranks, whose link is a model.
    """
    asked, defaults = Run.of(settings), Run(DEFAULTS)
    if "cluster" in asked.settings:
        defaults = defaults.without("link")
    config = compose.resolve(defaults | asked)
    if config["cluster"]["where"] == "virtual":
        raise ValueError(
            "cluster=virtual has no link that could be measured; take cluster=local, or cluster=netns"
        )
    if config["workers"] < 2:
        raise ValueError(f"workers={config['workers']}: a link joins at least 2")
    return config


def sizes(largest: int) -> list[int]:
    """Bytes of the messages, from small to the largest."""
    steps = math.floor(math.log(max(largest, SMALLEST) / SMALLEST, STEP) + 1e-9)
    return [SMALLEST * STEP**at for at in range(steps + 1)]


def joined(config: Config, group: environment.LauncherGroup, sizes: list[int], repeats: int) -> list[Record]:
    """The rows of workers that somebody else started, of which this is one."""
    worker_process.exit_with_parent()
    device = prepare_device(config, group.place)
    meeting = Folders().scratch / "joined" / environment.step_name()
    comm = connect.join(config, group, meeting, device)
    found = measure(comm, config, device, sizes, repeats)
    comm.close()
    return found


def measured(config: Config, sizes: list[int], repeats: int) -> list[Record]:
    """The rows of workers that are started on this machine, see `measure`.

    Raises:
        ValueError: these workers can't be; or one failed, with the last line that it said.
    """
    cluster = config["cluster"]
    if cluster["where"] == "slurm":
        raise ValueError(
            f"cluster={cluster['name']}: start the workers in an allocation, as in srun --ntasks="
            f"{config['workers']} python -m experiments bench link cluster={cluster['name']} "
            f"workers={config['workers']}"
        )
    command = WorkerCommand(
        [sys.executable, "-m", "experiments.bench.link"],
        str(ROOT), config["threads"], None, [], config["device"] == "cuda",
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        folder, planned = Path(held.enter_context(tempfile.TemporaryDirectory())), PlannedRun(config, None)
        if emulation_request(planned):
            held.enter_context(hold_emulation_lock())
        network, orders = start_network(planned), folder / "orders.json"
        facts = network.facts if network else None
        told = {"config": config.as_dict(), "sizes": sizes, "repeats": repeats, "network": facts}
        write_json(orders, told)
        workers = LocalWorkers(command, str(orders), folder, config.workers, network, config.workers_per_node)
        try:
            while (ended := workers.poll()) is None:
                time.sleep(POLL_S)
        except BaseException:
            workers.kill()
            raise
        if any(ended.values()) or len(ended) < workers.size:
            logs = [path.read_text().strip().splitlines() for path in sorted(folder.glob("worker*_log.err"))]
            said = [lines[-1] for lines in logs if lines] or ["without a word"]
            raise ValueError(f"a worker failed: {said[0]}")
        found = read_json_or_none(folder / "found.json")
        assert found is not None, "a worker that ended well has written it"
        return list(found["cases"])


def main(orders_file: Path, folder: Path) -> int:
    """A worker that was started here."""
    worker_process.exit_when_stdin_closes()
    place, orders = environment.worker_place(), read_json_or_none(orders_file)
    assert orders is not None, orders_file
    config = Config.of(orders["config"])
    device = prepare_device(config, place)
    hardware.prepare(config, place, device, orders["network"])
    comm = connect.open_group(config, place, folder, True, None, device)
    found = measure(comm, config, device, orders["sizes"], orders["repeats"])
    if place.rank == 0:
        write_json(folder / "found.json", {"cases": found})
    comm.close()
    return 0


def measure(comm: Comm, config: Config, device: torch.device, sizes: list[int], repeats: int) -> list[Record]:
    """Messages and bytes of each kind and size, by `sparsify.cost`, and the seconds of each repetition, the
    mean over the workers. Collective; the same on all workers, which end together. Ping-pong goes
    between nodes where there are several.

    Args:
        sizes: bytes, ascending: of a message, or of what all workers have after an all_gather.
    """
    pair = (0, config.workers_per_node if config.workers_per_node < comm.size else 1)
    cases = []
    for kind in KINDS:
        for size in sizes:
            cases.append(case := case_of(comm, kind, size, pair, device))
            seconds_of(case, comm, device)  # connections are made, and memory is mapped
            if seconds_of(case, comm, device) > LONGEST_S:
                break
    took: dict[int, list[float]] = {at: [] for at in range(len(cases))}
    order = random.Random(0)  # the same for all workers
    for _ in range(repeats):
        for at in order.sample(range(len(cases)), len(cases)):
            took[at].append(seconds_of(cases[at], comm, device))
    comm.barrier()
    return [
        {"message": case.kind, "size": case.size, **case.cost._asdict(), "seconds": took[at]}
        for at, case in enumerate(cases)
    ]


def case_of(comm: Comm, kind: str, size: int, pair: tuple[int, int], device: torch.device) -> ProbeCase:
    """One kind of message or collective at one size."""
    if kind != PING_PONG:
        return ProbeCase.of(comm, kind, size // comm.size, pair, device)._replace(size=size)
    data = torch.zeros(size // 4, device=device)
    do = partial(there_and_back, comm, data, data, [pair])
    return ProbeCase(kind, size, do, CollectiveCost(2, 2 * data.nbytes), data.nbytes)


def seconds_of(case: ProbeCase, comm: Comm, device: torch.device) -> float:
    """Seconds of one repetition, which all workers begin together; the same on all workers."""
    comm.barrier()
    synchronise(device)
    began = time.perf_counter()
    case.do()
    synchronise(device)
    mine = time.perf_counter() - began
    # Of a ping-pong, the other one is done once it has answered.
    took = gather_json(comm, mine if case.kind != PING_PONG or comm.rank == 0 else None, device)
    return statistics.fmean(theirs for theirs in took if theirs is not None)


class Number(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


class LinkFit(NamedTuple):
    """seconds = alpha x messages + beta x bytes."""

    alpha_s: Number
    beta_s_per_byte: Number
    residuals: list[float]  # fitted / measured - 1 of each size, in their order


def fit(costs: Sequence[CollectiveCost], samples: Sequence[Sequence[float]]) -> LinkFit:
    """Fit the medians of samples, seconds, of each cost; repetitions are resampled for the intervals."""
    measured = np.array([np.median(each) for each in samples])
    alpha, beta = fitted(costs, measured)
    draws = np.random.default_rng(0)
    drawn = np.array([
        np.median(draws.choice(each, (RESAMPLES, len(each))), axis=1) for each in samples
    ])  # fmt: skip
    low, high = np.quantile([fitted(costs, seconds) for seconds in drawn.T], (0.025, 0.975), axis=0)
    errors = np.array([Link(alpha, beta).transfer_seconds(cost) for cost in costs]) / measured - 1
    numbers = zip((alpha, beta), low.tolist(), high.tolist(), strict=True)
    alpha_s, beta_s_per_byte = (Number(*each) for each in numbers)
    return LinkFit(alpha_s, beta_s_per_byte, errors.tolist())


def fits_of(found: Sequence[Record]) -> dict[str, LinkFit]:
    """A fit for each kind of message, and one alpha and beta for all of them together."""
    fits = {}
    for kind in (*dict.fromkeys(row["message"] for row in found), TOGETHER):
        rows = [row for row in found if kind in (row["message"], TOGETHER)]
        costs = [CollectiveCost(row["messages"], row["sent_bytes"]) for row in rows]
        fits[kind] = fit(costs, [row["seconds"] for row in rows])
    return fits


def table(fits: Mapping[str, LinkFit]) -> str:
    """Alpha, bandwidth and the errors of each fit, as Markdown."""
    out = [heading(" | alpha (us) | bandwidth (Gbit/s) | median error | largest error")]
    for kind, each in fits.items():
        beta = each.beta_s_per_byte
        gbit = Number(*(8e-9 / value if value else math.inf for value in (beta.value, beta.high, beta.low)))
        errors = sorted(abs(residual) for residual in each.residuals)
        alpha = Number(*(1e6 * value for value in each.alpha_s))
        percents = (100 * errors[len(errors) // 2], 100 * errors[-1])
        out.append(f"| {kind} | {alpha:.3g} | {gbit:.3g} | {percents[0]:.1f} % | {percents[1]:.1f} % |")
    return "\n".join(out) + "\n"


def residuals(found: Sequence[Record]) -> str:
    """Measurements of each size, and how far both fits are from them, as Markdown."""
    fits = fits_of(found)
    out = [heading(" | bytes | median (ms) | own fit | all together")]
    own = {kind: iter(each.residuals) for kind, each in fits.items()}
    for row in found:
        median = sorted(row["seconds"])[len(row["seconds"]) // 2]
        errors = (100 * next(own[kind]) for kind in (row["message"], TOGETHER))
        percents = " | ".join(f"{error:+.1f} %" for error in errors)
        out.append(f"| {row['message']} | {row['size']:,} | {1e3 * median:.3f} | {percents} |")
    return "\n".join(out) + "\n"


def written(name: str, found: LinkFit, where: str) -> Path:
    """The file that conf/link can use, written."""
    alpha, beta = found.alpha_s, found.beta_s_per_byte
    path = LOCAL / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"""\
# @package cluster.link
# Measured {utc_now()[:10]} by `make bench BENCH=link`: {where}.
# 95 % intervals: alpha {alpha.low:.3g} to {alpha.high:.3g} s, beta {beta.low:.3g} to {beta.high:.3g} s.
alpha_s: {alpha.value:.4e}
beta_s_per_byte: {beta.value:.4e}
"""
    write_atomic(path, text)
    return path


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
