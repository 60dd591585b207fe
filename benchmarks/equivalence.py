"""Try ``memopt verify`` on equivalent models and on wrong ones: it must accept the first and name each cause.

    python benchmarks/equivalence.py [--only TEXT]

Each pair is a model and another way to train it, by checkpoints, compilation or a plan.  The benchmark writes its
section of RESULTS.md, unless ``--only`` chooses some pairs.  It needs

    pip install peft snntorch transformers
    pip install --no-deps spikingjelly
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module as library
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import memopt_cli
from benchmarks.results import table, this_command, write_section

PLAIN = {"use_reentrant": False}
IDS = {"input_ids": torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))}
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Pair:
    """Model, and another way to train it."""

    reference: Callable[[], nn.Module]
    """Function that builds the model."""
    changed: Callable[[nn.Module], nn.Module]
    """Function that changes a copy of the model to the other way."""
    inputs: Any
    """Arguments of one step."""
    cause: str = ""
    """Part of the cause that ``memopt verify`` must name; empty if the two train alike."""


# ---------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """Residual block of two linear layers around a norm, an activation and dropout."""

    def __init__(self, activation: nn.Module, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.LayerNorm(32)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.dropout(self.activation(self.norm(self.wide(x)))))
        return out


class Last(nn.Module):
    """Block that ends with its activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.layer(x))
        return out


class Net(nn.Module):
    """Network of ``blocks``, each called through the function ``around`` if that is set."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 4)
        self.around: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.around(block, x) if self.around else block(x)
        scores: Tensor = self.head(x)
        return scores


class Recurrent(nn.Module):
    """LSTM over eight steps with a linear head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)
        self.around: Callable[[nn.Module, Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).repeat(1, 8, 1)
        out, _ = self.around(self.cells, x) if self.around else self.cells(x)
        scores: Tensor = self.head(out[:, -1])
        return scores


class Router(nn.Module):
    """Router of each row to one of four experts; two gates have equal weights, so that their scores tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.gate = nn.Linear(16, 4, bias=False)
        with torch.no_grad():
            self.gate.weight[2] = self.gate.weight[0]
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.in_parts = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        gates = self.gate(hidden)
        if self.in_parts:
            weights = self.gate.weight[2:].chunk(4, -1)
            pairs = zip(hidden.chunk(4, -1), weights, strict=True)
            late = torch.stack([nn.functional.linear(part, weight) for part, weight in pairs]).sum(0)
            gates = torch.cat([gates[..., :2], late], -1)
        _, chosen = gates.topk(1, -1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], -2)
        return outputs.gather(-2, chosen[..., None].expand(*chosen.shape, 16)).squeeze(-2)


def net(activation: Callable[[], nn.Module] = nn.GELU, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a network of three blocks."""
    return lambda: Net(*(Block(activation(), **options) for _ in range(3)))


def rrelu() -> nn.Module:
    """Build two blocks that end with RReLU, which draws random slopes."""
    return Net(*(Last(nn.RReLU()) for _ in range(2)))


def convolutions() -> nn.Module:
    """Build a plain convolutional network."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 14 * 14, 4))


def spiking() -> nn.Module:
    """Build linear layers with SpikingJelly's neurons between them."""
    neurons = library("spikingjelly.activation_based.neuron")
    return nn.Sequential(nn.Linear(16, 32), neurons.LIFNode(), nn.Linear(32, 16), neurons.IFNode(), nn.Linear(16, 4))


def hugging_face(name: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a small model of transformers from the configuration ``options``."""

    def make() -> nn.Module:
        hf = library("transformers")
        model: nn.Module = getattr(hf, f"{name}{head}")(getattr(hf, f"{name}Config")(**options))
        return model

    return make


def adapters() -> nn.Module:
    """Build GPT-2 with LoRA adapters and a trained head."""
    peft = library("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], r=4, init_lora_weights=False, modules_to_save=["lm_head"])
    model: nn.Module = peft.get_peft_model(GPT2(), config)
    return model


SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "use_cache": False}
GPT2 = hugging_face("GPT2", "LMHeadModel", vocab_size=96, n_embd=32, n_layer=2, n_head=2, use_cache=False)


# ---------------------------------------------------------------------------------------------- ways to train them


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    """Call each block of ``model`` through PyTorch's checkpoint."""
    model.around = lambda block, x: checkpoint(block, x, **(options or PLAIN))  # type: ignore[assignment]
    return model


def enabled(model: nn.Module, **options: Any) -> nn.Module:
    """Turn on gradient checkpointing as models of transformers offer it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or PLAIN)  # type: ignore[operator]
    return model


def reentrant_adapters(model: nn.Module) -> nn.Module:
    """Turn on reentrant checkpoints, and remove peft's hook by which their inputs require gradients."""
    enabled(model.base_model.model, use_reentrant=True)  # type: ignore[arg-type,union-attr]
    model.get_input_embeddings()._forward_hooks.clear()  # type: ignore[operator]
    return model


class InSequence(nn.Module):
    """Sequential that runs by ``checkpoint_sequential``."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)
        self.layers = [list(layers)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(nn.Sequential(*self.layers[0]), 2, x, use_reentrant=False)
        return out


def in_sequence(model: nn.Module) -> nn.Module:
    """Run the Sequential ``model`` in two checkpointed segments."""
    assert isinstance(model, nn.Sequential)
    return InSequence(model)


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap the blocks in PyTorch's checkpoint wrapper, which changes the names of their parameters."""
    wrapper = library("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    wrapper.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def selective(model: nn.Module) -> nn.Module:
    """Checkpoint each block so that products of matrices are kept and all else is recomputed."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(model, use_reentrant=False, context_fn=context)


class Offloading(nn.Module):
    """Model that keeps its saved tensors in host memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = self.module(x)
        return out


def by_memopt(model: nn.Module, inputs: Any = ROWS) -> nn.Module:
    """Apply memopt's plan of level 3 to ``model``."""
    memopt_cli.optimize(model, inputs, level=3, max_slowdown=float("inf"))
    return model


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """Compile ``model`` by torch.compile."""
    faster = torch.compile(model, **options)
    assert isinstance(faster, nn.Module)
    return faster


def within_budget(model: nn.Module) -> nn.Module:
    """Compile ``model`` with an activation memory budget, by which torch.compile recomputes."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = 0.3
    return compiled(model)


def in_parts(model: nn.Module) -> nn.Module:
    """Sum two of the router's gates in another order, so that ties are decided differently."""
    model.in_parts = True  # type: ignore[assignment]
    return model


RIGHT = {
    "checkpoint, three blocks": Pair(net(), checkpointed, ROWS),
    "checkpoint, dropout": Pair(net(dropout=0.3), checkpointed, ROWS),
    "reentrant checkpoint": Pair(net(), functools.partial(checkpointed, use_reentrant=True), ROWS),
    "reentrant checkpoint, dropout": Pair(net(dropout=0.3), functools.partial(checkpointed, use_reentrant=True), ROWS),
    "checkpoint around an LSTM": Pair(Recurrent, checkpointed, ROWS),
    "selective checkpoint": Pair(net(), selective, ROWS),
    "checkpoint_sequential": Pair(convolutions, in_sequence, IMAGES),
    "PyTorch's checkpoint wrapper": Pair(net(dropout=0.1), wrapped, ROWS),
    "saved tensors on the host": Pair(net(), Offloading, ROWS),
    "torch.compile": Pair(net(), compiled, ROWS),
    "torch.compile without Inductor": Pair(net(), functools.partial(compiled, backend="aot_eager"), ROWS),
    "memopt, blocks with dropout": Pair(net(dropout=0.2), by_memopt, ROWS),
    "memopt, convolutions": Pair(convolutions, functools.partial(by_memopt, inputs=IMAGES), IMAGES),
    "memopt, batch norm": Pair(net(norm=True), by_memopt, ROWS),
    "memopt, spiking neurons": Pair(spiking, by_memopt, ROWS),
    "Hugging Face GPT-2": Pair(GPT2, enabled, IDS),
    "Hugging Face Llama": Pair(hugging_face("Llama", "ForCausalLM", **LLAMA), enabled, IDS),
    "Hugging Face Mistral": Pair(hugging_face("Mistral", "ForCausalLM", **LLAMA), enabled, IDS),
    "Hugging Face Qwen2": Pair(hugging_face("Qwen2", "ForCausalLM", **LLAMA), enabled, IDS),
    "Hugging Face Mixtral": Pair(
        hugging_face("Mixtral", "ForCausalLM", **LLAMA, num_local_experts=4, num_experts_per_tok=2), enabled, IDS
    ),
    "Hugging Face BERT": Pair(hugging_face("Bert", "ForMaskedLM", **SIZES, intermediate_size=64), enabled, IDS),
    "Hugging Face RoBERTa": Pair(hugging_face("Roberta", "ForMaskedLM", **SIZES, intermediate_size=64), enabled, IDS),
    "Hugging Face OPT": Pair(
        hugging_face("OPT", "ForCausalLM", **SIZES, ffn_dim=64, word_embed_proj_dim=32, use_cache=False), enabled, IDS
    ),
    "Hugging Face GPT-NeoX": Pair(
        hugging_face("GPTNeoX", "ForCausalLM", **SIZES, intermediate_size=64, use_cache=False), enabled, IDS
    ),
    "Hugging Face ViT": Pair(
        hugging_face(
            "ViT", "ForImageClassification", **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=32
        ),
        enabled,
        {"pixel_values": IMAGES},
    ),
    "adapters with peft's hook": Pair(adapters, functools.partial(enabled, use_reentrant=True), IDS),
}
WRONG = {
    "RReLU in a checkpoint": Pair(rrelu, checkpointed, ROWS, "the recomputation stops before"),
    "dropout, compiled within a memory budget": Pair(
        net(dropout=0.3), within_budget, ROWS, "torch.compile uses different"
    ),
    "batch norm in a checkpoint": Pair(net(norm=True), checkpointed, ROWS, "a second time"),
    "adapters under a reentrant checkpoint": Pair(adapters, reentrant_adapters, IDS, "a reentrant checkpoint"),
    "a router whose ties fall otherwise": Pair(Router, in_parts, ROWS.repeat(8, 1), "falls otherwise"),
    "dropout, generators not kept": Pair(
        net(dropout=0.3),
        functools.partial(checkpointed, use_reentrant=False, preserve_rng_state=False),
        ROWS,
        "uses different random numbers",
    ),
}


# ---------------------------------------------------------------------------------------------- the run


def main() -> None:
    """Verify the pairs one after another, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pairs whose name has this in it")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, pair in (RIGHT | WRONG).items():
        if given.only in name:
            rows.append(_row(name, pair))
            print(*rows[-1], sep="  ", flush=True)
    if not given.only:
        write_section("Verification of other schemes", this_command(), table(_HEADINGS, rows))


_HEADINGS = ["pair", "expected", "said", "as expected", "time"]


def _row(name: str, pair: Pair) -> list[str]:
    torch.manual_seed(0)
    reference = pair.reference().train()
    candidate = pair.changed(copy.deepcopy(reference))
    began = time.perf_counter()
    found = memopt_cli.verify(reference, candidate, pair.inputs).result
    spent_s = time.perf_counter() - began
    said = found.alike if found.passed else found.cause.text if found.cause else "no cause"
    is_right = found.passed if not pair.cause else not found.passed and pair.cause in said
    where = f"{said} ({found.cause.module})" if found.cause and found.cause.module else said
    return [name, pair.cause or "the same", where, "yes" if is_right else "NO", f"{spent_s:.1f} s"]


if __name__ == "__main__":
    main()
