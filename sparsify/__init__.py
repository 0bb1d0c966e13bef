"""Gradient sparsification for distributed training in PyTorch.

>>> import sparsify
>>> "topk" in sparsify.names()
True
>>> method = sparsify.topk(density=0.01)  # or, by its name: sparsify.build("topk", density=0.01)

Importing this package does not import torch; building a method does.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsify.core.checks import check_no_name_clash, explain_missing_torch
from sparsify.methods import build, defaults, make_checked_builder, names

if TYPE_CHECKING:  # for completion in editors; your own methods work without a line here
    from sparsify.local.distribute import distribute
    from sparsify.local.shard import shard
    from sparsify.methods.adacomp import adacomp as adacomp
    from sparsify.methods.arctopk import arctopk as arctopk
    from sparsify.methods.blockrandomk import blockrandomk as blockrandomk
    from sparsify.methods.control import control as control
    from sparsify.methods.deft import deft as deft
    from sparsify.methods.demo import demo as demo
    from sparsify.methods.dense import dense as dense
    from sparsify.methods.desloc import desloc as desloc
    from sparsify.methods.dgc import dgc as dgc
    from sparsify.methods.diloco import diloco as diloco
    from sparsify.methods.ef21 import ef21 as ef21
    from sparsify.methods.efsignsgd import efsignsgd as efsignsgd
    from sparsify.methods.exdyna import exdyna as exdyna
    from sparsify.methods.gaussiank import gaussiank as gaussiank
    from sparsify.methods.gtopk import gtopk as gtopk
    from sparsify.methods.hardthreshold import hardthreshold as hardthreshold
    from sparsify.methods.localsgd import localsgd as localsgd
    from sparsify.methods.micro import micro as micro
    from sparsify.methods.muloco import muloco as muloco
    from sparsify.methods.noloco import noloco as noloco
    from sparsify.methods.oktopk import oktopk as oktopk
    from sparsify.methods.powersgd import powersgd as powersgd
    from sparsify.methods.qgz import qgz as qgz
    from sparsify.methods.qsgd import qsgd as qsgd
    from sparsify.methods.randomk import randomk as randomk
    from sparsify.methods.scalecom import scalecom as scalecom
    from sparsify.methods.sidco import sidco as sidco
    from sparsify.methods.signsgd import signsgd as signsgd
    from sparsify.methods.sparcml import sparcml as sparcml
    from sparsify.methods.sparseloco import sparseloco as sparseloco
    from sparsify.methods.stable_topk import stable_topk as stable_topk
    from sparsify.methods.streaming_diloco import streaming_diloco as streaming_diloco
    from sparsify.methods.terngrad import terngrad as terngrad
    from sparsify.methods.topk import topk as topk
    from sparsify.wrappers.ddp import DDPHook as register
    from sparsify.wrappers.redistribution import redistribute

__all__ = ["build", "defaults", "distribute", "names", "redistribute", "register", "shard"]
__version__ = "0.1.0"

check_no_name_clash(Path(__file__).parent)

# These need torch and are imported on first use: module and attribute by name.
LAZY_IMPORTS = {
    "distribute": ("sparsify.local.distribute", "distribute"),
    "redistribute": ("sparsify.wrappers.redistribution", "redistribute"),
    "register": ("sparsify.wrappers.ddp", "DDPHook"),
    "shard": ("sparsify.local.shard", "shard"),
}


if not TYPE_CHECKING:  # type checkers know all names from the imports above

    def __getattr__(name: str) -> Any:
        if name in LAZY_IMPORTS:
            module, attribute = LAZY_IMPORTS[name]
            with explain_missing_torch(f"sparsify.{name}"):
                return getattr(importlib.import_module(module), attribute)
        if name in names():
            return make_checked_builder(name)
        raise AttributeError(f"module 'sparsify' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *names()})
