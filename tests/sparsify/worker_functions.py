"""Module-level functions over a communicator, which worker processes and virtual ranks of the tests run.

As a program, `python -m tests.sparsify.worker_functions MODULE:FUNCTION RANK SIZE FOLDER [horovod]`, it is
one process of a group, over gloo or Horovod.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore

from experiments.launch import fork_server
from experiments.launch.fork_server import ForkedWorker
from slurm import environment
from slurm.emulated import switch
from slurm.emulated.network import EmulatedNetwork
from sparsify import build
from sparsify.comm import Comm, InstrumentedComm, WorkerLost
from sparsify.comm.direct import DirectComm
from sparsify.comm.torch import TorchComm
from sparsify.core.timer import PhaseTimer
from sparsify.methods import per_step_names
from sparsify.wrappers.aggregator import Aggregator
from tests.conftest import ROOT, there
from tests.sparsify import laws
from tests.sparsify.laws import SHAPES
from tests.sparsify.memory import memory_of_methods as memory_of_methods

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk": {"density": 0.01},
    "topk layer": {"density": 0.01, "scope": "layer"},
    "randomk": {"density": 0.01},
    "randomk feedback": {"density": 0.01, "feedback": "gradient"},
}
QUICK = {"lr": 0.05}  # of the digits' task
LATE_S, STEPS = 0.4, 3  # long beside what a busy machine may delay
TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64,
)  # fmt: skip


def weights_after_20_steps(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Flat final weights by method, trained in float64 on the digits."""
    from tests.training.digits import trainer, weights

    torch.set_num_threads(1)
    found = {}
    for name, hyperparameters in METHODS.items():
        method, timer = build(name.partition(" ")[0], **hyperparameters), PhaseTimer("serialised", now)
        found[name] = weights(trainer(comm, timer, method, task=QUICK, steps=20, dtype=torch.float64))
    return found


class Noting:
    """A communicator that notes whether sums were left to the library."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.reduced = comm, False

    def __getattr__(self, name: str) -> Any:
        self.reduced |= name == "all_reduce"
        return getattr(self.comm, name)


def updates_of_every_method(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return the updates of eight steps, in float64, by method; and by method whether it used allreduce."""
    torch.set_num_threads(1)
    found = {}
    for name in per_step_names():
        noting = Noting(comm)
        parameters = [(f"p{i}", nn.Parameter(torch.zeros(shape).double())) for i, shape in enumerate(SHAPES)]
        aggregator = Aggregator(laws.build(name), parameters, noting, seed=3)
        updates = []
        for step in range(8):
            for _, p in parameters:
                there(p.grad).copy_(laws.gradient(comm.rank, step, tuple(p.shape)))
            aggregator.aggregate()
            updates.append(aggregator.gradients.flat.clone())
        found[name] = torch.stack(updates)
        found[f"{name} reduced"] = torch.tensor(noting.reduced)
    return found


def late_and_wait(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Median seconds of a step's phases `late` and `wait` where rank 1 is late on purpose by 40 ms."""
    from experiments.training.settings import LatenessSettings
    from tests.training.digits import Lines, trainer

    torch.set_num_threads(1)
    log, late = Lines(), LatenessSettings("constant", 0.04, rank=1)
    timer, method = PhaseTimer("serialised", now), build("topk", density=0.1)
    trainer(comm, timer, method, log, steps=9, late=late).run()
    return {name: torch.tensor(log.seconds(name)).median() for name in ("late", "wait")}


def one_late_rank(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Median wait and transfer of steps in which rank 1 comes late by LATE_S, by timing mode."""
    found = {}
    for mode in ("serialised", "production"):
        timer = PhaseTimer(mode, now)
        metered = InstrumentedComm(comm, timer)
        for _ in range(STEPS):
            comm.barrier()
            with timer.step():
                if comm.rank == 1:
                    time.sleep(LATE_S)
                metered.all_gather(torch.zeros(1000))
        samples = timer.finish_window_and_split_waits(
            lambda mine: [
                theirs.tolist() for theirs in comm.all_gather(torch.tensor(mine, dtype=torch.float64))
            ]
        )
        phases = [[sample.phases["wait"], sample.phases["transfer"]] for sample in samples]
        found[mode] = torch.tensor(phases).median(dim=0).values
    return found


def every_collective(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return what each collective returns, by type of element; three workers."""
    found = dict[str, torch.Tensor]()
    for dtype in TYPES:
        mine = torch.tensor([[0, 1], [comm.rank, 2]]).to(dtype)
        both = comm.all_gather_several([mine, torch.tensor(comm.rank)])
        assert [int(number) for number in both[1]] == [*range(comm.size)]
        # To each other worker as many as its rank says.
        pieces = comm.all_to_all(torch.arange(6).to(dtype), [1, 2, 3], [comm.rank + 1] * comm.size)
        moved = comm.permute(mine, [(0, 1), (1, 2)])
        results = {
            "sum": comm.all_reduce(mine.clone()),
            "begun sum": comm.begin_all_reduce(mine.t().clone().t())(),  # not contiguous
            "gathered": torch.stack(comm.all_gather(mine)),
            "gathered beside another": torch.stack(both[0]),
            "broadcast": sent_by(comm, mine.clone(), 2),
            "pieces": torch.cat(pieces),
            "permuted": torch.zeros(0) if moved is None else moved,
        }
        found |= prefixed(str(dtype), {name: value.double() for name, value in results.items()})
    found["nothing to all"] = torch.cat(comm.all_to_all(torch.zeros(0), [0, 0, 0], [0, 0, 0]))
    found["no elements"] = torch.stack(comm.all_gather(torch.zeros(0, 2)))
    found["one number"] = torch.stack(comm.all_gather(torch.tensor(comm.rank)))
    return found


def sent_by(comm: Comm, tensor: torch.Tensor, root: int) -> torch.Tensor:
    comm.broadcast(tensor, root)
    return tensor


def directly(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return results of collectives that are sent to everybody at once, and of a dense step by them."""
    direct, drawn = DirectComm(comm), torch.Generator().manual_seed(comm.rank)
    mine, p = torch.randn(5, 3, generator=drawn), nn.Parameter(torch.zeros(7))
    found = {"sum": direct.all_reduce(mine.clone())}
    found |= {f"of {rank}": theirs for rank, theirs in enumerate(direct.all_gather(mine))}
    aggregator = Aggregator(build("dense"), [("p", p)], direct)
    (p * torch.randn(7, generator=drawn)).sum().backward()
    aggregator.aggregate()
    assert p.grad is not None
    return {**found, "average": p.grad.clone()}


def words_of_votes(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return the result of each vote, with other collectives between them."""
    heard = []
    for step in range(5):
        heard.append(comm.lagged_max(2 if step == comm.rank + 1 else 0))
        comm.all_reduce(torch.ones(3))
    return {"heard": torch.tensor(heard)}


MEMORIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # (3, 4) elements, lying differently
    "gaps": lambda x: torch.zeros(3, 8)[:, ::2].copy_(x),
    "transposed": lambda x: torch.zeros(4, 3).t().copy_(x),
    "expanded": lambda x: x[:, :1].clone().expand(3, 4),
    "one number": lambda x: x[:1, :1].clone().expand(3, 4),
    "complex": lambda x: torch.complex(x, -x),
}


def any_memory(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return results of collectives over tensors whose memory is not one run of elements."""
    found = dict[str, torch.Tensor]()
    for memory, laid_out in MEMORIES.items():
        mine = torch.arange(12.0).view(3, 4) + 100 * comm.rank
        moved = comm.permute(laid_out(mine), [(0, 1)])
        results = {
            "sum": comm.all_reduce(laid_out(mine)).clone(),
            "begun sum": comm.begin_all_reduce(laid_out(mine))().clone(),
            "gathered": torch.stack(comm.all_gather(laid_out(mine))),
            "broadcast": sent_by(comm, laid_out(mine), comm.size - 1).clone(),
            "permuted": torch.zeros(0) if moved is None else moved,
        }
        found |= prefixed(memory, results)
    return found


def groups_and_errors(comm: TorchComm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return results over gloo of the group of all and of a group of ranks 1 and 2, and of votes.

    Also return which errors are taken for the loss of a worker.
    """
    found: dict[str, torch.Tensor] = {}
    some = cast(dist.ProcessGroup, dist.new_group([1, 2]))  # for others it is a number
    if comm.rank:
        part = TorchComm(some)
        found |= prefixed("part", any_memory(part, now))
        part.close()
    else:
        found["outside"] = torch.tensor("ValueError" in words_of(lambda: TorchComm(some)))
    of_all = any_memory(comm, now) | words_of_votes(comm, now)  # the group of all is still there
    found |= prefixed("all", of_all)
    comm._gathers_into_single = False  # as over a backend that knows lists only
    found |= prefixed("listed", any_memory(comm, now))
    errors = {
        "type": lambda: comm.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn)),
        "pieces": lambda: comm.all_to_all(torch.zeros(3), [1, 1, 1], [1, 1]),
        "root": lambda: comm.broadcast(torch.zeros(2), 7),
        "layout": lambda: comm.broadcast(torch.ones(2).to_sparse()),
    }
    for name, error in errors.items():
        found[f"lost {name}"] = torch.tensor(words_of(error).startswith(("nothing", "WorkerLost")))
    return found


def words_of(act: Callable[[], object]) -> str:
    """Return the kind and the words of the error in which it ends."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def prefixed(prefix: str, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix} {name}": value for name, value in found.items()}


def methods_collectives_and_votes(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """All of these by the same processes, which take seconds to start."""
    return (
        updates_of_every_method(comm, now)
        | every_collective(comm, now)
        | any_memory(comm, now)
        | words_of_votes(comm, now)
    )


def over_horovod(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Return the same, and `any_memory` in a process set of ranks 1 and 2."""
    import horovod.torch as hvd

    from sparsify.comm.horovod import HorovodComm

    found, some = methods_collectives_and_votes(comm, now), hvd.add_process_set([1, 2])
    if comm.rank:
        found |= prefixed("part", any_memory(HorovodComm(process_set=some), now))
    else:
        found["outside"] = torch.tensor("ValueError" in words_of(lambda: HorovodComm(process_set=some)))
    return found


def loss_of_a_worker(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Let rank 1 die; return whether the error on the others was the right one."""
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    try:
        for _ in range(100):
            comm.all_gather(torch.zeros(3))
    except WorkerLost as error:
        right = str(error) == f"worker {comm.rank} of {comm.size} lost the others during all_gather"
        torch.save({"right": torch.tensor(right)}, Path(sys.argv[4]) / f"{comm.rank}.pt")
    os._exit(0)  # a group without rank 1 can't be closed


def _weights(model: nn.Module) -> torch.Tensor:
    parts = [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]  # of DTensors, too
    return torch.cat([part.flatten() for part in parts])


def readme_diffs(comm: Comm, now: Callable[[], float]) -> dict[str, torch.Tensor]:
    """Run the diffs of the README and of docs/own-training.md, before and after.

    Return this worker's final loss, and whether all weights agree.
    """
    torch.set_num_threads(1)
    root = Path(__file__).parent.parent.parent
    own = torch.Generator().manual_seed(comm.rank)
    labels = torch.arange(60) % 3
    inputs = torch.randn(60, 8, generator=own)
    inputs[torch.arange(60), labels] += 3
    found = {"untrained": torch.tensor([_loss(nn.Linear(8, 3), inputs, labels)])}
    diffs = [
        (page, diff)
        for page in ("README.md", "docs/own-training.md")
        for diff in re.findall(r"```diff\n(.*?)```", (root / page).read_text(), flags=re.DOTALL)
    ]
    for page, diff in diffs:
        for when, mark in (("before", "-"), ("after", "+")):
            lines = [line[1:] for line in diff.splitlines() if line[:1] in (mark, " ", "")]
            names: dict[str, Any] = {}
            exec("\n".join(lines).replace("density=0.01", "density=0.25"), names)  # 27 parameters
            (name,) = (word for word in names if word.startswith("train"))
            model = nn.Linear(8, 3)
            torch.nn.init.constant_(model.weight, 0.1 * comm.rank)
            names[name](model, [(inputs, labels)] * 60)
            both = comm.all_gather(_weights(model))
            together = float(torch.equal(both[0], both[1]))
            found[f"{page} {name} {when}"] = torch.tensor([_loss(model, inputs, labels), together])
    return found


def _loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    return nn.functional.cross_entropy(model(inputs), labels).item()


def on_processes(
    body: Callable[..., object],
    size: int,
    folder: Path,
    comm: str = "torch",
    forks: bool = True,
    nodes: EmulatedNetwork | None = None,
) -> list[dict[str, Any]]:
    """Run a function of a module as `size` processes, over gloo or Horovod.

    Args:
        forks: they begin from one that has loaded torch; not over Horovod, nor on nodes.
        nodes: each process is on its own one of these.

    Returns:
        What each returned: tensors, numbers, text, and containers of these; nothing of one that was lost.
    """
    # Shorter cycles than the millisecond of each negotiation of Horovod's: these tests make thousands.
    calm = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_CYCLE_TIME": "0.1"}
    calm["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    surroundings = {**os.environ, **calm} | ({"GLOO_SOCKET_IFNAME": switch.INTERFACE} if nodes else {})
    name = f"{body.__module__}:{body.__name__}"
    processes: list[Any] = []
    for rank in range(size):
        orders = (name, rank, size, str(folder), comm)
        if forks and comm == "torch" and not nodes:
            processes.append(_forked(surroundings, orders))
        else:
            processes.append(_of_its_own(surroundings, orders, nodes.nsenter_command(rank) if nodes else []))
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    paths = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path, weights_only=True) if path.exists() else {} for path in paths]


def _of_its_own(
    surroundings: Mapping[str, str], orders: Sequence[object], enter: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [*enter, sys.executable, "-m", "tests.sparsify.worker_functions", *map(str, orders)]
    return subprocess.Popen(command, cwd=ROOT, env=surroundings)


def _forked(surroundings: Mapping[str, str], orders: Sequence[object]) -> ForkedWorker:
    process = fork_server.ensure_fork_server(threads=1).Process(target=_work, args=(surroundings, orders))
    process.start()
    return ForkedWorker(process)


def _work(surroundings: Mapping[str, str], orders: tuple[str, int, int, str, str]) -> None:
    os.environ.clear()
    os.environ.update(surroundings)
    sys.argv[1:] = map(str, orders)
    main(*orders)


def main(body: str, rank: int, size: int, at: str, kind: str = "torch") -> None:
    folder, comm = Path(at), cast(Any, None)
    if kind == "horovod":
        from sparsify.comm.horovod import HorovodComm

        store = FileStore(str(folder / "rendezvous"), size)
        tell, patience = environment.set_horovod_variables, timedelta(minutes=1)
        cpu = torch.device("cpu")
        comm = HorovodComm.join_at_store(store, "127.0.0.1", rank, size, "here", "lo", tell, cpu, patience)
    else:
        comm = TorchComm.join(f"file://{folder / 'rendezvous'}", rank, size, torch.device("cpu"))
    module, _, name = body.partition(":")
    found = getattr(importlib.import_module(module), name)(comm, time.perf_counter)
    torch.save(found, folder / f"{rank}.pt")
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
