"""A decoder-only transformer language model: pre-norm blocks, causal attention, GELU, head tied to the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUTS = {
    "inputs": [
        {"name": "input_ids", "shape": "BxS", "dtype": "int64", "values": "0..8000"},
        {"name": "targets", "shape": "BxS", "dtype": "int64", "values": "0..8000"},
    ],
    "dims": {"B": 8, "S": 256},
}


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a position sees only itself and those before: ``[B, S, width]`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Projected mixture of the values."""
        # [B, S, 3 * width] -> three of [B, heads, S, width / heads]
        query, key, value = self.qkv(x).unflatten(-1, [3, self.heads, -1]).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalized before and added after: ``[B, S, width]`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Token ids ``[B, S]`` -> logits ``[B, S, vocabulary]``, or the mean cross-entropy when targets are given."""

    def __init__(
        self, vocabulary: int = 8000, context: int = 256, width: int = 384, heads: int = 6, blocks: int = 6
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """``input_ids`` and ``targets``: int64 ``[B, S]`` with S up to the context length."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init(module: nn.Module) -> None:
    """Small normal weights and zero biases, as in GPT-2: with PyTorch's embeddings a tied head starts far off."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build() -> GPT:
    """The model with the same weights every time; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT()
