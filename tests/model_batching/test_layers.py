"""Layers that have a kernel, and layers that run under vmap, against the same layers one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching import BatchModule
from memopt_cli.runtime.tree import tensors_of
from tests.zoo.models import Parts

G = 3
"""Models."""


def x(*shape: int) -> Tensor:
    return torch.randn(G, *shape, generator=torch.Generator().manual_seed(1))


def ids(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(0, below, (G, *shape), generator=torch.Generator().manual_seed(1))


class Tuned(nn.Module):
    """Bare parameters, one of them frozen, and a buffer that forward reads."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.table = nn.Parameter(torch.randn(4, 5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("mask", torch.ones(4, 5))

    def forward(self, images: Tensor) -> Tensor:
        return (images * self.scale + self.table[: images.size(1)] * self.mask) * self.frozen


class Functional(nn.Module):
    """Functions in place of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.conv2d(images, self.kernel, padding=1))
        hidden = F.max_pool2d(F.adaptive_avg_pool2d(hidden, 4), 2)
        hidden = F.layer_norm(hidden, hidden.shape[1:]).mean(dim=(2, 3))
        hidden = F.linear(hidden, self.weight, bias=self.bias)
        hidden = (
            F.softmax(input=hidden, dim=1)
            + hidden.softmax(1)
            + torch.cat([hidden[:, 3:], hidden[:, :3]], dim=1).log_softmax(-1)
        )
        hidden = hidden + hidden.sum() * hidden.max(dim=1).values.unsqueeze(-1).expand(-1, 6)
        hidden = torch.where(hidden > 0, hidden, hidden.clamp(min=-0.5))[..., [1, 0, 2, 3, 5, 4]]
        hidden = torch.stack([hidden[0], hidden[-1]]).sum(0, keepdim=True) + hidden.permute(1, 0).T
        first, second = hidden.unsqueeze(1).transpose(1, 2).reshape(hidden.size(0), -1).chunk(2, dim=1)
        return torch.einsum("bi,bj->bij", first, second).flatten(1) @ torch.ones(9, 2, dtype=first.dtype)


class Attends(nn.Module):
    """Multi-head attention with masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.register_buffer("future", torch.ones(4, 5).triu(1).bool())

    def forward(self, query: Tensor, key: Tensor, padding: Tensor) -> Any:
        mixed, weights = self.attention(query, key, key, key_padding_mask=padding > 0.5, attn_mask=self.future)
        other, _ = self.attention(query, key, key, need_weights=False)
        return mixed + other, weights


class Hand(nn.Module):
    """Attention by hand, as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.register_buffer("causal", torch.ones(6, 6).tril().bool()[None, None])

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, size = tokens.shape
        q, k, v = self.qkv(tokens).split(size, dim=2)
        q, k, v = (t.view(batch, length, 2, size // 2).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (size // 2) ** -0.5
        scores = scores.masked_fill(self.causal[:, :, :length, :length] == 0, float("-inf"))
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (scores.softmax(dim=-1) @ v + fused).transpose(1, 2).contiguous().view(batch, length, size)


class Tied(nn.Module):
    """An output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embedding(words))


class Branching(Parts, inner=lambda: Reshaping(), out=lambda: nn.Linear(5, 2)):
    """A part that asks for its input's shape, which tracing cannot answer."""

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.inner(images))


class Reshaping(Parts, weight=lambda: nn.Parameter(torch.ones(5))):
    def forward(self, images: Tensor) -> Tensor:
        return images * self.weight if len(images.shape) == 2 else images.sum()


def frozen() -> nn.Module:
    """Its last layer is trained alone."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (x(4, 5),)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (x(4, 5),)),
    "linear on 3-D": (lambda: nn.Linear(5, 3), (x(4, 2, 5),)),
    "linear on one image": (lambda: nn.Linear(5, 3), (x(5),)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, bias=False), (x(4, 2, 9),)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, dilation=2), (x(4, 2, 7, 7),)),
    "conv2d on one image": (lambda: nn.Conv2d(2, 4, 3), (x(2, 7, 7),)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (x(4, 4, 5, 5),)),
    "conv2d same": (lambda: nn.Conv2d(2, 4, 3, padding="same"), (x(4, 2, 5, 5),)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (x(4, 2, 5, 5),)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (x(2, 2, 3, 3, 3),)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), (x(3, 2, 4, 4),)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (x(5, 4),)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (x(5, 4, 3, 3),)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2), (x(3, 2, 2, 3, 2),)),
    "batch norm without affine": (lambda: nn.BatchNorm2d(4, affine=False), (x(5, 4, 3, 3),)),
    "batch norm untracked": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (x(5, 4, 3, 3),)),
    "batch norm in eval": (lambda: nn.BatchNorm2d(4).eval(), (x(5, 4, 3, 3),)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (x(5, 4, 3, 3),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (x(3, 4, 3, 3),)),
    "layer norm": (lambda: nn.LayerNorm(5), (x(3, 4, 5),)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((4, 5), bias=False), (x(3, 4, 5),)),
    "rms norm": (lambda: nn.RMSNorm(5), (x(3, 4, 5),)),
    "embedding": (lambda: nn.Embedding(7, 4), (ids(3, 5),)),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), (ids(3, 5),)),
    "embedding by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), (ids(3, 5),)),
    "embedding with a largest norm": (lambda: nn.Embedding(7, 4, max_norm=0.5), (ids(3, 5),)),
    "rnn": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (x(5, 2, 3),)),
    "rnn, two layers, both ways": (lambda: nn.RNN(3, 4, 2, bidirectional=True, bias=False), (x(5, 2, 3),)),
    "gru": (lambda: nn.GRU(3, 4, 2, batch_first=True), (x(2, 5, 3),)),
    "gru from a state": (lambda: nn.GRU(3, 4, bidirectional=True), (x(5, 2, 3), x(2, 2, 4))),
    "gru on one sequence": (lambda: nn.GRU(3, 4, bias=False), (x(5, 3),)),
    "lstm": (lambda: nn.LSTM(3, 4, 2, bidirectional=True), (x(5, 2, 3),)),
    "lstm with projection": (lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), (x(2, 5, 3),)),
    "rnn cell": (lambda: nn.RNNCell(3, 4), (x(2, 3),)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (x(2, 3), x(2, 4))),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (x(2, 3),)),
    "attention": (Attends, (x(2, 4, 8), x(2, 5, 8), torch.zeros(G, 2, 5))),
    "attention of other sizes": (lambda: Attends(kdim=6, vdim=6), (x(2, 4, 8), x(2, 5, 6), torch.zeros(G, 2, 5))),
    "attention with a bias row": (lambda: Attends(add_bias_kv=True), (x(2, 4, 8), x(2, 5, 8), torch.zeros(G, 2, 5))),
    "attention by hand": (Hand, (x(2, 5, 8),)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, nn.LayerNorm(8)),
        (x(2, 4, 8),),
    ),
    "encoder, norm first": (lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), (x(4, 2, 8),)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16), (x(4, 2, 8), x(3, 2, 8))),
    "prelu": (lambda: nn.PReLU(4), (x(3, 4, 2),)),
    "bare parameters": (Tuned, (x(3, 4, 5),)),
    "functions": (Functional, (x(3, 2, 6, 6),)),
    "tied weights": (Tied, (ids(3, 5),)),
    "a frozen layer": (frozen, (x(4, 5),)),
    "a parametrized layer": (normed, (x(4, 5),)),
    "a part that cannot be traced": (Branching, (x(4, 5),)),
    "images through everything": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2),
            nn.GroupNorm(2, 6), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4), nn.Softmax(dim=1),
        ),
        (x(3, 2, 8, 8),),
    ),
}  # fmt: skip


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_a_fused_layer_equals_separate_layers(layer: str, equals_separate: Callable[..., BatchModule]) -> None:
    make, inputs = LAYERS[layer]
    equals_separate(without_dropout(make()), *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["linear", "conv2d grouped", "gru", "encoder", "functions"])
def test_a_fused_layer_equals_separate_layers_in_float32(
    layer: str, equals_separate: Callable[..., BatchModule]
) -> None:
    make, inputs = LAYERS[layer]
    equals_separate(without_dropout(make()), *inputs, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer", ["linear", "lstm", "gru", "gru cell", "encoder", "attention by hand", "batch norm 2d"]
)
def test_a_fused_layer_runs_under_autocast(layer: str) -> None:
    if layer == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch cannot run an LSTM under autocast on this processor")
    make, inputs = LAYERS[layer]
    model = without_dropout(make())
    outputs = []
    for route in ("fused", "loop"):
        batched = BatchModule(model, G, route=route)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(tensors_of(batched(*inputs)))
        torch.autograd.backward([t.float().sum() for t in outputs[-1]])
    for fused, looped in zip(*outputs, strict=True):
        torch.testing.assert_close(fused.float(), looped.float(), rtol=0.05, atol=0.05)


LENT = [
    *(
        "linear",
        "batch norm 2d",
        "embedding with a largest norm",
        "gru",
        "lstm with projection",
        "gru cell",
        "attention",
    ),
    *("bare parameters", "functions", "tied weights", "a frozen layer", "a parametrized layer"),
]
"""Layers that hold their tensors in different ways, each of which the loop must lend."""


@pytest.mark.parametrize("layer", LENT)
def test_a_looped_layer_equals_separate_layers(layer: str, equals_separate: Callable[..., BatchModule]) -> None:
    make, inputs = LAYERS[layer]
    equals_separate(without_dropout(make()), *inputs, route="loop")


@pytest.mark.parametrize("layer", ["linear", "conv2d", "batch norm 2d", "layer norm", "embedding", "bare parameters"])
def test_a_mapped_layer_equals_separate_layers(layer: str, equals_separate: Callable[..., BatchModule]) -> None:
    make, inputs = LAYERS[layer]
    equals_separate(make(), *inputs, route="vmap")
