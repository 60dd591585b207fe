"""``GCContainer(...)`` and ``TCGCContainer(...)``: segments made of modules, as in SpikingJelly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.runtime import (
    BitSpikeCompressor,
    GCContainer,
    NullSpikeCompressor,
    SegmentConfig,
    TCGCContainer,
    install_segment,
    remove_segment,
    segment_of,
)
from memopt_cli.runtime.runs import Chain
from tests.zoo.models import Parts


class Two(Parts, mix=lambda: nn.Linear(3, 3)):
    """Two sequences in, two out."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.mix(a) + b), a * b


class Leaky(Parts, v=None):
    """A neuron that keeps its potential in an attribute."""

    def forward(self, xs: Tensor) -> Tensor:
        spikes = []
        for x in xs:
            self.v = x if self.v is None else 0.8 * self.v + x
            spikes.append(torch.sigmoid(4 * self.v))
        return torch.stack(spikes)


def sequence() -> Tensor:
    return torch.randn(7, 4, 3, requires_grad=True)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [None, "BitSpikeCompressor", BitSpikeCompressor()])
def test_it_does_what_its_modules_do_in_turn(judge: Any, compressor: object) -> None:
    layers = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)
    plain = nn.Sequential(*copy.deepcopy(layers))
    judge.compare(plain, GCContainer(compressor, *layers), torch.randn(6, 3, requires_grad=True))
    assert judge.recomputations == 2


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_states_flow_from_chunk_to_chunk(exactly: Any, chunks: int) -> None:
    layers = nn.Linear(3, 5), Leaky(), nn.Linear(5, 3)
    plain = nn.Sequential(*copy.deepcopy(layers))
    exactly.compare(plain, TCGCContainer(None, *layers, n_chunk=chunks), sequence())
    assert exactly.recomputations == 2 * chunks


def test_a_batch_norm_in_chunks_has_the_statistics_of_the_whole(exactly: Any) -> None:
    layers = nn.Linear(3, 5, bias=False), nn.Flatten(0, 1), nn.BatchNorm1d(5), nn.Unflatten(0, (-1, 4)), Leaky()
    plain = nn.Sequential(*copy.deepcopy(layers))
    exactly.compare(plain, TCGCContainer(None, *layers, n_chunk=3), sequence())


def test_several_inputs_and_outputs(exactly: Any) -> None:
    plain = Chain(Two(), Two())
    chunked = TCGCContainer(None, *copy.deepcopy(plain), n_chunk=3, n_seq_inputs=2, n_outputs=2)
    exactly.compare(plain, chunked, sequence(), sequence())


def test_chunks_beyond_the_length_are_capped() -> None:
    layer = nn.Linear(3, 3)
    x = sequence()
    torch.testing.assert_close(TCGCContainer(None, layer, n_chunk=9)(x), layer(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda *layers: GCContainer(NullSpikeCompressor(), *layers),
        lambda *layers: TCGCContainer(None, *layers, n_chunk=2),
    ],
)
def test_it_is_a_sequential_and_a_segment(make: Callable[..., Any]) -> None:
    made = make(nn.Linear(3, 5), nn.Linear(5, 3))
    assert isinstance(made, nn.Sequential)
    assert isinstance(made, GCContainer)
    assert list(made.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert segment_of(again) == segment_of(made)
        assert torch.equal(again(sequence().detach().fill_(1)), made(sequence().detach().fill_(1)))
    assert type(made[:1]) is Chain
    remove_segment(made)
    assert type(made) is Chain


def test_in_one_chunk_it_is_no_chunked_one() -> None:
    made = TCGCContainer(None, nn.Linear(3, 3))
    assert isinstance(made, GCContainer)
    assert not isinstance(made, TCGCContainer)
    assert set(vars(made)) - set(vars(nn.Sequential())) == {"_memopt_segment"}


def test_a_file_with_one_loads_without_trust(tmp_path: Path) -> None:
    made = nn.Sequential(GCContainer(BitSpikeCompressor(), nn.Linear(3, 3)), TCGCContainer(None, Two(), n_chunk=2)[:0])
    torch.save(made, tmp_path / "net.pt")
    assert segment_of(memopt_cli.load(tmp_path / "net.pt")[0]) == SegmentConfig(compressor="bit")


def test_a_class_that_makes_itself_anew_still_can() -> None:
    """``module.__init__(...)`` of an installed segment is the module's own."""
    module = nn.Linear(3, 4)
    install_segment(module, SegmentConfig())
    module.__init__(3, 9)  # type: ignore[misc]
    assert module.weight.shape == (9, 3)
    assert segment_of(module) == SegmentConfig()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GCContainer(3, nn.Linear(1, 1)), "its x_compressor is 3"),
        (lambda: GCContainer(nn.Linear(1, 1)), "its x_compressor is Linear"),
        (lambda: GCContainer(None, 5), "int is not a Module subclass"),
        (lambda: GCContainer(None, nn.ReLU(inplace=True), nn.Linear(1, 1)), "writes over the input"),
        (lambda: TCGCContainer(None, nn.Linear(1, 1), n_chunk=0), "chunks must be 1 or more, not 0"),
        (lambda: TCGCContainer(None, nn.Linear(1, 1), n_chunk=2.5), "chunks must be a whole number, not 2.5"),  # type: ignore[arg-type]
        (lambda: TCGCContainer(None, nn.Linear(1, 1), n_chunk="2"), "chunks must be a whole number, not '2'"),  # type: ignore[arg-type]
        (lambda: TCGCContainer(None, nn.Linear(1, 1), n_seq_inputs=0), "seq_inputs must be 1 or more"),
    ],
)
def test_what_cannot_be_one_says_why(make: Callable[[], object], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        make()
