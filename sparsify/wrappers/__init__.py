"""Wrappers that apply a method to a model, its optimizer, or DistributedDataParallel."""
