"""Training sharded models in other people's trainers, with the recipes of docs/trainers.md and without.

As a program, `python -m tests.sparsify.wrappers.sharded.uses_trainers_sharded TRAINER FOLDER`, it starts the
workers as torchrun does, but from a process that has loaded the trainer already, in the surroundings that the
test gives it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import sparsify as sparsify  # the methods' texts name it
from tests.sparsify.wrappers.sharded.uses_sharded import NAMES
from tests.sparsify.wrappers.uses_trainers import BATCH, EPOCHS, Remembering, Use, examples, loader, recipe

REPLICAS, SHARDS, MAX_NORM = 2, 2, 0.5
DENSE, SPARSE = "sparsify.dense()", 'sparsify.build("topk", density=0.2, scope="bucket")'


METHODS = {"alone": None, "dense": DENSE, "sparse": SPARSE, "sparse, resumed": SPARSE}  # None: no method


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def in_accelerate(net: Remembering, method: str | None, folder: Path, is_resumed: bool) -> nn.Module:
    accelerate: Any = importlib.import_module("accelerate")
    sharding(accelerate)
    own = accelerate.Accelerator(
        fsdp_plugin=plugin(accelerate),
        parallelism_config=accelerate.ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
    )
    batches, optimizer = loader(), optimizer_of(net)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trained: nn.Module = recipe("Accelerate, sharded", method)["train"](
        own, net, optimizer, schedule, batches, folder, int(is_resumed)
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


def in_lightning(net: Remembering, method: str | None, folder: Path, is_resumed: bool) -> nn.Module:
    lightning: Any = importlib.import_module("lightning.pytorch")
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def configure_model(self) -> None:
            if not hasattr(self.net.layers[0].weight, "device_mesh"):
                mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=NAMES)
                for layer in (self.net.layers[0], self.net.layers[2]):
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: dict[str, Tensor], at: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    kept = lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    own = recipe("Lightning, sharded", method)["Sparsify"]
    callbacks = [kept, *([own(eval(method))] if method else [])]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=REPLICAS * SHARDS, max_epochs=EPOCHS, logger=False,
        strategy=strategies.ModelParallelStrategy(REPLICAS * SHARDS, tensor_parallel_size=1),
        callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    first = str(folder / "epoch=0.ckpt") if is_resumed else None
    trainer.fit(Module(), loader(), ckpt_path=first)
    return net


def in_transformers(net: Remembering, method: str | None, folder: Path, is_resumed: bool) -> nn.Module:
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
    trainer = transformers.Trainer(net, settings, train_dataset=examples())
    if method:
        trainer.add_callback(recipe("Transformers, sharded", method)["Sparsify"](trainer, eval(method)))
    first = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[:1]
    trainer.train(resume_from_checkpoint=str(first[0]) if is_resumed else None)
    return cast(nn.Module, trainer.model_wrapped)


Trainer = Callable[[Remembering, str | None, Path, bool], nn.Module]
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
    os.environ["MASTER_PORT"] = str(get_free_port())
    start_processes(work, (trainer, folder), nprocs=REPLICAS * SHARDS, start_method="fork")


def work(rank: int, trainer: str, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    found: dict[str, Tensor] = {}
    for name, method in METHODS.items():
        is_resumed = name.endswith("resumed")
        net = Remembering(Use(), seed=int(is_resumed))
        trained = TRAINERS[trainer](net, method, folder / name.split(",")[0], is_resumed)
        whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in trained.parameters()]
        found[name] = nn.utils.parameters_to_vector(whole)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
