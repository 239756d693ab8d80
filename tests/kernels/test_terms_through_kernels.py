"""Several cross entropies in one call, through the row kernel."""

from __future__ import annotations

import pytest
import torch

from greyhound_ops import config
from greyhound_ops.functional import chunked_multi_head_cross_entropy
from samples import SLACK, dtype_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_kernels_equal_torch(dtype: torch.dtype, kernel_device: torch.device) -> None:
    options = {"dtype": dtype, "device": kernel_device}
    input = torch.randn(13, 8, **options)
    weights = [torch.randn(classes, 8, **options) for classes in (11, 13, 15)]
    target = torch.randint(0, 11, (3, 13), device=kernel_device)
    target[:, 4] = -100
    results = []
    for kernels in ("torch", "triton"):
        leaves = [each.clone().requires_grad_() for each in (input, *weights)]
        with config.override(kernels=kernels):
            loss, losses = chunked_multi_head_cross_entropy(
                leaves[0], leaves[1:], target, term_weights=[1.0, 0.5, -2.0], chunk_size=5
            )
            grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))
        results.append((loss.detach(), losses, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2 * SLACK[dtype], atol=4 * SLACK[dtype])
