"""Preference losses against their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from greyhound_ops import functional, modules, reference
from greyhound_ops.errors import NotDifferentiableTwiceError
from greyhound_ops.functional.preference import CPO_LOSS_TYPES, DPO_LOSS_TYPES
from greyhound_ops.testing import peak_memory
from samples import DIFFERENTIABLE, Sample, dtype_id, make_sample, run
from sequence_samples import (
    CLASSES,
    LONG_SPANS,
    SPANS,
    TOKENS,
    _call,
    check,
    leaves,
    make_batch,
    make_reference,
    ragged,
)

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(DIFFERENTIABLE, size)]
SMOOTHED = {"robust": 0.1, "exo_pair": 1e-3}
WANTED = torch.tensor([True, False, False, True, True, False])

# Name, function, reference, module, options: every loss once.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, dict[str, Any]]] = {
    "dpo": (
        functional.chunked_linear_dpo, reference.linear_dpo, modules.ChunkedLinearDPOLoss, {},
    ),
    "cpo": (
        functional.chunked_linear_cpo, reference.linear_cpo, modules.ChunkedLinearCPOLoss, {},
    ),
    "simpo": (
        functional.chunked_linear_simpo, reference.linear_simpo, modules.ChunkedLinearSimPOLoss,
        {"gamma": 0.7},
    ),
    "orpo": (
        functional.chunked_linear_orpo, reference.linear_orpo, modules.ChunkedLinearORPOLoss,
        {"beta": 0.4},
    ),
}  # fmt: skip
by_loss = pytest.mark.parametrize("name", LOSSES)


def with_reference(name: str, batch: Sample) -> dict[str, Tensor]:
    return make_reference(batch) if name == "dpo" else {}


# ------------------------------------------------------------------------ equal to the definition


@pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
def test_dpo(loss_type: str, device: torch.device) -> None:
    batch = make_batch(device=device)
    smoothing = SMOOTHED.get(loss_type, 0.0)
    check(
        functional.chunked_linear_dpo,
        reference.linear_dpo,
        batch,
        loss_type=loss_type,
        beta=0.3,
        label_smoothing=smoothing,
        **make_reference(batch),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.2},
        {"label_smoothing": 0.2, "loss_type": "aot"},
        {"average_log_prob": True, "nll_weight": 0.6},
        {"average_log_prob": False, "loss_type": "ipo"},
        {"logit_scale": 0.5, "softcap": 3.0, "nll_weight": 1.5},
        {"loss_type": "discopop", "discopop_tau": 0.5, "beta": 1.0},
        {"loss_type": "hinge", "beta": 2.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_dpo_options(options: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(device=device)
    check(
        functional.chunked_linear_dpo,
        reference.linear_dpo,
        batch,
        **make_reference(batch),
        **options,
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "aot"])
@pytest.mark.parametrize("by", ["token", "sequence"])
def test_dpo_with_log_probs_given(by: str, loss_type: str, device: torch.device) -> None:
    batch = make_batch(device=device)
    shape = batch.target.shape if by == "token" else batch.target.shape[:1]
    given = -torch.rand(shape, dtype=torch.float64, device=device)
    check(
        functional.chunked_linear_dpo,
        reference.linear_dpo,
        batch,
        ref_log_probs=given,
        loss_type=loss_type,
    )


def test_log_probs_given_equal_those_of_the_head() -> None:
    batch = make_batch()
    head = make_reference(batch)
    made = reference.linear_log_probs(
        head["ref_input"], head["ref_weight"], batch.target, head["ref_bias"]
    ).log_probs
    operands = batch.input, batch.weight, batch.target, batch.bias
    results = [
        functional.chunked_linear_dpo(*operands, **options).loss
        for options in (head, {"ref_log_probs": made}, {"ref_log_probs": made.sum(-1)})
    ]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_dpo_without_a_reference(device: torch.device) -> None:
    batch = make_batch(device=device)
    check(
        functional.chunked_linear_dpo,
        reference.linear_dpo,
        batch,
        only_ours={"reference_free": True},
    )


@pytest.mark.parametrize("loss_type", CPO_LOSS_TYPES)
def test_cpo(loss_type: str, device: torch.device) -> None:
    batch = make_batch(device=device)
    smoothing = 0.1 if loss_type == "sigmoid" else 0.0
    check(
        functional.chunked_linear_cpo,
        reference.linear_cpo,
        batch,
        loss_type=loss_type,
        label_smoothing=smoothing,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.5, "gamma": 1.5}, {"label_smoothing": 0.1, "nll_weight": 0.4}],
    ids=["plain", "margin", "cpo-simpo"],
)
def test_simpo(options: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(device=device)
    check(functional.chunked_linear_simpo, reference.linear_simpo, batch, **options)


@pytest.mark.parametrize(
    "options", [{}, {"nll_weight": 0.0, "beta": 1.0}, {"softcap": 2.0}], ids=str
)
def test_orpo(options: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(device=device)
    check(functional.chunked_linear_orpo, reference.linear_orpo, batch, **options)


@pytest.mark.parametrize("kl", ["none", "scalar", "by-sequence"])
@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
def test_kto(average: bool, kl: str, device: torch.device) -> None:
    batch = make_batch(device=device)
    point = {
        "none": {},
        "scalar": {"kl": torch.tensor(0.8, dtype=torch.float64, device=device)},
        "by-sequence": {"kl": torch.rand(6, dtype=torch.float64, device=device)},
    }[kl]
    check(
        functional.chunked_linear_kto,
        reference.linear_kto,
        batch,
        WANTED.to(device),
        average_log_prob=average,
        beta=0.4,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        **point,
        **make_reference(batch),
    )


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "clamped"])
def test_kto_estimates_its_reference_point(sign: int) -> None:
    batch, other = make_batch(), make_batch()
    head = make_reference(batch)
    # Log-probs of a reference that likes the mismatched completions less, or more.
    operands = other.input, batch.weight, other.target, batch.bias
    likes = reference.linear_log_probs(*operands).log_probs
    ratios = (torch.rand_like(likes) * sign).masked_fill(other.target == -100, 0.0)
    kl = ratios.sum(-1).mean().clamp(min=0)
    assert (kl > 0.1) if sign > 0 else (kl == 0)
    result = functional.chunked_linear_kto(
        batch.input, batch.weight, batch.target, WANTED, batch.bias,
        kl_input=other.input, kl_target=other.target, kl_ref_log_probs=likes - ratios, **head,
    )  # fmt: skip
    expected = reference.linear_kto(
        batch.input, batch.weight, batch.target, WANTED, batch.bias, kl=kl, **head
    )
    torch.testing.assert_close(result.kl, kl)
    torch.testing.assert_close(result.loss, expected)


def test_kto_reference_point_of_a_head_has_no_gradient() -> None:
    batch, other = make_batch(), make_batch()
    head = make_reference(batch)
    operands = leaves(batch)
    kl_input = other.input.requires_grad_()
    given = torch.tensor(0.3, requires_grad=True)
    functional.chunked_linear_kto(
        batch.input, operands.weight, batch.target, WANTED, kl=given, reference_free=True
    ).loss.backward()
    assert given.grad is None
    operands.weight.grad = None
    result = functional.chunked_linear_kto(
        operands.input, operands.weight, batch.target, WANTED, operands.bias,
        kl_input=kl_input, kl_target=other.target, kl_ref_input=head["ref_input"], **head,
    )  # fmt: skip
    result.loss.backward()
    assert kl_input.grad is None
    plain = leaves(batch)
    reference.linear_kto(
        plain.input, plain.weight, batch.target, WANTED, plain.bias, kl=result.kl, **head
    ).backward()
    for value, expected in zip(operands.grads(), plain.grads(), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
@by_loss
def test_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    function, plain, _, options = LOSSES[name]
    # Tokens enough that a rounding of plain torch's does not make up for another.
    batch = make_batch(dtype, device, tokens=24, spans=LONG_SPANS)
    check(function, plain, batch, **options, **with_reference(name, batch))


@pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
def test_precision_of_kto(dtype: torch.dtype, device: torch.device) -> None:
    batch = make_batch(dtype, device, tokens=24, spans=LONG_SPANS)
    check(
        functional.chunked_linear_kto,
        reference.linear_kto,
        batch,
        WANTED.to(device),
        **make_reference(batch),
    )


@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_frozen(frozen: tuple[str, ...]) -> None:
    batch = make_batch()
    result = check(
        functional.chunked_linear_dpo,
        reference.linear_dpo,
        batch,
        frozen=frozen,
        **make_reference(batch),
    )
    assert all((getattr(result, name) is None) == (name in frozen) for name in DIFFERENTIABLE)


@by_loss
def test_chunk_size_changes_nothing(name: str) -> None:
    function, _, _, options = LOSSES[name]
    batch = make_batch()
    extra = with_reference(name, batch)
    losses = [
        function(
            batch.input, batch.weight, batch.target, batch.bias,
            chunk_size=chunk_size, **options, **extra,
        ).loss
        for chunk_size in (1, 7, None)
    ]  # fmt: skip
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-13, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-13, atol=0)


def test_autocast() -> None:
    batch = make_batch(torch.float32)
    head = make_reference(batch)
    operands = leaves(batch)
    with torch.autocast("cpu", torch.bfloat16):
        result = functional.chunked_linear_dpo(
            operands.input, operands.weight, batch.target, operands.bias, **head
        )
    assert result.loss.dtype == torch.float32
    result.loss.backward()
    exact = leaves(batch)
    reference.linear_dpo(exact.input, exact.weight, batch.target, exact.bias, **head).backward()
    for value, expected in zip(operands.grads(), exact.grads(), strict=True):
        assert value is not None
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=0.1, atol=0.02)


# ------------------------------------------------------------------------- what does not count


@by_loss
def test_a_pair_with_an_empty_side_counts_nowhere(name: str) -> None:
    function, plain, _, options = LOSSES[name]
    batch = make_batch(spans=((0, 5), (0, 0), (2, 5), (0, 2), (3, 4), (0, 0)))
    check(function, plain, batch, **options, **with_reference(name, batch))
    # The two of three pairs that do not count might as well not be there, but for the likelihood.
    options = {**options, "nll_weight": 0.0}
    extra = with_reference(name, batch)
    whole = function(batch.input, batch.weight, batch.target, batch.bias, **options, **extra)
    kept = [0, 3]
    some = {key: value[kept] if key == "ref_input" else value for key, value in extra.items()}
    part = function(
        batch.input[kept], batch.weight, batch.target[kept], batch.bias, **options, **some
    )
    torch.testing.assert_close(whole.loss, part.loss)
    torch.testing.assert_close(whole.margin, part.margin)
    torch.testing.assert_close(whole.accuracy, part.accuracy)


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
def test_sorting_leaves_out_pairs_that_do_not_count(loss_type: str) -> None:
    # The first and the last but one of five.
    chosen = ((0, 0), (1, 4), (2, 5), (0, 2), (3, 4))
    rejected = ((0, 5), (0, 3), (1, 5), (0, 0), (2, 4))
    batch = make_batch(rows=10, spans=chosen + rejected)
    head = make_reference(batch)
    check(functional.chunked_linear_dpo, reference.linear_dpo, batch, loss_type=loss_type, **head)


@by_loss
def test_nothing_counts(name: str, device: torch.device) -> None:
    function, _, _, options = LOSSES[name]
    batch = make_batch(device=device, spans=((0, 0),) * 6)
    operands = leaves(batch)
    result = function(
        operands.input, operands.weight, batch.target, operands.bias,
        **options, **with_reference(name, batch),
    )  # fmt: skip
    result.loss.backward()
    assert all(not value.any() for value in result)
    assert all(grad is not None and not grad.any() for grad in operands.grads())


@pytest.mark.parametrize("loss_type", ["sigmoid", "exo_pair", "aot", "aot_unpaired", "discopop"])
def test_every_type_is_zero_when_nothing_counts(loss_type: str) -> None:
    log_probs = torch.full((4, 3), float("nan"), requires_grad=True)
    result = functional.dpo_loss(
        log_probs,
        torch.zeros(4, 3),
        ref_log_probs=torch.full((4,), float("inf")),
        loss_type=loss_type,
        label_smoothing=SMOOTHED.get(loss_type, 0.0),
    )
    result.loss.backward()
    assert all(not value.any() for value in result)
    assert not log_probs.grad.any()


def test_kto_leaves_out_empty_sequences() -> None:
    batch = make_batch(spans=((0, 5), (0, 0), (2, 5), (0, 2), (0, 0), (1, 5)))
    head = make_reference(batch)
    check(functional.chunked_linear_kto, reference.linear_kto, batch, WANTED, **head)
    empty = ragged(batch.target, ((0, 0),) * 6)
    operands = leaves(batch)
    result = functional.chunked_linear_kto(
        operands.input, operands.weight, empty, WANTED, operands.bias, **head
    )
    result.loss.backward()
    assert result.loss == 0
    assert all(grad is not None and not grad.any() for grad in operands.grads())


def test_nothing_leaks_from_tokens_that_do_not_count() -> None:
    batch = make_batch()
    masked = batch.target == -100
    given = -torch.rand(batch.target.shape, dtype=torch.float64)
    dirty = given.masked_fill(masked, float("nan"))
    dirty[0][masked[0]] = float("inf")
    for loss_type in ("sigmoid", "ipo", "aot"):
        results = []
        for value in (given, dirty):
            operands = leaves(batch)
            loss = functional.chunked_linear_dpo(
                operands.input, operands.weight, batch.target, operands.bias,
                ref_log_probs=value, loss_type=loss_type,
            ).loss  # fmt: skip
            loss.backward()
            results.append([loss, *operands.grads()])
        for clean, other in zip(*results, strict=True):
            assert torch.equal(clean, other)
    log_probs = given.masked_fill(masked, float("nan")).requires_grad_()
    functional.orpo_loss(log_probs, ~masked).loss.backward()
    assert not log_probs.grad[masked].any()
    assert log_probs.grad[~masked].isfinite().all()


@by_loss
def test_ignore_index_is_any_class(name: str) -> None:
    function, plain, _, options = LOSSES[name]
    batch = make_batch()
    batch = batch.replace(target=batch.target.masked_fill(batch.target == -100, 2))
    check(function, plain, batch, ignore_index=2, **options, **with_reference(name, batch))


def test_empty_batch(device: torch.device) -> None:
    batch = make_batch(device=device, rows=0, spans=())
    for name, (function, _, _, options) in LOSSES.items():
        free = {"reference_free": True} if name == "dpo" else {}
        operands = leaves(batch)
        loss = function(
            operands.input, operands.weight, batch.target, operands.bias, **options, **free
        ).loss
        loss.backward()
        assert loss == 0
        assert not operands.weight.grad.any()


# ------------------------------------------------------------------------------------ numerics


def test_odds_near_certainty() -> None:
    # log p of -1e-6: 1 - exp(log p) in fp32 has lost all but three digits.
    values = [(-1e-6, -1.0), (-1e-3, -1e-4), (-20.0, -1e-6), (-30.0, -40.0), (-0.7, -0.69)]
    log_probs = torch.tensor([*(w for w, _ in values), *(r for _, r in values)]).unsqueeze(-1)
    ours, exact = log_probs.clone().requires_grad_(), log_probs.double().requires_grad_()
    functional.orpo_loss(ours, torch.ones(10, 1), nll_weight=0.0).loss.backward()
    log_odds = exact - torch.log(-torch.expm1(exact))
    (-0.1 * F.logsigmoid(log_odds[:5] - log_odds[5:]).mean()).backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-6, atol=1e-12)


def test_certain_choice_has_a_finite_gradient() -> None:
    # Probability 1 to the last bit: the odds are infinite, the loss is not.
    log_probs = torch.tensor([[0.0], [-1.0]], requires_grad=True)
    loss = functional.orpo_loss(log_probs, torch.ones(2, 1), beta=1.0, nll_weight=0.0).loss
    loss.backward()
    assert loss == 0
    # d/dx log1p(odds_r * (exp(-x) - 1)) at x = 0.
    odds = math.exp(-1) / (1 - math.exp(-1))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-odds], [0.0]]))


@pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
def test_far_from_the_reference(loss_type: str) -> None:
    # exp and log of what overflows must not meet.
    log_probs = torch.tensor([[-5e4], [-1.0], [-1.0], [-5e4]], requires_grad=True)
    loss = functional.dpo_loss(
        log_probs,
        torch.ones(4, 1),
        ref_log_probs=torch.full((4,), -10.0),
        loss_type=loss_type,
        label_smoothing=SMOOTHED.get(loss_type, 0.0),
    ).loss
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()


def test_differences_by_token_are_taken_before_the_sum() -> None:
    tokens = 4096
    policy = -10 * torch.rand(2, tokens, dtype=torch.float64)
    given = policy + 1e-3 * torch.randn(2, tokens, dtype=torch.float64)
    policy, given = policy.float(), given.float()
    exact = (policy.double() - given.double()).sum(-1)
    result = functional.dpo_loss(policy, torch.ones(2, tokens), ref_log_probs=given, beta=1.0)
    rewards = torch.cat((result.chosen_rewards, result.rejected_rewards)).double()
    torch.testing.assert_close(rewards, exact, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------- by hand, metrics

LOG_PROBS = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0]])
REFERENCE = torch.tensor([-2.0, -3.0], dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    # Log-ratios: chosen -3 + 2 = -1, rejected -4 + 3 = -1 ... with beta 0.5 both rewards are -0.5.
    [
        ("sigmoid", math.log(2)),
        ("hinge", 1.0),
        ("sppo_hard", (-1 - 1) ** 2 + (-1 + 1) ** 2),
        ("apo_zero", sigmoid(0.5) + sigmoid(-0.5)),
        ("apo_down", sigmoid(-0.5) + 0.5),
        ("bco_pair", -math.log(sigmoid(-0.5)) - math.log(sigmoid(0.5))),
        ("nca_pair", -math.log(sigmoid(-0.5)) - math.log(sigmoid(0.5))),
        ("discopop", 0.5 * math.log(2) + 0.5),
        # Averages: chosen -1.5 + 2 = 0.5, rejected -4 + 3 = -1; 1 / (2 beta) = 1.
        ("ipo", (1.5 - 1) ** 2),
    ],
)
def test_dpo_by_hand(loss_type: str, expected: float) -> None:
    result = functional.dpo_loss(
        LOG_PROBS, MASK, ref_log_probs=REFERENCE, beta=0.5, loss_type=loss_type
    )
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    # Of rewards that are equal neither is the larger one.
    assert result.accuracy.item() == (loss_type == "ipo")


def test_losses_by_hand() -> None:
    # Sums -3 and -4, averages -1.5 and -4.
    simpo = functional.simpo_loss(LOG_PROBS, MASK, beta=2.0, gamma=1.0)
    assert simpo.loss.item() == pytest.approx(-math.log(sigmoid(2 * 2.5 - 1)))
    cpo = functional.cpo_loss(LOG_PROBS, MASK, beta=0.5, nll_weight=2.0)
    assert cpo.loss.item() == pytest.approx(-math.log(sigmoid(0.5)) + 2 * 1.5)
    odds_w, odds_l = (math.exp(x) / (1 - math.exp(x)) for x in (-1.5, -4.0))
    orpo = functional.orpo_loss(LOG_PROBS, MASK, beta=0.3)
    expected = 1.5 - 0.3 * math.log(sigmoid(math.log(odds_w / odds_l)))
    assert orpo.loss.item() == pytest.approx(expected)
    kto = functional.kto_loss(
        LOG_PROBS, MASK, torch.tensor([1, 0]), ref_log_probs=REFERENCE,
        kl=torch.tensor(0.5, dtype=torch.float64), beta=2.0, undesirable_weight=3.0,
    )  # fmt: skip
    # Ratios -1 and -1, less 0.5.
    assert kto.loss.item() == pytest.approx(((1 - sigmoid(-3.0)) + 3 * (1 - sigmoid(3.0))) / 2)
    assert kto.margin.item() == 0.0


def test_references_by_hand() -> None:
    # A head of two classes with logits (0, log 3): probabilities 1/4 and 3/4.
    input = torch.ones(2, 2, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    target = torch.tensor([[1, 1], [0, -100]])
    chosen, rejected = 2 * math.log(3 / 4), math.log(1 / 4)
    dpo = reference.linear_dpo(input, weight, target, beta=1.0)
    assert dpo.item() == pytest.approx(-math.log(sigmoid(chosen - rejected)))
    simpo = reference.linear_simpo(input, weight, target, beta=1.0, gamma=0.0)
    assert simpo.item() == pytest.approx(-math.log(sigmoid(math.log(3))))
    orpo = reference.linear_orpo(input, weight, target, beta=1.0)
    # Odds 3 and 1/3, ratio 9: sigmoid(log 9) = 0.9.
    assert orpo.item() == pytest.approx(-math.log(3 / 4) - math.log(0.9))
    cpo = reference.linear_cpo(input, weight, target, beta=1.0)
    assert cpo.item() == pytest.approx(dpo.item() - math.log(3 / 4))
    kto = reference.linear_kto(input, weight, target, torch.tensor([True, False]), beta=1.0)
    assert kto.item() == pytest.approx((1 - sigmoid(chosen) + 1 - sigmoid(-rejected)) / 2)


def test_metrics() -> None:
    batch = make_batch()
    head = make_reference(batch)
    result = functional.chunked_linear_dpo(
        batch.input.requires_grad_(), batch.weight, batch.target, batch.bias, beta=0.5, **head
    )
    policy = reference.linear_log_probs(
        batch.input, batch.weight, batch.target, batch.bias
    ).log_probs
    other = reference.linear_log_probs(
        head["ref_input"], head["ref_weight"], batch.target, head["ref_bias"]
    ).log_probs
    sums, rewards = policy.sum(-1), 0.5 * (policy - other).sum(-1)
    expected = functional.PreferenceLoss(
        reference.linear_dpo(batch.input, batch.weight, batch.target, batch.bias, beta=0.5, **head),
        sums[:3],
        sums[3:],
        rewards[:3],
        rewards[3:],
        (rewards[:3] > rewards[3:]).double().mean(),
        (rewards[:3] - rewards[3:]).mean(),
        -policy[:3].sum() / (batch.target[:3] != -100).sum(),
    )
    for name, value in result._asdict().items():
        torch.testing.assert_close(value, getattr(expected, name), msg=name)
        assert value.requires_grad == (name == "loss")


# ------------------------------------------------------------------------------- the reference


@by_loss
def test_no_gradient_for_the_reference(name: str) -> None:
    if name != "dpo":
        assert not any("ref" in key for key in LOSSES[name][0].__kwdefaults__)
        return
    batch = make_batch()
    head = {key: value.requires_grad_() for key, value in make_reference(batch).items()}
    operands = leaves(batch)
    functional.chunked_linear_dpo(
        operands.input, operands.weight, batch.target, operands.bias, **head
    ).loss.backward()
    assert all(value.grad is None for value in head.values())
    # The policy's own head as that of the reference gets the policy's gradient only.
    shared, apart = leaves(batch), leaves(batch)
    for own, ref_weight in ((shared, shared.weight), (apart, apart.weight.detach().clone())):
        functional.chunked_linear_dpo(
            own.input, own.weight, batch.target, own.bias,
            ref_input=batch.input + 1.0, ref_weight=ref_weight,
        ).loss.backward()  # fmt: skip
    torch.testing.assert_close(shared.weight.grad, apart.weight.grad, rtol=0, atol=0)
    given = torch.rand(6, requires_grad=True, dtype=torch.float64)
    functional.chunked_linear_dpo(
        operands.input, operands.weight, batch.target, operands.bias, ref_log_probs=given
    ).loss.backward()
    assert given.grad is None


def test_gradient_of_log_probs_given() -> None:
    log_probs = -torch.rand(4, 3, dtype=torch.float64)
    given = -torch.rand(4, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]])
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: functional.dpo_loss(x, mask, ref_log_probs=given).loss,
        lambda x: functional.cpo_loss(x, mask).loss,
        lambda x: functional.simpo_loss(x, mask).loss,
        lambda x: functional.orpo_loss(x, mask).loss,
        lambda x: functional.kto_loss(x, mask, WANTED[:4], ref_log_probs=given).loss,
    ]
    for loss in losses:
        assert torch.autograd.gradcheck(loss, log_probs.clone().requires_grad_())


def test_retained_graph_and_second_derivative() -> None:
    batch = make_batch()
    operands = leaves(batch)
    loss = functional.chunked_linear_simpo(
        operands.input, operands.weight, batch.target, operands.bias
    ).loss
    first = torch.autograd.grad(loss, operands.weight, torch.tensor(3.0), retain_graph=True)[0]
    (second,) = torch.autograd.grad(loss, operands.weight, create_graph=True)
    torch.testing.assert_close(first, 3 * second)
    with pytest.raises(NotDifferentiableTwiceError):
        second.square().sum().backward()


def test_func_grad() -> None:
    batch = make_batch()

    def loss(weight: Tensor, function: Callable[..., Any]) -> Tensor:
        result = function(batch.input, weight, batch.target, batch.bias)
        return result if isinstance(result, Tensor) else result.loss

    ours = torch.func.grad(loss)(batch.weight, functional.chunked_linear_orpo)
    torch.testing.assert_close(ours, torch.func.grad(loss)(batch.weight, plain_orpo))


def plain_orpo(*operands: Any) -> Tensor:
    """Without indexing by masks, which ``torch.func`` refuses; every pair here counts."""
    input, weight, target, bias = operands
    counted = target != -100
    log_probs = torch.where(
        counted,
        (input @ weight.t() + bias).log_softmax(-1).gather(
            -1, target.clamp(min=0).unsqueeze(-1)
        ).squeeze(-1),
        0.0,
    )  # fmt: skip
    chosen, rejected = (log_probs.sum(-1) / counted.sum(-1)).chunk(2)
    odds = [half - torch.log1p(-torch.exp(half)) for half in (chosen, rejected)]
    nll = -log_probs[:3].sum() / counted[:3].sum()
    return nll - 0.1 * F.logsigmoid(odds[0] - odds[1]).mean()


# ---------------------------------------------------------------------------------- the caller


@pytest.mark.fault("B94")
def test_concatenate_pairs() -> None:
    long, short = make_batch(rows=3, spans=SPANS[:3]), make_batch(rows=3, spans=SPANS[3:])
    short = short.replace(input=short.input[:, :3], target=short.target[:, :3])
    input, target = functional.concatenate_pairs(long.input, long.target, short.input, short.target)
    assert input.shape[:2] == target.shape == (6, TOKENS)
    assert (target[3:, 3:] == -100).all()
    chosen = reference.linear_log_probs(long.input, long.weight, long.target).log_probs.sum(-1)
    rejected = reference.linear_log_probs(short.input, long.weight, short.target).log_probs
    result = functional.chunked_linear_dpo(input, long.weight, target, reference_free=True)
    torch.testing.assert_close(result.chosen_log_probs, chosen)
    torch.testing.assert_close(result.rejected_log_probs, rejected.sum(-1))


MODULES = {
    "dpo": {"loss_type": "robust", "label_smoothing": 0.1, "beta": 0.2, "nll_weight": 0.3},
    "cpo": {"loss_type": "hinge", "beta": 0.2},
    "simpo": {"beta": 1.0, "gamma": 0.1},
    "orpo": {"beta": 0.2, "nll_weight": 0.5},
}


@by_loss
def test_module(name: str) -> None:
    function, _, module, _ = LOSSES[name]
    batch = make_batch()
    options = {**MODULES[name], "softcap": 4.0, "logit_scale": 0.8, "chunk_size": 3}
    extra = with_reference(name, batch)
    operands = batch.input, batch.weight, batch.target, batch.bias
    built = module(**options)
    expected = function(*operands, **options, **extra)
    for value, other in zip(built(*operands, **extra), expected, strict=True):
        assert torch.equal(value, other)
    assert f"beta={options['beta']}" in repr(built)


def test_module_of_kto() -> None:
    batch = make_batch()
    head = make_reference(batch)
    operands = batch.input, batch.weight, batch.target, WANTED, batch.bias
    options = {"beta": 0.3, "desirable_weight": 2.0, "average_log_prob": True}
    built = modules.ChunkedLinearKTOLoss(**options)(*operands, **head)
    expected = functional.chunked_linear_kto(*operands, **options, **head)
    for value, other in zip(built, expected, strict=True):
        assert torch.equal(value, other)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "loss_type": ({"loss_type": "dpo"}, "loss_type: expected one of 'sigmoid'"),
    "beta": ({"beta": 0.0}, "beta: expected a number > 0"),
    "smoothing": ({"label_smoothing": 0.7}, r"label_smoothing: expected a number in \[0, 0.5\]"),
    "no smoothing": ({"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing: expected 0"),
    "robust": ({"label_smoothing": 0.5, "loss_type": "robust"}, r"label_smoothing: .*0.5\)"),
    "exo": ({"loss_type": "exo_pair"}, "label_smoothing: .*exo_pair"),
    "nll": ({"nll_weight": -1.0}, "nll_weight: expected"),
    "tau": ({"discopop_tau": 0.0}, "discopop_tau: expected"),
    "no reference": ({"reference_free": False}, "ref_log_probs: expected log-probs"),
    "two references": (
        {"ref_log_probs": torch.zeros(6), "reference_free": True},
        "reference_free: expected False",
    ),
    "ref shape": (
        {"ref_log_probs": torch.zeros(3), "reference_free": False},
        r"ref_log_probs: expected shape \[6\] or \[6, 5\], got \[3\]",
    ),
    "ref head": (
        {"ref_input": torch.zeros(6, 5, 8), "reference_free": False},
        "ref_weight: expected the head",
    ),
    "ref input": (
        {"ref_input": torch.zeros(6, 4, 8), "ref_weight": torch.zeros(CLASSES, 8),
         "reference_free": False},
        "ref_input: expected shape",
    ),
    "ref classes": (
        {"ref_input": torch.zeros(6, 5, 8), "ref_weight": torch.zeros(CLASSES + 1, 8),
         "reference_free": False},
        "ref_weight: expected shape",
    ),
    "stray head": ({"ref_weight": torch.zeros(CLASSES, 8)}, "ref_input: expected the hidden"),
    "chunk_size": ({"chunk_size": 0}, "chunk_size: expected at least 1 row"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    options, message = ERRORS[case]
    batch = make_batch(torch.float32)
    with pytest.raises(ValueError, match=message):
        functional.chunked_linear_dpo(
            batch.input, batch.weight, batch.target, batch.bias,
            **{"reference_free": True, **options},
        )  # fmt: skip


def test_errors_of_shapes() -> None:
    batch = make_batch(torch.float32)
    with pytest.raises(ValueError, match=r"input: expected an even first dimension.*\[5, 5, 8\]"):
        functional.chunked_linear_simpo(batch.input[:5], batch.weight, batch.target[:5])
    with pytest.raises(ValueError, match=r"input: expected shape \[B, T, D\], got \[30, 8\]"):
        functional.chunked_linear_simpo(batch.input.flatten(0, 1), batch.weight, batch.target)
    with pytest.raises(ValueError, match=r"target: expected shape \[B, T\] = \[6, 5\]"):
        functional.chunked_linear_simpo(batch.input, batch.weight, batch.target[:, :4])
    with pytest.raises(ValueError, match=r"desirable: expected shape \[6\], got \[5\]"):
        functional.chunked_linear_kto(
            batch.input, batch.weight, batch.target, WANTED[:5], reference_free=True
        )
    with pytest.raises(ValueError, match=r"kl: expected a scalar or shape \[6\], got \[2\]"):
        functional.chunked_linear_kto(
            batch.input, batch.weight, batch.target, WANTED,
            reference_free=True, kl=torch.zeros(2),
        )  # fmt: skip
    with pytest.raises(ValueError, match="kl_target: expected None without kl_input"):
        functional.chunked_linear_kto(
            batch.input, batch.weight, batch.target, WANTED,
            reference_free=True, kl_target=batch.target,
        )  # fmt: skip
    with pytest.raises(TypeError, match="average_log_prob: expected a bool, got 'mean'"):
        functional.cpo_loss(LOG_PROBS, MASK, average_log_prob="mean")
    with pytest.raises(ValueError, match="kl_target: expected the classes"):
        functional.chunked_linear_kto(
            batch.input, batch.weight, batch.target, WANTED,
            reference_free=True, kl_input=batch.input,
        )  # fmt: skip
    with pytest.raises(ValueError, match="kl_ref_log_probs: expected log-probs"):
        functional.chunked_linear_kto(
            batch.input, batch.weight, batch.target, WANTED,
            reference_free=True, kl_input=batch.input, kl_target=batch.target,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"mask: expected shape \[2, 2\]"):
        functional.cpo_loss(LOG_PROBS, MASK[:, :1])
    with pytest.raises(TypeError, match="mask: expected a tensor"):
        functional.cpo_loss(LOG_PROBS, None)
    with pytest.raises(ValueError, match="label_smoothing"):
        modules.ChunkedLinearDPOLoss(loss_type="exo_pair")
    with pytest.raises(ValueError, match="beta"):
        modules.ChunkedLinearORPOLoss(beta=-1.0)


# ------------------------------------------------------------------------------ compile, memory


@pytest.mark.fault("B44")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_compiled(name: str, dynamic: bool) -> None:
    function, _, _, options = LOSSES[name]
    counter = CompileCounterWithBackend("aot_eager")

    def step(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor, extra: Any) -> Tensor:
        result = function(input.tanh(), weight, target, bias, **options, **extra)
        return result.loss.square() + result.margin

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    compiles = []
    for rows, tokens in ((6, 5), (4, 6), (8, 7)) if dynamic else ((6, 5),):
        batch = make_batch(rows=rows, tokens=tokens, spans=((0, tokens), (1, 3)) * (rows // 2))
        extra = with_reference(name, batch)
        results = []
        for run_it in (compiled, step):
            operands = leaves(batch)
            loss = run_it(operands.input, operands.weight, batch.target, operands.bias, extra)
            loss.backward(torch.full_like(loss, -0.6))
            results.append([loss.detach(), *operands.grads()])
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value, expected)
        compiles.append(counter.frame_count)
    assert compiles[0] == compiles[-1], "compiled anew for another shape"


@pytest.mark.usefixtures("fresh_compiler")
def test_result_of_a_compiled_call() -> None:
    batch = make_batch()
    operands = batch.input, batch.weight, batch.target, WANTED, batch.bias
    head = make_reference(batch)
    compiled = torch.compile(functional.chunked_linear_kto, fullgraph=True, backend="aot_eager")
    result, expected = compiled(*operands, **head), functional.chunked_linear_kto(*operands, **head)
    assert isinstance(result, functional.KTOLoss)
    for value, other in zip(result, expected, strict=True):
        torch.testing.assert_close(value, other)


def test_peak_memory_holds_no_logits(device: torch.device) -> None:
    sample = make_sample((4, 128), 16, 4000, device=device, bias=True)
    ref_input = torch.randn(4, 128, 16, device=device)
    options = {"ref_input": ref_input, "ref_weight": sample.weight, "beta": 0.1}

    def peak(function: Callable[..., Any], **more: Any) -> int:
        call = _call(function, ())
        run(call, sample, **options, **more)
        with peak_memory(device) as measured:
            run(call, sample, **options, **more)
        return measured.bytes

    logits = 512 * 4000 * 4
    gradients = sample.input.nbytes + sample.weight.nbytes
    ours = peak(functional.chunked_linear_dpo, chunk_size=16)
    assert ours < gradients + logits // 4
    assert peak(reference.linear_dpo) > 2 * logits


# --------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LOSSES, "kto", "aot"])
def test_no_host_sync(name: str) -> None:
    batch = make_batch(torch.bfloat16, "cuda")
    head = make_reference(batch)
    if name == "aot":
        call = _call(functional.chunked_linear_dpo, ())
        options: dict[str, Any] = {**head, "loss_type": "aot", "nll_weight": 0.5}
    elif name == "kto":
        call = _call(functional.chunked_linear_kto, (WANTED.cuda(),))
        options = {**head, "kl": torch.tensor(0.1, device="cuda")}
    else:
        call = _call(LOSSES[name][0], ())
        options = {**LOSSES[name][3], **with_reference(name, batch)}
    upstream = torch.tensor(0.7, device="cuda")
    run(call, batch, upstream=upstream, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call, batch, upstream=upstream, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
