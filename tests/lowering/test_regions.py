"""Losses as people write them, taken as a region: right, in one op, and with nothing wide left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from greyhound_lowering import region as region_module
from greyhound_ops import torch_private
from lowering.rewriting import SLACK, Backend, assert_left, check, reasons

B, T, D, V = 2, 7, 6, 37
K = 4  # codebooks, or rows of one sequence

dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


class Model(nn.Module):
    """Heads and parameters that bodies choose from; the hidden state is no leaf."""

    def __init__(self, body: Body, *, classes: int = V) -> None:
        super().__init__()
        self.head = nn.Linear(D, classes)
        self.other = nn.Linear(D, classes, bias=False)
        self.teacher = nn.Linear(9, classes).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, classes, bias=False)
        self.prior = nn.Parameter(torch.randn(classes))
        self.temperature = nn.Parameter(torch.tensor([1.4]))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.books = nn.Linear(D, K * 11)
        self.register_buffer("seen", torch.ones(classes))
        self.body = body

    def forward(self, given: Given) -> Any:
        return self.body(self, dataclasses.replace(given, x=given.x * 1.0))


@dataclasses.dataclass
class Given:
    """What a step gets."""

    x: Tensor  # [B, T, D], requires grad
    far: Tensor  # [B, T, 9], the teacher's hidden states
    y: Tensor  # [B, T], classes
    mask: Tensor  # [B, T], bool
    reward: Tensor  # [B]
    soft: Tensor  # [B, T, V], a distribution
    learned: Tensor  # [B, T, V], requires grad

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, each.name) for each in dataclasses.fields(self))


Body: TypeAlias = Callable[[Model, Given], Any]


class Step(nn.Module):
    """`Model` with its inputs as tensors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Any:
        return self.model(Given(*tensors))


def maker(
    body: Body, *, shape: tuple[int, ...] = (B, T), dtype: torch.dtype = torch.float32,
    classes: int = V, prepare: Callable[[Model], Any] | None = None, x_grad: bool = True,
) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:  # fmt: skip
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(3)
        model = Model(body, classes=classes).to(dtype)
        if prepare is not None:
            prepare(model)
        mask = torch.rand(shape) > 0.3
        mask.view(-1)[0] = True
        given = Given(
            x=torch.randn(*shape, D, dtype=dtype, requires_grad=x_grad),
            far=torch.randn(*shape, 9, dtype=dtype),
            y=torch.randint(0, classes, shape),
            mask=mask,
            reward=torch.randn(shape[0], dtype=dtype),
            soft=torch.randn(*shape, classes).softmax(-1).to(dtype),
            learned=torch.randn(*shape, classes, dtype=dtype, requires_grad=True),
        )
        return Step(model), given.tensors()

    return make


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the sizes of what each node makes that was not there before.

    Args:
        module: Of the rewritten graph.
        before: Text of the graph as it was.
    """

    def __init__(self, module: fx.GraphModule, before: str) -> None:
        super().__init__(module)
        self.before = before
        self.sizes: dict[str, int] = {}
        self.given: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tensors = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        storages = {torch_private.storage_id(each) for each in tensors}
        if n.op in ("placeholder", "output", "get_attr") or f"%{n.name} :" in self.before:
            self.given |= storages
        elif not storages <= self.given:
            self.sizes[n.name] = max(int(each.numel()) for each in tensors)
        return result


def largest(backend: Backend) -> int:
    """Elements of the largest tensor that the rewrite had made, views of what was there aside."""
    most = 0
    for graph, before in zip(backend.graphs, backend.before, strict=True):
        module = graph.owning_module
        values = [each.meta["example_value"] for each in graph.nodes if each.op == "placeholder"]
        mode = torch_private.fake_mode_of([each for each in values if isinstance(each, Tensor)])
        if not isinstance(module, fx.GraphModule) or mode is None:
            continue
        recorder = _Recorder(module, before)
        with mode, torch.no_grad():
            recorder.run(*values)
        most = max(most, *recorder.sizes.values())
    return most


def assert_region(backend: Backend, count: int = 1) -> None:
    """Check that the loss is in ``count`` ops and nothing of the logits' size is left.

    The gradient of an input ``[N, V]`` aside, which has that size itself.
    """
    assert len(backend.region_nodes) == count, reasons()
    assert not backend.wide_products(V)
    dense = any(True in node.kwargs["need_grad_row_args"] for node in backend.region_nodes)
    assert largest(backend) < B * T * V + int(dense)


# ------------------------------------------------------------------------------ distillation


def kl_of(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)


def forward_kl(m: Model, g: Given) -> Tensor:
    with torch.no_grad():
        teacher = m.teacher(g.far)
    return (kl_of(m.head(g.x), teacher) * g.mask).sum() / g.mask.sum()


def reverse_kl(m: Model, g: Given) -> Tensor:
    student = (m.head(g.x) / 2.0).log_softmax(-1)
    teacher = (m.teacher(g.far) / 2.0).log_softmax(-1).detach()
    return 4 * (student.exp() * (student - teacher)).sum(-1).mean()


def jensen_shannon(m: Model, g: Given) -> Tensor:
    student, teacher = m.head(g.x).log_softmax(-1), m.teacher(g.far).log_softmax(-1)
    beta = torch.tensor(0.3)
    mixture = torch.logsumexp(
        torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0
    )
    one = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    other = F.kl_div(mixture, student, reduction="none", log_target=True)
    return ((0.3 * one + 0.7 * other).sum(-1) * g.mask).sum() / g.mask.sum()


def learned_temperature(m: Model, g: Given) -> Tensor:
    student, teacher = m.head(g.x) / m.temperature, m.teacher(g.far) / m.temperature
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


def scalar_temperature(m: Model, g: Given) -> Tensor:
    return kl_of(m.head(g.x) * m.scale.exp(), m.teacher(g.far)).mean()


def one_head_twice(m: Model, g: Given) -> Tensor:
    return kl_of(m.head(g.x), m.head(g.x * 0.5 + 0.1)).mean()


def one_head_spelled_in_many_ways(m: Model, g: Given) -> Tensor:
    weight, bias = m.head.weight, m.head.bias
    one, two = F.linear(g.x, weight, bias), g.x @ weight.t() + bias
    three, four = (g.x * 0.5) @ weight.T, (g.x * 0.25) @ weight.permute(-1, 0)
    five = (g.x * 0.75) @ weight.transpose(0, 1).t().mT
    return kl_of(one + three, two + four + five).mean()


def own_teacher_detached(m: Model, g: Given) -> Tensor:
    return kl_of(m.head(g.x), m.head(g.x * 0.5 + 0.1).detach()).mean()


def own_teacher_under_no_grad(m: Model, g: Given) -> Tensor:
    with torch.no_grad():
        teacher = m.head(1.0 - 2 * g.x)
    return kl_of(m.head(g.x), teacher).mean()


def two_heads_two_losses(m: Model, g: Given) -> Tensor:
    first, second = m.head(g.x), m.other(g.x)
    agree = (first.softmax(-1) - second.softmax(-1)).abs().sum(-1).mean()
    nll = F.cross_entropy(first.flatten(0, 1), g.y.flatten())
    return nll + agree + second.square().mean()


# ------------------------------------------------------------------------- elementwise losses


def binary(m: Model, g: Given) -> Tensor:
    return F.binary_cross_entropy_with_logits(m.head(g.x), g.soft, pos_weight=m.seen)


def binary_of_one_hot(m: Model, g: Given) -> Tensor:
    target = F.one_hot(g.y, V).to(g.x.dtype)
    return F.binary_cross_entropy_with_logits(m.head(g.x), target, reduction="none").sum(-1).mean()


def regression(m: Model, g: Given) -> Tensor:
    return F.mse_loss(m.head(g.x), g.learned) + F.smooth_l1_loss(m.other(g.x), g.soft)


def huber_and_l1(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return F.huber_loss(logits, g.soft, delta=0.5) + F.l1_loss(logits, g.learned)


def focal(m: Model, g: Given) -> Tensor:
    logp = m.head(g.x).log_softmax(-1).gather(-1, g.y[..., None]).squeeze(-1)
    return -((1 - logp.exp()) ** 2 * logp * g.mask).sum() / g.mask.sum()


def sigmoid_focal(m: Model, g: Given) -> Tensor:
    logits, target = m.head(g.x), F.one_hot(g.y, V).to(g.x.dtype)
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    near = p * target + (1 - p) * (1 - target)
    return (ce * (1 - near) ** 2 * (0.25 * target + 0.75 * (1 - target))).mean()


def hinge(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    right = logits.gather(-1, g.y.unsqueeze(-1))
    margins = (1 + logits - right).clamp_min(0)
    keep = torch.arange(V) != g.y.unsqueeze(-1)
    return (margins * keep).sum(-1).mean()


def poly(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    logp = logits.log_softmax(-1)
    nll = F.nll_loss(logp.flatten(0, 1), g.y.flatten(), reduction="none")
    chosen = (F.one_hot(g.y, V) * logp.exp()).sum(-1).flatten()
    return (nll + 2.0 * (1 - chosen)).mean()


# ------------------------------------------------------------------- smoothing, one hot, masks


def smoothing_by_hand(m: Model, g: Given) -> Tensor:
    logp = m.head(g.x).log_softmax(-1)
    nll = -logp.gather(-1, g.y.unsqueeze(-1)).squeeze(-1)
    loss = 0.9 * nll - 0.1 * logp.mean(-1)
    return (loss * g.mask).sum() / g.mask.sum().clamp(min=1)


def smoothed_targets(m: Model, g: Given) -> Tensor:
    target = F.one_hot(g.y, V) * 0.9 + 0.1 / V
    return -(target * m.head(g.x).log_softmax(-1)).sum(-1).mean()


def soft_targets(m: Model, g: Given) -> Tensor:
    return -(g.soft * m.head(g.x).log_softmax(-1)).sum(-1).mean()


def learned_targets(m: Model, g: Given) -> Tensor:
    return -(g.learned.softmax(-1) * m.head(g.x).log_softmax(-1)).sum(-1).mean()


def one_hot_in_place(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    target = torch.zeros_like(logits).scatter_(-1, g.y.unsqueeze(-1), 1.0)
    return ((logits.sigmoid() - target).square().sum(-1) * g.mask).sum()


def smoothed_in_place(m: Model, g: Given) -> Tensor:
    logp = m.head(g.x).log_softmax(-1)
    with torch.no_grad():
        target = torch.zeros_like(logp)
        target.fill_(0.1 / (V - 1))
        target.scatter_(-1, g.y.unsqueeze(-1), 0.9)
    return -(target * logp).sum(-1).mean()


def doubled_in_place(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    twice = logits.clone()
    once = twice.detach().logsumexp(-1)
    twice.mul_(2)
    return (twice.logsumexp(-1) - once).square().mean()


def mask_of_sequence(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).masked_fill(~g.mask[..., None], 0.0)
    return logits.logsumexp(-1).square().mean()


def weight_of_sequence(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) * g.reward.exp()[:, None, None]
    return (logits.logsumexp(-1) - logits.mean(-1)).mean()


def weight_of_position(m: Model, g: Given) -> Tensor:
    decay = torch.linspace(0.5, 1.5, g.x.shape[1])
    return (m.head(g.x) * decay[:, None]).softmax(-1).square().sum()


def learned_prior(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) + 0.5 * m.prior.log_softmax(-1)
    return logits.logsumexp(-1).mean() - logits.gather(-1, g.y[..., None]).mean()


def allowed_classes(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).masked_fill(m.seen.cumsum(0) % 3 == 0, float("-inf"))
    return logits.logsumexp(-1).mean()


def allowed_classes_by_row(m: Model, g: Given) -> Tensor:
    allowed = (g.soft > 0.01) | (torch.arange(V) == g.y[..., None])
    logits = torch.where(allowed, m.head(g.x), torch.finfo(g.x.dtype).min)
    return -logits.log_softmax(-1).gather(-1, g.y[..., None]).mean()


def top_p_free(m: Model, g: Given) -> Tensor:
    best = m.head(g.x).topk(5, dim=-1).values
    return (best[..., 0] - best[..., 1:].logsumexp(-1)).mean()


# ------------------------------------------------------------------------- heads in odd shapes


def adapter(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) + 0.5 * m.up(m.down(g.x))
    return (logits.logsumexp(-1) - logits.gather(-1, g.y[..., None]).squeeze(-1)).square().mean()


def slice_of_vocabulary(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)[..., 3:-2]
    return (logits.logsumexp(-1) * g.mask).sum()


def two_halves(m: Model, g: Given) -> Tensor:
    left, right = m.head(g.x).split([12, V - 12], dim=-1)
    return (left.logsumexp(-1) - right.logsumexp(-1)).square().mean()


def codebooks(m: Model, g: Given) -> Tensor:
    logits = m.books(g.x).view(*g.x.shape[:-1], K, 11)
    logp = logits.log_softmax(-1)
    target = (g.y[..., None] + torch.arange(K)) % 11
    return -logp.gather(-1, target[..., None]).squeeze(-1).mean()


def codebooks_flattened(m: Model, g: Given) -> Tensor:
    logits = m.books(g.x).flatten(0, 1).unflatten(-1, (K, 11))
    return (logits.logsumexp(-1).sum(-1) * g.mask.flatten()).sum()


def classes_in_the_middle(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).transpose(1, 2)
    return (logits.logsumexp(1) - logits.gather(1, g.y[:, None]).squeeze(1)).square().mean()


def prior_in_the_middle(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).movedim(-1, 1) + m.prior[:, None]
    return (logits.softmax(1) * g.soft.transpose(1, 2)).sum(1).log().mean()


def shifted(m: Model, g: Given) -> Tensor:
    logits, y = m.head(g.x)[:, :-1], g.y[:, 1:]
    logp = logits.log_softmax(-1)
    return -(logp.gather(-1, y.unsqueeze(-1)).squeeze(-1) * g.mask[:, 1:]).sum()


def shifted_both_ends(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)[:, 1:][:, :-2]
    return (logits.logsumexp(-1) * g.reward[:, None]).mean()


def last_position(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)[:, -1]
    return (logits.logsumexp(-1) * g.reward).mean()


def flattened(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).reshape(-1, V)
    picked = logits.gather(1, g.y.reshape(-1, 1)).squeeze(1)
    return ((logits.logsumexp(1) - picked) * g.mask.reshape(-1)).sum()


# ----------------------------------------------------------------------- policy and preference


def policy(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) / 0.9
    lse = logits.logsumexp(-1)
    logp = logits.gather(-1, g.y[..., None]).squeeze(-1) - lse
    entropy = lse - (logits.softmax(-1) * logits).sum(-1)
    ratio = (logp - logp.detach()).exp()
    gain = torch.min(ratio * g.reward[:, None], ratio.clamp(0.8, 1.2) * g.reward[:, None])
    return -((gain + 0.01 * entropy) * g.mask).sum() / g.mask.sum()


def preference(m: Model, g: Given) -> Tensor:
    def sums(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1).gather(-1, g.y[..., None]).squeeze(-1)
        return (logp * g.mask).sum(-1)

    with torch.no_grad():
        reference = sums(m.teacher(g.far))
    ratio = sums(m.head(g.x)) - reference
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


# ------------------------------------------------------------------------------------- metrics


def with_metrics(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    lse = logits.logsumexp(-1)
    loss = (lse - logits.gather(-1, g.y[..., None]).squeeze(-1)).mean()
    with torch.no_grad():
        p = logits.softmax(-1)
        entropy = -(p * p.clamp_min(1e-9).log()).sum(-1).mean()
        accuracy = (logits.argmax(-1) == g.y).float().mean()
        top = (logits.topk(3, dim=-1).indices == g.y[..., None]).any(-1).float().mean()
    return loss + 1e-2 * lse.square().mean() + 0.1 * (entropy + accuracy + top)


def several_scalars(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    loss = logits.logsumexp(-1).mean() - logits.gather(-1, g.y[..., None]).mean()
    return loss + logits.mean() * logits.square().mean().sqrt() - logits.detach().amax()


def read_by_three(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    nll = F.cross_entropy(logits.flatten(0, 1), g.y.flatten())
    return nll + 0.1 * logits.square().mean() + F.relu(logits).sum(-1).amax(-1).mean()


def loss_used_twice(m: Model, g: Given) -> Tensor:
    loss = kl_of(m.head(g.x), m.teacher(g.far))
    return loss.mean() + loss.square().mean() * loss.detach().mean()


def spread_of_rows(m: Model, g: Given) -> Tensor:
    """What is done to values per row may mix them."""
    lse = m.head(g.x).logsumexp(-1)
    return lse.std() + (lse.softmax(0) * lse.cumsum(1)).sum() + lse.flip(1)[0, 0]


def detached_branch(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    weight = 1 - logits.detach().softmax(-1).amax(-1)
    return (weight * (logits.logsumexp(-1) - logits.mean(-1))).mean()


def frozen_rows(m: Model, g: Given) -> Tensor:
    logits, still = m.head(g.x), m.head(g.x.detach())
    return (logits.logsumexp(-1) - still.logsumexp(-1) * 0.5).square().mean()


REGIONS: dict[str, Body] = {
    each.__name__: each
    for each in (
        forward_kl, reverse_kl, jensen_shannon, learned_temperature, scalar_temperature,
        one_head_twice, one_head_spelled_in_many_ways, own_teacher_detached,
        own_teacher_under_no_grad, two_heads_two_losses,
        binary, binary_of_one_hot, regression, huber_and_l1, focal, sigmoid_focal, hinge, poly,
        one_hot_in_place, smoothed_in_place, doubled_in_place,
        smoothing_by_hand, smoothed_targets, soft_targets, learned_targets, mask_of_sequence,
        weight_of_sequence, weight_of_position, learned_prior, allowed_classes,
        allowed_classes_by_row, top_p_free, adapter, slice_of_vocabulary, two_halves, codebooks,
        codebooks_flattened, classes_in_the_middle, prior_in_the_middle, shifted,
        shifted_both_ends, last_position, flattened, policy, preference,
        with_metrics, several_scalars, read_by_three, loss_used_twice, spread_of_rows,
        detached_branch, frozen_rows,
    )
}  # fmt: skip


#: Regions that meet in values per row only.
COUNTS = {"regression": 2, "preference": 2, "frozen_rows": 2}


@pytest.mark.parametrize("body", REGIONS.values(), ids=REGIONS)
def test_region(body: Body) -> None:
    assert_region(check(maker(body)), COUNTS.get(body.__name__, 1))


@pytest.mark.parametrize(
    "body",
    [forward_kl, jensen_shannon, learned_temperature, one_hot_in_place, smoothed_in_place,
     own_teacher_detached, binary, regression,
     smoothing_by_hand, weight_of_sequence, weight_of_position, two_halves, codebooks,
     codebooks_flattened, classes_in_the_middle, prior_in_the_middle, shifted_both_ends,
     last_position, flattened, policy, preference, with_metrics, several_scalars, spread_of_rows],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_region_with_dynamic_shapes(body: Body) -> None:
    assert_region(check(maker(body), dynamic=True), COUNTS.get(body.__name__, 1))


def test_one_head_has_one_sum_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int]] = []
    original = region_module._Emitter._same_heads

    def spied(emitter: Any) -> list[int]:
        found.append(original(emitter))
        return found[-1]

    monkeypatch.setattr(region_module._Emitter, "_same_heads", spied)
    assert_region(check(maker(one_head_spelled_in_many_ways)))
    # The first two have the bias in the projection or behind it, the others none.
    assert found, "never asked"
    assert {tuple(each) for each in found} == {(0, 1, 1, 1, 1)}


# ------------------------------------------------------------------------ dtypes, modes, frozen

SOME = (jensen_shannon, policy, learned_prior, classes_in_the_middle)
some = pytest.mark.parametrize("body", SOME, ids=lambda each: each.__name__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@some
def test_dtype(body: Body, dtype: torch.dtype) -> None:
    assert_region(check(maker(body, dtype=dtype)))


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@some
def test_autocast_around_the_step(body: Body) -> None:
    assert_region(check(maker(body), context=autocast, slack=SLACK[torch.bfloat16]))


def autocast_of_the_head(m: Model, g: Given) -> Tensor:
    with autocast():
        logits = m.head(g.x)
    return (logits.float().logsumexp(-1) - logits.float().mean(-1)).square().mean()


def autocast_of_the_loss(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    with autocast():
        return (logits.logsumexp(-1) * (logits * m.scale).softmax(-1).amax(-1)).mean()


def autocast_of_one_of_two(m: Model, g: Given) -> Tensor:
    with autocast():
        rough = m.head(g.x * 0.5)
    return -(rough.float().softmax(-1) * m.head(g.x).log_softmax(-1)).sum(-1).mean()


def autocast_left_and_entered(m: Model, g: Given) -> Tensor:
    with autocast():
        logits = m.head(g.x)
        with torch.autocast("cpu", enabled=False):
            lse = logits.float().logsumexp(-1)
        return (lse - (logits * m.scale).softmax(-1).amax(-1)).mean()


@dynamic_or_not
@pytest.mark.parametrize(
    "body",
    [autocast_of_the_head, autocast_of_the_loss, autocast_of_one_of_two, autocast_left_and_entered],
)
def test_autocast_inside(body: Body, dynamic: bool) -> None:
    assert_region(check(maker(body), dynamic=dynamic, slack=SLACK[torch.bfloat16]))


@some
def test_no_grad(body: Body) -> None:
    backend = check(maker(body), context=torch.no_grad)
    assert_region(backend)
    for node in backend.region_nodes:
        for name, needs in node.kwargs.items():
            assert not name.startswith("need_") or not any(needs), name


def frozen_head(model: Model) -> None:
    model.head.requires_grad_(False)


@some
def test_frozen_head(body: Body) -> None:
    backend = check(maker(body, prepare=frozen_head))
    assert_region(backend)
    assert backend.region_nodes[0].kwargs["need_grad_weights"][0] is False
    assert True in backend.region_nodes[0].kwargs["need_grad_inputs"]


@some
def test_frozen_hidden(body: Body) -> None:
    backend = check(maker(body, x_grad=False))
    assert_region(backend)
    assert True not in backend.region_nodes[0].kwargs["need_grad_inputs"]


def under_no_grad_alone(m: Model, g: Given) -> Tensor:
    with torch.no_grad():
        watched = m.head(g.x).softmax(-1).square().sum(-1).mean()
    return g.x.square().mean() * watched


def test_metric_alone() -> None:
    assert_region(check(maker(under_no_grad_alone)))


def test_checkpoint_around_head_and_loss() -> None:
    def body(m: Model, g: Given) -> Any:
        return checkpoint(
            lambda x: policy(m, dataclasses.replace(g, x=x)), g.x, use_reentrant=False
        )

    backend = check(maker(body))
    assert len(backend.region_nodes) == 1
    assert not backend.wide_products(V)


# -------------------------------------------------------------------- dtypes of values from outside


def one_number_along_the_rows(m: Model, g: Given) -> Tensor:
    """A tensor of one element in fp32 makes bf16 logits fp32; one without dimensions does not."""
    return (m.head(g.x).transpose(1, 2) * m.temperature.float()).logsumexp(1).mean()


def full_of_fp32(m: Model, g: Given) -> Tensor:
    floor = torch.full((*g.y.shape, V), -2.0)
    return torch.where(g.mask[..., None], m.head(g.x), floor).logsumexp(-1).square().mean()


@dynamic_or_not
@pytest.mark.parametrize("body", [one_number_along_the_rows, full_of_fp32])
def test_promotion(body: Body, dynamic: bool) -> None:
    assert_region(check(maker(body, dtype=torch.bfloat16), dynamic=dynamic))


# ------------------------------------------------------------------------- what mixes rows


def softmax_over_rows(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).softmax(1) * g.soft).sum()


def softmax_over_batch(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).softmax(0) * g.soft).sum()


def batch_norm(m: Model, g: Given) -> Tensor:
    logits = F.batch_norm(m.head(g.x).flatten(0, 1), None, None, training=True)
    return logits.logsumexp(-1).mean()


def centred(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.mean((0, 1))).logsumexp(-1).mean()


def scaled_by_the_largest(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.amax()).exp().sum(-1).log().mean()


def scaled_by_a_mean_of_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits / logits.logsumexp(-1).mean()).softmax(-1).square().sum()


def cumsum_over_rows(m: Model, g: Given) -> Tensor:
    return m.head(g.x).cumsum(1).logsumexp(-1).mean()


def sorted_rows(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).sort(1).values * g.soft).sum()


def flipped_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.flip(1)).square().sum(-1).mean()


def rolled_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.roll(1, 1)).square().sum(-1).mean()


def neighbours(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits[:, 1:] - logits[:, :-1]).square().sum(-1).mean()


def pairs(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).flatten(0, 1)
    return (logits[:, None] - logits[None]).square().sum(-1).mean()


def contrastive(m: Model, g: Given) -> Tensor:
    p = m.head(g.x).flatten(0, 1).softmax(-1)
    return (p @ p.t()).log().diagonal().mean()


def permuted_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).flatten(0, 1)
    order = g.y.flatten().argsort()
    return (logits.logsumexp(-1) * logits[order].softmax(-1).amax(-1)).mean()


def chosen_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).flatten(0, 1)
    return logits.index_select(0, g.y.flatten() % 7).logsumexp(-1).mean()


def another_product(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).softmax(-1) @ m.head.weight).square().mean()


def noise(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits + torch.rand_like(logits)).logsumexp(-1).mean()


def gumbel(m: Model, g: Given) -> Tensor:
    return (F.gumbel_softmax(m.head(g.x)) * g.soft).sum()


def written(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) * 1.0
    logits[:, 0] = 0.0
    return logits.logsumexp(-1).mean()


def masked_in_place(m: Model, g: Given) -> Tensor:
    return m.head(g.x).masked_fill_(~g.mask[..., None], 0.0).logsumexp(-1).mean()


def hooked(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    logits.register_hook(lambda grad: grad * 0.5)
    return (logits.logsumexp(-1) - logits.mean(-1)).mean()


def returned(m: Model, g: Given) -> Any:
    logits = m.head(g.x)
    return (logits.logsumexp(-1) - logits.mean(-1)).mean(), logits


def probabilities_returned(m: Model, g: Given) -> Any:
    p = m.head(g.x).softmax(-1)
    return p.square().sum(-1).mean(), p


def column_means(m: Model, g: Given) -> Tensor:
    """The load of each class: narrow, but a sum over rows of something wide."""
    load = m.head(g.x).softmax(-1).mean((0, 1))
    return (load * load.log()).sum()


def running_means(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    with torch.no_grad():
        m.seen.lerp_(logits.mean((0, 1)), 0.1)
    return (logits.logsumexp(-1) - logits.mean(-1)).mean()


def rows_and_classes_viewed_as_one(m: Model, g: Given) -> Tensor:
    return m.head(g.x).view(g.x.shape[0], -1).logsumexp(-1).mean()


def over_rows_and_classes(m: Model, g: Given) -> Tensor:
    return m.head(g.x).logsumexp((1, 2)).mean()


def rows_in_another_order(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).transpose(0, 1)
    return (logits.softmax(-1) * g.soft.transpose(0, 1)).sum(-1).log().mean()


def largest_of_all(m: Model, g: Given) -> Tensor:
    """Logits of few values: equal ones share the gradient over all rows."""
    logits = m.head(g.x)
    steps = logits - logits.detach() + (logits.detach() > 0.5)
    return steps.amax() + steps.min()


def rows_cut_in_another_shape(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).view(7, 2, V)
    return (logits[3:].logsumexp(-1) * logits[3:].mean(-1)).sum()


def rows_cut_after_flattening(m: Model, g: Given) -> Tensor:
    return m.head(g.x).flatten(0, 1)[:-3].logsumexp(-1).square().mean()


def one_sequence_at_a_time(m: Model, g: Given) -> Tensor:
    rows = []
    for logits, y in zip(m.head(g.x), g.y, strict=True):
        rows.append(logits.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1))
    return -(torch.stack(rows) * g.mask).sum()


def first_row_against_all(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits[:, :1] * logits).softmax(-1).square().mean()


def first_row_repeated(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)[:, :1].expand(-1, T, -1)
    return (logits.log_softmax(-1) * g.soft).sum()


def first_row_against_inputs(m: Model, g: Given) -> Tensor:
    return (m.head(g.x)[:, :1] * g.soft).logsumexp(-1).square().mean()


def written_through_a_view(m: Model, g: Given) -> Tensor:
    twice = m.head(g.x).clone()
    twice.view(-1).mul_(2)
    return twice.logsumexp(-1).square().mean()


def written_across_the_rows(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    target = torch.zeros_like(logits)
    target.scatter_(0, torch.zeros(1, T, V, dtype=torch.int64), 1.0)
    return (logits * target).sum()


def written_with_a_row_of_another(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    target = torch.zeros_like(logits)
    target.add_(logits.detach()[:1])
    return (logits.log_softmax(-1) * target).sum()


def noise_in_place(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    mask = torch.zeros_like(logits)
    mask.bernoulli_(0.5)
    return (logits.log_softmax(-1) * mask).sum()


LEFT: dict[str, Body] = {
    each.__name__: each
    for each in (
        softmax_over_rows, softmax_over_batch, batch_norm, centred, scaled_by_the_largest,
        scaled_by_a_mean_of_rows, cumsum_over_rows, sorted_rows, flipped_rows, rolled_rows,
        neighbours, pairs, contrastive, permuted_rows, chosen_rows, another_product, noise, gumbel,
        written, masked_in_place, hooked, returned, probabilities_returned, column_means,
        running_means, rows_and_classes_viewed_as_one, over_rows_and_classes,
        rows_in_another_order, largest_of_all, rows_cut_in_another_shape,
        rows_cut_after_flattening, one_sequence_at_a_time, first_row_against_all,
        first_row_repeated, first_row_against_inputs, written_through_a_view,
        written_across_the_rows, written_with_a_row_of_another, noise_in_place,
    )
}  # fmt: skip


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_left(body: Body) -> None:
    assert_left(check(maker(body)))


@pytest.mark.parametrize(
    "body",
    [softmax_over_rows, centred, flipped_rows, neighbours, pairs, permuted_rows, column_means,
     rows_in_another_order, rows_cut_after_flattening, first_row_against_all],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_left_with_dynamic_shapes(body: Body) -> None:
    assert_left(check(maker(body), dynamic=True))


@dynamic_or_not
def test_sum_over_many_rows_of_something_wide(dynamic: bool) -> None:
    """Narrow beside the logits, and yet nothing a chunk could hold back."""
    assert_left(check(maker(column_means, shape=(2, 40)), dynamic=dynamic), "along the rows")


def read_before_a_write(m: Model, g: Given) -> Tensor:
    """Not to be moved behind the write, with what is left of the loss."""
    logits, weight = m.head(g.x), m.seen[:T] * 2.0
    first = (logits.logsumexp(-1) + weight).sum()
    weight.mul_(5.0)
    return first + logits.softmax(-1).amax(-1).sum()


@dynamic_or_not
def test_value_written_to_between_parts_of_the_loss(dynamic: bool) -> None:
    assert_left(check(maker(read_before_a_write), dynamic=dynamic), "changed in place")


# ------------------------------------------------------------------- sizes that say nothing

S = 17  # rows, positions and classes alike


def row_for_class(m: Model, g: Given) -> Tensor:
    """A value per row, by its size one per class."""
    logits = m.head(g.x)
    return (logits - logits.logsumexp(-1)).square().mean()


def row_for_class_transposed(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.t()).square().mean()


def classes_over_rows(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).t().softmax(-1) * g.soft).sum()


def row_and_class_vectors(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) * m.prior * g.reward[:, None].exp() + g.reward
    return (logits.logsumexp(-1) - logits.gather(-1, g.y[:, None]).squeeze(-1)).square().mean()


def transposed_inputs(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x) + g.soft.t() * g.learned.t()
    return (logits.t().logsumexp(0) * g.reward).sum()


def one_class_each(m: Model, g: Given) -> Tensor:
    return F.cross_entropy(m.head(g.x), torch.arange(S)) + m.head(g.x).square().mean()


def inputs_of_the_other_axis(m: Model, g: Given) -> Tensor:
    """[B, T] beside [B, T, V] means [T, V]."""
    logits = m.head(g.x) * g.mask + g.reward.exp()
    return (logits.logsumexp(-1) * g.mask.t()).sum() / 7


def lse_along_positions(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.logsumexp(-1)[:, None]).square().mean()


def lse_along_classes(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.logsumexp(-1)).square().mean()


def batch_for_position(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.transpose(0, 1)).square().mean()


def class_for_position(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    return (logits - logits.transpose(1, 2)).square().mean()


def position_softmax_in_the_middle(m: Model, g: Given) -> Tensor:
    return (m.head(g.x).transpose(1, 2).softmax(2) * g.soft).sum()


def class_softmax_in_the_middle(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).transpose(1, 2) + m.prior[:, None] * g.reward
    return (logits.softmax(1) * g.soft * g.mask[:, None]).sum()


@dynamic_or_not
@pytest.mark.parametrize(
    "body",
    [
        row_and_class_vectors,
        transposed_inputs,
        class_softmax_in_the_middle,
        inputs_of_the_other_axis,
    ],
)
def test_equal_sizes(body: Body, dynamic: bool) -> None:
    cube = body in (class_softmax_in_the_middle, inputs_of_the_other_axis)
    shape = (S, S) if cube else (S,)
    backend = check(maker(body, shape=shape, classes=S), dynamic=dynamic)
    assert len(backend.region_nodes) == 1, reasons()


@pytest.mark.parametrize(
    "body",
    [row_for_class, row_for_class_transposed, classes_over_rows, lse_along_positions,
     lse_along_classes, batch_for_position, class_for_position, position_softmax_in_the_middle],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_equal_sizes_that_mix(body: Body) -> None:
    flat = body in (row_for_class, row_for_class_transposed, classes_over_rows)
    assert_left(check(maker(body, shape=(S,) if flat else (S, S), classes=S)))


def test_one_class_each() -> None:
    check(maker(one_class_each, shape=(S,), classes=S))


@pytest.mark.parametrize("classes", [D, D - 1])
def test_no_more_classes_than_hidden_size(classes: int) -> None:
    assert_left(check(maker(forward_kl, classes=classes)), "hidden size")


# ------------------------------------------------------------------------------ sizes of one


def squeezed(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x).squeeze()
    return (logits.logsumexp(-1) - logits.mean(-1)).square().mean()


def squeezed_loss(m: Model, g: Given) -> Tensor:
    logits = m.head(g.x)
    nll = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, g.y[..., None])
    return (nll.squeeze() * g.mask.squeeze()).sum()


def more_rows_outside(m: Model, g: Given) -> Tensor:
    """The logits of one row, or of one sequence, against more of them."""
    more = torch.linspace(0.5, 1.5, 3).view(3, *[1] * g.x.dim())
    return (m.head(g.x) * more).logsumexp(-1).square().mean()


def more_sequences_outside(m: Model, g: Given) -> Tensor:
    more = torch.linspace(0.5, 1.5, 3).view(3, *[1] * (g.x.dim() - 1))
    return (m.head(g.x) * more).logsumexp(-1).square().mean()


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (1,), (2, 1, 5)], ids=str)
@pytest.mark.parametrize(
    "body",
    [squeezed, squeezed_loss, more_rows_outside, more_sequences_outside, shifted, policy,
     flattened],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_sizes_of_one(body: Body, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 and body in (shifted, policy):
        shape = (1, *shape)[-2:]  # they are written for [B, T]
    if shape[0] != 1 and body is more_sequences_outside:
        shape = (1, *shape)
    check(maker(body, shape=shape))
