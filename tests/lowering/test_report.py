"""The account: what ``explain()`` tells, and the same in counters, logs and traces."""

from __future__ import annotations

import json
import pathlib
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import greyhound_lowering
from greyhound_lowering.report import Decision, Report, account
from lowering.forms import FORMS, Dims, call
from lowering.rewriting import TINY, Backend, check, run_python

N, D, V = 12, 8, 37
HERE = pathlib.Path(__file__).name


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    counters.clear()
    yield
    greyhound_lowering.clear_report()


class TwoHeads(nn.Module):
    """One head that is rewritten and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(D, V)
        self.other = nn.Linear(D, V)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.one(x)  # rewritten here
        second = self.other(x)  # left here
        return F.cross_entropy(first, y) + F.cross_entropy(second, y) + second.softmax(0).amax()


def line_of(mark: str) -> int:
    lines = pathlib.Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def compile_two_heads() -> Report:
    torch.manual_seed(0)
    backend = Backend()
    torch.compile(TwoHeads(), backend=backend)(torch.randn(N, D), torch.randint(0, V, (N,)))
    assert len(backend.op_nodes) == 1
    return greyhound_lowering.explain()


def test_decisions() -> None:
    report = compile_two_heads()
    rewritten, left = report.decisions
    assert (report.rewritten_count, report.left_count) == (1, 1)
    assert rewritten.verdict == "rewritten"
    assert rewritten.op == "greyhound::linear_cross_entropy"
    assert "cross_entropy" in rewritten.reason
    assert left.verdict == "left"
    assert left.op is None
    assert "2 readers" in left.reason
    assert rewritten.graph == left.graph == 1
    assert rewritten.logits_bytes == left.logits_bytes == N * V * 4
    assert report.logits_bytes_avoided == N * V * 4


def test_source_line_and_chunk_rows() -> None:
    rewritten, left = compile_two_heads().decisions
    assert rewritten.source == "first = self.one(x)  # rewritten here"
    assert left.source == "second = self.other(x)  # left here"
    assert rewritten.chunk_rows == TINY["chunk_size"]
    assert left.chunk_rows is None


def test_both_reasons_where_both_kinds_were_tried() -> None:
    _, left = compile_two_heads().decisions
    of_cross_entropy, of_region = left.reason.split("; nor as a region: ")
    assert "2 readers" in of_cross_entropy
    assert "rows" in of_region


def test_source_lines_are_the_users() -> None:
    rewritten, left = compile_two_heads().decisions
    for decision, mark in ((rewritten, "rewritten here"), (left, "left here")):
        file, line = decision.location.rsplit(":", 1)
        assert file.endswith(HERE)
        assert int(line) == line_of(mark)


def test_text() -> None:
    text = str(compile_two_heads())
    assert text.startswith("1 rewritten, 1 left alone")
    assert f"{HERE}:{line_of('rewritten here')}" in text
    assert "rewritten -> greyhound::linear_cross_entropy" in text
    assert "2 readers" in text


class Entropies(nn.Module):
    """A loss that reads two projections: a region."""

    def __init__(self, hidden: int = D, classes: int = V) -> None:
        super().__init__()
        self.one = nn.Linear(hidden, classes)
        self.other = nn.Linear(hidden, classes).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        log_p, q = self.one(x[:, 1:]).log_softmax(-1), self.other(x[:, 1:]).softmax(-1)
        return F.kl_div(log_p, q, reduction="batchmean")


def test_region_is_told_with_its_steps() -> None:
    torch.compile(Entropies(), backend=Backend())(torch.randn(2, N, D))
    decisions = greyhound_lowering.explain().decisions
    assert [each.op for each in decisions] == ["greyhound::row_region"] * 2
    assert {each.reason for each in decisions} == {
        "folded log_softmax, softmax, kl_div over 2 projections"
    }


# Sizes of which the plan makes several chunks: 32 MiB of logits at a time on the CPU.
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_chunk_rows_are_those_that_the_op_takes(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    from greyhound_ops import chunking

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(D, 8000)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, 8000), y[:, 1:].reshape(-1))

    taken = []
    plan = chunking.chunk_rows

    def noted(*args: Any, **kwargs: Any) -> int:
        taken.append((args[0], plan(*args, **kwargs)))
        return taken[-1][1]

    monkeypatch.setattr(chunking, "chunk_rows", noted)
    x = torch.randn(2, 1500, D)
    for model, inputs in (
        (Shifted(), (x, torch.randint(0, 8000, (2, 1500)))),
        (Entropies(D, 8000), (x,)),
    ):
        torch._dynamo.reset()
        greyhound_lowering.clear_report()
        taken.clear()
        compiled = torch.compile(model, backend=Backend(chunk_size=None), dynamic=dynamic)
        compiled(*inputs)
        (told,) = {each.chunk_rows for each in greyhound_lowering.explain().decisions}
        # Once for the report, then by the op; rows that the loss drops do not count.
        assert told is not None
        assert told < 2998
        assert set(taken) == {(2998, told)}
        assert len(taken) >= 2


def pictures(report: Report) -> list[ET.Element]:
    """The drawings of a report's page, which must be well-formed."""
    page = report.to_html()
    parts = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    return [ET.fromstring("<svg" + part) for part in parts]


def boxes(picture: ET.Element, *classes: str) -> list[str]:
    """Titles of the boxes of some classes."""
    space = "{http://www.w3.org/2000/svg}"
    found = []
    for group in picture.iter(f"{space}g"):
        (box,) = group.iter(f"{space}rect")
        (title,) = group.iter(f"{space}title")
        if set(classes) <= set(box.attrib["class"].split()):
            found.append(str(title.text))
    return found


def test_page_shows_the_graph_before_and_after() -> None:
    report = compile_two_heads()
    before, after = pictures(report)
    assert [each.split(":")[0] for each in boxes(before, "erased")] == ["first", "cross_entropy"]
    assert [each.split(":")[0] for each in boxes(before, "erased", "wide")] == ["first"]
    assert any("greyhound::linear_cross_entropy" in each for each in boxes(after, "new"))
    assert not boxes(after, "erased")
    # The head that was left is wide in both.
    for picture in (before, after):
        assert any(each.startswith("second:") for each in boxes(picture, "wide"))


def test_page_of_a_graph_that_was_left() -> None:
    module, inputs = FORMS["M05"].make(Dims())
    call(torch.compile(module, backend=Backend()), inputs)
    (picture,) = pictures(greyhound_lowering.explain())
    assert boxes(picture, "wide")
    assert not boxes(picture, "erased")


def test_page_of_a_large_graph_is_cut() -> None:
    class Deep(TwoHeads):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for _ in range(200):
                x = x.sin() + 1
            return super().forward(x, y)

    torch.compile(Deep(), backend=Backend())(torch.randn(N, D), torch.randint(0, V, (N,)))
    for picture in pictures(greyhound_lowering.explain()):
        assert 3 < len(boxes(picture)) <= 48


def test_page_needs_nothing_from_outside() -> None:
    page = compile_two_heads().to_html()
    assert "rewritten" in page
    assert HERE in page
    assert "2 readers" in page
    for outside in ("<script", "<link", "src=", "href=", "url(", "@import"):
        assert outside not in page
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}


def test_page_escapes_what_is_not_ours() -> None:
    decision = Decision("left", "a < b", "<x>", "<f>:1", None, None, 1, source="x = '<b>' & y")
    page = Report((decision,)).to_html()
    for text in ("<x>", "<f>", "<b>", "a < b", "& y"):
        assert text not in page
    assert "a &lt; b" in page


def test_save(tmp_path: pathlib.Path) -> None:
    report = compile_two_heads()
    for name in ("report.html", "report.json", "report.txt"):
        report.save(tmp_path / name)
    assert (tmp_path / "report.html").read_text() == report.to_html()
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()
    assert (tmp_path / "report.txt").read_text() == f"{report}\n"
    with pytest.raises(ValueError, match=r"\.html, \.json, \.txt, got .*report\.pdf"):
        report.save(tmp_path / "report.pdf")


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@pytest.fixture
def _not_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_hinted", False)


@pytest.mark.usefixtures("_not_hinted")
def test_hint_once_per_process(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        module, inputs = FORMS["J01"].make(Dims())
        call(torch.compile(module, backend=Backend()), inputs)
    (hint,) = hints(caplog)
    assert "forms.py:" in hint
    assert "compile the whole step" in hint
    assert "returned_logits='nan'" in hint


@pytest.mark.usefixtures("_not_hinted")
def test_no_hint_for_inference(caplog: pytest.LogCaptureFixture) -> None:
    """A model that makes logits to sample from has no loss to compile with it."""
    head = nn.Linear(D, V)
    with torch.no_grad():
        torch.compile(head, backend=Backend())(torch.randn(N, D))
    assert greyhound_lowering.explain().left_count == 1
    assert not hints(caplog)


def test_text_of_nothing() -> None:
    assert "no projection" in str(greyhound_lowering.explain())


def test_to_dict_is_plain_data() -> None:
    report = compile_two_heads()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["rewritten_count"] == data["left_count"] == 1
    assert data["logits_bytes_avoided"] == N * V * 4
    assert [Decision(**each) for each in data["decisions"]] == list(report.decisions)


def test_a_report_does_not_change_afterwards() -> None:
    report = compile_two_heads()
    greyhound_lowering.clear_report()
    assert len(report.decisions) == 2
    assert not greyhound_lowering.explain().decisions


def test_counters() -> None:
    compile_two_heads()
    assert dict(counters["greyhound"]) == {"rewritten": 1, "left": 1}


def test_graphs_are_numbered() -> None:
    compile_two_heads()
    torch._dynamo.reset()
    assert [each.graph for each in compile_two_heads().decisions] == [1, 1, 2, 2]


@pytest.mark.parametrize("id", ["A10", "J03", "H06"])
def test_restarts_are_not_counted_twice(id: str) -> None:
    """Dynamo throws a graph away and starts again, as A10 with dynamic shapes makes it do."""
    check(lambda: FORMS[id].make(Dims()), dynamic=True)
    assert len(greyhound_lowering.explain().decisions) == 1


@pytest.mark.parametrize("id", ["A10", "J03"])
def test_restarts_are_not_counted_twice_by_the_counters_either(id: str) -> None:
    check(lambda: FORMS[id].make(Dims()), dynamic=True)
    assert sum(counters["greyhound"].values()) == 1


def test_graphs_of_one_frame_are_all_told() -> None:
    """A graph break makes two graphs of one function, not a restart of one."""

    class Broken(TwoHeads):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one = F.cross_entropy(self.one(x), y)
            torch._dynamo.graph_break()
            return one + F.cross_entropy(self.other(x), y)

    backend = Backend()
    torch.compile(Broken(), backend=backend)(torch.randn(N, D), torch.randint(0, V, (N,)))
    report = greyhound_lowering.explain()
    assert len(backend.op_nodes) == report.rewritten_count == 2


def test_recompilation_is_told_again() -> None:
    module, _ = FORMS["A01"].make(Dims())
    compiled = torch.compile(module, backend=Backend(), dynamic=False)
    for length in (6, 7):
        call(compiled, FORMS["A01"].make(Dims(T=length))[1])
    assert greyhound_lowering.explain().rewritten_count == 2


def test_decisions_from_several_threads() -> None:
    decision = Decision("left", "why", "linear", "file:1", None, None, 1)

    def add() -> None:
        for _ in range(200):
            account.add(decision)
            greyhound_lowering.explain()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(greyhound_lowering.explain().decisions) == 800


CODE = """
import torch, greyhound_lowering
from lowering.forms import FORMS, Dims
from lowering.rewriting import Backend
for id in ("A01", "M05"):
    module, inputs = FORMS[id].make(Dims())
    torch.compile(module, backend=Backend())(*inputs)
"""


def test_logs_and_structured_trace(tmp_path: pathlib.Path) -> None:
    env = {
        "TORCH_LOGS": "+greyhound_lowering",
        "TORCH_TRACE": str(tmp_path / "trace"),
    }
    errors = run_python(CODE, env=env).stderr
    lines = [line for line in errors.splitlines() if "greyhound_lowering" in line]
    told = [line for line in lines if "forms.py:" in line]
    assert sum("rewritten: folded cross_entropy" in line for line in told) == 1, errors
    assert sum("left: the logits go into softmax" in line for line in told) == 1, errors
    files = list((tmp_path / "trace").glob("*.log"))
    assert files
    text = "".join(file.read_text() for file in files)
    assert '"name": "greyhound_rewrite"' in text
    assert "greyhound.linear_cross_entropy" in text[text.index('"name": "greyhound_rewrite"') :]


def test_quiet_without_being_asked() -> None:
    done = run_python(CODE)
    assert "greyhound" not in done.stdout + done.stderr


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="greyhound_lowering"):
        compile_two_heads()
    told = [record.getMessage() for record in caplog.records if "greyhound" in record.name]
    assert len(told) == 2
    assert all(HERE in message for message in told)


def test_settings_are_seen_by_the_pass() -> None:
    assert greyhound_lowering.rewrite_pass(**TINY).settings.chunk_size == TINY["chunk_size"]
