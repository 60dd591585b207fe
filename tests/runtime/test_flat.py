"""Memory stays flat from step to step: a segment does not outlive its backward, nor a graph that nobody holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import SegmentConfig, install_segment
from tests.zoo.models import GIVEN, Parts

WHOLE, CHUNKS = SegmentConfig(), SegmentConfig(chunks=2)


class Box:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Notes(dict[str, Any]):
    """A dictionary of a class of its own."""


class Writing(Parts, linear=lambda: nn.Linear(8, 8)):
    """Leaves what it computes, with its graph, in an object that it is given."""

    def forward(self, x: Tensor, into: Any) -> Tensor:
        y = self.linear(x)
        match into:
            case Box():
                into.kept.append(y)
            case list():
                into.append(y)
            case _:
                into[str(len(into))] = y
        return x + y.tanh()


class Given(Parts, make=GIVEN, block=Writing):
    """Gives one object to two calls of a block."""

    def forward(self, x: Tensor) -> Tensor:
        into = self.make()
        return self.block(self.block(x, into), into)


class Keeping(Parts, first=lambda: nn.Linear(8, 8), second=lambda: nn.Linear(8, 8), kept=list, aside=None):
    """Keeps what it computes in a new list of its own in each forward, and a part that the loss does not take."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.first(x)]
        self.aside = self.second(self.kept[0]).sin()
        return self.kept[0].tanh()


class Membrane(Parts, linear=lambda: nn.Linear(8, 8), v=lambda: torch.zeros(())):
    """Carries a state with a graph over two time steps, and cuts it off afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        spikes = []
        for _ in range(2):
            self.v = self.v * 0.5 + self.linear(x)
            spikes.append(self.v.sigmoid())
        self.v = self.v.detach()
        return sum(spikes, torch.zeros(()))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "an object": lambda: Given(Box),
    "a list": lambda: Given(list),
    "a dictionary": lambda: Given(Notes),
    "its own list": Keeping,
    "a state": Membrane,
}
PLANS: dict[str, dict[str, SegmentConfig]] = {
    "the block": {"0": WHOLE},
    "around it": {"": WHOLE},
    "both": {"": WHOLE, "0": WHOLE},
    "in chunks around it": {"": CHUNKS, "0": WHOLE},
}


def _alive() -> int:
    """Return the bytes of all tensors that Python still knows, parameters included."""
    gc.collect()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))


@pytest.mark.parametrize("goes_back", [True, False], ids=["with backward", "without"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* it runs whole from now on")
def test_each_step_leaves_as_much_as_the_one_before(kind: str, plan: str, goes_back: bool) -> None:
    model = nn.Sequential(KINDS[kind](), nn.Linear(8, 8))
    for path, config in PLANS[plan].items():
        install_segment(model.get_submodule(path), config)
        if kind in ("an object", "a list", "a dictionary") and path == "0":
            install_segment(model[0].block, WHOLE)
    left = []
    for _ in range(6):
        loss = model(torch.randn(4, 8)).square().sum()
        if goes_back:
            loss.backward()
        model.zero_grad()
        del loss
        left.append(_alive())
    assert left[3:] == left[2:3] * 3


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_cache_of_keys_and_values(nested: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).train()
    assert config.use_cache
    for layer in model.model.layers:
        install_segment(layer, WHOLE)
        if nested:
            install_segment(layer.mlp, WHOLE)
    if nested:
        install_segment(model.model, WHOLE)
    left = []
    for _ in range(5):
        ids = torch.randint(0, 16, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        left.append(_alive())
    assert left[3:] == left[2:3] * 2
