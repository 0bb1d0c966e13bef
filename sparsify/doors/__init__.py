"""How a training script comes in: a method applied to a model, an optimiser, or DistributedDataParallel."""
