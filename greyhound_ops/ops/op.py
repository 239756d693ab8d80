"""What every op of the namespace ``greyhound`` registers in the same way.

An `Op` is made from its schema. By convention every operand ``x`` that can get a gradient has a
flag ``need_grad_x`` in the schema, and ``compute_dtype`` is the dtype of the products, which
autocast sets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private
from greyhound_ops.errors import ForwardModeError
from greyhound_ops.ops import kernel_failures

LIBRARY = torch.library.Library("greyhound", "FRAGMENT")


def _tensors(values: Any) -> list[Tensor]:
    """Tensors among arguments, those in lists too."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(each for each in value if isinstance(each, Tensor))
    return found


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run an implementation with the device of its tensors current: Triton launches there."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = _tensors(args)[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


class Op:
    """One operator and its registrations.

    Args:
        schema: Without the namespace.
    """

    def __init__(self, schema: str) -> None:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._opname = schema.split("(")[0]
        self.name = f"greyhound::{self._opname}"
        self.packet = getattr(torch.ops.greyhound, self._opname)
        self.overload = self.packet.default
        # Read once: the binding makes the list anew whenever it is asked for.
        declared = self.overload._schema.arguments
        self.arguments = [each.name for each in declared]
        self._default_values = tuple(each.default_value for each in declared)
        self._defaults = {
            each.name: each.default_value for each in declared if each.has_default_value()
        }
        self._function: type[torch.autograd.Function] | None = None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of a call by name, those left out by their defaults."""
        given = dict(zip(self.arguments, args, strict=False))
        return SimpleNamespace(**{**self._defaults, **given, **kwargs})

    def implement(self, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """Register the implementation for every device, and the shapes for tracing."""
        guarded = kernel_failures.guarded(self.name, function)
        LIBRARY.impl(self._opname, _on_device(guarded), "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, fake, lib=LIBRARY)

    def autograd(
        self, setup_context: Callable[..., None], backward: Callable[..., tuple[Any, ...]]
    ) -> None:
        """Register a derivative; forward mode is refused instead of answered with a silent zero.

        A torch that makes its kernels otherwise gets the derivative without the refusal.

        Args:
            setup_context: As for `torch.library.register_autograd`.
            backward: Likewise; returns one gradient per argument.
        """
        name = self.name
        kernel = torch_private.autograd_kernel(self.overload, backward, setup_context)
        defaults = self._default_values
        self._function = self._functorch_function(setup_context, backward)
        if kernel is None:
            self._publicly(setup_context, backward, defaults)
            return

        def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            for value in _tensors((*args, *kwargs.values())):
                if torch_private.has_forward_tangent(value):
                    raise ForwardModeError(
                        f"{name} has no forward-mode derivative (jvp); use "
                        "greyhound_ops.reference or plain torch there. Ignoring the tangent would "
                        "give a silent zero."
                    )
            # The dispatcher drops trailing arguments that have their default; a backward with lists
            # of tensors has to answer for each argument that the forward was given.
            return kernel(keyset, *args, *defaults[len(args) :], **kwargs)

        LIBRARY.impl(self._opname, guarded, "Autograd", with_keyset=True)

    def _publicly(
        self,
        setup_context: Callable[..., None],
        backward: Callable[..., tuple[Any, ...]],
        defaults: tuple[Any, ...],
    ) -> None:
        """Register a derivative by torch's public function, which lacks a look at the tangents."""

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # As in `autograd`: arguments that have their default are not given.
            ctx.arguments_given = len(inputs)
            setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)

        def rule(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return backward(ctx, *grads)[: ctx.arguments_given]

        torch.library.register_autograd(self.name, rule, setup_context=setup, lib=LIBRARY)

    def autocast(self) -> None:
        """Let autocast set the dtype of the products.

        Nothing is cast here: the op multiplies in the dtype of autocast and hands each gradient
        back in the dtype of its own tensor, so that an fp32 weight gets its fp32 accumulator as it
        is, without a rounding to bf16 in between. float64 is left alone, as autocast does.
        """
        position = self.arguments.index("compute_dtype")
        overload, names = self.overload, self.arguments

        def rule(device_type: str) -> Callable[..., Any]:
            def cast(*args: Any, **kwargs: Any) -> Any:
                given = kwargs.get(
                    "compute_dtype", args[position] if len(args) > position else None
                )
                wide = any(value.dtype == torch.float64 for value in _tensors(args[:2]))
                with torch.autocast(device_type, enabled=False):
                    if given is None and not wide:
                        kwargs.update(zip(names[position:], args[position:], strict=False))
                        kwargs["compute_dtype"] = torch.get_autocast_dtype(device_type)
                        args = args[:position]
                    return overload(*args, **kwargs)

            return cast

        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(self._opname, rule(device_type), key)

    def vmap_by_sample(self) -> None:
        """Register vmap as one call per sample.

        A batched head would otherwise need its logits side by side.
        """
        torch.library.register_vmap(self.name, self._vmap, lib=LIBRARY)

    def flops(self, formula: Callable[..., int]) -> None:
        """Register a formula for `torch.utils.flop_counter`."""
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(self.packet)(formula)

    def functorch_call(self, *args: Any) -> Any:
        """The op under ``torch.func`` transforms; arguments positional."""
        assert self._function is not None
        return self._function.apply(*args, *self._default_values[len(args) :])

    def inner_call(self, *args: Any) -> Any:
        """The op inside a backward or a rule of vmap, around which ``torch.func`` may record.

        Arguments positional.
        """
        if not torch.compiler.is_compiling() and torch_private.functorch_is_active():
            return self.functorch_call(*args)
        return self.packet(*args)

    def _vmap(self, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        in_dims = (*in_dims, *(None for _ in args[len(in_dims) :]))
        calls = []
        for index in range(info.batch_size):
            sample = [
                value if dim is None else value.select(dim, index)
                for value, dim in zip(args, in_dims, strict=True)
            ]
            # The flags were read off batched tensors, which never say that they require grad.
            for flag, name in enumerate(self.arguments):
                if not name.startswith("need_grad_") or not torch.is_grad_enabled():
                    continue
                tensor = sample[self.arguments.index(name.removeprefix("need_grad_"))]
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    sample[flag] = True
            calls.append(self.inner_call(*sample))
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        outputs = tuple(torch.stack(column) for column in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    def _functorch_function(
        self, setup: Callable[..., None], rule: Callable[..., tuple[Any, ...]]
    ) -> type[torch.autograd.Function]:
        """The same derivative in the form that ``torch.func`` asks of a function.

        The kernel that ``register_autograd`` makes is refused there (and an op without one would
        silently get a zero).
        """
        op = self

        class Functorch(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Any:
                return op.overload(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                setup(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return rule(ctx, *grads)

            @staticmethod
            def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
                return op._vmap(info, in_dims, *args)

        return Functorch


def _needs_grad(ctx: Any, op: Op, name: str) -> bool:
    # Behind the end: an argument that was not given, by a torch that does not tell of those.
    given = ctx.needs_input_grad[op.arguments.index(name) :]
    return bool(given and given[0])


def check_flags(ctx: Any, op: Op, call: dict[str, Any], operands: tuple[str, ...]) -> None:
    """Refuse an operand that requires grad while its flag says that no gradient is wanted."""
    for name in operands:
        if _needs_grad(ctx, op, name) and not call[f"need_grad_{name}"]:
            raise ValueError(
                f"need_grad_{name}: expected True, since {name} requires grad, got False; "
                f"detach {name} if no gradient is wanted"
            )


def check_frozen(ctx: Any, op: Op, names: tuple[str, ...]) -> None:
    """Refuse a gradient for arguments that have none."""
    for name in names:
        if _needs_grad(ctx, op, name):
            raise ValueError(f"{name}: expected a tensor that needs no gradient; detach it")


def in_order(op: Op, grads: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients by name as one per argument of an op."""
    return tuple(grads.get(name) for name in op.arguments)


def product_flops(input_shape: Any, weight_shape: Any) -> int:
    """Floating-point operations of one ``[..., D] x [V, D]`` product."""
    rows = 1
    for size in input_shape[:-1]:
        rows *= size
    return int(2 * rows * weight_shape[0] * weight_shape[1])
