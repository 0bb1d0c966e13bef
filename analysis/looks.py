"""What looks at gradients are called in records: see experiments/training/looks.py, which takes them."""

ALL = "all"  # in place of a tensor's name: the whole model
SLICES = 64  # of a tensor, in which is counted what was selected
REGIONS = (1, 10, 100, 1000)  # elements of a region
