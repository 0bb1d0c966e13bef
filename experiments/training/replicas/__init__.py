"""A model's parameters on the workers while they train: alike on all, or each its own between rounds."""
