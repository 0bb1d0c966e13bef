"""How a training script comes in: a method applied to a model, an optimizer, or DistributedDataParallel."""
