"""Gradient sparsification: which gradients are sent, what becomes of the rest, how the sent ones meet."""
