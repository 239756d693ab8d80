"""The callable of ``greyhound::linear_loss``: a string in the op's arguments, a function here.

An operator takes tensors, numbers and strings. So the callable and the shape of its arguments are
named by a key into a registry of this process:

- An eager call registers its `LossCall` while it runs, and no longer.
- A graph under ``torch.compile`` holds the key as a constant, and may run as long as the process
  does: what a graph names is kept. There are as many as compilations.

A key never stands for something else. It holds a number drawn for this process, or, for a function
that can be imported, its name and a hash of its code, which another process with a warm compile
cache can resolve by itself; anything else that is not in the registry is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import itertools
import marshal
import sys
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from greyhound_ops import torch_private

LogitsGradFn = Callable[..., tuple[Tensor, Tensor]]

# ------------------------------------------------------------------------------ marked arguments


class PerRow:
    """A tensor that is cut like the rows of the input; made by `per_row`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Whole:
    """A tensor that every chunk gets as it is; made by `whole`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def per_row(tensor: Tensor) -> PerRow:
    """Mark an argument of a chunked loss as one with a row per row of the input.

    Args:
        tensor: ``[..., *]`` with the leading dimensions of the input, or ``[N, *]``. Another length
            is an error instead of a tensor passed whole.

    Returns:
        The mark; it may stand wherever the tensor may, inside lists, tuples and dicts too.
    """
    _check_marked("per_row", tensor)
    return PerRow(tensor)


def whole(tensor: Tensor) -> Whole:
    """Mark an argument of a chunked loss as one that every chunk gets whole.

    Args:
        tensor: Any shape; its leading dimension may happen to be N.

    Returns:
        The mark; it may stand wherever the tensor may, inside lists, tuples and dicts too.
    """
    _check_marked("whole", tensor)
    return Whole(tensor)


def _check_marked(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


@dataclasses.dataclass
class Leaves:
    """What a call's arguments hold that the operator takes by itself.

    Numbers are not part of the key, so that a graph in which one changes, or is a symbol, stays
    right.
    """

    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def flatten(value: Any, leaves: Leaves) -> tuple[Any, ...]:
    """Take tensors and numbers out of nested arguments.

    Written for Dynamo to trace: plain containers only, nothing of torch's own trees.

    Returns:
        What is left, as tuples whose first element says what they are.
    """
    if isinstance(value, (PerRow, Whole)):
        leaves.tensors.append(value.tensor)
        return ("tensor", "per_row" if isinstance(value, PerRow) else "whole")
    if isinstance(value, Tensor):
        leaves.tensors.append(value)
        return ("tensor", "rule")
    if value is None or isinstance(value, (bool, str)):
        return ("constant", value)
    if isinstance(value, (int, torch.SymInt)):
        leaves.ints.append(value)  # type: ignore[arg-type]
        return ("int",)
    if isinstance(value, (float, torch.SymFloat)):
        leaves.floats.append(value)  # type: ignore[arg-type]
        return ("float",)
    if isinstance(value, list):
        return ("list", *[flatten(each, leaves) for each in value])
    if isinstance(value, tuple):
        parts = [flatten(each, leaves) for each in value]
        if hasattr(value, "_fields"):
            return ("namedtuple", type(value), *parts)
        return ("tuple", *parts)
    if isinstance(value, dict):
        return ("dict", *[(key, flatten(each, leaves)) for key, each in value.items()])
    if torch.compiler.is_dynamo_compiling() and isinstance(value, types.FunctionType):
        return ("function", _guarded_token(value))
    return ("object", value)


def _unflatten(
    node: tuple[Any, ...],
    tensors: Iterator[Tensor],
    ints: Iterator[int],
    floats: Iterator[float],
) -> Any:
    kind, *rest = node
    if kind == "tensor":
        return next(tensors)
    if kind == "int":
        return next(ints)
    if kind == "float":
        return next(floats)
    if kind in ("constant", "object"):
        return rest[0]
    if kind == "function":
        return _by_token(rest[0])
    if kind == "dict":
        return {key: _unflatten(each, tensors, ints, floats) for key, each in rest}
    if kind == "namedtuple":
        return rest[0](*(_unflatten(each, tensors, ints, floats) for each in rest[1:]))
    values = [_unflatten(each, tensors, ints, floats) for each in rest]
    return values if kind == "list" else tuple(values)


def _marks(node: tuple[Any, ...]) -> Iterator[str]:
    kind, *rest = node
    if kind == "tensor":
        yield rest[0]
    elif kind == "dict":
        for _, each in rest:
            yield from _marks(each)
    elif kind in ("list", "tuple", "namedtuple"):
        for each in rest:
            if isinstance(each, tuple):
                yield from _marks(each)


# ------------------------------------------------------------------------------------- callables


def _check_loss(loss: object, what: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{what}: expected a scalar loss tensor per chunk, got {type(loss).__name__}"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"{what}: expected a scalar loss per chunk, got shape {list(loss.shape)}; sum over "
            "the rows"
        )
    if not loss.is_floating_point():
        raise ValueError(f"{what}: expected a floating-point loss per chunk, got {loss.dtype}")
    return loss


class LogitsGrad:
    """A loss of logits, differentiated by autograd; made by `autograd_loss_and_logits_grad`.

    Attributes:
        token: Its name in this process; None for one made inside a compiled region.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
        self._loss_fn = loss_fn
        self.token: str | None = None
        if not torch.compiler.is_dynamo_compiling():
            functools.update_wrapper(self, loss_fn, updated=())
            self.token = _name_weakly(self)

    @property
    def loss_fn(self) -> Callable[..., Tensor]:
        """The loss; fixed, since compiled graphs know it by the token."""
        return self._loss_fn

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and its gradient with respect to the logits, both detached.

        Raises:
            ValueError: The loss is not a scalar, or does not depend on the logits.
        """
        if torch.compiler.is_dynamo_compiling():
            # What Dynamo can trace, see LossCall. The loss is not detached: it has a graph only if
            # the callable holds a learnable tensor, and the op looks for one.
            grad, loss = torch.func.grad_and_value(self._checked)(logits.detach(), *args, **kwargs)
            return loss, grad
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self._checked(leaf, *args, **kwargs)
            (grad,) = _gradients(loss, [leaf])
        return loss.detach(), torch.zeros_like(logits) if grad is None else grad

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or one from another process, is another callable: it must not keep the token.
        return LogitsGrad, (self.loss_fn,)

    def _checked(self, *args: Any, **kwargs: Any) -> Tensor:
        return _check_loss(self.loss_fn(*args, **kwargs), "loss_fn")


class Direct:
    """A callable that makes its own logits gradient, under a name of this process.

    For those that Dynamo cannot take as a constant: modules, bound methods, compiled functions.
    """

    def __init__(self, function: LogitsGradFn) -> None:
        if not callable(function):
            raise TypeError(f"loss_and_grad_fn: expected a callable, got {type(function).__name__}")
        self.function = function
        self.token = _name_weakly(self)

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What the callable returns."""
        return self.function(logits, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Direct, (self.function,)


def _gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a loss, None for a leaf that it does not use."""
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: expected a loss that depends on the logits, got one without a graph; it is "
            "detached, or made under torch.no_grad"
        )
    return torch.autograd.grad(loss, leaves, allow_unused=True)


# -------------------------------------------------------------------------------------- registry

_PROCESS = uuid.uuid4().hex
_numbers = itertools.count()
_TOKEN = "__greyhound_token__"

# Callables by their token: those that a graph names for good, adapters as long as they live.
_kept: dict[str, Any] = {}
_alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_calls: dict[str, LossCall] = {}


def _fresh() -> str:
    return f"process:{_PROCESS}:{next(_numbers)}"


def _name_weakly(value: Any) -> str:
    token = _fresh()
    _alive[token] = value
    return token


def _code_hash(function: types.FunctionType) -> str:
    # Version 2 writes no references, whose flags depend on what else holds the objects.
    return hashlib.sha256(marshal.dumps(function.__code__, 2)).hexdigest()[:16]


def _import(module: str, qualname: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def _importable(function: Any) -> str | None:
    """A token that says where to import a function from, if it is a plain one of a module."""
    if type(function) is not types.FunctionType or function.__closure__:
        return None
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or module not in sys.modules or "<" in qualname:
        return None
    try:
        found = _import(module, qualname)
    except (ImportError, AttributeError):
        return None
    return f"import:{module}:{qualname}:{_code_hash(function)}" if found is function else None


@torch_private.constant_under_dynamo
def name_callable(function: Any) -> str:
    """The token of a callable; runs while Dynamo traces and gives its graph a constant.

    Dynamo tells functions apart by their code, so closures of one `def` look alike to it. The token
    is left on the function, where the caller reads it once more: that read is guarded.
    """
    token = getattr(function, _TOKEN, None)
    if token is not None and _kept.get(token) is function:
        return str(token)
    token = _importable(function)
    if token is None or _kept.get(token, function) is not function:
        token = _fresh()
    _kept[token] = function
    if type(function) is types.FunctionType:
        setattr(function, _TOKEN, token)
    return token


@torch_private.constant_under_dynamo
def name_call(token: str, differentiate: bool, structure: tuple[Any, ...]) -> str:
    """The key of a call in a compiled graph; what it names is kept from now on."""
    plain = _is_plain(structure)
    text = repr(structure) if plain else _fresh()
    key = f"{token}|{int(differentiate)}|{text}"
    if key not in _calls:
        _calls[key] = LossCall(_by_token(token), differentiate, structure, compiled=True)
    return key


def _is_plain(node: tuple[Any, ...]) -> bool:
    """Whether a structure can be written down and read back."""
    kind, *rest = node
    if kind in ("object", "function", "namedtuple"):
        return False
    if kind == "dict":
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in rest)
    return kind not in ("list", "tuple") or all(_is_plain(each) for each in rest)


def _by_token(token: str) -> Any:
    if token in _kept:
        return _kept[token]
    value = _alive.get(token)
    if value is None:
        raise RuntimeError(f"loss_and_grad_fn: {token} is gone from this process")
    function = value.loss_fn if isinstance(value, LogitsGrad) else value.function
    _kept[token] = function  # a graph names it from now on
    return function


def _guarded_token(function: Any) -> str:
    """The token of a function under Dynamo, guarded, see `name_callable`."""
    token = name_callable(function)
    # A function made inside the compiled region has no attribute to read, and needs no guard.
    return str(getattr(function, _TOKEN, token))


def key_in_graph(function: Any, structure: tuple[Any, ...]) -> str:
    """The key of a call that Dynamo traces."""
    differentiate = isinstance(function, LogitsGrad)
    if isinstance(function, (LogitsGrad, Direct)) and function.token is not None:
        return name_call(function.token, differentiate, structure)
    if differentiate:
        function = function.loss_fn
    if isinstance(function, functools.partial) and not function.args:
        function = function.func  # its keywords are arguments already
    if not isinstance(function, types.FunctionType):
        raise TypeError(
            "loss_and_grad_fn: expected a function inside a compiled region, got "
            f"{type(function).__name__}; make autograd_loss_and_logits_grad, ChunkedLinearLoss, or "
            "a function around it, outside the region"
        )
    return name_call(_guarded_token(function), differentiate, structure)


@contextmanager
def registered(call: LossCall) -> Iterator[str]:
    """The key of an eager call, for as long as the block runs."""
    key = f"call:{_PROCESS}:{next(_numbers)}"
    _calls[key] = call
    try:
        yield key
    finally:
        del _calls[key]


def keep_for_good(call: LossCall) -> str:
    """The key of a call that some other tracer than Dynamo puts into a graph."""
    key = _fresh()
    _calls[key] = call
    return key


def resolve(key: str) -> LossCall:
    """The call that a key names.

    Raises:
        RuntimeError: The key is of another process, and its callable cannot be imported.
    """
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _resolve_by_import(key)
    return call


def _resolve_by_import(key: str) -> LossCall:
    token, differentiate, text = (*key.split("|", 2), "", "")[:3]
    if token.startswith("import:"):
        _, module, qualname, code_hash = token.split(":")
        try:
            function = _import(module, qualname)
            structure = ast.literal_eval(text)
        except (ImportError, AttributeError, ValueError, SyntaxError):
            function = None
        if type(function) is types.FunctionType and _code_hash(function) == code_hash:
            return LossCall(function, differentiate == "1", structure, compiled=True)
    raise RuntimeError(
        f"call: expected the name of a callable of this process, got {key!r}; a graph that was "
        "compiled by another process finds its loss only if that is a function of an importable "
        "module, with the same code"
    )


# -------------------------------------------------------------------------------------- one call


def captured_leaves(loss: Tensor, own: Sequence[Tensor]) -> list[Tensor]:
    """Leaf tensors that a loss would give gradients to beside those of ours."""
    found, seen = [], set()
    pending = [loss.grad_fn]
    mine = {id(each) for each in own}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in mine:
            found.append(leaf)
        pending.extend(each for each, _ in node.next_functions)
    return found


_Made = tuple[Tensor, "Tensor | None", "list[Tensor | None]"]


class LossCall:
    """A callable with the places of its arguments.

    Args:
        function: The loss (``differentiate``), or what returns loss and logits gradient.
        differentiate: Whether autograd makes the gradients.
        structure: From `flatten`, of ``(args, kwargs, parameters)``.
        compiled: Whether to compile the callable: in a compiled region everything is.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        differentiate: bool,
        structure: tuple[Any, ...],
        *,
        compiled: bool = False,
    ) -> None:
        # Dynamo names the parameters of a compiled module as those of the module in it.
        self.function = getattr(function, "_orig_mod", function) if compiled else function
        self.differentiate = differentiate
        self.structure = structure
        self.marks = list(_marks(structure))
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._compile = compiled and not torch_private.is_compiled(self.function)

    def _call(
        self,
        logits: Tensor,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
    ) -> Any:
        args, kwargs, parameters = _unflatten(
            self.structure, iter(tensors), iter(ints), iter(floats)
        )
        if parameters:
            assert isinstance(self.function, nn.Module)
            return torch.func.functional_call(self.function, parameters, (logits, *args), kwargs)
        return self.function(logits, *args, **kwargs)

    def run(
        self,
        logits: Tensor,
        tensors: list[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        *,
        want_logits: bool,
        want_tensors: list[bool],
        by_row: list[bool],
        grad_mode: bool,
    ) -> _Made:
        """Loss and gradients of one chunk.

        Args:
            logits: ``[C, V]``.
            tensors: The tensor arguments of this chunk.
            ints: Integer arguments.
            floats: Floating-point arguments.
            want_logits: Whether the gradient of the logits is wanted.
            want_tensors: The same for each tensor.
            by_row: Whether a tensor is one of rows, whose number varies from chunk to chunk.
            grad_mode: Whether gradients were recorded where the op was called. Only then is a
                learnable tensor that the callable holds by itself an error.

        Returns:
            Loss, gradient of the logits or None, and one gradient or None per tensor.
        """
        wants = (want_logits, *want_tensors)
        if self.differentiate and logits.dtype == torch.float16:
            # Autograd hands a gradient back in the dtype of its leaf, and the upstream, which in
            # plain torch lifts it into fp16's range first, is not there yet: probabilities of a
            # 128k vocabulary would be rounded to two or three bits. The arguments follow, since not
            # every loss takes two dtypes.
            logits, *tensors = (
                each.float() if each.dtype == torch.float16 else each for each in (logits, *tensors)
            )
        if self.differentiate:
            # The op's tensors may require grad where it was called; here only those wanted do.
            logits, *tensors = (
                each.detach().requires_grad_(wanted and not self._compile)
                for each, wanted in zip((logits, *tensors), wants, strict=True)
            )
        for each, varies in zip((logits, *tensors), (True, *by_row), strict=True):
            if varies:
                torch_private.mark_rows_dynamic(each)
        arguments = (logits, tensors, ints, floats)
        with torch_private.autograd_in_op() if grad_mode else torch.no_grad():
            if self._compile:
                return self._run_compiled(wants, arguments)
            return self._run(wants, arguments)

    def _run(self, wants: tuple[bool, ...], arguments: Any) -> _Made:
        logits, tensors, ints, floats = arguments
        if not self.differentiate:
            result = self._call(logits, tensors, ints, floats)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise ValueError(
                    "loss_and_grad_fn: expected (loss, grad_logits), got "
                    f"{type(result).__name__}; a function that returns the loss alone goes through "
                    "autograd_loss_and_logits_grad"
                )
            loss = _check_loss(result[0], "loss_and_grad_fn")
            if loss.requires_grad:
                self._refuse_captured(loss, [], logits)
            return loss.detach(), result[1] if wants[0] else None, [None] * len(tensors)
        leaves = [
            each.requires_grad_()
            for each, wanted in zip((logits, *tensors), wants, strict=True)
            if wanted
        ]
        loss = _check_loss(self._call(logits, tensors, ints, floats), "loss_fn")
        if loss.requires_grad:
            self._refuse_captured(loss, leaves, logits)
        if not leaves:
            return loss.detach(), None, [None] * len(tensors)
        made = iter(_gradients(loss, leaves))
        grads = [next(made) if wanted else None for wanted in wants]
        if wants[0] and grads[0] is None:
            grads[0] = torch.zeros_like(logits)
        return loss.detach(), grads[0], grads[1:]

    def _refuse_captured(self, loss: Tensor, own: list[Tensor], logits: Tensor) -> None:
        # A callable's own leaf over the logits it was given is no learnable tensor.
        storage = torch_private.storage_id(logits)
        for leaf in captured_leaves(loss, own):
            if self.differentiate or torch_private.storage_id(leaf) != storage:
                raise ValueError(
                    "loss_and_grad_fn: expected a loss that learns nothing but its arguments, got "
                    f"one that holds a tensor of shape {list(leaf.shape)} that requires grad, "
                    "which would get no gradient; pass it as an argument of "
                    "autograd_loss_and_logits_grad's loss, or detach it (a callable that "
                    "differentiates by itself returns loss.detach())"
                )

    # Compiled -----------------------------------------------------------------------------------

    def _run_compiled(self, wants: tuple[bool, ...], arguments: Any) -> _Made:
        function = self._compiled.get(wants)
        if function is None:
            function = self._compiled[wants] = compile_callable(self._body(wants))
        try:
            result = function(*arguments)
        except Exception as error:
            result = self._run(wants, arguments)  # raises by itself what the callable raises
            self._compile = False
            warnings.warn(
                f"chunked_linear_loss: {self.function!r} runs eagerly inside the compiled graph, "
                f"since it could not be compiled: {error}",
                stacklevel=2,
            )
            return result
        loss, *rest = result
        if isinstance(loss, Tensor) and loss.requires_grad:
            # The eager run names the tensor, or finds that it is the callable's own.
            return self._run(wants, arguments)
        if self.differentiate:
            return loss, rest[0], rest[1]
        _check_loss(loss, "loss_and_grad_fn")
        return loss, rest[0] if wants[0] else None, [None] * len(arguments[1])

    def _body(self, wants: tuple[bool, ...]) -> Callable[..., Any]:
        call, differentiate = self._call, self.differentiate

        def body(
            logits: Tensor, tensors: list[Tensor], ints: list[int], floats: list[float]
        ) -> Any:
            if not differentiate:
                return call(logits, tensors, ints, floats)
            if not any(wants):
                loss = call(logits, tensors, ints, floats)
                return _check_loss(loss, "loss_fn"), None, [None] * len(tensors)
            everything = [logits, *tensors]
            chosen = [index for index, wanted in enumerate(wants) if wanted]

            def loss_of(leaves: list[Tensor]) -> Tensor:
                filled = list(everything)
                for index, leaf in zip(chosen, leaves, strict=True):
                    filled[index] = leaf
                return _check_loss(call(filled[0], filled[1:], ints, floats), "loss_fn")

            # Dynamo traces this, and Inductor fuses the loss with its gradient; a compiled loss
            # differentiated by autograd would be two graphs with [C, V] tensors saved between.
            made, loss = torch.func.grad_and_value(loss_of)([everything[i] for i in chosen])
            grads: list[Tensor | None] = [None] * len(everything)
            for index, grad in zip(chosen, made, strict=True):
                grads[index] = grad
            return loss, grads[0], grads[1:]

        # Dynamo keeps what it compiled with the code object and gives up after eight variants, so
        # every call has its own.
        return types.FunctionType(
            body.__code__.replace(co_name="chunk_loss"), body.__globals__, "chunk_loss",
            None, body.__closure__,
        )  # fmt: skip


def compile_callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the body of a chunk."""
    return torch_private.compile_in_op(function)


def autocast_for(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was around the op, whose products it gave their dtype."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype)


def eager_call(function: Any, structure: tuple[Any, ...]) -> LossCall:
    """A call outside any compiled region."""
    if isinstance(function, LogitsGrad):
        return LossCall(function.loss_fn, True, structure)
    if isinstance(function, Direct):
        return LossCall(function.function, False, structure)
    return LossCall(function, False, structure)
