"""Compiles a function of rows inside an operator, at the first call and with little delay.

``torch.compile`` spends more on a small differentiated function in front of Inductor than in it:
Dynamo traces the derivative's Python, AOTAutograd traces the result again. A function of ATen
operators is recorded in one run instead and given to Inductor. What Dynamo would then have guarded
is part of a key here; what the key cannot say goes to ``torch.compile`` as before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private

log = logging.getLogger(__name__)

#: Layouts of the same tensors before `torch.compile` takes over, with a symbol for what changes.
MAX_LAYOUTS = 2

#: Graphs of a layout, for numbers of rows and states of the process.
MAX_VARIANTS = 4

#: Inductor writes a value of many operators or reads to memory before it goes on. One of ``[C, V]``
#: in float32 is larger than the logits, and computing it twice is faster than to write and read it.
OPTIONS = {
    "realize_opcount_threshold": 200,
    "realize_reads_threshold": 16,
    "realize_acc_reads_threshold": 32,
    # Else a kernel of many registers is compiled once more, outside the compiler's processes and
    # with smaller blocks, 0.4 s of a first step of 9 (docs/performance.md, "Compile time").
    "dynamic_scale_rblock": False,
    # Rows and classes as two dimensions of a grid: what a row has is then loaded once a block, and
    # not once a logit (docs/performance.md, "Statistics of a region's rows").
    "triton.prefer_nd_tiling": True,
}

Groups = list[list[Tensor]]
#: Takes tensors in groups; returns tensors or None in groups.
GroupsFunction = Callable[[Groups], list[list[Tensor | None]]]


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A compiled graph.

    Attributes:
        function: Takes the list ``[rows, *tensors]``, which it empties.
        serves: Whether it does a number of rows.
        unchanged: Whether the process is as it was.
        present: Per group whether each result is one of the function's or None.
    """

    function: Callable[[list[Any]], Any]
    serves: Callable[[int], bool]
    unchanged: Callable[[], bool]
    present: list[list[bool]]


class RowCompiler:
    """A function of rows that is compiled for any number of them.

    Args:
        function: Of groups of tensors, made of ATen operators; new tensors or None in groups. Which
            are None may depend on nothing but sizes, strides, dtypes and devices.
        by_row: Per group whether its tensors have rows as their first dimension. The first group
            does, and is not empty.
        donates: Whether nobody needs the tensors of the first group afterwards. A result of the
            same size may then be one of them, written over.
        meanwhile: Called while Inductor's processes compile what was recorded.
    """

    def __init__(
        self,
        function: GroupsFunction,
        by_row: tuple[bool, ...],
        *,
        donates: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._function = function
        self._meanwhile = meanwhile
        self._by_row = by_row
        self._donates = donates
        # By kind and layout. A layout without any is one that Inductor alone did not serve.
        self._variants: dict[Any, dict[Any, list[_Variant]]] = {}

    def compiled(self, groups: Groups) -> Callable[[], list[list[Tensor | None]]] | None:
        """The function of some tensors, compiled; nothing has run yet.

        Args:
            groups: Tensors that need no gradient.

        Returns:
            Runs it once and returns the results in groups. None where this is not allowed, or is
            left to ``torch.compile``.
        """
        stance = torch_private.compile_stance()
        key = None if stance is None else self._key(groups)
        if key is None:
            return None
        kind, layout = key
        layouts = self._variants.setdefault(kind, {})
        rows = groups[0][0].shape[0]
        variant = _find(layouts, layout, rows)
        if variant is None and stance == "default" and not torch_private.is_capturing():
            # Looked for once more with the lock: another thread may have compiled it meanwhile.
            with torch_private.compile_lock():
                variant = _find(layouts, layout, rows)
                if variant is None and _may_compile(layouts, layout):
                    variants = layouts.setdefault(layout, [])
                    variants += self._compile(groups)
                    variant = _find(layouts, layout, rows)
        if variant is None:
            return None
        found = variant

        def run() -> list[list[Tensor | None]]:
            made = iter(found.function([rows, *_flat(groups)]))
            return [[next(made) if has else None for has in group] for group in found.present]

        return run

    def _key(self, groups: Groups) -> tuple[Any, Any] | None:
        """What a graph of these tensors depends on besides rows; None for what is not served."""
        rows = groups[0][0].shape[0]
        kind: list[Any] = []
        layout: list[Any] = []
        for by_row, group in zip(self._by_row, groups, strict=True):
            kind.append(len(group))
            for each in group:
                if type(each) is not Tensor or each.layout != torch.strided:
                    return None
                if each.is_conj() or each.is_neg():
                    return None
                shape, stride = tuple(each.shape), each.stride()
                if by_row:
                    # Other rows would be an error that the symbol hides. A stride inside a row may
                    # be the number of rows, as in a transposed tensor: Dynamo has symbols for it.
                    if shape[0] != rows or not _is_dense(shape[1:], stride[1:]):
                        return None
                    layout.append(stride[0])
                    shape, stride = shape[1:], stride[1:]
                layout.append(shape)
                if 1 in shape:  # whose stride is arbitrary
                    stride = tuple(
                        step for size, step in zip(shape, stride, strict=True) if size != 1
                    )
                layout.append(stride)
                kind += (each.dtype, each.device)
        return tuple(kind), tuple(layout)

    def _compile(self, groups: Groups) -> list[_Variant]:
        """A graph for these tensors, or none."""
        present: list[list[bool]] = []
        lengths = [len(group) for group in groups]

        def function(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            made = self._function([[next(given) for _ in range(length)] for length in lengths])
            present[:] = [[each is not None for each in group] for group in made]
            return [each for group in made for each in group if each is not None]

        by_row = [has for has, group in zip(self._by_row, groups, strict=True) for _ in group]
        unchanged = torch_private.process_state()
        if unchanged is None:
            return []
        try:
            options = torch_private.known_options(OPTIONS)
            donated = len(groups[0]) if self._donates else 0
            tensors = list(_flat(groups))
            with torch_private.while_inductor_waits(self._meanwhile):
                made = torch_private.compile_traced(function, tensors, by_row, options, donated)
        except Exception:
            # Torch.compile is next, and its caller says what it says.
            log.debug("not compiled by Inductor alone", exc_info=True)
            return []
        return [] if made is None else [_Variant(*made, unchanged, present)]


def _find(layouts: dict[Any, list[_Variant]], layout: Any, rows: int) -> _Variant | None:
    for each in layouts.get(layout, ()):
        if each.serves(rows) and each.unchanged():
            return each
    return None


def _may_compile(layouts: dict[Any, list[_Variant]], layout: Any) -> bool:
    if layout in layouts:
        return 0 < len(layouts[layout]) < MAX_VARIANTS
    return len(layouts) < MAX_LAYOUTS


def _flat(groups: Groups) -> Iterator[Tensor]:
    return (each for group in groups for each in group)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether strides are those of a contiguous tensor, or zero."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if step not in (0, expected) and size != 1:
            return False
        expected *= size
    return True
