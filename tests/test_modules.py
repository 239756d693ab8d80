from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import ChunkedLinearCrossEntropyLoss, chunked_linear_cross_entropy
from samples import (
    CASES,
    REDUCTIONS,
    assert_equal_results,
    check_against_reference,
    make_sample,
    run,
)


def as_function(**options: Any) -> Callable[..., Tensor]:
    """The module with everything given at construction."""

    def call(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Any
    ) -> Tensor:
        module = ChunkedLinearCrossEntropyLoss(class_weight, **options)
        return module(input, weight, target, bias)

    return call


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_function(case: str, reduction: str, device: torch.device) -> None:
    wanted, options = CASES[case]
    options = {
        "reduction": reduction,
        "ignore_index": 2,
        "chunk_size": 4,
        "grad_weight_accum_dtype": "weight",
        **options,
    }
    sample = make_sample(device=device, dtype=torch.bfloat16, ignore_index=2, **wanted)
    assert_equal_results(
        run(as_function(**options), sample), run(chunked_linear_cross_entropy, sample, **options)
    )


def test_equals_the_reference(device: torch.device) -> None:
    sample = make_sample((2, 5), device=device, bias=True)
    module = ChunkedLinearCrossEntropyLoss(label_smoothing=0.1)
    check_against_reference(
        sample,
        function=lambda *args, class_weight, label_smoothing: module(*args),
        label_smoothing=0.1,
    )


def test_class_weight_is_a_buffer() -> None:
    module = ChunkedLinearCrossEntropyLoss(torch.ones(11))
    assert dict(module.named_buffers()).keys() == {"class_weight"}
    assert not list(module.parameters())
    assert module.double().class_weight.dtype == torch.float64
    assert module.state_dict().keys() == {"class_weight"}


def test_without_class_weight_the_state_is_empty() -> None:
    assert not ChunkedLinearCrossEntropyLoss().state_dict()


def test_pickles() -> None:
    sample = make_sample(class_weight=True)
    module = ChunkedLinearCrossEntropyLoss(sample.class_weight, softcap=3.0, reduction="sum")
    arguments = (sample.input, sample.weight, sample.target)
    assert torch.equal(module(*arguments), pickle.loads(pickle.dumps(module))(*arguments))


def test_repr_names_the_options() -> None:
    text = repr(
        ChunkedLinearCrossEntropyLoss(
            reduction="sum", label_smoothing=0.25, z_loss=0.5, softcap=30.0, ignore_index=7
        )
    )
    for part in ("'sum'", "0.25", "0.5", "30.0", "ignore_index=7"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "avg"),
        ("grad_weight_accum_dtype", "bf16"),
        ("chunk_size", 0),
        ("chunk_size", 1.5),
        ("chunk_size", True),
        ("label_smoothing", 1.5),
        ("z_loss", -1.0),
        ("softcap", 0.0),
    ],
    ids=str,
)
def test_bad_options_fail_at_construction(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        ChunkedLinearCrossEntropyLoss(**{name: value})
