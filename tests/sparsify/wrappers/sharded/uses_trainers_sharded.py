"""Training sharded models in other people's trainers, with the recipes of docs/trainers.md and without.

As a program, `python -m tests.sparsify.wrappers.sharded.uses_trainers_sharded TRAINER FOLDER`, it starts the
workers as torchrun does, but from a process that has loaded the trainer already.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader

import sparsify
from sparsify.wrappers.sharded.hook import ShardHook
from tests.conftest import ROOT
from tests.sparsify.wrappers.sharded.uses_sharded import NAMES
from tests.sparsify.wrappers.uses_trainers import BATCH, EPOCHS, Examples

REPLICAS, SHARDS, MAX_NORM = 2, 2, 0.5
ON_THE_PAGE = 'sparsify.build("topk", density=0.01, scope="bucket")'
DENSE, SPARSE = "sparsify.dense()", 'sparsify.build("topk", density=0.2, scope="bucket")'


class Net(nn.Module):
    """A network of two units, with its optimizer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
            self.output = nn.Linear(16, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden).tanh()
        scores = self.output(hidden)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


class Way(NamedTuple):
    """How it is trained."""

    method: str | None  # None: by the trainer alone
    is_resumed: bool = False


WAYS = {
    "alone": Way(None),
    "dense": Way(DENSE),
    "sparse": Way(SPARSE),
    "sparse, resumed": Way(SPARSE, is_resumed=True),
}


def recipe(trainer: str, way: Way) -> dict[str, Any]:
    """What the page's blocks for this trainer define; without a method, what its lines would be without."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    (section,) = re.findall(rf"^### {trainer}\n(.*?)^##", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(diff|python)\n(.*?)```", section, flags=re.DOTALL):
        lines = block.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if way.method or line[:1] != "+"]
        exec("\n".join(lines).replace(ON_THE_PAGE, way.method or ""), names)
    return names


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def in_accelerate(net: Net, way: Way, folder: Path) -> nn.Module:
    accelerate: Any = importlib.import_module("accelerate")
    sharding(accelerate)
    own = accelerate.Accelerator(
        fsdp_plugin=plugin(accelerate),
        parallelism_config=accelerate.ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
    )
    batches, optimizer = DataLoader(Examples(), BATCH), optimizer_of(net)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trained: nn.Module = recipe("Accelerate, sharded", way)["train"](
        own, net, optimizer, schedule, batches, folder, int(way.is_resumed)
    )
    return trained


def plugin(accelerate: Any) -> Any:
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip


def sharding(accelerate: Any) -> None:
    """Accelerate shards on GPUs and their kin only: here it takes CPUs for such."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    state = accelerate.PartialState(cpu=True)
    state.distributed_type = accelerate.DistributedType.MULTI_XPU


def in_lightning(net: Net, way: Way, folder: Path) -> nn.Module:
    lightning: Any = importlib.import_module("lightning.pytorch")
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def configure_model(self) -> None:
            if not hasattr(self.net.output.weight, "device_mesh"):
                mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=NAMES)
                for block in self.net.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: dict[str, Tensor], at: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    kept = lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    own = recipe("Lightning, sharded", way)["Sparsify"]
    callbacks = [kept, *([own(eval(way.method))] if way.method else [])]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=REPLICAS * SHARDS, max_epochs=EPOCHS, logger=False,
        strategy=strategies.ModelParallelStrategy(REPLICAS * SHARDS, tensor_parallel_size=1),
        callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    first = str(folder / "epoch=0.ckpt") if way.is_resumed else None
    trainer.fit(Module(), DataLoader(Examples(), BATCH), ckpt_path=first)
    return net


def in_transformers(net: Net, way: Way, folder: Path) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    accelerate: Any = importlib.import_module("accelerate")
    settings = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        max_grad_norm=MAX_NORM, learning_rate=0.01, save_strategy="epoch", logging_strategy="no",
        disable_tqdm=True, report_to=[],
        fsdp=True, fsdp_config={
            "version": 2, "transformer_layer_cls_to_wrap": ["Linear"], "cpu_ram_efficient_loading": False,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        parallelism_config=accelerate.ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
    )  # fmt: skip
    sharding(accelerate)  # after these, which begin anew
    trainer = transformers.Trainer(net, settings, train_dataset=Examples())
    if way.method:
        trainer.add_callback(recipe("Transformers, sharded", way)["Sparsify"](trainer, eval(way.method)))
    first = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[:1]
    trainer.train(resume_from_checkpoint=str(first[0]) if way.is_resumed else None)
    return cast(nn.Module, trainer.model_wrapped)


Trainer = Callable[[Net, Way, Path], nn.Module]
PACKAGES = {
    "accelerate": ["accelerate.utils"], "transformers": ["accelerate.utils", "transformers.trainer"],
    "lightning": ["lightning.pytorch.strategies"],
}  # fmt: skip
TRAINERS: dict[str, Trainer] = {
    "accelerate": in_accelerate, "transformers": in_transformers, "lightning": in_lightning,
}  # fmt: skip


def main(trainer: str, folder: Path) -> None:
    for package in PACKAGES[trainer]:
        importlib.import_module(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(work, (trainer, folder, port), nprocs=REPLICAS * SHARDS, start_method="fork")


def work(rank: int, trainer: str, folder: Path, port: int) -> None:
    size = REPLICAS * SHARDS
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}
    torch.set_num_threads(1)
    hooks, shard = list[ShardHook](), sparsify.shard
    found: dict[str, Any] = {}

    def noted(*parts: Any, **choices: Any) -> ShardHook:
        hooks.append(shard(*parts, **choices))
        return hooks[-1]

    with patch.object(sparsify, "shard", noted):
        for name, way in WAYS.items():
            net = Net(seed=int(way.is_resumed))
            trained = TRAINERS[trainer](net, way, folder / name.split(",")[0])
            whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in trained.parameters()]
            found[name] = {"weights": nn.utils.parameters_to_vector(whole)}
            if way.method:
                hook = hooks.pop()
                found[name] |= {"steps": hook.steps, "report": tuple(cast(Any, hook.last_report))}
            assert not hooks
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
