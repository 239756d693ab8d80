"""Every form of the corpus: rewritten or left alone as it should be, and right in either case."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import greyhound_lowering
from lowering import table
from lowering.forms import FORMS, Dims, Form
from lowering.rewriting import SLACK, Backend, assert_left, assert_rewritten, check, reasons

OWN = [form for form in FORMS.values() if not form.is_hugging_face]
HUGGING_FACE = [form for form in FORMS.values() if form.is_hugging_face]

dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])

# Several projections, each with its own loss.
OPS_IN_FORM = {"I01": 2, "I06": 2}


def forms(chosen: list[Form]) -> Any:
    return pytest.mark.parametrize("form", chosen, ids=lambda form: form.id)


def named(*ids: str) -> Any:
    return forms([FORMS[id] for id in ids])


def judge(form: Form, backend: Backend, dims: Dims) -> None:
    """Check what became of the form; that its results are right was checked before."""
    report = greyhound_lowering.explain()
    if form.expected == "leave":
        assert_left(backend)
    elif form.expected == "rewrite" and form.level == "pattern":
        assert_rewritten(backend, OPS_IN_FORM.get(form.id, 1))
        assert not report.left_count, reasons()
        assert not backend.wide_products(dims.V)
        assert report.logits_bytes_avoided > 0
    elif form.expected == "rewrite":
        assert report.rewritten_count
        assert not backend.wide_products(dims.V), reasons()
        assert backend.our_nodes
    elif report.rewritten_count:
        assert backend.our_nodes
    else:
        assert_left(backend)


def judge_page(form: Form) -> None:
    """Check what docs/forms.md says of the form that was compiled last, with static shapes."""
    if table.is_made_by_this_torch():
        line = table.row(form, greyhound_lowering.explain().decisions)
        assert line in table.committed_lines(), f"write docs/forms.md anew: {line}"


def test_page_of_forms_is_complete() -> None:
    lines = [line for line in table.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {id}" for id in FORMS]
    assert table.counts(lines[2:]) in table.committed_lines()


@pytest.mark.fault("B47")
@dynamic_or_not
@forms(OWN)
def test_own_form(form: Form, dynamic: bool) -> None:
    dims = Dims()
    judge(form, check(lambda: form.make(dims), dynamic=dynamic), dims)
    if not dynamic:
        judge_page(form)


@pytest.mark.fault("B50")
@forms(HUGGING_FACE)
def test_hugging_face_form(form: Form) -> None:
    pytest.importorskip("transformers", reason="forms K need transformers")
    dims = Dims()
    judge(form, check(lambda: form.make(dims)), dims)
    judge_page(form)


@pytest.mark.fault("B47", "B50")
def test_hugging_face_form_with_dynamic_shapes() -> None:
    pytest.importorskip("transformers", reason="forms K need transformers")
    form, dims = FORMS["K01s"], Dims()
    judge(form, check(lambda: form.make(dims), dynamic=True), dims)


@named("A01", "A02", "A06", "A07", "A10", "A13", "B01", "B05", "B06", "C01", "C02", "C05", "C08",
       "D01", "E01", "I01", "I03", "I06", "L05")  # fmt: skip
def test_bfloat16(form: Form) -> None:
    dims = Dims(dtype=torch.bfloat16)
    backend = check(lambda: form.make(dims))
    assert_rewritten(backend, OPS_IN_FORM.get(form.id, 1))
    assert not backend.wide_products(dims.V)


@named("A01", "A03", "A07", "A10", "B03", "B05", "C02", "C08", "E01", "I06")
def test_no_grad_makes_no_gradient(form: Form) -> None:
    dims = Dims()
    backend = check(lambda: form.make(dims), context=torch.no_grad)
    assert_rewritten(backend, OPS_IN_FORM.get(form.id, 1))
    for node in backend.op_nodes:
        needs = {name: value for name, value in node.kwargs.items() if name.startswith("need_")}
        assert set(needs.values()) == {False}, needs


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@named("A01", "A02", "A04", "A07", "A10", "B05", "C01", "C03", "E01", "I03")
def test_outer_autocast(form: Form, dynamic: bool) -> None:
    dims = Dims()
    # Gradients are fp32 here, but their products were rounded to bf16.
    slack = SLACK[torch.bfloat16]
    backend = check(lambda: form.make(dims), context=autocast, dynamic=dynamic, slack=slack)
    assert_rewritten(backend, OPS_IN_FORM.get(form.id, 1))
    # The products run in bf16 as autocast said, not in the dtype of the fp32 operands.
    assert [node.kwargs["compute_dtype"] for node in backend.op_nodes] == [torch.bfloat16]


def test_larger_than_one_vocabulary_tile() -> None:
    """Sizes at which a chunk is more than a handful of numbers, with a ragged last chunk."""
    dims = Dims(B=3, T=41, H=48, V=257)
    backend = check(lambda: FORMS["A10"].make(dims), chunk_size=32)
    assert_rewritten(backend)


def test_chunk_size_of_the_plan() -> None:
    dims = Dims()
    backend = check(lambda: FORMS["A02"].make(dims), chunk_size=None)
    assert_rewritten(backend)
    assert backend.op_nodes[0].kwargs["chunk_size"] is None


@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_grad_weight_accum_dtype(accum: str) -> None:
    dims = Dims(dtype=torch.bfloat16)
    backend = check(lambda: FORMS["A01"].make(dims), grad_weight_accum_dtype=accum)
    assert_rewritten(backend)
    assert backend.op_nodes[0].kwargs["grad_weight_accum_dtype"] == accum
