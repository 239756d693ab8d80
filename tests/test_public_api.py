from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

import greyhound_ops
from greyhound_ops import errors, functional, modules

ROOT = Path(greyhound_ops.__file__).parents[1]


def python(code: str) -> str:
    """Output of a new interpreter that finds the packages of this tree."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "lowering")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=environment,
    ).stdout.strip()  # fmt: skip


FUNCTIONAL = [
    "CrossEntropyOutput",
    "DistillationOutput",
    "KTOLoss",
    "LogProbs",
    "MultiCrossEntropyOutput",
    "PolicyLoss",
    "PreferenceLoss",
    "autograd_loss_and_logits_grad",
    "chunked_linear_cpo",
    "chunked_linear_cross_entropy",
    "chunked_linear_distillation",
    "chunked_linear_dpo",
    "chunked_linear_grpo",
    "chunked_linear_kto",
    "chunked_linear_log_probs",
    "chunked_linear_loss",
    "chunked_linear_orpo",
    "chunked_linear_simpo",
    "chunked_multi_head_cross_entropy",
    "chunked_multi_token_cross_entropy",
    "concatenate_pairs",
    "cpo_loss",
    "cross_entropy",
    "dpo_loss",
    "grpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "per_row",
    "selective_log_softmax",
    "simpo_loss",
    "whole",
]
MODULES = [
    "ChunkedLinearCPOLoss",
    "ChunkedLinearCrossEntropyLoss",
    "ChunkedLinearDPOLoss",
    "ChunkedLinearDistillationLoss",
    "ChunkedLinearGRPOLoss",
    "ChunkedLinearJSDLoss",
    "ChunkedLinearKTOLoss",
    "ChunkedLinearLogProbs",
    "ChunkedLinearLoss",
    "ChunkedLinearORPOLoss",
    "ChunkedLinearSimPOLoss",
    "ChunkedMultiHeadCrossEntropyLoss",
    "ChunkedMultiTokenCrossEntropyLoss",
    "LogitsCrossEntropyLoss",
]


def test_names() -> None:
    assert sorted(greyhound_ops.__all__) == [
        "ChunkedLinearCPOLoss",
        "ChunkedLinearCrossEntropyLoss",
        "ChunkedLinearDPOLoss",
        "ChunkedLinearDistillationLoss",
        "ChunkedLinearGRPOLoss",
        "ChunkedLinearJSDLoss",
        "ChunkedLinearKTOLoss",
        "ChunkedLinearLogProbs",
        "ChunkedLinearLoss",
        "ChunkedLinearORPOLoss",
        "ChunkedLinearSimPOLoss",
        "LogitsCrossEntropyLoss",
        "__version__",
        "autograd_loss_and_logits_grad",
        "chunked_linear_cpo",
        "chunked_linear_cross_entropy",
        "chunked_linear_distillation",
        "chunked_linear_dpo",
        "chunked_linear_grpo",
        "chunked_linear_kto",
        "chunked_linear_log_probs",
        "chunked_linear_loss",
        "chunked_linear_orpo",
        "chunked_linear_simpo",
        "config",
        "cross_entropy",
        "errors",
        "functional",
        "modules",
        "selective_log_softmax",
    ]
    assert all(hasattr(greyhound_ops, name) for name in greyhound_ops.__all__)
    assert functional.__all__ == FUNCTIONAL
    assert modules.__all__ == MODULES


OPTIONS = (
    "ignore_index: 'int' = -100, reduction: 'str' = 'mean', label_smoothing: 'float' = 0.0, "
    "z_loss: 'float' = 0.0, logit_scale: 'float' = 1.0, softcap: 'float | None' = None, "
)
PER_CALL = "row_weight: 'Tensor | None' = None, denominator: 'float | Tensor | None' = None"
OUTPUTS = "return_z_loss: 'bool' = False, return_lse: 'bool' = False, "
PLAN = "chunk_size: 'int | None' = None, grad_weight_accum_dtype: 'str' = 'fp32'"


def test_signature_of_the_function() -> None:
    assert str(inspect.signature(functional.chunked_linear_cross_entropy)) == (
        "(input: 'Tensor', weight: 'Tensor', target: 'Tensor', bias: 'Tensor | None' = None, *, "
        f"class_weight: 'Tensor | None' = None, {OPTIONS}{PER_CALL}, {OUTPUTS}{PLAN}) "
        "-> 'Tensor | CrossEntropyOutput'"
    )


def test_signature_of_the_module() -> None:
    module = modules.ChunkedLinearCrossEntropyLoss
    assert str(inspect.signature(module)) == (
        f"(class_weight: 'Tensor | None' = None, *, {OPTIONS}{OUTPUTS}{PLAN}) -> 'None'"
    )
    assert str(inspect.signature(module.forward)) == (
        "(self, input: 'Tensor', weight: 'Tensor', target: 'Tensor', "
        f"bias: 'Tensor | None' = None, *, {PER_CALL}) "
        "-> 'Tensor | functional.CrossEntropyOutput'"
    )


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_backward"])
def test_ops_mutate_and_alias_nothing(name: str) -> None:
    schema = getattr(torch.ops.greyhound, name).default._schema
    assert not schema.is_mutable
    assert all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.greyhound, name).default.tags


def test_tensors_come_first_and_flags_last() -> None:
    names = [
        argument.name
        for argument in torch.ops.greyhound.linear_cross_entropy.default._schema.arguments
    ]
    assert names[:5] == ["input", "weight", "target", "bias", "class_weight"]
    assert names[-7:-3] == [
        "need_grad_input",
        "need_grad_weight",
        "need_grad_bias",
        "grads_are_private",
    ]
    # Added later, so that calls by position stay right.
    assert names[-3:] == ["row_weight", "divisor", "return_lse"]


def test_errors_can_be_caught_as_torchs() -> None:
    assert issubclass(errors.TargetOutOfRangeError, (ValueError, IndexError))
    assert issubclass(errors.NotDifferentiableTwiceError, RuntimeError)
    assert issubclass(errors.ForwardModeError, NotImplementedError)


def test_import_brings_no_compiler_and_no_kernels() -> None:
    # Compared with torch alone: what torch itself imports is its own affair. Its flop counter,
    # which the ops give their formulas to, imports triton.
    added = python(
        "import sys, torch, torch.utils.flop_counter; before = set(sys.modules); "
        "import greyhound_ops; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}"
        " | {'.'.join(name.split('.')[:2]) for name in set(sys.modules) - before}))"
    ).split()
    for module in ("triton", "torch._inductor", "torch._dynamo", "greyhound_lowering"):
        assert module not in added


def test_import_changes_no_setting_of_torch() -> None:
    code = """
import torch, torch._inductor.config as inductor, torch._dynamo.config as dynamo
state = lambda: (
    repr(inductor.shallow_copy_dict()), repr(dynamo.shallow_copy_dict()),
    torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
    torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
    torch.random.get_rng_state().tolist(),
)
before = state()
import greyhound_ops
print(before == state())
"""
    assert python(code) == "True"


def test_no_package_called_lowering() -> None:
    # From the root of a checkout the folder is a namespace at most, never a package.
    assert not (ROOT / "lowering" / "__init__.py").exists()
    spec = util.find_spec("lowering")
    assert spec is None or spec.origin is None


def test_works_from_a_source_tree() -> None:
    assert python("import greyhound_ops; print(greyhound_ops.__version__)")
