"""Trains a classifier of surnames on packed batches, and shows what batching by length saves.

``python examples/name_classifier.py`` takes about ten seconds on one CPU core.  The names in ``names/`` are
well-known ones of 18 languages, transliterated, one a line.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from name_batches import LANGUAGES, LETTERS, batched_lang_rep, pack_names, top_k_accuracy, train_batch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from memopt_cli.search.batch_size.length_strategies import compare_length_strategies
from memopt_cli.search.batch_size.samplers import TokenBudgetSampler

NAMES = Path(__file__).parent / "names"


class NameClassifier(nn.Module):
    """Packed one-hot letters -> log-probabilities of languages ``(N, 18)`` and hidden state ``(1, N, hidden)``."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(LETTERS), hidden)
        self.head = nn.Linear(hidden, len(LANGUAGES))

    def forward(self, names: PackedSequence) -> tuple[Tensor, Tensor]:
        """Classifies by the hidden state after each name's last letter."""
        _, (hidden, _) = self.lstm(names)
        return self.head(hidden[-1]).log_softmax(dim=-1), hidden


def read_names(folder: Path = NAMES) -> tuple[list[str], list[str]]:
    """All names and the language of each."""
    pairs = [(name, file.stem) for file in sorted(folder.glob("*.txt")) for name in file.read_text().splitlines()]
    return [name for name, _ in pairs], [language for _, language in pairs]


def split(names: Sequence[str], languages: Sequence[str], test_share: float = 0.2) -> tuple[list[str], ...]:
    """Names and languages to train on, and names and languages to test on; the same ones every time."""
    order = list(range(len(names)))
    random.Random(0).shuffle(order)
    test, train = order[: int(test_share * len(order))], order[int(test_share * len(order)) :]
    return (
        [names[i] for i in train],
        [languages[i] for i in train],
        [names[i] for i in test],
        [languages[i] for i in test],
    )


def train_epoch(
    net: NameClassifier, opt: torch.optim.Optimizer, names: Sequence[str], languages: Sequence[str], epoch: int
) -> float:
    """One pass in batches of 512 letters, every name once; returns the mean loss per name."""
    sampler = TokenBudgetSampler([len(name) for name in names], max_tokens=512)
    sampler.set_epoch(epoch)
    total = 0.0
    for batch in sampler:
        truth = batched_lang_rep([languages[i] for i in batch])
        loss = nn.functional.nll_loss(net(pack_names([names[i] for i in batch]))[0], truth)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(batch)
    return total / len(names)


def main(epochs: int = 20, seed: int = 0) -> float:
    """Train, and report; returns the share of test names whose language is the first guess."""
    torch.manual_seed(seed)
    names, languages = read_names()
    train_x, train_y, test_x, test_y = split(names, languages)
    print(f"{len(names)} names of {len(set(languages))} languages, 1 to {max(map(len, names))} letters")
    print(f"{'batched by':17}{'batches':>8}{'padding':>9}")
    for row in compare_length_strategies([len(name) for name in names], batch_size=64, max_tokens=512):
        print(f"{row.strategy:17}{row.batches:8}{row.waste:9.1%}")
    net = NameClassifier()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    train_batch(net, opt, nn.NLLLoss(), 64, x=train_x, y=train_y)  # one update on names drawn at random
    for epoch in range(epochs):
        loss = train_epoch(net, opt, train_x, train_y, epoch)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")
    first, third = (top_k_accuracy(net, 2000, k, test_x, test_y) for k in (1, 3))
    print(f"test names: the language is the first guess {first:.0%}, among the first three {third:.0%}")
    return first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
