"""How many elements of a bucket a worker may send: a rule for each kind of method, and one for new ones."""

from __future__ import annotations

from typing import Any

from sparsify.method import Method
from sparsify.methods._chunked import ChunkTopK
from sparsify.methods._tracked import Tracked
from sparsify.methods.adacomp import AdaComp
from sparsify.methods.deft import Deft
from sparsify.methods.dgc import DgcSample, WithDenseVectors
from sparsify.methods.micro import ExclusiveThreshold
from sparsify.methods.oktopk import TOO_MANY, ReusedThreshold
from sparsify.methods.sparcml import TopKOfEach
from sparsify.methods.stable_topk import StableBlocks, missing
from sparsify.select import Union


def limits(method: Method, n: int, k: int, size: int) -> tuple[int, int]:
    """The least and the largest number of elements that one of `size` workers sends of n; k are asked for."""
    if isinstance(method, WithDenseVectors):  # vectors are sent whole
        return limits_of_selector(method.select, n, k, size)[0], n
    if isinstance(method, Tracked):
        return limits(method.method, n, k, size)
    if isinstance(method, AdaComp):  # at least one element, or the mark of an empty bin, for every bin
        return -(-n // max(method.conv_bin, method.other_bin)), n
    selector = getattr(method, "select", None)
    return (n, n) if selector is None else limits_of_selector(selector, n, k, size)


def limits_of_selector(selector: Any, n: int, k: int, size: int) -> tuple[int, int]:
    """A selector that is not listed sends exactly k, or if it is not `exact`, anything from 0 to n."""
    match selector:
        case Union():
            least, most = limits_of_selector(selector.own, n, k, size)
            return least, min(n, size * most)
        case ChunkTopK():  # of each chunk its share, at least one element
            return min(n, 1), n
        case DgcSample():
            return 0, k
        case ReusedThreshold():
            return 0, max(k, int(TOO_MANY * k))
        case Deft():
            return k, n
        case ExclusiveThreshold():  # at least one element from every worker
            return (n if k == n else min(n, size)), n
        case StableBlocks():
            block = min(selector.block, k)
            return (n, n) if k == n else (k // block * block - missing(n, block), k // block * block)
        case TopKOfEach():
            each, last = selector.counts(n, k)
            return (n // selector.bucket * each + last,) * 2
    return (k, k) if selector.exact else (0, n)
