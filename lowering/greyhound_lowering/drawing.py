"""Pictures of a graph before and after the rewrite, for the HTML report.

Only what lies around the projections is drawn: of a large model that is a small part. A picture is
an SVG made by hand from the nodes in layers, without anything from outside.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, fx

from greyhound_lowering.follow import step_name
from greyhound_ops import torch_private

State = Literal["kept", "erased", "new"]

#: Most nodes of one picture; those farthest from the projections are left out.
MOST_NODES = 48

_MOST_LETTERS = 27  # of a line in a box
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 38, 18, 34, 12


@dataclasses.dataclass(frozen=True)
class DrawnNode:
    """A node of a graph as plain data.

    Attributes:
        name: Its name in the graph.
        label: What it calls.
        shape: Shape and dtype of its value, or an empty string.
        elements: Elements of its value at the sizes the graph was traced with; 0 if unknown.
        inputs: Names of the nodes it reads.
        is_value: Whether it computes something, as against an input or the output.
        state: Whether the rewrite erased or made it.
        is_wide: Whether its value has as many elements as logits have.
    """

    name: str
    label: str
    shape: str
    elements: int
    inputs: tuple[str, ...]
    is_value: bool
    state: State = "kept"
    is_wide: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """One graph before and after.

    Attributes:
        graph: Its running number in this process.
        before: Nodes around its projections as Dynamo made them.
        after: What is there instead; empty if nothing was rewritten.
        left_out: Nodes that would be near enough but are too many.
    """

    graph: int
    before: tuple[DrawnNode, ...]
    after: tuple[DrawnNode, ...]
    left_out: int


def nodes_of(graph: fx.Graph) -> list[DrawnNode]:
    """All nodes of a graph, in order."""
    return [_read(node) for node in graph.nodes]


def _read(node: fx.Node) -> DrawnNode:
    value = node.meta.get("example_value")
    shape, elements = "", 0
    if isinstance(value, Tensor):
        shape = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        sizes = [torch_private.size_hint(size) for size in value.shape]
        elements = 0 if None in sizes else math.prod(size or 0 for size in sizes)
    computes = node.op in ("call_function", "call_method")
    return DrawnNode(
        name=node.name,
        label=_label(node) if computes else node.op,
        shape=shape,
        elements=elements,
        inputs=tuple(each.name for each in node.all_input_nodes),
        is_value=computes,
    )


def _label(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        namespace = "" if node.target.namespace == "aten" else f"{node.target.namespace}::"
        return namespace + node.target._schema.name.split("::")[-1]
    return step_name(node)


def compare(
    graph: int, heads: Sequence[str], before: list[DrawnNode], after: list[DrawnNode]
) -> Picture:
    """What to draw of a graph.

    Args:
        graph: Its running number.
        heads: Names of the projections that were decided on.
        before: `nodes_of` the graph as it was.
        after: `nodes_of` the graph as it is.
    """
    old, new = {node.name for node in before}, {node.name for node in after}
    least = min((node.elements for node in before if node.name in heads), default=0) / 2
    marked_before = [_marked(node, "erased" if node.name not in new else "kept", least)
                     for node in before]  # fmt: skip
    marked_after = [_marked(node, "new" if node.name not in old else "kept", least)
                    for node in after]  # fmt: skip
    erased = [node.name for node in marked_before if node.state == "erased"]
    made = [node.name for node in marked_after if node.state == "new"]
    drawn, left_out = _around([*erased, *heads], marked_before, steps=1 if erased else 3)
    if not made:
        return Picture(graph, drawn, (), left_out)
    instead, more = _around([*made, *heads], marked_after, steps=1)
    return Picture(graph, drawn, instead, left_out + more)


def _marked(node: DrawnNode, state: State, least: float) -> DrawnNode:
    wide = node.is_value and 0 < least <= node.elements
    return dataclasses.replace(node, state=state, is_wide=wide)


def _around(
    names: Iterable[str], nodes: list[DrawnNode], steps: int
) -> tuple[tuple[DrawnNode, ...], int]:
    """Some nodes and their neighbours in the order of the graph, and how many were too many."""
    by_name = {node.name: node for node in nodes}
    readers: dict[str, list[str]] = {name: [] for name in by_name}
    for node in nodes:
        for each in node.inputs:
            readers[each].append(node.name)
    chosen = dict.fromkeys(name for name in names if name in by_name)
    edge = list(chosen)
    for _ in range(steps):
        beyond: dict[str, None] = {}
        for name in edge:
            beyond.update(dict.fromkeys((*by_name[name].inputs, *readers[name])))
        edge = [name for name in beyond if name not in chosen]
        chosen.update(dict.fromkeys(edge))
    kept = set(list(chosen)[:MOST_NODES])
    return tuple(node for node in nodes if node.name in kept), len(chosen) - len(kept)


# ---------------------------------------------------------------------------------------- SVG

STYLE = """
svg { background: #fff; border: 1px solid #ccc; max-width: 100%; height: auto; }
svg text { font: 11px ui-monospace, monospace; fill: #222; }
svg .box { fill: #f4f4f4; stroke: #888; }
svg .wide { fill: #ffd9a8; stroke: #b25f00; stroke-width: 1.5; }
svg .erased { stroke: #c00; stroke-dasharray: 5 3; }
svg .new { fill: #cdeccd; stroke: #1a7a1a; stroke-width: 1.5; }
svg .new.wide { fill: #ffd9a8; }
svg .cross { stroke: #c00; stroke-width: 1; opacity: 0.5; }
svg .edge { fill: none; stroke: #999; }
"""


def svg(nodes: Sequence[DrawnNode], title: str) -> str:
    """Nodes in layers from top to bottom, each below all that it reads."""
    places = _places(nodes)
    columns = max((x for x, _ in places.values()), default=0)
    rows = max((y for _, y in places.values()), default=0)
    width = int(columns + _BOX_WIDTH + _MARGIN)
    height = int(rows + _BOX_HEIGHT + _MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{html.escape(title)}</title>",
    ]
    for node in nodes:
        for each in node.inputs:
            if each in places:
                parts.append(_edge(places[each], places[node.name]))
    parts += [_box(node, *places[node.name]) for node in nodes]
    return "\n".join([*parts, "</svg>"])


def _places(nodes: Sequence[DrawnNode]) -> dict[str, tuple[float, float]]:
    """Upper left corner of each box: by layer, in a layer near what it reads."""
    layer: dict[str, int] = {}
    for node in nodes:
        layer[node.name] = 1 + max(
            (layer[each] for each in node.inputs if each in layer), default=-1
        )
    # An input stands right above its first reader and not with all others at the top.
    readers: dict[str, int] = {}
    for node in nodes:
        for each in node.inputs:
            readers[each] = min(readers.get(each, layer[node.name]), layer[node.name])
    for node in nodes:
        if not any(each in layer for each in node.inputs) and node.name in readers:
            layer[node.name] = readers[node.name] - 1
    places: dict[str, tuple[float, float]] = {}
    for level in range(max(layer.values(), default=-1) + 1):
        members = [node for node in nodes if layer[node.name] == level]
        above = {
            node.name: [places[each][0] for each in node.inputs if each in places]
            for node in members
        }
        wished = {
            name: sum(at) / len(at) if at else math.inf  # an input: behind the others
            for name, at in above.items()
        }
        x = float(_MARGIN)
        for node in sorted(members, key=lambda each: wished[each.name]):
            at = max(x, wished[node.name]) if math.isfinite(wished[node.name]) else x
            places[node.name] = (at, _MARGIN + level * (_BOX_HEIGHT + _GAP_Y))
            x = at + _BOX_WIDTH + _GAP_X
    return places


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x1, y1 = source[0] + _BOX_WIDTH / 2, source[1] + _BOX_HEIGHT
    x2, y2 = target[0] + _BOX_WIDTH / 2, target[1]
    middle = (y1 + y2) / 2
    curve = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{middle:.0f} {x2:.0f},{middle:.0f} {x2:.0f},{y2:.0f}"
    return f'<path class="edge" d="{curve}"/>'


def _box(node: DrawnNode, x: float, y: float) -> str:
    style = " ".join(
        [
            "box",
            *([node.state] if node.state != "kept" else []),
            *(["wide"] if node.is_wide else []),
        ]
    )
    # The end of a parameter's name tells it apart, the beginning of anything else.
    is_input = node.label in ("placeholder", "get_attr")
    first = node.name[-_MOST_LETTERS:] if is_input else _short(node.label)
    lines = [
        f"<g><title>{html.escape(f'{node.name}: {node.label} {node.shape}')}</title>",
        f'<rect class="{style}" x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="4"/>',
        f'<text x="{x + 7:.0f}" y="{y + 15:.0f}">{html.escape(first)}</text>',
        f'<text x="{x + 7:.0f}" y="{y + 30:.0f}">{html.escape(_short(node.shape))}</text>',
    ]
    if node.state == "erased":
        lines.append(
            f'<line class="cross" x1="{x:.0f}" y1="{y:.0f}" x2="{x + _BOX_WIDTH:.0f}" '
            f'y2="{y + _BOX_HEIGHT:.0f}"/>'
        )
    return "".join([*lines, "</g>"])


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "\u2026"
