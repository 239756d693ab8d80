"""How many rows the op of a rewritten graph takes at a time, for the report."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from greyhound_ops import torch_private
from greyhound_ops.ops import linear_cross_entropy, row_region

_PLANS = {
    linear_cross_entropy.OP.overload: (linear_cross_entropy.OP, linear_cross_entropy.planned_rows),
    row_region.OP.overload: (row_region.OP, row_region.planned_rows),
}


def op_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of ours in a graph."""
    return [node for node in graph.nodes if node.target in _PLANS]


def chunk_rows(node: fx.Node) -> int | None:
    """Rows of a chunk at the sizes the graph was traced with, or None if they are not known.

    The arguments of the op are made once more, as tensors without data and without symbols: asking
    the recorded ones could put a guard on a size that has to stay free.

    Args:
        node: One of `op_nodes`.
    """
    op, planned_rows = _PLANS[node.target]
    try:
        with torch_private.fresh_fake_mode(), torch.no_grad():
            made: dict[fx.Node, Any] = {}
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _make(each, made))
            return planned_rows(op.named(args, kwargs))
    except Exception:
        return None  # an estimate for people must never stop a compilation


def _make(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    if node not in made:
        made[node] = _value(node, made)
    return made[node]


def _value(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    recorded = node.meta.get("example_value")
    if isinstance(recorded, Tensor):
        sizes = [_hint(size) for size in recorded.shape]
        strides = [_hint(stride) for stride in recorded.stride()]
        return torch.empty_strided(sizes, strides, dtype=recorded.dtype, device=recorded.device)
    if isinstance(recorded, torch.SymInt):
        return _hint(recorded)
    # One of the nodes that the rewrite put in front of its op.
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _make(each, made))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op != "call_function" or not callable(node.target):
        raise ValueError(f"{node.name} has no recorded value")
    if node.target is operator.getitem and isinstance(args[1], Tensor):
        raise ValueError("how many rows an index takes is known only at run time")
    return node.target(*args, **kwargs)


def _hint(size: int | torch.SymInt) -> int:
    hint = torch_private.size_hint(size)
    if hint is None:
        raise ValueError("a size is known only at run time")
    return hint
