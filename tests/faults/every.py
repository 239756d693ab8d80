"""Every op as one kind of callable, with its plain reference beside it.

An `Entry` takes hidden states ``[B, T, D]``, a head, targets ``[B, T]`` and tensors that only some
losses need, and returns one differentiable tensor: a scalar, or a value per row. A kind of fault is
then one parametrised test over all entries that have the trait it is about.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samples
from greyhound_ops import functional, reference
from lowering.rewriting import Backend, reasons
from samples import SLACK, Result, Sample, assert_results_match

BATCH, TOKENS, HIDDEN, CLASSES = 6, 4, 8, 19
CHUNK = 5  # rows; divides neither one sequence nor the batch

#: Upstream gradient of scalars: not one, so that a forgotten factor shows.
UPSTREAM = -1.7

Loss = Callable[..., Tensor]
Extra = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An op under test.

    Attributes:
        name: Of the case.
        ours: Takes ``(input, weight, target, bias, extra, *, chunk_size, **options)``.
        plain: The same in plain torch, without ``chunk_size``.
        per_row: Whether the result is ``[B, T]``, not a scalar.
        options: Options of the row's loss that both take.
        ignores: Whether rows of ``ignore_index`` drop out.
        checks_target: Whether the target is a class that is read.
        linear: Whether the projection is part of the op; else logits are given to it.
        rewritten: Whether it is a graph that the rewrite changed.
    """

    name: str
    ours: Loss
    plain: Loss
    per_row: bool = False
    options: frozenset[str] = frozenset()
    ignores: bool = True
    checks_target: bool = True
    linear: bool = True
    rewritten: bool = False


_CROSS_ENTROPY = frozenset(
    {"label_smoothing", "z_loss", "logit_scale", "softcap", "ignore_index", "class_weight"}
)
_TERMS = _CROSS_ENTROPY - {"class_weight"}
_HEAD = frozenset({"logit_scale", "softcap", "ignore_index"})


# ------------------------------------------------------------------------------------- references


def _plain(function: Callable[..., Any], **fixed: Any) -> Loss:
    """A function of the reference that needs no extra tensors."""

    def call(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
    ) -> Tensor:
        return function(input, weight, target, bias, **fixed, **o)

    return call


def _ours(function: Callable[..., Any], pick: str | None = None, **fixed: Any) -> Loss:
    """A functional that needs no extra tensors, or one of its outputs."""

    def call(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
    ) -> Tensor:
        result = function(input, weight, target, bias, **fixed, **o)
        return result if pick is None else getattr(result, pick)

    return call


def _picked(name: str) -> Loss:
    def call(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
    ) -> Tensor:
        value: Tensor = getattr(reference.linear_log_probs(input, weight, target, bias, **o), name)
        return value

    return call


def _cross_entropy(reduction: str) -> Entry:
    fixed = {"reduction": reduction}
    return Entry(
        f"cross-entropy-{reduction}",
        _ours(functional.chunked_linear_cross_entropy, **fixed),
        _plain(reference.linear_cross_entropy, **fixed),
        per_row=reduction == "none",
        options=_CROSS_ENTROPY,
    )


# ------------------------------------------------------------------------------------ several terms


def _multi_token(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    return functional.chunked_multi_token_cross_entropy(
        [input, input * 0.5], weight, [target, target], bias, term_weights=[1.0, 0.3], **o
    ).loss


def _plain_multi_token(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    first = reference.linear_cross_entropy(input, weight, target, bias, **o)
    second = reference.linear_cross_entropy(input * 0.5, weight, target, bias, **o)
    return first + 0.3 * second


def _heads(weight: Tensor, bias: Tensor | None) -> tuple[list[Tensor], list[Tensor] | None]:
    return [weight, weight * 0.5], None if bias is None else [bias, bias * 0.5]


def _multi_head(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    weights, biases = _heads(weight, bias)
    return functional.chunked_multi_head_cross_entropy(
        input, weights, [target, target], biases, term_weights=[1.0, 0.3], **o
    ).loss


def _plain_multi_head(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    weights, biases = _heads(weight, bias)
    first = reference.linear_cross_entropy(
        input, weights[0], target, None if biases is None else biases[0], **o
    )
    second = reference.linear_cross_entropy(
        input, weights[1], target, None if biases is None else biases[1], **o
    )
    return first + 0.3 * second


# ------------------------------------------------------------------------------------ any row loss


def focal(logits: Tensor, target: Tensor) -> Tensor:
    """A sum over rows of (1 - p)^2 times the cross entropy."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).sum()


def cross_entropy_and_grad(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum of cross entropies and its gradient by hand, ignored rows zero."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = target != -100
    index = target.masked_fill(~counts, 0)
    log_probs = wide.log_softmax(-1)
    loss = -log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    grad = log_probs.exp().scatter_add(
        -1, index.unsqueeze(-1), -torch.ones_like(log_probs[..., :1])
    )
    return loss.masked_fill(~counts, 0.0).sum(), grad.masked_fill(~counts.unsqueeze(-1), 0.0)


_FOCAL = functional.autograd_loss_and_logits_grad(focal)


def _linear_loss(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    return functional.chunked_linear_loss(input, weight, _FOCAL, target, bias=bias, **o)


def _plain_linear_loss(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    return reference.linear_loss(input, weight, focal, target.reshape(-1), bias=bias, **o)


def _linear_loss_direct(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra, **o: Any
) -> Tensor:
    return functional.chunked_linear_loss(
        input, weight, cross_entropy_and_grad, target, bias=bias, **o
    )


# --------------------------------------------------------------------------------- existing logits


def _logits_cross_entropy(reduction: str) -> Entry:
    def ours(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        extra: Extra,
        chunk_size: int | None = None,
        **o: Any,
    ) -> Tensor:
        logits = F.linear(input, weight, bias)
        return functional.cross_entropy(logits, target, reduction=reduction, **o)

    return Entry(
        f"logits-cross-entropy-{reduction}",
        ours,
        _plain(reference.linear_cross_entropy, reduction=reduction),
        per_row=reduction == "none",
        options=_CROSS_ENTROPY,
        linear=False,
    )


def _selective_log_softmax(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    extra: Extra,
    chunk_size: int | None = None,
    **o: Any,
) -> Tensor:
    logits = F.linear(input, weight, bias)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return functional.selective_log_softmax(logits, target, dtype=dtype, **o)


# ------------------------------------------------------------------------------------ distillation


def _distillation(divergence: str, reduction: str) -> Entry:
    def with_teacher(function: Callable[..., Any]) -> Loss:
        def call(
            input: Tensor,
            weight: Tensor,
            target: Tensor,
            bias: Tensor | None,
            extra: Extra,
            **o: Any,
        ) -> Tensor:
            result: Tensor = function(
                input, weight, extra["teacher_input"], extra["teacher_weight"], target, bias,
                divergence=divergence, reduction=reduction, hard_weight=0.25, temperature=1.5, **o,
            )  # fmt: skip
            return result

        return call

    return Entry(
        f"distillation-{divergence}-{reduction}",
        with_teacher(functional.chunked_linear_distillation),
        with_teacher(reference.linear_distillation),
        per_row=reduction == "none",
        options=frozenset({"ignore_index"}),
    )


# ----------------------------------------------------------------------------- losses of sequences


def _sequences(name: str, ours: Callable[..., Any], plain: Callable[..., Any]) -> Entry:
    def with_extra(function: Callable[..., Any]) -> Loss:
        def call(
            input: Tensor,
            weight: Tensor,
            target: Tensor,
            bias: Tensor | None,
            extra: Extra,
            **o: Any,
        ) -> Tensor:
            first: tuple[Tensor, ...] = ()
            if name in ("dpo", "kto", "grpo"):
                o["ref_log_probs"] = extra["ref_log_probs"]
            if name == "kto":
                first = (extra["desirable"],)
            if name == "grpo":
                first = (extra["advantages"],)
                # No ratio near a bound, where rounding would decide.
                o |= {"epsilon_low": 0.99, "epsilon_high": 50.0, "beta": 0.2}
                o["old_log_probs"] = extra["old_log_probs"]
            result = function(input, weight, target, *first, bias, **o)
            loss: Tensor = result if isinstance(result, Tensor) else result.loss
            return loss

        return call

    return Entry(name, with_extra(ours), with_extra(plain), options=_HEAD)


# ------------------------------------------------------------------------------- rewritten graphs


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _user_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra
) -> Tensor:
    logits = _wide(F.linear(input, weight, bias))
    return F.cross_entropy(logits.view(-1, logits.size(-1)), target.reshape(-1))


def _user_row_losses(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra
) -> Tensor:
    logits = _wide(F.linear(input, weight, bias))
    return F.cross_entropy(
        logits.view(-1, logits.size(-1)), target.reshape(-1), reduction="none"
    ).view(target.shape)


def _user_region(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra
) -> Tensor:
    log_probs = _wide(F.linear(input, weight, bias)).log_softmax(-1)
    counts = target != -100
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = -chosen * (1 - chosen.exp()) ** 2
    return (loss * counts).sum() / counts.sum().clamp(min=1)


def _user_region_rows(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra: Extra
) -> Tensor:
    log_probs = _wide(F.linear(input, weight, bias)).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (0.1 * entropy - chosen).masked_fill(target == -100, 0.0)


def _rewritten(user: Loss, name: str) -> Loss:
    """The user's function as the rewrite leaves it, run without code generation."""

    def call(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        extra: Extra,
        chunk_size: int | None = CHUNK,
    ) -> Tensor:
        # The compiler would serve a function that it knows with a graph of another chunk size.
        torch._dynamo.reset()
        backend = Backend(chunk_size=chunk_size)
        compiled = torch.compile(user, backend=backend, dynamic=False, fullgraph=True)
        loss = compiled(input, weight, target, bias, extra)
        if target.numel():
            assert backend.our_nodes, f"{name} was not rewritten: {reasons()}"
        return loss

    return call


# --------------------------------------------------------------------------------------- the table


ENTRIES = {
    entry.name: entry
    for entry in (
        _cross_entropy("mean"),
        _cross_entropy("sum"),
        _cross_entropy("none"),
        Entry(
            "cross-entropy-lse",
            _ours(functional.chunked_linear_cross_entropy, "lse", return_lse=True),
            lambda *args, **o: reference.linear_cross_entropy(*args[:4], return_lse=True, **o)[2],
            per_row=True,
            options=_HEAD,
        ),
        Entry("multi-token", _multi_token, _plain_multi_token, options=_TERMS),
        Entry("multi-head", _multi_head, _plain_multi_head, options=_TERMS),
        Entry("linear-loss", _linear_loss, _plain_linear_loss),
        Entry(
            "linear-loss-direct",
            _linear_loss_direct,
            _plain(reference.linear_cross_entropy, reduction="sum"),
        ),
        Entry(
            "log-probs",
            _ours(functional.chunked_linear_log_probs),
            _picked("log_probs"),
            per_row=True,
            options=_HEAD,
        ),
        Entry(
            "entropy",
            _ours(functional.chunked_linear_log_probs, "entropy", return_entropy=True),
            _picked("entropy"),
            per_row=True,
            options=_HEAD - {"ignore_index"},
            ignores=False,
        ),
        _logits_cross_entropy("mean"),
        _logits_cross_entropy("none"),
        Entry(
            "selective-log-softmax",
            _selective_log_softmax,
            _picked("log_probs"),
            per_row=True,
            options=frozenset({"ignore_index"}),
            linear=False,
        ),
        _distillation("jsd", "mean"),
        _distillation("kl", "none"),
        _distillation("cosine", "sum"),
        _sequences("dpo", functional.chunked_linear_dpo, reference.linear_dpo),
        _sequences("cpo", functional.chunked_linear_cpo, reference.linear_cpo),
        _sequences("simpo", functional.chunked_linear_simpo, reference.linear_simpo),
        _sequences("orpo", functional.chunked_linear_orpo, reference.linear_orpo),
        _sequences("kto", functional.chunked_linear_kto, reference.linear_kto),
        _sequences("grpo", functional.chunked_linear_grpo, reference.linear_grpo),
        *(
            Entry(name, _rewritten(user, name), user, per_row=per_row, rewritten=True)
            for name, user, per_row in (
                ("rewritten-cross-entropy", _user_cross_entropy, False),
                ("rewritten-row-losses", _user_row_losses, True),
                ("rewritten-region", _user_region, False),
                ("rewritten-region-rows", _user_region_rows, True),
            )
        ),
    )
}  # fmt: skip


def over(condition: Callable[[Entry], bool] = lambda entry: True) -> Any:
    """Parametrise a test over the entries with a trait."""
    chosen = [entry for entry in ENTRIES.values() if condition(entry)]
    assert chosen
    return pytest.mark.parametrize("entry", chosen, ids=[entry.name for entry in chosen])


def having(option: str) -> Any:
    """Parametrise a test over the entries with an option."""
    return over(lambda entry: option in entry.options)


#: Everything that people call by name.
explicit = over(lambda entry: not entry.rewritten)


# ------------------------------------------------------------------------------------------- data


def make(
    *,
    dtype: torch.dtype = torch.float64,
    batch: int = BATCH,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    classes: int = CLASSES,
    bias: bool = True,
    ignored: float = 0.25,
    device: torch.device | str = "cpu",
) -> Sample:
    """Random arguments ``[B, T, D]``; the first token of each sequence counts."""
    sample = samples.make_sample(
        (batch, tokens), hidden, classes, dtype=dtype, bias=bias, ignored=ignored, device=device
    )
    first = torch.arange(batch, device=device) % classes
    sample.target[:, 0] = first
    return sample


def extra_for(input: Tensor, weight: Tensor) -> Extra:
    """The tensors that only some losses need, exact in every dtype."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator).bfloat16()
        return values.to(input.device, input.dtype)

    batch, tokens = input.shape[:2]
    return {
        "teacher_input": normal(batch, tokens, 6),
        "teacher_weight": normal(weight.shape[0], 6),
        "ref_log_probs": -normal(batch, tokens).abs(),
        "old_log_probs": -normal(batch, tokens).abs(),
        "advantages": normal(batch),
        "desirable": torch.arange(batch, device=input.device) % 2 == 0,
    }


def _double(extra: Extra) -> Extra:
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in extra.items()
    }


def _called(function: Loss, extra: Extra) -> Callable[..., Tensor]:
    """A function of the table as `samples.run` calls one."""

    def call(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        *,
        class_weight: Tensor | None,
        **options: Any,
    ) -> Tensor:
        if class_weight is not None:
            options["class_weight"] = class_weight
        return function(input, weight, target, bias, extra, **options)

    return call


def upstream_for(entry: Entry, sample: Sample) -> Tensor | float:
    """One per row where there are rows, else a scalar."""
    if not entry.per_row:
        return UPSTREAM
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(sample.target.shape, generator=generator).bfloat16().double()
    return values.to(sample.target.device)


def upstream_like(loss: Tensor, entry: Entry, sample: Sample) -> Tensor:
    """The same as a tensor."""
    upstream = upstream_for(entry, sample)
    return upstream.to(loss) if isinstance(upstream, Tensor) else torch.full_like(loss, upstream)


def run(entry: Entry, sample: Sample, **options: Any) -> Result:
    """Loss and gradients of ours; the options of `samples.run` and those of the entry."""
    extra = options.pop("extra", None) or extra_for(sample.input, sample.weight)
    options.setdefault("upstream", upstream_for(entry, sample))
    options.setdefault("chunk_size", CHUNK)
    return samples.run(_called(entry.ours, extra), sample, **options)


def run_plain(entry: Entry, sample: Sample, **options: Any) -> Result:
    """The same of plain torch."""
    extra = options.pop("extra", None) or extra_for(sample.input, sample.weight)
    options.setdefault("upstream", upstream_for(entry, sample))
    return samples.run(_called(entry.plain, extra), sample, **options)


def check(
    entry: Entry,
    sample: Sample,
    *,
    chunk_size: int | None = CHUNK,
    slack: float | None = None,
    plain_entry: Entry | None = None,
    frozen: Collection[str] = (),
    **options: Any,
) -> Result:
    """Loss and every gradient against fp64, as close as plain torch comes at this dtype."""
    dtype = sample.input.dtype
    slack = SLACK[dtype] if slack is None else slack
    extra = extra_for(sample.input, sample.weight)
    options.setdefault("upstream", upstream_for(entry, sample))
    ours = run(entry, sample, chunk_size=chunk_size, extra=extra, frozen=frozen, **options)
    plain = run_plain(entry, sample, extra=extra, frozen=frozen, **options)
    truth = run_plain(entry, sample.double(), extra=_double(extra), frozen=frozen, **options)
    loss_slack = slack if dtype == torch.float64 else 1e-6
    assert_results_match(ours, plain, truth, sample, slack=slack, loss_slack=loss_slack)
    return ours


def assert_close(value: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    """Equal up to the rounding of fp64 (or fp32, where that is the dtype)."""
    assert value is not None, what
    assert expected is not None, what
    rtol = 1e-10 if value.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        value, expected, rtol=rtol, atol=rtol, equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def leaves(sample: Sample, names: Iterable[str] = samples.DIFFERENTIABLE) -> dict[str, Tensor]:
    """Operands as leaves that require grad, by name; those not named do not."""
    made = {}
    for name in samples.DIFFERENTIABLE:
        value = getattr(sample, name)
        if value is not None:
            made[name] = value.detach().requires_grad_(name in names)
    return made


def call(entry: Entry, operands: dict[str, Tensor], sample: Sample, **options: Any) -> Tensor:
    """The loss of operands as they are."""
    extra = options.pop("extra", None)
    if extra is None:
        extra = extra_for(sample.input, sample.weight)
    options.setdefault("chunk_size", CHUNK)
    return entry.ours(
        operands["input"], operands["weight"], sample.target, operands.get("bias"), extra, **options
    )


compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
