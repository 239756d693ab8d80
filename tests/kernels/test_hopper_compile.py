"""Kernels over tiles are compiled for Hopper, without a GPU: they must fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from greyhound_ops.kernels import products

# What one program of sm_90 may take; the launch fails above it.
MOST_SHARED_BYTES = 227 * 1024


def compiled_shared_bytes(
    name: str, constants: dict[str, Any], types: dict[str, str], stages: int
) -> int:
    """Shared memory of a kernel of `products` or `exponentials`, compiled in a clean process."""
    script = f"""
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from greyhound_ops.kernels import exponentials, products
kernel = getattr(products, {name!r}, None) or getattr(exponentials, {name!r})
constants, types = json.loads({json.dumps(json.dumps(constants))}), {types!r}
names = kernel.arg_names
signature = {{n: "constexpr" if n in constants else types.get(n, "i32") for n in names}}
fixed = {{(names.index(n),): value for n, value in constants.items()}}
source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs={{}})
options = {{"num_stages": {stages}, "num_warps": products.WARPS}}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return int(result.stdout.split()[-1])


def tiles(dtype: str, *box: int) -> str:
    return f"tensordesc<{dtype}{list(box)}>"


BLOCKS = {
    "BLOCK_M": products.BLOCK_M,
    "BLOCK_N": products.BLOCK_N,
    "BLOCK_K": products.BLOCK_K,
    "WIDEN": False,
}
M, N, K = products.BLOCK_M, products.BLOCK_N, products.BLOCK_K


def test_logits() -> None:
    types = {
        "input_desc": tiles("bf16", M, K),
        "weight_desc": tiles("bf16", N, K),
        "out_desc": tiles("bf16", M, N // 2),
        "bias_ptr": "*bf16",
        "live_ptr": "*i32",
    }
    shared = compiled_shared_bytes(
        "logits_kernel", {"HAS_BIAS": True, **BLOCKS}, types, products.STAGES
    )
    assert shared <= MOST_SHARED_BYTES


def test_grad_input() -> None:
    types = {
        "grad_desc": tiles("bf16", M, K),
        "weight_desc": tiles("bf16", K, N),
        "parts_desc": tiles("fp32", M, N // 4),
        "live_ptr": "*i32",
    }
    constants = {
        "MOST_SPLITS": products.MOST_SPLITS, "MOST_UNITS": products.MOST_UNITS, **BLOCKS
    }  # fmt: skip
    shared = compiled_shared_bytes("grad_input_kernel", constants, types, products.STAGES)
    assert shared <= MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("dtype", "reads", "low"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, True, True),
        (torch.float32, False, False),
        (torch.float32, True, False),
    ],
)
def test_grad_weight(dtype: torch.dtype, reads: bool, low: bool) -> None:
    pieces, stages = products.fold_shape(reads, dtype)
    name = "fp32" if dtype == torch.float32 else "bf16"
    types = {
        "grad_desc": tiles("bf16", K, M),
        "rows_desc": tiles("bf16", K, N),
        "high_desc": tiles(name, M, N // pieces),
        "low_desc": tiles("bf16", M, N // pieces),
        "live_ptr": "*i32",
    }
    constants = {
        "READS": reads, "HAS_LOW": low, "LAST": False, "PIECES": pieces,
        "GROUP": products.GROUP, **BLOCKS,
    }  # fmt: skip
    if not low:
        constants["low_desc"] = None
    shared = compiled_shared_bytes("grad_weight_kernel", constants, types, stages)
    assert shared <= MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("mode", "live"),
    [("sums", True), ("exponentials", True), ("statistics", False), ("logits", True)],
)
def test_exponentials(mode: str, live: bool) -> None:
    types = {
        "input_desc": tiles("bf16", M, K),
        "weight_desc": tiles("bf16", N, K),
        "out_desc": tiles("bf16", M, N // 2),
        "bias_ptr": "*bf16",
        "live_ptr": "*i32",
        "flags_ptr": "*i32",
        "logit_scale": "fp32",
        "softcap": "fp32",
    }
    types |= {f"{each}_ptr": "*fp32" for each in ("reference", "sums", "tops")}
    constants = {
        "MODE": mode, "HAS_BIAS": True, "HAS_SCALE": True, "HAS_SOFTCAP": True, "HAS_LIVE": live,
        "FLAGS": 8, **BLOCKS,
    }  # fmt: skip
    absent = {
        "out_desc": mode in ("sums", "statistics"),
        "flags_ptr": mode in ("sums", "exponentials"),
        "tops_ptr": mode != "statistics",
        "live_ptr": not live,
    }
    constants |= {name: None for name, is_absent in absent.items() if is_absent}
    shared = compiled_shared_bytes("projection_kernel", constants, types, products.STAGES)
    assert shared <= MOST_SHARED_BYTES
