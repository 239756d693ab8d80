from __future__ import annotations

import pytest
import torch

from greyhound_ops.kernels.scale import scale_
from samples import dtype_id, interpreter_slack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@by_dtype
@pytest.mark.parametrize("shape", [(), (1,), (8191,), (8192,), (8193,), (3, 7000)], ids=str)
def test_multiplies(
    shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    # Neighbours in the same storage must not be touched.
    count = torch.Size(shape).numel()
    storage = torch.randn(count + 2, device=kernel_device).to(dtype)
    before = storage.clone()
    values = storage[1:-1].view(shape)
    result = scale_(values, torch.tensor(0.3, device=kernel_device), 2.0)
    assert result.data_ptr() == values.data_ptr()
    factor = torch.tensor(0.3) * 2.0
    expected = (before[1:-1].float() * factor.to(kernel_device)).to(dtype)
    rtol = 2 * interpreter_slack(dtype)
    torch.testing.assert_close(storage[1:-1], expected, rtol=rtol, atol=0)
    assert torch.equal(storage[[0, -1]], before[[0, -1]])


@by_dtype
def test_one_changes_nothing(dtype: torch.dtype, kernel_device: torch.device) -> None:
    values = torch.tensor([1.5, float("nan"), float("inf"), -0.0], device=kernel_device).to(dtype)
    before = values.clone()
    scale_(values, torch.tensor(0.5, device=kernel_device), 2.0)
    assert torch.equal(values.nan_to_num(7.0), before.nan_to_num(7.0))
    assert values[1].isnan()


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0])
def test_special_factors(factor: float, kernel_device: torch.device) -> None:
    values = torch.randn(100, device=kernel_device)
    expected = values * factor
    scale_(values, torch.tensor(factor, device=kernel_device))
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@by_dtype
def test_dense_memory_in_any_order(dtype: torch.dtype, kernel_device: torch.device) -> None:
    values = torch.randn(5, 7, device=kernel_device).to(dtype).t()
    expected = (values.float() * 3).to(dtype)
    result = scale_(values, torch.tensor(3.0, device=kernel_device))
    torch.testing.assert_close(result, expected, rtol=2 * interpreter_slack(dtype), atol=0)


@by_dtype
def test_factor_in_reduced_precision(dtype: torch.dtype, kernel_device: torch.device) -> None:
    values = torch.ones(10, device=kernel_device)
    factor = torch.tensor(1.7, device=kernel_device).to(dtype)
    torch.testing.assert_close(scale_(values, factor), factor.float().expand(10))


def test_nothing_to_do(kernel_device: torch.device) -> None:
    values = torch.empty(0, 3, device=kernel_device)
    assert scale_(values, torch.tensor(2.0, device=kernel_device)) is values
