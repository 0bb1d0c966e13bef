"""Latency (alpha) and time per byte (beta) of a link, fitted to the times of messages and collectives.

The fit is by relative least squares, with bootstrap intervals. As a program, the module is a worker.
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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from analysis.records.files import try_read_json_object, write_atomic, write_json
from analysis.records.store import utc_timestamp
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.bench._runner import (
    Benchmark,
    Record,
    is_measured_by_this_code,
)
from experiments.bench._timing import describe_machine_and_code, synchronise_if_cuda
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import ROOT, ResultFolders
from experiments.config.plan import PlannedRun
from experiments.config.run import Run
from experiments.launch.local import (
    acquire_emulation_lock_or_raise,
    emulation_request,
    start_network_if_emulated,
)
from experiments.worker import connect, hardware
from experiments.worker.build import prepare_device
from experiments.worker.link_probe import ProbeCase, fit_alpha_beta, ping_pong
from slurm import environment, worker_process
from slurm.local import LocalWorkers
from slurm.worker_process import WorkerCommand
from sparsify.comm import Comm, gather_json
from sparsify.cost import CollectiveCost, Link
from sparsify.ranges import PositiveInt

SMALLEST_BYTES = 2**10
SIZE_FACTOR = 4
POLL_S = 0.05
LINK_FOLDER = ROOT / "conf" / "local" / "link"
DEFAULTS = {"task": "vector", "train.validate": "never", "cluster": "local", "link": "loopback", "workers": 2}
MAX_DURATION_S = 0.2  # no larger size of a kind is measured once one takes so long
NUM_RESAMPLES = 500
PING_PONG = "ping-pong"
JOINT = "all together"
KINDS = (PING_PONG, "all_reduce", "all_gather", "all_to_all")


def link(
    settings: Sequence[str] = (),
    *,
    repeats: PositiveInt = 15,
    largest: PositiveInt = 2**26,
    name: str | None = None,
) -> Benchmark | int:
    """Measure the alpha and beta of a link, with intervals, by ping-pong and collectives over it.

    Words before the options are settings of a run: workers, on loopback (cluster=local), over an emulated
    link (cluster=netns link=ethernet_1g workers=4), on GPUs (device=cuda). Processes that torchrun or srun
    starts with this command are the workers themselves, so that a cluster's own link is measured:

    `srun python -m experiments bench link cluster=mine workers=8 --name mine`

    Times are means over the workers, each repetition in another order; no size is measured that takes longer
    than 0.2 s. Latency terms and bytes are those of `sparsify.cost`, by the backend's algorithms. A fit
    minimises the squares of relative errors; intervals are bootstraps over repetitions.

    Args:
        settings: settings of a run: cluster=, link=, workers=, device=.
        repeats: repetitions of each size.
        largest: size of the largest message, in bytes.
        name: name of a link file to write with the joint fit, conf/local/link/NAME.yaml, for link=NAME.
    """
    config = compose_link_config(settings)
    if name and not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"--name {name}: take small letters, digits and _, a letter first, as in office_10g")
    if name and (ROOT / "conf" / "link" / f"{name}.yaml").exists():
        raise ValueError(f"--name {name}: conf/link has a link of that name; take another one")
    sizes = list_message_bytes(largest)
    group = environment.find_launcher_group()
    if group:
        rows = measure_as_worker(config, group, sizes, repeats)
        if group.place.rank:
            return 0
    cluster = config["cluster"]
    machine = describe_machine_and_code(torch.device(config["device"]))
    case = {"cluster": cluster["name"], "link": cluster["link"]["name"], "workers": config["workers"]}
    place = f"{case['cluster']}, link={case['link']}, {case['workers']} workers on {machine['cpu']}"

    def summarise(rows: list[Record]) -> Record:
        """Print the fits, and write the link file that was asked for."""
        fits = fit_each_kind_and_joint(rows)
        print(f"\n{format_fits(fits)}")
        if name:
            print(f"wrote {write_link_file(name, fits[JOINT], place)}: say link={name}")
        return case | {"fits": {kind: fit.to_json_record() for kind, fit in fits.items()}}

    return Benchmark(
        machine=machine,
        description=place,
        cases=[case],
        settings={"sizes": sizes, "repeats": repeats, "words": [*settings]},
        measure=lambda case: rows if group else measure_with_local_workers(config, sizes, repeats),
        is_settled=lambda stored: group is None and is_measured_by_this_code(stored),
        format_rows=format_residuals,
        summarise=summarise,
    )


def compose_link_config(settings: Sequence[str]) -> Config:
    """Return the config of these settings, on loopback unless they say another cluster or link.

    Raises:
        ValueError: a setting is wrong, or the ranks are virtual, whose link is a model.
    """
    run = Run.coerce(settings)
    defaults = Run(DEFAULTS)
    if "cluster" in run.settings:
        defaults = defaults.without("link")
    config = compose.resolve(defaults | run)
    if config["cluster"]["where"] == "virtual":
        raise ValueError(
            "cluster=virtual has no link that could be measured; take cluster=local, or cluster=netns"
        )
    if config["workers"] < 2:
        raise ValueError(f"workers={config['workers']}: a link joins at least 2")
    return config


def list_message_bytes(largest_bytes: int) -> list[int]:
    """Return the bytes of the messages, from small to at most the largest; one at least."""
    steps = math.floor(math.log(max(largest_bytes, SMALLEST_BYTES) / SMALLEST_BYTES, SIZE_FACTOR) + 1e-9)
    return [SMALLEST_BYTES * SIZE_FACTOR**step for step in range(steps + 1)]


def measure_as_worker(
    config: Config, group: environment.LauncherGroup, sizes: list[int], repeats: int
) -> list[Record]:
    """Return the rows of workers that a launcher has started; this process is one of them."""
    worker_process.kill_self_when_parent_ends()
    device = prepare_device(config, group.place)
    meeting_folder = ResultFolders().scratch / "joined" / environment.job_step_name()
    comm = connect.join_external_group(config, group, meeting_folder, device)
    rows = measure_messages(comm, config, device, sizes, repeats)
    comm.close()
    return rows


def measure_with_local_workers(config: Config, sizes: list[int], repeats: int) -> list[Record]:
    """Start workers on this machine and return their rows.

    Raises:
        ValueError: these workers can't be started here; or one failed, with the last line of its log.
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
    planned_run = PlannedRun(config, None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if emulation_request(planned_run):
            stack.enter_context(acquire_emulation_lock_or_raise())
        network = start_network_if_emulated(planned_run)
        orders = folder / "orders.json"
        write_json(orders, {
            "config": config.as_dict(), "sizes": sizes, "repeats": repeats,
            "network": network.facts if network else None,
        })  # fmt: skip
        workers = LocalWorkers(command, str(orders), folder, config.workers, network, config.workers_per_node)
        try:
            while (exit_codes := workers.poll_exit_codes()) is None:
                time.sleep(POLL_S)
        except BaseException:
            workers.kill_and_close_network()
            raise
        if any(exit_codes.values()) or len(exit_codes) < workers.size:
            logs = [path.read_text().strip().splitlines() for path in sorted(folder.glob("worker*_log.err"))]
            last_lines = [lines[-1] for lines in logs if lines] or ["without a word"]
            raise ValueError(f"a worker failed: {last_lines[0]}")
        report = try_read_json_object(folder / "report.json")
        assert report is not None, "a worker that ended well has written it"
        return list(report["rows"])


def run_local_worker(orders_file: Path, folder: Path) -> int:
    """Run a worker that `measure_with_local_workers` started."""
    worker_process.kill_self_when_stdin_closes()
    place = environment.worker_place()
    orders = try_read_json_object(orders_file)
    assert orders is not None, orders_file
    config = Config.from_record(orders["config"])
    device = prepare_device(config, place)
    hardware.pin_if_emulated_and_set_nccl_defaults(config, place, device, orders["network"])
    comm = connect.join_group_via_folder(config, place, folder, True, None, device)
    rows = measure_messages(comm, config, device, orders["sizes"], orders["repeats"])
    if place.rank == 0:
        write_json(folder / "report.json", {"rows": rows})
    comm.close()
    return 0


def measure_messages(
    comm: Comm, config: Config, device: torch.device, sizes: list[int], repeats: int
) -> list[Record]:
    """Measure messages of each kind and size, with their cost by `sparsify.cost`.

    Collective, with the same result on all workers. Seconds are means over the workers, which end together.
    Ping-pong goes between nodes where there are several.

    Args:
        sizes: bytes, ascending: of a message, or of what all workers have after an all_gather.
    """
    pair = (0, config.workers_per_node if config.workers_per_node < comm.size else 1)
    cases = list[ProbeCase]()
    for kind in KINDS:
        for size in sizes:
            case = make_probe_case(comm, kind, size, pair, device)
            cases.append(case)
            time_case_s(case, comm, device)  # connections are made, and memory is mapped
            if time_case_s(case, comm, device) > MAX_DURATION_S:
                break
    samples = [list[float]() for _ in cases]
    order = random.Random(0)  # the same for all workers
    for _ in range(repeats):
        for index in order.sample(range(len(cases)), len(cases)):
            samples[index].append(time_case_s(cases[index], comm, device))
    comm.barrier()
    return [
        {"message": case.kind, "size": case.requested_bytes, **case.cost._asdict(), "seconds": seconds}
        for case, seconds in zip(cases, samples, strict=True)
    ]


def make_probe_case(
    comm: Comm, kind: str, message_bytes: int, pair: tuple[int, int], device: torch.device
) -> ProbeCase:
    """Return one kind of message or collective at one size."""
    if kind != PING_PONG:
        case = ProbeCase.create(comm, kind, message_bytes // comm.size, pair, device)
        return case._replace(requested_bytes=message_bytes)
    data = torch.zeros(message_bytes // 4, device=device)
    send = partial(ping_pong, comm, data, data, [pair])
    return ProbeCase(kind, message_bytes, send, CollectiveCost(2, 2 * data.nbytes), data.nbytes)


def time_case_s(case: ProbeCase, comm: Comm, device: torch.device) -> float:
    """Return the mean seconds of one repetition, which all workers begin together."""
    comm.barrier()
    synchronise_if_cuda(device)
    start_s = time.perf_counter()
    case.run()
    synchronise_if_cuda(device)
    duration_s = time.perf_counter() - start_s
    # A ping-pong's other worker is done once it has answered.
    durations_s = gather_json(comm, duration_s if case.kind != PING_PONG or comm.rank == 0 else None, device)
    return statistics.fmean(duration_s for duration_s in durations_s if duration_s is not None)


class LinkFit(NamedTuple):
    """A fit of seconds = alpha x messages + beta x bytes."""

    alpha_s: Estimate
    beta_s_per_byte: Estimate
    residuals: list[float]  # fitted / measured - 1 of each size, in their order

    def to_json_record(self) -> Record:
        """Return the numbers, each with the ends of its interval, and the residuals, for JSON."""
        return self._asdict() | {"alpha_s": self.alpha_s[:3], "beta_s_per_byte": self.beta_s_per_byte[:3]}


def fit_link(costs: Sequence[CollectiveCost], samples: Sequence[Sequence[float]]) -> LinkFit:
    """Fit the median seconds of each cost; repetitions are resampled for the intervals."""
    medians = np.array([np.median(seconds) for seconds in samples])
    alpha, beta = fit_alpha_beta(costs, medians)
    rng = np.random.default_rng(0)
    resampled_medians = np.array([
        np.median(rng.choice(seconds, (NUM_RESAMPLES, len(seconds))), axis=1) for seconds in samples
    ])  # fmt: skip
    resampled_fits = [fit_alpha_beta(costs, seconds) for seconds in resampled_medians.T]
    low, high = np.quantile(resampled_fits, (0.025, 0.975), axis=0).tolist()
    predictions = np.array([Link(alpha, beta).transfer_seconds(cost) for cost in costs])
    return LinkFit(
        Estimate(alpha, low[0], high[0]),
        Estimate(beta, low[1], high[1]),
        (predictions / medians - 1).tolist(),
    )


def fit_each_kind_and_joint(rows: Sequence[Record]) -> dict[str, LinkFit]:
    """Return a fit for each kind of message, and one for all of them together."""
    fits = dict[str, LinkFit]()
    for kind in (*dict.fromkeys(row["message"] for row in rows), JOINT):
        kind_rows = [row for row in rows if kind in (row["message"], JOINT)]
        costs = [CollectiveCost(row["messages"], row["sent_bytes"]) for row in kind_rows]
        fits[kind] = fit_link(costs, [row["seconds"] for row in kind_rows])
    return fits


def format_fits(fit_by_kind: Mapping[str, LinkFit]) -> str:
    """Return alpha, bandwidth and the errors of each fit, as Markdown."""
    rows = list[Record]()
    for kind, fit in fit_by_kind.items():
        bandwidth, low, high = (8e-9 / beta if beta else math.inf for beta in fit.beta_s_per_byte[:3])
        errors = sorted(100 * abs(residual) for residual in fit.residuals)
        rows.append({
            "message": kind,
            "alpha": fit.alpha_s.scale_by(1e6),
            "bandwidth": Estimate(bandwidth, high, low),
            "median error": errors[len(errors) // 2],
            "largest error": errors[-1],
        })  # fmt: skip
    units = {"alpha": "us", "bandwidth": "Gbit/s", "median error": "%", "largest error": "%"}
    return Table.from_rows("", rows, units).to_markdown()


def format_residuals(rows: Sequence[Record]) -> str:
    """Return the median of each size, and how far both fits are from it, as Markdown."""
    fits = fit_each_kind_and_joint(rows)
    joint_errors = fits.pop(JOINT).residuals
    kind_errors = chain.from_iterable(
        fit.residuals for fit in fits.values()
    )  # rows of a kind follow each other
    cells = [
        {
            "message": row["message"],
            "size": row["size"],
            "median": 1e3 * statistics.median(row["seconds"]),
            "error of its own fit": 100 * kind_error,
            "error of the joint fit": 100 * joint_error,
        }
        for row, kind_error, joint_error in zip(rows, kind_errors, joint_errors, strict=True)
    ]
    units = {"size": "bytes", "median": "ms", "error of its own fit": "%", "error of the joint fit": "%"}
    return Table.from_rows("", cells, units).to_markdown()


def write_link_file(name: str, fit: LinkFit, place: str) -> Path:
    """Write a link file for conf/local/link, and return its path."""
    alpha = fit.alpha_s
    beta = fit.beta_s_per_byte
    path = LINK_FOLDER / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"""\
# @package cluster.link
# Measured {utc_timestamp()[:10]} by `make bench BENCH=link`: {place}.
# 95 % intervals: alpha {alpha.low:.3g} to {alpha.high:.3g} s, beta {beta.low:.3g} to {beta.high:.3g} s.
alpha_s: {alpha.value:.4e}
beta_s_per_byte: {beta.value:.4e}
"""
    write_atomic(path, text)
    return path


if __name__ == "__main__":
    sys.exit(run_local_worker(Path(sys.argv[1]), Path(sys.argv[2])))
