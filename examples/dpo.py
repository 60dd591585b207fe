"""Direct preference optimization: a language model that is trained, and its frozen reference.

``python examples/dpo.py`` finds a plan, trains with it and without, and shows that the losses are the same and what is
saved; a minute on two CPU cores.
``memopt optimize examples/dpo.py:make_step -i 8x128@int64=0..512 -i 8x128@int64=0..512 --level 2 --budget 60%`` writes
the plan to a file.  The loss is that of Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from both_ways import BothWays, show, train_both_ways
from torch import Tensor, nn

import memopt_cli

TOKENS, WIDTH, LENGTH, BLOCKS = 512, 128, 128, 4
BETA = 0.1


class Block(nn.Module):
    """Causal attention and a perceptron over ``[N, T, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(self.norm2(x))
        return out


class LanguageModel(nn.Module):
    """Tokens ``[N, T]`` -> logits ``[N, T, 512]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each text ``[N, T]``: ``[N]``."""
    logits = model(tokens[:, :-1])
    return (
        -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1).sum(1)
    )


def make_step() -> memopt_cli.Step:
    """The model, its reference, and a step on the texts that people chose and those that they rejected."""
    policy = LanguageModel()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)

    def run(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            expected = log_likelihood(reference, chosen) - log_likelihood(reference, rejected)
        margin = log_likelihood(policy, chosen) - log_likelihood(policy, rejected) - expected
        loss = -F.logsigmoid(BETA * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "margin": margin.detach().mean()}

    return memopt_cli.Step(models={"policy": policy, "reference": reference}, optimizers=[optimizer], run=run)


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Texts, here random ones: chosen, rejected."""
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(TOKENS, (2, size, LENGTH), generator=generator)) for _ in range(count)]


def main(steps: int = 5, size: int = 8) -> BothWays:
    """Train both ways, and show it."""
    both = train_both_ways(make_step, batches(steps, size), budget="60%")
    show(both)
    return both


if __name__ == "__main__":
    main()
