"""Kernels over tiles are compiled for Hopper, without a GPU: they must fit its shared memory."""

from __future__ import annotations

from typing import Any

import torch

import hopper
from greyhound_ops.kernels import products

# What one program of sm_90 may take; the launch fails above it.
MOST_SHARED_BYTES = 227 * 1024

M, N, K = products.BLOCK_M, products.BLOCK_N, products.BLOCK_K
BLOCKS = {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": K, "WIDEN": False}

Kernel = tuple[str, dict[str, Any], dict[str, str], int]


def tiles(dtype: str, *box: int) -> str:
    return f"tensordesc<{dtype}{list(box)}>"


def logits(panels: bool) -> Kernel:
    types = {
        "input_desc": tiles("bf16", M, K),
        "weight_desc": tiles("bf16", N, K),
        "out_desc": tiles("bf16", M, N // 2),
        "bias_ptr": "*bf16",
        "live_ptr": "*i32",
    }
    constants = {"HAS_BIAS": True, "PANELS": panels, **BLOCKS}
    return "products.logits_kernel", constants, types, products.STAGES


def grad_input(panels: bool) -> Kernel:
    types = {
        "grad_desc": tiles("bf16", M, K),
        "weight_desc": tiles("bf16", K, N),
        "parts_desc": tiles("fp32", M, N // 4),
        "live_ptr": "*i32",
    }
    splits = {
        "PANELS": panels,
        "MOST_SPLITS": products.MOST_SPLITS,
        "MOST_UNITS": products.MOST_UNITS,
    }
    return "products.grad_input_kernel", {**splits, **BLOCKS}, types, products.STAGES


def grad_weight(dtype: torch.dtype, reads: bool, low: bool, panels: bool = False) -> Kernel:
    pieces, stages = products.fold_shape(reads, dtype, low)
    name = "fp32" if dtype == torch.float32 else "bf16"
    types = {
        "grad_desc": tiles("bf16", K, M),
        "rows_desc": tiles("bf16", K, N),
        "high_desc": tiles(name, M, N // pieces),
        "low_desc": tiles("bf16", M, N // pieces),
        "live_ptr": "*i32",
    }
    constants = {
        "PANELS": panels, "READS": reads, "HAS_LOW": low, "LAST": False, "PIECES": pieces,
        "GROUP": products.GROUP, **BLOCKS,
    }  # fmt: skip
    if not low:
        constants["low_desc"] = None
    return "products.grad_weight_kernel", constants, types, stages


def projection(mode: str, live: bool) -> Kernel:
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
    return "exponentials.projection_kernel", constants, types, products.STAGES


KERNELS = {
    "logits": logits(False),
    "logits in panels": logits(True),
    "grad_input": grad_input(False),
    "grad_input of panels": grad_input(True),
    "grad_weight first": grad_weight(torch.bfloat16, False, False),
    "grad_weight first of several": grad_weight(torch.bfloat16, False, True),
    "grad_weight added": grad_weight(torch.bfloat16, True, False),
    "grad_weight added in halves": grad_weight(torch.bfloat16, True, True),
    "grad_weight fp32": grad_weight(torch.float32, False, False),
    "grad_weight added fp32": grad_weight(torch.float32, True, False),
    "grad_weight of panels": grad_weight(torch.bfloat16, False, False, True),
    "grad_weight of panels, first of several": grad_weight(torch.bfloat16, False, True, True),
    "grad_weight of panels, added": grad_weight(torch.bfloat16, True, False, True),
    "grad_weight of panels, added in halves": grad_weight(torch.bfloat16, True, True, True),
    "grad_weight of panels, fp32": grad_weight(torch.float32, False, False, True),
    "sums": projection("sums", True),
    "exponentials": projection("exponentials", True),
    "statistics": projection("statistics", False),
    "repaired logits": projection("logits", True),
}


def test_kernels_fit() -> None:
    made = hopper.compiled(
        {
            label: (name, constants, types, {"num_stages": stages, "num_warps": products.WARPS})
            for label, (name, constants, types, stages) in KERNELS.items()
        }
    )
    shared_bytes = {label: each if isinstance(each, int) else -1 for label, each in made.items()}
    assert shared_bytes.keys() == KERNELS.keys()
    assert {k: v for k, v in shared_bytes.items() if not 0 < v <= MOST_SHARED_BYTES} == {}
