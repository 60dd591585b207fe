"""A name classifier: an LSTM reads a name letter by letter and says which of 18 languages it comes from."""

from __future__ import annotations

import string

import torch
from torch import Tensor, nn

LETTERS = string.ascii_letters + " .,;'"
"""The 57 letters; a name is a sequence of one-hot vectors over them, padded with zero vectors."""
INPUTS = {
    # 0 and 1 at the density of one-hot letters
    "inputs": [{"shape": f"TxBx{len(LETTERS)}", "dtype": "float32", "values": f"spikes:{1 / len(LETTERS):.4f}"}],
    "dims": {"T": 12, "B": 32},
}


class CharRNN(nn.Module):
    """Names ``[T, B, 57]``, padded to T letters -> log-probabilities of the languages ``[B, 18]``."""

    def __init__(self, hidden: int = 128, languages: int = 18) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(LETTERS), hidden)
        self.head = nn.Linear(hidden, languages)
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, names: Tensor) -> Tensor:
        """Classifies by the hidden state after the last step."""
        _, (hidden, _) = self.lstm(names)
        scores: Tensor = self.log_softmax(self.head(hidden[-1]))
        return scores


def build() -> CharRNN:
    """The model with the same weights every time; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CharRNN()
