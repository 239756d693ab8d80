"""The account: what ``explain()`` tells, and the same in counters, logs and traces."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator

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
        return F.cross_entropy(first, y) + F.cross_entropy(second, y) + second.mean()


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
