"""The account of what was found in compiled graphs, what became of it, and why."""

from __future__ import annotations

import dataclasses
import html
import json
import logging
import pathlib
import threading
from typing import Any, Literal

from greyhound_lowering import drawing
from greyhound_ops import torch_private

log = logging.getLogger(__name__)

Verdict = Literal["rewritten", "left"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What became of one projection.

    Attributes:
        verdict: ``"rewritten"`` or ``"left"``.
        reason: Why it was left, or which loss was folded in. Where both kinds of rewrite were
            tried, the cross entropy's reason and then the region's.
        projection: The projection as the graph spells it, with shapes.
        location: ``file:line`` of the user's code, or ``"?"``.
        op: The op that took its place, or None.
        logits_bytes: Bytes of logits avoided, at the sizes the graph was traced with; None if
            unknown.
        graph: Running number of the graph in this process.
        chunk_rows: Rows that the op takes at a time, at the sizes the graph was traced with and
            under the settings of this process; None for a projection that was left, or if unknown.
        source: That line of the user's code itself, or an empty string.
        node: Name of the projection in the graph.
    """

    verdict: Verdict
    reason: str
    projection: str
    location: str
    op: str | None
    logits_bytes: int | None
    graph: int
    chunk_rows: int | None = None
    source: str = ""
    node: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All decisions so far, in the order in which graphs were compiled.

    Attributes:
        decisions: One for every projection that was found.
        pictures: What to draw of each graph.
        unavailable: What this torch lacks, so that nothing is rewritten; empty if nothing.
    """

    decisions: tuple[Decision, ...]
    pictures: tuple[drawing.Picture, ...] = ()
    unavailable: str = ""

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
            "unavailable": self.unavailable,
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }

    def __str__(self) -> str:
        if self.unavailable:
            return f"the rewrite is off: {self.unavailable}"
        if not self.decisions:
            return "no projection followed by a loss was found in any graph compiled so far"
        lines = [
            f"{self.rewritten_count} rewritten, {self.left_count} left alone, "
            f"{self.logits_bytes_avoided / 2**20:.1f} MiB of logits avoided"
        ]
        for decision in self.decisions:
            lines.append(f"[graph {decision.graph}] {decision.location}: {decision.projection}")
            became = f" -> {decision.op}" if decision.op else ""
            facts = _facts(decision)
            lines.append(
                f"    {decision.verdict}{became}: {decision.reason}"
                + (f" ({', '.join(facts)})" if facts else "")
            )
        return "\n".join(lines)

    def to_html(self) -> str:
        """The report as a page of its own, with a picture of each graph before and after.

        Returns:
            HTML that needs nothing from outside.
        """
        return _PAGE.format(
            style=_STYLE + drawing.STYLE,
            summary=html.escape(str(self).splitlines()[0]),
            rows="\n".join(map(_table_row, self.decisions)),
            pictures="\n".join(map(_pictured, self.pictures)),
        )

    def save(self, path: str | pathlib.Path) -> None:
        """Write the report to a file.

        Args:
            path: ``.html`` for `to_html`, ``.json`` for `to_dict`, ``.txt`` for the text.

        Raises:
            ValueError: Any other ending.
        """
        path = pathlib.Path(path)
        writers = {
            ".html": self.to_html,
            ".json": lambda: json.dumps(self.to_dict(), indent=2) + "\n",
            ".txt": lambda: f"{self}\n",
        }
        writer = writers.get(path.suffix)
        if writer is None:
            raise ValueError(
                f"path: expected a name that ends in {', '.join(writers)}, got {str(path)!r}"
            )
        path.write_text(writer(), encoding="utf-8")


def _facts(decision: Decision) -> list[str]:
    facts = []
    if decision.logits_bytes is not None:
        facts.append(f"{decision.logits_bytes / 2**20:.1f} MiB")
    if decision.chunk_rows is not None:
        facts.append(f"{decision.chunk_rows} rows a chunk")
    return facts


# ---------------------------------------------------------------------------------------- HTML

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: 4px 8px; text-align: left; vertical-align: top; }
code, pre { font: 12px ui-monospace, monospace; }
.rewritten { background: #e6f5e6; }
.left { background: #fdf0e0; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>greyhound: what was rewritten</title>
<style>{style}</style>
</head>
<body>
<h1>What was rewritten</h1>
<p>{summary}</p>
<table>
<thead><tr><th>graph</th><th>source line</th><th>projection</th><th>decision</th><th>reason</th>
<th>op</th><th>logits</th><th>rows a chunk</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>Orange: values as large as logits. Red and crossed: erased. Green: new. Only what lies around the
projections is drawn.</p>
{pictures}
</body>
</html>
"""


def _table_row(decision: Decision) -> str:
    size = "" if decision.logits_bytes is None else f"{decision.logits_bytes / 2**20:.1f} MiB"
    rows = "" if decision.chunk_rows is None else str(decision.chunk_rows)
    cells = [
        str(decision.graph),
        f"{html.escape(decision.location)}<br><code>{html.escape(decision.source)}</code>",
        f"<code>{html.escape(decision.projection)}</code>",
        decision.verdict,
        ";<br>".join(map(html.escape, decision.reason.split("; "))),
        html.escape(decision.op or ""),
        size,
        rows,
    ]
    inner = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr class="{decision.verdict}">{inner}</tr>'


def _pictured(picture: drawing.Picture) -> str:
    parts = [f"<h2>Graph {picture.graph}</h2>"]
    if picture.left_out:
        parts.append(f"<p>{picture.left_out} more nodes nearby are not drawn.</p>")
    if picture.after:
        parts += ["<h3>Before</h3>", drawing.svg(picture.before, "before")]
        parts += ["<h3>After</h3>", drawing.svg(picture.after, "after")]
    else:
        parts += ["<h3>Left as it was</h3>", drawing.svg(picture.before, "left as it was")]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------- account


class _Account:
    """Decisions of this process; compilation may run on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: list[Decision] = []
        self._pictures: dict[int, drawing.Picture] = {}
        self._hinted = False
        self._unavailable = ""
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
                    self._pictures.pop(decision.graph, None)
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

    def draw(self, picture: drawing.Picture) -> None:
        with self._lock:
            self._pictures[picture.graph] = picture

    def hint(self, decision: Decision) -> None:
        """Say once per process what to do about logits that a training graph returns."""
        with self._lock:
            if self._hinted:
                return
            self._hinted = True
        beside = "beside the loss" in decision.reason and "without those" not in decision.reason
        log.warning(
            "%s: the logits%s leave the compiled graph and have to exist; compile the whole step, "
            "so that only the loss leaves%s",
            decision.location,
            "".join(f" ({fact})" for fact in _facts(decision)),
            ", or set returned_logits='nan' if nobody reads them" if beside else "",
        )

    def unavailable(self, reason: str) -> None:
        """Say once per process why nothing will be rewritten."""
        with self._lock:
            said, self._unavailable = self._unavailable, reason
        if said != reason:
            log.warning("the rewrite is off: %s; greyhound_ops.functional works as ever", reason)

    def report(self) -> Report:
        with self._lock:
            return Report(tuple(self._decisions), tuple(self._pictures.values()), self._unavailable)

    def clear(self) -> None:
        with self._lock:
            self._decisions.clear()
            self._pictures.clear()
            self._graphs = 0
            self._attempt = None
            self._start_of_compilation = 0


account = _Account()
