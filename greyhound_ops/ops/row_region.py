"""``greyhound::row_region``: projections and any values per row computed from their logits.

What the rewrite puts in the place of a loss that no other op is made for. P projections of the same
N rows are made chunk by chunk; a *body*, Python source in the op's arguments, turns the logits of
some rows into narrow values per row; the logits are thrown away.

Where the gradients are made depends on what the rewrite knows:

- With ``coefficients`` it knows the upstream of every output up to one scalar. The op then also
  returns ``total = sum_k sum_i coefficients[k][i] * outputs[k][i]`` and makes its gradients in the
  forward: three products a projection, none repeated. ``total`` is the one differentiable output.
- Without, every row has an upstream that only the backward knows: each output is differentiable,
  and the backward, one opaque op, makes the gradients. It projects the chunks once more; or the
  forward keeps the logits of all rows for it (``keep_logits``), where they take no more memory than
  its sum over chunks would: a product less, and the gradient is written over them.

The body and its derivative are one function per chunk, compiled with Inductor on CUDA.

The file holds, in this order: schemas, bodies, chunks, reading of a call, implementations, fakes,
autograd, flops, registration.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import chunking, torch_private, validation
from greyhound_ops.config import settings
from greyhound_ops.ops import gradients, row_statistics
from greyhound_ops.ops.chunk_loop import (
    ChunkMemory,
    GradientNeeds,
    accumulator_dtype,
    defers_division,
    empty,
    empty_grad_weight,
    empty_kept,
    keeping_is_less,
    padded_classes,
    stored_bias_dtype,
    stored_weight_dtype,
)
from greyhound_ops.ops.linear_loss import (
    Arguments,
    LossLoop,
    stored_input_dtype,
    stored_tensor_dtype,
)
from greyhound_ops.ops.op import Op, product_flops
from greyhound_ops.ops.row_compiler import OPTIONS, RowCompiler
from greyhound_ops.ops.rows import statistics_dtype

# ------------------------------------------------------------------------------------- schemas

_OPTIONS = (
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "bool[] need_grad_inputs=[], bool[] need_grad_weights=[], bool[] need_grad_biases=[], "
    "bool[] need_grad_row_args=[], bool[] need_grad_whole_args=[], int[] same_head=[], "
    "bool[] keep_logits=[]"
)
OP = Op(
    "row_region("
    "Tensor[] inputs, Tensor[] weights, Tensor[] biases, Tensor[] row_args, Tensor[] whole_args, "
    "str body, str compute_dtypes, bool[] has_bias, Tensor[] coefficients, "
    f"{_OPTIONS}, bool grads_are_private=False"
    ") -> (Tensor[] outputs, Tensor total, Tensor[] grads)"
)
OP_BACKWARD = Op(
    "row_region_backward("
    "Tensor[] grad_outputs, "
    "Tensor[] inputs, Tensor[] weights, Tensor[] biases, Tensor[] row_args, Tensor[] whole_args, "
    f"Tensor[] kept, str body, str compute_dtypes, bool[] has_bias, bool[] has_grad_output, "
    f"{_OPTIONS}"
    ") -> Tensor[]"
)
_OPERANDS = ("inputs", "weights", "biases", "row_args", "whole_args")

# -------------------------------------------------------------------------------------- bodies

_Body = Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]

# A cast that `torch.ops.aten` spells differentiably; no other primitive has a derivative.
_CAST = re.compile(r"\btorch\.ops\.prims\.convert_element_type(?:\.default)?\(")
_PRIMITIVE = re.compile(r"\btorch\.ops\.prims\.(\w+)")
_WITHOUT_DERIVATIVE = ("iota",)  # makes an index: there is nothing to differentiate
_GATHER = re.compile(r"\btorch\.ops\.aten\.gather(?:\.default)?\(")
_EXTREME = re.compile(r"\btorch\.ops\.aten\.(amax|amin|linalg_vector_norm)(?:\.default)?\(")


def _gather(
    tensor: Tensor, dim: int, index: Tensor, sparse_grad: bool = False, *, out: None = None
) -> Tensor:
    """``gather`` for a compiler: one class per row by comparison.

    The derivative of a gather scatters into a ``[C, V]`` of zeros in memory; that of a choice is
    elementwise and fuses with the rest of the logits gradient. An index out of range, for which an
    error would have to wait for the device, becomes NaN.
    """
    if tensor.dim() != 2 or dim not in (1, -1) or index.shape[1] != 1:
        return torch.gather(tensor, dim, index)
    classes = torch.arange(tensor.shape[1], device=tensor.device)
    chosen = torch.where(classes == index, tensor, 0.0).sum(1, keepdim=True, dtype=tensor.dtype)
    return torch.where((index >= 0) & (index < tensor.shape[1]), chosen, torch.nan)


def _in_float32(name: str) -> Callable[..., Tensor]:
    """A reduction whose derivative looks for the elements that are equal to its result.

    A compiler rounds a result of 16 bits when it stores it, and does not round the elements that it
    computes again: none is equal, and a gradient over none of them is NaN.
    """
    operator = getattr(torch.ops.aten, name).default

    def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype.itemsize != 2 or not tensor.is_floating_point() or "dtype" in kwargs:
            return operator(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        return operator(tensor.float(), *args, **kwargs).to(tensor.dtype)  # type: ignore[no-any-return]

    return reduce


@functools.cache
def _function(
    text: str, *, compiled: bool = False, recorded: tuple[torch.dtype, ...] = ()
) -> _Body:
    """The function that a body's source defines; once per process and source.

    Args:
        text: The source.
        compiled: Whether it is for ``torch.compile``.
        recorded: For a compiler that records it once, the dtypes of the logits.
    """
    # No builtins: what the source may use is what the rewrite writes. But torch, called from there,
    # may import what it needs first by this name (2.14 does, to record an op's decomposition).
    names: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
        "__builtins__": {"__import__": __import__},
    }
    source = _CAST.sub("torch.ops.aten.to.dtype(", text)
    if compiled or recorded:
        source = _GATHER.sub("_gather(", source)
        names["_gather"] = _gather
        for name in set(_EXTREME.findall(source)):
            names[f"_{name}"] = _in_float32(name)
        source = _EXTREME.sub(r"_\1(", source)
    try:
        if recorded:
            source = row_statistics.rewritten(source, recorded)
            names.update(row_statistics.NAMES)
        tree = ast.parse(source)
        if _reaches_out(tree):
            raise NameError("it imports something or has a name that begins with two underscores")
        exec(compile(tree, "<greyhound row_region>", "exec"), names)
    except Exception as error:
        raise ValueError(f"body: expected Python source, got an error: {error}") from error
    function = names.get("body")
    if not isinstance(function, types.FunctionType):
        raise ValueError(
            "body: expected source that defines 'body(logits, row_args, whole_args)', got "
            f"{text[:80]!r}"
        )
    return function


def _reaches_out(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(node, ast.Name) and node.id.startswith("__"):
            return True
        # Not every attribute: ATen has operators like `__and__`.
        if isinstance(node, ast.Attribute) and node.attr in ("__globals__", "__builtins__"):
            return True
    return False


def _check_derivatives(text: str) -> None:
    for name in _PRIMITIVE.findall(_CAST.sub("", text)):
        if name not in _WITHOUT_DERIVATIVE:
            raise ValueError(
                f"body: expected operators of torch.ops.aten where gradients are wanted, got "
                f"torch.ops.prims.{name}, which has no derivative"
            )


def _outputs_of(
    body: _Body,
    logits: list[Tensor],
    row_args: list[Tensor],
    whole_args: list[Tensor],
) -> list[Tensor]:
    """What a body makes of some rows, checked for shape."""
    outputs = body(logits, row_args, whole_args)
    if not isinstance(outputs, (list, tuple)):
        raise ValueError(f"body: expected a list of tensors, got {type(outputs).__name__}")
    rows = logits[0].shape[0]
    for index, each in enumerate(outputs):
        if not isinstance(each, Tensor):
            raise ValueError(f"body: expected tensors, got {type(each).__name__} at {index}")
        if each.dim() == 0 or each.shape[0] != rows:
            raise ValueError(
                f"body: expected outputs of a value per row, {rows} rows, got shape "
                f"{list(each.shape)} at {index}"
            )
    return list(outputs)


def body_outputs(
    text: str, logits: list[Tensor], row_args: list[Tensor], whole_args: list[Tensor]
) -> list[Tensor]:
    """What a body makes of some rows, for the rewrite to look at.

    Args:
        text: Source of the body.
        logits: Per projection ``[C, V_p]``.
        row_args: ``[C, ...]``.
        whole_args: Of any shape.

    Returns:
        Values ``[C, ...]``.
    """
    return _outputs_of(_function(text), logits, row_args, whole_args)


# -------------------------------------------------------------------------------------- chunks


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to make of every chunk.

    Attributes:
        wants: For the logits, the row arguments and the whole arguments, one after the other,
            whether their gradient is wanted.
        upstream: For each output whether it has a coefficient or an upstream gradient.
        total: The dtype of the weighted sum of the outputs, None where it is not wanted.
        outputs: Whether the outputs are wanted.
    """

    wants: tuple[bool, ...]
    upstream: tuple[bool, ...]
    total: torch.dtype | None
    outputs: bool


@dataclasses.dataclass
class _Made:
    """Of one chunk: outputs, their weighted sum, one gradient or None per argument."""

    outputs: list[Tensor]
    total: Tensor | None
    grads: list[Tensor | None]


def _chosen(outputs: list[Tensor], upstream: list[Tensor], plan: _Plan) -> list[Tensor]:
    """The outputs that have a coefficient or an upstream gradient, checked against it."""
    if not plan.upstream:
        return []
    name = "coefficients" if plan.total is not None else "grad_outputs"
    if len(plan.upstream) != len(outputs):
        raise ValueError(
            f"{name}: expected {len(outputs)}, one per output, got {len(plan.upstream)}"
        )
    chosen = [each for each, has in zip(outputs, plan.upstream, strict=True) if has]
    for each, by in zip(chosen, upstream, strict=True):
        if each.shape != by.shape:
            raise ValueError(
                f"{name}: expected the shape of the output, {list(each.shape)} for its rows, "
                f"got {list(by.shape)}"
            )
        if not each.is_floating_point():
            raise ValueError(f"{name}: expected none for an output of dtype {each.dtype}")
    return chosen


def _weighted_sum(chosen: list[Tensor], upstream: list[Tensor], plan: _Plan) -> Tensor | None:
    total: Tensor | None = None
    if plan.total is None:
        return None
    for each, by in zip(chosen, upstream, strict=True):
        part = (each.to(plan.total) * by.to(plan.total)).sum()
        total = part if total is None else total + part
    return total


def _cotangents(chosen: list[Tensor], upstream: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """The upstream of outputs in their dtypes, times the scale."""
    return [
        (by if scale is None else by.to(scale.dtype) * scale).to(each.dtype)
        for each, by in zip(chosen, upstream, strict=True)
    ]


def _eager_chunk(
    body: _Body,
    plan: _Plan,
    arguments: list[list[Tensor]],
    upstream: list[Tensor],
    scale: Tensor | None,
) -> _Made:
    """A chunk operator by operator, differentiated by autograd."""
    wants = iter(plan.wants)
    # The op's tensors may require grad where it was called; here only those wanted do.
    arguments = [
        [each.detach().requires_grad_(next(wants)) for each in group] for group in arguments
    ]
    with torch_private.without_saved_tensors_hooks():
        outputs = _outputs_of(body, *arguments)
    chosen = _chosen(outputs, upstream, plan)
    detached = [each.detach() for each in outputs] if plan.outputs else []
    total = _weighted_sum([each.detach() for each in chosen], upstream, plan)
    grads: list[Tensor | None] = [None] * len(plan.wants)
    everything = [each for group in arguments for each in group]
    leaves = [index for index, wanted in enumerate(plan.wants) if wanted]
    pairs = [(each, by) for each, by in zip(chosen, upstream, strict=True) if each.requires_grad]
    del outputs, chosen
    if leaves and pairs:
        heads, bys = [each for each, _ in pairs], [by for _, by in pairs]
        made = torch.autograd.grad(
            heads,
            [everything[index] for index in leaves],
            _cotangents(heads, bys, scale),
            allow_unused=True,
        )
        for index, grad in zip(leaves, made, strict=True):
            grads[index] = grad
    return _Made(detached, total, grads)


def _traced_chunk(body: _Body, plan: _Plan) -> Callable[..., Any]:
    """The function of a chunk that Dynamo traces: Inductor fuses values and gradients.

    A compiled body differentiated by autograd would be two graphs with ``[C, V]`` tensors saved in
    between; and autograd is not recording where an op runs.
    """
    leaves = [index for index, wanted in enumerate(plan.wants) if wanted]

    def chunk(
        arguments: list[list[Tensor]], upstream: list[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        lengths = [len(group) for group in arguments]
        everything = [each for group in arguments for each in group]

        def values(*chosen: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
            filled = list(everything)
            for index, leaf in zip(leaves, chosen, strict=True):
                filled[index] = leaf
            first, second = lengths[0], lengths[0] + lengths[1]
            outputs = _outputs_of(body, filled[:first], filled[first:second], filled[second:])
            return tuple(_chosen(outputs, upstream, plan)), outputs

        made: tuple[Tensor, ...] = ()
        if leaves:
            leaf = [everything[index] for index in leaves]
            pulled: Any = torch.func.vjp(values, *leaf, has_aux=True)
            chosen, pull, outputs = pulled
            made = pull(tuple(_cotangents(list(chosen), upstream, scale)))
        else:
            chosen, outputs = values()
        total = _weighted_sum(list(chosen), upstream, plan)
        return outputs if plan.outputs else [], total, list(made)

    # Dynamo keeps what it compiled with the code object and gives up after eight variants, so
    # every plan has its own.
    return types.FunctionType(
        chunk.__code__.replace(co_name="row_region_chunk"), chunk.__globals__, "row_region_chunk",
        None, chunk.__closure__,
    )  # fmt: skip


def _behind(grads: list[Tensor | None], outputs: list[Tensor]) -> list[Tensor | None]:
    """The gradients, made to wait for the outputs; no value changes.

    Inductor writes a gradient over its logits where no other node reads them that it does not
    depend on, and one of the outputs alone may be such a node. A choice between equals costs
    nothing: Triton drops it.
    """
    for output in outputs:
        if 0 in output.shape[1:]:
            continue
        known = output.reshape(output.shape[0], -1)[:, :1]
        known = known == known
        grads = [None if each is None else torch.where(known, each, each) for each in grads]
    return grads


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A function of five groups, the arguments, the upstream and the scale, in two forms.

    Neither makes the weighted sum: one number of few would be a kernel of four variants, timed
    against each other, and 0.4 s of a first step.

    Attributes:
        compiler: By Inductor alone.
        otherwise: By ``torch.compile``.
    """

    compiler: RowCompiler
    otherwise: Callable[[list[list[Tensor]]], Any]


@functools.cache
def _compiled_chunk(text: str, plan: _Plan, heads: tuple[tuple[int, torch.dtype], ...]) -> _Chunk:
    """A chunk compiled with Inductor.

    The number of rows is a symbol; the vocabularies are not, for Inductor makes better code of a
    known row length. So each of them has a function of its own.
    """
    plan = dataclasses.replace(plan, total=None, outputs=plan.outputs or plan.total is not None)
    body = _function(text, recorded=tuple(dtype for _, dtype in heads))
    options = torch_private.known_options(OPTIONS)
    by_dynamo = torch_private.compile_in_op(
        _traced_chunk(_function(text, compiled=True), plan), options
    )

    def traced(groups: list[list[Tensor]]) -> list[list[Tensor | None]]:
        *arguments, upstream, scale = groups
        made = _eager_chunk(body, plan, arguments, upstream, scale[0] if scale else None)
        heads = len(arguments[0])
        grads = [*_behind(made.grads[:heads], made.outputs), *made.grads[heads:]]
        return [list(made.outputs), list(itertools.compress(grads, plan.wants))]

    def otherwise(groups: list[list[Tensor]]) -> list[list[Tensor | None]]:
        *arguments, upstream, scale = groups
        for each in itertools.chain(arguments[0], arguments[1], upstream):
            torch_private.mark_rows_dynamic(each)
        outputs, _, made = by_dynamo(arguments, upstream, scale[0] if scale else None)
        return [outputs, made]

    # The logits of a chunk are nobody's any more once their gradient is made.
    by_row = (True, True, False, True, False)
    compiler = RowCompiler(
        traced, by_row, donates=any(plan.wants), meanwhile=row_statistics.prepare
    )
    return _Chunk(compiler, otherwise)


_not_compilable: set[tuple[str, _Plan]] = set()


def _run_chunk(
    text: str,
    plan: _Plan,
    arguments: list[list[Tensor]],
    upstream: list[Tensor],
    scale: Tensor | None,
) -> _Made:
    """A chunk as the settings say."""
    logits = arguments[0]
    choice = settings().region_body
    if choice == "auto":
        choice = "compiled" if logits[0].is_cuda else "eager"
    compiles = choice == "compiled" and (text, plan) not in _not_compilable
    # Compiled, always: what is excluded here is a matter of who calls, and Dynamo compiles for it.
    records = compiles or any(plan.wants)
    with torch_private.autograd_in_op() if records else torch.no_grad():
        if not compiles:
            return _eager_chunk(_function(text), plan, arguments, upstream, scale)
        heads = tuple((each.shape[1], each.dtype) for each in logits)
        chunk = _compiled_chunk(text, plan, heads)
        groups = [[each.detach() for each in group] for group in arguments]
        groups += [upstream, [] if scale is None else [scale]]
        run = chunk.compiler.compiled(groups)
        made: Any = None
        try:
            if run is None:
                made = chunk.otherwise(groups)
        except Exception as error:
            result = _eager_chunk(_function(text), plan, arguments, upstream, scale)
            _not_compilable.add((text, plan))  # where the eager run raises too, the body is wrong
            warnings.warn(
                f"{OP.name}: the body runs operator by operator, since it could not be compiled: "
                f"{error}",
                stacklevel=2,
            )
            return result
        # Past the fallback: what fails here may have written over the logits already.
        if run is not None:
            made = run()
        outputs, wanted = made
        total = None
        if plan.total is not None:
            total = _weighted_sum(_chosen(outputs, upstream, plan), upstream, plan)
    grads: list[Tensor | None] = [None] * len(plan.wants)
    for index, grad in zip(itertools.compress(itertools.count(), plan.wants), wanted, strict=True):
        grads[index] = grad
    return _Made(outputs if plan.outputs else [], total, grads)


# ------------------------------------------------------------------------------ reading of a call


@dataclasses.dataclass(frozen=True)
class _Head:
    """One projection."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    needs: GradientNeeds
    owner: int  # the projection into whose sums this one folds; itself by default
    kept: bool  # whether the forward keeps its logits for the backward

    def empty_kept(self) -> Tensor:
        """Room for the logits of all rows, as `ChunkLoop` lays them out; empty if not kept."""
        if not self.kept:
            return empty(self.input)
        return empty_kept(self.input, self.weight.shape[0], self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class _Region:
    """A call of either op, read and checked."""

    call: Any
    heads: list[_Head]
    wanted: list[bool]  # of row arguments and whole arguments, one after the other

    @property
    def num_rows(self) -> Any:
        return self.heads[0].input.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of ``total``."""
        return functools.reduce(
            torch.promote_types, (statistics_dtype(each.compute_dtype) for each in self.heads)
        )

    @property
    def wants(self) -> bool:
        """Whether any gradient is wanted."""
        return any(self.wanted) or any(each.needs for each in self.heads)

    @property
    def defers(self) -> bool:
        """Whether gradients made in the forward carry a factor, see `_fp16_scale`."""
        others = zip(self.wanted, (*self.call.row_args, *self.call.whole_args), strict=True)
        return any(
            wanted and defers_division(dtype)
            for wanted, dtype in (
                *((bool(each.needs), each.compute_dtype) for each in self.heads),
                *((wanted, each.dtype) for wanted, each in others),
            )
        )


def _flags(call: Any, name: str) -> list[bool]:
    """The flags of a list of operands; none are False for all."""
    expected = len(getattr(call, name))
    given = list(getattr(call, f"need_grad_{name}")) or [False] * expected
    if len(given) != expected:
        raise ValueError(
            f"need_grad_{name}: expected {expected} flags, one per tensor, or none, "
            f"got {len(given)}"
        )
    return given


_DTYPES = {str(each).removeprefix("torch."): each for each in validation.FLOAT_DTYPES}


def _read(call: Any) -> _Region:
    """Check a call.

    Raises:
        TypeError: A tensor of the wrong dtype.
        ValueError: Lists of the wrong length, shapes that do not fit, an unknown option.
    """
    count = len(call.inputs)
    if count == 0:
        raise ValueError("inputs: expected at least one projection, got none")
    names = call.compute_dtypes.split(",")
    for name, length in (
        ("weights", len(call.weights)),
        ("compute_dtypes", len(names)),
        ("has_bias", len(call.has_bias)),
        ("same_head", len(call.same_head) or count),
        ("keep_logits", len(call.keep_logits) or count),
    ):
        if length != count:
            raise ValueError(f"{name}: expected {count}, one per projection, got {length}")
    if len(call.biases) != sum(call.has_bias):
        raise ValueError(
            f"biases: expected {sum(call.has_bias)} tensors, as has_bias says, "
            f"got {len(call.biases)}"
        )
    for name in names:
        validation.check_choice("compute_dtypes", name, tuple(_DTYPES))
    validation.check_chunk_size(call.chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", call.grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    inputs, weights, biases = (_flags(call, name) for name in _OPERANDS[:3])
    bias_at = itertools.count()
    heads: list[_Head] = []
    first = call.inputs[0]
    for index in range(count):
        at = next(bias_at) if call.has_bias[index] else None
        bias = None if at is None else call.biases[at]
        input, weight = call.inputs[index], call.weights[index]
        try:
            validation.check_projection(input, weight, bias)
            validation.check_same_device(first, input=input)
            if input.dim() != 2 or input.shape[0] != first.shape[0]:
                raise ValueError(
                    f"input: expected shape [N, D] with the rows of inputs[0] "
                    f"{list(first.shape)}, got {list(input.shape)}"
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"projection {index}: {error}") from None
        needs = GradientNeeds(inputs[index], weights[index], at is not None and biases[at])
        owner = call.same_head[index] if call.same_head else index
        kept = bool(call.keep_logits) and call.keep_logits[index]
        head = _Head(input, weight, bias, _DTYPES[names[index]], needs, owner, kept)
        heads.append(head)
        _check_owner(heads, index)
    if any(call.keep_logits) and getattr(call, "coefficients", None):
        raise ValueError(
            "keep_logits: expected False for all projections with coefficients, whose gradients "
            f"are made in the forward, got {list(call.keep_logits)}"
        )
    for name in ("row_args", "whole_args"):
        for index, each in enumerate(getattr(call, name)):
            validation.check_same_device(first, **{f"{name}[{index}]": each})
    for index, each in enumerate(call.row_args):
        if each.dim() == 0 or each.shape[0] != first.shape[0]:
            raise ValueError(
                f"row_args[{index}]: expected a row per row of inputs[0] {list(first.shape)}, "
                f"got shape {list(each.shape)}"
            )
    wanted = [*_flags(call, "row_args"), *_flags(call, "whole_args")]
    for (name, index, each), need in zip(_others(call), wanted, strict=True):
        if need:
            validation.check_float_tensor(f"{name}[{index}]", each)
    region = _Region(call, heads, wanted)
    if region.wants:
        _check_derivatives(call.body)
    return region


def _others(call: Any) -> Iterator[tuple[str, int, Tensor]]:
    for name in ("row_args", "whole_args"):
        for index, each in enumerate(getattr(call, name)):
            yield name, index, each


def _check_owner(heads: list[_Head], index: int) -> None:
    head = heads[index]
    if not 0 <= head.owner <= index or heads[head.owner].owner != head.owner:
        raise ValueError(
            f"same_head: expected the first projection of the same weight, at most {index}, "
            f"got {head.owner} at {index}"
        )
    owner = heads[head.owner]
    same = (
        owner.weight.shape == head.weight.shape
        and owner.compute_dtype == head.compute_dtype
        and (owner.bias is None) == (head.bias is None)
        and (owner.needs.weight, owner.needs.bias) == (head.needs.weight, head.needs.bias)
    )
    if not same:
        raise ValueError(
            f"same_head: expected projections {head.owner} and {index} to have one weight, one "
            "bias, one compute dtype and the same gradients wanted of weight and bias, got others"
        )


def _absent(coefficient: Tensor) -> bool:
    """Whether a coefficient is the empty tensor of an output without one."""
    return coefficient.dim() == 1 and torch_private.static_size(coefficient.shape[0]) == 0


# Rows that shapes are learned with: no size that occurs elsewhere.
_PROBE_ROWS = 10007


def _whole_outputs(region: _Region, probe_rows: int) -> list[Tensor]:
    """Outputs of all rows, of the shapes and dtypes that the body gives some rows.

    Args:
        region: The call.
        probe_rows: How many. Fake tensors cost nothing, and with a number no operator of the body
            can put a guard on N; N may then be a symbol without a value.
    """
    call, rows = region.call, region.num_rows
    logits = [
        each.input.new_empty((probe_rows, each.weight.shape[0]), dtype=each.compute_dtype)
        for each in region.heads
    ]
    row_args = [each.new_empty((probe_rows, *each.shape[1:])) for each in call.row_args]
    outputs = _outputs_of(_function(call.body), logits, row_args, call.whole_args)
    for index, each in enumerate(outputs):
        if _PROBE_ROWS in [torch_private.static_size(size) for size in each.shape[1:]]:
            raise ValueError(
                "body: expected outputs of a narrow value per row, got rows in a second dimension "
                f"at {index}"
            )
    return [each.new_empty((rows, *each.shape[1:])) for each in outputs]


# ----------------------------------------------------------------------------- implementations

# What the largest upstream becomes where gradients of fp16 are made in the forward: an average
# probability of a 128k vocabulary, 8e-6, is then normal in fp16, and a value may still change 4096
# times as fast as its logit before fp16 overflows.
FP16_TOP_UPSTREAM = 16.0


def _fp16_scale(coefficients: list[Tensor], device: torch.device) -> Tensor:
    """The power of two that brings the largest coefficient to about `FP16_TOP_UPSTREAM`.

    A mean over 8192 rows would have gradients below fp16's range before the upstream of a
    `torch.amp.GradScaler` could lift them. They are made with this factor, and the backward divides
    by it and multiplies by the upstream in float32 at once. Nothing is read back.
    """
    if not coefficients:
        return torch.ones((), device=device)
    largest = torch.stack([each.abs().amax().float() for each in coefficients]).amax()
    usable = (largest > 0) & largest.isfinite()
    _, exponent = torch.frexp(torch.where(usable, largest, 1.0))
    exponent = (int(math.log2(FP16_TOP_UPSTREAM)) - exponent).clamp(-100, 100)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


# Without gradients 1024 rows of 128256 bf16 logits, which the product over them wants; its chunk is
# all that there is. The others as for every op.
CUDA_BUDGET = dataclasses.replace(chunking.CUDA_BUDGET, forward_only_bytes=256 * chunking.MIB)


@dataclasses.dataclass(frozen=True)
class HeadSize:
    """What the memory of one projection in a region depends on.

    Attributes:
        num_rows: N.
        num_classes: V.
        hidden_size: D.
        compute_dtype: Dtype of the product and the logits.
        weight_dtype: Dtype of the head.
        needs: Whether any of its gradients is wanted.
        needs_weight: Whether the head's is.
        owner: Index of the first projection with the same head, in whose sum it is folded.
    """

    num_rows: int
    num_classes: int
    hidden_size: int
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype
    needs: bool
    needs_weight: bool
    owner: int

    @property
    def head_shape(self) -> tuple[int, int]:
        """Shape of the head."""
        return self.num_classes, self.hidden_size

    @property
    def logits_bytes(self) -> int:
        """Bytes of all rows' logits."""
        return self.num_rows * self.num_classes * self.compute_dtype.itemsize

    def sum_dtypes(self, accum: str) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes in which the head's gradient is summed up and stored."""
        types = self.weight_dtype, self.compute_dtype, accum
        return accumulator_dtype(*types), stored_weight_dtype(*types)


def _row_bytes(size: HeadSize, device_type: str, *, held: bool) -> int:
    """Bytes of a row of a chunk: logits and their gradient.

    Args:
        size: Of the projection.
        device_type: ``"cuda"`` or any other.
        held: Whether all rows' logits and then gradients have memory of their own.
    """
    itemsize = size.compute_dtype.itemsize
    padded = padded_classes(size.num_classes, size.compute_dtype)
    # A compiled body writes a gradient over its logits if both are dense (`RowCompiler`).
    in_place = device_type == "cuda" and padded == size.num_classes
    element_bytes = itemsize * (2 if size.needs and not in_place else 1)
    if held:
        element_bytes -= itemsize
    if device_type != "cuda" and itemsize < 4:
        element_bytes += 4  # bodies compute in float32, and nothing fuses that here
    return padded * element_bytes


def _chunk_row_bytes(sizes: list[HeadSize], device_type: str, accum: str) -> int:
    """Bytes of a row of a chunk of all projections."""
    kept = keeps_logits(sizes, device_type, accum)
    return sum(
        _row_bytes(size, device_type, held=held) for size, held in zip(sizes, kept, strict=True)
    )


def _rows_of(
    sizes: list[HeadSize], device_type: str, accum: str, chunk_size: int | None, *, wants: bool
) -> int:
    """Rows of a chunk: all projections' logits and their gradients live at once."""
    cast_bytes = 0
    for size in sizes:
        _, stored = size.sum_dtypes(accum)
        if size.needs_weight and stored != torch.float32 and accum == "fp32":
            head_bytes = size.num_classes * size.hidden_size * stored.itemsize
            cast_bytes = max(cast_bytes, head_bytes)

    def within(cast_bytes: int) -> int:
        budget = chunking.chunk_budget_bytes(
            device_type,
            need_grad_weight=any(size.needs_weight for size in sizes),
            need_grads=wants,
            final_cast_bytes=cast_bytes,
            override_bytes=settings().chunk_budget_bytes,
            budget=CUDA_BUDGET if device_type == "cuda" else None,
        )
        return chunking.chunk_rows(sizes[0].num_rows, row_bytes, budget, chunk_size)

    row_bytes = _chunk_row_bytes(sizes, device_type, accum)
    rows, num_rows = within(cast_bytes), sizes[0].num_rows
    if chunk_size is None and rows >= num_rows > (alone := within(0)):
        # A single chunk's product is the gradient of the head, which then stands beside the chunk
        # and not behind it: two chunks instead.
        rows = max(alone, chunking.chunk_rows(num_rows, 1, num_rows // 2))
    return rows


def peak_bytes(
    sizes: list[HeadSize],
    device_type: str,
    accum: str,
    chunk_size: int | None,
    *,
    cut: bool = False,
) -> tuple[int, int]:
    """What a region holds of ``[rows, V]`` and ``[V, D]`` at its peak, and whole logits at least.

    Args:
        sizes: Its projections.
        device_type: ``"cuda"`` or any other.
        accum: ``"fp32"`` or ``"weight"``.
        chunk_size: Rows per chunk, None for the plan.
        cut: Whether the loss is of a slice of the rows. A program with whole logits then pads their
            gradient, beside the logits (measured: 3004 MiB for 2036, docs/performance.md).

    Returns:
        Bytes of the region; and those that any program with whole logits needs, which holds every
        projection's logits, then one gradient of logits beside the head's gradient. What it saves
        for its backward in float32 is not counted.
    """
    wants = any(size.needs for size in sizes)
    rows = _rows_of(sizes, device_type, accum, chunk_size, wants=wants)
    sums = stored_bytes = plain_end = 0
    chunk = rows * _chunk_row_bytes(sizes, device_type, accum)
    kept = keeps_logits(sizes, device_type, accum)
    learning = [size for size in sizes if size.needs_weight]
    for owner in dict.fromkeys(size.owner for size in learning):
        heads = [size for size in learning if size.owner == owner]
        size = heads[0]
        sum_dtype, stored = size.sum_dtypes(accum)
        head_elements = math.prod(size.head_shape)
        head_bytes = head_elements * stored.itemsize
        plain_end += head_bytes + sum(each.logits_bytes for each in heads) * (2 if cut else 1)
        shared = sum(each.owner == owner for each in sizes) > 1
        held = kept[owner]
        if stored == sum_dtype or (rows >= size.num_rows and not shared):
            sums += head_bytes + (size.logits_bytes if held else 0)
            continue
        stored_bytes = max(stored_bytes, head_bytes)
        sums += size.logits_bytes if held else head_elements * sum_dtype.itemsize
    plain = max(sum(size.logits_bytes for size in sizes), plain_end)
    return sums + max(chunk, stored_bytes), plain


def keeps_logits(sizes: list[HeadSize], device_type: str, accum: str) -> list[bool]:
    """For each projection whether a forward without coefficients does best to keep its logits.

    Where the logits of all rows take no more than the float32 sum that the backward would make
    chunk by chunk: it then needs neither that sum nor a second projection, a product in four. Not
    where two projections have one head, whose gradients are one sum.

    Args:
        sizes: Of all projections of the region; with symbols the answer is a guard on them.
        device_type: ``"cuda"`` or any other.
        accum: ``"fp32"`` or ``"weight"``.
    """
    owners = [size.owner for size in sizes]
    return [
        size.needs_weight
        and owners.count(size.owner) == 1
        and bool(
            keeping_is_less(
                size.num_rows,
                size.head_shape,
                device_type,
                weight_dtype=size.weight_dtype,
                compute_dtype=size.compute_dtype,
                accum=accum,
            )
        )
        for size in sizes
    ]


def _chunk_rows(region: _Region) -> int:
    """Rows of a chunk of a region."""
    sizes = [
        HeadSize(
            region.num_rows,
            head.weight.shape[0],
            head.weight.shape[1],
            head.compute_dtype,
            head.weight.dtype,
            bool(head.needs),
            head.needs.weight,
            head.owner,
        )
        for head in region.heads
    ]
    call = region.call
    return _rows_of(
        sizes,
        region.heads[0].input.device.type,
        call.grad_weight_accum_dtype,
        call.chunk_size,
        wants=region.wants,
    )


def planned_rows(call: Any) -> int:
    """Rows of one chunk of a call, for the report of the rewrite; takes fake tensors.

    Args:
        call: Arguments by name, as `Op.named` gives them.

    Returns:
        Rows.
    """
    return _chunk_rows(_read(call))


def _spans(num_rows: int, rows: int) -> list[tuple[int, int]]:
    """Start and stop row of every chunk; no last chunk of a single row.

    A compiler takes a size of one for a constant: such a chunk would be compiled by itself.
    """
    starts = list(range(0, num_rows, rows))
    if rows > 2 and len(starts) > 1 and num_rows - starts[-1] == 1:
        starts[-1] -= 1
    return list(itertools.pairwise([*starts, num_rows])) if starts else []


def _out_of_the_way(made: _Made, logits: list[Tensor]) -> None:
    """Copy what a chunk has left in the memory of its logits, but for a gradient over its own.

    An output may be a view of logits; and Inductor may put the gradient of one argument where the
    logits of another were. A gradient that is folded, and the next chunk, write over them.
    """
    memory = {each.untyped_storage().data_ptr() for each in logits}

    def is_there(each: Tensor) -> bool:
        return each.untyped_storage().data_ptr() in memory

    made.outputs = [each.clone() if is_there(each) else each for each in made.outputs]
    for index, grad in enumerate(made.grads):
        if grad is None or not is_there(grad):
            continue
        own = logits[index] if index < len(logits) else None
        if own is None or grad.data_ptr() != own.data_ptr() or grad.stride() != own.stride():
            made.grads[index] = grad.clone()


class _Loops:
    """The loops of all projections over the same rows, and the arguments of the body.

    Args:
        region: The call.
        rows: Of a chunk.
        spare_fp16: See `ChunkLoop`.
        kept: For each projection the memory of all rows' logits, empty for that of a chunk.
        projected: Whether the logits are in that memory already.
    """

    def __init__(
        self,
        region: _Region,
        rows: int,
        *,
        spare_fp16: bool,
        kept: list[Tensor],
        projected: bool = False,
    ) -> None:
        self._region = region
        call = region.call
        self.spans = _spans(region.num_rows, rows)
        self._chunks = [ChunkMemory(each if each.dim() == 2 else None) for each in kept]
        self._projected = [projected and each.dim() == 2 for each in kept]
        self.loops: list[LossLoop] = []
        copies: dict[Any, LossLoop] = {}
        for index, head in enumerate(region.heads):
            weight = head.weight
            # A teacher may be the detached head itself: one copy in the products' dtype for both.
            key = (
                weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, head.compute_dtype
            )  # fmt: skip
            loop = LossLoop(
                head.input,
                weight,
                head.bias,
                needs=head.needs,
                compute_dtype=head.compute_dtype,
                accum=call.grad_weight_accum_dtype,
                chunk_size=rows,
                gain=1.0,  # the upstream's own factor, see _fp16_scale
                spare_fp16=spare_fp16,
                chunk=self._chunks[index],
                may_keep_gradient=True,
                sums=self.loops[head.owner] if head.owner != index else None,
                shared_sums=sum(other.owner == head.owner for other in region.heads) > 1,
                like=copies.get(key),
            )
            copies.setdefault(key, loop)
            self.loops.append(loop)
        self._arguments = Arguments(
            [*call.row_args, *call.whole_args],
            ["per_row"] * len(call.row_args) + ["whole"] * len(call.whole_args),
            region.wanted,
            (region.num_rows,),
            region.num_rows,
        )

    def _logits(self, start: int, stop: int) -> list[Tensor]:
        return [
            loop.buffer(start, stop) if projected else loop.project(start, stop)
            for loop, projected in zip(self.loops, self._projected, strict=True)
        ]

    def run(
        self,
        start: int,
        stop: int,
        upstream: list[Tensor],
        scale: Tensor | None,
        plan: _Plan,
    ) -> _Made:
        """Project some rows, run the body and fold the gradients; returns what it made of them."""
        call, heads = self._region.call, len(self.loops)
        others = self._arguments.chunk(start, stop)
        if any(plan.wants):
            # Tensors of inference mode cannot be saved for a derivative.
            others = [each.clone() if each.is_inference() else each for each in others]
        rows = len(call.row_args)
        logits = self._logits(start, stop)
        made = _run_chunk(
            call.body,
            plan,
            [logits, others[:rows], others[rows:]],
            [each[start:stop] for each in upstream],
            scale,
        )
        _out_of_the_way(made, logits)
        del logits
        for index, loop in enumerate(self.loops):
            grad, made.grads[index] = made.grads[index], None
            if not loop.needs:
                continue
            if grad is not None:
                loop.fold_any(start, stop, grad)
            elif loop.keeps_gradient:
                loop.fold(start, stop, loop.buffer(start, stop).zero_())
            elif loop.grad_input is not None:
                loop.grad_input[start:stop].zero_()
            del grad  # or it would live beside the next projection's
        self._arguments.fold(start, stop, made.grads[heads:])
        made.grads = []
        return made

    def finish(self) -> list[Tensor]:
        """The gradients as one list: inputs, weights, biases, row and whole arguments."""
        call, heads = self._region.call, self._region.heads
        for loop in self.loops:
            loop.free_chunk()  # all, before the first cast of a gradient
        made = [loop.finish() for loop in self.loops]
        inputs, weights, biases = zip(*made, strict=True)
        with_bias = [
            grad for grad, head in zip(biases, heads, strict=True) if head.bias is not None
        ]
        return [
            *(
                empty(tensor) if grad is None else grad
                for tensor, grad in zip(
                    (*call.inputs, *call.weights, *call.biases),
                    (*inputs, *weights, *with_bias),
                    strict=True,
                )
            ),
            *self._arguments.finish([*call.row_args, *call.whole_args]),
        ]

    @property
    def wants(self) -> tuple[bool, ...]:
        """As `_Plan.wants`."""
        return (*(bool(each.needs) for each in self._region.heads), *self._region.wanted)


@contextlib.contextmanager
def _own_modes(device_type: str) -> Iterator[None]:
    """Neither the caller's autocast nor his inference mode.

    The body's casts are all in its text; and what inference mode makes has no derivative, and would
    be compiled for by itself.
    """
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _detached(call: Any) -> Any:
    for name in (*_OPERANDS, "coefficients", "grad_outputs", "kept"):
        if hasattr(call, name):
            setattr(call, name, [each.detach() for each in getattr(call, name)])
    return call


def _forward(*args: Any, **kwargs: Any) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    region = _read(_detached(OP.named(args, kwargs)))
    call, device = region.call, region.heads[0].input.device
    weighted = bool(call.coefficients)
    wants = weighted and region.wants
    with _own_modes(device.type):
        kept = [each.empty_kept() for each in region.heads]
        # Of a backward's chunks where it is given the logits: small ones would save nothing then.
        rows = _chunk_rows(region) if any(call.keep_logits) else None
        if not wants:
            frozen = GradientNeeds(False, False, False)
            heads = [dataclasses.replace(each, needs=frozen) for each in region.heads]
            region = _Region(call, heads, [False] * len(region.wanted))
        rows = _chunk_rows(region) if rows is None else rows
        # Contiguous, so that the strides of an upstream are nothing to compile for.
        upstream = [each.contiguous() for each in call.coefficients if not _absent(each)]
        loops = _Loops(region, rows, spare_fp16=region.defers, kept=kept)
        plan = _Plan(
            loops.wants,
            tuple(not _absent(each) for each in call.coefficients),
            region.dtype if weighted else None,
            outputs=True,
        )
        scale = None
        if region.defers:
            scale = _fp16_scale([each for each in upstream if each.numel()], device)
        total = torch.zeros(() if weighted else 0, dtype=region.dtype, device=device)
        outputs: list[Tensor] = []
        for start, stop in loops.spans:
            made = loops.run(start, stop, upstream, scale, plan)
            if start == 0:
                outputs = [
                    each.new_empty((region.num_rows, *each.shape[1:])) for each in made.outputs
                ]
            for whole, part in zip(outputs, made.outputs, strict=True):
                whole[start:stop] = part
            if made.total is not None:
                total += made.total
            del made
        if not loops.spans:
            outputs = _whole_outputs(region, 0)
        grads = loops.finish() if wants else kept if any(call.keep_logits) else []
        if scale is not None:
            grads.append(scale)
    return outputs, total, grads


def _backward_rows(*args: Any, **kwargs: Any) -> list[Tensor]:
    region = _read(_detached(OP_BACKWARD.named(args, kwargs)))
    call = region.call
    with _own_modes(region.heads[0].input.device.type):
        upstream = [each.contiguous() for each in call.grad_outputs]
        kept = [empty(each.input) for each in region.heads]
        for index, each in enumerate(call.kept):
            mine = gradients.to_write_over(each) if each.dim() == 2 else None
            kept[index] = kept[index] if mine is None else mine
        # No factor for fp16: the upstream brings a GradScaler's own.
        loops = _Loops(region, _chunk_rows(region), spare_fp16=False, kept=kept, projected=True)
        del kept
        plan = _Plan(loops.wants, tuple(call.has_grad_output), None, outputs=False)
        for start, stop in loops.spans:
            loops.run(start, stop, upstream, None, plan)
        grads = loops.finish()
        for index, each in enumerate(_operands(call)):
            grads[index] = grads[index].to(each.dtype)
    return grads


def _operands(call: Any) -> list[Tensor]:
    return [each for name in _OPERANDS for each in getattr(call, name)]


# --------------------------------------------------------------------------------------- fakes


def _fake_grads(region: _Region, *, stored: bool) -> list[Tensor]:
    """Gradients as the forward stores them, or as the backward returns them."""
    call, heads = region.call, region.heads
    grads = []
    for head in heads:
        dtype = head.input.dtype
        if stored:
            dtype = stored_input_dtype(dtype, head.compute_dtype)
        needed = head.needs.input
        grads.append(
            head.input.new_empty(head.input.shape, dtype=dtype) if needed else empty(head.input)
        )
    for index, head in enumerate(heads):
        weight, dtype = head.weight, head.weight.dtype
        if stored:
            dtype = stored_weight_dtype(dtype, head.compute_dtype, call.grad_weight_accum_dtype)
        own = head.needs.weight and head.owner == index
        grads.append(empty_grad_weight(weight, dtype) if own else empty(weight))
    for index, head in enumerate(heads):
        if head.bias is None:
            continue
        dtype = stored_bias_dtype(head.bias.dtype) if stored else head.bias.dtype
        own = head.needs.bias and head.owner == index
        grads.append(head.bias.new_empty(head.bias.shape, dtype=dtype) if own else empty(head.bias))
    for (_, _, each), need in zip(_others(call), region.wanted, strict=True):
        dtype = stored_tensor_dtype(each.dtype) if stored else each.dtype
        grads.append(each.new_empty(each.shape, dtype=dtype) if need else empty(each))
    return grads


def _fake(*args: Any, **kwargs: Any) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    call = OP.named(args, kwargs)
    region = _read(call)
    first = call.inputs[0]
    with _own_modes(first.device.type):
        outputs = _whole_outputs(region, _PROBE_ROWS)
    weighted = bool(call.coefficients)
    if weighted:
        flags = tuple(not _absent(each) for each in call.coefficients)
        present = [each for each in call.coefficients if not _absent(each)]
        _chosen(outputs, present, _Plan((), flags, region.dtype, outputs=True))
    grads = _fake_grads(region, stored=True) if weighted and region.wants else []
    if grads and region.defers:
        grads.append(first.new_empty((), dtype=torch.float32))
    if any(call.keep_logits):
        grads = [each.empty_kept() for each in region.heads]
    return outputs, first.new_empty(() if weighted else 0, dtype=region.dtype), grads


def _fake_backward(*args: Any, **kwargs: Any) -> list[Tensor]:
    return _fake_grads(_read(OP_BACKWARD.named(args, kwargs)), stored=False)


# ------------------------------------------------------------------------------------ autograd


def _is_tensors(value: Any) -> bool:
    # An empty list of flags counts as one of tensors too, to the wrapper that flattens them.
    return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], Tensor))


def _folded(call: Any) -> set[str]:
    """Weights and biases whose gradients are part of another projection's, see ``same_head``."""
    names = set()
    bias_at = itertools.count()
    for index, has_bias in enumerate(call.has_bias):
        at = next(bias_at) if has_bias else None
        if call.same_head and call.same_head[index] != index:
            names |= {f"weights.{index}", f"biases.{at}"}
    return names


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    call = OP.named(inputs, {})
    outputs, total, grads = output
    required = iter(ctx.needs_input_grad)
    stated: list[bool] = []
    ctx.lengths = {}
    for name in OP.arguments:
        value = getattr(call, name)
        if not _is_tensors(value):
            next(required, None)
            continue
        ctx.lengths[name] = len(value)
        requires = [next(required) for _ in value]
        if name == "coefficients" and any(requires):
            raise ValueError("coefficients: expected tensors that need no gradient; detach them")
        if name not in _OPERANDS:
            continue
        wanted = _flags(call, name)
        stated += wanted
        for index, (requires_one, wanted_one) in enumerate(zip(requires, wanted, strict=True)):
            if requires_one and not wanted_one:
                raise ValueError(
                    f"need_grad_{name}: expected True at {index}, since {name}[{index}] requires "
                    "grad, got False; detach it if no gradient is wanted"
                )
    # Else autograd would make zeros for the outputs that nobody uses, one of [V, D] among them.
    ctx.set_materialize_grads(False)
    names = [f"{name}.{index}" for name in _OPERANDS for index in range(len(getattr(call, name)))]
    operands = _operands(call)
    folded = _folded(call)
    stated = [each and name not in folded for name, each in zip(names, stated, strict=True)]
    ctx.weighted = bool(call.coefficients)
    if not ctx.weighted:
        ctx.mark_non_differentiable(
            total, *grads, *(each for each in outputs if not each.is_floating_point())
        )
        ctx.wanted = dict(zip(names, stated, strict=True))
        ctx.options = {
            name: getattr(call, name)
            for name in OP_BACKWARD.arguments
            if name not in ("grad_outputs", "has_grad_output", "kept", *_OPERANDS)
        }
        ctx.save_for_backward(*operands, *grads)
        return
    ctx.mark_non_differentiable(*outputs, *grads)
    region = _read(call)
    stored: dict[str, Tensor | None] = {}
    ctx.renamed = {}
    for name, need, grad in zip(names, stated, grads[: len(names)] or operands, strict=True):
        has = bool(grads) and need
        key = name
        if has and name.startswith("weights") and grad.dtype == torch.float16:
            head = region.heads[int(name.split(".")[1])]
            if defers_division(head.compute_dtype):
                key = f"spare.{name}"  # accumulated in fp16, see FP16_ACCUM_GAIN
        ctx.renamed[key] = name
        stored[key] = grad if has else None
    gradients.keep(
        ctx,
        OP.name,
        dict(zip(stored, operands, strict=True)),
        stored,
        denominator=grads[-1] if grads and region.defers else None,
        private=call.grads_are_private,
    )


def _autograd_backward(
    ctx: Any, grad_outputs: list[Tensor | None], grad_total: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    lists: dict[str, list[Tensor | None]] = {
        name: [None] * length for name, length in ctx.lengths.items()
    }
    grads: dict[str, Tensor | None] = {}
    if ctx.weighted:
        if grad_total is not None:
            made = gradients.give(ctx, grad_total, accumulated="spare.")
            grads = {ctx.renamed[key]: grad for key, grad in made.items()}
    elif any(each is not None for each in grad_outputs):
        saved = iter(ctx.saved_tensors)
        result = OP_BACKWARD.packet(
            [each for each in grad_outputs if each is not None],
            *([next(saved) for _ in range(ctx.lengths[name])] for name in _OPERANDS),
            list(saved),
            has_grad_output=[each is not None for each in grad_outputs],
            **ctx.options,
        )
        grads = {
            key: grad if wanted else None
            for (key, wanted), grad in zip(ctx.wanted.items(), result, strict=True)
        }
    for key, grad in grads.items():
        name, index = key.split(".")
        lists[name][int(index)] = grad
    # As many as there were arguments: the dispatcher drops trailing ones that have their default.
    return tuple(lists.get(name) for name in OP.arguments[: len(ctx.needs_input_grad)])


# --------------------------------------------------------------------------------------- flops


def _all_flops(call: Any, made: bool) -> int:
    # What the body computes is not counted: per element and small against the products.
    total = 0
    for index, (input, weight) in enumerate(zip(call.inputs, call.weights, strict=True)):
        products = 1
        if made:
            products += sum(_flags(call, name)[index] for name in ("inputs", "weights"))
        if getattr(call, "kept", ()) and call.keep_logits[index]:
            products -= 1
        total += product_flops(input, weight) * products
    return total


def _flops(inputs: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    call = OP.named((inputs, *args), kwargs)
    return _all_flops(call, bool(call.coefficients))


def _flops_backward(grad_shapes: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _all_flops(OP_BACKWARD.named((grad_shapes, *args), kwargs), True)


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _autograd_backward)
OP.flops(_flops)
OP_BACKWARD.implement(_backward_rows, _fake_backward)
OP_BACKWARD.autograd(*gradients.refuse_twice(OP.name))
OP_BACKWARD.flops(_flops_backward)


# ------------------------------------------------------------------------ value and gradient apart

OP_VALUE = Op("with_gradient_of(Tensor value, Tensor source) -> Tensor")


def _value(value: Tensor, source: Tensor) -> Tensor:
    return value.clone()


def _fake_value(value: Tensor, source: Tensor) -> Tensor:
    return torch.empty_like(value)


def _setup_value(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.source_dtype = inputs[1].dtype


def _backward_value(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    # The source has the same value up to rounding, and the gradient that the value lacks.
    return grad, None if grad is None else grad.to(ctx.source_dtype)


OP_VALUE.implement(_value, _fake_value)
OP_VALUE.autograd(_setup_value, _backward_value)
