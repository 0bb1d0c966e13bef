"""A task is a model, data, loss, metric, and how it is trained; it is called <network>_<data set>.

Those of the repository are rows of one table (`_presets`); a file of that name beside it is one of your own.
"""

from pathlib import Path

from experiments.tasks._presets import PRESETS
from experiments.tasks._presets import chance as chance
from experiments.tasks._presets import has_accuracy as has_accuracy
from sparsify.core.spec import Registry

REGISTRY = Registry("task", __name__, Path(__file__).parent, table=PRESETS)
