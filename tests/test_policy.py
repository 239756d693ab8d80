"""Policy losses against their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from greyhound_ops import functional, modules, reference
from greyhound_ops.functional.policy import GRPO_LOSS_TYPES
from greyhound_ops.testing import peak_memory
from samples import DIFFERENTIABLE, Sample, dtype_id, make_sample, run
from sequence_samples import CLASSES, LONG_SPANS, _call, check, leaves, make_batch, make_reference

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(DIFFERENTIABLE, size)]
ROWS, TOKENS = 6, 5

# What each loss needs beside the defaults.
NEEDS: dict[str, dict[str, Any]] = {kind: {} for kind in GRPO_LOSS_TYPES}
NEEDS["cispo"] = {"epsilon_high": 1.3}
NEEDS["dr_grpo"] = {"max_completion_length": 9}
NEEDS["luspo"] = {"importance_sampling_level": "sequence"}
by_kind = pytest.mark.parametrize("kind", GRPO_LOSS_TYPES)


def log_probs_of(batch: Sample, **options: Any) -> Tensor:
    """Log-probs of the policy in fp64."""
    wide = batch.double()
    return reference.linear_log_probs(
        wide.input, wide.weight, batch.target, wide.bias, **options
    ).log_probs


def off_policy(batch: Sample, **options: Any) -> Tensor:
    """Log-probs of a policy that ratios of 0.4, 0.9, 1.1 and 2.2 tell from the present one.

    Well apart from the bounds, so that rounding puts no token on the other side of one.
    """
    ratios = torch.tensor([0.4, 0.9, 1.1, 2.2], dtype=torch.float64, device=batch.input.device)
    shape = batch.target.shape
    picked = ratios[torch.arange(shape.numel(), device=batch.input.device) % 4].view(shape)
    return log_probs_of(batch, **options) - picked.log()


def advantages_of(batch: Sample, by: str = "sequence") -> Tensor:
    """Some above and some below zero, but so that the loss is no difference of large numbers."""
    shape = batch.target.shape if by == "token" else batch.target.shape[:1]
    values = torch.rand(shape, dtype=torch.float64) + 0.5
    values.view(-1)[::3] *= -0.3
    return values.to(batch.input.device)


def compare(batch: Sample, advantages: Tensor, **options: Any) -> Any:
    return check(
        functional.chunked_linear_grpo, reference.linear_grpo, batch, advantages, **options
    )


# ------------------------------------------------------------------------ equal to the definition


@pytest.mark.parametrize("by", ["sequence", "token"])
@by_kind
def test_off_policy(kind: str, by: str, device: torch.device) -> None:
    batch = make_batch(device=device)
    compare(
        batch,
        advantages_of(batch, by),
        loss_type=kind,
        old_log_probs=off_policy(batch),
        beta=0.3,
        **NEEDS[kind],
        **make_reference(batch),
    )


@by_kind
def test_on_policy(kind: str, device: torch.device) -> None:
    # No old log-probs: every ratio is 1, and its gradient is left.
    batch = make_batch(device=device)
    compare(batch, advantages_of(batch), loss_type=kind, **NEEDS[kind])


OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "gspo-kl": {
        "importance_sampling_level": "sequence", "beta": 0.2, "use_bias_correction_kl": True,
    },
    "clip-higher": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "delta": {"delta": 1.5, "epsilon_high": 0.05},
    "delta-below": {"delta": 1.05, "epsilon_high": 0.5},
    "no-clip": {"epsilon_low": 0.99, "epsilon_high": 50.0},
    "kl": {"beta": 0.2, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.1, "loss_type": "bnpo"},
    "entropy-penalty": {"entropy_coef": -0.1, "loss_type": "cispo", "epsilon_high": 5.0},
    "temperature": {"temperature": 0.7, "beta": 0.1, "entropy_coef": 0.02},
    "scale": {"logit_scale": 0.5, "softcap": 3.0, "loss_type": "ppo"},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    "vespo": {
        "loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 1.5,
        "vespo_lambda_neg": 0.7,
    },
    "denominator": {"denominator": 13},
    "denominator-dapo": {"loss_type": "dapo", "denominator": 40.5},
    "denominator-dr": {"loss_type": "dr_grpo", "denominator": 77},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, device: torch.device) -> None:
    options = OPTIONS[case]
    batch = make_batch(device=device)
    extra = make_reference(batch) if options.get("beta") else {}
    scaled = {key: options[key] for key in ("temperature", "logit_scale", "softcap")
              if key in options}  # fmt: skip
    compare(
        batch,
        advantages_of(batch),
        old_log_probs=off_policy(batch, **scaled),
        **options,
        **extra,
    )


@pytest.mark.fault("B90")
def test_temperature_by_token_and_its_gradient() -> None:
    batch = make_batch()
    head, advantages = make_reference(batch), advantages_of(batch)
    grads = []
    for function in (functional.chunked_linear_grpo, reference.linear_grpo):
        temperature = torch.linspace(0.5, 2.0, ROWS * TOKENS, dtype=torch.float64)
        temperature = temperature.view(ROWS, TOKENS).requires_grad_()
        result = function(
            batch.input, batch.weight, batch.target, advantages, batch.bias, beta=0.2,
            temperature=temperature, old_log_probs=off_policy(batch), **head,
        )  # fmt: skip
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        grads.append(temperature.grad)
    mask = batch.target != -100
    assert grads[0][mask].any()
    # The reference head is not differentiated there either.
    torch.testing.assert_close(grads[0], grads[1])


def test_ignore_index_is_any_class() -> None:
    batch = make_batch()
    batch = batch.replace(target=batch.target.masked_fill(batch.target == -100, 2))
    mask = torch.rand(ROWS, TOKENS) < 0.8
    compare(batch, advantages_of(batch), ignore_index=2, mask=mask)
    narrow = functional.chunked_linear_grpo(
        batch.input, batch.weight, batch.target.int(), advantages_of(batch), mask=mask,
        ignore_index=2,
    )  # fmt: skip
    assert narrow.log_probs[~mask].eq(0).all()


@pytest.mark.fault("B85", "B88")
def test_denominator_as_a_tensor() -> None:
    batch = make_batch()
    advantages = advantages_of(batch)
    operands = batch.input, batch.weight, batch.target, advantages
    plain = functional.chunked_linear_grpo(*operands, loss_type="dapo", denominator=13.0)
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        given = torch.tensor(13, dtype=dtype)
        result = functional.chunked_linear_grpo(*operands, loss_type="dapo", denominator=given)
        assert torch.equal(result.loss, plain.loss)
    none = functional.chunked_linear_grpo(
        batch.input, batch.weight, torch.full_like(batch.target, -100), advantages,
        denominator=torch.tensor(0),
    )  # fmt: skip
    assert none.loss == 0


def test_reference_log_probs_given(device: torch.device) -> None:
    batch = make_batch(device=device)
    head = make_reference(batch)
    given = reference.linear_log_probs(
        head["ref_input"], head["ref_weight"], batch.target, head["ref_bias"]
    ).log_probs
    advantages = advantages_of(batch)
    results = [
        compare(batch, advantages, beta=0.2, **options)
        for options in (head, {"ref_log_probs": given})
    ]
    torch.testing.assert_close(results[0].loss, results[1].loss)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=dtype_id)
def test_mask(dtype: torch.dtype, device: torch.device) -> None:
    # Beside the targets that are ignored anyway; a pad token may stand under it.
    batch = make_batch(device=device)
    mask = (torch.rand(ROWS, TOKENS, device=device) < 0.7).to(dtype)
    mask[1] = 0
    compare(
        batch,
        advantages_of(batch, "token"),
        mask=mask,
        old_log_probs=off_policy(batch),
        beta=0.1,
        entropy_coef=0.1,
        **make_reference(batch),
    )


def test_what_stands_under_the_mask_is_no_class() -> None:
    batch = make_batch()
    mask = batch.target != -100
    padded = batch.target.masked_fill(~mask, CLASSES + 5)
    advantages = advantages_of(batch)
    results = [
        functional.chunked_linear_grpo(
            batch.input, batch.weight, target, advantages, mask=mask
        ).loss
        for target in (batch.target, padded)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
@by_kind
def test_precision(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    # Tokens enough that a rounding of plain torch's does not make up for another.
    batch = make_batch(dtype, device, tokens=24, spans=LONG_SPANS)
    compare(
        batch,
        advantages_of(batch),
        loss_type=kind,
        old_log_probs=off_policy(batch),
        beta=0.01,
        **NEEDS[kind],
        **make_reference(batch),
    )


@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_frozen(frozen: tuple[str, ...]) -> None:
    batch = make_batch()
    result = compare(
        batch, advantages_of(batch), frozen=frozen, beta=0.1, entropy_coef=0.1,
        **make_reference(batch),
    )  # fmt: skip
    assert all((getattr(result, name) is None) == (name in frozen) for name in DIFFERENTIABLE)


def test_nothing_but_the_policy_gets_a_gradient() -> None:
    batch = make_batch()
    head = {key: value.requires_grad_() for key, value in make_reference(batch).items()}
    others = {"old_log_probs": off_policy(batch).requires_grad_()}
    advantages = advantages_of(batch).requires_grad_()
    denominator = torch.tensor(3.0, requires_grad=True)
    operands = leaves(batch)
    result = functional.chunked_linear_grpo(
        operands.input, operands.weight, batch.target, advantages, operands.bias,
        beta=0.1, denominator=denominator, return_entropy=True, **others, **head,
    )  # fmt: skip
    result.loss.backward()
    for tensor in (*head.values(), *others.values(), advantages, denominator):
        assert tensor.grad is None
    for name, value in result._asdict().items():
        assert value.requires_grad == (name == "loss")


def test_gradient_of_log_probs_and_entropy_given() -> None:
    log_probs = -torch.rand(3, 4, dtype=torch.float64) - 0.1
    old = log_probs - torch.tensor([0.5, 0.9, 1.1, 2.0], dtype=torch.float64).log()
    given = -torch.rand(3, 4, dtype=torch.float64)
    entropy = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1]])
    for kind in ("grpo", "dapo", "sapo", "luspo"):

        def loss(x: Tensor, h: Tensor, kind: str = kind) -> Tensor:
            return functional.grpo_loss(
                x, advantages, mask, old_log_probs=old, ref_log_probs=given, entropy=h,
                beta=0.2, entropy_coef=0.3, loss_type=kind, **NEEDS[kind],
            ).loss  # fmt: skip

        assert torch.autograd.gradcheck(loss, (log_probs.clone().requires_grad_(), entropy))


# ------------------------------------------------------------------------- what does not count


@by_kind
def test_nothing_leaks_from_tokens_that_do_not_count(kind: str) -> None:
    batch = make_batch()
    masked = batch.target == -100
    clean = {
        "old_log_probs": off_policy(batch),
        "ref_log_probs": -torch.rand(ROWS, TOKENS, dtype=torch.float64),
    }
    advantages = advantages_of(batch, "token")
    results = []
    for dirt in (None, float("nan"), float("inf"), float("-inf")):
        values = {**clean, "advantages": advantages}
        if dirt is not None:
            values = {key: value.masked_fill(masked, dirt) for key, value in values.items()}
        operands = leaves(batch)
        result = functional.chunked_linear_grpo(
            operands.input, operands.weight, batch.target, values.pop("advantages"), operands.bias,
            loss_type=kind, beta=0.1, return_entropy=True, **values, **NEEDS[kind],
        )  # fmt: skip
        result.loss.backward()
        results.append([*result, *operands.grads()])
        assert not operands.input.grad[masked].any()
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert torch.equal(value, expected)


def test_nothing_leaks_from_log_probs_given() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for kind in GRPO_LOSS_TYPES:
        log_probs = torch.tensor([[-1.0, -2.0, float("nan")], [float("-inf")] * 3])
        log_probs.requires_grad_()
        entropy = torch.tensor([[1.0, 1.0, float("nan")], [float("inf")] * 3])
        result = functional.grpo_loss(
            log_probs, torch.ones(2), mask, entropy=entropy, entropy_coef=0.1,
            ref_log_probs=torch.full((2, 3), -1.5), beta=0.1, loss_type=kind, **NEEDS[kind],
        )  # fmt: skip
        result.loss.backward()
        assert all(value.isfinite().all() for value in result)
        assert not log_probs.grad[mask == 0].any()
        assert log_probs.grad[mask == 1].all()


@by_kind
def test_nothing_counts(kind: str, device: torch.device) -> None:
    batch = make_batch(device=device, spans=((0, 0),) * ROWS)
    operands = leaves(batch)
    result = functional.chunked_linear_grpo(
        operands.input, operands.weight, batch.target, advantages_of(batch), operands.bias,
        loss_type=kind, beta=0.1, entropy_coef=0.1, **NEEDS[kind], **make_reference(batch),
    )  # fmt: skip
    result.loss.backward()
    assert all(not value.any() for value in result)
    assert all(grad is not None and not grad.any() for grad in operands.grads())


def test_a_sequence_that_is_masked_contributes_nothing_but_stays_one_of_the_batch() -> None:
    batch = make_batch(spans=((0, 5), (0, 0), (2, 5), (0, 2), (3, 4), (1, 5)))
    advantages = advantages_of(batch)
    compare(batch, advantages)
    kept = [0, 2, 3, 4, 5]
    whole = functional.chunked_linear_grpo(batch.input, batch.weight, batch.target, advantages)
    part = functional.chunked_linear_grpo(
        batch.input[kept], batch.weight, batch.target[kept], advantages[kept]
    )
    torch.testing.assert_close(whole.loss * 6, part.loss * 5)


def test_empty_batch() -> None:
    batch = make_batch(rows=0, spans=())
    for kind in GRPO_LOSS_TYPES:
        operands = leaves(batch)
        loss = functional.chunked_linear_grpo(
            operands.input, operands.weight, batch.target, torch.zeros(0), operands.bias,
            loss_type=kind, **NEEDS[kind],
        ).loss  # fmt: skip
        loss.backward()
        assert loss == 0
        assert not operands.weight.grad.any()


# ------------------------------------------------------------------------------------ numerics


@by_kind
def test_a_ratio_that_overflows_moves_nothing_where_it_is_clipped(kind: str) -> None:
    # exp(200) is inf in fp32, and 0 * inf no number; the clip has a gradient of 0 there.
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    result = functional.grpo_loss(
        log_probs,
        torch.ones(1),
        old_log_probs=torch.tensor([[-201.0, -201.0]]),
        loss_type=kind,
        **NEEDS[kind],
    )
    result.loss.backward()
    assert result.loss.isfinite()
    if kind == "cispo":  # its weight is clipped, not its gradient
        torch.testing.assert_close(log_probs.grad, torch.full((1, 2), -1.3 / 2))
    else:
        assert not log_probs.grad.any()
    assert result.clip_fraction_high == (kind not in ("sapo", "vespo"))


def test_two_sided_clip_bounds_what_the_one_sided_leaves() -> None:
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    old = torch.tensor([[-201.0]])
    free = functional.grpo_loss(log_probs, -torch.ones(1), old_log_probs=old)
    assert free.loss == math.inf
    bounded = functional.grpo_loss(log_probs, -torch.ones(1), old_log_probs=old, delta=4.0)
    bounded.loss.backward()
    assert bounded.loss == 4.0
    assert log_probs.grad == 0


def test_divergence_near_the_reference() -> None:
    # d of 1e-3: exp(d) - d - 1 in fp32 keeps one digit of 5e-7.
    log_probs = -torch.rand(4, 8)
    given = log_probs - 1e-3 * torch.rand(4, 8)
    difference = given.double() - log_probs.double()
    exact = (torch.expm1(difference) - difference).mean()
    result = functional.grpo_loss(log_probs, torch.zeros(4), ref_log_probs=given, beta=1.0)
    torch.testing.assert_close(result.kl.double(), exact, rtol=1e-4, atol=0)


# ----------------------------------------------------------------------------- by hand, metrics


def test_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 2.0, 1.1], [1.5, 0.7, 1.0]], dtype=torch.float64).log() - 3.0
    old = torch.full((2, 3), -3.0, dtype=torch.float64)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # Ratios 0.5, 2 -> 1.2, 1.1 times 2, and 1.5, 0.7 -> 0.8 times -1.
    first, second = -2 * (0.5 + 1.2 + 1.1), 1.5 + 0.8
    expected = {
        "grpo": (first / 3 + second / 2) / 2,
        "bnpo": (first + second) / 5,
        "ppo": (first + second) / 5,
        "dapo": (first + second) / 5,
        "dr_grpo": (first + second) / (2 * 9),
        "cispo": -(
            2 * (0.5 * log_probs[0, 0] + 1.3 * log_probs[0, 1] + 1.1 * log_probs[0, 2])
            - (1.3 * log_probs[1, 0] + 0.7 * log_probs[1, 1])
        ).item() / 5,
        "sapo": (
            -2 * 4 * sum(1 / (1 + math.exp(1 - w)) for w in (0.5, 2.0, 1.1)) / 3
            + 4 / 1.05 * sum(1 / (1 + math.exp(1.05 * (1 - w))) for w in (1.5, 0.7)) / 2
        ) / 2,
        # Products 1.1 and 1.05.
        "vespo": -(
            1.1**2 * math.exp(3 * (1 - 1.1)) * 2 * log_probs[0].sum()
            - 1.05**3 * math.exp(2 * (1 - 1.05)) * log_probs[1, :2].sum()
        ).item() / 5,
        # Geometric means 1.1^(1/3) and 1.05^(1/2), within the bounds.
        "luspo": (-2 * 3 * 1.1 ** (1 / 3) + 2 * 1.05**0.5) / 2,
    }  # fmt: skip
    assert set(expected) == set(GRPO_LOSS_TYPES)
    for kind, value in expected.items():
        result = functional.grpo_loss(
            log_probs, advantages, mask, old_log_probs=old, loss_type=kind, **NEEDS[kind]
        )
        assert result.loss.item() == pytest.approx(value, rel=1e-12), kind
    clipped = functional.grpo_loss(log_probs, advantages, mask, old_log_probs=old)
    assert clipped.clip_fraction_high.item() == pytest.approx(1 / 5)
    assert clipped.clip_fraction_low.item() == pytest.approx(1 / 5)


def test_reference_by_hand() -> None:
    # A head of two classes with logits (0, log 3): probabilities 1/4 and 3/4.
    input = torch.ones(1, 2, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    target, old = torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    loss = reference.linear_grpo(
        input, weight, target, torch.tensor([2.0]), old_log_probs=old, ref_log_probs=old, beta=0.5
    )
    # Ratios 1.5 -> 1.2 and 0.5; k3 with exp(d) = 2/3 and 2.
    divergence = (2 / 3 - math.log(2 / 3) - 1) + (2 - math.log(2) - 1)
    assert loss.item() == pytest.approx((-2 * (1.2 + 0.5) + 0.5 * divergence) / 2)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    loss = reference.linear_grpo(input, weight, target, torch.zeros(1), entropy_coef=0.3)
    assert loss.item() == pytest.approx(-0.3 * entropy)


def test_metrics() -> None:
    batch = make_batch()
    head, old, advantages = make_reference(batch), off_policy(batch), advantages_of(batch)
    result = functional.chunked_linear_grpo(
        batch.input, batch.weight, batch.target, advantages, batch.bias,
        old_log_probs=old, return_entropy=True, **head,
    )  # fmt: skip
    counted = batch.target != -100
    outputs = reference.linear_log_probs(batch.input, batch.weight, batch.target, batch.bias)
    other = reference.linear_log_probs(
        head["ref_input"], head["ref_weight"], batch.target, head["ref_bias"]
    ).log_probs
    difference = (other - outputs.log_probs)[counted]
    ratio, sign = (outputs.log_probs - old).exp(), advantages.sign().unsqueeze(-1)
    torch.testing.assert_close(result.log_probs, outputs.log_probs)
    torch.testing.assert_close(result.kl, (difference.exp() - difference - 1).mean())
    torch.testing.assert_close(result.entropy, outputs.entropy[counted].mean())
    low, high = (ratio < 0.8) & (sign < 0), (ratio > 1.2) & (sign > 0)
    assert low[counted].any()
    assert high[counted].any()
    torch.testing.assert_close(result.clip_fraction_low, low[counted].double().mean())
    torch.testing.assert_close(result.clip_fraction_high, high[counted].double().mean())
    bare = functional.chunked_linear_grpo(batch.input, batch.weight, batch.target, advantages)
    assert bare.kl is None
    assert bare.entropy is None


def test_log_probs_of_one_step_are_the_old_ones_of_the_next() -> None:
    batch = make_batch()
    operands = batch.input, batch.weight, batch.target, advantages_of(batch), batch.bias
    first = functional.chunked_linear_grpo(*operands, temperature=0.8)
    again = functional.chunked_linear_grpo(
        *operands, temperature=0.8, old_log_probs=first.log_probs
    )
    assert torch.equal(first.loss, again.loss)


# ---------------------------------------------------------------------------------- the caller


@by_kind
def test_module(kind: str) -> None:
    batch = make_batch()
    options = {"loss_type": kind, "beta": 0.1, "temperature": 0.9, "chunk_size": 4, **NEEDS[kind]}
    tensors = {
        "old_log_probs": off_policy(batch),
        "mask": torch.rand(ROWS, TOKENS) < 0.8,
        "denominator": 7,
        **make_reference(batch),
    }
    operands = batch.input, batch.weight, batch.target, advantages_of(batch), batch.bias
    built = modules.ChunkedLinearGRPOLoss(**options)(*operands, **tensors)
    expected = functional.chunked_linear_grpo(*operands, **options, **tensors)
    for value, other in zip(built, expected, strict=True):
        assert value is other is None or torch.equal(value, other)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "loss_type": ({"loss_type": "reinforce"}, "loss_type: expected one of 'grpo'"),
    "level": ({"importance_sampling_level": "batch"}, "importance_sampling_level: expected one"),
    "sapo level": (
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},
        "importance_sampling_level: expected 'token'",
    ),
    "luspo level": ({"loss_type": "luspo"}, "importance_sampling_level: expected 'sequence'"),
    "epsilon_low": ({"epsilon_low": -0.1}, "epsilon_low: expected a finite number >= 0"),
    "epsilon_high": ({"epsilon_high": -0.1}, "epsilon_high: expected a finite number >= 0"),
    "cispo": ({"loss_type": "cispo"}, "epsilon_high: expected the largest weight"),
    "delta": ({"delta": 0.0}, "delta: expected a number > 0"),
    "delta of sapo": ({"delta": 2.0, "loss_type": "sapo"}, "delta: expected None"),
    "beta": ({"beta": -1.0}, "beta: expected"),
    "no reference": ({"beta": 0.1}, "ref_log_probs: expected log-probs of the reference"),
    "no length": ({"loss_type": "dr_grpo"}, "max_completion_length: expected a number of tokens"),
    "length": (
        {"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length: expected at",
    ),
    "sapo": ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos: expected a number > 0"),
    "denominator": ({"denominator": 0}, "denominator: expected a number > 0"),
    "denominators": ({"denominator": torch.ones(2)}, "denominator: expected a number or a scalar"),
    "mask": ({"mask": torch.ones(ROWS, 4)}, r"mask: expected shape \[6, 5\], got \[6, 4\]"),
    "old": ({"old_log_probs": torch.ones(ROWS)}, r"old_log_probs: expected shape \[6, 5\]"),
    "ref": ({"ref_log_probs": torch.ones(ROWS)}, r"ref_log_probs: expected shape \[6, 5\]"),
    "both": (
        {"ref_log_probs": torch.ones(ROWS, TOKENS), "ref_input": torch.ones(ROWS, TOKENS, 8),
         "ref_weight": torch.ones(CLASSES, 8)},
        "ref_log_probs: expected None",
    ),
    "advantages": (
        {"advantages": torch.ones(5)}, r"advantages: expected shape \[6\] or \[6, 5\], got \[5\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    options, message = ERRORS[case]
    batch = make_batch(torch.float32)
    options = {"advantages": torch.ones(ROWS), **options}
    with pytest.raises(ValueError, match=message):
        functional.chunked_linear_grpo(
            batch.input, batch.weight, batch.target, bias=batch.bias, **options
        )


def test_errors_of_types() -> None:
    batch = make_batch(torch.float32)
    operands = batch.input, batch.weight, batch.target
    with pytest.raises(TypeError, match="advantages: expected a tensor, got list"):
        functional.chunked_linear_grpo(*operands, [1.0] * ROWS)
    with pytest.raises(TypeError, match="advantages: expected dtype"):
        functional.chunked_linear_grpo(*operands, torch.ones(ROWS, dtype=torch.int64))
    with pytest.raises(TypeError, match="mask: expected dtype bool"):
        functional.chunked_linear_grpo(
            *operands, torch.ones(ROWS), mask=torch.ones(ROWS, TOKENS, dtype=torch.complex64)
        )
    with pytest.raises(TypeError, match="max_completion_length: expected an int"):
        functional.chunked_linear_grpo(
            *operands, torch.ones(ROWS), loss_type="dr_grpo", max_completion_length=2.5
        )
    with pytest.raises(ValueError, match="entropy: expected a tensor"):
        functional.grpo_loss(torch.zeros(2, 3), torch.ones(2), entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"log_probs: expected shape \[B, T\]"):
        functional.grpo_loss(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="epsilon_low"):
        modules.ChunkedLinearGRPOLoss(epsilon_low=-1.0)
    with pytest.raises(TypeError, match="temperature: expected a number"):
        modules.ChunkedLinearGRPOLoss(temperature=torch.ones(2))


# ------------------------------------------------------------------------------ compile, memory


@pytest.mark.fault("B44")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["dapo", "dr_grpo", "luspo", "sapo"])
def test_compiled(kind: str, dynamic: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        advantages, old, extra = rest
        result = functional.chunked_linear_grpo(
            input.tanh(), weight, target, advantages, bias, old_log_probs=old, beta=0.1,
            entropy_coef=0.01, loss_type=kind, **NEEDS[kind], **extra,
        )  # fmt: skip
        assert result.kl is not None
        return result.loss.square() + result.kl

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    compiles = []
    for rows, tokens in ((6, 5), (4, 6), (7, 8)) if dynamic else ((6, 5),):
        batch = make_batch(rows=rows, tokens=tokens, spans=((0, tokens), (1, 3)) * (rows // 2))
        rest = advantages_of(batch), off_policy(batch), make_reference(batch)
        results = []
        for run_it in (compiled, step):
            operands = leaves(batch)
            loss = run_it(operands.input, operands.weight, batch.target, operands.bias, *rest)
            loss.backward(torch.full_like(loss, -0.6))
            results.append([loss.detach(), *operands.grads()])
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value, expected)
        compiles.append(counter.frame_count)
    assert compiles[0] == compiles[-1], "compiled anew for another shape"


def test_peak_memory_holds_no_logits(device: torch.device) -> None:
    sample = make_sample((4, 128), 16, 4000, device=device, bias=True)
    options = {
        "ref_input": torch.randn(4, 128, 16, device=device),
        "ref_weight": sample.weight,
        "beta": 0.1,
        "entropy_coef": 0.1,
    }
    advantages = torch.randn(4, device=device)

    def peak(function: Callable[..., Any], **more: Any) -> int:
        call = _call(function, (advantages,))
        run(call, sample, **options, **more)
        with peak_memory(device) as measured:
            run(call, sample, **options, **more)
        return measured.bytes

    logits = 512 * 4000 * 4
    gradients = sample.input.nbytes + sample.weight.nbytes
    ours = peak(functional.chunked_linear_grpo, chunk_size=16)
    assert ours < gradients + logits // 4
    assert peak(reference.linear_grpo) > 2 * logits


# --------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@by_kind
def test_no_host_sync(kind: str) -> None:
    batch = make_batch(torch.bfloat16, "cuda")
    call = _call(functional.chunked_linear_grpo, (advantages_of(batch),))
    options = {
        "loss_type": kind,
        "old_log_probs": off_policy(batch),
        "mask": torch.ones(ROWS, TOKENS, device="cuda"),
        "denominator": torch.tensor(17, device="cuda"),
        "beta": 0.1,
        "entropy_coef": 0.1,
        **NEEDS[kind],
        **make_reference(batch),
    }
    upstream = torch.tensor(0.7, device="cuda")
    run(call, batch, upstream=upstream, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call, batch, upstream=upstream, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
