"""The Inductor pass: look at every projection of a graph, rewrite it or say why not."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import re
from typing import Any

from torch import fx

import greyhound_ops
from greyhound_lowering import (
    cross_entropy,
    drawing,
    follow,
    guards,
    plan,
    region,
    returned_logits,
    stacked_heads,
)
from greyhound_lowering.declined import Declined
from greyhound_lowering.projection import (
    Projection,
    example,
    find_projection,
    is_batched_product,
    is_product,
    known,
)
from greyhound_lowering.report import Decision, account
from greyhound_lowering.settings import RewriteSettings, rewrite_allowed
from greyhound_ops import torch_private

#: How the reason begins where logits leave the graph, and what it is where nothing else reads them.
LOGITS_LEAVE = "the logits leave the graph"
NO_READER = "nothing reads the logits"

# Steps that say nothing of what a region computes, and how many of the others are told.
_DULL = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t",
    "movedim", "getitem", "contiguous", "clone", "float", "to", "detach",
}  # fmt: skip
_TOLD = 6

_LOSS_LIKE = re.compile(r"loss$|cross_entropy|softmax|logsumexp|kl_div|log_?sigmoid")


@functools.cache
def source_hash() -> str:
    """Hash of every source that decides what a rewritten graph holds."""
    hasher = hashlib.sha256()
    for package in (greyhound_ops.__file__, __file__):
        folder = pathlib.Path(str(package)).parent
        for path in sorted(folder.rglob("*.py")):
            hasher.update(str(path.relative_to(folder)).encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


class RewritePass(torch_private.graph_pass_base()):  # type: ignore[misc]
    """Pre-grad pass that rewrites projections followed by a loss.

    Args:
        settings: What to look for; part of the cache key, like the sources.
    """

    def __init__(self, settings: RewriteSettings) -> None:
        super().__init__()
        self.settings = settings
        self.active = True

    def uuid(self) -> Any:
        """What Inductor's caches tell graphs of different settings apart by."""
        return ("greyhound", source_hash(), repr(self.settings), self.active, rewrite_allowed())

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        if not self.active or not rewrite_allowed():
            return
        heads = [node for node in graph.nodes if find_projection(node) is not None]
        batched = [node for node in graph.nodes if is_batched_product(node) and _reaches_loss(node)]
        if not heads and not batched:
            return
        number = account.next_graph()
        before, nodes_before = str(graph), drawing.nodes_of(graph)
        decisions = self._decide_stacked(graph, batched, number)
        for decision in decisions:
            account.add(decision)
        decisions = [each for each in decisions if each.verdict == "rewritten"]
        for node in heads:
            if node not in graph.nodes:
                continue  # rewritten with another head
            # Anew: the hidden states may be the loss of a head that was rewritten before.
            projection = find_projection(node)
            assert projection is not None
            made = self._decide(graph, projection, number)
            decisions += made
            for decision in made:
                account.add(decision)
        if any(decision.verdict == "rewritten" for decision in decisions):
            graph.lint()
            torch_private.trace_artifact(
                "greyhound_rewrite",
                lambda: f"before:\n{before}\n\nafter:\n{graph}\n\n{account.report()}",
            )
        if decisions:
            names = [decision.node for decision in decisions]
            account.draw(drawing.compare(number, names, nodes_before, drawing.nodes_of(graph)))

    def _decide_stacked(self, graph: fx.Graph, nodes: list[fx.Node], number: int) -> list[Decision]:
        """Rewrite products with stacked heads, one line for all that are left."""
        made, left = [], []
        for node in nodes:
            described = _described_stacked(node, number)
            known_ops = set(plan.op_nodes(graph))
            try:
                if "cross_entropy" not in self.settings.kinds:
                    raise Declined("the kind cross_entropy is switched off")
                stacked_heads.rewrite(graph, node, self.settings)
            except Declined:
                left.append(node)
            else:
                made.append(
                    Decision(
                        "rewritten",
                        "folded cross_entropy over stacked heads",
                        op=stacked_heads.OP_NAME,
                        chunk_rows=_chunk_rows(graph, known_ops),
                        **described,
                    )
                )
        return [*made, _left_batched(left, number)] if left else made

    def _decide(self, graph: fx.Graph, projection: Projection, number: int) -> list[Decision]:
        """Rewrite one projection if that is safe; nothing for one that is no loss head at all."""
        logits = follow.start(projection)
        described = _described(projection, number)
        of_interest = _reaches_loss(projection.node)
        try:
            guards.check_pays(logits, self.settings)
            guards.check_graph(graph)
        except Declined as declined:
            if not of_interest:
                return []
            return [Decision("left", str(declined), op=None, **described)]
        made = self._attempt(graph, projection, number)
        returned: returned_logits.Returned | None = None
        if isinstance(made, str) and self.settings.returned_logits == "nan":
            returned = returned_logits.find(graph)
        if returned is not None and returned.concerns(projection.node):
            returned.take_out()
            again = self._attempt(graph, projection, number)
            returned.put_back_or_replace()
            if not isinstance(again, str):
                return [
                    dataclasses.replace(
                        each, reason=f"{each.reason}; the logits that are returned are NaN"
                    )
                    if each.node in returned.replaced
                    else each
                    for each in again
                ]
            if again != NO_READER:  # else there is no loss in the graph, as the first reason says
                made = f"{made}; without those that leave: {again}"
        if not isinstance(made, str):
            return made
        if not of_interest:
            return []
        decision = Decision("left", made, op=None, **described)
        value = example(projection.node)
        if LOGITS_LEAVE in made and value is not None and value.requires_grad:
            account.hint(decision)
        return [decision]

    def _attempt(
        self, graph: fx.Graph, projection: Projection, number: int
    ) -> list[Decision] | str:
        """Rewrite a projection with its loss, or say why not.

        A cross entropy has an op of its own, which is faster; any other loss is taken as a region.
        """
        logits = follow.start(projection)
        described = _described(projection, number)
        known_ops = set(plan.op_nodes(graph))
        try:
            name = self._rewrite_cross_entropy(graph, logits)
        except Declined as declined:
            reason = str(declined)
        else:
            return [
                Decision(
                    "rewritten",
                    f"folded {name}",
                    op=cross_entropy.OP_NAME,
                    chunk_rows=_chunk_rows(graph, known_ops),
                    **described,
                )
            ]
        if "region" not in self.settings.kinds:
            return _both(reason, "the kind region is switched off")
        try:
            grown = region.grow(graph, projection)
            together = [_described(each, number) for each in grown.seeds]
            steps = _steps(grown.nodes)
            region.rewrite(graph, grown, self.settings)
        except Declined as declined:
            return _both(reason, str(declined))
        rows = _chunk_rows(graph, known_ops)
        folded = f"folded {steps}"
        if len(together) > 1:
            folded += f" over {len(together)} projections"
        return [
            Decision("rewritten", folded, op=region.OP_NAME, chunk_rows=rows, **each)
            for each in together
        ]

    def _rewrite_cross_entropy(self, graph: fx.Graph, logits: follow.Logits) -> str:
        """Follow the logits to a cross entropy and rewrite it; returns the name of the loss."""
        while True:
            user = guards.only_user(logits.node)
            name = follow.step_name(user)
            if name in follow.LOSSES:
                break
            logits = follow.advance(logits, user)
        if "cross_entropy" not in self.settings.kinds:
            raise Declined("the kind cross_entropy is switched off")
        cross_entropy.rewrite(graph, logits, user, self.settings)
        return name


def _described(projection: Projection, number: int) -> dict[str, Any]:
    """What a decision says of a projection whatever is decided."""
    return {
        "projection": projection.describe(),
        "location": location(projection.node),
        "source": source_line(projection.node),
        "logits_bytes": guards.logits_bytes(follow.start(projection)),
        "graph": number,
        "node": projection.node.name,
    }


def _both(of_cross_entropy: str, of_region: str) -> str:
    """Why a projection is neither, in one line; once where both say the same."""
    if LOGITS_LEAVE in of_cross_entropy and LOGITS_LEAVE in of_region:
        return of_cross_entropy
    if of_cross_entropy == of_region:
        return of_cross_entropy
    return f"{of_cross_entropy}; nor as a region: {of_region}"


def _steps(nodes: list[fx.Node]) -> str:
    """The steps of a region that say what it computes, each once, without mere views."""
    names = dict.fromkeys(map(follow.step_name, nodes))
    told = [name for name in names if name not in _DULL] or list(names)
    if len(told) > _TOLD:
        told = [*told[:_TOLD], f"{len(told) - _TOLD} more"]
    return ", ".join(told)


def _chunk_rows(graph: fx.Graph, known_ops: set[fx.Node]) -> int | None:
    """Rows that the op just written takes at a time."""
    new = [node for node in plan.op_nodes(graph) if node not in known_ops]
    return plan.chunk_rows(new[0]) if new else None


def _described_stacked(node: fx.Node, number: int) -> dict[str, Any]:
    """What a decision says of a product with stacked heads."""
    value = example(node)
    shape = "?" if value is None else list(value.shape)
    return {
        "projection": f"{follow.step_name(node)} -> {shape}",
        "location": location(node),
        "logits_bytes": None if value is None else guards.tensor_bytes(value),
        "graph": number,
        "source": source_line(node),
        "node": node.name,
    }


def _left_batched(nodes: list[fx.Node], number: int) -> Decision:
    """One line for all products with stacked matrices: a model has one or two per layer."""
    described = {**_described_stacked(nodes[0], number), "logits_bytes": None}
    return Decision(
        "left",
        "its second operand is a stack of matrices, not one [V, D] weight"
        + (f" (and {len(nodes) - 1} more like it)" if len(nodes) > 1 else ""),
        op=None,
        **described,
    )


def location(node: fx.Node) -> str:
    """``file:line`` of the innermost line of user code that made a node."""
    return _frame(node)[0]


def source_line(node: fx.Node) -> str:
    """That line itself, or nothing."""
    return _frame(node)[1]


def _frame(node: fx.Node) -> tuple[str, str]:
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n?([^\n]*)', node.stack_trace or "")
    if not frames:
        return "?", ""
    own = [frame for frame in frames if "/torch/nn/" not in frame[0]]
    file, line, text = (own or frames)[-1]
    return f"{file}:{line}", text.strip()


def _reaches_loss(node: fx.Node) -> bool:
    """Whether a loss or a softmax descends from a value before any further matrix product.

    Tells a head that is worth a word in the report from the many other linear layers of a model:
    those go into another product first. A head whose logits leave the graph is worth one too.
    """
    value = example(node)
    wide = value is not None and value.dim() > 0
    seen, pending = {node}, list(node.users)
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.op == "output":
            if wide and _is_wide_leaf(node):
                return True
            continue
        if _LOSS_LIKE.search(follow.step_name(user)):
            return True
        if not is_product(user) and "attention" not in follow.step_name(user):
            pending.extend(user.users)
    return False


def _is_wide_leaf(node: fx.Node) -> bool:
    """Whether logits that leave the graph are wider than the hidden states they come from."""
    value = example(node)
    inputs = [v for n in node.all_input_nodes if (v := example(n)) is not None]
    if value is None or not inputs:
        return False
    classes, hidden = known(value.shape[-1]), known(inputs[0].shape[-1])
    return isinstance(classes, int) and isinstance(hidden, int) and classes > hidden
