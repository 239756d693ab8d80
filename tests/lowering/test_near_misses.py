"""What must not match although it looks alike: the graph stays as it is, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import greyhound_lowering
from lowering.rewriting import SLACK, Backend, assert_left, check, reasons, run

N, D, V = 12, 8, 37

Body = Callable[[Tensor, nn.Linear, Tensor], Tensor]


@torch.library.custom_op("greyhound_test::wipe", mutates_args={"values"})
def wipe(values: Tensor) -> None:
    values.zero_()


class Written(nn.Module):
    """A loss written as ``body(hidden, head, target)``; the hidden state is no leaf."""

    def __init__(self, body: Body, train_head: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)
        self.head.requires_grad_(train_head)
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x * 1.0, self.head, y)


def make(body: Body, *, train_head: bool = True) -> Any:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        x = torch.randn(N, D, requires_grad=True)
        return Written(body, train_head), (x, torch.randint(0, V, (N,)))

    return made


def two_readers(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    logits = head(x)
    return F.cross_entropy(logits, y) + 0.1 * logits.abs().mean()


def same_logits_two_losses(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    logits = head(x)
    return F.cross_entropy(logits, y) + F.cross_entropy(logits, y.flip(0))


def log_probabilities_used_twice(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    logp = head(x).log_softmax(-1)
    return F.nll_loss(logp, y) - 0.1 * logp.mean()


def in_place_bias(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    logits = head(x)
    logits += 1.0
    return F.cross_entropy(logits, y)


def in_place_method(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).mul_(2.0), y)


def detached_logits(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).detach(), y) + x.sum()


def probability_targets(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x), F.one_hot(y, V).float())


def classes_are_rows(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    """Rows of the transposed logits: V samples of N classes."""
    return F.cross_entropy(head(x).t(), torch.arange(V, device=y.device) % N)


def log_softmax_over_rows(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.nll_loss(head(x).log_softmax(0), y)


def nll_of_logits(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.nll_loss(head(x), y)


def cross_entropy_of_log_probabilities(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).log_softmax(-1), y)


def narrower(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).bfloat16(), y)


def narrower_and_back(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).to(torch.bfloat16).float(), y)


def tensor_temperature(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x) / head.bias.detach().abs().mean(), y)


def learned_temperature(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x) * head.bias.mean().exp(), y)


def per_class_scale(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x) * head.bias.detach(), y)


def per_row_bias(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x) + x[:, :1], y)


def scaled_second_bias(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.add(F.linear(x, head.weight), head.bias, alpha=2.0), y)


def floor_division(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.div(head(x), 0.5, rounding_mode="floor"), y)


def reciprocal(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(1.0 / head(x).clamp_min(2.0), y)


def twice_capped(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(2.0 * torch.tanh(head(x))), y)


def vocabulary_from_the_middle(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x)[:, 3:], y.clamp_max(V - 4))


def every_other_class(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x)[:, ::2], y // 2)


def flipped_classes(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x).flip(-1), y)


def reshaped_over_classes(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    """[N, V] read as [V, N]: the number of elements is right, the classes are not."""
    return F.cross_entropy(head(x).view(V, N), torch.arange(V, device=y.device) % N)


def hook_on_logits(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    logits = head(x)
    logits.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return F.cross_entropy(logits, y)


def dropout_on_logits(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(head(x), 0.0), y)


NEVER: dict[str, tuple[Body, str]] = {
    "logits read by a penalty too": (two_readers, "2 readers"),
    "logits read by two losses": (same_logits_two_losses, "2 readers"),
    "log-probabilities read twice": (log_probabilities_used_twice, "2 readers"),
    "logits += 1": (in_place_bias, "iadd"),
    "logits.mul_": (in_place_method, "mul_"),
    "logits.detach()": (detached_logits, "detach"),
    "probability targets": (probability_targets, "probabilities"),
    "cross entropy over rows": (classes_are_rows, "another dimension"),
    "log_softmax over rows": (log_softmax_over_rows, "another dimension"),
    "nll_loss of logits": (nll_of_logits, "plain logits"),
    "cross_entropy of log_softmax": (cross_entropy_of_log_probabilities, "log-probabilities"),
    "cast to bfloat16": (narrower, "bfloat16"),
    "cast to bfloat16 and back": (narrower_and_back, ""),
    "tensor temperature": (tensor_temperature, "a tensor"),
    "learned temperature": (learned_temperature, "a tensor"),
    "scale per class": (per_class_scale, "a tensor"),
    "bias per row": (per_row_bias, "not a vector over the vocabulary"),
    "bias with alpha": (scaled_second_bias, "further arguments"),
    "floor division": (floor_division, "further arguments"),
    "clamped and inverted": (reciprocal, ""),
    "capped twice": (twice_capped, "twice"),
    "vocabulary from the middle": (vocabulary_from_the_middle, "beginning"),
    "every other class": (every_other_class, "beginning"),
    "flipped classes": (flipped_classes, "flip"),
    "view over the classes": (reshaped_over_classes, "mixes the vocabulary"),
    "hook on the logits": (hook_on_logits, ""),  # a different node in torch 2.11
    "dropout on the logits": (dropout_on_logits, "dropout"),
}


@pytest.mark.fault("B47")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("body", "reason"), NEVER.values(), ids=NEVER)
def test_left(body: Body, reason: str, dynamic: bool) -> None:
    dynamic = dynamic and body is not reshaped_over_classes
    assert_left(check(make(body), dynamic=dynamic, kinds=("cross_entropy",)), reason)


#: What mixes rows, or may: no other kind of rewrite takes it either.
MIXED = {"hook on the logits"}


@pytest.mark.parametrize("body", [pair[0] for pair in NEVER.values()], ids=NEVER)
def test_right_as_a_region_or_left(body: Body, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    # A gradient that passes through bf16 is rounded there, before the upstream or after it.
    slack = SLACK[torch.bfloat16] if "bfloat16" in name else None
    backend = check(make(body), slack=slack)  # compares losses and gradients
    assert not backend.op_nodes
    if name in MIXED or not backend.region_nodes:
        assert_left(backend)


# ------------------------------------------------- operands that change between head and loss


def changing(change: Callable[[Tensor], Any]) -> Body:
    """The hidden state is written to after the head has read it."""

    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        logits = head(x)
        change(x)
        return F.cross_entropy(logits, y)

    return body


def _set_row(x: Tensor) -> None:
    x[0] = 0.0


def _set_through_view(x: Tensor) -> None:
    x.view(-1)[:5].fill_(0.0)


def _copy(x: Tensor) -> None:
    x.copy_(torch.ones_like(x))


def _augmented(x: Tensor) -> None:
    x *= 0.5


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.add_(1.0),
    "setitem": _set_row,
    "through a view": _set_through_view,
    "copy_": _copy,
    "augmented assignment": _augmented,
    "detached": lambda x: x.detach().mul_(3.0),
    "data": lambda x: x.data.mul_(3.0),
    "out=": lambda x: torch.ones(N, D, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "relu, inplace by keyword": lambda x: F.relu(x, inplace=True),
    "relu, inplace by position": lambda x: F.relu(x, True),
    "leaky_relu, inplace by position": lambda x: F.leaky_relu(x, 0.1, True),
    "nn.ReLU(inplace)": lambda x: nn.ReLU(inplace=True)(x),
    "aten op": lambda x: torch.ops.aten.fill_(x, 0.0),
    "aten overload": lambda x: torch.ops.aten.fill_.Scalar(x, 0.0),
    "custom op": lambda x: wipe(x),
    "custom op by keyword": lambda x: wipe(values=x),
    "custom op by its packet": lambda x: torch.ops.greyhound_test.wipe(x),
    "custom op overload by keyword": lambda x: torch.ops.greyhound_test.wipe.default(values=x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hidden_state_changed_between_head_and_loss(change: Callable[[Tensor], Any]) -> None:
    """Without gradients, so that autograd does not forbid the change before we can get it wrong."""
    made = make(changing(change), train_head=False)
    assert_left(check(made, context=torch.no_grad), "changed in place")


def test_change_before_the_head_or_after_the_loss_does_not_matter() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        x.add_(1.0)
        loss = F.cross_entropy(head(x), y)
        x.detach().mul_(0.0)
        return loss

    backend = check(make(body), context=torch.no_grad)
    assert len(backend.op_nodes) == 1, reasons()


def test_weight_changed_between_head_and_loss() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        logits = head(x)
        with torch.no_grad():
            head.weight.mul_(1.5)
        return F.cross_entropy(logits, y)

    made = make(body, train_head=False)
    assert_left(check(made, context=torch.no_grad), "changed in place")


def test_bias_changed_between_head_and_loss() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        logits = F.linear(x, head.weight) + head.bias
        with torch.no_grad():
            head.bias.zero_()
        return F.cross_entropy(logits, y)

    made = make(body, train_head=False)
    assert_left(check(made, context=torch.no_grad), "changed in place")


@pytest.mark.parametrize("kind", ["rows", "mask"])
def test_row_index_changed_between_selection_and_loss(kind: str) -> None:
    """The selection moves in front of the head, to where the loss stands."""

    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        rows = torch.arange(N - 1, -1, -1) if kind == "rows" else y >= 0
        chosen, target = head(x)[rows], y[rows]
        rows.zero_() if kind == "rows" else rows.logical_not_().logical_not_()
        return F.cross_entropy(chosen, target)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = check(make(body, train_head=False), context=torch.no_grad)
    assert_left(backend)


def test_target_changed_before_the_loss_is_read_as_changed() -> None:
    """The loss reads the target where it stands, and so does the op: this may be rewritten."""

    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        target = y.clone()
        logits = head(x)
        target[:3] = -100
        return F.cross_entropy(logits, target)

    check(make(body))


# -------------------------------------------------------------------- settings that say no


def plain(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return F.cross_entropy(head(x), y)


def test_kind_switched_off() -> None:
    assert_left(check(make(plain), kinds=()), "switched off")


def test_min_logits_bytes() -> None:
    size = N * V * 4
    assert_left(check(make(plain), min_logits_bytes=size + 1), "min_logits_bytes")
    assert len(check(make(plain), min_logits_bytes=size).op_nodes) == 1


def test_default_min_logits_bytes_leaves_small_heads() -> None:
    assert_left(check(make(plain), min_logits_bytes=16 * 2**20), "16.00 MiB")


@pytest.mark.parametrize(("classes", "matches"), [(D - 1, False), (D, False), (D + 1, True)])
def test_no_more_classes_than_hidden_size(classes: int, matches: bool) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = Written(plain)
        module.head = nn.Linear(D, classes)
        return module, (torch.randn(N, D), torch.randint(0, classes, (N,)))

    backend = check(made)
    if matches:
        assert len(backend.op_nodes) == 1
    else:
        assert_left(backend, "hidden size")


# -------------------------------------------------------------------------- odd surroundings


@pytest.mark.fault("B43")
def test_gradient_taken_inside_the_compiled_function() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        weight = head.weight.detach()
        inner = torch.func.grad(lambda h: F.cross_entropy(F.linear(h, weight), y))(x)
        return inner.square().sum()

    assert_left(check(make(body)), "torch.func")


def test_vmap_inside_the_compiled_function() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        return torch.vmap(lambda h, t: F.cross_entropy(head(h), t))(x, y).sum()

    assert_left(check(make(body)), "torch.func")


def test_class_weights_that_require_grad() -> None:
    """Torch refuses them itself; the rewrite must not be what swallows the error."""

    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x), y, weight=head.bias.abs())

    function, inputs = make(body)()
    with pytest.raises(RuntimeError):
        run(function, inputs)
    torch._dynamo.reset()
    backend = Backend()
    with pytest.raises(Exception, match="grad"):
        run(function, inputs, compiled=torch.compile(function, backend=backend))
    assert not backend.op_nodes


class Doubled(Tensor):
    """Wrapper whose values are twice those of the tensor it holds, as a quantised weight's are."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Doubled:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> Doubled:
        return Doubled(inner["held"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.held * 2.0 if isinstance(value, Doubled) else value

        if func is torch.ops.aten.detach.default:
            return Doubled(args[0].held.detach())
        return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))


@pytest.mark.fault("B77", "B79")
def test_weight_of_a_tensor_subclass() -> None:
    def made() -> tuple[Any, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        weight = Doubled(torch.randn(V, D))
        x = torch.randn(N, D, requires_grad=True)
        return (lambda x, y: F.cross_entropy(F.linear(x, weight), y)), (
            x,
            torch.randint(0, V, (N,)),
        )

    assert_left(check(made), "Doubled")


def test_head_per_sample_is_a_term_each() -> None:
    """A stack of weights, one product for each sample."""

    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        stack = torch.stack([head.weight.t(), head.weight.t()])
        logits = torch.bmm(x.view(2, -1, D), stack)
        return F.cross_entropy(logits.view(-1, V), y)

    backend = check(make(body))
    assert [str(node.target) for node in backend.our_nodes] == [
        "greyhound.linear_cross_entropy_terms.default"
    ]


def test_weight_that_is_an_activation_of_symbolic_rows() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x) @ head(x).t(), torch.arange(x.shape[0]))

    assert_left(check(make(body), dynamic=True), "symbolic")


def test_layers_that_are_no_heads_are_not_reported() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
        return (F.relu(head(x)) @ head.weight).square().mean()

    backend = check(make(body))
    assert backend.unchanged
    assert not greyhound_lowering.explain().decisions
