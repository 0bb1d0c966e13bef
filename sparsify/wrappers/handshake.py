"""Workers compare what must be the same on all of them, before they exchange anything else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.comm import Comm, gather_json
from sparsify.core import host_sync
from sparsify.core.bucket import ignored_names, local_part
from sparsify.core.gradients import layout_of
from sparsify.method import Method
from sparsify.ranges import stable_repr

ANEW = "Give every worker the same model, optimizer, method and options, and call the same, equally often"
LONG = 80  # characters
PLAIN = (bool, int, float, str, type(None))


class Disagreement(RuntimeError):
    """The workers do not do the same. All of them raise it, with the same words."""


def shake_hands(comm: Comm, facts: Mapping[str, Any], like: Tensor) -> None:
    """Compare by a digest of 8 bytes, which all workers gather; where it differs, the facts themselves.

    Args:
        facts: by name, the most telling first; compared as texts.
        like: a tensor on the device of which tensors travel.

    Raises:
        Disagreement: names the first fact that differs, with its values.
    """
    mine = {name: str(value) for name, value in facts.items()}
    gathered = comm.all_gather(host_sync.to_device([digest(mine)], like))
    if len(set(host_sync.to_host(torch.cat(gathered)))) == 1:
        return
    everyone = gather_json(comm, mine, like.device)
    names = dict.fromkeys(name for theirs in sorted(everyone, key=len, reverse=True) for name in theirs)
    for name in names:
        refuse_different(name, [theirs.get(name, "none") for theirs in everyone])
    for same_place in zip(*everyone, strict=True):
        refuse_different("the order; in one place", list(same_place))


def refuse_different(name: str, values: Sequence[str]) -> None:
    """Raise `Disagreement` unless the values, by rank, are the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        told = "; ".join(
            f"ranks {which} have {value}"
            for which, value in zip(ranks.values(), apart(list(ranks)), strict=True)
        )
        raise Disagreement(f"the workers disagree on {name}: {told}. {ANEW}")


def apart(texts: list[str]) -> list[str]:
    """Of long texts the words that differ."""
    if max(map(len, texts)) < LONG:
        return texts
    lists = [text.split() for text in texts]
    same = [len(set(words)) == 1 for words in zip(*lists, strict=False)]
    first = len(list(takewhile(bool, same)))
    same = [len(set(words)) == 1 for words in zip(*(words[:first:-1] for words in lists), strict=False)]
    last = len(list(takewhile(bool, same)))
    dots = ["..."]
    return [" ".join([*dots[:first], *words[first : len(words) - last], *dots[:last]]) for words in lists]


def agree(comm: Comm, model: Any, facts: Callable[[], Mapping[str, Any]]) -> None:
    """`shake_hands` on what is to be wrapped. Where `facts` refuses it, on any worker, all raise.

    Raises:
        ValueError: that of `facts`, if it was the same on all workers.
        Disagreement: the workers have different things, or only some of them refuse.
    """
    mine, refusal = dict[str, Any](), None
    try:
        mine = {"whether this can be wrapped": "yes", **facts()}
    except ValueError as error:
        mine, refusal = {"whether this can be wrapped": f"no: {error}"}, error
    tensors = model.parameters() if isinstance(model, nn.Module) else ()
    like = next((tensor for tensor in tensors if not tensor.is_meta), None)
    if like is not None and comm.size > 1:
        shake_hands(comm, mine, like)
    if refusal is not None:
        raise refusal


def of_wrapping(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, method: Method, **options: Any
) -> dict[str, Any]:
    """Facts on all that a door is given; buffers not among them, see `of_buffers`."""
    named = of_tensors("parameter", model.named_parameters(), ignored_names(model))
    return {"method": stable_repr(method), **options, **named, **of_optimizer(optimizer)}


def of_buffers(model: nn.Module) -> dict[str, Any]:
    """Facts on a model's buffers."""
    return of_tensors("buffer", model.named_buffers(), ignored_names(model))


def of_tensors(
    kind: str, named: Iterable[tuple[str, Tensor]], ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Facts on parameters, or on buffers.

    Args:
        ignored: names of those that are each worker's own.
    """
    facts: dict[str, Any] = {}
    for name, tensor in named:
        if name in ignored:
            continue
        fact = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
        if tensor.requires_grad:
            fact += ", trained" + order_in_memory(tensor)
        facts[f"{kind} {name}"] = fact
    return facts


def order_in_memory(tensor: Tensor) -> str:
    """Return the strides of a tensor's gradient, whose elements are exchanged in that order; nothing where
    they lie row by row. Of sides of 1 they say nothing.
    """
    part = local_part(tensor)
    if part.layout is not torch.strided or part.is_contiguous():
        return ""
    layout = layout_of(part)
    if torch.empty_strided(part.shape, layout, dtype=part.dtype, device="meta").is_contiguous():
        return ""
    strides = [stride if size > 1 else 1 for size, stride in zip(part.shape, layout, strict=True)]
    return f", with strides {tuple(strides)}"


def of_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Facts on an optimizer: its type, and of each group what is a number or a word. Residuals and weights of
    all workers must move alike.
    """
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for at, group in enumerate([] if optimizer is None else optimizer.param_groups):
        facts[f"number of parameters of group {at}"] = len(group["params"])
        for name, value in group.items():
            one = value.tolist() if isinstance(value, Tensor) else value
            if name != "params" and all(
                isinstance(part, PLAIN) for part in (one if isinstance(one, list | tuple) else [one])
            ):
                facts[f"{name} of group {at}"] = one
    return facts


def digest(value: Any) -> int:
    """63 bits that differ when the values do."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1
