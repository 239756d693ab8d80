"""Everything that can be measured, behind one interface; libraries are imported when first used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
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

from benchmarks.cases import IGNORE_INDEX, Case, Inputs, Loss

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

    Ignored rows are left out. The gradient products read the true gradient of the logits, since
    how much power a product draws, and so how fast it runs, depends on its data. Distillation adds
    the teacher's logits.
    """

    def __init__(self, inputs: Inputs, case: Case) -> None:
        valid = inputs.target != IGNORE_INDEX
        self._training = case.mode == "full"
        self._frozen = case.frozen_weight
        self._input = inputs.input.detach()[valid]
        self._weight = inputs.weight.detach()
        self._logits = self._input.new_empty(case.valid_rows, case.V)
        self._teacher = None
        if inputs.teacher_input is not None and inputs.teacher_weight is not None:
            self._teacher = inputs.teacher_input[valid], inputs.teacher_weight
        if self._training:
            self._grad_logits = _logits_gradient(
                self._input, self._weight, inputs.target[valid], self._teacher
            )
            self._grad_input = torch.empty_like(self._input)
            if not self._frozen:
                self._grad_weight = torch.empty_like(self._weight)

    def forward(self) -> None:
        """One product: the logits. Distillation: two."""
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


def _logits_gradient(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    teacher: tuple[Tensor, Tensor] | None,
    chunk_rows: int = 1024,
) -> Tensor:
    """Gradient of the mean loss with respect to the logits, ``[N, V]`` in x's dtype."""
    gradient = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[0], chunk_rows):
        rows = slice(start, start + chunk_rows)
        logits = (x[rows] @ weight.t()).float()
        if teacher is None:
            part = torch.softmax(logits, dim=-1)
            part[torch.arange(part.shape[0], device=x.device), target[rows]] -= 1.0
        else:
            part = jsd_gradient(logits, (teacher[0][rows] @ teacher[1].t()).float())[1]
        gradient[rows] = part.div_(x.shape[0])
    return gradient


def plain_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> Tensor:
    """The loss as models write it: projection, fp32 logits, mean cross entropy."""
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX)


def jsd_rows(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each row of logits, as trainers write it."""
    log_q, log_p = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    mixture = torch.logaddexp(log_q, log_p) - math.log(2.0)
    kl = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    kl = kl + F.kl_div(mixture, log_q, reduction="none", log_target=True)
    return 0.5 * kl.sum(-1)


def jsd_gradient(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The divergences of rows, and the gradient of their sum with respect to student's logits."""
    with torch.enable_grad():
        leaf = student.detach().requires_grad_()
        rows = jsd_rows(leaf, teacher.detach())
        (gradient,) = torch.autograd.grad(rows.sum(), leaf)
    return rows.detach(), gradient


def plain_linear_jsd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
) -> Tensor:
    """Distillation as trainers write it: two projections, fp32 logits, mean of rows that count."""
    student = F.linear(input, weight, bias).float()
    with torch.no_grad():
        teacher = F.linear(teacher_input, teacher_weight).float()
    counts = target != IGNORE_INDEX
    return torch.where(counts, jsd_rows(student, teacher), 0.0).sum() / counts.sum()


def with_teacher(function: Callable[..., Tensor], inputs: Inputs) -> LossFn:
    """A loss over student and teacher as one over the student's tensors."""

    def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return function(x, weight, target, bias, inputs.teacher_input, inputs.teacher_weight)

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
            _find_own_packages()
            if importlib.util.find_spec(self.module) is None:
                return f"{self.module} is not installed"
        return self.declines(case, device)

    def accum_for(self, case: Case) -> str:
        """The accumulation a row of the results names."""
        return case.accum if self.accum == "case" else self.accum


def _find_own_packages() -> None:
    """Makes ``greyhound_lowering`` importable from a checkout that is not installed."""
    source_root = Path(__file__).resolve().parent.parent / "lowering"
    if importlib.util.find_spec("greyhound_lowering") is None and source_root.is_dir():
        sys.path.append(str(source_root))


# --- torch's own -----------------------------------------------------------------------------


def _build_eager(case: Case, inputs: Inputs) -> Step:
    if case.loss == "distillation":
        return LossStep(with_teacher(plain_linear_jsd, inputs), inputs, case)
    return LossStep(plain_linear_cross_entropy, inputs, case)


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
    distills = case.loss == "distillation"
    plain: Any = plain_linear_jsd if distills else plain_linear_cross_entropy
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{tag}")
    plain = types.FunctionType(code, plain.__globals__)
    with _cold_caches(), context():
        compiled = torch.compile(plain, **compile_options)
        step = LossStep(with_teacher(compiled, inputs) if distills else compiled, inputs, case)
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
        if case.loss == "distillation":

            def distill(
                x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *teacher: Tensor
            ) -> Tensor:
                return functional.chunked_linear_distillation(  # type: ignore[no-any-return]
                    x, weight, *teacher, target, bias, divergence="jsd", beta=0.5, **options
                )

            return LossStep(with_teacher(distill, inputs), inputs, case)

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            return functional.chunked_linear_cross_entropy(  # type: ignore[no-any-return]
                x, weight, target, bias, **options
            )

        return LossStep(loss, inputs, case)

    return build


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


def _rewritten_count(lowering: Any) -> int:
    return int(lowering.explain().rewritten_count)


def _build_rewritten(case: Case, inputs: Inputs) -> Step:
    lowering = importlib.import_module("greyhound_lowering")

    def settings() -> AbstractContextManager[Any]:
        if case.accum == "fp32":
            return nullcontext()
        return lowering.enabled(grad_weight_accum_dtype=case.accum)  # type: ignore[no-any-return]

    before = _rewritten_count(lowering)
    step = _build_compiled(case, inputs, "rewritten", settings, backend="greyhound")
    _require_rewrite(lowering, before)
    return step


def _build_rewritten_weight(case: Case, inputs: Inputs) -> Step:
    lowering = importlib.import_module("greyhound_lowering")
    before = _rewritten_count(lowering)
    step = _build_compiled(
        case,
        inputs,
        "rewritten_weight",
        lambda: lowering.enabled(grad_weight_accum_dtype="weight"),
    )
    _require_rewrite(lowering, before)
    return step


def _require_rewrite(lowering: Any, before: int) -> None:
    """Fails when a compile left the graph as it was, which would time plain torch.compile."""
    after = _rewritten_count(lowering)
    if after == 0 or after == before:
        raise RuntimeError(
            f"nothing was rewritten (rewritten_count {before} -> {after}): {lowering.explain()}"
        )


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

            return LossStep(with_teacher(distill, inputs), inputs, case)
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

    return LossStep(with_teacher(distill, inputs), inputs, case)


def _declines_liger(case: Case, device: torch.device) -> str | None:
    return _peer_declines(bias=case.loss == "cross_entropy")(case, device)


def _build_quack(chunk_rows: int) -> Callable[[Case, Inputs], Step]:
    def build(case: Case, inputs: Inputs) -> Step:
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


def _build_cce(filter_eps: str | None) -> Callable[[Case, Inputs], Step]:
    def build(case: Case, inputs: Inputs) -> Step:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

        def loss(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            return function(  # type: ignore[no-any-return]
                x, weight, target, ignore_index=IGNORE_INDEX, filter_eps=filter_eps
            )

        return LossStep(loss, inputs, case)

    return build


def _declines_cce(case: Case, device: torch.device) -> str | None:
    if case.mode == "full" and case.dtype not in (torch.float16, torch.bfloat16):
        return "gradients need fp16 or bf16"
    return _peer_declines(bias=False)(case, device)


BOTH_LOSSES: tuple[Loss, ...] = ("cross_entropy", "distillation")

FLOOR = Provider(
    "floor",
    "the bare matrix products: three, two with a frozen weight, one forward; a teacher's more",
    "none",
    lambda case, inputs: FloorStep(inputs, case),
    losses=BOTH_LOSSES,
)

PROVIDERS = {
    provider.name: provider
    for provider in (
        FLOOR,
        Provider(
            "eager",
            "F.linear, .float(), F.cross_entropy or the divergence in PyTorch",
            "none",
            _build_eager,
            losses=BOTH_LOSSES,
        ),
        Provider(
            "compile", "the same under torch.compile", "none", _build_compile, losses=BOTH_LOSSES
        ),
        Provider(
            "autochunk",
            "the same with Inductor's auto-chunker enabled",
            "none",
            _build_autochunk,
            declines=_declines_autochunk,
            losses=BOTH_LOSSES,
        ),
        Provider(
            "op",
            "chunked_linear_cross_entropy or chunked_linear_distillation",
            "case",
            _build_op(None),
            "greyhound_ops",
            losses=BOTH_LOSSES,
        ),
        Provider(
            "op_weight",
            "the same, accumulating in the weight's dtype",
            "weight",
            _build_op("weight"),
            "greyhound_ops",
            losses=BOTH_LOSSES,
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
            "the plain loss under torch.compile(backend='greyhound')",
            "case",
            _build_rewritten,
            "greyhound_lowering",
            losses=BOTH_LOSSES,
        ),
        Provider(
            "rewritten_weight",
            "the plain loss compiled inside enabled(grad_weight_accum_dtype='weight')",
            "weight",
            _build_rewritten_weight,
            "greyhound_lowering",
            losses=BOTH_LOSSES,
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
            "cce",
            "Cut Cross Entropy, its defaults (gradient filter on)",
            "weight",
            _build_cce("high"),
            "cut_cross_entropy",
            _declines_cce,
        ),
        Provider(
            "cce_exact",
            "Cut Cross Entropy, gradient filter off",
            "weight",
            _build_cce(None),
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
