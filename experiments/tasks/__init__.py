"""One file per task, <network>_<data set>.py: model, data, loss, metric, and how it is trained."""

from pathlib import Path

from sparsify.registry import Registry

REGISTRY = Registry("task", __name__, Path(__file__).parent)
