"""A comparison of models, optimizers, methods and options over the workers, before the first exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.comm import Comm, gather_json
from sparsify.core import host_sync
from sparsify.core.bucket import ddp_ignored_names, local_shard
from sparsify.core.gradients import gradient_strides
from sparsify.method import Method
from sparsify.ranges import repr_without_addresses

ADVICE = "Give every worker the same model, optimizer, method and options, and call the same, equally often"
LONG_TEXT = 80  # characters
COMPARABLE_TYPES = (bool, int, float, str, type(None))


class WorkerMismatch(RuntimeError):
    """A difference between workers in what must be equal. All workers raise it, with equal messages."""


def check_workers_agree(comm: Comm, facts: Mapping[str, Any], like: Tensor) -> None:
    """Check that all workers have equal facts, by an all-gather of a digest of 8 bytes.

    Where digests differ, the facts themselves are gathered.

    Args:
        facts: by name, the most telling first; compared as texts.
        like: a tensor on the device of which tensors travel.

    Raises:
        WorkerMismatch: names the first fact that differs, with its values.
    """
    texts = {name: str(value) for name, value in facts.items()}
    digests = comm.all_gather(host_sync.to_device([hash_repr(texts)], like))
    if len(set(host_sync.to_host(torch.cat(digests)))) == 1:
        return
    facts_by_rank = gather_json(comm, texts, like.device)
    longest_first = sorted(facts_by_rank, key=len, reverse=True)
    for name in dict.fromkeys(chain.from_iterable(longest_first)):
        _check_values_equal(name, [facts_of_rank.get(name, "none") for facts_of_rank in facts_by_rank])
    for names in zip(*facts_by_rank, strict=True):
        _check_values_equal("the order; in one place", list(names))


def _check_values_equal(name: str, values: Sequence[str]) -> None:
    """Raise `WorkerMismatch` unless the values, by rank, are equal."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) > 1:
        excerpts = _excerpt_differences(list(ranks_by_value))
        values_by_ranks = "; ".join(
            f"ranks {ranks} have {excerpt}"
            for ranks, excerpt in zip(ranks_by_value.values(), excerpts, strict=True)
        )
        raise WorkerMismatch(f"the workers disagree on {name}: {values_by_ranks}. {ADVICE}")


def _excerpt_differences(texts: list[str]) -> list[str]:
    """Return the words in which long texts differ; short texts as they are."""
    if max(map(len, texts)) < LONG_TEXT:
        return texts
    words_by_text = [text.split() for text in texts]
    num_first = _common_prefix_length(words_by_text)
    num_last = _common_prefix_length([words[:num_first:-1] for words in words_by_text])
    excerpts = [words[num_first : len(words) - num_last] for words in words_by_text]
    return [" ".join([*["..."][:num_first], *words, *["..."][:num_last]]) for words in excerpts]


def _common_prefix_length(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many places, from the first, hold equal items in all sequences."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))


def check_arguments_agree(
    comm: Comm, parameters: Iterable[Tensor], collect_facts: Callable[[], Mapping[str, Any]]
) -> None:
    """Check that all workers wrap equal arguments. Where one worker refuses its arguments, all raise.

    Args:
        parameters: plain tensors; on the device of the first one, facts travel.
        collect_facts: refuses wrong arguments, or returns what must be equal on all workers.

    Raises:
        ValueError: that of `collect_facts`, if all workers raised it with equal messages.
        WorkerMismatch: the facts differ, or only some workers refuse.
    """
    refusal: ValueError | None = None
    try:
        facts = {"whether this can be wrapped": "yes", **collect_facts()}
    except ValueError as error:
        refusal = error
        facts = {"whether this can be wrapped": f"no: {error}"}
    like = next((p for p in parameters if not p.is_meta), None)
    if like is not None and comm.size > 1:
        check_workers_agree(comm, facts, like)
    if refusal is not None:
        raise refusal


def wrapping_facts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, method: Method, **options: Any
) -> dict[str, Any]:
    """Return facts on the arguments of a wrapper, without the buffers, see `buffer_facts`."""
    named = tensor_facts("parameter", model.named_parameters(), ddp_ignored_names(model))
    return {"method": repr_without_addresses(method), **options, **named, **optimizer_facts(optimizer)}


def buffer_facts(model: nn.Module) -> dict[str, Any]:
    """Return facts on a model's buffers."""
    return tensor_facts("buffer", model.named_buffers(), ddp_ignored_names(model))


def tensor_facts(
    kind: str, named: Iterable[tuple[str, Tensor]], ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Return the shape, dtype, device and memory order of parameters or buffers, by name.

    Args:
        kind: what the names are prefixed with.
        ignored: names of tensors that are each worker's own.
    """
    facts: dict[str, Any] = {}
    for name, tensor in named:
        if name in ignored:
            continue
        fact = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
        if _has_shared_memory(local_shard(tensor)):
            fact += ", in memory that its elements share"
        if tensor.requires_grad:
            fact += ", trained" + _describe_gradient_strides(tensor)
        facts[f"{kind} {name}"] = fact
    return facts


def _has_shared_memory(tensor: Tensor) -> bool:
    """Return True for a tensor made by `expand`, whose memory another worker's values don't fit into."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _describe_gradient_strides(tensor: Tensor) -> str:
    """Return the strides of a tensor's gradient, in whose order elements are exchanged, in words.

    Returns "" where elements lie row by row. Strides of sides of length 1 are given as 1.
    """
    shard = local_shard(tensor)
    if shard.layout is not torch.strided:
        return ""
    layout = gradient_strides(shard)
    if torch.empty_strided(shard.shape, layout, dtype=shard.dtype, device="meta").is_contiguous():
        return ""
    strides = [stride if size > 1 else 1 for size, stride in zip(shard.shape, layout, strict=True)]
    return f", with strides {tuple(strides)}"


def optimizer_facts(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return facts on an optimizer: its type, and the numbers and words of its parameter groups.

    Residuals and weights of all workers must change alike.
    """
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        facts[f"number of parameters of group {index}"] = len(group["params"])
        for name, value in group.items():
            plain = value.tolist() if isinstance(value, Tensor) else value
            items = plain if isinstance(plain, list | tuple) else [plain]
            if name != "params" and all(isinstance(item, COMPARABLE_TYPES) for item in items):
                facts[f"{name} of group {index}"] = plain
    return facts


def hash_repr(value: Any) -> int:
    """Return 63 bits of a hash of the representation of `value`."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1
