"""Models that between them use every construct that can be lifted, the arguments of one step of each, and the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from memopt_cli.runtime import SegmentConfig, install_segment, refusal
from memopt_cli.trace import StorageLog
from tests.zoo.models import Parts


class DataDependentBranch(Parts, small=lambda: nn.Linear(3, 4), large=lambda: nn.Linear(3, 4)):
    def forward(self, x: Tensor) -> Tensor:
        y = self.large(x)
        if bool(y.sum() > 0) and x.size(0) > 1:
            y = torch.relu(y) + self.small(x)
        elif y.dim() == 2:
            y = y.sigmoid()
        return y * 2


class WhileLoop(Parts, step=lambda: nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        rounds = 0
        while float(x.abs().max()) > 0.2 and rounds < 5:
            x = torch.tanh(self.step(x)) * 0.5
            rounds += 1
        return x, rounds


class ForWithBreak(Parts, weight=lambda: nn.Parameter(torch.randn(4, 4))):
    def forward(self, x: Tensor, limit: int = 3) -> Tensor:
        previous, current = x, x + 1
        for i in range(6):
            if i >= limit:
                break
            if i == 1:
                continue
            previous, current = current, current @ self.weight + previous * i
        return previous + current


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.3, bidirectional=True)
        self.gru = nn.GRUCell(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, cell) = self.lstm(x)
        state = torch.zeros(x.size(1), 5, dtype=x.dtype, device=x.device)
        for output in outputs:
            state = self.gru(output, state)
        return torch.cat([state, hidden[0], cell[-1]], dim=1)


class NamedInputs(Parts, project=lambda: nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(4, 3)})):
    def forward(self, batch: dict[str, Tensor], scale: tuple[float, int]) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for name, layer in self.project.items():
            if name in batch:
                results[name] = layer(batch[name]) * scale[0] + scale[1]
        results["count"] = torch.tensor(len(results))
        return results


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


class Tuples(Parts, split=lambda: nn.Linear(4, 6)):
    def halves(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a, b, c = self.split(x).chunk(3, dim=-1)
        return a, (b, c)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Pair:
        x, y = pair
        a, (b, c) = self.halves(x + y)
        return Pair(a, [b, c, y[:, 1:3]])


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.25
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                centre = x.mean(0)
                spread = (x - centre).abs().mean()
            self.mean.mul_(1 - self.momentum).add_(x.detach().mean(0), alpha=self.momentum)
            self.steps += 1
            self.mean[0] = 0.0
            x = x * spread
        return self.norm(x - self.mean)


class Helper(Parts, inner=lambda: nn.Linear(3, 3)):
    @torch.jit.export
    def encode(self, x: Tensor, twice: bool) -> Tensor:
        x = self.inner(x)
        return self.inner(x) if twice else x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x, False).relu()


class NestedMethods(Parts, helper=Helper):
    def deeper(self, x: Tensor, depth: int) -> Tensor:
        return self.helper.encode(x, twice=depth > 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.deeper(x, 1) + self.deeper(x, 2) + self.helper(x) + self.helper.inner.weight.sum()


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layers(x), p=0.3, training=self.training)


class EarlyReturn(Parts, layers=lambda: nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])):
    def forward(self, x: Tensor, stop: int) -> Tensor:
        if stop < 0:
            return x * 2
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == stop:
                return x
        return x.tanh()


class OptionalArgument(Parts, bias=lambda: nn.Parameter(torch.randn(3))):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if scale is None:
            scale = 0.5
        return x * scale + self.bias


class ListAppend(Parts, cell=lambda: nn.Linear(3, 3)):
    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        states: list[Tensor] = []
        sizes = [0]
        for t in range(x.size(0)):
            states.append(self.cell(x[t] if len(states) == 0 else states[-1]))
            sizes.append(sizes[-1] + t)
        sizes[0] = -1
        states[0] = states[0] * 2
        return torch.stack(states[::2] + [states.pop()]), sizes  # noqa: RUF005


class StringMode(Parts, mode="mean", weight=lambda: nn.Parameter(torch.randn(3))):
    def forward(self, x: Tensor, reduction: str = "sum") -> Tensor:
        y = x * self.weight
        if self.mode == "mean" and reduction != "none":
            return y.mean() if reduction == "mean" else y.sum() * len(reduction)
        return y


def gelu_of(x: Tensor, approximate: bool) -> Tensor:
    return scaled(F.gelu(x), 0.5) if approximate else scaled(torch.sigmoid(1.702 * x) * x, 2.0)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


class FunctionCalls(Parts, linear=lambda: nn.Linear(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        x = gelu_of(self.linear(x), True) + gelu_of(x, approximate=False)
        return F.layer_norm(x, [3]) + F.softmax(x, dim=-1)


class Counter(Parts, calls=0, history=lambda: [0], state=lambda: torch.zeros(2, 3), linear=lambda: nn.Linear(3, 3)):
    """Numbers, lists and tensors that forward assigns."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.calls
        self.calls += 1
        self.history.append(self.calls * 2)
        self.state = (self.state + self.linear(x)).detach() * 0.5
        return self.linear(x) + self.state * before


class ShapeArithmetic(Parts, heads=2, qkv=lambda: nn.Linear(4, 12)):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        depth = width // self.heads
        qkv = self.qkv(x).view(batch, length, 3, self.heads, depth).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] @ qkv[1].transpose(-2, -1)) / float(depth) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(mask, -float("inf")).softmax(-1)
        return (scores @ qkv[2]).transpose(1, 2).reshape(batch, length, -1)[..., : width % 3 + 2]


class Comprehensions(Parts, layers=lambda: nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])):
    def forward(self, xs: list[Tensor]) -> tuple[Tensor, str, float]:
        outputs = [layer(xs[i]) for i, layer in enumerate(self.layers)]
        sizes = {str(i): o.size(0) for i, o in enumerate(outputs)}
        total = max([n for n in sizes.values()])  # noqa: C416
        text = "{} of {}".format(total, len(sizes))  # noqa: UP032
        if total > 100:
            raise ValueError(f"{total} rows are too many")
        return torch.cat(outputs), text, total / 4


class Shadowing(Parts, scale=lambda: nn.Parameter(torch.ones(3))):
    """Arguments with the names of what generated code itself needs."""

    def forward(self, x: Tensor, device: bool, max: float = float("inf")) -> Tensor:
        x = x.clamp(max=max)
        zeros = torch.zeros(2, 3, dtype=torch.float32, device=torch.device("cpu"))
        return x * self.scale + zeros if device else x


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def interpolation() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding="same"), nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.GroupNorm(1, 2)
    )


def resnet() -> nn.Module:
    from sample_models.resnet import ResNet

    return ResNet((1, 2), width=4)


def char_rnn() -> nn.Module:
    from sample_models.char_rnn import CharRNN

    return CharRNN(hidden=8, languages=3)


def gpt() -> nn.Module:
    from sample_models.gpt import GPT

    return GPT(vocabulary=30, width=8, heads=2, blocks=2, context=16)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        return_dict=False,
    )
    return BertModel(config)


class Model(NamedTuple):
    """How to build one, and what to call it with."""

    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    traced: bool = False


def _tokens() -> tuple[Any, ...]:
    return torch.randint(0, 30, (2, 7)), torch.ones(2, 7, dtype=torch.int64)


CORPUS = {
    "branch": Model(DataDependentBranch, lambda: (torch.randn(4, 3),)),
    "while": Model(WhileLoop, lambda: (torch.randn(2, 4),)),
    "break": Model(ForWithBreak, lambda: (torch.randn(2, 4), 4)),
    "lstm": Model(Recurrent, lambda: (torch.randn(5, 2, 3),)),
    "transformer": Model(transformer_encoder, lambda: (torch.randn(2, 5, 8),)),
    "dicts": Model(NamedInputs, lambda: ({"b": torch.randn(2, 4), "a": torch.randn(3, 2)}, (0.5, 2))),
    "tuples": Model(Tuples, lambda: ((torch.randn(2, 4), torch.randn(2, 4)),)),
    "buffers": Model(RunningMean, lambda: (torch.randn(4, 3),)),
    "methods": Model(NestedMethods, lambda: (torch.randn(2, 3),)),
    "dropout": Model(Dropouts, lambda: (torch.randn(6, 5),)),
    "return": Model(EarlyReturn, lambda: (torch.randn(2, 3), 1)),
    "optional": Model(OptionalArgument, lambda: (torch.randn(2, 3), torch.tensor([[True, False, False]]))),
    "absent": Model(OptionalArgument, lambda: (torch.randn(2, 3),)),
    "lists": Model(ListAppend, lambda: (torch.randn(4, 2, 3),)),
    "strings": Model(StringMode, lambda: (torch.randn(2, 3),)),
    "functions": Model(FunctionCalls, lambda: (torch.randn(2, 3),)),
    "attributes": Model(Counter, lambda: (torch.randn(2, 3),)),
    "shapes": Model(ShapeArithmetic, lambda: (torch.randn(2, 5, 4),)),
    "comprehensions": Model(Comprehensions, lambda: ([torch.randn(1, 2), torch.randn(3, 2)],)),
    "shadowing": Model(Shadowing, lambda: (torch.randn(2, 3), True)),
    "upsampling": Model(interpolation, lambda: (torch.randn(2, 1, 4, 4),)),
    "resnet": Model(resnet, lambda: (torch.randn(2, 3, 32, 32),)),
    "gpt": Model(gpt, _tokens),
    "traced resnet": Model(resnet, lambda: (torch.randn(2, 3, 32, 32),), traced=True),
    "traced lstm": Model(Recurrent, lambda: (torch.randn(5, 2, 3),), traced=True),
    "char_rnn": Model(char_rnn, lambda: (torch.rand(4, 2, 57),)),
    "traced char_rnn": Model(char_rnn, lambda: (torch.rand(4, 2, 57),), traced=True),
    "traced gpt": Model(gpt, _tokens, traced=True),
    "traced bert": Model(bert, _tokens, traced=True),
}


def compiled(name: str) -> torch.jit.ScriptModule:
    """The model of that name as TorchScript, with the same weights every time."""
    model = CORPUS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model.make()
        if not model.traced:
            return torch.jit.script(module)
        return torch.jit.trace(module, model.arguments(), check_trace=False, strict=False)


def run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({}), seed: int = 5
) -> dict[str, Any]:
    """Everything that one training step gives, and what the model holds afterwards."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.jit.optimized_execution(False):  # TorchScript's own differentiation rounds differently
        outputs = tree_leaves(model(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs))))
    differentiable = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    if differentiable:
        cotangents = [torch.linspace(1, 2, t.numel(), dtype=t.dtype).view_as(t) for t in differentiable]
        torch.autograd.backward(differentiable, cotangents)
    return {
        **{f"output {i}": output for i, output in enumerate(outputs)},
        **{f"gradient of {name}": p.grad for name, p in model.named_parameters()},
        **{f"state {name}": t for name, t in model.state_dict().items()},
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what two steps do not have in common to the bit."""
    assert a.keys() == b.keys()

    def are_equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)

    return [name for name in a if not are_equal(a[name], b[name])]


def with_segments(model: nn.Module) -> nn.Module:
    """A copy whose every module is a segment that can be one."""
    twin = copy.deepcopy(model)
    segments = [m for m in twin.modules() if not refusal(m)]
    for segment in segments:
        install_segment(segment, SegmentConfig())
    assert segments
    return twin


def peak_bytes(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Tensor peak of a step."""
    with StorageLog(lambda: "") as log:
        run(model, args)
    return log.peaks.tensor_bytes
