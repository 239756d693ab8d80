"""The op families: what may be drawn for each, and the problem that a draw stands for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.engine import LAYOUTS, Case, Draw, Outputs, Problem
from greyhound_ops import functional, reference
from greyhound_ops.functional.policy import GRPO_LOSS_TYPES
from greyhound_ops.functional.preference import CPO_LOSS_TYPES, DPO_LOSS_TYPES
from samples import SLACK

Axes = dict[str, tuple[Any, ...]]

#: Some values stand several times: as often as they are to be drawn.
HEAD: Axes = {
    "rows": ((5,), (0,), (1,), (13,), (33,), (2, 3), (3, 0), (2, 1, 4), ()),
    "hidden": (8, 1, 3, 16, 31),
    "classes": (11, 1, 2, 16, 129),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "bias": (False, True),
    "input_layout": tuple(LAYOUTS),
    "weight_layout": tuple(LAYOUTS),
    "vector_layout": ("contiguous", "strided", "expanded", "offset"),
    "target_layout": ("contiguous", "strided", "expanded", "transposed"),
    "target_dtype": (torch.int64, torch.int32),
    "ignored": (0.25, 0.0, 0.9, 1.0),
    "ignore_index": (-100, -1, 3, 2**20),
    "frozen": (
        (), (), ("weight", "bias"), ("input",), ("weight",), ("bias",), ("input", "bias"),
        ("input", "weight"), ("input", "weight", "bias"),
    ),
    "chunk_size": (None, 1, 2, 5, 7, 1000),
    "accum": ("fp32", "weight"),
    "upstream": ("random", "one", "zero", "negative", "strided", "expanded"),
    "scaled": (False, False, False, True),
    # The interpreter takes a hundred times as long.
    "kernels": ("torch",) * 15 + ("triton",),
}  # fmt: skip


MOSTLY_DENSE = ("contiguous",) * 4 + ("padded", "transposed", "offset")

#: Heads that Hopper's products serve, with rows beyond the ones that the gradient's memory holds.
MANY_ROWS: Axes = {
    "rows": ((200,), (130,), (330,), (3, 70), (64,)),
    "hidden": (136, 264, 128, 16),
    "classes": (500, 129, 257, 384),
    "dtype": (torch.bfloat16,) * 4 + (torch.float32,),
    "bias": (False, False, False, True),
    "weight_layout": MOSTLY_DENSE,
    "frozen": ((), (), ("bias",), ("input",), ("input", "bias")),
    "chunk_size": (None,) * 5 + (100,),
    "budget": (None, 2**15),
    "accum": ("fp32",),
    "reduction": ("mean", "sum"),
    "kernels": ("torch",) * 7 + ("triton",),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What may be drawn, and the problem that a draw stands for.

    Attributes:
        axes: Values per choice, the plainest first.
        problem: Makes a problem of a case on a device.
        permutes: Whether rows may be put in another order.
    """

    axes: Axes
    problem: Callable[[Case, torch.device], Problem]
    permutes: bool = True


def named_frozen(case: Case, operands: dict[str, Tensor]) -> frozenset[str]:
    return frozenset(case["frozen"]) & operands.keys()


def accum_slack(case: Case) -> float | None:
    """Each chunk rounds the sum once more when it is kept in the weight's own dtype."""
    if case["accum"] == "fp32" or case["dtype"] in (torch.float64, torch.float32):
        return None
    rows = max(int(torch.Size(case["rows"]).numel()), 1)
    chunks = 1 if case["chunk_size"] is None else -(-rows // case["chunk_size"])
    return SLACK[case["dtype"]] * max(chunks, 1)


def head_of(case: Case, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
    """Input, weight and bias with their layouts, and the target."""
    rows, hidden, classes = case["rows"], case["hidden"], case["classes"]
    operands = {
        "input": LAYOUTS[case["input_layout"]](draw.normal(*rows, hidden)),
        "weight": LAYOUTS[case["weight_layout"]](draw.normal(classes, hidden) / hidden**0.5),
    }
    if case["bias"]:
        operands["bias"] = LAYOUTS[case["vector_layout"]](draw.normal(classes))
    target = draw.target(rows, classes, case["ignore_index"])
    return operands, LAYOUTS[case["target_layout"]](target)


def unit_of(case: Case, *targets: Tensor) -> float:
    """Factor on the logits over the rows that a mean divides by; the largest of several means."""
    scale = max(abs(case.get("logit_scale", 1.0)), 1.0)
    if case["reduction"] != "mean":
        return scale
    return scale / min(max(int((each != case["ignore_index"]).sum()), 1) for each in targets)


# ------------------------------------------------------------------------------- cross entropy

CROSS_ENTROPY: Axes = {
    "reduction": ("mean", "sum", "none"),
    "label_smoothing": (0.0, 0.1, 1.0),
    "z_loss": (0.0, 1e-2),
    "logit_scale": (1.0, 0.25, -0.5, 4.0),
    "softcap": (None, 2.0, 30.0),
    "class_weight": (False, True),
}


def row_options(case: Case) -> dict[str, Any]:
    names = ("ignore_index", "label_smoothing", "z_loss", "logit_scale", "softcap")
    return {name: case[name] for name in names if name in case}


def statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def cross_entropy_unit(case: Case, others: dict[str, Any]) -> float:
    """One over what a mean divides by, times the factors that the terms have."""
    target, weight = others["target"], others.get("row_weight")
    counts = target != case["ignore_index"]
    divisor = counts.double() if weight is None else weight.double().masked_fill(~counts, 0.0)
    if case["class_weight"]:
        divisor = divisor * others["class_weight"].double()[target.long() * counts]
    total = float(divisor.sum()) if "denominator" not in others else float(others["denominator"])
    scale = max(abs(case["logit_scale"]), 1.0)
    return scale / abs(total) if case["reduction"] == "mean" and total else scale


def cross_entropy(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    operands, target = head_of(case, draw)
    rows, classes = case["rows"], case["classes"]
    others: dict[str, Any] = {"target": target, "reduction": case["reduction"], **row_options(case)}
    vector = LAYOUTS[case["vector_layout"]]
    if case["class_weight"]:
        others["class_weight"] = vector(draw.uniform(classes))
    if case["row_weight"]:
        others["row_weight"] = vector(draw.uniform(*rows, low=-0.25 if case["sign"] else 0.25))
    if case["reduction"] == "mean" and case["denominator"] is not None:
        others["denominator"] = case["denominator"]
        if case["denominator_is_tensor"]:
            others["denominator"] = torch.tensor(case["denominator"], device=device)
    wide = statistics(case["dtype"])
    shape = rows if case["reduction"] == "none" else ()
    upstreams: dict[str, Tensor | None] = {"loss": draw.upstream(case["upstream"], shape, wide)}
    wanted = {"return_lse": case["lse"] is not None, "return_z_loss": case["return_z_loss"]}
    if case["lse"] is not None:
        upstreams["lse"] = draw.upstream(case["lse"], rows, wide)
        if case["loss_unused"]:
            upstreams["loss"] = None
    several = any(wanted.values())

    def call(function: Callable[..., Any], **options: Any) -> Outputs:
        result = function(**options)
        if not several:
            return {"loss": result}
        names = ("loss", "z_loss", "lse")
        return {name: value for name, value in zip(names, result, strict=True) if value is not None}

    ignored = target == case["ignore_index"]
    others |= wanted
    return Problem(
        operands,
        others,
        functools.partial(call, functional.chunked_linear_cross_entropy),
        functools.partial(call, reference.linear_cross_entropy),
        upstreams,
        named_frozen(case, operands),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        {"input": ignored},
        ("input", "target", "row_weight", "lse")
        + (("loss", "z_loss") if case["reduction"] == "none" else ()),
        accum_slack(case),
        case["autocast"] if case["dtype"] == torch.float32 else None,
        unit=cross_entropy_unit(case, others),
        terms=4.0,
    )


# ----------------------------------------------------------------------------------- log-probs


def log_probs(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    operands, target = head_of(case, draw)
    others: dict[str, Any] = {"target": target, **row_options(case)}
    vector = LAYOUTS[case["vector_layout"]]
    if case["temperature"] == "rows":
        operands["temperature"] = vector(draw.uniform(*case["rows"], low=0.5))
    elif case["temperature"] == "scalar":
        operands["temperature"] = draw.uniform(low=0.5)
    else:
        others["temperature"] = case["temperature"]
    wide = statistics(case["dtype"])
    used = {"log_probs": case["upstream"], "entropy": case["entropy"], "lse": case["lse"]}
    upstreams = {
        name: None if kind is None else draw.upstream(kind, case["rows"], wide)
        for name, kind in used.items()
    }
    if not case["log_probs_used"]:
        upstreams["log_probs"] = None

    def ours(**options: Any) -> Outputs:
        result = functional.chunked_linear_log_probs(
            **options,
            return_entropy=case["entropy"] is not None,
            return_lse=case["lse"] is not None,
        )
        if isinstance(result, Tensor):
            return {"log_probs": result}
        named = {"log_probs": result.log_probs, "entropy": result.entropy, "lse": result.lse}
        return {name: value for name, value in named.items() if value is not None}

    def plain(**options: Any) -> Outputs:
        result = reference.linear_log_probs(**options)
        found = {"log_probs": result.log_probs}
        if case["entropy"] is not None:
            found["entropy"] = result.entropy
        if case["lse"] is not None:
            found["lse"] = result.lse
        return found

    frozen = set(case["frozen"]) | (set() if case["temperature_learns"] else {"temperature"})
    only_targets = case["entropy"] is None and case["lse"] is None
    return Problem(
        operands,
        others,
        ours,
        plain,
        upstreams,
        frozenset(frozen) & operands.keys(),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        {"input": target == case["ignore_index"]} if only_targets else {},
        ("input", "target", "log_probs", "entropy", "lse")
        + (("temperature",) if case["temperature"] == "rows" else ()),
        accum_slack(case),
        case["autocast"] if case["dtype"] == torch.float32 else None,
    )


# -------------------------------------------------------------------------------- distillation


def distillation(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    operands, target = head_of(case, draw)
    lift = 1.0
    if case["divergence"] == "cosine":
        # Terms of 1 / |logits|: all that is left where logits have but one direction, as those of
        # one class or one hidden unit have, and the gradient is zero.
        logits = F.linear(*(operands[name].double() for name in ("input", "weight")))
        if case["bias"]:
            logits = logits + operands["bias"].double()
        norms = logits.norm(dim=-1)
        lift = max([1.0, *(1.0 / norms[norms > 0.0]).flatten().tolist()])
    rows, classes, width = case["rows"], case["classes"], case["teacher_hidden"]
    teacher = case["teacher_dtype"] or case["dtype"]
    if torch.float64 in (teacher, case["dtype"]):
        teacher = case["dtype"]
    layout = LAYOUTS[case["teacher_layout"]]
    others: dict[str, Any] = {
        "teacher_input": layout(draw.normal(*rows, width, dtype=teacher)),
        "teacher_weight": layout(draw.normal(classes, width, dtype=teacher) / width**0.5),
        "target": target if case["target"] or case["hard_weight"] else None,
        "ignore_index": case["ignore_index"],
        "reduction": case["reduction"],
    }
    for name in ("divergence", "beta", "temperature", "soft_weight", "hard_weight"):
        others[name] = case[name]
    if case["teacher_bias"]:
        others["teacher_bias"] = draw.normal(classes, dtype=teacher)

    def call(function: Callable[..., Any], **options: Any) -> Outputs:
        result = function(**options)
        if isinstance(result, Tensor):
            return {"loss": result}
        return dict(zip(("loss", "soft", "hard"), result, strict=True))

    others["return_parts"] = case["return_parts"]
    shape = rows if case["reduction"] == "none" else ()
    wide = statistics(case["dtype"])
    return Problem(
        operands,
        others,
        functools.partial(call, functional.chunked_linear_distillation),
        functools.partial(call, reference.linear_distillation),
        {"loss": draw.upstream(case["upstream"], shape, wide)},
        named_frozen(case, operands),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        {"input": target == case["ignore_index"]} if others["target"] is not None else {},
        ("input", "teacher_input", "target")
        + (("loss", "soft", "hard") if case["reduction"] == "none" else ()),
        accum_slack(case),
        unit=lift * (unit_of(case, target) if others["target"] is not None else 1.0),
    )


# -------------------------------------------------------------------------------- generic loss


def _wide(value: Tensor) -> Tensor:
    return value.to(statistics(value.dtype))


def nll(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(_wide(logits), target.long(), ignore_index=ignore_index, reduction="sum")


def squares(logits: Tensor, values: Tensor) -> Tensor:
    return (_wide(logits) - _wide(values)).square().sum()


def weighted(logits: Tensor, values: Tensor, rows: Tensor, classes: Tensor) -> Tensor:
    per_row = (_wide(logits) * classes - values).tanh().sum(-1)
    return (per_row * rows).sum()


def binary(logits: Tensor, values: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(_wide(logits), _wide(values), reduction="sum")


def free_energy(logits: Tensor) -> Tensor:
    return _wide(logits).logsumexp(-1).square().sum()


LOSSES = {each.__name__: each for each in (nll, squares, weighted, binary, free_energy)}
ADAPTERS = {name: functional.autograd_loss_and_logits_grad(loss) for name, loss in LOSSES.items()}


def generic(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    operands, target = head_of(case, draw)
    rows, classes, name = case["rows"], case["classes"], case["loss"]
    vector = LAYOUTS[case["vector_layout"]]
    values = draw.normal(*rows, classes)
    arguments: list[str] = []
    others: dict[str, Any] = {}
    if name == "nll":
        arguments = ["target", "ignore_index"]
        others = {"target": target, "ignore_index": case["ignore_index"]}
    elif name in ("squares", "weighted", "binary"):
        arguments = ["values"]
        others = {"values": values.sigmoid() if name == "binary" else values}
    if name == "weighted":
        arguments += ["row_factor", "class_factor"]
        operands |= {
            "row_factor": vector(draw.uniform(*rows)),
            "class_factor": vector(draw.uniform(classes)),
        }

    def ours(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Outputs:
        args: list[Any] = [options.pop(each) for each in arguments]
        if name == "weighted":
            # Sizes that happen to be equal must not decide.
            args[1:] = [functional.per_row(args[1]), functional.whole(args[2])]
        return {
            "loss": functional.chunked_linear_loss(
                input, weight, ADAPTERS[name], *args, bias=bias, **options
            )
        }

    def plain(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Outputs:
        flat = [options[each] for each in arguments]
        for index, each in enumerate(arguments):
            if each in ("values", "target", "row_factor"):
                keep = 1 if each == "values" else 0
                flat[index] = flat[index].reshape(-1, *flat[index].shape[len(rows) :][:keep])
        return {"loss": reference.linear_loss(input, weight, LOSSES[name], *flat, bias=bias)}

    learns = set(case["learns"]) & operands.keys()
    frozen = set(case["frozen"]) | ({"row_factor", "class_factor"} - learns)
    return Problem(
        operands,
        others,
        ours,
        plain,
        {"loss": draw.upstream(case["upstream"], (), statistics(case["dtype"]))},
        frozenset(frozen) & operands.keys(),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        {"input": target == case["ignore_index"]} if name == "nll" else {},
        ("input", "target", "values", "row_factor"),
        accum_slack(case),
    )


# --------------------------------------------------------------------------------------- logits

LOGITS_ONLY = ("rows", "classes", "dtype", "target_layout", "target_dtype", "ignored",
               "ignore_index", "upstream", "scaled", "vector_layout", "kernels")  # fmt: skip


def existing_logits(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    rows, classes = case["rows"], case["classes"]
    operands = {"logits": LAYOUTS[case["logits_layout"]](draw.normal(*rows, classes) * 3)}
    target = LAYOUTS[case["target_layout"]](draw.target(rows, classes, case["ignore_index"]))
    wide = statistics(case["dtype"])
    if case["selective"]:
        others: dict[str, Any] = {"index": target, "ignore_index": case["ignore_index"]}
        vector = LAYOUTS[case["vector_layout"]]
        if case["temperature"] == "rows":
            operands["temperature"] = vector(draw.uniform(*rows, low=0.5))
        elif case["temperature"] == "scalar":
            operands["temperature"] = draw.uniform(low=0.5)
        else:
            others["temperature"] = case["temperature"]
        return Problem(
            operands,
            others,
            lambda **options: {"result": functional.selective_log_softmax(**options, dtype=wide)},
            lambda **options: {"result": reference.selective_log_softmax(**options)},
            {"result": draw.upstream(case["upstream"], rows, wide)},
            frozenset() if case["temperature_learns"] else frozenset({"temperature"}),
            zero_rows={"logits": target == case["ignore_index"]},
        )
    others = {"target": target, "reduction": case["reduction"], **row_options(case)}
    if case["class_weight"]:
        others["class_weight"] = LAYOUTS[case["vector_layout"]](draw.uniform(classes))
    shape = rows if case["reduction"] == "none" else ()
    return Problem(
        operands,
        others,
        lambda **options: {"result": functional.cross_entropy(**options)},
        lambda **options: {"result": reference.cross_entropy(**options)},
        {"result": draw.upstream(case["upstream"], shape, wide)},
        zero_rows={"logits": target == case["ignore_index"]},
        unit=unit_of(case, target),
    )


# ---------------------------------------------------------------------------------------- terms


def terms(case: Case, device: torch.device) -> Problem:
    draw = Draw(case, device)
    count, rows, hidden, classes = case["terms"], case["rows"], case["hidden"], case["classes"]
    heads = case["shared"] == "input"
    operands: dict[str, Tensor] = {}
    targets = []
    for k in range(count):
        # Rows and classes of its own for each term, where they are not shared.
        length = rows if heads else ((rows[0] + 2 * k, *rows[1:]) if rows else rows)
        size = classes + 3 * k if heads else classes
        if k == 0 or not heads:
            operands[f"input{k}"] = LAYOUTS[case["input_layout"]](draw.normal(*length, hidden))
        if k == 0 or heads:
            weight = draw.normal(size, hidden) / hidden**0.5
            operands[f"weight{k}"] = LAYOUTS[case["weight_layout"]](weight)
            if case["bias"]:
                operands[f"bias{k}"] = LAYOUTS[case["vector_layout"]](draw.normal(size))
        target = draw.target(length, size, case["ignore_index"])
        targets.append(LAYOUTS[case["target_layout"]](target))
    options = {"reduction": case["reduction"], **row_options(case)}
    factors = None if case["term_weights"] is None else case["term_weights"][:count]
    detached = [bool(k % 2) for k in range(count)] if case["detach_head"] else [False] * count

    def listed(values: dict[str, Tensor], name: str) -> list[Tensor]:
        return [value for key, value in values.items() if key.startswith(name)]

    def ours(chunk_size: int | None, grad_weight_accum_dtype: str, **values: Tensor) -> Outputs:
        inputs, weights = listed(values, "input"), listed(values, "weight")
        biases = listed(values, "bias")
        common: dict[str, Any] = {
            "term_weights": factors, "chunk_size": chunk_size,
            "grad_weight_accum_dtype": grad_weight_accum_dtype, **options,
        }  # fmt: skip
        if heads:
            result = functional.chunked_multi_head_cross_entropy(
                inputs[0], weights, targets, biases or None, **common
            )
        else:
            result = functional.chunked_multi_token_cross_entropy(
                inputs, weights[0], targets, biases[0] if biases else None,
                detach_head=detached, **common,
            )  # fmt: skip
        return {"loss": result.loss, "losses": result.losses}

    def plain(**values: Tensor) -> Outputs:
        inputs, weights = listed(values, "input"), listed(values, "weight")
        biases = listed(values, "bias")
        losses = []
        for k in range(count):
            weight = weights[k if heads else 0]
            bias = biases[k if heads else 0] if biases else None
            if detached[k] and not heads:
                weight, bias = weight.detach(), None if bias is None else bias.detach()
            losses.append(
                reference.linear_cross_entropy(
                    inputs[0 if heads else k], weight, targets[k], bias, **options
                )
            )
        stacked = torch.stack(losses)
        weights_of = [1.0] * count if factors is None else list(factors)
        total = (stacked * stacked.new_tensor(weights_of)).sum()
        return {"loss": total, "losses": stacked.detach()}

    frozen = {
        name for name in operands
        if name.rstrip("0123456789") in case["frozen"]
    }  # fmt: skip
    if not heads and count == 1 and detached[0]:
        frozen |= {"weight0", "bias0"}
    ignored = [target == case["ignore_index"] for target in targets]
    zero = {f"input{k}": ignored[k] for k in range(count)}
    if heads:
        zero = {"input0": torch.stack(ignored).all(0)}
    return Problem(
        operands,
        {},
        ours,
        plain,
        {"loss": draw.upstream(case["upstream"], (), statistics(case["dtype"]))},
        frozenset(frozen) & operands.keys(),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        zero,
        slack=terms_slack(case),
        unit=unit_of(case, *targets) * max(map(abs, factors or (1.0,))),
        terms=8.0,
    )


def terms_slack(case: Case) -> float | None:
    slack = accum_slack(case)
    return None if slack is None else slack * case["terms"]


# ------------------------------------------------------------------- preference and policy losses

# What each loss needs beside the defaults.
DPO_NEEDS: dict[str, dict[str, Any]] = {
    "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 1e-3},
}
GRPO_NEEDS: dict[str, dict[str, Any]] = {
    "cispo": {"epsilon_high": 1.3},
    "dr_grpo": {"max_completion_length": 9},
    "luspo": {"importance_sampling_level": "sequence"},
}


def _only_loss(function: Callable[..., Any], **options: Any) -> Outputs:
    result = function(**options)
    return {"loss": result if isinstance(result, Tensor) else result.loss}


def _sequences(case: Case, device: torch.device) -> tuple[Draw, dict[str, Tensor], dict[str, Any]]:
    draw = Draw(case, device)
    case = {**case, "rows": (2 * case["pairs"], case["tokens"])}
    operands, target = head_of(case, draw)
    return draw, operands, {"target": target, **row_options(case)}


def _reference_model(case: Case, draw: Draw, others: dict[str, Any]) -> None:
    shape = others["target"].shape
    if case["reference"] == "head":
        others["ref_input"] = draw.normal(*shape, 6)
        others["ref_weight"] = draw.normal(case["classes"], 6) / 2
    elif case["reference"] == "log_probs":
        others["ref_log_probs"] = -draw.uniform(*shape, dtype=statistics(case["dtype"]))


def preference(case: Case, device: torch.device) -> Problem:
    draw, operands, others = _sequences(case, device)
    kind, _, loss_type = case["loss"].partition(":")
    if kind in ("dpo", "kto"):
        _reference_model(case, draw, others)
    if loss_type:
        others |= {"loss_type": loss_type, "beta": 0.3, **DPO_NEEDS.get(loss_type, {})}
    if kind in ("dpo", "cpo", "simpo", "orpo"):
        others["nll_weight"] = case["nll_weight"]
    if kind == "kto":
        shape = others["target"].shape[:1]
        others["desirable"] = (draw.normal(*shape, dtype=torch.float32) > 0).to(device)
        others["kl"] = draw.uniform(*shape, dtype=statistics(case["dtype"]))
    if kind in ("dpo", "cpo", "kto") and case["average"] and loss_type != "aot_unpaired":
        others["average_log_prob"] = True
    name = {"dpo": "dpo", "cpo": "cpo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}[kind]
    ours, plain = (
        getattr(functional, f"chunked_linear_{name}"), getattr(reference, f"linear_{name}"),
    )  # fmt: skip
    only_ours = {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]}
    if kind in ("dpo", "kto") and case["reference"] is None:
        only_ours["reference_free"] = True
    return Problem(
        operands,
        others,
        functools.partial(_only_loss, ours),
        functools.partial(_only_loss, plain),
        {"loss": draw.upstream(case["upstream"], (), statistics(case["dtype"]))},
        named_frozen(case, operands),
        only_ours,
        {"input": others["target"] == case["ignore_index"]},
    )


def policy(case: Case, device: torch.device) -> Problem:
    draw, operands, others = _sequences(case, device)
    wide = statistics(case["dtype"])
    shape = others["target"].shape
    others["loss_type"] = case["loss"]
    others |= GRPO_NEEDS.get(case["loss"], {})
    others["temperature"] = case["temperature"]
    if case["beta"]:
        _reference_model(case, draw, others)
        if "ref_input" in others or "ref_log_probs" in others:
            others["beta"] = case["beta"]
            others["use_bias_correction_kl"] = case["corrected"]
    others["entropy_coef"] = case["entropy_coef"]
    advantages = draw.normal(*(shape if case["by_token"] else shape[:1]), dtype=torch.float32)
    others["advantages"] = advantages.bfloat16().float()
    if case["mask"]:
        others["mask"] = (draw.normal(*shape, dtype=torch.float32) > -0.5).to(device)
    if case["off_policy"]:
        # Ratios well apart from the bounds: rounding puts no token on the other side of one.
        with torch.no_grad():
            exact = reference.linear_log_probs(
                *(operands[name].double() for name in ("input", "weight")),
                others["target"],
                operands["bias"].double() if "bias" in operands else None,
                ignore_index=case["ignore_index"],
                temperature=case["temperature"],
                logit_scale=case["logit_scale"],
                softcap=case["softcap"],
            ).log_probs
        ratios = torch.tensor([0.4, 0.9, 1.1, 2.2], dtype=torch.float64, device=device)
        # One per sequence: their mean is then as far from the bounds.
        picked = ratios[torch.arange(shape[0], device=device) % 4].log().unsqueeze(1)
        others["old_log_probs"] = (exact - picked).to(wide)
    return Problem(
        operands,
        others,
        functools.partial(_only_loss, functional.chunked_linear_grpo),
        functools.partial(_only_loss, reference.linear_grpo),
        {"loss": draw.upstream(case["upstream"], (), wide)},
        named_frozen(case, operands),
        {"chunk_size": case["chunk_size"], "grad_weight_accum_dtype": case["accum"]},
        terms=2.0,
    )


SEQUENCES: Axes = {
    **{name: values for name, values in HEAD.items() if name != "rows"},
    # Whether terms cancel decides the relative error of a difference: that is for float64.
    "dtype": (torch.float64, torch.float64, torch.float32),
    "pairs": (3, 0, 1, 2),
    "tokens": (4, 1, 7),
    "reference": (None, "head", "log_probs"),
    "logit_scale": (1.0, 0.5),
    "softcap": (None, 3.0),
}

FAMILIES: dict[str, Family] = {
    "linear_cross_entropy": Family(
        {
            **HEAD, **CROSS_ENTROPY,
            "row_weight": (False, True),
            "sign": (False, True),
            "denominator": (None, 7, 2.5),
            "denominator_is_tensor": (False, True),
            "lse": (None, None, "random", "strided", "zero"),
            "loss_unused": (False, False, True),
            "return_z_loss": (False, False, True),
            "autocast": (None, None, torch.bfloat16),
        },
        cross_entropy,
    ),
    "linear_log_probs": Family(
        {
            **HEAD,
            "logit_scale": CROSS_ENTROPY["logit_scale"],
            "softcap": CROSS_ENTROPY["softcap"],
            "temperature": (1.0, 0.7, "rows", "scalar"),
            "temperature_learns": (True, False),
            "entropy": (None, "random", "strided", "zero"),
            "lse": (None, "random", "expanded"),
            "log_probs_used": (True, True, False),
            "autocast": (None, None, torch.bfloat16),
        },
        log_probs,
    ),
    "linear_distillation": Family(
        {
            **HEAD,
            "divergence": ("jsd", "kl", "reverse_kl", "tvd", "cosine"),
            "beta": (0.5, 0.0, 1.0, 0.1),
            "temperature": (1.0, 2.0, 0.5),
            "soft_weight": (1.0, 0.3, 0.0),
            "hard_weight": (0.0, 0.7),
            "reduction": CROSS_ENTROPY["reduction"],
            "teacher_hidden": (5, 1, 16),
            "teacher_layout": tuple(LAYOUTS),
            "teacher_dtype": (None, torch.float32, torch.bfloat16),
            "teacher_bias": (False, True),
            "target": (True, False),
            "return_parts": (False, True),
        },
        distillation,
    ),
    "linear_loss": Family(
        {
            **HEAD,
            "rows": HEAD["rows"][:-1],
            "loss": tuple(LOSSES),
            "learns": ((), ("row_factor", "class_factor"), ("row_factor",), ("class_factor",)),
        },
        generic,
    ),
    "logits": Family(
        {
            **{name: HEAD[name] for name in LOGITS_ONLY}, **CROSS_ENTROPY,
            "logits_layout": tuple(LAYOUTS),
            "selective": (False, True),
            "temperature": (1.0, 0.7, "rows", "scalar"),
            "temperature_learns": (True, False),
        },
        existing_logits,
        permutes=False,
    ),
    "linear_cross_entropy_terms": Family(
        {
            **HEAD,
            **{name: CROSS_ENTROPY[name] for name in
               ("label_smoothing", "z_loss", "logit_scale", "softcap")},
            "reduction": ("mean", "sum"),
            "terms": (2, 1, 3),
            "shared": ("head", "input"),
            "term_weights": (None, (0.5, 2.0, -1.0), (0.0, 1.0, 0.25)),
            "detach_head": (False, True),
        },
        terms,
        permutes=False,
    ),
    "preference": Family(
        {
            **SEQUENCES,
            "loss": (
                *(f"dpo:{each}" for each in DPO_LOSS_TYPES),
                *(f"cpo:{each}" for each in CPO_LOSS_TYPES),
                "simpo", "orpo", "kto",
            ),
            "nll_weight": (0.0, 0.6),
            "average": (False, True),
        },
        preference,
        permutes=False,
    ),
    "policy": Family(
        {
            **SEQUENCES,
            "loss": tuple(GRPO_LOSS_TYPES),
            "beta": (0.0, 0.3),
            "corrected": (False, True),
            "entropy_coef": (0.0, 0.05),
            "by_token": (False, True),
            "mask": (False, True),
            "off_policy": (False, True),
            "temperature": (1.0, 0.7),
        },
        policy,
        permutes=False,
    ),
}  # fmt: skip
FAMILIES |= {
    f"{name}_many_rows": dataclasses.replace(
        FAMILIES[name], axes={**FAMILIES[name].axes, **MANY_ROWS, **more}
    )
    for name, more in {
        "linear_cross_entropy": {"lse": (None, None, None, "random")},
        "linear_distillation": {
            "teacher_hidden": (72, 136, 16, 5),
            "teacher_dtype": (None,) * 5 + (torch.float32,),
            "teacher_layout": MOSTLY_DENSE,
        },
    }.items()
}
