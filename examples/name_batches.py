"""Names as batches for a recurrent classifier: one-hot letters, padded and packed.

The functions of a well-known exercise on sequence models, batched: a name is a sequence of letters, its label a
language.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from memopt_cli.batching.dataset import evaluation_mode
from memopt_cli.errors import BatchShapeError, UsageError

LETTERS = string.ascii_letters + " .,;'"
"""The 57 letters; other ones must be transliterated first."""
LANGUAGES = tuple(
    "Arabic Chinese Czech Dutch English French German Greek Irish Italian Japanese Korean Polish Portuguese Russian "
    "Scottish Spanish Vietnamese".split()
)


def batched_name_rep(names: Sequence[str], max_word_size: int) -> Tensor:
    """Names -> ``(max_word_size, N, 57)``, one-hot letters, zero vectors after a name's end.

    Raises :class:`UsageError` for a letter that is not among :data:`LETTERS`, and :class:`BatchShapeError` for a name
    that is longer than ``max_word_size`` or empty.
    """
    rep = torch.zeros(max_word_size, len(names), len(LETTERS))
    for column, name in enumerate(names):
        if not 0 < len(name) <= max_word_size:
            raise BatchShapeError(f"name {column} ('{name}') has {len(name)} letters; 1 to {max_word_size} fit")
        rep[range(len(name)), column, _letter_indices(name)] = 1
    return rep


def print_char(name_reps: Tensor, file: TextIO | None = None) -> None:
    """Write the letters of ``(…, 57)`` one a line, ``<pad>`` for a zero vector, in the order of memory.

    Of ``(T, N, 57)`` that is the first letter of every name, then the second …
    """
    out = file or sys.stdout
    for row in name_reps.reshape(-1, name_reps.shape[-1]):
        out.write(f"{LETTERS[int(row.argmax())] if row.any() else '<pad>'}\n")


def batched_lang_rep(langs: Sequence[str], languages: Sequence[str] = LANGUAGES) -> Tensor:
    """Languages -> their numbers, ``(N,)`` int64.  Raises :class:`UsageError` for one that is not listed."""
    unknown = [lang for lang in langs if lang not in languages]
    if unknown:
        raise UsageError(f"unknown language '{unknown[0]}'", hint=f"Known: {', '.join(languages)}.")
    return torch.tensor([languages.index(lang) for lang in langs], dtype=torch.long)


def pack_names(names: Sequence[str], device: str | torch.device = "cpu") -> PackedSequence:
    """Names -> one-hot letters packed step by step, ``data`` of shape ``(letters in all, 57)``."""
    longest = max(map(len, names), default=0)
    lengths = [len(name) for name in names]
    return pack_padded_sequence(batched_name_rep(names, longest), lengths, enforce_sorted=False).to(device)  # type: ignore[arg-type]


def batched_dataloader(
    npoints: int,
    x_: Sequence[str],
    y_: Sequence[str],
    verbose: bool = False,
    device: str | torch.device = "cpu",
    *,
    languages: Sequence[str] = LANGUAGES,
    generator: torch.Generator | None = None,
) -> tuple[PackedSequence, Tensor]:
    """One batch of ``npoints`` names drawn with replacement: packed letters and labels ``(npoints,)``, on the device.

    ``verbose`` writes the shapes, the names and their letters to standard output.
    """
    if npoints < 1 or not x_ or len(x_) != len(y_):
        raise UsageError(f"cannot draw {npoints} of {len(x_)} names with {len(y_)} languages")
    drawn = torch.randint(len(x_), (npoints,), generator=generator).tolist()
    names, langs = [x_[i] for i in drawn], [y_[i] for i in drawn]
    packed = pack_names(names, device)
    labels = batched_lang_rep(langs, languages).to(device)
    if verbose:
        _describe(names, packed, labels)
    return packed, labels


def train_batch(
    net: nn.Module,
    opt: torch.optim.Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor],
    n_points: int,
    device: str | torch.device = "cpu",
    *,
    x: Sequence[str],
    y: Sequence[str],
    languages: Sequence[str] = LANGUAGES,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One update on ``n_points`` names drawn from ``x`` and ``y``; returns the loss, a scalar without its graph.

    ``net`` takes a packed sequence and returns ``(scores, hidden)``, scores of shape ``(n_points, languages)``.
    """
    net.train().to(device)
    opt.zero_grad()
    batch, truth = batched_dataloader(n_points, x, y, device=device, languages=languages, generator=generator)
    output, _ = net(batch)
    loss = criterion(output, truth)
    loss.backward()
    opt.step()
    return loss.detach()


def top_k_accuracy(
    net: nn.Module,
    n_points: int,
    k: int,
    x_: Sequence[str],
    y_: Sequence[str],
    device: str | torch.device = "cpu",
    *,
    languages: Sequence[str] = LANGUAGES,
    generator: torch.Generator | None = None,
) -> float:
    """Share of ``n_points`` names, drawn with replacement, whose language is among the ``k`` highest scores.

    One batch, in evaluation mode; every module's mode is put back.
    """
    net.to(device)
    batch, truth = batched_dataloader(n_points, x_, y_, device=device, languages=languages, generator=generator)
    with evaluation_mode(net), torch.no_grad():
        scores, _ = net(batch)
    hits = (scores.topk(k, dim=1).indices == truth[:, None]).any(dim=1)
    return float(hits.double().mean())


eval = top_k_accuracy
"""The exercise's name for it, which hides Python's own ``eval`` where it is imported."""


def _letter_indices(name: str) -> list[int]:
    unknown = [letter for letter in name if letter not in LETTERS]
    if unknown:
        raise UsageError(
            f"'{name}' has the letter '{unknown[0]}', which is not among the {len(LETTERS)} known ones",
            hint=f"Transliterate names to {LETTERS!r}.",
        )
    return [LETTERS.index(letter) for letter in name]


def _describe(names: Sequence[str], packed: PackedSequence, labels: Tensor) -> None:
    lines: list[Any] = [list(names), f"packed {tuple(packed.data.shape)}", f"batch sizes {packed.batch_sizes.tolist()}"]
    sys.stdout.write("\n".join(map(str, [*lines, f"labels {labels.tolist()}"])) + "\n")
    print_char(packed.data)
