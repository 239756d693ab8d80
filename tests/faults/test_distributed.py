"""Heads that are sharded, wrapped, adapted or elsewhere, over every op."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import samples
from faults import every
from faults.every import Entry, over
from greyhound_ops import functional
from lowering import rewriting
from lowering.rewriting import run_python

explicit = over(lambda entry: not entry.rewritten)

needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="needs a torch built with torch.distributed"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    """Two ranks, of which this process is one and the other is not there."""
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        pytest.skip("needs to make the process group itself")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.fault("B77", "B79", "B81", "B83")
@pytest.mark.parametrize("placement", ["replicated", "by class", "by hidden size"])
@needs_distributed
@over(lambda entry: entry.linear and not entry.rewritten)
def test_distributed_head_is_refused_by_name(entry: Entry, placement: str, mesh: object) -> None:
    """Before anything is gathered or launched, whatever the placement; the text says what to do."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    place = {"replicated": Replicate(), "by class": Shard(0), "by hidden size": Shard(1)}[placement]
    sample = every.make()
    operands = every.leaves(sample)
    extra = every.extra_for(sample.input, sample.weight)
    for name in operands:
        value = operands[name].detach()
        if name != "weight" and placement != "replicated":
            continue
        given = {**operands, name: distribute_tensor(value, mesh, [place]).requires_grad_()}
        with pytest.raises(TypeError, match=r"input|weight|bias") as caught:
            every.call(entry, given, sample, extra=extra)
        text = str(caught.value)
        assert name in text.split(": expected")[0]
        assert "DTensor" in text
        assert "full_tensor()" in text
        assert "vocabulary" in text


@pytest.mark.fault("B79")
@needs_distributed
@pytest.mark.parametrize("name", ["logits", "target"])
def test_distributed_logits_and_labels_are_refused_by_name(name: str, mesh: object) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    values = {"logits": torch.randn(5, 7), "target": torch.arange(5)}
    values[name] = distribute_tensor(values[name], mesh, [Replicate()])
    with pytest.raises(TypeError, match=rf"{name}: expected a plain tensor, got a DTensor"):
        functional.cross_entropy(*values.values())
    with pytest.raises(TypeError, match=r"expected a plain tensor, got a DTensor"):
        functional.selective_log_softmax(*values.values())


@pytest.mark.fault("B77")
@needs_distributed
def test_distributed_head_is_refused_while_tracing(mesh: object) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch._dynamo.reset()
    sample = samples.make_sample()
    weight = distribute_tensor(sample.weight, mesh, [Replicate()])
    compiled = torch.compile(functional.chunked_linear_cross_entropy, backend="aot_eager")
    with pytest.raises(Exception, match=r"got a DTensor"):
        compiled(sample.input, weight, sample.target)
    # Parameters and plain tensors go through the same check.
    compiled(sample.input, nn.Parameter(sample.weight), sample.target)


@pytest.mark.fault("B77", "B79", "B83")
@needs_distributed
@pytest.mark.parametrize("kind", ["cross-entropy", "region"])
def test_distributed_head_is_left_by_the_rewrite(kind: str, mesh: object) -> None:
    """Plain torch multiplies DTensors; the graph stays as it was."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    user = every.ENTRIES[f"rewritten-{kind}"].plain
    sample = every.make(bias=False)

    def make() -> tuple[object, tuple[Tensor, ...]]:
        leaves = [
            distribute_tensor(each.detach(), mesh, [Replicate()])
            for each in (sample.input, sample.weight, sample.target)
        ]
        assert all(isinstance(each, DTensor) for each in leaves)

        def step(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return user(input, weight, target, None, {})

        return step, (*leaves,)

    torch._dynamo.reset()
    backend = rewriting.Backend()
    function, inputs = make()
    compiled = torch.compile(function, backend=backend)
    loss = compiled(*inputs)
    assert not backend.our_nodes
    every.assert_close(loss.full_tensor(), function(*inputs).full_tensor())


@pytest.mark.fault("B78")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_flat_shard_of_a_head_is_refused_by_name(entry: Entry) -> None:
    """What is left of an FSDP parameter outside its module: a piece of one dimension."""
    sample = every.make(bias=False)
    flat = sample.weight.flatten()[: sample.weight.numel() // 2]
    extra = every.extra_for(sample.input, sample.weight)
    with pytest.raises(ValueError, match=r"weight: expected shape \[V, D\]") as caught:
        entry.ours(sample.input, flat, sample.target, None, extra)
    assert "gathered" in str(caught.value)


# Two ranks with a norm and a head in one FSDP unit; the head is read inside its unit. The ranks are
# threads, since on some virtual machines gloo's sockets are refused half of the time.
_FSDP = """
import concurrent.futures
import copy
import os
import threading
import traceback
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils._python_dispatch import TorchDispatchMode
from greyhound_ops import functional

ROWS, CHUNK = 24, 3
calls = threading.local()


class Gathers(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace != "aten" and "gather" in func.__name__
        return func(*args, **(kwargs or {}))


class Stopped(Exception):
    pass


def stop(logits, target):
    calls.made = getattr(calls, "made", 0) + 1
    if calls.made == 2:
        raise Stopped
    return logits.sum(), torch.zeros_like(logits)


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.head = nn.Linear(8, 19, bias=False, dtype=torch.float64)

    def forward(self, x, target, how):
        hidden = self.norm(x)
        if how == "plain":
            return F.cross_entropy(self.head(hidden), target)
        if how == "stopped":
            return functional.chunked_linear_loss(
                hidden, self.head.weight, stop, target, chunk_size=CHUNK
            )
        return functional.chunked_linear_cross_entropy(
            hidden, self.head.weight, target, chunk_size=CHUNK
        )


def work(rank, store, whole, x, target):
    torch.autograd.set_multithreading_enabled(False)  # a rank's own thread is its backward's
    dist.init_process_group("threaded", store=store, rank=rank, world_size=2)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)))
    (1.7 * sum(whole(x[each], target[each], "plain") for each in range(2)) / 2).backward()

    def check():
        loss = sharded(x[rank], target[rank], "ours")
        (1.7 * loss).backward()
        torch.testing.assert_close(loss, whole(x[rank], target[rank], "plain"))
        for ours, plain in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)

    # Outside its unit the head is a shard, which is refused and not read.
    try:
        functional.chunked_linear_cross_entropy(x[rank], sharded.head.weight, target[rank])
    except TypeError as error:
        assert "DTensor" in str(error)
    else:
        raise AssertionError("a shard was taken for the head")

    with Gathers() as gathers:
        (1.7 * sharded(x[rank], target[rank], "ours")).backward()
    # The unit is the root: it stays gathered until the backward.
    assert gathers.count == 1, gathers.count

    sharded.zero_grad()
    check()
    sharded.zero_grad()  # here: after the error FSDP shows its gathered parameters
    try:
        sharded(x[rank], target[rank], "stopped")
    except Stopped:
        assert calls.made == 2
    else:
        raise AssertionError("nothing was raised")
    check()


torch.set_num_threads(1)
torch._C._distributed_c10d._set_thread_isolation_mode(True)
multi_threaded_pg._install_threaded_pg()
torch.manual_seed(0)
whole = Step()
x = torch.randn(2, ROWS, 8, dtype=torch.float64)
target = torch.randint(0, 19, (2, ROWS))
store = dist.HashStore()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    works = [pool.submit(work, rank, store, copy.deepcopy(whole), x, target) for rank in range(2)]
    for each in concurrent.futures.as_completed(works):
        if each.exception() is not None:  # the other rank waits for this one
            traceback.print_exception(each.exception())
            os._exit(1)
print("both ranks agree", flush=True)
# A backward in a thread starts one of torch's, which aborts the process if the interpreter ends
# while it starts: 2 of 12 times in a program of plain torch alone, on a busy machine.
os._exit(0)
"""


@pytest.mark.fault("B77", "B81", "B82")
@needs_distributed
def test_head_in_a_sharded_unit() -> None:
    """One gather per call, plain torch's gradients, and again after an error in a chunk."""
    assert "both ranks agree" in run_python(_FSDP).stdout


@pytest.mark.fault("B82")
@over(lambda entry: entry.name in ("linear-loss", "linear-loss-direct"))
def test_error_in_the_second_chunk_leaves_nothing_behind(entry: Entry) -> None:
    """The operands are tensors: no module is called, no mode is entered and left on."""
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    calls = 0

    def stop(logits: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise InterruptedError
        return every.focal(logits, target)

    operands = every.leaves(sample)
    function = functional.autograd_loss_and_logits_grad(stop)
    with pytest.raises(InterruptedError):
        functional.chunked_linear_loss(
            operands["input"], operands["weight"], function, sample.target, chunk_size=5
        )
    assert calls == 2
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert all(leaf.grad is None for leaf in operands.values())
    every.check(entry, sample)
    assert extra["advantages"].isfinite().all()


@pytest.mark.fault("B85")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_operands_on_two_devices(entry: Entry) -> None:
    """The meta device stands for another GPU: its tensors must not be read here."""
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    for name in ("weight", "bias", "target"):
        moved = sample.replace(**{name: getattr(sample, name).to("meta")})
        if name == "target" and entry.name.startswith("linear-loss"):
            continue  # an argument of the user's callable, whose products say so themselves
        error = rf"{name}: expected a tensor on the device of input, cpu, got meta"
        with pytest.raises(ValueError, match=error):
            entry.ours(moved.input, moved.weight, moved.target, moved.bias, extra)


@pytest.mark.fault("B85")
@pytest.mark.parametrize("name", ["cross_entropy", "selective_log_softmax"])
def test_labels_on_another_device_than_the_logits(name: str) -> None:
    target = torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"device of logits, cpu, got meta"):
        getattr(functional, name)(torch.randn(3, 5), target)


@pytest.mark.fault("B85", "B88")
@pytest.mark.parametrize("how", ["int", "float", "tensor", "integer tensor"])
def test_count_as_a_number_or_a_tensor(how: str) -> None:
    sample = samples.make_sample(dtype=torch.float64)
    count = {
        "int": 7,
        "float": 7.0,
        "tensor": torch.tensor(7.0),
        "integer tensor": torch.tensor(7),
    }[how]
    loss = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, denominator=count
    )
    total = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, reduction="sum"
    )
    every.assert_close(loss, total / 7)


class Adapted(nn.Module):
    """A head with a low-rank adapter beside it, in the ways in which adapters are written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.base = nn.Linear(6, 23)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6))
        self.up = nn.Parameter(torch.randn(23, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "merged":
            logits = F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        else:
            logits = self.base(x) + F.linear(F.linear(x, self.down), self.up) * 0.5
        return F.cross_entropy(logits, y)


@pytest.mark.fault("B86")
@pytest.mark.parametrize("how", ["merged", "beside"])
def test_adapted_head_with_a_bias_is_rewritten_whole_or_left(how: str) -> None:
    """`rewriting.check` compares loss and the gradients of every parameter and input."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Adapted(how), (torch.randn(12, 6, requires_grad=True), torch.arange(12))

    backend = rewriting.check(make)
    if how == "merged":
        assert backend.our_nodes, rewriting.reasons()


@pytest.mark.fault("B86")
def test_hook_of_a_head_is_not_bypassed() -> None:
    """What wraps a head by a hook is in the graph, before it is rewritten."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = Adapted("beside")
        module.base.register_forward_hook(lambda module, args, output: output * 0.5)
        return module, (torch.randn(12, 6, requires_grad=True), torch.arange(12))

    rewriting.check(make)
