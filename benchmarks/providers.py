"""Everything that can be measured, behind one interface; libraries are imported when first used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.losses import (
    DPO_BETA,
    IGNORE_INDEX,
    KD_ALPHA,
    KD_TEMPERATURE,
    LOSSES,
    SOFTCAP,
    Loss,
    gemma_rms_norm,
    rms_norm,
    shifted,
)
from benchmarks.truth import Truth

LossFn = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]

# Half of quack's default chunk, hence half the logits held at once; the default is measured too.
QUACK_CHUNK_ROWS = 2048


class Step(Protocol):
    """What a provider hands to the timers."""

    def forward(self) -> object:
        """Runs the forward half; gradients are recorded if the case asks for them."""

    def full(self) -> Tensor | None:
        """Runs forward and backward; gradients land in the leaves. Returns the loss, if any."""


class LossStep:
    """A loss function over the inputs of a case."""

    def __init__(self, loss_fn: LossFn, inputs: Inputs, case: Case) -> None:
        self._loss_fn = loss_fn
        self._inputs = inputs
        self._training = case.mode == "full"

    def forward(self) -> Tensor:
        """Computes the loss."""
        inputs = self._inputs
        with torch.set_grad_enabled(self._training):
            return self._loss_fn(inputs.input, inputs.weight, inputs.target, inputs.bias)

    def full(self) -> Tensor:
        """Computes the loss and its gradients, which replace those of the last pass."""
        self._inputs.clear_grads()
        loss = self.forward()
        if self._training:
            torch.autograd.backward(loss)
        return loss.detach()


class FloorStep:
    """The bare products a case cannot do without, into buffers made beforehand.

    Rows that do not count are left out. The gradient products read the true gradient of the logits,
    since how much power a product draws, and so how fast it runs, depends on its data. A teacher
    (a reference model) adds its logits. What stands in front of the projection is not counted.
    """

    def __init__(self, inputs: Inputs, case: Case) -> None:
        truth = Truth(case, inputs, case.dtype)
        counted = truth.counted
        self._training = case.mode == "full"
        self._frozen = case.frozen_weight
        self._input = truth.hidden(counted)
        self._weight = inputs.weight.detach()
        self._logits = self._input.new_empty(self._input.shape[0], case.V)
        self._teacher = None
        if inputs.teacher_input is not None and inputs.teacher_weight is not None:
            teacher_input = inputs.teacher_input.reshape(case.N, case.D)
            self._teacher = teacher_input[counted], inputs.teacher_weight
        if self._training:
            self._grad_logits = torch.empty_like(self._logits)
            start = 0
            for chunk in truth.chunks():
                part = chunk.grad_logits[counted[chunk.rows]]
                self._grad_logits[start : start + part.shape[0]] = part
                start += part.shape[0]
            self._grad_input = torch.empty_like(self._input)
            if not self._frozen:
                self._grad_weight = torch.empty_like(self._weight)

    def forward(self) -> None:
        """One product: the logits. With a teacher: two."""
        torch.mm(self._input, self._weight.t(), out=self._logits)
        if self._teacher is not None:
            torch.mm(self._teacher[0], self._teacher[1].t(), out=self._logits)

    def full(self) -> None:
        """Three products, two when the weight is frozen, one without gradients; one a teacher."""
        self.forward()
        if not self._training:
            return
        torch.mm(self._grad_logits, self._weight, out=self._grad_input)
        if not self._frozen:
            torch.mm(self._grad_logits.t(), self._input, out=self._grad_weight)


def with_operands(function: Callable[..., Tensor], case: Case, inputs: Inputs) -> LossFn:
    """A loss over all operands of a case as one over those that every loss has."""
    others = [getattr(inputs, name) for name in LOSSES[case.loss].operands]

    def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return function(x, weight, target, bias, *others)

    return loss


@dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        name: What the command line and the results call it.
        summary: One line for ``list``.
        accum: How ``grad_weight`` is summed over chunks: ``"fp32"``, ``"weight"`` (the weight's
            dtype), ``"none"`` (one product), ``"auto"`` (the library decides) or ``"case"`` (as the
            case says).
        module: Module that must be importable, if any.
        declines: Why it cannot take a case, or None.
        build: Makes the step; may compile, and may raise.
        losses: What it computes.
    """

    name: str
    summary: str
    accum: str
    build: Callable[[Case, Inputs], Step]
    module: str | None = None
    declines: Callable[[Case, torch.device], str | None] = lambda case, device: None
    losses: tuple[Loss, ...] = ("cross_entropy",)

    def available(self, case: Case, device: torch.device) -> str | None:
        """Says why this provider cannot run a case on a device; None when it can."""
        if case.loss not in self.losses:
            return f"computes no {case.loss}"
        if self.module is not None:
            find_own_packages()
            if importlib.util.find_spec(self.module) is None:
                return f"{self.module} is not installed"
        return self.declines(case, device)

    def accum_for(self, case: Case) -> str:
        """The accumulation a row of the results names."""
        return case.accum if self.accum == "case" else self.accum


def find_own_packages() -> None:
    """Makes ``greyhound_lowering`` importable from a checkout that is not installed."""
    source_root = Path(__file__).resolve().parent.parent / "lowering"
    if importlib.util.find_spec("greyhound_lowering") is None and source_root.is_dir():
        sys.path.append(str(source_root))


# --- torch's own -----------------------------------------------------------------------------


def _build_eager(case: Case, inputs: Inputs) -> Step:
    return LossStep(with_operands(LOSSES[case.loss].plain, case, inputs), inputs, case)


@contextlib.contextmanager
def _cold_caches() -> Iterator[None]:
    """Keeps a compile from being answered out of a cache that another provider filled."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(force_disable_caches=True):
        yield


def _build_compiled(
    case: Case,
    inputs: Inputs,
    tag: str,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **compile_options: Any,
) -> Step:
    """Compiles the plain loss and runs it once, so that the backward is compiled too.

    Dynamo keeps compiled code with the code object and does not look at Inductor's settings, so
    each provider compiles a code object of its own.
    """
    plain: Any = LOSSES[case.loss].plain
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{tag}")
    plain = types.FunctionType(code, plain.__globals__)
    if case.dynamic:  # as the parameters of a module are
        for parameter in inputs.parameters:
            torch._dynamo.mark_static(parameter)
    with _cold_caches(), context():
        compiled = torch.compile(plain, dynamic=case.dynamic or None, **compile_options)
        step = LossStep(with_operands(compiled, case, inputs), inputs, case)
        step.full()
    return step


def _build_compile(case: Case, inputs: Inputs) -> Step:
    return _build_compiled(case, inputs, "compile")


def _build_autochunk(case: Case, inputs: Inputs) -> Step:
    return _build_compiled(case, inputs, "autochunk", options={"auto_chunker.enable": True})


def _declines_autochunk(case: Case, device: torch.device) -> str | None:
    import torch._inductor.config as inductor_config

    has_it = hasattr(inductor_config, "auto_chunker")
    return None if has_it else f"torch {torch.__version__} has no auto-chunker"


def _build_torch_lce(case: Case, inputs: Inputs) -> Step:
    nn: Any = torch.nn  # the options are newer than the oldest torch this runs on
    options = nn.LinearCrossEntropyOptions()

    def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear_cross_entropy(  # type: ignore[no-any-return]
            x, weight, target, linear_bias=bias, ignore_index=IGNORE_INDEX, options=options
        )

    return LossStep(loss, inputs, case)


def _declines_torch_lce(case: Case, device: torch.device) -> str | None:
    has_it = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if has_it else f"torch {torch.__version__} has no chunked linear_cross_entropy"


# --- this project's --------------------------------------------------------------------------


def _build_op(accum: str | None) -> Callable[[Case, Inputs], Step]:
    def build(case: Case, inputs: Inputs) -> Step:
        functional = importlib.import_module("greyhound_ops.functional")
        options = {"ignore_index": IGNORE_INDEX, "grad_weight_accum_dtype": accum or case.accum}
        loss = _OP_LOSSES[case.loss](functional, options)
        return LossStep(with_operands(loss, case, inputs), inputs, case)

    return build


def _cross_entropy_op(functional: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
    def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return functional.chunked_linear_cross_entropy(x, weight, target, bias, **options)  # type: ignore[no-any-return]

    return loss


def _head_op(
    norm: Callable[[Tensor, Tensor], Tensor], softcap: float | None
) -> Callable[[Any, dict[str, Any]], Callable[..., Tensor]]:
    def make(functional: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
        def loss(
            x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, norm_weight: Tensor
        ) -> Tensor:
            return functional.chunked_linear_cross_entropy(  # type: ignore[no-any-return]
                norm(x, norm_weight), weight, shifted(labels), bias, softcap=softcap, **options
            )

        return loss

    return make


def _distillation_op(
    **distillation: Any,
) -> Callable[[Any, dict[str, Any]], Callable[..., Tensor]]:
    def make(functional: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
        def loss(
            x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *teacher: Tensor
        ) -> Tensor:
            return functional.chunked_linear_distillation(  # type: ignore[no-any-return]
                x, weight, *teacher, target, bias, **distillation, **options
            )

        return loss

    return make


def _dpo_op(functional: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
    def loss(
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        ref_input: Tensor,
        ref_weight: Tensor,
    ) -> Tensor:
        return functional.chunked_linear_dpo(  # type: ignore[no-any-return]
            x,
            weight,
            shifted(labels),
            bias,
            ref_input=ref_input,
            ref_weight=ref_weight,
            beta=DPO_BETA,
            **options,
        ).loss

    return loss


def _log_probs_op(functional: Any, options: dict[str, Any]) -> Callable[..., Tensor]:
    def loss(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reward: Tensor
    ) -> Tensor:
        log_probs = functional.chunked_linear_log_probs(x, weight, target, bias, **options)
        # Ignored rows have log-prob 0.
        return -(log_probs * reward).sum() / (target != IGNORE_INDEX).sum()  # type: ignore[no-any-return]

    return loss


#: Per loss, from the functional module and common options to a function like ``LossParts.plain``.
_OP_LOSSES: dict[Loss, Callable[[Any, dict[str, Any]], Callable[..., Tensor]]] = {
    "cross_entropy": _cross_entropy_op,
    "distillation": _distillation_op(divergence="jsd", beta=0.5),
    "llama_head": _head_op(rms_norm, None),
    "gemma2_head": _head_op(gemma_rms_norm, SOFTCAP),
    "kd_ce": _distillation_op(
        divergence="kl",
        temperature=KD_TEMPERATURE,
        soft_weight=KD_ALPHA * KD_TEMPERATURE**2,
        hard_weight=1.0 - KD_ALPHA,
    ),
    "dpo": _dpo_op,
    "log_probs": _log_probs_op,
}


def _build_generic(compiled: bool) -> Callable[[Case, Inputs], Step]:
    """The loss as a callable: a sum over the rows, differentiated chunk by chunk."""

    def build(case: Case, inputs: Inputs) -> Step:
        functional = importlib.import_module("greyhound_ops.functional")

        def summed(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(
                logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum"
            )

        adapter = functional.autograd_loss_and_logits_grad(summed)
        if compiled:
            adapter = torch.compile(adapter)

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            total = functional.chunked_linear_loss(
                x, weight, adapter, target, bias=bias, grad_weight_accum_dtype=case.accum
            )
            return total / (target != IGNORE_INDEX).sum()  # type: ignore[no-any-return]

        step = LossStep(loss, inputs, case)
        if compiled:
            with _cold_caches():
                step.full()
        return step

    return build


def _build_rewritten(case: Case, inputs: Inputs) -> Step:
    lowering = importlib.import_module("greyhound_lowering")

    def settings() -> AbstractContextManager[Any]:
        # Whatever the size: what is timed is the rewrite, not its judgement of when it pays.
        return lowering.enabled(  # type: ignore[no-any-return]
            grad_weight_accum_dtype=case.accum, min_logits_bytes=0
        )

    lowering.clear_report()
    step = _build_compiled(case, inputs, "rewritten", settings)
    require_rewrite(lowering, _projections(case))
    return step


def _build_rewritten_weight(case: Case, inputs: Inputs) -> Step:
    lowering = importlib.import_module("greyhound_lowering")
    lowering.clear_report()
    step = _build_compiled(
        case,
        inputs,
        "rewritten_weight",
        lambda: lowering.enabled(grad_weight_accum_dtype="weight", min_logits_bytes=0),
    )
    require_rewrite(lowering, _projections(case))
    return step


def _projections(case: Case) -> int:
    return 2 if "teacher_weight" in LOSSES[case.loss].operands else 1


def require_rewrite(lowering: Any, projections: int) -> None:
    """Fails when a compile left a projection as it was, which would time plain torch.compile.

    Args:
        lowering: The module, its report cleared before the compile.
        projections: How many have to be rewritten.

    Raises:
        RuntimeError: Not that many were.
    """
    report = lowering.explain()
    if report.rewritten_count < projections:
        raise RuntimeError(f"{report.rewritten_count} of {projections} were rewritten: {report}")


# --- other libraries -------------------------------------------------------------------------


def _peer_declines(*, bias: bool) -> Callable[[Case, torch.device], str | None]:
    def declines(case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA GPU"
        if case.bias and not bias:
            return "takes no bias"
        return None

    return declines


def _build_liger(accum: torch.dtype | None) -> Callable[[Case, Inputs], Step]:
    def build(case: Case, inputs: Inputs) -> Step:
        if case.loss == "distillation":
            fused = importlib.import_module("liger_kernel.transformers.fused_linear_jsd")
            module = fused.LigerFusedLinearJSD(
                jsd_beta=0.5, ignore_index=IGNORE_INDEX, temperature=1.0, accum_dtype=accum
            )

            def distill(
                x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *teacher: Tensor
            ) -> Tensor:
                return module(x, weight, *teacher, target)  # type: ignore[no-any-return]

            return LossStep(with_operands(distill, case, inputs), inputs, case)
        function = importlib.import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            # Positions: ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
            # softcap, return_z_loss, accum_dtype.
            options = (None, IGNORE_INDEX, 0.0, 0.0, "mean", None, False, accum)
            return function.apply(x, weight, target, bias, *options)[0]  # type: ignore[no-any-return]

        return LossStep(loss, inputs, case)

    return build


def _build_liger_chunked(case: Case, inputs: Inputs) -> Step:
    chunked = importlib.import_module("liger_kernel.chunked_loss")
    module = chunked.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, ignore_index=IGNORE_INDEX
    )

    def distill(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *teacher: Tensor
    ) -> Tensor:
        return module(x, weight, *teacher, target, bias)  # type: ignore[no-any-return]

    return LossStep(with_operands(distill, case, inputs), inputs, case)


def _declines_liger(case: Case, device: torch.device) -> str | None:
    return _peer_declines(bias=case.loss == "cross_entropy")(case, device)


def _build_quack(chunk_rows: int) -> Callable[[Case, Inputs], Step]:
    def build(case: Case, inputs: Inputs) -> Step:
        # When imported, quack 0.6.5 looks for a key of all that its kernels depend on, and finds
        # none for a logger of the CUTLASS that it asks for.
        logging.Logger.__quack_semantic_key__ = lambda logger: logger.name  # type: ignore[attr-defined]
        quack = importlib.import_module("quack.linear_cross_entropy")
        # The library's own module takes its unchunked path for such sizes; so does this.
        chunked = all(size % 8 == 0 for size in (case.N, case.D, case.V))

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            if chunked:
                return quack.chunked_linear_cross_entropy(  # type: ignore[no-any-return]
                    x, weight, target, chunk_size=chunk_rows, ignore_index=IGNORE_INDEX
                )
            return quack.linear_cross_entropy_func(  # type: ignore[no-any-return]
                x, weight, None, target, ignore_index=IGNORE_INDEX
            )

        return LossStep(loss, inputs, case)

    return build


def _build_call(module: str, name: str, **options: Any) -> Callable[[Case, Inputs], Step]:
    """A library's function of input, weight and target."""

    def build(case: Case, inputs: Inputs) -> Step:
        function = getattr(importlib.import_module(module), name)

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            return function(  # type: ignore[no-any-return]
                x, weight, target, ignore_index=IGNORE_INDEX, **options
            )

        return LossStep(loss, inputs, case)

    return build


_CCE = ("cut_cross_entropy", "linear_cross_entropy")
_GREYHOUND_KERNELS = ("greyhound.nn.functional", "chunked_linear_cross_entropy")


def _declines_cce(case: Case, device: torch.device) -> str | None:
    if case.mode == "full" and case.dtype not in (torch.float16, torch.bfloat16):
        return "gradients need fp16 or bf16"
    return _peer_declines(bias=False)(case, device)


BOTH_LOSSES: tuple[Loss, ...] = ("cross_entropy", "distillation")
ALL_LOSSES = tuple(LOSSES)

FLOOR = Provider(
    "floor",
    "the bare matrix products: three, two with a frozen weight, one forward; a teacher's more",
    "none",
    lambda case, inputs: FloorStep(inputs, case),
    losses=ALL_LOSSES,
)

PROVIDERS = {
    provider.name: provider
    for provider in (
        FLOOR,
        Provider(
            "eager",
            "the loss in PyTorch, as users write it",
            "none",
            _build_eager,
            losses=ALL_LOSSES,
        ),
        Provider(
            "compile", "the same under torch.compile", "none", _build_compile, losses=ALL_LOSSES
        ),
        Provider(
            "autochunk",
            "the same with Inductor's auto-chunker enabled",
            "none",
            _build_autochunk,
            declines=_declines_autochunk,
            losses=ALL_LOSSES,
        ),
        Provider(
            "op",
            "chunked_linear_cross_entropy, or the op written for the case's loss",
            "case",
            _build_op(None),
            "greyhound_ops",
            losses=ALL_LOSSES,
        ),
        Provider(
            "op_weight",
            "the same, accumulating in the weight's dtype",
            "weight",
            _build_op("weight"),
            "greyhound_ops",
            losses=ALL_LOSSES,
        ),
        Provider(
            "generic_eager",
            "chunked_linear_loss over F.cross_entropy",
            "case",
            _build_generic(compiled=False),
            "greyhound_ops",
        ),
        Provider(
            "generic_compiled",
            "the same, the callable under torch.compile",
            "case",
            _build_generic(compiled=True),
            "greyhound_ops",
        ),
        Provider(
            "rewritten",
            "the plain loss compiled inside greyhound_lowering.enabled()",
            "case",
            _build_rewritten,
            "greyhound_lowering",
            losses=ALL_LOSSES,
        ),
        Provider(
            "rewritten_weight",
            "the plain loss compiled inside enabled(grad_weight_accum_dtype='weight')",
            "weight",
            _build_rewritten_weight,
            "greyhound_lowering",
            losses=ALL_LOSSES,
        ),
        Provider(
            "liger",
            "Liger-Kernel, its defaults",
            "weight",
            _build_liger(None),
            "liger_kernel",
            _declines_liger,
            BOTH_LOSSES,
        ),
        Provider(
            "liger_fp32",
            "Liger-Kernel, accum_dtype=float32",
            "fp32",
            _build_liger(torch.float32),
            "liger_kernel",
            _declines_liger,
            BOTH_LOSSES,
        ),
        Provider(
            "liger_chunked",
            "Liger-Kernel's chunked loss, compiled, its default chunks of 1024 rows",
            "weight",
            _build_liger_chunked,
            "liger_kernel",
            _peer_declines(bias=True),
            ("distillation",),
        ),
        Provider(
            "quack",
            f"quack, chunks of {QUACK_CHUNK_ROWS} rows",
            "fp32",
            _build_quack(QUACK_CHUNK_ROWS),
            "quack",
            _peer_declines(bias=False),
        ),
        Provider(
            "quack4096",
            "quack, its default chunks of 4096 rows",
            "fp32",
            _build_quack(4096),
            "quack",
            _peer_declines(bias=False),
        ),
        Provider(
            "greyhound_kernels",
            "greyhound-kernels, its defaults",
            "fp32",
            _build_call(*_GREYHOUND_KERNELS, grad_weight_accum_dtype="fp32"),
            "greyhound",
            _peer_declines(bias=False),
        ),
        Provider(
            "greyhound_kernels_weight",
            "greyhound-kernels, gradient summed in the dtype of the weight",
            "weight",
            _build_call(*_GREYHOUND_KERNELS, grad_weight_accum_dtype="weight"),
            "greyhound",
            _peer_declines(bias=False),
        ),
        Provider(
            "cce",
            "Cut Cross Entropy, its defaults (gradient filter on)",
            "weight",
            _build_call(*_CCE, filter_eps="high"),
            "cut_cross_entropy",
            _declines_cce,
        ),
        Provider(
            "cce_exact",
            "Cut Cross Entropy, gradient filter off",
            "weight",
            _build_call(*_CCE, filter_eps=None),
            "cut_cross_entropy",
            _declines_cce,
        ),
        Provider(
            "torch_lce",
            "torch.nn.functional.linear_cross_entropy, default options",
            "auto",
            _build_torch_lce,
            declines=_declines_torch_lce,
        ),
    )
}


def select(names: str) -> list[Provider]:
    """Looks providers up by a comma-separated list of names, or ``all``.

    Raises:
        ValueError: An unknown name.
    """
    if names == "all":
        return list(PROVIDERS.values())
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in PROVIDERS]:
        raise ValueError(
            f"unknown provider {', '.join(unknown)}: expected all or {', '.join(PROVIDERS)}"
        )
    return [PROVIDERS[name] for name in dict.fromkeys(wanted)]
