"""PyTorch's own layers as blocks of a random model.

All blocks take and return tensors of B × :data:`STEPS` × :data:`WIDTH`, so that any may follow any other; a layer that
needs another layout is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS: Final = 6
"""Time steps of a sequence."""
WIDTH: Final = 8
"""Features of a time step."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of block that a random model may contain."""

    make: Callable[..., nn.Module]
    """Function that makes the block, from the blocks inside it if it holds any."""
    axes: tuple[int, ...] = ()
    """Dimensions along which its inputs do not mix, so that it may run in chunks; none if empty."""
    holds: bool = False
    """Whether the block contains other blocks."""
    gathers: bool = False
    """Whether its batch statistics must be gathered from all chunks."""
    hands_on: bool = False
    """Whether a call starts from the state in which the previous call ended."""
    repeats: bool = False
    """Whether the block calls its inner blocks several times, each time on its whole input."""


class Turned(nn.Module):
    """Layer that takes B × channels × time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.transpose(1, 2))
        return output.transpose(1, 2)


class Image(Turned):
    """Layer that takes images: a sequence becomes an image of one channel, time × features."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.unsqueeze(1))
        return output.squeeze(1)


class ChannelsLast(Turned):
    """Layer that takes images of four channels, stored with the channels last."""

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.unflatten(2, (4, 2)).permute(0, 2, 1, 3).contiguous(memory_format=torch.channels_last)
        output: Tensor = self.layer(pictures)
        return output.permute(0, 2, 1, 3).flatten(2)


class FirstOf(Turned):
    """Layer with several outputs, of which the first is used."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


class Cells(nn.Module):
    """Recurrent cell that is called once for each time step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for item in x.unbind(1):
            state = self.cell(item, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


class Packed(FirstOf):
    """Recurrent layer on a packed sequence, whose rows have several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x), device="cpu") % STEPS + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=STEPS)
        return output


class SelfAttention(nn.Module):
    """Residual block of causal self-attention by PyTorch's module."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=x.dtype)
        output: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + output


class ScaledDotProduct(nn.Module):
    """Causal self-attention by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Looking(nn.Module):
    """Embedding that is looked up by indices computed from the input."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        indices = x.detach().nan_to_num(0, 0, 0).abs().sum(-1).mul(3).long() % 7
        return x + self.table(indices)


class Bagging(Looking):
    """Bag of embeddings for each row, by the same indices."""

    def forward(self, x: Tensor) -> Tensor:
        indices = x.detach().nan_to_num(0, 0, 0).abs().sum(-1).mul(3).long() % 7
        return x * self.table(indices).unsqueeze(1)


def _norm(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Turned(kind(WIDTH, **options))


def _conv2d(*extra: nn.Module) -> nn.Module:
    return Image(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *extra, nn.Conv2d(3, 1, 1)))


_EVERYWHERE: Final = (0, 1)

LAYERS: Final[dict[str, Kind]] = {
    "linear": Kind(lambda: nn.Linear(WIDTH, WIDTH), _EVERYWHERE),
    "linear, no bias": Kind(lambda: nn.Linear(WIDTH, WIDTH, bias=False), _EVERYWHERE),
    "feed-forward": Kind(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)), _EVERYWHERE),
    "sequential": Kind(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Dropout(0.2), nn.Tanh())
    ),
    "weight norm": Kind(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())),
    "spectral norm": Kind(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())),
    "orthogonal": Kind(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))),
    # Activations.
    "relu": Kind(nn.ReLU, _EVERYWHERE),
    "relu in place": Kind(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)), _EVERYWHERE),
    "leaky in place": Kind(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.LeakyReLU(0.1, inplace=True)), _EVERYWHERE),
    "gelu": Kind(nn.GELU, _EVERYWHERE),
    "silu": Kind(nn.SiLU, _EVERYWHERE),
    "tanh": Kind(nn.Tanh, _EVERYWHERE),
    "sigmoid": Kind(nn.Sigmoid, _EVERYWHERE),
    "hardtanh": Kind(nn.Hardtanh, _EVERYWHERE),
    "softplus": Kind(nn.Softplus, _EVERYWHERE),
    "threshold": Kind(lambda: nn.Threshold(0.1, 0.0), _EVERYWHERE),
    "prelu": Kind(nn.PReLU, _EVERYWHERE),
    "rrelu": Kind(nn.RReLU),
    "softmax": Kind(lambda: nn.Softmax(-1), _EVERYWHERE),
    "log softmax over time": Kind(lambda: nn.LogSoftmax(1), (0,)),
    "glu": Kind(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()), _EVERYWHERE),
    # Dropout.
    "dropout": Kind(lambda: nn.Dropout(0.3)),
    "dropout in place": Kind(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3, inplace=True))),
    "alpha dropout": Kind(lambda: nn.AlphaDropout(0.3)),
    "dropout of channels": Kind(lambda: Turned(nn.Dropout1d(0.3))),
    # Norms.
    "layer norm": Kind(lambda: nn.LayerNorm(WIDTH), _EVERYWHERE),
    "rms norm": Kind(lambda: nn.RMSNorm(WIDTH), _EVERYWHERE),
    "group norm": Kind(lambda: Turned(nn.GroupNorm(2, WIDTH)), (0,)),
    "instance norm": Kind(_norm(nn.InstanceNorm1d, affine=True), (0,)),
    "instance norm with statistics": Kind(_norm(nn.InstanceNorm1d, track_running_stats=True)),
    "batch norm": Kind(_norm(nn.BatchNorm1d), (0,), gathers=True),
    "batch norm without momentum": Kind(_norm(nn.BatchNorm1d, momentum=None)),
    "batch norm without statistics": Kind(_norm(nn.BatchNorm1d, track_running_stats=False)),
    "batch norm without weights": Kind(_norm(nn.BatchNorm1d, affine=False)),
    "frozen batch norm": Kind(lambda: Turned(nn.BatchNorm1d(WIDTH).eval())),
    # Convolutions and pooling.
    "conv1d": Kind(lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), (0,)),
    "transposed conv1d": Kind(lambda: Turned(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)), (0,)),
    "grouped conv1d": Kind(lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)), (0,)),
    "conv2d": Kind(_conv2d, (0,)),
    "conv2d and norm": Kind(lambda: _conv2d(nn.BatchNorm2d(3), nn.ReLU()), (0,), gathers=True),
    "channels last": Kind(
        lambda: ChannelsLast(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)))
    ),
    "max pool": Kind(lambda: Turned(nn.MaxPool1d(3, 1, 1)), (0,)),
    "max pool 2d": Kind(lambda: Image(nn.MaxPool2d(3, 1, 1)), (0,)),
    "average pool": Kind(lambda: Image(nn.AvgPool2d(3, 1, 1)), (0,)),
    "adaptive pool": Kind(
        lambda: Image(nn.Sequential(nn.AdaptiveAvgPool2d((3, 4)), nn.Upsample((STEPS, WIDTH)))), (0,)
    ),
    "fractional pool": Kind(
        lambda: Image(nn.Sequential(nn.FractionalMaxPool2d(2, (3, 4)), nn.Upsample((STEPS, WIDTH))))
    ),
    # Recurrence and attention.
    "rnn": Kind(lambda: FirstOf(nn.RNN(WIDTH, WIDTH, batch_first=True)), (0,)),
    "lstm": Kind(lambda: FirstOf(nn.LSTM(WIDTH, WIDTH, batch_first=True)), (0,)),
    "deep lstm": Kind(lambda: FirstOf(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True))),
    "gru both ways": Kind(lambda: FirstOf(nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)), (0,)),
    "packed gru": Kind(lambda: Packed(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "lstm cell": Kind(lambda: Cells(nn.LSTMCell(WIDTH, WIDTH)), (0,)),
    "gru cell": Kind(lambda: Cells(nn.GRUCell(WIDTH, WIDTH)), (0,)),
    "attention": Kind(SelfAttention, (0,)),
    "attention with dropout": Kind(lambda: SelfAttention(0.2)),
    "scaled dot product": Kind(ScaledDotProduct, (0,)),
    "transformer layer": Kind(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)),
    "transformer layer, norm first": Kind(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, norm_first=True, batch_first=True), (0,)
    ),
    # Tables.
    "embedding": Kind(lambda: Looking(nn.Embedding(7, WIDTH)), _EVERYWHERE),
    "embedding with padding": Kind(lambda: Looking(nn.Embedding(7, WIDTH, padding_idx=0)), _EVERYWHERE),
    "embedding with a largest norm": Kind(lambda: Looking(nn.Embedding(7, WIDTH, max_norm=1.0))),
    "embedding by frequency": Kind(lambda: Looking(nn.Embedding(7, WIDTH, scale_grad_by_freq=True))),
    "bag": Kind(lambda: Bagging(nn.EmbeddingBag(7, WIDTH))),
    "largest of a bag": Kind(lambda: Bagging(nn.EmbeddingBag(7, WIDTH, mode="max"))),
}
"""Name of a block -> its kind."""
