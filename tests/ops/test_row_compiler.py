"""Functions of rows compiled by Inductor alone, and what goes through ``torch.compile`` instead."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, torch_private
from greyhound_ops.ops import row_region
from greyhound_ops.ops.row_compiler import MAX_LAYOUTS, MAX_VARIANTS, RowCompiler
from greyhound_ops.testing import peak_memory
from ops.test_row_region import WAYS, compare, make_region

Groups = list[list[Tensor]]


def softmax_and_grad(groups: Groups) -> list[list[Tensor | None]]:
    """Values per row and a gradient of every element, with one result that is None."""
    (logits,), (scale,) = groups
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        wide = torch.promote_types(leaf.dtype, torch.float32)
        value = torch.logsumexp(leaf.to(wide) * scale, 1)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    return [[value.detach(), None], [grad]]


class Compiler:
    """A compiler that counts what it compiled, and what it has left to ``torch.compile``."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        function: Callable[[Groups], Any] = softmax_and_grad,
        by_row: tuple[bool, ...] = (True, False),
    ) -> None:
        self.compiled = self.left = 0
        self.function = function
        self.compiler = RowCompiler(function, by_row)
        inner = torch_private.compile_traced

        def counted(*args: Any) -> Any:
            self.compiled += 1
            return inner(*args)

        patch.setattr(torch_private, "compile_traced", counted)

    def run(self, groups: Groups) -> Any:
        run = self.compiler.compiled(groups)
        if run is not None:
            return run()
        self.left += 1
        return self.function(groups)

    def __call__(self, *groups: list[Tensor]) -> tuple[int, int]:
        """Compare with the function as it is; returns how often either way was taken by now."""
        expected = self.function(list(groups))
        made = self.run(list(groups))
        for one, other in zip(made, expected, strict=True):
            for mine, same in zip(one, other, strict=True):
                assert (mine is None) == (same is None)
                if mine is not None and same is not None:
                    assert mine.dtype == same.dtype
                    torch.testing.assert_close(mine, same)
        return self.compiled, self.left


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


ONE = torch.tensor(1.5)


def test_one_graph_for_every_number_of_rows_but_one(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    compiler, scale = Compiler(monkeypatch), [ONE.to(device)]
    for dtype, before in ((torch.float32, 0), (torch.bfloat16, 2)):
        for rows in (7, 2, 300, 16):
            made = compiler([torch.randn(rows, 33, device=device, dtype=dtype)], scale)
            assert made == (before + 1, 0)
        for _ in range(2):
            made = compiler([torch.randn(1, 33, device=device, dtype=dtype)], scale)
            assert made == (before + 2, 0)


def test_a_single_row_at_first(compiler: Compiler) -> None:
    assert compiler([torch.randn(1, 9)], [ONE]) == (1, 0)
    assert compiler([torch.randn(2, 9)], [ONE]) == (2, 0)
    assert compiler([torch.randn(5, 9)], [ONE]) == (2, 0)
    assert compiler([torch.randn(1, 9)], [ONE]) == (2, 0)


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(4, 16)[:, :9],  # padded rows
        torch.randn(9).expand(4, 9),
        torch.randn(4, 1).expand(4, 9),
        torch.randn(4, 10),
        torch.randn(4, 9, dtype=torch.double),
    ],
    ids=["padded", "same rows", "same classes", "more classes", "double"],
)
def test_what_a_graph_is_made_for(compiler: Compiler, other: Tensor) -> None:
    for number, logits in enumerate((torch.randn(4, 9), other)):
        for rows in (logits, logits[1:]):
            assert compiler([rows], [ONE]) == (number + 1, 0)


def test_strides_that_say_nothing(compiler: Compiler) -> None:
    for rows in (4, 6, 8):
        assert compiler([torch.randn(1, rows).t()], [ONE]) == (1, 0)


def test_many_layouts(compiler: Compiler) -> None:
    logits = [torch.randn(4, 9)]
    for number, shape in enumerate([(), (1,), (4, 1), (9,), (1, 9)]):
        made = compiler(logits, [torch.ones(shape)])
        assert made == (min(number + 1, MAX_LAYOUTS), max(number + 1 - MAX_LAYOUTS, 0))
    assert compiler(logits, [torch.ones(1)]) == (MAX_LAYOUTS, 3)


def test_state_of_the_process(compiler: Compiler) -> None:
    logits = [torch.randn(4, 9)]
    assert compiler(logits, [ONE]) == (1, 0)
    torch.use_deterministic_algorithms(True)
    try:
        assert compiler(logits, [ONE]) == (2, 0)
    finally:
        torch.use_deterministic_algorithms(False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert compiler(logits, [ONE]) == (3, 0)
    finally:
        torch.set_default_dtype(before)
    assert compiler(logits, [ONE]) == (3, 0)
    with torch.device("meta"):  # for factories that name no device
        assert compiler([each[:3] for each in logits], [ONE]) == (3, 0)


class Kind(torch.Tensor):
    """A subclass, which may do anything."""


@pytest.mark.parametrize(
    "logits",
    [
        torch.randn(9, 4).t(),  # the stride inside a row is the number of rows
        torch.randn(4, 9).as_subclass(Kind),
        torch._neg_view(torch.randn(4, 9)),
    ],
    ids=["transposed", "subclass", "negated"],
)
def test_tensors_for_dynamo(compiler: Compiler, logits: Tensor) -> None:
    assert compiler([logits], [ONE]) == (0, 1)


def test_rows_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(groups: Groups) -> list[list[Tensor | None]]:
        return [[groups[0][0] + groups[0][1]]]

    compiler = Compiler(monkeypatch, add, (True,))
    assert compiler([torch.randn(4, 3), torch.randn(4, 3)]) == (1, 0)
    with pytest.raises(RuntimeError, match="must match the size"):
        compiler.run([[torch.randn(4, 3), torch.randn(3, 3)]])
    assert compiler([torch.randn(4, 3), torch.randn(1, 3)]) == (1, 2)


def mutating(groups: Groups) -> list[list[Tensor | None]]:
    return [[groups[0][0].clone().add_(1)]]


def holding(groups: Groups) -> list[list[Tensor | None]]:
    return [[groups[0][0] + HELD]]


HELD = torch.tensor(2.0)


def asking(groups: Groups) -> list[list[Tensor | None]]:
    # Of a value, as no trace can.
    return [[groups[0][0] + float(groups[0][0].sum() > 0)]]


@pytest.mark.parametrize("function", [mutating, holding, asking])
def test_functions_for_dynamo(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Groups], Any]
) -> None:
    compiler = Compiler(monkeypatch, function, (True,))
    for number in range(1, 4):
        assert compiler([torch.randn(4, 9)]) == (1, number)


def test_random_functions_are_for_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Compiler(monkeypatch, lambda groups: [[torch.rand_like(groups[0][0])]], (True,))
    for number in range(1, 3):
        noise.run([[torch.randn(4, 9)]])
        assert (noise.compiled, noise.left) == (1, number)


def test_a_function_that_asks_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(groups: Groups) -> list[list[Tensor | None]]:
        (logits,) = groups[0]
        return [[logits * 2 if logits.shape[0] < 10 else logits * 3]]

    compiler = Compiler(monkeypatch, asks, (True,))
    for rows, compiled in ((4, 1), (9, 1), (10, 2), (50, 2), (3, 2)):
        assert compiler([torch.randn(rows, 3)]) == (compiled, 0)


def test_a_function_that_wants_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(groups: Groups) -> list[list[Tensor | None]]:
        (logits,) = groups[0]
        return [[logits * int(logits.shape[0])]]

    compiler = Compiler(monkeypatch, fixed, (True,))
    for rows in range(2, MAX_VARIANTS + 2):
        assert compiler([torch.randn(rows, 3)]) == (rows - 1, 0)
    assert compiler([torch.randn(70, 3)]) == (MAX_VARIANTS, 1)  # torch.compile may do better
    assert compiler([torch.randn(4, 3)]) == (MAX_VARIANTS, 1)


def test_stances(compiler: Compiler) -> None:
    logits = [torch.randn(4, 9)]
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            compiler(logits, [ONE])
    assert (compiler.compiled, compiler.left) == (0, 3)
    assert compiler(logits, [ONE]) == (1, 3)
    # What is compiled runs where nothing is said against it.
    for stance, left in (("eager_on_recompile", 3), ("fail_on_recompile", 3), ("force_eager", 4)):
        with torch.compiler.set_stance(stance):
            assert compiler(logits, [ONE]) == (1, left)
    with torch._dynamo.config.patch(disable=True):
        assert compiler(logits, [ONE]) == (1, 5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiler([torch.randn(4, 8)], [ONE]) == (2, 5)


def test_capture(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [torch.randn(4, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "is_capturing", lambda: True)
        assert compiler(logits, [ONE]) == (0, 1)
    assert compiler(logits, [ONE]) == (1, 1)
    monkeypatch.setattr(torch_private, "is_capturing", lambda: True)
    assert compiler(logits, [ONE]) == (1, 1)
    assert compiler([torch.randn(4, 8)], [ONE]) == (1, 2)


def test_threads(compiler: Compiler) -> None:
    logits, failures = [torch.randn(6, 9)], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        try:
            for _ in range(3):
                compiler(logits, [ONE])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert (compiler.compiled, compiler.left) == (1, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_any_alignment(monkeypatch: pytest.MonkeyPatch, first: int, device: torch.device) -> None:
    compiler, scale = Compiler(monkeypatch), [ONE.to(device)]
    flat = torch.randn(40 * 33 + 4, device=device)
    for offset in (first, 1 - first, 3):
        assert compiler([flat[offset : offset + 40 * 33].view(40, 33)], scale) == (1, 0)


def test_nothing_is_left_behind(compiler: Compiler) -> None:
    """No graph or recompilation that Dynamo counts, no CUDA graph, no mode."""
    from torch._dynamo.utils import counters

    counters.clear()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert compiler([torch.randn(4, 9)], [ONE]) == (1, 0)
    assert not counters["stats"]
    assert not counters["inductor"]["cudagraph_skips"]
    assert torch._guards.TracingContext.try_get() is None
    assert not torch_private.is_recording()


def test_results_that_are_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def views(groups: Groups) -> list[list[Tensor | None]]:
        (logits,) = groups[0]
        twice = logits * 2
        return [[logits, logits[:, 1:], logits.t(), twice, twice, twice[:, :2]], []]

    compiler = Compiler(monkeypatch, views, (True,))
    for rows in (4, 1, 7):
        assert compiler([torch.randn(rows, 9)])[1] == 0
    nothing = Compiler(monkeypatch, lambda groups: [[], []], (True,))
    assert nothing([torch.randn(4, 9)])[1] == 0
    same = Compiler(monkeypatch, lambda groups: [[groups[0][0]]], (True,))
    assert same([torch.randn(4, 9)])[1] == 0


def test_without_the_names_of_torch(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [torch.randn(4, 9)]
    for name in ("compile_stance", "process_state"):
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, name, lambda: None)
            compiler(logits, [ONE])
    assert (compiler.compiled, compiler.left) == (0, 2)


def mixed(groups: Groups) -> list[list[Tensor | None]]:
    """A student's divergences from a teacher and its cross entropy, of more operators than Inductor
    puts together by itself.
    """
    (student, teacher, target) = groups[0]
    with torch.enable_grad():
        leaf = student.detach().requires_grad_()
        log_p = (leaf.float() / 2).log_softmax(1)
        log_q = (teacher.float() / 2).log_softmax(1)
        q = log_q.exp()
        forward = torch.special.xlogy(q, q) - q * log_p
        divergence = (forward + log_p.exp() * (log_p - log_q)).sum(1)
        classes = torch.arange(leaf.shape[1], device=leaf.device)
        hit = torch.where(classes == target, leaf.float().log_softmax(1), 0.0).sum(1)
        (grad,) = torch.autograd.grad((divergence - hit).sum(), leaf)
    return [[divergence.detach(), hit.detach()], [grad]]


@pytest.mark.gpu
def test_nothing_wide_but_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch, mixed, (True,))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    student, teacher = torch.randn(2, 256, 32_000, **options).unbind()
    target = torch.randint(32_000, (256, 1), device="cuda")
    assert compiler([student, teacher, target]) == (1, 0)
    with peak_memory(student.device) as peak:
        compiler.run([[student, teacher, target]])
    assert peak.bytes <= student.nbytes + 2**20


# ----------------------------------------------------------------------------------- of a region


@contextlib.contextmanager
def regions_by_inductor_alone(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compiled bodies, none by ``torch.compile``; yields the number of graphs."""
    graphs = [0]
    inner = torch_private.compile_traced

    def counted(*args: Any) -> Any:
        graphs[0] += 1
        return inner(*args)

    def refuse(*args: Any) -> Any:
        raise AssertionError("torch.compile was asked")

    row_region._compiled_chunk.cache_clear()
    with patch.context() as here, config.override(region_body="compiled"):
        here.setattr(torch_private, "compile_traced", counted)
        here.setattr(torch_private, "compile_in_op", lambda function, options: refuse)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*could not be compiled")
            yield graphs
    row_region._compiled_chunk.cache_clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["cross_entropy", "distillation", "both_learn", "dense", "learned"]
)
def test_regions(
    name: str, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (torch.float32, torch.bfloat16) if name in ("dense", "learned") else (torch.bfloat16,)
    passes = 1 if way == "forward" else 2  # values, then gradients
    with regions_by_inductor_alone(monkeypatch) as graphs:
        for number, dtype in enumerate(dtypes):
            for rows in (13, 16, 5):
                compare(
                    make_region(name, rows, dtype=dtype, device=device), WAYS[way], chunk_size=5
                )
                assert graphs == [(number + 1) * passes]


def test_region_of_one_row_a_chunk(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    with regions_by_inductor_alone(monkeypatch) as graphs:
        compare(make_region("learned", 3, device=device), WAYS["forward"], chunk_size=1)
        assert graphs == [1]
        compare(make_region("learned", 6, device=device), WAYS["forward"], chunk_size=3)
        assert graphs == [2]


def test_region_with_padded_and_transposed_rows(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    with regions_by_inductor_alone(monkeypatch):
        region = make_region("dense", 13, device=device)
        (dense,) = region.tensors["row_args"]
        padded = dense.new_zeros(13, 20)[:, 3 : 3 + dense.shape[1]].copy_(dense)
        region.tensors["row_args"] = [padded]
        compare(region, WAYS["forward"], chunk_size=5)
    with config.override(region_body="compiled"):
        region.tensors["row_args"] = [dense.t().contiguous().t()]
        compare(region, WAYS["forward"], chunk_size=5)


def gradient_and(groups: Groups, *others: Callable[[Tensor], Tensor]) -> list[list[Tensor | None]]:
    (logits,) = groups[0]
    wide = logits.float()
    grad = (wide - wide.logsumexp(1, keepdim=True)).exp().to(logits.dtype)
    return [[other(logits) for other in others], [grad]]


@pytest.mark.parametrize("padded", [False, True])
def test_a_donated_tensor_is_written_over(device: torch.device, padded: bool) -> None:
    compiler = RowCompiler(gradient_and, (True,), donates=True)
    for rows in (40, 7):
        logits = torch.randn(rows, 40, device=device).bfloat16()[:, : 33 if padded else 40]
        (expected,) = gradient_and([[logits]])[1]
        run = compiler.compiled([[logits]])
        assert run is not None
        ((made,),) = run()[1:]
        assert made is not None
        assert expected is not None
        torch.testing.assert_close(made, expected)
        if not padded:
            assert made.data_ptr() == logits.data_ptr()


def test_results_that_are_views_of_a_donated_tensor(device: torch.device) -> None:
    def function(groups: Groups) -> list[list[Tensor | None]]:
        views = lambda z: z[:, 3], lambda z: z[:, 5:7], lambda z: z[:, 8:9].float()
        return gradient_and(groups, *views)

    compiler = RowCompiler(function, (True,), donates=True)
    logits = torch.randn(40, 33, device=device).bfloat16()
    expected = [[each.clone() for each in group] for group in function([[logits]])]  # type: ignore[union-attr]
    run = compiler.compiled([[logits]])
    assert run is not None
    for group, same in zip(run(), expected, strict=True):
        for one, other in zip(group, same, strict=True):
            torch.testing.assert_close(one, other)


def test_nothing_else_is_written_over(device: torch.device) -> None:
    compiler = RowCompiler(gradient_and, (True,))
    logits = torch.randn(40, 32, device=device).bfloat16()
    before = logits.clone()
    run = compiler.compiled([[logits]])
    assert run is not None
    run()
    assert torch.equal(logits, before)


def crossed(groups: Groups) -> list[list[Tensor | None]]:
    """Of each of two tensors something made of the other."""
    first, second = [each for group in groups for each in group]
    return [[second * 2.0], [first * 3.0]]


def test_a_cached_graph_writes_over_what_is_donated_alone(
    device: torch.device, fresh_compiler: None
) -> None:
    # The same graph of two donated tensors and of one must not be one entry of Inductor's cache.
    with torch._inductor.config.patch(fx_graph_cache=True):
        both = RowCompiler(crossed, (True,), donates=True)
        run = both.compiled([[*torch.ones(2, 40, 32, device=device)]])
        assert run is not None
        run()
        one = RowCompiler(crossed, (True, True), donates=True)
        mine, callers = torch.ones(2, 40, 32, device=device).unbind()
        run = one.compiled([[mine], [callers]])
        assert run is not None
        ((doubled,), (tripled,)) = run()
        assert callers.eq(1.0).all()
        assert doubled is not None
        assert doubled.eq(2.0).all()
        assert tripled is not None
        assert tripled.eq(3.0).all()


def test_work_beside_inductors_processes(fresh_compiler: None) -> None:
    calls: list[int] = []
    compiler = RowCompiler(softmax_and_grad, (True, False), meanwhile=lambda: calls.append(1))
    for rows in (5, 6):
        run = compiler.compiled([[torch.randn(rows, 8)], [torch.tensor(2.0)]])
        assert run is not None
        run()
    assert calls == [1]
