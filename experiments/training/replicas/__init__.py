"""What workers hold of a model while they train: alike on all of them, or each its own between rounds."""
