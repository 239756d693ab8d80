"""Corpus of the ways in which a projection followed by a loss is written in public training code.

Each form is a small module of our own that keeps the spelling seen in the wild (which torch calls,
in which order), because the spelling is what a graph rewrite has to recognise. `origin` names where
a form was seen.

    module, inputs = FORMS["A01"].make(Dims(V=101))
    out = call(module, inputs)
    loss_of(out).backward()

`make` seeds the global generator, so two calls with equal `Dims` on one device give equal modules
and inputs. Some forms change their own buffers when they run (J03, J08, M03): make a fresh one for
every run that is compared with another.

Series: A spelling of the projection; B reshapes, slices and dtypes; C options of cross entropy;
D transforms of the logits; E cross entropy by hand; F preference and policy losses; G distillation;
H other losses; I several heads and wrappers; J must be left, or hard; K library models; L further
spellings; M near misses that must be left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Expected: TypeAlias = Literal["rewrite", "leave", "either"]
"""What a rewrite should do.

rewrite: projection and loss can run in row chunks without a whole [N, V] tensor.
leave: rewriting would be wrong, or saves nothing because [N, V] is needed anyway.
either: right both ways; rewriting takes more than the base case, as `why` says.
"""

Level: TypeAlias = Literal["pattern", "rowwise", "multi", "none"]
"""The least machinery that rewrites a form.

pattern: one fixed chain of matmul, views, casts, and cross entropy with its options.
rowwise: analysis of a row-wise region (pointwise, reductions over V, gathers within a row).
multi: the same over two or more [N, V] projections in one region.
none: left alone.
"""


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes, dtype and device of one instance of a form."""

    B: int = 2
    T: int = 6
    H: int = 8
    V: int = 37  # prime, so that the vocabulary axis is easy to recognise in a graph
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.B * self.T


Inputs: TypeAlias = "tuple[Tensor, ...] | dict[str, Tensor]"
MakeForm: TypeAlias = Callable[[Dims], "tuple[nn.Module, Inputs]"]
MakeInputs: TypeAlias = Callable[[Dims], "tuple[Tensor, ...]"]


@dataclasses.dataclass(frozen=True)
class Form:
    """One way of writing projection and loss, and what a rewrite should make of it."""

    id: str
    name: str
    origin: str
    expected: Expected
    level: Level
    why: str
    make: MakeForm
    is_hugging_face: bool = False
    needs_grad: bool = True


FORMS: dict[str, Form] = {}


def add_form(form: Form) -> None:
    """Put a form into `FORMS`; ids are unique."""
    if form.id in FORMS:
        raise ValueError(f"form id {form.id} is taken by {FORMS[form.id].name!r}")
    if (form.expected == "leave") != (form.level == "none"):
        raise ValueError(f"form {form.id}: level must be 'none' exactly when it is to be left")
    FORMS[form.id] = form


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Run a form on what its `make` returned."""
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def loss_of(out: Any) -> Tensor:
    """The scalar to back-propagate from whatever a form returns."""
    if isinstance(out, Tensor):
        return out if out.ndim == 0 else out.sum()
    if getattr(out, "loss", None) is not None:
        return loss_of(out.loss)
    if isinstance(out, dict):
        return loss_of(out["loss"])
    return loss_of(out[0])


# ------------------------------------------------------------------------------------------ inputs


def normal(dims: Dims, *shape: int, requires_grad: bool = False) -> Tensor:
    """Standard normal values in the dtype and on the device of `dims`."""
    return torch.randn(*shape, dtype=dims.dtype, device=dims.device, requires_grad=requires_grad)


def uniform(dims: Dims, *shape: int) -> Tensor:
    """Uniform values in [0, 1) in the dtype and on the device of `dims`."""
    return torch.rand(*shape, dtype=dims.dtype, device=dims.device)


def integers(dims: Dims, low: int, high: int, *shape: int) -> Tensor:
    """int64 values in [low, high) on the device of `dims`."""
    return torch.randint(low, high, shape, device=dims.device)


def hidden(dims: Dims) -> Tensor:
    """[B, T, H] that wants a gradient."""
    return normal(dims, dims.B, dims.T, dims.H, requires_grad=True)


def hidden_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and target [B, T] whose first entry is -100."""
    x = hidden(dims)
    y = integers(dims, 0, dims.V, dims.B, dims.T)
    y[0, 0] = -100
    return x, y


def hidden_valid_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and target [B, T] with every entry a class; the first is 0."""
    x, y = hidden_target(dims)
    return x, y.clamp_min(0)


def two_hidden_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H], a second one without gradient, and target [B, T]."""
    x, y = hidden_target(dims)
    return x, normal(dims, dims.B, dims.T, dims.H), y


def frozen_hidden_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] without gradient and target [B, T]."""
    x, y = hidden_target(dims)
    return x.detach(), y


def hidden_dense_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and real-valued target [B, T, V]."""
    return hidden(dims), normal(dims, dims.B, dims.T, dims.V)


# ------------------------------------------------------------------------------ modules, decorator


def register(
    id: str,
    name: str,
    *,
    origin: str,
    expected: Expected = "rewrite",
    level: Level,
    why: str,
    inputs: MakeInputs = hidden_target,
    needs_grad: bool = True,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a module class, built as `cls(dims)`, into `FORMS`."""

    def decorate(cls: type[nn.Module]) -> type[nn.Module]:
        def make(dims: Dims) -> tuple[nn.Module, Inputs]:
            torch.manual_seed(dims.seed)
            with torch.device(dims.device):
                module = cls(dims)
            return module, inputs(dims)

        add_form(Form(id, name, origin, expected, level, why, make, needs_grad=needs_grad))
        return cls

    return decorate


class Head(nn.Module):
    """Base of most forms: `head` projects [..., H] to [..., V]."""

    has_bias = False

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.head = nn.Linear(dims.H, dims.V, bias=self.has_bias, dtype=dims.dtype)


class BiasedHead(Head):
    """`Head` with a bias."""

    has_bias = True


class TransposedHead(nn.Module):
    """Base of forms that store their weight as [H, V]."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.w = nn.Parameter(torch.randn(dims.H, dims.V, dtype=dims.dtype) * 0.1)


class WeightedHead(Head):
    """`Head` with a weight per class."""

    class_weight: Tensor

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.register_buffer("class_weight", torch.rand(dims.V, dtype=dims.dtype) + 0.5)


class TeacherHead(Head):
    """A trained head and a frozen one."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.teacher_head = nn.Linear(dims.H, dims.V, bias=False, dtype=dims.dtype)
        self.teacher_head.requires_grad_(False)

    def teacher_logits(self, x: Tensor) -> Tensor:
        """The frozen head's logits, computed outside autograd."""
        with torch.no_grad():
            return self.teacher_head(x)


def flat(t: Tensor) -> Tensor:
    """[..., V] as [N, V]."""
    return t.view(-1, t.size(-1))


# ---------------------------------------------------------- A: how the projection is written


@register(
    "A01",
    "nn.Linear, view(-1, V), mean cross_entropy",
    origin="karpathy/nanoGPT model.py",
    level="pattern",
    why="the base case",
)
class LinearView(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "A02",
    "nn.Linear with bias, reshape(-1, V)",
    origin="huggingface/transformers models/bert/modeling_bert.py (decoder with bias)",
    level="pattern",
    why="a bias gradient is the column sum of the logits gradient",
)
class BiasedLinearReshape(BiasedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).reshape(-1, self.dims.V), y.reshape(-1))


@register(
    "A03",
    "F.linear with the embedding's weight, flatten(0, 1)",
    origin="facebookresearch/fairseq fairseq/models/transformer (output_layer)",
    level="pattern",
    why="functional linear; the weight belongs to another module",
)
class EmbeddingWeightLinear(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.emb = nn.Embedding(dims.V, dims.H, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.emb.weight).flatten(0, 1), y.flatten())


@register(
    "A04",
    "x2d @ weight.t()",
    origin="apple/ml-cross-entropy README (baseline form)",
    level="pattern",
    why="2-D matmul with a transposed view of the weight",
)
class MatmulTransposedWeight(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = x.view(-1, self.dims.H) @ self.head.weight.t()
        return F.cross_entropy(logits, y.view(-1))


@register(
    "A05",
    "torch.matmul(x3d, weight.transpose(0, 1))",
    origin="meta-pytorch/torchtune modules/tied_linear.py and other tied output layers",
    level="pattern",
    why="matmul of a 3-D input; the transpose is spelled by axes",
)
class MatmulTransposeAxes(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.matmul(x, self.head.weight.transpose(0, 1))
        return F.cross_entropy(logits.view(-1, self.dims.V), y.view(-1))


@register(
    "A06",
    "einsum 'bth,vh->btv'",
    origin="heads ported from T5X and in the style of EleutherAI code",
    level="pattern",
    why="einsum is one node before it decomposes",
)
class EinsumHead(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.einsum("bth,vh->btv", x, self.head.weight)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "A07",
    "torch.addmm(bias, x2d, weight.t())",
    origin="hand-written heads; Conv1D in huggingface/transformers pytorch_utils.py",
    level="pattern",
    why="bias is the first operand",
)
class AddmmHead(BiasedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.view(-1, self.dims.H)
        logits = torch.addmm(self.head.bias, rows, self.head.weight.t())
        return F.cross_entropy(logits, y.view(-1))


@register(
    "A08",
    "bmm with one [H, V] weight per codebook",
    origin="huggingface/transformers models/csm (codebook heads)",
    level="rowwise",
    why="batched weight: rows are chunked inside each batch entry",
)
class BatchedCodebookHeads(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.w = nn.Parameter(torch.randn(dims.B, dims.H, dims.V, dtype=dims.dtype) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.bmm(x, self.w).reshape(-1, self.dims.V), y.view(-1))


def ids_target(dims: Dims) -> tuple[Tensor, ...]:
    """Token ids [B, T] and a different target [B, T] whose first entry is -100."""
    ids = hidden_valid_target(dims)[1]
    return ids, hidden_target(dims)[1]


@register(
    "A10",
    "token ids, trunk, head tied to the embedding",
    origin="karpathy/nanoGPT model.py (wte tied to lm_head)",
    level="pattern",
    why="the weight's gradient has two contributions: the head's and the embedding's",
    inputs=ids_target,
)
class TiedEmbeddingTrunk(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.emb = nn.Embedding(dims.V, dims.H, dtype=dims.dtype)
        self.fc = nn.Linear(dims.H, dims.H, dtype=dims.dtype)
        self.norm = nn.LayerNorm(dims.H, dtype=dims.dtype)
        self.head = nn.Linear(dims.H, dims.V, bias=False, dtype=dims.dtype)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.emb(ids)
        x = self.norm(x + F.gelu(self.fc(x)))
        return F.cross_entropy(flat(self.head(x)), y.view(-1), ignore_index=-100)


@register(
    "A11",
    "x @ w with w stored as [H, V]",
    origin="hand-written transformers; Conv1D layout in huggingface/transformers",
    level="pattern",
    why="no transpose anywhere: the weight's gradient is [H, V] too",
)
class MatmulStoredTransposed(TransposedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(x @ self.w), y.view(-1))


@register(
    "A13",
    "masked-LM head: dense, gelu, norm, tied decoder, bias added after it",
    origin="google-research/bert; huggingface/transformers models/bert",
    level="pattern",
    why="the bias is a separate add, not an operand of linear",
)
class MaskedLMHead(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.emb = nn.Embedding(dims.V, dims.H, dtype=dims.dtype)
        self.fc = nn.Linear(dims.H, dims.H, dtype=dims.dtype)
        self.norm = nn.LayerNorm(dims.H, dtype=dims.dtype)
        self.bias = nn.Parameter(torch.zeros(dims.V, dtype=dims.dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(F.gelu(self.fc(x)))
        logits = F.linear(h, self.emb.weight) + self.bias
        return F.cross_entropy(logits.view(-1, self.dims.V), y.view(-1))


# ---------------------------------------------------------- B: reshapes, slices, dtypes


@register(
    "B01",
    "bf16 head, logits.float(), view",
    origin="huggingface/transformers loss/loss_utils.py (ForCausalLMLoss)",
    level="pattern",
    why="the upcast copy is the largest tensor of the step",
)
class Bfloat16HeadFloatLogits(Head):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dataclasses.replace(dims, dtype=torch.bfloat16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x.to(torch.bfloat16)).float()
        return F.cross_entropy(logits.view(-1, self.dims.V), y.view(-1))


@register(
    "B02",
    "autocast(bfloat16) around head and loss",
    origin="karpathy/nanoGPT train.py",
    level="pattern",
    why="the casts of input, weight and logits come from autocast",
)
class AutocastHeadAndLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "B03",
    "logits.permute(0, 2, 1), cross_entropy on [B, V, T]",
    origin="krasserm/perceiver-io and many others",
    level="pattern",
    why="classes on axis 1: decomposes into log_softmax over axis 1 and nll_loss2d",
)
class ClassAxisOnePermute(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).permute(0, 2, 1), y)


@register(
    "B05",
    "shift by logits[..., :-1, :].contiguous()",
    origin="huggingface/transformers before 4.46; trainers like tatsu-lab/stanford_alpaca",
    level="pattern",
    why="slice between projection and loss: only T-1 of T rows carry gradient",
)
class ShiftedLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        shifted_logits = logits[..., :-1, :].contiguous()
        shifted_target = y[..., 1:].contiguous()
        return F.cross_entropy(shifted_logits.view(-1, self.dims.V), shifted_target.view(-1))


def hidden_target_count(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target, and an int64 scalar: the number of items in the whole batch."""
    return *hidden_target(dims), torch.tensor(7, device=dims.device)


@register(
    "B06",
    "labels shifted by F.pad, .float(), sum / num_items",
    origin="huggingface/transformers loss/loss_utils.py",
    level="pattern",
    why="the divisor is an int64 scalar input",
    inputs=hidden_target_count,
)
class PaddedShiftNumItems(Head):
    def forward(self, x: Tensor, y: Tensor, num_items: Tensor) -> Tensor:
        logits = self.head(x).float()
        y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
        total = F.cross_entropy(
            logits.view(-1, self.dims.V), y.view(-1), ignore_index=-100, reduction="sum"
        )
        return total / num_items


@register(
    "B07",
    "labels shifted by torch.roll",
    origin="allenai/OLMo-core data utils",
    level="pattern",
    why="all the shifting is on the labels",
)
class RolledTarget(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = torch.roll(y, -1, 1)
        y = torch.cat([y[:, :-1], torch.full_like(y[:, :1], -100)], 1)
        return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "B08",
    "hidden[:, -k:, :] before the head (logits_to_keep)",
    origin="huggingface/transformers modeling_llama.py; huggingface/trl grpo_trainer.py",
    level="pattern",
    why="the head's input is a strided slice",
)
class LogitsToKeep(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keep = max(1, self.dims.T // 2)
        logits = self.head(x[:, -keep:, :])
        return F.cross_entropy(logits.reshape(-1, self.dims.V), y[:, -keep:].reshape(-1))


@register(
    "B09",
    "padded head, logits[..., :vocab_size].float()",
    origin="karpathy/nanochat gpt.py",
    level="rowwise",
    why="slice on the vocabulary axis",
)
class PaddedVocabulary(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.head = nn.Linear(dims.H, dims.V + 3, bias=False, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)[..., : self.dims.V].float()
        return F.cross_entropy(logits.reshape(-1, self.dims.V), y.view(-1))


@register(
    "B11",
    "rows selected after the head by a boolean mask",
    origin="user code around huggingface/transformers models/bert",
    expected="either",
    level="rowwise",
    why="boolean row selection of [N, V]: move the index before the matmul, or leave",
)
class MaskedRows(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        keep = y != -100
        return F.cross_entropy(logits[keep], y[keep])


# ---------------------------------------------------------- C: options of cross entropy


@register(
    "C01",
    "label_smoothing=0.1",
    origin="facebookresearch/fairseq label_smoothed_cross_entropy; openai/whisper fine-tuning",
    level="pattern",
    why="the smooth part sums the log-probabilities over V",
)
class LabelSmoothing(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1), label_smoothing=0.1)


@register(
    "C02",
    "class weights",
    origin="segmentation, detection and tagging heads, e.g. facebookresearch/detr",
    level="pattern",
    why="mean divides by the sum of the targets' weights",
)
class ClassWeights(WeightedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1), weight=self.class_weight)


@register(
    "C03",
    "nn.CrossEntropyLoss(ignore_index=0), the pad id",
    origin="pytorch/tutorials translation; T5 user code",
    level="pattern",
    why="the ignored target is a valid class",
    inputs=hidden_valid_target,
)
class IgnoredPadId(Head):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.head(x).view(-1, self.dims.V), y.view(-1))


@register(
    "C04",
    "reduction='none' times mask, divided by the mask's sum",
    origin="SFT in the style of karpathy/llm.c; mosaicml/llm-foundry",
    level="rowwise",
    why="the reduction over rows is written out",
)
class MaskedMean(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(flat(self.head(x)), y.view(-1), reduction="none")
        mask = (y.view(-1) != -100).float()
        return (losses * mask).sum() / mask.sum()


def hidden_target_tokens(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target whose first entry is -1, and a float scalar: the number of tokens."""
    x = hidden(dims)
    y = hidden_target(dims)[1].clamp_min(-1)
    return x, y, torch.tensor(9.0, device=dims.device)


@register(
    "C05",
    "sum divided by a token-count tensor, ignore_index=-1",
    origin="pytorch/torchtitan components/loss.py",
    level="pattern",
    why="the divisor comes from outside the graph",
    inputs=hidden_target_tokens,
)
class SumOverTokenCount(Head):
    def forward(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        logits = flat(self.head(x)).float()
        return F.cross_entropy(logits, y.view(-1), reduction="sum", ignore_index=-1) / tokens


def hidden_probabilities(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and class probabilities [N, V]."""
    return hidden(dims), torch.softmax(normal(dims, dims.N, dims.V), -1)


@register(
    "C06",
    "soft targets: probabilities [N, V]",
    origin="mixup in huggingface/pytorch-image-models loss/cross_entropy.py",
    level="rowwise",
    why="the target is itself [N, V]: only the logits' side is saved",
    inputs=hidden_probabilities,
)
class SoftTargets(Head):
    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), p)


@register(
    "C08",
    "per-token loss returned, weighted outside",
    origin="karpathy/nanochat gpt.py (loss_reduction='none'); volcengine/verl",
    level="rowwise",
    why="the upstream gradient is a vector [N]",
)
class PerTokenLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1), reduction="none")


@register(
    "C10",
    "evaluation loss under no_grad",
    origin="EleutherAI/lm-evaluation-harness; karpathy/nanoGPT estimate_loss",
    level="pattern",
    why="an inference graph: there is no joint graph to look at",
    needs_grad=False,
)
class EvaluationLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "C12",
    "hard-example mining: mean of the top-k row losses",
    origin="OHEM heads in facebookresearch code; microsoft/rho selective language modelling",
    level="rowwise",
    why="not additive over rows, but only after the [N] vector, which may be chunked",
)
class TopKRows(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(flat(self.head(x)), y.view(-1), reduction="none")
        return losses.topk(self.dims.N // 2).values.mean()


@register(
    "C13",
    "loss divided by the number of accumulation steps",
    origin="karpathy/nanoGPT train.py",
    level="pattern",
    why="a constant factor after the loss",
)
class AccumulationSteps(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1)) / 4


def hidden_target_scale(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target, and a float32 scalar such as a gradient scaler keeps."""
    return *hidden_target(dims), torch.tensor(1024.0, device=dims.device)


@register(
    "C14",
    "loss times a gradient scaler's tensor",
    origin="users of torch.amp",
    level="pattern",
    why="the upstream gradient of the loss is not 1 and only known on the device",
    inputs=hidden_target_scale,
)
class ScaledLoss(Head):
    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1)) * scale


# ---------------------------------------------------------- D: transforms of the logits


@register(
    "D01",
    "softcap 30 * tanh(logits / 30), float",
    origin="huggingface/transformers modeling_gemma2.py; karpathy/nanochat",
    level="rowwise",
    why="pointwise and non-linear: the backward needs tanh's derivative",
)
class TanhSoftcap(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = 30.0 * torch.tanh(self.head(x) / 30.0)
        return F.cross_entropy(logits.float().view(-1, self.dims.V), y.view(-1))


@register(
    "D02",
    "softcap by a sigmoid, sum over tokens",
    origin="KellerJordan/modded-nanogpt train_gpt.py",
    level="rowwise",
    why="pointwise and non-linear; the scale depends on H",
)
class SigmoidSoftcap(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = 30 * torch.sigmoid(self.head(x).float() / (7.5 * x.size(-1) ** 0.5))
        return F.cross_entropy(flat(logits), y.view(-1), reduction="sum")


@register(
    "D03",
    "logits * logit_scale",
    origin="huggingface/transformers models/cohere, models/falcon_h1",
    level="rowwise",
    why="a constant factor on the logits",
)
class ScaledLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((self.head(x) * 0.0625).view(-1, self.dims.V), y.view(-1))


@register(
    "D04",
    "logits / logits_scaling, float",
    origin="huggingface/transformers models/granite",
    level="rowwise",
    why="a constant divisor on the logits, then an upcast",
)
class DividedLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((self.head(x) / 8.0).float().view(-1, self.dims.V), y.view(-1))


@register(
    "D06",
    "subtract a [V] log-prior (logit adjustment, logQ correction)",
    origin="google-research/google-research logit_adjustment; recommender code",
    level="rowwise",
    why="a row vector is broadcast over the rows",
)
class LogPrior(Head):
    log_prior: Tensor

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.register_buffer("log_prior", torch.randn(dims.V, dtype=dims.dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)) - self.log_prior, y.view(-1))


@register(
    "D08",
    "dropout on the logits",
    origin="ad-hoc regularisation",
    expected="leave",
    level="none",
    why="random numbers over [N, V]: drawn in chunks they differ from the whole stream",
)
class LogitsDropout(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(F.dropout(self.head(x), 0.1, self.training)), y.view(-1))


def hidden_target_action_mask(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target, and a boolean mask [B, T, V] that is true at about 5 % of the entries."""
    x, y = hidden_valid_target(dims)
    return x, y, torch.rand(dims.B, dims.T, dims.V, device=dims.device) < 0.05


@register(
    "D10",
    "action mask [B, T, V] applied to the logits",
    origin="masked policy heads; grammar-constrained training",
    expected="either",
    level="rowwise",
    why="the mask is itself [N, V], of booleans",
    inputs=hidden_target_action_mask,
)
class ActionMask(Head):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        mask = mask.scatter(-1, y.unsqueeze(-1), False)
        return F.cross_entropy(flat(self.head(x).masked_fill(mask, -1e9)), y.view(-1))


# ---------------------------------------------------------- E: cross entropy written by hand


@register(
    "E01",
    "log_softmax, then nll_loss",
    origin="pytorch/examples word_language_model; facebookresearch/fairseq",
    level="pattern",
    why="cross_entropy in two calls, with the view between them",
)
class LogSoftmaxNll(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.head(x), -1)
        return F.nll_loss(log_probs.view(-1, self.dims.V), y.view(-1))


@register(
    "E02",
    "log_softmax in float32, gather, mask",
    origin="huggingface/trl utils; OpenRLHF/OpenRLHF log_probs_from_logits",
    level="rowwise",
    why="the mask is applied after the gather; the divisor counts it",
)
class LogSoftmaxGatherMask(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = y != -100
        log_probs = torch.log_softmax(self.head(x), -1, dtype=torch.float32)
        picked = log_probs.gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return -(picked * mask).sum() / mask.sum()


@register(
    "E04",
    "-(one_hot * log_softmax).sum(-1)",
    origin="label-smoothing tutorials; ports from JAX",
    level="rowwise",
    why="one_hot is a second [N, V] tensor",
    inputs=hidden_valid_target,
)
class OneHotLogSoftmax(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one_hot = F.one_hot(y, self.dims.V).to(self.dims.dtype)
        return -(one_hot * F.log_softmax(self.head(x), -1)).sum(-1).mean()


@register(
    "E05",
    "softmax, clamp_min(1e-8), log, gather",
    origin="older reinforcement-learning code",
    level="rowwise",
    why="the clamp changes the function: it must be kept, not read as cross entropy",
    inputs=hidden_valid_target,
)
class ClampedSoftmaxLog(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_probs = torch.softmax(self.head(x), -1).clamp_min(1e-8).log()
        return -(log_probs.gather(-1, y.unsqueeze(-1))).mean()


@register(
    "E06",
    "cross_entropy plus z-loss 1e-4 * logsumexp^2",
    origin="allenai/OLMo; google-research/t5x; mlfoundations/open_lm",
    level="rowwise",
    why="the logits have two consumers",
)
class ZLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = flat(self.head(x)).float()
        z_loss = torch.logsumexp(logits, -1).pow(2).mean()
        return F.cross_entropy(logits, y.view(-1)) + 1e-4 * z_loss


@register(
    "E07",
    "subtract the row's max, exp, sum, log, gather",
    origin="NVIDIA/Megatron-LM tensor_parallel/cross_entropy.py",
    level="rowwise",
    why="the stable log-sum-exp is spelled out; the max is detached",
    inputs=hidden_valid_target,
)
class HandWrittenLogSumExp(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = flat(self.head(x)).float()
        logits = logits - logits.max(-1, keepdim=True).values.detach()
        picked = logits.gather(1, y.view(-1, 1)).squeeze(1)
        return (logits.exp().sum(-1).log() - picked).mean()


@register(
    "E09",
    "python loop over the batch: log_softmax and gather per sequence, stack",
    origin="huggingface/trl selective_log_softmax (bfloat16 path)",
    expected="either",
    level="rowwise",
    why="one projection whose [N, V] is read in B slices",
    inputs=hidden_valid_target,
)
class LoopOverBatch(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        picked = [
            F.log_softmax(row_logits, -1).gather(-1, row_target.unsqueeze(-1)).squeeze(-1)
            for row_logits, row_target in zip(logits, y)  # noqa: B905 (spelling under test)
        ]
        return -torch.stack(picked).mean()


@register(
    "E10",
    "take_along_dim of the log-probabilities",
    origin="ports from numpy style",
    level="rowwise",
    why="another spelling of gather",
    inputs=hidden_valid_target,
)
class TakeAlongDim(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_probs = self.head(x).log_softmax(-1)
        return -torch.take_along_dim(log_probs, y[..., None], -1).mean()


@register(
    "E12",
    "Categorical(logits=...).log_prob and entropy",
    origin="PPO code: vwxyzjn/cleanrl, DLR-RM/stable-baselines3",
    level="rowwise",
    why="logits - logsumexp(keepdim), then gather; the entropy reads the result too",
    inputs=hidden_valid_target,
)
class CategoricalPolicy(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.head(x), validate_args=False)
        return -(policy.log_prob(y) + 0.01 * policy.entropy()).mean()


# ---------------------------------------------------------- F: preference and policy losses


@register(
    "F01",
    "DPO: log-probability per sequence, reference head in the same graph",
    origin="huggingface/trl dpo_trainer.py; meta-pytorch/torchtune rlhf/loss/dpo.py",
    level="multi",
    why="non-linear in the sums per sequence: needs a value per row, then a gradient per row",
    inputs=two_hidden_target,
)
class DirectPreference(TeacherHead):
    def sequence_log_prob(self, head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask = y != -100
        log_probs = head(x).float().log_softmax(-1)
        picked = log_probs.gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return (picked * mask).sum(-1)

    def forward(self, x: Tensor, x_ref: Tensor, y: Tensor) -> Tensor:
        policy = self.sequence_log_prob(self.head, x, y)
        with torch.no_grad():
            reference = self.sequence_log_prob(self.teacher_head, x_ref, y)
        ratio = policy - reference
        half = ratio.shape[0] // 2
        return -F.logsigmoid(0.1 * (ratio[:half] - ratio[half:])).mean()


def policy_inputs(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target, old and reference log-probabilities, advantage [B, 1], mask."""
    x, y = hidden_valid_target(dims)
    old = -uniform(dims, dims.B, dims.T) * 3
    ref = -uniform(dims, dims.B, dims.T) * 3
    advantage = normal(dims, dims.B, 1)
    return x, y, old, ref, advantage, torch.ones_like(old)


@register(
    "F02",
    "GRPO: temperature, ratio, clip, KL estimate, mask",
    origin="huggingface/trl grpo_trainer.py; volcengine/verl core_algos",
    level="rowwise",
    why="every row has its own weight, and the loss is non-linear in its log-probability",
    inputs=policy_inputs,
)
class GroupPolicy(Head):
    def forward(
        self, x: Tensor, y: Tensor, old: Tensor, ref: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        logits = self.head(x) / 0.9
        picked = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        log_prob = picked - torch.logsumexp(logits, -1)
        ratio = torch.exp(log_prob - old)
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = torch.exp(ref - log_prob) - (ref - log_prob) - 1
        per_token = (policy_loss + 0.04 * kl) * mask
        return (per_token.sum(-1) / mask.sum(-1).clamp_min(1)).mean()


@register(
    "F04",
    "cross_entropy per token plus entropy as a metric, both returned",
    origin="pytorch/torchtitan components/loss.py (compute_logprobs)",
    level="rowwise",
    why="two row outputs, one of them without gradient",
)
class EntropyMetric(Head):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = flat(self.head(x)).float()
        log_prob = -F.cross_entropy(logits, y.view(-1), reduction="none")
        with torch.no_grad():
            entropy = torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)
        return -log_prob.mean(), entropy


@register(
    "F06",
    "loss plus token accuracy by argmax",
    origin="huggingface/trl sft_trainer.py (mean_token_accuracy)",
    expected="either",
    level="rowwise",
    why="argmax is a row reduction that row-wise analysis may emit; a fixed pattern must leave it",
)
class AccuracyMetric(Head):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = flat(self.head(x))
        loss = F.cross_entropy(logits, y.view(-1))
        return loss, (logits.detach().argmax(-1) == y.view(-1)).float().mean()


@register(
    "F07",
    "loss plus logits.mean() as a metric",
    origin="huggingface/trl dpo_trainer.py (logits/chosen)",
    expected="either",
    level="rowwise",
    why="a full mean of the logits is a row sum first",
)
class LogitsMeanMetric(Head):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(flat(logits), y.view(-1)), logits.detach().mean()


@register(
    "F08",
    "reward model: one output column, pairwise logistic loss",
    origin="huggingface/trl reward_trainer.py",
    expected="leave",
    level="none",
    why="one output column: nothing to save",
)
class RewardModel(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head = nn.Linear(dims.H, 1, bias=False, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reward = self.head(x[:, -1]).squeeze(-1)
        half = reward.shape[0] // 2
        return -F.logsigmoid(reward[:half] - reward[half:]).mean()


# ---------------------------------------------------------- G: distillation

TEMPERATURE = 2.0


def soft_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Forward KL of two sets of logits at a temperature, averaged over the rows."""
    log_q = F.log_softmax(student / TEMPERATURE, -1)
    p = F.softmax(teacher / TEMPERATURE, -1)
    return F.kl_div(log_q, p, reduction="batchmean") * TEMPERATURE * TEMPERATURE


@register(
    "G01",
    "forward KL to a teacher head in the graph, temperature, batchmean",
    origin="distillation scripts, e.g. huggingface/transformers distillation research",
    level="multi",
    why="student and teacher logits must be chunked together",
    inputs=two_hidden_target,
)
class ForwardKL(TeacherHead):
    def forward(self, x: Tensor, x_teacher: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher_head(x_teacher)
        return soft_kl(flat(self.head(x)), flat(teacher))


@register(
    "G02",
    "forward KL by hand with masks for infinities and padding",
    origin="meta-pytorch/torchtune modules/loss/kd_losses.py",
    level="multi",
    why="the student logits are read twice: by log_softmax and by isinf",
    inputs=two_hidden_target,
)
class HandWrittenForwardKL(TeacherHead):
    def forward(self, x: Tensor, x_teacher: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher_head(x_teacher)
        student = self.head(x)
        p = F.softmax(teacher, -1, dtype=torch.float32)
        log_q = F.log_softmax(student, -1, dtype=torch.float32)
        per_row = -(p * log_q).masked_fill(torch.isinf(student), 0).sum(-1).view(-1)
        mask = (y != -100).int().view(-1)
        return (per_row * mask).sum() / mask.sum()


@register(
    "G04",
    "distillation mixed with cross_entropy on the same student logits",
    origin="arcee-ai/DistillKit",
    level="multi",
    why="two losses share one projection, and one of them reads a second projection",
    inputs=two_hidden_target,
)
class DistillationAndCrossEntropy(TeacherHead):
    def forward(self, x: Tensor, x_teacher: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher_head(x_teacher)
        logits = flat(self.head(x))
        return 0.5 * F.cross_entropy(logits, y.view(-1)) + 0.5 * soft_kl(logits, flat(teacher))


def hidden_log_probabilities(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and a teacher's log-probabilities [N, V]."""
    return hidden(dims), F.log_softmax(normal(dims, dims.N, dims.V), -1)


@register(
    "G05",
    "reverse KL to a dense teacher distribution given as an input",
    origin="microsoft/LMOps minillm",
    level="rowwise",
    why="the teacher's log-probabilities arrive as an [N, V] input",
    inputs=hidden_log_probabilities,
)
class ReverseKL(Head):
    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        log_q = F.log_softmax(flat(self.head(x)), -1)
        return (log_q.exp() * (log_q - teacher)).sum(-1).mean()


@register(
    "G07",
    "MSE between student and teacher logits",
    origin="logit-matching distillation",
    level="multi",
    why="a mean over all of [N, V] of a function of two projections",
    inputs=two_hidden_target,
)
class LogitMatching(TeacherHead):
    def forward(self, x: Tensor, x_teacher: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher_head(x_teacher)
        return F.mse_loss(self.head(x), teacher)


# ---------------------------------------------------------- H: other losses on a wide projection


def hidden_multi_label(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and a 0/1 label for each class [B, T, V]."""
    return hidden(dims), uniform(dims, dims.B, dims.T, dims.V).round()


@register(
    "H01",
    "multi-label BCE with logits",
    origin="huggingface/transformers ForSequenceClassificationLoss; extreme classification",
    level="rowwise",
    why="dense [N, V] targets",
    inputs=hidden_multi_label,
)
class MultiLabel(BiasedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.head(x), y)


@register(
    "H02",
    "MSE on a wide projection, sum",
    origin="pytorch/torchtitan mse_loss; autoencoders; pixel heads of masked autoencoders",
    level="rowwise",
    why="dense [N, V] targets; both sides are cast to float32",
    inputs=hidden_dense_target,
)
class WideRegression(BiasedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(x).float(), y.float(), reduction="sum")


@register(
    "H03",
    "smooth L1 on a wide projection",
    origin="facebookresearch/fairseq data2vec; detection heads",
    level="rowwise",
    why="dense [N, V] targets; a kink in the derivative",
    inputs=hidden_dense_target,
)
class WideSmoothL1(BiasedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.head(x), y)


def hidden_target_negatives(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden, target, and V sampled negative classes shared by all rows."""
    return *hidden_valid_target(dims), integers(dims, 0, dims.V, dims.V)


@register(
    "H06",
    "sampled softmax: the positive's column beside shared sampled negatives",
    origin="recommender retrieval code, e.g. gSASRec",
    expected="either",
    level="rowwise",
    why="a cat of [N, 1] and [N, S]; S is often small",
    inputs=hidden_target_negatives,
)
class SampledSoftmax(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.emb = nn.Embedding(dims.V, dims.H, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor) -> Tensor:
        x = x.view(-1, self.dims.H)
        positive = (x * self.emb(y.view(-1))).sum(-1, keepdim=True)
        logits = torch.cat([positive, x @ self.emb(negatives).t()], 1)
        return F.cross_entropy(logits, torch.zeros_like(y.view(-1)))


@register(
    "H07",
    "cross_entropy plus logits.pow(2).mean()",
    origin="penalties on the size of the logits",
    level="rowwise",
    why="a second consumer that is a mean over all of [N, V]",
)
class LogitsPenalty(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = flat(self.head(x))
        return F.cross_entropy(logits, y.view(-1)) + 1e-4 * logits.pow(2).mean()


# ---------------------------------------------------------- I: several heads, sharing, wrappers


@register(
    "I01",
    "multi-token prediction: two hiddens, one head, its weight detached the second time",
    origin="NVIDIA/Megatron-LM multi_token_prediction; XiaomiMiMo/MiMo",
    level="pattern",
    why="two independent rewrites share a weight; one wants no weight gradient",
    inputs=two_hidden_target,
)
class MultiTokenPrediction(Head):
    def forward(self, x: Tensor, x_next: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(flat(self.head(x)), y.view(-1))
        next_logits = F.linear(x_next, self.head.weight.detach())
        second = F.cross_entropy(flat(next_logits), torch.roll(y, -1, 1).view(-1))
        return first + 0.3 * second


@register(
    "I03",
    "frozen head: gradient only to the hidden state",
    origin="adapter training",
    level="pattern",
    why="the weight's gradient must not be computed",
)
class FrozenHead(Head):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "I04",
    "chunked by hand: a loop over chunks of the hidden state",
    origin="meta-pytorch/torchtune CEWithChunkedOutputLoss; pytorch/torchtitan",
    expected="either",
    level="pattern",
    why="chunked already: must not get worse; several matmuls share the weight",
)
class ChunkedByHand(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total: Any = 0.0
        for x_chunk, y_chunk in zip(x.chunk(3, 1), y.chunk(3, 1)):  # noqa: B905 (spelling)
            logits = self.head(x_chunk).reshape(-1, self.dims.V).float()
            total = total + F.cross_entropy(logits, y_chunk.reshape(-1), reduction="sum")
        return total / (y != -100).sum()


@register(
    "I05",
    "activation checkpoint around head and loss",
    origin="mosaicml and axolotl tiled losses; users of torch.utils.checkpoint",
    expected="either",
    level="pattern",
    why="a higher-order op, tag_activation_checkpoint, holds the region",
)
class CheckpointedLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(
            lambda a, b: F.cross_entropy(flat(self.head(a)), b.view(-1)), x, y, use_reentrant=False
        )


@register(
    "I06",
    "deep supervision: the same head on several layers",
    origin="early-exit models, e.g. facebookresearch/LayerSkip",
    level="pattern",
    why="several rewrites share a weight; their losses are summed from python's 0",
    inputs=two_hidden_target,
)
class DeepSupervision(Head):
    def forward(self, x: Tensor, x_early: Tensor, y: Tensor) -> Tensor:
        return sum(
            scale * F.cross_entropy(flat(self.head(h)), y.view(-1))
            for scale, h in ((1.0, x), (0.1, x_early))
        )


# ---------------------------------------------------------- J: must be left, or hard


@register(
    "J01",
    "loss and logits both returned",
    origin="karpathy/nanoGPT model.py; huggingface/transformers CausalLMOutput",
    expected="leave",
    level="none",
    why="the logits are an output, so [N, V] exists anyway",
)
class LossAndLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(flat(logits), y.view(-1)), logits


@register(
    "J02",
    "symmetric contrastive loss within the batch",
    origin="openai/CLIP; UKPLab/sentence-transformers MultipleNegativesRankingLoss",
    expected="leave",
    level="none",
    why="the class axis is the batch, the weight an activation; one term reads columns",
    inputs=two_hidden_target,
)
class SymmetricContrastive(Head):
    def forward(self, x: Tensor, x_pair: Tensor, y: Tensor) -> Tensor:
        a = F.normalize(x.view(-1, self.dims.H), dim=-1)
        b = F.normalize(x_pair.reshape(-1, self.dims.H), dim=-1)
        logits = a @ b.t() * 10
        target = torch.arange(logits.size(0), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


@register(
    "J03",
    "batch norm over the logits",
    origin="some retrieval and recommender heads",
    expected="leave",
    level="none",
    why="statistics over the rows",
)
class BatchNormLogits(Head):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.norm = nn.BatchNorm1d(dims.V, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(flat(self.head(x))), y.view(-1))


@register(
    "J06",
    "gradient hook on the logits",
    origin="code that inspects gradients",
    expected="leave",
    level="none",
    why="user code must see the [N, V] gradient",
)
class HookedLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "J07",
    "three classes",
    origin="huggingface/transformers ForSequenceClassification",
    expected="leave",
    level="none",
    why="V below H: nothing to save, so a cost threshold must reject it",
)
class FewClasses(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head = nn.Linear(dims.H, 3, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).view(-1, 3), y.view(-1).remainder(3))


@register(
    "J08",
    "logits kept in a buffer of the module",
    origin="logging code",
    expected="leave",
    level="none",
    why="writing to the buffer makes the logits an output",
)
class RecordedLogits(Head):
    last: Tensor

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        last = torch.zeros(dims.B, dims.T, dims.V, dtype=dims.dtype)
        self.register_buffer("last", last, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        self.last.copy_(logits.detach())
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "J10",
    "balance loss of a mixture-of-experts router",
    origin="huggingface/transformers models/mixtral load_balancing_loss_func",
    expected="leave",
    level="none",
    why="a mean over rows times a mean over rows; few columns in practice, too",
)
class RouterBalance(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        probs = flat(self.head(x)).softmax(-1)
        _, chosen = probs.topk(2, -1)
        mask = F.one_hot(chosen, self.dims.V).float().amax(1)
        return self.dims.V * (mask.mean(0) * probs.mean(0)).sum()


@register(
    "J11",
    "gumbel_softmax sample of the logits fed back through the embedding",
    origin="VQ and discrete latent models",
    expected="leave",
    level="none",
    why="random numbers over [N, V], and the result feeds another matmul",
)
class GumbelSample(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sample = F.gumbel_softmax(self.head(x), hard=False)
        return (sample @ self.head.weight - x).pow(2).mean()


def hidden_ctc_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and two non-blank labels for each sequence [B, 2]."""
    return hidden(dims), integers(dims, 1, dims.V, dims.B, 2)


@register(
    "J12",
    "CTC loss",
    origin="speech recognition",
    expected="leave",
    level="none",
    why="a recurrence over time: not row-wise",
    inputs=hidden_ctc_target,
)
class ConnectionistTemporal(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.head(x), -1).transpose(0, 1)
        batch, time = x.shape[0], x.shape[1]
        input_lengths = torch.full((batch,), time, dtype=torch.long)
        target_lengths = torch.full((batch,), 2, dtype=torch.long)
        return F.ctc_loss(log_probs, y, input_lengths, target_lengths, zero_infinity=True)


@register(
    "J13",
    "attention by hand, then MSE",
    origin="any attention written by hand",
    expected="leave",
    level="none",
    why="matmul and softmax that are no loss head",
    inputs=two_hidden_target,
)
class AttentionRegression(Head):
    def forward(self, x: Tensor, memory: Tensor, y: Tensor) -> Tensor:
        attention = torch.softmax(x @ memory.transpose(1, 2), -1)
        return (attention @ memory - x).pow(2).mean()


@register(
    "J14",
    "the loss is the worst row's",
    origin="robust objectives",
    expected="either",
    level="rowwise",
    why="the values per row may be chunked; the max over rows stays outside",
)
class WorstRow(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1), reduction="none").max()


@register(
    "J15",
    "python branch on the loss",
    origin="trainers that skip steps with NaN",
    expected="either",
    level="pattern",
    why="the graph breaks after the loss; the first graph still holds the whole chain",
)
class BranchOnLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(flat(self.head(x)), y.view(-1))
        return loss if torch.isfinite(loss) else loss * 0


@register(
    "J16",
    "graph break between head and loss",
    origin="pytorch/torchtitan (model and loss compiled apart); huggingface/accelerate",
    expected="leave",
    level="none",
    why="the logits cross a graph boundary: neither graph holds the chain",
)
class GraphBreakBeforeLoss(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(flat(logits), y.view(-1))


# ---------------------------------------------------------- K: library models, unchanged

BuildModel: TypeAlias = Callable[[Dims], nn.Module]


class WholeStep(nn.Module):
    """What is compiled by a user who compiles the whole step: only the loss leaves the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Tensor) -> Tensor:
        return self.model(**kwargs).loss


def causal_lm(prefix: str, **settings: Any) -> BuildModel:
    """Builder of `<prefix>ForCausalLM` with one tiny layer and the given further settings."""

    def build(dims: Dims) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{prefix}Config")(
            vocab_size=dims.V,
            hidden_size=2 * dims.H,
            intermediate_size=3 * dims.H,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=dims.H,
            max_position_embeddings=max(64, dims.T),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
            attention_dropout=0.0,
            **settings,
        )
        return getattr(transformers, f"{prefix}ForCausalLM")(config)

    return build


def gpt2(dims: Dims) -> nn.Module:
    """GPT2LMHeadModel with one tiny layer and no dropout."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=dims.V,
        n_embd=2 * dims.H,
        n_layer=1,
        n_head=2,
        n_positions=max(64, dims.T),
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_with_loss_type(dims: Dims) -> nn.Module:
    """`gpt2` told which loss it uses, so that it need not look for it by class name."""
    model: Any = gpt2(dims)
    model.loss_type = "ForCausalLM"
    return model


def bert(dims: Dims) -> nn.Module:
    """BertForMaskedLM with one tiny layer and no dropout."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=dims.V,
        hidden_size=2 * dims.H,
        intermediate_size=3 * dims.H,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=max(64, dims.T),
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        pad_token_id=0,
    )
    return transformers.BertForMaskedLM(config)


def t5(dims: Dims) -> nn.Module:
    """T5ForConditionalGeneration with one tiny layer a side and no dropout."""
    import transformers

    config = transformers.T5Config(
        vocab_size=dims.V,
        d_model=2 * dims.H,
        d_ff=3 * dims.H,
        d_kv=dims.H,
        num_layers=1,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def add_model(
    id: str,
    name: str,
    folder: str,
    build: BuildModel,
    *,
    expected: Expected,
    level: Level,
    why: str,
    whole_step: bool,
) -> None:
    """Enter a transformers model, compiled alone or as a whole step, into `FORMS`."""

    def make(dims: Dims) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(dims.seed)
        model = build(dims).to(device=dims.device, dtype=dims.dtype).train()
        ids = integers(dims, 3, dims.V, dims.B, dims.T)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        return WholeStep(model) if whole_step else model, inputs

    origin = f"huggingface/transformers src/transformers/models/{folder}"
    add_form(Form(id, name, origin, expected, level, why, make, is_hugging_face=True))


def add_whole_step(
    id: str,
    model: str,
    folder: str,
    build: BuildModel,
    *,
    expected: Expected = "rewrite",
    level: Level = "pattern",
    why: str = "the logits live only inside the step",
) -> None:
    """Enter a model of which only `.loss` leaves the graph."""
    name = f"{model}, whole step compiled (only .loss leaves)"
    add_model(id, name, folder, build, expected=expected, level=level, why=why, whole_step=True)


def add_model_output(id: str, model: str, folder: str, build: BuildModel) -> None:
    """Enter a model whose output object carries the logits out of the graph."""
    name = f"{model}, model compiled (ModelOutput with logits)"
    why = "the output object carries the logits out of the graph"
    add_model(id, name, folder, build, expected="leave", level="none", why=why, whole_step=False)


_llama = causal_lm("Llama")
_gemma2 = causal_lm("Gemma2", final_logit_softcapping=30.0)
_qwen3 = causal_lm("Qwen3")
_cohere = causal_lm("Cohere", logit_scale=0.0625)
_granite = causal_lm("Granite", logits_scaling=8.0)

add_whole_step("K01s", "LlamaForCausalLM", "llama", _llama)
add_model_output("K01m", "LlamaForCausalLM", "llama", _llama)
add_whole_step(
    "K02s",
    "GPT2LMHeadModel",
    "gpt2",
    gpt2,
    expected="leave",
    level="none",
    why="the lookup of the loss by class name warns and so breaks the graph before the loss",
)
add_whole_step(
    "K02t",
    "GPT2LMHeadModel with loss_type set",
    "gpt2",
    gpt2_with_loss_type,
    why="loss_type = 'ForCausalLM' avoids the graph break; the logits live only inside the step",
)
add_model_output("K02m", "GPT2LMHeadModel", "gpt2", gpt2)
add_whole_step("K03s", "Gemma2ForCausalLM (softcap)", "gemma2", _gemma2, level="rowwise")
add_model_output("K03m", "Gemma2ForCausalLM (softcap)", "gemma2", _gemma2)
add_whole_step("K04s", "Qwen3ForCausalLM", "qwen3", _qwen3)
add_model_output("K04m", "Qwen3ForCausalLM", "qwen3", _qwen3)
add_whole_step("K05s", "CohereForCausalLM (logit_scale)", "cohere", _cohere, level="rowwise")
add_model_output("K05m", "CohereForCausalLM (logit_scale)", "cohere", _cohere)
add_whole_step("K06s", "GraniteForCausalLM (logits_scaling)", "granite", _granite, level="rowwise")
add_model_output("K06m", "GraniteForCausalLM (logits_scaling)", "granite", _granite)
add_whole_step("K07s", "BertForMaskedLM", "bert", bert)
add_model_output("K07m", "BertForMaskedLM", "bert", bert)
add_whole_step("K08s", "T5ForConditionalGeneration", "t5", t5)
add_model_output("K08m", "T5ForConditionalGeneration", "t5", t5)


# ---------------------------------------------------------- L: further spellings


@register(
    "L01",
    "reduction='sum' divided by (labels != -100).sum()",
    origin="training loops that normalise by hand",
    level="pattern",
    why="a mean in two steps; the divisor is an int64 scalar computed from the labels",
)
class SumOverCountedLabels(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(flat(self.head(x)), y.view(-1), reduction="sum")
        return total / (y != -100).sum()


@register(
    "L02",
    "labels shifted, hidden[:, :-1] before the head",
    origin="training loops that drop the last position early",
    level="pattern",
    why="the head's input is a strided slice, and so are the labels",
)
class ShiftedHidden(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.reshape(-1, self.dims.V), y[:, 1:].reshape(-1))


@register(
    "L03",
    "logits.flatten(0, 1), labels.flatten()",
    origin="teaching code",
    level="pattern",
    why="flatten instead of view",
)
class FlattenedLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@register(
    "L04",
    "nn.CrossEntropyLoss(reduction='none') on permuted logits, [B, T] returned",
    origin="training loops that weight tokens outside the model",
    level="rowwise",
    why="the upstream gradient is [B, T], and the classes are on axis 1",
)
class PerTokenPermuted(Head):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.head(x).permute(0, 2, 1), y)


@register(
    "L05",
    "cross_entropy(logits.transpose(1, 2), labels)",
    origin="sequence models that avoid flattening",
    level="pattern",
    why="classes on axis 1 through transpose",
)
class ClassAxisOneTranspose(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        return F.cross_entropy(logits.transpose(1, 2), y)


@register(
    "L06",
    "torch.mm(x2d, w) with w stored as [H, V]",
    origin="hand-written heads",
    level="pattern",
    why="mm takes 2-D operands only, so the view comes before it",
)
class MmStoredTransposed(TransposedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.mm(x.view(-1, self.dims.H), self.w)
        return F.cross_entropy(logits, y.view(-1))


@register(
    "L07",
    "nll_loss(log_softmax) with class weights and ignore_index",
    origin="tagging code with a pad class",
    level="pattern",
    why="cross_entropy in two calls with both options; the ignored target is a valid class",
    inputs=hidden_valid_target,
)
class WeightedNll(WeightedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_probs = F.log_softmax(flat(self.head(x)), dim=-1)
        return F.nll_loss(log_probs, y.view(-1), weight=self.class_weight, ignore_index=0)


@register(
    "L08",
    "label_smoothing, class weights and ignore_index together",
    origin="tagging and translation code",
    level="pattern",
    why="the smooth part is weighted by class, and both parts share one divisor",
)
class SmoothedWeightedIgnored(WeightedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            flat(self.head(x)),
            y.view(-1),
            weight=self.class_weight,
            ignore_index=-100,
            label_smoothing=0.1,
        )


@register(
    "L09",
    "autocast around the head only, reduction='sum' outside it",
    origin="training loops that keep the loss out of the autocast block",
    level="pattern",
    why="the logits leave autocast in bfloat16, and the loss sees them as they are",
)
class AutocastHeadOnly(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            logits = self.head(x)
        return F.cross_entropy(flat(logits), y.view(-1), reduction="sum")


@register(
    "L10",
    "einsum 'bth,hv->btv' with the weight stored as [H, V]",
    origin="ports from JAX",
    level="pattern",
    why="einsum without a transpose",
)
class EinsumStoredTransposed(TransposedHead):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.einsum("bth,hv->btv", x, self.w)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "L11",
    "einsum '...h,vh->...v'",
    origin="heads that take any number of leading axes",
    level="pattern",
    why="einsum with an ellipsis",
)
class EinsumEllipsis(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.einsum("...h,vh->...v", x, self.head.weight)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "L12",
    "logits.to(torch.float32)",
    origin="training loops with a low-precision head",
    level="pattern",
    why="another spelling of the upcast; without effect on a float32 head",
)
class ToFloat32(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x).to(torch.float32)
        return F.cross_entropy(logits.view(-1, self.dims.V), y.view(-1))


def single_sequence(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [1, T, H] and target [1, T]."""
    return hidden_target(dataclasses.replace(dims, B=1))


@register(
    "L13",
    "logits.squeeze(0) with a batch of one",
    origin="packed sequences; single-example fine-tuning",
    level="pattern",
    why="squeeze makes the logits 2-D without a view",
    inputs=single_sequence,
)
class SqueezedBatch(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).squeeze(0), y.squeeze(0))


def hidden_int32_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and int32 target [B, T]."""
    x, y = hidden_target(dims)
    return x, y.to(torch.int32)


@register(
    "L14",
    "int32 labels, cast by .long() before the loss",
    origin="memory-mapped token files",
    level="pattern",
    why="a cast sits between the labels and the loss",
    inputs=hidden_int32_target,
)
class Int32Target(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1).long())


@register(
    "L15",
    "deprecated size_average=False",
    origin="code older than torch 1.0",
    level="pattern",
    why="means reduction='sum' and warns in eager mode; the reduction argument stays 'mean'",
)
class SizeAverage(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1), size_average=False)


@register(
    "L16",
    "frozen weight, trained bias",
    origin="bias-only fine-tuning",
    level="pattern",
    why="gradients of hidden and bias, none of the weight",
)
class FrozenWeightTrainedBias(BiasedHead):
    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1))


@register(
    "L17",
    "linear probe: the hidden state wants no gradient",
    origin="probing of frozen backbones",
    level="pattern",
    why="the hidden state's gradient must not be computed",
    inputs=frozen_hidden_target,
)
class LinearProbe(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)), y.view(-1))


# ---------------------------------------------------------- M: near misses that must be left


def hidden_nonzero_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and target [B, T] in which class 0 does not occur."""
    return hidden(dims), integers(dims, 1, dims.V, dims.B, dims.T)


@register(
    "M01",
    "one column of the logits overwritten in place",
    origin="code that forbids a token",
    expected="leave",
    level="none",
    why="setitem changes the logits between head and loss; the loss's operand is the head's node",
    inputs=hidden_nonzero_target,
)
class OverwrittenColumn(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        logits[..., 0] = -1e9
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "M02",
    "temperature by logits.div_ in place",
    origin="code that saves a copy of the logits",
    expected="leave",
    level="none",
    why="div_'s result is not used: the loss reads the changed logits through the head's node",
)
class DividedInPlace(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        logits.div_(2)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "M03",
    "weight changed in place between head and loss",
    origin="moving-average heads updated inside forward",
    expected="leave",
    level="none",
    why="an op put where the loss stands would read the changed weight",
    inputs=frozen_hidden_target,
)
class WeightChangedBeforeLoss(nn.Module):
    """Only the bias is trained: autograd would refuse the backward if it had saved the weight."""

    weight: Tensor

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(dims.V, dims.H, dtype=dims.dtype) * 0.1)
        self.bias = nn.Parameter(torch.zeros(dims.V, dtype=dims.dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(x, self.weight, self.bias)
        with torch.no_grad():
            self.weight.mul_(1.01)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "M04",
    "hidden state changed in place between head and loss",
    origin="residual streams updated in place",
    expected="leave",
    level="none",
    why="an op put where the loss stands would read the changed hidden state",
)
class HiddenChangedBeforeLoss(Head):
    """The weight is frozen: autograd would refuse the backward if it had saved the hidden state."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x * 1
        logits = self.head(h)
        h.add_(1)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "M05",
    "softmax over the rows before the loss",
    origin="wrong axis, or assignment between rows and classes",
    expected="leave",
    level="none",
    why="the softmax mixes rows",
)
class SoftmaxOverRows(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(flat(self.head(x)).softmax(0), y.view(-1))


@register(
    "M06",
    "loss and logits returned in a dict",
    origin="models that return a plain dict",
    expected="leave",
    level="none",
    why="the logits are an output, so [N, V] exists anyway",
)
class LossAndLogitsDict(Head):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": F.cross_entropy(flat(logits), y.view(-1)), "logits": logits}


@register(
    "M07",
    "logits cast down to float16 before the loss",
    origin="code that saves memory by hand",
    expected="either",
    level="rowwise",
    why="the cast rounds the logits and may overflow: a region keeps it, a fixed pattern must not",
)
class Float16Logits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x).to(torch.float16)
        return F.cross_entropy(flat(logits), y.view(-1))


@register(
    "M08",
    "contrastive loss: the weight is an activation of N rows",
    origin="dense retrieval with negatives from the batch",
    expected="either",
    level="rowwise",
    why="a square [N, N] product: row-wise with static shapes, but its class axis is the batch",
    inputs=two_hidden_target,
)
class ContrastiveRows(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.query = nn.Linear(dims.H, dims.H, bias=False, dtype=dims.dtype)
        self.key = nn.Linear(dims.H, dims.H, bias=False, dtype=dims.dtype)

    def forward(self, x: Tensor, x_pair: Tensor, y: Tensor) -> Tensor:
        queries = self.query(x).view(-1, self.dims.H)
        keys = self.key(x_pair).view(-1, self.dims.H)
        logits = queries @ keys.T
        return F.cross_entropy(logits, torch.arange(logits.size(0), device=logits.device))


class ClipLogitsGradient(torch.autograd.Function):
    """Identity whose backward clips the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1e-3, 1e-3)


@register(
    "M09",
    "custom autograd.Function on the logits",
    origin="gradient clipping and straight-through code",
    expected="leave",
    level="none",
    why="the backward is the user's own and sees the [N, V] gradient",
)
class CustomFunctionOnLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = ClipLogitsGradient.apply(self.head(x))
        return F.cross_entropy(flat(logits), y.view(-1))


GROUP_CLASSES = 4


def group_count(dims: Dims) -> int:
    """How many groups of `GROUP_CLASSES` classes fit into V."""
    return max(2, dims.V // GROUP_CLASSES)


def hidden_group_target(dims: Dims) -> tuple[Tensor, ...]:
    """Hidden [B, T, H] and a class for each group [B, T, G]."""
    target = integers(dims, 0, GROUP_CLASSES, dims.B, dims.T, group_count(dims))
    return hidden(dims), target


@register(
    "M10",
    "projection split into groups, cross_entropy within each",
    origin="product quantisation; multi-discrete policies",
    expected="leave",
    level="none",
    why="the class axis is a part of the projection's last axis",
    inputs=hidden_group_target,
)
class GroupedClasses(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.groups = group_count(dims)
        width = self.groups * GROUP_CLASSES
        self.head = nn.Linear(dims.H, width, bias=False, dtype=dims.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x).view(x.size(0), x.size(1), self.groups, GROUP_CLASSES)
        return F.cross_entropy(logits.reshape(-1, GROUP_CLASSES), y.view(-1))
