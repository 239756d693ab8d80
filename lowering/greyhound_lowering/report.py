"""The account of what was found in compiled graphs, what became of it, and why."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any, Literal

from greyhound_ops import torch_private

log = logging.getLogger(__name__)

Verdict = Literal["rewritten", "left"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What became of one projection.

    Attributes:
        verdict: ``"rewritten"`` or ``"left"``.
        reason: Why it was left, or which loss was folded in.
        projection: The projection as the graph spells it, with shapes.
        location: ``file:line`` of the user's code, or ``"?"``.
        op: The op that took its place, or None.
        logits_bytes: Bytes of logits avoided, at the sizes the graph was traced with; None if
            unknown.
        graph: Running number of the graph in this process.
    """

    verdict: Verdict
    reason: str
    projection: str
    location: str
    op: str | None
    logits_bytes: int | None
    graph: int


@dataclasses.dataclass(frozen=True)
class Report:
    """All decisions so far, in the order in which graphs were compiled."""

    decisions: tuple[Decision, ...]

    @property
    def rewritten_count(self) -> int:
        """Number of projections that were rewritten."""
        return sum(1 for decision in self.decisions if decision.verdict == "rewritten")

    @property
    def left_count(self) -> int:
        """Number of projections that were left alone."""
        return len(self.decisions) - self.rewritten_count

    @property
    def logits_bytes_avoided(self) -> int:
        """Bytes of logits that no longer exist, over all rewritten projections."""
        return sum(
            decision.logits_bytes or 0
            for decision in self.decisions
            if decision.verdict == "rewritten"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "rewritten_count": self.rewritten_count,
            "left_count": self.left_count,
            "logits_bytes_avoided": self.logits_bytes_avoided,
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }

    def __str__(self) -> str:
        if not self.decisions:
            return "no projection followed by a loss was found in any graph compiled so far"
        lines = [
            f"{self.rewritten_count} rewritten, {self.left_count} left alone, "
            f"{self.logits_bytes_avoided / 2**20:.1f} MiB of logits avoided"
        ]
        for decision in self.decisions:
            size = (
                "" if decision.logits_bytes is None else f"{decision.logits_bytes / 2**20:.1f} MiB"
            )
            lines.append(f"[graph {decision.graph}] {decision.location}: {decision.projection}")
            became = f" -> {decision.op}" if decision.op else ""
            lines.append(
                f"    {decision.verdict}{became}: {decision.reason}"
                + (f" ({size})" if size else "")
            )
        return "\n".join(lines)


class _Account:
    """Decisions of this process; compilation may run on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: list[Decision] = []
        self._graphs = 0
        self._attempt: tuple[str, int] | None = None
        self._start_of_compilation = 0

    def next_graph(self) -> int:
        """Number of a graph that the pass begins to look at."""
        attempt = torch_private.compile_attempt()
        with self._lock:
            last = self._attempt
            restarted = (
                attempt is not None
                and last is not None
                and attempt[0] == last[0]
                and attempt[1] > last[1]
            )
            if restarted:
                # Dynamo threw the graph of its last attempt away: so do we what was said of it.
                for decision in self._decisions[self._start_of_compilation :]:
                    torch_private.count(decision.verdict, -1)
                del self._decisions[self._start_of_compilation :]
            elif attempt is None or attempt != last:
                self._start_of_compilation = len(self._decisions)
            self._attempt = attempt
            self._graphs += 1
            return self._graphs

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._decisions.append(decision)
        torch_private.count(decision.verdict)
        log.info(
            "%s: %s %s: %s",
            decision.location,
            decision.projection,
            decision.verdict,
            decision.reason,
        )

    def report(self) -> Report:
        with self._lock:
            return Report(tuple(self._decisions))

    def clear(self) -> None:
        with self._lock:
            self._decisions.clear()
            self._graphs = 0
            self._attempt = None
            self._start_of_compilation = 0


account = _Account()
