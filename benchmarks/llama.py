"""A language model of the Llama kind in plain PyTorch, as such models are written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses import causal_lm_loss, rms_norm


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        hidden_size: Of the residual stream.
        intermediate_size: Of the gated layer.
        layers: Number of blocks.
        heads: Attention heads; divides ``hidden_size``.
    """

    vocab_size: int = 128256
    hidden_size: int = 1024
    intermediate_size: int = 2816
    layers: int = 24
    heads: int = 16


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., D]``."""
        return rms_norm(x, self.weight)


def rotary_tables(T: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, head_size]`` of positions (arXiv:2104.09864), fp32."""
    exponent = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(T, device=device, dtype=torch.float32), 10000.0**-exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys ``[B, heads, T, head_size]`` by their positions."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.heads = config.heads
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend. ``x [B, T, D]`` to ``[B, T, D]``."""
        B, T, D = x.shape
        q, k, v = (
            layer(x).view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, D))
        return output


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every token."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    """Attention and gated layer, each behind a norm and added to its input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply. ``x [B, T, D]`` to ``[B, T, D]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    """Embedding, blocks, norm and a head of its own; returns the causal loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of predicting ``labels [B, T]`` from the tokens in front of each."""
        x = self.embed_tokens(input_ids)
        head_size = self.config.hidden_size // self.config.heads
        cos, sin = rotary_tables(input_ids.shape[1], head_size, input_ids.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return causal_lm_loss(logits, labels)
