"""The shapes that are measured, and the tensors they are measured on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from benchmarks.losses import IGNORE_INDEX, LOSSES, SEQUENCES, Loss

Accum = Literal["fp32", "weight"]
CaseMode = Literal["full", "no_grad"]


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype and what is asked of the loss.

    Attributes:
        name: What the command line and the results call it.
        N: Rows (tokens).
        D: Hidden size.
        V: Vocabulary size.
        dtype: Of input, weight and bias.
        mode: ``"full"`` for a training step, ``"no_grad"`` for the loss alone.
        frozen_weight: The weight needs no gradient.
        ignored_share: Share of rows whose target is ``ignore_index``, scattered at random.
        loss: The loss after the projection, a key of `benchmarks.losses.LOSSES`.
            ``"distillation"`` is the Jensen-Shannon divergence (beta 0.5, temperature 1) from a
            teacher with a head of the same size.
        bias: The projection has a bias, which needs a gradient in ``"full"`` mode.
        accum: How this project's ops accumulate ``grad_weight`` unless a provider fixes it.
        dynamic: Compile with dynamic shapes.
    """

    name: str
    N: int
    D: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    mode: CaseMode = "full"
    frozen_weight: bool = False
    ignored_share: float = 0.0
    loss: Loss = "cross_entropy"
    bias: bool = False
    accum: Accum = "fp32"
    dynamic: bool = False

    @property
    def valid_rows(self) -> int:
        """Rows that are not ignored; a loss that shifts its labels leaves a few more out."""
        return self.N - round(self.N * self.ignored_share)

    @property
    def dtype_name(self) -> str:
        """The dtype without its ``torch.`` prefix."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case: input ``[N, D]``, weight ``[V, D]``, target ``[N]``, bias ``[V]``.

    A loss that sees sequences has input ``[B, T, D]`` and target ``[B, T]`` with ``B * T = N``. A
    teacher's (a reference model's) input and weight have the shapes of the student's.

    Attributes:
        norm_weight: ``[D]``, of the norm in front of the projection; needs a gradient.
        reward: ``[N]`` fp32, the factor on each row's log-prob.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    teacher_input: Tensor | None = None
    teacher_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    reward: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """What a model would hold as parameters."""
        found = (self.weight, self.bias, self.norm_weight, self.teacher_weight)
        return [tensor for tensor in found if tensor is not None]

    def clear_grads(self) -> None:
        """Drops the gradients of the last pass."""
        for tensor in (self.input, *self.parameters):
            tensor.grad = None


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Draws random tensors for a case: normal input, weight scaled by ``1 / sqrt(D)``.

    Args:
        case: The case.
        device: Where the tensors live.
        seed: Of the generator; the same seed gives the same tensors on one kind of device.

    Returns:
        Leaf tensors, with ``requires_grad`` set as the case asks.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=case.dtype, generator=generator)

    training = case.mode == "full"
    parts = LOSSES[case.loss]
    shape = (SEQUENCES, case.N // SEQUENCES) if parts.by_sequence else (case.N,)
    if math.prod(shape) != case.N:
        raise ValueError(f"N: expected a multiple of {SEQUENCES} for {case.loss}, got {case.N}")
    hidden = normal(*shape, case.D).requires_grad_(training)
    weight = normal(case.V, case.D).mul_(case.D**-0.5)
    weight.requires_grad_(training and not case.frozen_weight)
    bias = normal(case.V).requires_grad_(training) if case.bias else None
    target = torch.randint(case.V, (case.N,), device=device, generator=generator)
    ignored = torch.randperm(case.N, device=device, generator=generator)[case.valid_rows :]
    target[ignored] = IGNORE_INDEX
    inputs = Inputs(hidden, weight, target.view(shape), bias)
    if "teacher_weight" in parts.operands:
        teacher_input, teacher_weight = normal(*shape, case.D), normal(case.V, case.D)
        teacher_weight.mul_(case.D**-0.5)
        if case.loss == "dpo":  # a policy begins as its reference; far from it nothing is learned
            teacher_input = teacher_input.mul_(0.1).add_(hidden.detach())
            teacher_weight = teacher_weight.mul_(0.1).add_(weight.detach())
        inputs = replace(inputs, teacher_input=teacher_input, teacher_weight=teacher_weight)
    if "norm_weight" in parts.operands:
        # Around 1 for Llama; Gemma's adds the 1 itself.
        norm_weight = normal(case.D).mul_(0.1).add_(0.0 if case.loss == "gemma2_head" else 1.0)
        inputs = replace(inputs, norm_weight=norm_weight.requires_grad_(training))
    if "reward" in parts.operands:
        reward = torch.rand(case.N, device=device, generator=generator).add_(0.5)
        inputs = replace(inputs, reward=reward)
    return inputs


_BASES = {
    case.name: case
    for case in (
        Case("llama8k", 8192, 4096, 128256),
        Case("qwen8k", 8192, 2048, 151936),
        Case("gemma32k", 32768, 2048, 256000),
        Case("llama4k", 4096, 4096, 128256),
        Case("small64", 64, 1024, 32000),
        Case("small256", 256, 1024, 32000),
        Case("small1024", 1024, 1024, 32000),
        Case("odd64", 64, 1024, 50257),
        Case("odd1024", 1024, 1024, 50257),
        Case("tiny", 48, 16, 96, dtype=torch.float32),
        Case("jsd4k", 4096, 4096, 128256, loss="distillation"),
        Case("jsd4kqwen", 4096, 4096, 151936, loss="distillation"),
        Case("llamahead", 8192, 4096, 128256, loss="llama_head"),
        Case("gemma2head", 8192, 2304, 256000, loss="gemma2_head"),
        Case("kd4k", 4096, 4096, 128256, loss="kd_ce"),
        Case("dpo4k", 4096, 4096, 128256, loss="dpo"),
        Case("logp8k", 8192, 4096, 128256, loss="log_probs"),
    )
}

# A case name is a base and any of these suffixes in any order, such as llama8k-frozen-bias.
SUFFIXES = {
    "frozen": "the weight needs no gradient",
    "forward": "no gradient at all",
    "ignoredNN": "NN% of the rows are ignored",
    "bias": "with a bias",
    "fp32": "fp32 tensors",
    "jsd": "distillation by the Jensen-Shannon divergence instead of cross entropy",
    "llama": "RMSNorm, head and the causal loss of transformers, which shifts its labels",
    "gemma2": "the same with Gemma's norm and logits capped at 30",
    "kd": "distillation at temperature 2 mixed with cross entropy",
    "dpo": "a step of DPO with a reference model",
    "logp": "log-probs, each with a gradient of its own",
    "accumweight": "this project's ops accumulate grad_weight in the weight's dtype",
    "dynamic": "compiled with dynamic shapes",
}

_LOSS_SUFFIXES: dict[str, Loss] = {
    "jsd": "distillation",
    "llama": "llama_head",
    "gemma2": "gemma2_head",
    "kd": "kd_ce",
    "dpo": "dpo",
    "logp": "log_probs",
}

MAIN_CASES = (
    "llama8k",
    "qwen8k",
    "gemma32k",
    "llama4k",
    "llama8k-frozen",
    "llama8k-ignored50",
    "llama8k-ignored75",
    "llama8k-ignored95",
    "llama8k-forward",
    "small64",
    "small256",
    "small1024",
    "odd64",
    "odd1024",
    "tiny",
    "jsd4k",
    "jsd4k-frozen",
    "jsd4kqwen",
    "jsd4kqwen-frozen",
    "tiny-jsd",
    "llamahead",
    "gemma2head",
    "kd4k",
    "dpo4k",
    "logp8k",
)


def get_case(name: str) -> Case:
    """Builds a case from its name.

    Args:
        name: A base (``llama8k``, or sizes such as ``8192x4096x128256``) and suffixes, joined
            by hyphens.

    Returns:
        The case, under exactly this name.

    Raises:
        ValueError: Unknown base or suffix.
    """
    base, *suffixes = name.split("-")
    if base in _BASES:
        case = replace(_BASES[base], name=name)
    elif sizes := re.fullmatch(r"(\d+)x(\d+)x(\d+)", base):
        N, D, V = map(int, sizes.groups())
        case = Case(name, N, D, V)
    else:
        raise ValueError(f"unknown case {base!r}: expected NxDxV or one of {', '.join(_BASES)}")
    for suffix in suffixes:
        if suffix == "frozen":
            case = replace(case, frozen_weight=True)
        elif suffix == "forward":
            case = replace(case, mode="no_grad")
        elif suffix == "bias":
            case = replace(case, bias=True)
        elif suffix == "fp32":
            case = replace(case, dtype=torch.float32)
        elif suffix in _LOSS_SUFFIXES:
            case = replace(case, loss=_LOSS_SUFFIXES[suffix])
        elif suffix == "dynamic":
            case = replace(case, dynamic=True)
        elif suffix == "accumweight":
            case = replace(case, accum="weight")
        elif percent := re.fullmatch(r"ignored(\d\d?)", suffix):
            case = replace(case, ignored_share=int(percent[1]) / 100)
        else:
            raise ValueError(f"unknown suffix {suffix!r}: expected one of {', '.join(SUFFIXES)}")
    return case
