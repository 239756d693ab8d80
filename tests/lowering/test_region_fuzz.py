"""Random graphs between projections and a loss: right if rewritten, left where rows meet.

Each example is a piece of source, shown when it fails. ``GREYHOUND_FUZZ_EXAMPLES`` asks for more
examples, other ones in every run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import random
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import greyhound_lowering
from lowering.rewriting import Backend, Result, reasons, run

D = 3
MORE = os.environ.get("GREYHOUND_FUZZ_EXAMPLES")
EXAMPLES = int(MORE or 50)

#: In fp64: rounding, and room for graphs that cancel.
TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Wide:
    """A value of the source.

    Attributes:
        name: In the source.
        shape: Of its tensor.
        labels: Per dimension ``r`` for rows or ``c`` for anything else.
        mixed: Whether rows met on the way to it, while it was wide.
        heads: The projections that it comes from.
    """

    name: str
    shape: tuple[int, ...]
    labels: str
    mixed: bool
    heads: frozenset[int]

    def dims(self, label: str) -> list[int]:
        return [dim for dim, each in enumerate(self.labels) if each == label]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Writer:
    """Draws a function of hidden states, heads and other tensors."""

    def __init__(self, seed: int) -> None:
        # Not drawn one by one: few examples would cover little of what there is.
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.others: list[tuple[str, tuple[int, ...]]] = []  # kind and shape
        self.rows = self.one(
            (12,), (2, 6), (6, 2), (5, 5), (17,), (3, 1), (1, 5), (2, 3, 2), (1,), (17, 2)
        )
        self.classes = self.one(17, 20, 24)
        self.heads = self.one(1, 1, 2)
        self.total = math.prod(self.rows) * self.classes
        self.values: list[Wide] = []
        for head in range(self.heads):
            self.add(
                f"F.linear(x{head}, w{head}, b{head})",
                (*self.rows, self.classes), "r" * len(self.rows) + "c", False, frozenset([head]),
            )  # fmt: skip

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def add(
        self, text: str, shape: tuple[int, ...], labels: str, mixed: bool, heads: frozenset[int]
    ) -> Wide:
        made = Wide(f"v{len(self.lines)}", shape, labels, mixed, heads)
        self.lines.append(f"{made.name} = {text}")
        self.values.append(made)
        return made

    def other(self, kind: str, shape: tuple[int, ...]) -> str:
        """A tensor from outside: ``fixed``, ``learned``, ``bool`` or ``index:K``."""
        self.others.append((kind, shape))
        return f"o{len(self.others) - 1}"

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to another."""
        sizes = tuple(size if self.one(True, True, False) else 1 for size in shape)
        return sizes[self.one(0, 0, 1) :] if len(sizes) > 1 else sizes

    # ------------------------------------------------------------------------------- steps

    def step(self, *, may_mix: bool) -> None:
        v = self.values[-1] if self.one(True, True, False) else self.one(*self.values)
        if v.elements * 16 <= self.total or "c" not in v.labels:
            v = self.values[0]
        if may_mix and self.one(True, False):
            self.mix(v)
        else:
            self.keep(v)

    def keep(self, v: Wide) -> Wide:
        """A step that keeps rows apart."""
        n, c = v.name, self.one(*v.dims("c"))
        size = v.shape[c]

        def same(text: str) -> Wide:
            return self.add(text, v.shape, v.labels, v.mixed, v.heads)

        kind = self.one(
            "unary", "unary", "classes", "statistic", "statistic", "outside", "outside", "where",
            "one_hot", "slice", "move", "flatten", "unflatten", "stack", "join", "detach", "rows",
            "unsqueeze", "half", "swap",
        )  # fmt: skip
        if kind == "unary":
            op = self.one("{}.tanh()", "{} * 0.7", "F.softplus({})", "{}.sigmoid()", "-{}",
                          "({}.tanh()).exp()", "F.gelu({})", "{}.clamp(-1.5, 2.0)")  # fmt: skip
            return same(op.format(n))
        if kind == "classes":
            op = self.one("log_softmax({})", "softmax({})", "cumsum({})", "flip({})",
                          "sort({}).values")  # fmt: skip
            return same(f"{n}.{op.format(c)}")
        if kind == "statistic":
            op = self.one("logsumexp", "mean", "amax", "sum", *(["std"] if size > 1 else []))
            how = self.one("{} - {}", "{} / (2.5 + {}.square())")
            return same(how.format(n, f"{n}.{op}({c}, keepdim=True)"))
        if kind == "outside":
            o = self.other(self.one("fixed", "learned"), self.broadcast(v.shape))
            return same(self.one("{} * {}", "{} + {}", "torch.maximum({}, {})").format(n, o))
        if kind == "where":
            o = self.other("bool", self.broadcast(v.shape))
            return same(self.one("{}.masked_fill({}, 0.3)", "torch.where({1}, {0}, -0.5)",
                                 "{} * ~{}").format(n, o))  # fmt: skip
        if kind == "one_hot" and v.labels == "r" * (len(v.labels) - 1) + "c":
            o = self.other(f"index:{size}", v.shape[:-1])
            return same(f"{n} - F.one_hot({o}, {size}) * 0.5")
        if kind == "slice" and size > 3:
            start, step = self.one(0, 1, 2), self.one(1, 1, 2)
            shape = list(v.shape)
            shape[c] = len(range(start, size - 1, step))
            cut = ", ".join([":"] * c + [f"{start}:-1:{step}"])
            return self.add(f"{n}[{cut}]", tuple(shape), v.labels, v.mixed, v.heads)
        if kind == "move":
            to = self.one(*range(len(v.shape)))
            order = [dim for dim in range(len(v.shape)) if dim != c]
            order.insert(to, c)
            return self.permuted(v, order, v.mixed)
        if kind == "flatten" and v.labels.startswith("rr"):
            shape = (v.shape[0] * v.shape[1], *v.shape[2:])
            how = self.one("flatten(0, 1)", f"reshape({', '.join(map(str, shape))})")
            return self.add(f"{n}.{how}", shape, v.labels[1:], v.mixed, v.heads)
        if kind == "unflatten" and size % 4 == 0:
            shape = (*v.shape[:c], 4, size // 4, *v.shape[c + 1 :])
            labels = v.labels[:c] + "cc" + v.labels[c + 1 :]
            text = f"{n}.unflatten({c}, (4, {size // 4}))"
            return self.add(text, shape, labels, v.mixed, v.heads)
        if kind == "stack":
            return same(f"torch.stack([{n}, {n} * 0.5]).logsumexp(0)")
        if kind == "join":
            alike = [
                each for each in self.values if (each.shape, each.labels) == (v.shape, v.labels)
            ]
            w = self.one(*alike)
            return self.add(
                self.one("{} * {}", "{} - 0.3 * {}").format(n, w.name),
                v.shape, v.labels, v.mixed or w.mixed, v.heads | w.heads,
            )  # fmt: skip
        if kind == "swap" and len(v.dims("r")) > 1:
            one, other = self.random.sample(v.dims("r"), 2)
            order = list(range(len(v.shape)))
            order[one], order[other] = other, one
            return self.permuted(v, order, v.mixed)
        if kind == "detach":
            return same(f"{n} * {n}.detach().tanh()")
        if kind == "rows" and v.dims("r") and self.one(True, False):
            r = self.one(*v.dims("r"))
            if v.shape[r] > 2:
                shape = list(v.shape)
                shape[r] -= 1
                cut = ", ".join([":"] * r + [self.one("1:", ":-1")])
                return self.add(f"{n}[{cut}]", tuple(shape), v.labels, v.mixed, v.heads)
        if kind == "unsqueeze":
            at = self.one(*range(len(v.shape) + 1))
            shape = (*v.shape[:at], 1, *v.shape[at:])
            labels = v.labels[:at] + "c" + v.labels[at:]
            return self.add(f"{n}.unsqueeze({at})", shape, labels, v.mixed, v.heads)
        if kind == "half" and size > 3:
            shape = (*v.shape[:c], size // 2, *v.shape[c + 1 :])
            text = f"{n}.split([{size // 2}, {size - size // 2}], {c})[0]"
            return self.add(text, shape, v.labels, v.mixed, v.heads)
        return same(f"{n} + 0.1")

    def permuted(self, v: Wide, order: list[int], mixed: bool) -> Wide:
        return self.add(
            f"{v.name}.permute({', '.join(map(str, order))})",
            tuple(v.shape[dim] for dim in order), "".join(v.labels[dim] for dim in order),
            mixed, v.heads,
        )  # fmt: skip

    def mix(self, v: Wide) -> Wide:
        """A step in which rows meet, where there is more than one of them."""
        many = [dim for dim in v.dims("r") if v.shape[dim] > 1]
        if not many:
            return self.keep(v)
        n, r = v.name, self.one(*many)
        size = v.shape[r]
        texts = [
            f"{n} - {n}.mean({r}, keepdim=True)",
            f"{n}.softmax({r})",
            f"{n}.cumsum({r})",
            f"{n} - {n}.flip({r})",
            f"{n} * {n}.roll(1, {r}).tanh()",
            f"{n}.sort({r}).values",
            f"{n} - {n}.mean()",
            f"{n} * {n}.select({r}, 0).unsqueeze({r})",
            f"{n} - {n}.index_select({r}, {self.other(f'index:{size}', (size,))})",
            f"{n} / (3.0 + {n}.square().amax({r}, keepdim=True))",
        ]
        for other in range(len(v.shape)):
            if other != r and v.shape[other] == size:
                texts += [f"{n} - {n}.transpose({r}, {other})"] * 4
        c = v.dims("c")[-1]
        last = v.shape[-1:]
        narrow = (*v.shape[:c], *v.shape[c + 1 :])
        if narrow[-1:] == last and v.labels[-1] == "c" and v.labels[:c].endswith("r") and size > 1:
            texts += [f"{n} - {n}.logsumexp({c})"] * 4 if v.shape[-2] > 1 else []
        return self.add(self.one(*texts), v.shape, v.labels, True, v.heads)

    # -------------------------------------------------------------------------------- ends

    def term(self, v: Wide) -> str:
        """A number made of a wide value."""
        n, c = v.name, v.dims("c")
        kind = self.one("lse", "sum", "gather", "best", "metric", "all")
        if kind == "sum":
            return f"{n}.square().sum({tuple(c)}).add(1).sqrt().mean()"
        if kind == "gather" and v.labels.count("c") == 1:
            shape = list(v.shape)
            shape[c[0]] = self.one(1, 2)
            o = self.other(f"index:{v.shape[c[0]]}", tuple(shape))
            return f"{n}.gather({c[0]}, {o}).square().mean()"
        if kind == "best":
            return f"{n}.amax({tuple(c)}).sum()"
        if kind == "metric":
            return f"({n}.logsumexp({tuple(c)}) * ({n}.argmax({c[-1]}) > 3).double().mean()).sum()"
        if kind == "all":
            return f"{n}.{self.one('mean()', 'sum()', 'square().mean()')}"
        lse = f"{n}.logsumexp({tuple(c)})"
        rows = tuple(size for size, label in zip(v.shape, v.labels, strict=True) if label == "r")
        after = self.one(
            "{}.mean()", "{}.std()", "({} * {w}).sum()", "{}.cumsum(0).square().mean()",
            "({}.flip(0) * {w}).mean()",
        )  # fmt: skip
        if not rows or math.prod(rows) < 2:
            after = "{}.square().sum()"
        w = self.other("learned", rows) if "{w}" in after else ""
        return after.format(lse, w=w)

    def finish(self) -> tuple[str, list[Wide]]:
        """The source, and the values that the loss is made of."""
        used = [self.values[-1]]
        if self.heads == 2 and self.values[1] not in used and self.one(True, False):
            used.append(self.values[1])
        if self.one(True, False):
            used.append(self.one(*self.values))
        terms = [self.term(v) for v in used]
        names = [f"{each}{head}" for head in range(self.heads) for each in "xwb"]
        names += [f"o{index}" for index in range(len(self.others))]
        body = "\n    ".join([*self.lines, "return " + " + ".join(terms)])
        return f"def f({', '.join(names)}):\n    {body}\n", used

    def tensors(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int, grad: bool = True) -> Tensor:
            made = torch.randn(shape, generator=generator, dtype=torch.float64)
            return made.requires_grad_(grad)

        made: list[Tensor] = []
        for _ in range(self.heads):
            made += [normal(*self.rows, D), normal(self.classes, D), normal(self.classes)]
        for kind, shape in self.others:
            if kind == "bool":
                made.append(torch.rand(shape, generator=generator) > 0.5)
            elif kind.startswith("index"):
                made.append(torch.randint(0, int(kind[6:]), shape, generator=generator))
            else:
                made.append(normal(*shape, grad=kind == "learned"))
        return tuple(made)


def compare(plain: Result, value: Result) -> None:
    """Check loss and gradients; the absolute part is for graphs whose true gradient is zero."""
    torch.testing.assert_close(
        value.loss, plain.loss, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )
    for name, expected in plain.grads.items():
        got = value.grads[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            room = TOLERANCE * (1 + float(expected.nan_to_num().abs().max()))
            torch.testing.assert_close(got, expected, rtol=0, atol=room, equal_nan=True)


def run_one(seed: int, steps: int, may_mix: bool, counts: collections.Counter[str]) -> None:
    writer = Writer(seed)
    for _ in range(steps):
        writer.step(may_mix=may_mix)
    source, used = writer.finish()
    note(source)
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, "<graph>", "exec"), names)
    dynamic = writer.one(False, False, True)
    note(f"rows {writer.rows}, classes {writer.classes}, others {writer.others}, {dynamic=}")
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    backend = Backend(chunk_size=4)
    inputs = writer.tensors()
    plain = run(names["f"], inputs)
    inputs = writer.tensors()
    compiled = torch.compile(names["f"], backend=backend, dynamic=dynamic)
    try:
        value = run(names["f"], inputs, compiled=compiled)
    except Exception:
        # AOTAutograd cannot trace a few of these graphs with dynamic shapes, rewritten or not.
        torch._dynamo.reset()
        compiled = torch.compile(names["f"], backend="aot_eager", dynamic=dynamic)
        try:
            run(names["f"], writer.tensors(), compiled=compiled)
        except Exception:
            counts["untraceable"] += 1
            return
        raise
    compare(plain, value)
    mixed = frozenset[int]().union(*(v.heads for v in used if v.mixed))
    taken = len(backend.region_nodes)
    counts["rewritten" if taken else "left"] += 1
    counts["mixed"] += bool(mixed)
    note(f"{reasons()}")
    if len(mixed) == writer.heads:
        assert not taken
        assert backend.unchanged


def test_random_graphs() -> None:
    counts: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=EXAMPLES, derandomize=MORE is None, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 6]), st.booleans())
    def one(seed: int, steps: int, may_mix: bool) -> None:
        run_one(seed, steps, may_mix, counts)

    one()
    # Neither everything left alone nor nothing that mixes rows.
    assert counts["rewritten"] * 3 > EXAMPLES, counts
    assert counts["mixed"] * 10 > EXAMPLES, counts
    assert counts["untraceable"] * 20 < EXAMPLES, counts
