from __future__ import annotations

from typing import Any

import pytest
import torch

from samples import CASES, LAYOUTS, REDUCTIONS, Sample, dtype_id, make_sample

OPS = torch.ops.greyhound
NEEDS = ("need_grad_input", "need_grad_weight", "need_grad_bias")


def with_gradients(
    sample: Sample, frozen: tuple[str, ...] = ()
) -> tuple[list[Any], dict[str, bool]]:
    """Positional arguments, leaves where not frozen, and the flags that go with them."""
    values = dict(vars(sample))
    flags = {}
    for name in ("input", "weight", "bias"):
        wanted = values[name] is not None and name not in frozen
        flags[f"need_grad_{name}"] = wanted
        if wanted:
            values[name] = values[name].detach().requires_grad_()
    return list(values.values()), flags


# Everything that changes the shape, dtype or layout of an output, or which of them there are.
SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **CASES,
    "leading": ({"rows": (2, 3)}, {"chunk_size": 4}),
    "one-row": ({"rows": ()}, {}),
    "no-rows": ({"rows": 0, "bias": True}, {}),
    "one-class": ({"classes": 1}, {}),
    "bfloat16": ({"dtype": torch.bfloat16, "bias": True}, {"chunk_size": 5}),
    "float16": ({"dtype": torch.float16, "bias": True}, {"chunk_size": 5}),
    "float64": ({"dtype": torch.float64, "bias": True}, {"chunk_size": 5}),
    "float16-in-weight": (
        {"dtype": torch.float16},
        {"grad_weight_accum_dtype": "weight", "chunk_size": 5},
    ),
    "ignore-index": ({"ignore_index": 3}, {"ignore_index": 3}),
    "products-in-bfloat16": ({"bias": True}, {"compute_dtype": torch.bfloat16}),
    "nan-when-empty": ({}, {"empty_mean_is_nan": True}),
}


@pytest.mark.fault("B30", "B45")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", SAMPLES)
def test_forward(case: str, reduction: str) -> None:
    wanted, options = SAMPLES[case]
    arguments, flags = with_gradients(make_sample(**wanted))
    torch.library.opcheck(
        OPS.linear_cross_entropy.default, arguments, {"reduction": reduction, **flags, **options}
    )


@pytest.mark.fault("B30")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "frozen",
    [("input",), ("weight",), ("weight", "bias"), ("input", "weight"), ("input", "weight", "bias")],
    ids="-".join,
)
def test_frozen(frozen: tuple[str, ...], reduction: str) -> None:
    arguments, flags = with_gradients(make_sample(bias=True), frozen)
    torch.library.opcheck(
        OPS.linear_cross_entropy.default, arguments, {"reduction": reduction, **flags}
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["input", "weight"])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"expanded"}))
def test_layouts(layout: str, name: str, reduction: str) -> None:
    sample = make_sample()
    sample = sample.replace(**{name: torch.nan_to_num(LAYOUTS[layout](getattr(sample, name)))})
    sample = sample.replace(**{name: LAYOUTS[layout](getattr(sample, name))})
    arguments, flags = with_gradients(sample)
    torch.library.opcheck(
        OPS.linear_cross_entropy.default, arguments, {"reduction": reduction, **flags}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("case", ["plain", "bias", "all", "leading", "no-rows"])
def test_backward(case: str, dtype: torch.dtype) -> None:
    wanted, options = SAMPLES[case]
    sample = make_sample(**{**wanted, "dtype": dtype})
    loss, statistics = OPS.linear_cross_entropy(
        *vars(sample).values(), reduction="none", **options
    )[:2]
    torch.library.opcheck(
        OPS.linear_cross_entropy_backward.default,
        (
            torch.randn_like(loss), sample.input, sample.weight, sample.target, statistics,
            sample.bias, sample.class_weight,
        ),
        {**options, **dict.fromkeys(NEEDS[: 2 + (sample.bias is not None)], True)},
    )  # fmt: skip


@pytest.mark.parametrize("need", NEEDS)
def test_backward_of_one(need: str) -> None:
    sample = make_sample(bias=True)
    statistics = OPS.linear_cross_entropy(*vars(sample).values(), reduction="none")[1]
    torch.library.opcheck(
        OPS.linear_cross_entropy_backward.default,
        (torch.ones(13), sample.input, sample.weight, sample.target, statistics, sample.bias),
        {need: True},
    )


@pytest.mark.gpu
def test_cuda() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for reduction in REDUCTIONS:
            arguments, flags = with_gradients(make_sample(dtype=dtype, device="cuda", bias=True))
            torch.library.opcheck(
                OPS.linear_cross_entropy.default,
                arguments,
                {"reduction": reduction, "chunk_size": 5, **flags},
            )
