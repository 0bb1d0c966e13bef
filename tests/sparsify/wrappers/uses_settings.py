"""Trainings with each setting of DistributedDataParallel and of FSDP2, by torch alone and with methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sparsify
from sparsify.comm import Comm
from tests.sparsify import laws
from tests.sparsify.worker_functions import words_of
from tests.sparsify.wrappers.sharded import uses_sharded
from tests.sparsify.wrappers.sharded.uses_sharded import blocks, mesh_and_replicas, optimizer_of, sharded
from tests.sparsify.wrappers.test_refused import delay, reduce_by_python
from tests.sparsify.wrappers.user_acts import Heads, loss_of, loss_of_heads, mesh_of, seeded, whole

STEPS = uses_sharded.STEPS


def state_of(model: nn.Module) -> Tensor:
    """Return all parameters and buffers, whole, one after the other."""
    return torch.cat([whole(tensor).flatten().double() for tensor in (*model.parameters(), *model.buffers())])


# --- DistributedDataParallel


class Normed(nn.Module):
    """A model with buffers that each worker changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores


class DDPSetting(NamedTuple):
    """Options of DistributedDataParallel with which a training is to end where DDP's own does."""

    make_options: Callable[[], Mapping[str, Any]]
    kind: Callable[[], nn.Module] = Normed
    loss: Callable[[Any, int, int], Tensor] = loss_of


class Refusal(NamedTuple):
    """A refused setting, and a part of the sentence that refuses it."""

    act: Callable[..., object]
    sentence: str


def option(name: str, value: Any, **more: Any) -> DDPSetting:
    return DDPSetting(lambda: {name: value}, **more)


def refused(make: Callable[[nn.Module], DistributedDataParallel], sentence: str) -> Refusal:
    """Return a DDP that `register` refuses."""
    return Refusal(lambda: sparsify.register(make(seeded(Heads)), laws.build("topk", 0.1)), sentence)


def mix_precision(model: nn.Module) -> DistributedDataParallel:
    """Return a DDP as with mixed precision, which needs a GPU when it is made."""
    made: Any = DistributedDataParallel(model)
    made.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    ddp: DistributedDataParallel = made
    return ddp


ONE_DEVICE = "cannot matter: it names devices of inputs and outputs, and DDP averages the same gradients"
DDP_SETTINGS: dict[str, DDPSetting | Refusal | str] = {
    "module": "cannot matter: it is the model",
    "device_ids": ONE_DEVICE,
    "output_device": ONE_DEVICE,
    "dim": ONE_DEVICE,
    "broadcast_buffers": option("broadcast_buffers", False),
    "forward_sync_buffers": option("forward_sync_buffers", False),
    "init_sync": option("init_sync", False),
    "process_group": DDPSetting(lambda: {"process_group": dist.new_group()}),
    "device_mesh": DDPSetting(lambda: {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}),
    "bucket_cap_mb": option("bucket_cap_mb", 0.0001),
    "bucket_cap_mb_list": option("bucket_cap_mb_list", [0.0001, 0.001, 0.0002]),
    "find_unused_parameters": option("find_unused_parameters", True, kind=Heads, loss=loss_of_heads),
    "check_reduction": "cannot matter: torch ignores it",
    "gradient_as_bucket_view": option("gradient_as_bucket_view", True),
    "static_graph": option("static_graph", True, kind=Heads),
    "batched_grad_copy": option("batched_grad_copy", True),
    "delay_all_reduce_named_params": refused(delay, "DDP averages delay_all_reduce_named_params in a hook"),
    "param_to_hook_all_reduce": refused(delay, "DDP averages delay_all_reduce_named_params in a hook"),
    "mixed_precision": refused(mix_precision, "DDP's mixed_precision averages with a hook of its own"),
    "skip_all_reduce_unused_params": refused(
        partial(DistributedDataParallel, find_unused_parameters=True, skip_all_reduce_unused_params=True),
        "with skip_all_reduce_unused_params DDP hands over other buckets in each step",
    ),
    'optimize_ddp="python_reducer"': refused(
        reduce_by_python, 'optimize_ddp="python_reducer" lets DDP average each parameter by itself'
    ),
}


def end_under_ddp(
    setting: DDPSetting, options: Mapping[str, Any], method: Any = None, overlap: bool = False
) -> Tensor:
    """Return where a training ends with a method, or by DDP alone; its last step has two backward passes."""
    model: Any = seeded(setting.kind)
    called = DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if method is not None:
        sparsify.register(called, method, optimizer, overlap=overlap)
    rank = dist.get_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == STEPS - 1:
            with called.no_sync():
                setting.loss(called, rank, 10).backward()
        setting.loss(called, rank, step).backward()
        optimizer.step()
    return state_of(model)


def ddp_ends(name: str) -> dict[str, Tensor] | str:
    """Return where trainings with a setting of DDP end; or what was told of one that is refused."""
    setting = DDP_SETTINGS[name]
    assert not isinstance(setting, str)
    if isinstance(setting, Refusal):
        return words_of(setting.act)
    options = dict(setting.make_options())
    end = partial(end_under_ddp, setting, options)
    found = {"torch": end(), "dense": end(sparsify.dense())}
    whole_topk = laws.build("topk", 1.0, "layer")
    sparse = laws.build("topk", 0.2, "layer")
    found["topk of all"] = end(whole_topk)
    found["topk of all, overlapped"] = end(whole_topk, overlap=True)
    found["sparse"] = end(sparse)
    found["sparse, overlapped"] = end(sparse, overlap=True)
    # Other settings change no gradient.
    kept: dict[str, Any] = {
        key: options[key] for key in ("broadcast_buffers", "forward_sync_buffers") if key in options
    }
    if setting.kind is Heads:
        kept["find_unused_parameters"] = True
    found["sparse without the setting"] = end_under_ddp(setting, kept, sparse)
    return found


# --- FSDP2

Change = Callable[[Any], object]
Train = Callable[[Any, Any], object]


def on_units(name: str, *values: Any) -> Change:
    """Return a function that calls a method of each unit of a model."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, name)(*values)

    return change


def on_model(name: str, *values: Any) -> Change:
    """Return a function that calls a method of a model."""
    return lambda model: getattr(model, name)(*values)


def leave_nothing(model: nn.Module) -> None: ...


class ShardSetting(NamedTuple):
    """A change of a sharded model with which a training is to end where HSDP's own does."""

    change: Change = leave_nothing
    train: Train = uses_sharded.plainly
    sparse_like: Train = uses_sharded.plainly  # by which a sparse training without the change ends alike
    skipped: int | None = None  # a block that is not used


def in_two_passes(name: str, before: Any, last: Any, model: Any, optimizer: Any) -> None:
    """Run two backward passes a step, each with a value of a setting."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, value in enumerate((before, last)):
            getattr(model, name)(value)
            uses_sharded.loss_of(model, dist.get_rank(), step, part).backward()
        optimizer.step()


def in_one_pass(model: Any, optimizer: Any) -> None:
    """Run one backward pass a step, of the losses that `in_two_passes` has."""
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = (uses_sharded.loss_of(model, dist.get_rank(), step, part) for part in range(2))
        (first + second).backward()
        optimizer.step()


def train_with_factors(is_setting: bool, model: Any, optimizer: Any) -> None:
    """Divide each step's sum by another number: by the setting, or in the loss."""
    workers = dist.get_world_size()
    for step, factor in enumerate((8.0, 2.0, 16.0)):
        optimizer.zero_grad()
        loss = uses_sharded.loss_of(model, dist.get_rank(), step)
        if is_setting:
            on_units("set_gradient_divide_factor", factor)(model)
            loss.backward()
        else:
            (loss * (workers / factor)).backward()
        optimizer.step()


def prepare_factors(model: nn.Module) -> None:
    on_units("set_force_sum_reduction_for_comms", True)(model)  # gloo has no other


@contextmanager
def plain_memory() -> Iterator[None]:
    """Let symmetric memory, which GPUs have, be memory of any kind."""
    names = ("set_backend", "get_mem_pool", "rendezvous")
    with (
        mock.patch.multiple(_symmetric_memory, **{name: mock.Mock() for name in names}),
        mock.patch.object(torch.cuda, "use_mem_pool", return_value=nullcontext()),
    ):
        yield


def train_in_symmetric_memory(model: Any, optimizer: Any) -> None:
    with plain_memory():
        on_units("set_force_sum_reduction_for_comms", True)(model)  # then gradients are there, too
        on_units("set_symm_mem_for_comm")(model)
        uses_sharded.plainly(model, optimizer)


def train_with_events(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        uses_sharded.plainly(model, optimizer, range(step, step + 1))
        model.set_post_optim_event(torch.cpu.Event())


def prefetch(direction: str) -> Change:
    def change(model: Any) -> None:
        getattr(model, f"set_modules_to_{direction}_prefetch")([*model.blocks])

    return change


def keep_unsharded(model: Any) -> None:
    """Keep what backward passes need, and gather nothing in them."""
    model.set_reshard_after_forward(False)
    on_units("set_unshard_in_backward", False)(model)


def customized(kind: str) -> Change:
    """Return a change to communication of the user's own, which is as torch's."""

    def change(model: Any) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        name = "AllGather" if kind == "all_gather" else "ReduceScatter"
        own = type("Own", (getattr(_fsdp_collectives, f"Default{name}"),), {})
        on_units(f"set_custom_{kind}", own())(model)

    return change


def call_all(*changes: Change) -> Change:
    """Return a function that makes changes in turn."""

    def change(model: Any) -> None:
        for one_change in changes:
            one_change(model)

    return change


FORCE = "set_force_sum_reduction_for_comms"
DIVIDED = ShardSetting(prepare_factors, partial(train_with_factors, True), partial(train_with_factors, False))
SHARD_SETTINGS: dict[str, ShardSetting | Refusal] = {
    "set_all_reduce_hook": Refusal(
        on_model("set_all_reduce_hook", lambda grad: None),
        "the whole model was given another all-reduce hook after sparsify.shard",
    ),
    "set_allocate_memory_from_process_group_for_comm": ShardSetting(
        on_units("set_allocate_memory_from_process_group_for_comm", True)
    ),
    "set_custom_all_gather": ShardSetting(customized("all_gather")),
    "set_custom_reduce_scatter": ShardSetting(customized("reduce_scatter")),
    FORCE: ShardSetting(on_units(FORCE, True)),
    "set_gradient_divide_factor": DIVIDED,
    "set_reduce_scatter_divide_factor": ShardSetting(
        call_all(on_units(FORCE, True), on_units("set_reduce_scatter_divide_factor", 4.0))
    ),
    "set_is_last_backward": ShardSetting(
        train=partial(in_two_passes, "set_is_last_backward", False, True),
        sparse_like=partial(in_two_passes, "set_is_last_backward", True, True),
    ),
    "set_modules_to_backward_prefetch": ShardSetting(prefetch("backward")),
    "set_modules_to_forward_prefetch": ShardSetting(prefetch("forward")),
    "set_post_optim_event": ShardSetting(train=train_with_events),
    "set_reduce_scatter_max_input_buffers": ShardSetting(on_model("set_reduce_scatter_max_input_buffers", 3)),
    "set_reduce_scatter_unused_params": ShardSetting(
        on_model("set_reduce_scatter_unused_params", True), skipped=0
    ),
    "set_requires_all_reduce": ShardSetting(
        train=partial(in_two_passes, "set_requires_all_reduce", False, True), sparse_like=in_one_pass
    ),
    "set_requires_gradient_sync": ShardSetting(
        train=partial(in_two_passes, "set_requires_gradient_sync", False, True), sparse_like=in_one_pass
    ),
    "set_reshard_after_backward": ShardSetting(
        train=partial(in_two_passes, "set_reshard_after_backward", False, True),
        sparse_like=partial(in_two_passes, "set_reshard_after_backward", True, True),
    ),
    "set_reshard_after_forward": ShardSetting(on_model("set_reshard_after_forward", True)),
    "set_separate_reduce_scatter_group": ShardSetting(on_model("set_separate_reduce_scatter_group")),
    "set_symm_mem_for_comm": ShardSetting(train=train_in_symmetric_memory),
    "set_unshard_in_backward": ShardSetting(keep_unsharded),
}


def end_of_shards(
    mesh: DeviceMesh,
    setting: ShardSetting,
    method: Any = None,
    kind: str = "both",
    when: str = "before",
    train: Train | None = None,
) -> Tensor:
    """Return where a training ends with a method, or by HSDP alone.

    Args:
        when: the change is made, before or after `shard`; or never.
        train: in the place of the setting's own training.
    """
    own, replicas = mesh_and_replicas(mesh, kind)
    model = blocks()
    if setting.skipped is not None:  # one unit, of which a part is not used
        model.blocks[setting.skipped].forward = torch.zeros_like
        fully_shard(model, mesh=own)
    else:
        sharded(model, own)
    optimizer: Any = optimizer_of(model)
    if when == "before":
        setting.change(model)
    if method is not None:
        wrapped = sparsify.shard(model, optimizer, method, replicas)
        optimizer = wrapped if hasattr(method, "every") else optimizer
    if when == "after":
        setting.change(model)
    if setting.skipped is not None and when == "never":
        on_model("set_reduce_scatter_unused_params", True)(model)
    (train or setting.train)(model, optimizer)
    return state_of(model)


def shard_ends(name: str) -> dict[str, Tensor] | str:
    """Return where trainings with a setting of FSDP2 end; or what was told of one that is refused."""
    mesh = mesh_of(2, 2)
    setting = SHARD_SETTINGS[name]
    sparse = laws.build("topk", 0.2, "bucket")
    if isinstance(setting, Refusal):
        return words_of(partial(end_of_shards, mesh, ShardSetting(setting.act), sparse, when="after"))
    end = partial(end_of_shards, mesh, setting)
    return {
        "torch": end(),
        "dense": end(sparsify.dense()),
        "topk of all, shards": end(laws.build("topk", 1.0, "bucket"), "shards", "after"),
        "local steps": end(sparsify.localsgd(every=1), when="after"),
        "sparse": end(sparse, when="after"),
        "sparse without the setting": end(sparse, when="never", train=setting.sparse_like),
    }


def names_of(settings: Mapping[str, Any], torch_names: Any) -> list[str]:
    """Return the settings to try, which this torch has."""
    return [
        name
        for name, setting in settings.items()
        if not isinstance(setting, str) and (name in torch_names or not name.isidentifier())
    ]


def tried_with_ddp(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return what became of each setting of DDP that is tried."""
    torch.set_num_threads(1)
    names = inspect.signature(DistributedDataParallel).parameters
    return {name: ddp_ends(name) for name in names_of(DDP_SETTINGS, names)}


def tried_with_shards(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return what became of each setting of FSDP2 that is tried."""
    torch.set_num_threads(1)
    return {name: shard_ends(name) for name in names_of(SHARD_SETTINGS, dir(FSDPModule))}
