"""A communication hook that sparsifies gradients under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import (
    Bucket,
    GradientBuckets,
    TensorSpec,
    num_reals,
    parameters_in_backward_order,
    real_shape,
)
from sparsify.core.used_parameters import UsedParameters
from sparsify.method import Dense, Method
from sparsify.wrappers.checks import (
    parameters_of,
    resolve_process_group,
)
from sparsify.wrappers.ddp_buckets import (
    DDPBucketLayout,
    DDPParameter,
    FullDDPBucket,
    check_register_arguments,
    ddp_comm,
    find_supported_ddp,
    register_comm_hook,
    restore_ddp_format,
    separate_ddp_comm,
)
from sparsify.wrappers.double_averaging import AveragedGradientsGuard
from sparsify.wrappers.engine import (
    Engine,
    NonFiniteGradientError,
    PartlyDeliveredError,
    StepReport,
    check_bucket_spec_unchanged,
    weak_callback,
)
from sparsify.wrappers.grad_scaler import find_scalers, is_stepped_by_scaler
from sparsify.wrappers.handshake import (
    check_arguments_agree,
    tensor_facts,
    wrapping_facts,
)
from sparsify.wrappers.overhead import AveragingOverheadMonitor, fewer_messages_advice
from sparsify.wrappers.overlap import BackgroundExecutor
from sparsify.wrappers.wrapper_base import HookBase


class DDPHook(HookBase):
    """A communication hook that lets `method` average gradients in place of DDP's all-reduce.

    Users call it `sparsify.register`.

    DDP hands gradients over in buckets of its own, which it rebuilds after the first step. They wait until
    the last bucket is full. Then the method sees all of them at once, in its own buckets (`scope`: the whole
    model, a tensor, or so many MB), laid out as `sparsify.distribute` does, to the same bits. So no residual
    is lost, whatever DDP's buckets are. With `overlap` tensors are aggregated as soon as their bucket is
    full, while backpropagation goes on. dense always averages as DDP itself does, overlapped.

    Under `no_sync` DDP calls no hook: gradients accumulate, and are compressed once. With
    `find_unused_parameters` DDP drops the average of a parameter that no worker used since the last step:
    where `scope` is a layer, nothing is sent for it, and else its average goes back into the residuals. Under
    `join` workers without inputs bring gradients of 0 and deliver their residuals. A copy of the model, or a
    model that was loaded whole from a file, has no hook: register a new one.

    Args:
        model: a DistributedDataParallel, or what wraps one, such as `torch.compile`.
        optimizer: has the learning rates that feedback in the learning-rate domain follows, and must have no
            momentum where the method has its own.
        comm: as for `sparsify.distribute`, but by default over DDP's own process group; over a new one of
            the same workers with `overlap`.
        check: as for `sparsify.distribute`.
        select: as for `sparsify.distribute`.
        group: in the place of a communicator.
        steps_per_epoch: as for `sparsify.distribute`; `epoch` is set on what this returns.
        scaler: the GradScaler that scales the loss: residuals hold gradients without its scale, and where a
            gradient overflows on one worker, the scalers of all workers skip the step. A scaler that is not
            handed over is refused if it was made before this, or steps a fused optimizer; else it goes
            unnoticed.
        overlap: in a thread, in the order of DDP's buckets; needs scope='layer', and no `clip_norm`. The rest
            is as for `sparsify.distribute`.
        debug: as for `sparsify.distribute`.

    Attributes:
        last_report: as for `sparsify.distribute`, of the tensors that took part in the last step.

    Raises:
        ValueError: a model that is no DistributedDataParallel, or that has a communication hook already; a
            method that needs to know the optimizer, where there is none, or whose momentum would be applied
            twice; gradients of several types that should share a bucket; or too little to overlap.
        WorkerMismatch: on all workers, where their arguments differ.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        optimizer: torch.optim.Optimizer | None = None,
        comm: Comm | None = None,
        seed: int = 0,
        check: bool = True,
        select: str = "auto",
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        steps_per_epoch: int | None = None,
        scaler: GradScaler | None = None,
        overlap: bool = False,
        debug: bool = False,
    ) -> None:
        model = find_supported_ddp(model)
        group = resolve_process_group(group, comm)

        def collect_facts() -> dict[str, Any]:
            check_register_arguments(model, method, optimizer, scaler, overlap)
            return wrapping_facts(
                model.module,
                optimizer,
                method,
                seed=seed,
                check=check,
                debug=debug,
                overlap=overlap,
                steps_per_epoch=steps_per_epoch,
                scaler=scaler is not None,
            )

        used_comm = comm or ddp_comm(model, group)
        check_arguments_agree(used_comm, model.parameters(), collect_facts)
        if overlap and comm is None and not isinstance(method, Dense):
            used_comm = separate_ddp_comm(model, group)
        super().__init__(method, optimizer, used_comm, steps_per_epoch, scaler, check, debug)
        averaged = [
            (name, p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore
        ]
        self._frozen = [(name, p) for name, p in averaged if not p.requires_grad]
        # Numbered as `FlatGradients` does: what is drawn for a bucket is the same with and without DDP.
        self.parameters = parameters_in_backward_order(averaged)
        # True: each tensor has a bucket of its own, which is sent when it arrives. Else gradients wait.
        self._is_tensorwise = method.scope in ("layer", "bucket") or isinstance(method, Dense)
        likes = [p.new_zeros(1, dtype=p.dtype.to_real()).expand(num_reals(p)) for _, p in self.parameters]
        if self._is_tensorwise:
            buckets = [
                Bucket(like, (name,), (real_shape(p),))
                for like, (name, p) in zip(likes, self.parameters, strict=True)
                if p.numel()
            ]
        else:
            advice = "take scope='layer', which mixes no types"
            allocates = not method.group_support.accepts_pieces
            buckets = GradientBuckets(averaged, method.scope, advice, allocates).buckets
        self.engine = Engine(method, buckets, used_comm, None, seed, select)
        bucket_by_name = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
        self._parameter_by_id = dict[int, DDPParameter]()
        for number, (name, p) in enumerate(self.parameters):
            facts = DDPParameter(name, number, p.stride(), likes[number], bucket_by_name.get(name))
            self._parameter_by_id[id(p)] = facts
        self._layout_by_index = dict[int, DDPBucketLayout]()  # of DDP's buckets
        self._overhead = AveragingOverheadMonitor(
            self.engine.comm, fewer_messages_advice(self.engine.sends_one_message, len(buckets))
        )
        self._full: list[FullDDPBucket] = []  # not yet aggregated
        self._arrived = set[int]()  # numbers of the parameters that DDP has handed over in this step
        # Averages as DDP itself does.
        self._dense = used_comm if isinstance(method, Dense) and isinstance(used_comm, TorchComm) else None
        device = next(model.module.parameters()).device
        self._background = BackgroundExecutor(device) if overlap and self._dense is None else None
        self._used_parameters = (
            UsedParameters([p for _, p in self.parameters]) if model.find_unused_parameters else None
        )
        self._averaged_gradients = AveragedGradientsGuard(model.parameters(), allowed_ddp=model)
        register_comm_hook(model, self, DDPHook.__call__)
        self._is_scaler_checked = scaler is not None or isinstance(method, Dense)
        if not self._is_scaler_checked:
            self._unknown_scalers = find_scalers()
            finalize(self, register_optimizer_step_pre_hook(weak_callback(self._check_scaler)).remove)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle and copy as None: DDP uses no copies of hooks, and process groups can't be copied."""
        return type(None), ()

    def __call__(self, bucket: Any) -> Future[Tensor]:
        with self._overhead.measure_averaging():
            averaged = self._average_ddp_bucket(bucket)
        if bucket.is_last() and self._dense is None:
            self._overhead.end_step(self.last_report)
        return averaged

    def _average_ddp_bucket(self, bucket: Any) -> Future[Tensor]:
        """Return the future average of one of DDP's buckets, which is full."""
        if bucket.index() == 0:  # also after a backward pass that ended in an error
            self._begin_step()
        ddp_buffer = bucket.buffer()
        # The sparse gradient of an embedding lies alone in its bucket, as a sparse tensor.
        buffer = ddp_buffer.to_dense().view(-1) if ddp_buffer.is_sparse else ddp_buffer
        layout = self._look_up_layout(bucket.index(), buffer, bucket.parameters())
        self._arrived.update(parameter.number for parameter in layout.parameters)
        if bucket.is_last():
            self._check_all_arrived()
            self._averaged_gradients.check_not_averaged_this_step()
        if self._dense is not None:
            averaged = self._start_all_reduce(buffer, self._dense.group, ddp_buffer)
        else:
            averaged = Future(devices=[buffer.device] if buffer.is_cuda else [])
            # Gradients are taken as they lie in the buffer, whatever their strides. Complex numbers are two
            # real numbers: so DDP hands their buckets over (and `bucket.gradients()` does not know it).
            numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
            used: list[bool] | None = None
            if self._used_parameters is not None:
                used = [self._used_parameters.pop_flag(parameter.number) for parameter in layout.parameters]
            ready_event = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
            self._full.append(FullDDPBucket(ddp_buffer, buffer, numbers, layout, used, averaged, ready_event))
            if self._background is not None:
                self._background.submit(partial(self._average, self._full))
                self._full = []
            elif bucket.is_last():
                self._average(self._full)
        if bucket.is_last():
            self._end_step()
        return averaged

    def _begin_step(self) -> None:
        """Begin a step: check it, and set each bucket's density and learning rate."""
        self._full = []
        self._reports = []
        self._arrived = set()
        if self._background is not None:
            self._background.futures = []
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{name} was frozen when `register` was called, and is trained now, so that it would not "
                    "be averaged as the others are; unfreeze it first, then wrap the model in "
                    "DistributedDataParallel and call register"
                )
        if self.debug:
            named = tensor_facts("parameter", self.parameters)
            self.check_workers_agree_on_step(self.comm, named, self.parameters[0][1])
        if self._dense is None:
            self.check_momentum_and_epoch(self.optimizer)
            self.set_step_settings(self.parameters)

    def _end_step(self) -> None:
        """Wait for all averages and report.

        Errors of the thread are raised here, for DDP would take those of a future for gradients.
        """
        self._full = []
        if self._background is not None:
            self._background.wait_for_results()
        self.count_step_if_averaged()

    def _look_up_layout(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> DDPBucketLayout:
        """Return the layout of one of DDP's buckets, whose parameters change once, after the first step."""
        ids = [*map(id, parameters)]
        spec = TensorSpec.from_tensor(buffer)
        strides = [p.stride() for p in parameters]
        layout = self._layout_by_index.get(index)
        if layout is None or layout[:3] != (ids, spec, strides):
            known = [self._find_parameter(p) for p in parameters]
            sizes = [num_reals(p) for p in parameters]
            real = buffer.new_empty(1, dtype=buffer.dtype.to_real())
            for parameter, size in zip(known, sizes, strict=True):
                check_bucket_spec_unchanged(real.expand(size), parameter.like, parameter.name)
            layout = DDPBucketLayout(ids, spec, strides, known, sizes)
            self._layout_by_index[index] = layout
        return layout

    def _start_all_reduce(
        self, buffer: Tensor, group: dist.ProcessGroup | None, ddp_buffer: Tensor
    ) -> Future[Tensor]:
        """Start the all-reduce that DDP itself would make."""
        size = self.comm.size
        work = dist.all_reduce(buffer.div_(size), group=group, async_op=True)
        assert work is not None
        sent = self.engine.comm.predict_cost("all_reduce", buffer.nbytes, size).cost
        n = buffer.numel()
        self._reports.append(StepReport(n, n, sent.sent_bytes, 0, sent.messages))
        future: Future[Tensor] = work.get_future()
        return future.then(lambda done: restore_ddp_format(ddp_buffer, done.value()[0]))

    def _average(self, full: list[FullDDPBucket]) -> None:
        """Average full buckets: all of a step, or with `overlap` one after the other, in a thread."""
        for bucket in full:
            if bucket.ready_event is not None:
                torch.cuda.current_stream(bucket.buffer.device).wait_event(bucket.ready_event)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        if scale != 1:
            for bucket in full:
                bucket.buffer.div_(scale)
        try:
            used = self._find_used(full)
        except NonFiniteGradientError:
            if self.scaler is None:
                raise
            self.last_report = None
            for bucket in full:
                bucket.buffer.fill_(torch.inf)  # so that the scalers of all workers skip the step
        else:
            self._reports += self._average_used(full, used)
            if scale != 1:
                for bucket in full:
                    bucket.buffer.mul_(scale)
        for bucket in full:
            bucket.averaged.set_result(restore_ddp_format(bucket.ddp_buffer, bucket.buffer))

    def _average_used(self, full: list[FullDDPBucket], used: list[bool]) -> list[StepReport]:
        """Average the tensors that any worker has used; in buckets of several tensors, all of them."""
        if not self._is_tensorwise:
            return [self._average_all(full, used)]
        is_used = iter(used)
        if self.method.scope != "bucket":
            return self._average_tensors(full, is_used, shares_k=False)
        reports = list[StepReport]()
        for bucket in full:
            reports += self._average_tensors([bucket], is_used, shares_k=True)
        return reports

    def _average_tensors(
        self, full: list[FullDDPBucket], is_used: Iterator[bool], shares_k: bool
    ) -> list[StepReport]:
        """Average tensors that each have a state, in the order in which they lie in DDP's buckets."""
        grads = list[Tensor]()
        numbers = list[int]()
        for bucket in full:
            parameters = bucket.layout.parameters
            flags = [next(is_used) for _ in parameters]
            if all(flags):
                grads.append(bucket.reals)
                numbers += [p.bucket for p in parameters if p.bucket is not None]
                continue
            for parameter, grad, flag in zip(parameters, bucket.grads(), flags, strict=True):
                if flag and parameter.bucket is not None:
                    grads.append(grad)
                    numbers.append(parameter.bucket)
        if not numbers:
            return []
        steps = [self._steps[number] for number in numbers]
        return [self.engine.average(self.engine.bucket_gradients(grads, steps, numbers), shares_k)]

    def _average_all(self, full: list[FullDDPBucket], used: list[bool]) -> StepReport:
        """Average the whole model, in the method's own buckets."""
        parameters = [parameter for bucket in full for parameter in bucket.layout.parameters]
        is_in_order = [parameter.number for parameter in parameters] == [*range(len(self.parameters))]
        if is_in_order and all(used):
            tensors = [bucket.reals for bucket in full]
            return self.engine.average(self.engine.bucket_gradients(tensors, self._steps))
        grads = [grad for bucket in full for grad in bucket.grads()]
        ordered = sorted(zip(parameters, grads, used, strict=True), key=lambda entry: entry[0].number)
        unused = [(parameter.name, grad.zero_()) for parameter, grad, flag in ordered if not flag]
        tensors = [grad for _, grad, _ in ordered if grad.numel()]
        report = self.engine.average(self.engine.bucket_gradients(tensors, self._steps))
        residuals = self.engine.residuals() if unused else {}
        for name, average in unused:
            # DDP drops this average, so all workers together owe again what they have just delivered.
            if name in residuals:
                residuals[name].add_(average)
        return report

    def _find_used(self, full: list[FullDDPBucket]) -> list[bool]:
        """Return, of each tensor of full buckets, whether any worker has used it since the last step.

        Raises:
            NonFiniteGradientError: a gradient has a NaN or Inf, on any worker; with `check` or a scaler.
        """
        sizes = [size for bucket in full for size in bucket.layout.sizes]
        checks_finite = self.check_finite or self.scaler is not None
        if not (checks_finite or self._used_parameters) or not any(sizes):
            return [True] * len(sizes)
        used_here: list[bool] | None = None
        if self._used_parameters is not None:
            used_here = [is_used for bucket in full for is_used in bucket.used or []]
        return self.engine.check_finite_and_find_used(
            [bucket.reals for bucket in full],
            [parameter.name for bucket in full for parameter in bucket.layout.parameters],
            sizes,
            used_here,
            checks_finite,
            PartlyDeliveredError if self._background else NonFiniteGradientError,
        )

    def _find_parameter(self, p: Tensor) -> DDPParameter:
        """Return a parameter that DDP averages, as it was when the hook was registered.

        Raises:
            ValueError: it was frozen then, or lay in memory otherwise.
        """
        parameter = self._parameter_by_id.get(id(p))
        if parameter is None:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} was frozen when `register` was called, and now DDP "
                "averages it; call register while it requires a gradient"
            )
        if p.stride() != parameter.strides:
            # DDP filled the bucket by the old strides, and reads the average by the new ones.
            raise ValueError(
                f"{parameter.name} lies in memory otherwise than when `register` was called, and DDP would "
                "mix up its gradient; convert the model first (such as to channels_last), then wrap it"
            )
        return parameter

    def _check_all_arrived(self) -> None:
        """Refuse a step in which DDP leaves a parameter out, which would differ between workers."""
        if len(self._arrived) < len(self.parameters):
            missing = set(range(len(self.parameters))) - self._arrived
            raise ValueError(
                f"{self.parameters[min(missing)][0]} requires a gradient, but was frozen when "
                "DistributedDataParallel was made, which does not average it; unfreeze it first, then wrap "
                "the model"
            )

    def _check_scaler(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse the first step of the model's optimizer if an unknown GradScaler makes it."""
        optimized_ids = map(id, parameters_of(optimizer))
        if self._is_scaler_checked or self._parameter_by_id.keys().isdisjoint(optimized_ids):
            return
        self._is_scaler_checked = True
        if is_stepped_by_scaler(optimizer, self._unknown_scalers):
            raise ValueError(
                "a GradScaler steps the optimizer, so residuals would hold gradients of different scales; "
                "hand it over, sparsify.register(..., scaler=scaler): gradients are divided by its scale then"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, of tensors and numbers only: save it per rank."""
        return self.engine.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, on all workers together, see `Engine.load_state_dict`."""
        self.engine.load_state_dict(saved)


DDPHook.__call__.__annotations__.clear()  # DDP inspects them, and would not know what is text here
