"""What must hold for a rewrite to be safe, beyond the shape of the chain."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from greyhound_lowering.declined import Declined
from greyhound_lowering.follow import Logits, step_name
from greyhound_lowering.projection import Projection, check_wide, example
from greyhound_lowering.settings import RewriteSettings
from greyhound_ops import chunking, torch_private

_INPLACE_OPERATORS = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imatmul,
)  # fmt: skip


# Functions that write to a table or to running statistics without saying so in their name; whether
# they do depends on options, and such a call between a head and its loss is rare enough.
_WRITES_STATE = ("embedding", "embedding_bag", "batch_norm", "instance_norm")


def only_user(node: fx.Node) -> fx.Node:
    """The one node that reads a value.

    Raises:
        Declined: If none or several do, with their names.
    """
    users = list(node.users)
    if len(users) == 1:
        user = users[0]
        if user.op == "output":
            raise Declined(
                "the logits leave the graph; compile the whole step, so that only the loss leaves"
            )
        return user
    if not users:
        raise Declined("nothing reads the logits")
    if any(user.op == "output" for user in users):
        raise Declined(
            "the logits leave the graph beside the loss; compile the whole step, so that only the "
            "loss leaves"
        )
    names = ", ".join(sorted({step_name(user) for user in users}))
    raise Declined(f"the logits have {len(users)} readers ({names})")


def changed_in_place(node: fx.Node) -> list[Any]:
    """Arguments that a node writes to."""
    if node.op == "call_method":
        name = str(node.target)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            return [node.args[0]]
        if name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__"):
            return [node.args[0]]
        return []
    if node.op != "call_function":
        return []
    if node.target in _INPLACE_OPERATORS:
        return [node.args[0]]
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _written_by_schema(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        writes = "mutation" in node.target.name() or "auto_functionalized" in node.target.name()
        return list(node.all_input_nodes) if writes or _body_writes(node) else []
    name = getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or _asked_for_inplace(node):
        return list(node.all_input_nodes)
    if name in _WRITES_STATE:
        return list(node.all_input_nodes)
    return [node.kwargs["out"]] if node.kwargs.get("out") is not None else []


def _body_writes(node: fx.Node) -> bool:
    """Whether the body of a higher-order operator (a checkpoint, a custom Function) writes."""
    module = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op != "get_attr" or module is None:
            continue
        body = getattr(module, str(argument.target), None)
        if isinstance(body, fx.GraphModule) and any(map(changed_in_place, body.graph.nodes)):
            return True
    return False


def _written_by_schema(node: fx.Node) -> list[Any]:
    """Arguments that an operator's schema says it writes to, however they are passed."""
    target: Any = node.target
    overloads = [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        # Which overload the call means is decided later: an argument counts if any writes to it.
        overloads = [getattr(target, name) for name in target.overloads()]
    written = []
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if argument.name in node.kwargs:
                written.append(node.kwargs[argument.name])
            elif position < len(node.args) and not argument.kwarg_only:
                written.append(node.args[position])
    return written


def _asked_for_inplace(node: fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` was called with ``inplace=True``."""
    if node.kwargs.get("inplace") is not None:
        return node.kwargs["inplace"] is not False
    try:
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin without a signature has no such switch
        return False
    return bound.arguments.get("inplace", False) is not False


def grad_is_off(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of a graph that run in a ``no_grad`` region inside it.

    Asked of the graph and not of the recorded tensors: the recorded value of a view that was made
    there says that it requires grad.
    """
    off, off_nodes = False, set()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            off = node.args[0] is False
        if off:
            off_nodes.add(node)
    return off_nodes


def check_unchanged(
    first: Projection | fx.Node, loss: fx.Node, operands: Iterable[fx.Node]
) -> None:
    """Decline if an operand is written to between a first node, which read it, and the loss.

    The op stands where the loss stood and would read the new value.
    """
    storages = {
        torch_private.storage_id(value): node
        for node in operands
        if (value := example(node)) is not None
    }
    node = first if isinstance(first, fx.Node) else first.node
    while node is not loss:
        node = node.next
        for argument in changed_in_place(node):
            for written in _nodes(argument):
                value = example(written)
                if value is not None and torch_private.storage_id(value) in storages:
                    operand = storages[torch_private.storage_id(value)]
                    raise Declined(
                        f"{operand.name} is changed in place ({step_name(node)}) between the "
                        "projection and the loss"
                    )


def _nodes(argument: Any) -> list[fx.Node]:
    if isinstance(argument, fx.Node):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [node for item in argument for node in _nodes(item)]
    return []


def check_operands(operands: Iterable[fx.Node]) -> None:
    """Decline tensors of another class, on other devices, or of dtypes the op does not take."""
    devices = set()
    for node in operands:
        value = example(node)
        if value is None:
            raise Declined(f"{node.name} has no recorded shape")
        if not torch_private.is_plain_fake(value):
            raise Declined(f"{node.name} is a {type(value).__name__}, not a plain tensor")
        if value.layout != torch.strided or value.is_quantized:
            raise Declined(f"{node.name} is not a dense tensor")
        devices.add(value.device)
    if len(devices) > 1:
        raise Declined(f"its tensors lie on several devices ({sorted(map(str, devices))})")
    if devices and next(iter(devices)).type not in ("cpu", "cuda"):
        raise Declined(f"device {next(iter(devices))} is not supported")


def tensor_bytes(value: torch.Tensor) -> int | None:
    """Bytes of a tensor at the sizes the graph was traced with, or None if unknown."""
    sizes = [torch_private.size_hint(size) for size in value.shape]
    if any(size is None for size in sizes):
        return None
    return math.prod(size for size in sizes if size is not None) * value.dtype.itemsize


def logits_bytes(logits: Logits) -> int | None:
    """Bytes of the logits at the sizes the graph was traced with, or None if unknown."""
    value = example(logits.projection.node)
    assert value is not None
    return tensor_bytes(value)


def check_pays(logits: Logits, settings: RewriteSettings) -> None:
    """Decline where there is too little to save."""
    check_wide(logits.projection)
    value = example(logits.projection.node)
    assert value is not None
    check_bytes(value, settings)


def check_bytes(logits: torch.Tensor, settings: RewriteSettings) -> None:
    """Decline logits too small to pay."""
    size, least = tensor_bytes(logits), settings.min_logits_bytes
    if least is None:
        # Logits that fit one chunk would all be held at once as before, and the op's launches take
        # the host longer than a compiled graph's: 1.1 to 2 times its time up to 250 MiB of logits
        # on an H200 (docs/performance.md, "Small shapes").
        least = chunking.one_chunk_bytes(logits.device.type)
    if size is not None and size < least:
        raise Declined(
            f"the logits take {size / 2**20:.2f} MiB, less than min_logits_bytes = "
            f"{least / 2**20:.2f} MiB"
        )


def check_graph(graph: fx.Graph) -> None:
    """Decline whole graphs in which the op would run under a transform or in inference mode."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "_enter_inference_mode":
            raise Declined("the graph enters inference_mode, where tensors cannot be detached")
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("torch._functorch"):
            raise Declined(f"the graph runs a torch.func transform ({step_name(node)})")
