"""What joins the workers, by the numbers of a cluster's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsify.cost import Link, Network


def network(cluster: Mapping[str, Any]) -> Network:
    """Of a resolved config's `cluster`, for simulated runs and predictions.

    Raises:
        ValueError: it lacks a number, or describes nodes of one worker each and what joins those inside.
    """
    inside, per_node = cluster.get("inside"), cluster.get("workers_per_node", 1)
    if inside and per_node == 1:
        raise ValueError(
            f"inside={inside['name']} joins the workers of a node, and cluster.workers_per_node=1; give a "
            "node more workers, or leave inside out"
        )
    between = _link("link", cluster["link"])
    return Network(between, _link("inside", inside), per_node) if inside else Network(between)


def _link(group: str, described: Mapping[str, Any]) -> Link:
    missing = [name for name in ("alpha_s", "beta_s_per_byte") if described[name] is None]
    if missing:
        raise ValueError(
            f"{group}={described['name']} has no {' and no '.join(missing)}, and virtual ranks need a link "
            f"with alpha and beta; choose {group}=nvlink, pcie or ethernet, or set cluster.{group}."
            f"{missing[0]}"
        )
    return Link(described["alpha_s"], described["beta_s_per_byte"])
