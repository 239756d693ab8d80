"""The cases that are measured: their truth, their floor, and that the rewrite reaches them."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import os
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compile_time, end_to_end, records
from benchmarks.cases import Case, Inputs, get_case, make_inputs
from benchmarks.llama import Llama, LlamaConfig
from benchmarks.losses import IGNORE_INDEX, LOSSES
from benchmarks.measure import Settings, compute_reference, measure_case, relative_error
from benchmarks.providers import (
    PROVIDERS,
    FloorStep,
    Provider,
    require_rewrite,
    with_operands,
)
from benchmarks.truth import Truth
from benchmarks.workers import Handler, Worker, WorkerError
from lowering.rewriting import Backend

CPU = torch.device("cpu")

# Every loss, and with each another of the options that change its truth or its floor.
NAMES = (
    "tiny-ignored25-bias",
    "tiny-jsd-ignored25",
    "tiny-llama-ignored25",
    "tiny-gemma2-bias",
    "tiny-kd-bias",
    "tiny-dpo-ignored25-frozen",
    "tiny-logp-ignored25",
    "tiny-gemma2-forward",
)


def small(name: str) -> tuple[Case, Inputs]:
    case = get_case(name)
    return case, make_inputs(case, CPU)


# The op leaves ignored rows out of the divergence; batchmean of kl_div does not.
@pytest.mark.parametrize(
    ("provider", "name"),
    [(provider, name) for provider in ("eager", "op") for name in NAMES]
    + [("eager", "tiny-kd-ignored25")],
)
def test_loss_and_gradients_are_the_truths(
    provider: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.truth.CHUNK_LOGITS_BYTES", 8 * 96 * 7)  # chunks of 7 rows
    case, inputs = small(name)
    truth = compute_reference(case, inputs)
    loss = PROVIDERS[provider].build(case, inputs).full()
    assert loss is not None
    assert relative_error(loss, truth.loss) < 1e-6
    pairs = ((inputs.input, truth.grad_input), (inputs.weight, truth.grad_weight))
    for leaf, expected in pairs:
        assert (leaf.grad is None) == (expected is None)
        if leaf.grad is not None and expected is not None:
            assert leaf.grad.shape == expected.shape
            assert relative_error(leaf.grad, expected) < 1e-6
    if inputs.norm_weight is not None and case.mode == "full":
        assert inputs.norm_weight.grad is not None


@pytest.mark.parametrize("name", [*NAMES, "tiny-kd-ignored25"])
def test_floor_makes_the_gradients_of_the_rows_that_count(name: str) -> None:
    case, inputs = small(name)
    counted = Truth(case, inputs, case.dtype).counted
    ends = 4 if LOSSES[case.loss].by_sequence else 0
    if case.loss == "kd_ce":
        assert counted.all()  # the divergence knows no ignored row
    elif case.ignored_share:
        assert 0 < counted.sum() <= case.valid_rows
    else:
        assert counted.sum() == case.N - ends  # nothing follows the last token
    floor = FloorStep(inputs, case)
    floor.full()
    assert floor._input.shape == (counted.sum(), case.D)
    assert (floor._teacher is not None) == (inputs.teacher_input is not None)
    if case.mode == "no_grad":
        assert not hasattr(floor, "_grad_logits")
        return
    PROVIDERS["eager"].build(case, inputs).full()
    if inputs.weight.grad is None:
        assert not hasattr(floor, "_grad_weight")
    else:
        torch.testing.assert_close(floor._grad_weight, inputs.weight.grad, rtol=1e-4, atol=1e-6)
    if inputs.norm_weight is None:
        assert inputs.input.grad is not None
        grad = inputs.input.grad.view(case.N, case.D)
        torch.testing.assert_close(floor._grad_input, grad[counted], rtol=1e-4, atol=1e-6)
        assert not grad[~counted].any()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_is_rewritten(loss: str, dynamic: bool) -> None:
    case = dataclasses.replace(get_case("tiny"), loss=loss)  # type: ignore[arg-type]
    inputs = make_inputs(case, CPU)
    eager = PROVIDERS["eager"].build(case, inputs).full()
    grads = [leaf.grad for leaf in (inputs.input, inputs.weight)]
    inputs.clear_grads()
    if dynamic:
        for parameter in inputs.parameters:
            torch._dynamo.mark_static(parameter)
    torch._dynamo.reset()
    backend = Backend()
    compiled = torch.compile(
        LOSSES[case.loss].plain, backend=backend, fullgraph=True, dynamic=dynamic or None
    )
    value = with_operands(compiled, case, inputs)(
        inputs.input, inputs.weight, inputs.target, inputs.bias
    )
    value.backward()
    assert backend.our_nodes
    assert not backend.wide_products(case.V)
    torch.testing.assert_close(value.detach(), eager, rtol=1e-5, atol=1e-6)
    for leaf, expected in zip((inputs.input, inputs.weight), grads, strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-6)


def test_a_policy_begins_near_its_reference() -> None:
    _, inputs = small("tiny-dpo")
    assert inputs.teacher_weight is not None
    assert 0.05 < relative_error(inputs.teacher_weight, inputs.weight.detach()) < 0.2


def test_sequences_need_rows_that_divide() -> None:
    with pytest.raises(ValueError, match="multiple of 4 for llama_head, got 6"):
        make_inputs(Case("odd", 6, 4, 8, loss="llama_head"), CPU)


def test_unknown_suffix() -> None:
    with pytest.raises(ValueError, match="unknown suffix 'grpo'"):
        get_case("tiny-grpo")


def test_rewrite_is_required_of_every_projection() -> None:
    lowering = importlib.import_module("greyhound_lowering")

    def decided(*verdicts: str) -> SimpleNamespace:
        made = tuple(
            lowering.Decision(verdict, "why", "linear", "model.py:1", None, None, 1)
            for verdict in verdicts
        )
        return SimpleNamespace(explain=lambda: lowering.Report(made))

    require_rewrite(decided("rewritten", "rewritten"), 2)
    require_rewrite(decided("left", "rewritten"), 1)
    for verdicts, wanted in (((), 1), (("left",), 1), (("rewritten", "left"), 2)):
        with pytest.raises(RuntimeError, match=f"of {wanted} were rewritten"):
            require_rewrite(decided(*verdicts), wanted)


def test_a_failing_provider_has_its_reason_in_a_row() -> None:
    def fail(case: Case, inputs: Inputs) -> None:
        raise RuntimeError("no such kernel")

    case = get_case("tiny-kd")
    broken = Provider("broken", "", "none", fail, losses=("kd_ce",))  # type: ignore[arg-type]
    settings = Settings(rounds=1, warmup_ms=0, rep_ms=1, errors=True)
    rows = measure_case(
        case, [broken, PROVIDERS["eager"], PROVIDERS["cce"]], CPU, settings, log=lambda line: None
    )
    by_name = {row.provider: row for row in rows}
    assert by_name["broken"].error == "RuntimeError: no such kernel"
    assert by_name["cce"].error == "computes no kd_ce"
    assert by_name["eager"].error == ""
    assert by_name["eager"].median_ms is not None
    assert by_name["eager"].err_grad_weight is not None


@pytest.mark.parametrize("true", [0, 1, 5, 16, 17, 63, 64])
def test_largest_that_fits(true: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        assert number not in asked
        asked.append(number)
        return number <= true

    assert end_to_end.largest_that_fits(fits, 16, 64) == true
    assert len(asked) <= 8


def test_model_shifts_labels_and_looks_only_back() -> None:
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, layers=1, heads=2)
    )
    ids = torch.randint(11, (2, 6))
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX  # nothing comes before it
    assert model(ids, labels) == model(ids, ids)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, 3] = ids[:, 3]
    later = ids.clone()
    later[:, 3:] = (later[:, 3:] + 1) % 11  # the third token is predicted from those before it
    torch.testing.assert_close(model(later, labels), model(ids, labels))
    earlier = ids.clone()
    earlier[:, 2] = (earlier[:, 2] + 1) % 11
    assert model(earlier, labels) != model(ids, labels)


def _answering(value: int) -> Handler:
    def handle(message: str) -> object:
        if message == "fail":
            raise ValueError("not this")
        if message == "end":
            os._exit(3)
        return value, os.environ.get("TRITON_CACHE_DIR")

    return handle


def test_workers_answer_fail_and_end() -> None:
    before = os.environ.get("TRITON_CACHE_DIR")
    worker = Worker(_answering, 7, cold=True)
    try:
        value, cache = worker.ask("value", 60)
        assert value == 7
        assert cache not in (None, before)
        assert os.environ.get("TRITON_CACHE_DIR") == before
        with pytest.raises(WorkerError, match="ValueError: not this"):
            worker.ask("fail", 60)
        assert worker.ask("value", 60)[0] == 7
        with pytest.raises(WorkerError, match="exit status 3"):
            worker.ask("end", 60)
        with pytest.raises(WorkerError):
            worker.ask("value", 60)
    finally:
        worker.close()


def test_rows_of_other_measurements_have_files_of_their_own(tmp_path: os.PathLike[str]) -> None:
    machine = records.Machine("A GPU", "1", "2", "3", "4")
    folder = records.Path(tmp_path)
    row = compile_time.CompileRow("ce", 8, 4, 16, 2, "float32", "compile", 3, 1.25)
    path = records.append([row], machine, folder, "compile-")
    assert path.name == "compile-a-gpu.csv"
    records.append([row], machine, folder, "compile-")
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [each["median_s"] for each in found] == ["1.25", "1.25"]
    with pytest.raises(ValueError, match="has columns"):
        records.append(
            [records.Row("c", 1, 1, 1, "d", "p", "full", "none")], machine, folder, "compile-"
        )
