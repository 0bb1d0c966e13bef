"""Training in other people's trainers with the recipes of docs/trainers.md, and the same in a plain loop.

As a program, `torchrun -m tests.sparsify.wrappers.uses_trainers TRAINER FOLDER`, it is one of the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import sparsify
from sparsify.wrappers.ddp import DDPHook
from tests.conftest import ROOT, there

EPOCHS, BATCH, EXAMPLES = 2, 4, 64  # eight batches an epoch for each of two workers
MAX_NORM, FIRST_SCALE = 0.1, 2.0**20  # with this scale gradients overflow at first
ON_THE_PAGE = r'sparsify\.build\("topk", density=0\.01.*?\)'
RESUMED, LOOP, OF_THREE = ", resumed", ", in a plain loop", "resumed after three workers"


class Use(NamedTuple):
    """Settings of a training."""

    method: str = 'sparsify.build("topk", density=0.2)'
    momentum: float = 0.9  # of the optimizer
    accumulated: int = 1  # backward passes a step
    max_norm: float = 1e9
    dtype: torch.dtype = torch.float32
    by_hand: bool = False  # Lightning's manual optimisation
    is_resumed: bool = False  # also from the checkpoint of the first epoch


PLAIN = Use('sparsify.build("dgc", density=0.2, momentum=0.9)', momentum=0.0)
ALL = Use(accumulated=2, max_norm=MAX_NORM, dtype=torch.bfloat16, is_resumed=True)
USES: dict[str, dict[str, Use]] = {
    "accelerate": {"plain": PLAIN, "all": ALL},
    "transformers": {"plain": PLAIN, "all": ALL},
    "lightning": {
        "plain": PLAIN, "all": ALL, "all, by hand": ALL._replace(by_hand=True),
        "overflowing": ALL._replace(dtype=torch.float16, is_resumed=False),
    },
}  # fmt: skip


def examples() -> list[dict[str, Tensor]]:
    """Return made-up inputs of three classes."""
    labels = torch.arange(EXAMPLES) % 3
    inputs = torch.randn(EXAMPLES, 8, generator=torch.Generator().manual_seed(0))
    inputs[torch.arange(EXAMPLES), labels] += 2
    return [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


def loader() -> Any:
    examples_of_any_kind: Any = examples()  # torch's annotation asks for a Dataset, and it takes a list
    return DataLoader(examples_of_any_kind, BATCH)


Seen = list[tuple[dict[str, Tensor], float]]


class Remembering(nn.Module):
    """A network with its optimizer, which remembers all batches of its training, and the rates then."""

    def __init__(self, use: Use, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.parameters(), lr=0.1, momentum=use.momentum
        )
        steps = EPOCHS * EXAMPLES // BATCH // use.accumulated  # of both workers: Accelerate counts so
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / steps)
        self.seen: Seen = []

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            batch = {"inputs": inputs.clone(), "labels": labels.clone()}
            self.seen.append((batch, self.optimizer.param_groups[0]["lr"]))
        scores = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def recipe(heading: str, method: str | None, max_norm: float = 1.0) -> dict[str, Any]:
    """Return what the page's blocks under a heading define; without a method, without its lines."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    (section,) = re.findall(rf"^#+ {heading}\n(.*?)^##", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(diff|python)\n(.*?)```", section, flags=re.DOTALL):
        lines = block.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if method or line[:1] != "+"]
        code = re.sub(ON_THE_PAGE, method or "", "\n".join(lines))
        exec(code.replace(" 1.0)", f" {max_norm})"), names)
    return names


def in_accelerate(net: Remembering, use: Use, folder: Path, is_resumed: bool) -> None:
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state()  # one for all, otherwise, with one precision
    precision = "bf16" if use.dtype is torch.bfloat16 else "no"
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=use.accumulated, mixed_precision=precision
    )
    batches, parts = loader(), (net, net.optimizer, net.schedule)
    recipe("Accelerate", use.method, use.max_norm)["train"](
        accelerator, *parts, batches, folder, int(is_resumed)
    )


def in_transformers(net: Remembering, use: Use, folder: Path, is_resumed: bool) -> None:
    transformers: Any = importlib.import_module("transformers")
    settings = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=use.accumulated, max_grad_norm=use.max_norm,
        bf16=use.dtype is torch.bfloat16, save_strategy="epoch", eval_strategy="epoch", logging_strategy="no",
        disable_tqdm=True, report_to=[],
    )  # fmt: skip
    parts = (net.optimizer, net.schedule)
    trainer = transformers.Trainer(
        net, settings, train_dataset=examples(), eval_dataset=examples(), optimizers=parts
    )
    trainer.add_callback(
        recipe("Transformers' Trainer", use.method, use.max_norm)["Sparsify"](trainer, eval(use.method))
    )
    first = folder / f"checkpoint-{EXAMPLES // BATCH // 2 // use.accumulated}"
    trainer.train(resume_from_checkpoint=str(first) if is_resumed else None)


def in_lightning(net: Remembering, use: Use, folder: Path, is_resumed: bool) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, not use.by_hand

        def training_step(self, batch: dict[str, Tensor], at: int) -> Any:
            loss = self.net(**batch)["loss"]
            if not use.by_hand:
                return loss
            is_last = at % use.accumulated == use.accumulated - 1
            with contextlib.nullcontext() if is_last else self.trainer.strategy.model.no_sync():
                self.manual_backward(loss / use.accumulated)
            if is_last:
                optimizer = self.optimizers()
                self.clip_gradients(optimizer, use.max_norm, "norm")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()

        def validation_step(self, batch: dict[str, Tensor], at: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> Any:
            return [net.optimizer], [{"scheduler": net.schedule, "interval": "step"}]

    automatic = {"accumulate_grad_batches": use.accumulated, "gradient_clip_val": use.max_norm}
    precision: dict[str, Any] = {"precision": "bf16-mixed" if use.dtype is torch.bfloat16 else "32-true"}
    if use.dtype is torch.float16:
        amp: Any = importlib.import_module("lightning.pytorch.plugins.precision")
        precision = {"plugins": amp.MixedPrecision("16-mixed", "cpu", scaler())}
    kept = lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    own = recipe("Lightning", use.method, use.max_norm)["Sparsify"]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, logger=False,
        callbacks=[own(eval(use.method)), kept], enable_progress_bar=False,
        enable_model_summary=False, **precision, **({} if use.by_hand else automatic),
    )  # fmt: skip
    batches = [loader() for _ in range(2)]
    trainer.fit(Module(), *batches, ckpt_path=str(folder / "epoch=0.ckpt") if is_resumed else None)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE)


def in_a_plain_loop(net: Remembering, use: Use, seen: Seen) -> None:
    """Step by step what a trainer did, with the batches and the rates that it had."""
    ddp, own = DistributedDataParallel(net), scaler() if use.dtype is torch.float16 else None
    sparsify.register(ddp, eval(use.method), net.optimizer, scaler=own)
    for at, (batch, lr) in enumerate(seen, 1):
        is_last = at % use.accumulated == 0
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            with torch.autocast("cpu", use.dtype, enabled=use.dtype is not torch.float32):
                loss = ddp(**batch)["loss"] / use.accumulated
            (own.scale(loss) if own else loss).backward()
        if not is_last:
            continue
        if own:
            own.unscale_(net.optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), use.max_norm)
        net.optimizer.param_groups[0]["lr"] = lr
        if own:
            own.step(net.optimizer)
            own.update()
        else:
            net.optimizer.step()
        net.optimizer.zero_grad()


TRAINERS = {"accelerate": in_accelerate, "transformers": in_transformers, "lightning": in_lightning}


def of_three_workers(checkpoint: Path) -> None:
    """Make Lightning's checkpoint, of two workers, one of three."""
    if dist.get_rank() == 0:
        saved = torch.load(checkpoint)
        torch.save({**saved, "sparsify": sparsify.redistribute(saved["sparsify"], 3)}, checkpoint)
    dist.barrier()


def end_process() -> None:
    """End the process without Python's finalization.

    A thread of Gloo's frees the tensor of the last collective, for which it needs the interpreter's lock.
    When Python finalizes at that moment, torch aborts the process (seen in 1 of 12 runs). The trainers keep
    the group alive in circles of references, so closing the group does not wait for that thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(trainer: str, folder: Path) -> None:
    torch.set_num_threads(1)
    train, hooks, register = TRAINERS[trainer], list[DDPHook](), sparsify.register

    def registered(*parts: Any, **choices: Any) -> DDPHook:
        hooks.append(register(*parts, **choices))
        return hooks[-1]

    found: dict[str, dict[str, Any]] = {}

    def lived(name: str, net: Remembering) -> None:
        hook = hooks.pop()
        assert not hooks
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        report = tuple(there(hook.last_report))
        found[name] = {"weights": weights, "steps": hook.steps, "report": report}

    with patch.object(sparsify, "register", registered):
        for name, use in USES[trainer].items():
            net, again, loop = Remembering(use), Remembering(use, seed=1), Remembering(use)
            train(net, use, folder / name, False)
            lived(name, net)
            found[name]["rates"] = torch.tensor([lr for _, lr in net.seen])
            if use.is_resumed:
                train(again, use, folder / name, True)
                lived(name + RESUMED, again)
            in_a_plain_loop(loop, use, net.seen)
            lived(name + LOOP, loop)
        if trainer == "lightning":
            of_three_workers(folder / "all" / "epoch=0.ckpt")
            train(again := Remembering(ALL), ALL, folder / "all", True)
            lived(OF_THREE, again)
    said = []
    for way in (Mock(), register):  # without and with the recipe
        net = Remembering(Use())
        net.optimizer = sparsify.distribute(net.optimizer, net, eval(Use().method))
        net.schedule = torch.optim.lr_scheduler.LambdaLR(net.optimizer, lambda step: 1.0)
        with patch.object(sparsify, "register", way):
            try:
                train(net, Use(), folder / "refused", False)
            except ValueError as error:
                said.append(str(error))
    found["averaged twice"] = {"said": said}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process()
