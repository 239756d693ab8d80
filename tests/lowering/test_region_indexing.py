"""Regions that pick classes by an index, mark them in a target, or cut rows at a symbolic place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from greyhound_lowering.follow import step_name
from lowering.rewriting import Backend, assert_left, check
from lowering.test_regions import (
    B,
    Body,
    Given,
    Model,
    T,
    V,
    assert_region,
    dynamic_or_not,
    largest,
    maker,
)


def log_p(m: Model, g: Given) -> Tensor:
    return m.head(g.x).log_softmax(-1)


# --------------------------------------------------------------------------- one class of each row


def picked(m: Model, g: Given) -> Tensor:
    rows, y = log_p(m, g).flatten(0, 1), g.y.flatten()
    return -(rows[torch.arange(rows.shape[0]), y] * g.mask.flatten()).sum() / g.mask.sum()


def picked_by_target(m: Model, g: Given) -> Tensor:
    rows, y = m.head(g.x).flatten(0, 1).softmax(-1), g.y.flatten()
    return -rows[torch.arange(len(y), device=y.device), y].log().mean()


def picked_from_the_end(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]), g.y.flatten() - V].mean()


def picked_by_int32(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]), g.y.flatten().int()].mean()


def picked_per_sequence(m: Model, g: Given) -> Tensor:
    batch, length = g.y.shape
    values = log_p(m, g)[torch.arange(batch)[:, None], torch.arange(length)[None, :], g.y]
    return -(values.sum(1) * g.reward).mean()


def picked_with_unsqueeze(m: Model, g: Given) -> Tensor:
    values = log_p(m, g)
    batch, length = torch.arange(values.shape[0]), torch.arange(values.shape[1])
    return -values[batch.unsqueeze(1), length, g.y].exp().sum(1).log().mean()


def best_picked(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]), rows.argmax(-1)].mean()


# ------------------------------------------------------------------------------------------ targets


def one_hot(m: Model, g: Given) -> Tensor:
    return -(F.one_hot(g.y, V) * log_p(m, g)).sum(-1).mean()


def one_hot_smoothed(m: Model, g: Given) -> Tensor:
    target = F.one_hot(g.y, V).to(torch.float32) * 0.9 + 0.1 / V
    return (-(target * log_p(m, g)).sum(-1) * g.mask).sum()


def one_hot_binary(m: Model, g: Given) -> Tensor:
    target = F.one_hot(g.y.view(-1), V).float()
    return F.binary_cross_entropy_with_logits(m.head(g.x).flatten(0, 1), target)


def marked(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    target = torch.zeros_like(logits).scatter(-1, g.y[..., None], 1.0)
    return F.mse_loss(logits.softmax(-1), target)


def marked_smoothed(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).flatten(0, 1)
    target = torch.full_like(logits, 0.1 / (V - 1)).scatter(1, g.y.view(-1, 1), 0.9)
    return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")


# ---------------------------------------------------------------------------------- symbolic places


def cut_at_length(m: Model, g: Given) -> Tensor:
    length = g.y.shape[1]
    values = m.head(g.x)[:, : length - 1].log_softmax(-1)
    return -(values.gather(-1, g.y[:, 1:, None]).squeeze(-1) * g.mask[:, 1:]).sum()


def last_tokens(m: Model, g: Given) -> Tensor:
    keep = g.y.shape[1] - 2
    values = m.head(g.x)[:, -keep:].log_softmax(-1)
    return -values.gather(-1, g.y[:, -keep:, None]).mean()


def behind_the_prompt(m: Model, g: Given) -> Tensor:
    prompt = g.reward.shape[0]
    logits = m.head(g.x)[:, prompt - 1 : -1]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    nll = F.cross_entropy(logits.transpose(1, 2), g.y[:, prompt:], reduction="none")
    return (nll - 0.1 * entropy).mean()


def cut_twice_alike(m: Model, g: Given) -> Tensor:
    logits, length = m.head(g.x), g.y.shape[1]
    lse = logits[:, : length - 1].logsumexp(-1)
    return (lse - logits[:, : length - 1].gather(-1, g.y[:, 1:, None]).squeeze(-1)).mean()


# ---------------------------------------------------------------------------------- within each row


def dot_of_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).flatten(0, 1)
    return torch.einsum("nv,nv->n", logits.softmax(-1), logits.log_softmax(-1)).mean()


def dot_of_rows_with_targets(m: Model, g: Given) -> Tensor:
    return -torch.einsum("btv,btv->bt", g.soft, log_p(m, g)).mean()


def layer_norm(m: Model, g: Given) -> Tensor:
    normed = F.layer_norm(m.head(g.x), (V,), m.prior, m.seen, 1e-3)
    return F.cross_entropy(normed.flatten(0, 1), g.y.flatten()) + normed.square().mean()


def margin(m: Model, g: Given) -> Tensor:
    return F.multi_margin_loss(m.head(g.x).flatten(0, 1), g.y.flatten())


def squared_margin_weighted(m: Model, g: Given) -> Tensor:
    each = F.multi_margin_loss(
        m.head(g.x).flatten(0, 1), g.y.flatten(), p=2, margin=0.5, weight=m.seen * 1.5,
        reduction="none",
    )  # fmt: skip
    return each.square().mean()


def margin_just_met(m: Model, g: Given) -> Tensor:
    """All logits of a row alike: no gradient at the corner of a hinge."""
    logits = (m.head(g.x) * 0 + g.x.sum(-1, keepdim=True)).flatten(0, 1)
    return F.multi_margin_loss(logits, g.y.flatten(), margin=0.0) + logits.mean()


REGIONS: dict[str, Body] = {
    each.__name__: each
    for each in (
        picked, picked_by_target, picked_from_the_end, picked_by_int32, picked_per_sequence,
        picked_with_unsqueeze, best_picked, one_hot, one_hot_smoothed, one_hot_binary, marked,
        marked_smoothed, cut_at_length, last_tokens, behind_the_prompt, cut_twice_alike,
        dot_of_rows, dot_of_rows_with_targets, layer_norm, margin, squared_margin_weighted,
        margin_just_met,
    )
}  # fmt: skip


def assert_no_target(backend: Backend) -> None:
    (graph,) = backend.graphs
    assert not any(step_name(node) == "one_hot" for node in graph.nodes), "as large as the logits"


@pytest.mark.parametrize("body", REGIONS.values(), ids=REGIONS)
def test_region(body: Body) -> None:
    backend = check(maker(body))
    assert_region(backend)
    assert_no_target(backend)


@pytest.mark.parametrize(
    "body",
    [
        picked, picked_per_sequence, picked_with_unsqueeze, one_hot_smoothed, marked_smoothed,
        cut_at_length, last_tokens, behind_the_prompt, cut_twice_alike, dot_of_rows, layer_norm,
        squared_margin_weighted,
    ],
)  # fmt: skip
def test_region_with_dynamic_shapes(body: Body) -> None:
    # A length apart from every other size: Dynamo takes equal ones for one symbol.
    backend = check(maker(body, shape=(B, 11)), dynamic=True)
    assert len(backend.region_nodes) == 1
    assert largest(backend) < B * 11 * V
    assert_no_target(backend)


@pytest.mark.parametrize(
    "body", [picked_per_sequence, one_hot_smoothed, cut_at_length, dot_of_rows, layer_norm]
)
def test_bfloat16(body: Body) -> None:
    assert_region(check(maker(body, dtype=torch.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "body",
    [picked_by_target, one_hot_smoothed, marked_smoothed, dot_of_rows, layer_norm, margin],
)
def test_on_cuda(body: Body) -> None:
    """Where the body of the region is compiled."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        module, inputs = maker(body)()
        there = (each.detach().cuda().requires_grad_(each.requires_grad) for each in inputs)
        return module.cuda(), tuple(there)

    assert len(check(make, slack=1e-5).region_nodes) == 1


# --------------------------------------------------------------------------------------- left alone


def every_row_against_every_class(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]), g.y.view(-1, 1)].mean()


def picked_backwards(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]).flip(0), g.y.flatten()].mean()


def picked_by_twos(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    return -rows[torch.arange(0, rows.shape[0], 2), g.y.flatten()[::2]].mean()


def picked_across(m: Model, g: Given) -> Tensor:
    """Batch and length are alike, and the indices change places."""
    values = log_p(m, g)
    length, batch = torch.arange(T), torch.arange(T)
    return -(values[batch, length[:, None], g.y] * g.mask).sum()


def norm_over_sequences(m: Model, g: Given) -> Tensor:
    return F.layer_norm(m.head(g.x), (T, V)).logsumexp(-1).mean()


def rows_times_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return torch.bmm(logits, logits.transpose(1, 2)).logsumexp(-1).mean()


def cut_in_two_ways(m: Model, g: Given) -> Tensor:
    logits, length = m.head(g.x), g.y.shape[1]
    lse = logits[:, : length - 1].logsumexp(-1)
    return (lse - logits[:, length - 2 :].logsumexp(-1).mean()).square().mean()


LEFT: dict[str, Body] = {
    each.__name__: each
    for each in (
        every_row_against_every_class, picked_backwards, picked_by_twos, picked_across,
        norm_over_sequences, rows_times_rows,
    )
}  # fmt: skip


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_left(body: Body) -> None:
    assert_left(check(maker(body, shape=(T, T) if body is picked_across else (B, T))))


@dynamic_or_not
def test_left_where_rows_are_cut_in_two_ways(dynamic: bool) -> None:
    assert_left(check(maker(cut_in_two_ways, shape=(B, 11)), dynamic=dynamic))


def target_written_to(m: Model, g: Given) -> Tensor:
    target = F.one_hot(g.y, V).float()
    logits = m.head(g.x)
    target[..., 0] = 0.5
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def classes_written_to_after_the_target(m: Model, g: Given) -> Tensor:
    y = g.y.clone()
    target = F.one_hot(y, V).float()
    y[:, 0] = 1
    return -(target * log_p(m, g)).sum(-1).mean() + y.float().mean() * m.head(g.x).mean()


def positions_written_to(m: Model, g: Given) -> Tensor:
    rows = log_p(m, g).flatten(0, 1)
    positions = torch.arange(rows.shape[0])
    positions[0] = 1
    return -rows[positions, g.y.flatten()].mean()


@dynamic_or_not
@pytest.mark.parametrize(
    "body", [target_written_to, classes_written_to_after_the_target, positions_written_to]
)
def test_a_target_is_not_made_again_from_what_has_changed(body: Body, dynamic: bool) -> None:
    check(maker(body, shape=(B, 11)), dynamic=dynamic)  # right, rewritten or not


@pytest.mark.parametrize("body", [picked, marked])
@pytest.mark.parametrize("wrong", [V, -V - 1])
def test_a_class_out_of_range_does_not_pass(body: Body, wrong: int) -> None:
    """An error as in plain torch, or NaN where the error would have to wait for the device."""
    module, inputs = maker(body)()
    inputs[2][0, 0] = wrong

    def outcome(function: nn.Module) -> str:
        try:
            return "wrong" if not torch.isnan(function(*inputs)) else "nan"
        except (IndexError, RuntimeError) as error:
            assert "out of bounds" in str(error)  # noqa: PT017
            return "error"

    assert outcome(module) == "error"
    backend = Backend()
    assert outcome(torch.compile(module, backend=backend)) in ("error", "nan")
    assert len(backend.region_nodes) == 1
