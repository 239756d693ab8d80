"""Logits returned beside the loss: NaN in their place where asked for, as they were otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import greyhound_lowering
from greyhound_lowering.settings import from_environment
from greyhound_ops.testing import peak_memory
from lowering.forms import FORMS, Dims, call
from lowering.rewriting import TINY, TINY_OPTIONS, UPSTREAM, Backend, reasons

B, T, D, V = 2, 6, 8, 37

dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])

Body = Callable[[nn.Module, Tensor, Tensor], Any]


class Model(nn.Module):
    """A head, and what is done with its logits."""

    def __init__(self, body: Body, classes: int = V) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, classes)
        self.other = nn.Linear(D, classes)
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, x, y)


def ce(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def inputs(rows: int = T) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, rows, D, requires_grad=True), torch.randint(0, V, (B, rows))


def run(body: Body, *, compiled: bool, **arguments: Any) -> tuple[Any, list[Any], Any]:
    """What a model returns, gradients of its first value, and the backend."""
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    settings = {key: arguments.pop(key) for key in ("returned_logits", "kinds") if key in arguments}
    model, (x, y), backend = Model(body), inputs(), Backend(**settings)
    function = torch.compile(model, backend=backend, **arguments) if compiled else model
    out = function(x, y)
    first = out[0] if isinstance(out, tuple) else out
    (first * UPSTREAM).sum().backward()
    # A head that only a returned value depends on: zeros when compiled, nothing when not.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return out, [x.grad, *grads], backend


def plain(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    return ce(logits, y), logits


def cast(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    return ce(logits.float(), y), logits.bfloat16()


def views(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    scaled = logits.float() * 2.0
    return ce(logits, y), scaled, logits, logits.detach().view(-1, V), logits[:, -1:]


def capped(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = 30.0 * torch.tanh(m.head(x) / 30.0)
    return ce(logits[:, :-1], y[:, 1:]), logits


def beside_argmax(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    return ce(logits, y), logits, logits.argmax(-1)


def two_heads(m: Any, x: Tensor, y: Tensor) -> Any:
    one, other = m.head(x), m.other(x)
    return F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="sum"), one, other


def one_of_two(m: Any, x: Tensor, y: Tensor) -> Any:
    one, other = m.head(x), m.other(x)
    return ce(one, y), one, other.softmax(1)


@dynamic_or_not
@pytest.mark.parametrize(
    ("body", "wide"),
    [
        (plain, (1,)),
        (cast, (1,)),
        (views, (1, 2, 3, 4)),
        (capped, (1,)),
        (beside_argmax, (1,)),
        (two_heads, (1, 2)),
        (one_of_two, (1,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nan_in_place_of_returned_logits(body: Body, wide: tuple[int, ...], dynamic: bool) -> None:
    expected, grads, _ = run(body, compiled=False)
    out, made, _ = run(body, compiled=True, dynamic=dynamic, returned_logits="nan")
    assert greyhound_lowering.explain().rewritten_count >= 1, reasons()
    assert any(
        "that are returned are NaN" in d.reason for d in greyhound_lowering.explain().decisions
    )
    torch.testing.assert_close(made, grads)
    for index, (value, true) in enumerate(zip(out, expected, strict=True)):
        assert (value.shape, value.dtype, value.device) == (true.shape, true.dtype, true.device)
        if index in wide:
            assert bool(value.isnan().all())
            assert not value.requires_grad
            assert value.untyped_storage().nbytes() == value.dtype.itemsize
        else:
            torch.testing.assert_close(value, true)


def no_loss(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.head(x)


def loss_over_rows(m: Any, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    return logits.softmax(0).amax(), logits, logits.float().view(-1, V)


@dynamic_or_not
@pytest.mark.parametrize("body", [no_loss, loss_over_rows], ids=["no loss", "loss over rows"])
def test_left_where_the_loss_is_not_rewritten(body: Body, dynamic: bool) -> None:
    expected, grads, _ = run(body, compiled=False)
    out, made, backend = run(body, compiled=True, dynamic=dynamic, returned_logits="nan")
    assert backend.unchanged
    torch.testing.assert_close(made, grads)
    torch.testing.assert_close(out, expected)
    assert any("the logits leave the graph" in each for each in reasons())


def test_reason_tells_what_stood_in_the_way() -> None:
    run(loss_over_rows, compiled=True, returned_logits="nan")
    (reason,) = reasons()
    assert "without those that leave: the logits go into softmax" in reason


def test_logits_that_somebody_else_returns_stay() -> None:
    """A head whose loss is not rewritten keeps its logits beside one whose loss is."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        one, other = m.head(x), m.other(x)
        return ce(one, y) + other.softmax(0).amax(), one, other

    expected, grads, _ = run(body, compiled=False)
    out, made, _ = run(body, compiled=True, returned_logits="nan")
    assert bool(out[1].isnan().all())
    torch.testing.assert_close(out[2], expected[2])
    torch.testing.assert_close(out[0], expected[0])
    torch.testing.assert_close(made, grads)


def test_keep_is_the_default_and_changes_nothing() -> None:
    expected, _, _ = run(plain, compiled=False)
    out, _, backend = run(plain, compiled=True)
    assert backend.unchanged
    torch.testing.assert_close(out, expected)


def test_body_of_a_checkpoint_keeps_its_logits() -> None:
    """What it returns is read by the graph around it."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        loss, logits = checkpoint(plain, m, x, y, use_reentrant=False)
        return loss + logits.softmax(0).amax()

    expected, grads, _ = run(body, compiled=False)
    out, made, _ = run(body, compiled=True, returned_logits="nan")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(made, grads)
    assert any("the logits leave the graph" in each for each in reasons())


@pytest.mark.parametrize("id", ["K01m", "K03m", "K07m", "K08m"])
def test_hugging_face_model_compiled_alone(id: str) -> None:
    pytest.importorskip("transformers", reason="forms K need transformers")
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    model, batch = FORMS[id].make(Dims())
    call(model, batch).loss.backward()
    grads = [p.grad for p in model.parameters()]
    true = call(model, batch)
    model, batch = FORMS[id].make(Dims())
    out = call(torch.compile(model, backend=Backend(returned_logits="nan")), batch)
    assert greyhound_lowering.explain().rewritten_count == 1, reasons()
    torch.testing.assert_close(out.loss, true.loss)
    out.loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], grads, rtol=1e-4, atol=1e-5)
    assert out.logits.shape == true.logits.shape
    assert out.logits.dtype == true.logits.dtype
    assert out.logits.untyped_storage().nbytes() == out.logits.dtype.itemsize
    assert bool(out.logits.isnan().all())


@dynamic_or_not
def test_through_inductor_nothing_wide_is_stored(fresh_compiler: None, dynamic: bool) -> None:
    rows, classes = 1024, 2000
    logits_bytes = B * rows * classes * 4
    x, y = inputs(rows)
    options = {
        **TINY_OPTIONS,
        "greyhound.chunk_size": 64,
        "greyhound.returned_logits": "nan",
    }
    model = Model(plain, classes)
    compiled = torch.compile(model, backend="greyhound", options=options, dynamic=dynamic)
    for _ in range(2):  # the first call compiles
        with peak_memory("cpu") as peak:
            loss, logits = compiled(x, y)
            loss.backward()
    assert peak.bytes < logits_bytes / 8
    assert logits.shape == (B, rows, classes)
    assert logits.untyped_storage().nbytes() == 4
    assert bool(logits[0, :3].isnan().all())
    torch.testing.assert_close(loss, model(x, y)[0])


def test_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GREYHOUND_REWRITE_RETURNED_LOGITS"
    assert from_environment().returned_logits == "keep"
    monkeypatch.setenv(name, "nan")
    assert from_environment().returned_logits == "nan"
    monkeypatch.setenv(name, "zero")
    with pytest.raises(ValueError, match=name):
        from_environment()
    with pytest.raises(ValueError, match="returned_logits"):
        greyhound_lowering.RewriteSettings(returned_logits="zero")


def test_setting_is_part_of_the_cache_key() -> None:
    one = greyhound_lowering.rewrite_pass(**TINY)
    other = greyhound_lowering.rewrite_pass(**TINY, returned_logits="nan")
    assert one.uuid() != other.uuid()
