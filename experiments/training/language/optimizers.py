"""Optimisers that transformers are trained with: AdamW, Muon, and SGD as all other tasks have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, overload

import torch
from torch import nn

from experiments.training.task import group_by_weight_decay
from sparsify.ranges import describe_unknown

OptimizerName = Literal["adamw", "muon", "sgd"]
PARAMETERS_BY_OPTIMIZER = {
    "adamw": ("beta1", "beta2"), "muon": ("momentum", "muon_factor", "beta1", "beta2"), "sgd": ("momentum",),
}  # fmt: skip
EPS = 1e-8  # AdamW's, torch's own


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimiser and its numbers.

    Raises:
        ValueError: an unknown optimiser, or a number of which it makes no use.
    """

    name: OptimizerName = "adamw"
    momentum: float = 0.9  # of SGD; of Muon as MuLoCo has it (arXiv:2505.23725), where torch has 0.95
    muon_factor: float = 1.0  # Muon's learning rate, in times of AdamW's beside it
    beta1: float = 0.9  # of AdamW, and of what Muon leaves to it
    beta2: float = 0.99  # nanoGPT's for small batches, and MuLoCo's

    def __post_init__(self) -> None:
        if self.name not in PARAMETERS_BY_OPTIMIZER:
            raise ValueError(describe_unknown("optimiser", self.name, [*PARAMETERS_BY_OPTIMIZER]))
        for field in fields(self):
            idle = field.name not in ("name", *PARAMETERS_BY_OPTIMIZER[self.name])
            if idle and getattr(self, field.name) != field.default:
                users = " or ".join(
                    name for name, parameters in PARAMETERS_BY_OPTIMIZER.items() if field.name in parameters
                )
                raise ValueError(
                    f"{field.name}={getattr(self, field.name):g} has no effect with optimiser={self.name}, "
                    f"which has no such number; leave it out, or take optimiser={users}"
                )

    def make_optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return the optimizer of a model, which decays tensors of more than one dimension alone."""
        if self.name == "muon":
            return MuonWithAdamW(model, self, lr, weight_decay)
        groups = group_by_weight_decay(model.parameters(), weight_decay)
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=self.momentum, fused=True)
        return torch.optim.AdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=EPS, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices between the layers, AdamW for embeddings and vectors.

    To others it is one optimiser: its groups are Muon's and then AdamW's, its state is the state of both.
    Each group has an `lr_factor`, its learning rate in times of the one that is set for all. Muon's steps are
    as long as AdamW's are (Liu et al. 2025, arXiv:2502.16982), so that one rate and one decay can serve both.
    """

    def __init__(self, model: nn.Module, recipe: OptimizerRecipe, lr: float, weight_decay: float) -> None:
        embedding_ids = {
            id(p) for layer in model.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()
        }
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embedding_ids]
        muon_ids = {id(p) for p in matrices}
        adamw_groups = group_by_weight_decay(
            (p for p in model.parameters() if id(p) not in muon_ids), weight_decay
        )
        self.muon = torch.optim.Muon(
            [{"params": matrices, "lr_factor": recipe.muon_factor}],
            lr=lr * recipe.muon_factor,
            weight_decay=weight_decay,
            momentum=recipe.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        betas = (recipe.beta1, recipe.beta2)
        self.adamw = torch.optim.AdamW(
            [{**group, "lr_factor": 1.0} for group in adamw_groups], lr=lr, betas=betas, eps=EPS, fused=True
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step both optimizers, on the groups and the state of this one, whoever loaded them."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.muon.param_groups = self.param_groups[:1]
        self.adamw.param_groups = self.param_groups[1:]
        optimizers: tuple[torch.optim.Optimizer, ...] = (self.muon, self.adamw)
        for optimizer in optimizers:
            optimizer.state = self.state
            optimizer.step()
        return loss
