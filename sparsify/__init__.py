"""Gradient sparsification: which gradients are sent, what becomes of the rest, how the sent ones meet.

>>> import sparsify
>>> sparsify.names()
['control', 'dense', 'randomk', 'topk']
>>> method = sparsify.build("topk", density=0.01)

Importing this package does not import torch; building a method does.
"""

from sparsify.methods import build, defaults, names

__all__ = ["build", "defaults", "names"]
