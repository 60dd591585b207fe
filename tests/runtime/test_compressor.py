"""Compressors: whatever goes in comes back equal to the bit, in dtype, shape and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt_cli.runtime.compressor import COMPRESSORS, PackedTensor
from memopt_cli.trace import StorageLog

NAMES = list(COMPRESSORS)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNCOMMON = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTEGERS, *UNCOMMON, torch.bool, torch.complex64]
HELD = {"boolean": torch.bool, "uint8": torch.uint8}
NASTY = [0.0, -0.0, 1.0, 2.0, 0.3, -1.0, 255.0, 256.0, 300.0, 1e-8, float("inf"), -float("inf"), float("nan")]


def octets(x: Tensor) -> list[int]:
    """Return the bytes of the elements in logical order, by which equality to the bit is judged."""
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1))
    return flat.view(torch.uint8).tolist() if x.numel() else []


def round_trip(name: str, x: Tensor) -> PackedTensor:
    """Check that the compressor ``name`` gives back ``x`` to the bit, as every compressor must for every tensor."""
    before = octets(x)
    packed = COMPRESSORS[name].compress(x)
    back = COMPRESSORS[name].decompress(packed)
    assert (back.dtype, back.shape, back.stride()) == (x.dtype, x.shape, x.stride())
    assert octets(back) == before
    assert octets(x) == before, "the original was changed"
    assert not back.requires_grad
    assert packed.nbytes <= x.numel() * x.element_size(), "packing made it larger"
    assert COMPRESSORS[name].packed_bytes(x) == packed.nbytes
    return packed


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any dtype, up to four dimensions, any layout; often what a compressor claims, often just not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(torch.Size(shape).numel())
    two = st.sampled_from([0.0, draw(st.sampled_from(NASTY))])
    element = draw(st.sampled_from([st.integers(0, 1), st.integers(0, 255), two, st.sampled_from(NASTY), None]))
    if element is None:  # any bits at all: NaN payloads, subnormals
        width = count * torch.empty((), dtype=dtype).element_size()
        bits = torch.tensor(list(draw(st.binary(min_size=width, max_size=width))), dtype=torch.uint8)
        bits = bits & 1 if dtype is torch.bool else bits
        flat = bits.view(dtype) if width else torch.empty(0, dtype=dtype)
    else:
        values = draw(st.lists(element, min_size=count, max_size=count))
        values = values if dtype.is_floating_point else [int(v) % 128 if abs(v) < 1e9 else 0 for v in values]
        flat = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return draw(st.sampled_from(LAYOUTS))(flat.view(shape))


def _permuted(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.dim()))))


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _strided(x: Tensor) -> Tensor:
    return x[..., ::2] if x.dim() else x


def _offset(x: Tensor) -> Tensor:
    return x[1:] if x.dim() and x.shape[0] else x


def _expanded(x: Tensor) -> Tensor:
    return x.unsqueeze(0).expand(3, *x.shape)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [lambda x: x, _permuted, _channels_last, _strided, _offset, _expanded]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(x=tensors())
@example(x=torch.zeros(3, 0))
@example(x=torch.tensor(1.0))
@example(x=torch.tensor([0.0, -0.0]))
@example(x=torch.tensor([2.0, 1.0, 0.0]))
@example(x=torch.tensor([0.3, 1.0]))
@example(x=torch.tensor([-1.0, 0.0]))
@example(x=torch.tensor([300.0, 255.0]))
@example(x=torch.tensor([0.0, 1.25, 1.25]))
@example(x=torch.tensor([0.0, 1.25, -0.0]))
@example(x=torch.tensor([0x7FC00001, 0, 0x7FC00001], dtype=torch.int32).view(torch.float32))
@example(x=torch.tensor([0x7FC00001, 0, 0x7FC00002], dtype=torch.int32).view(torch.float32))
@example(x=torch.tensor([-(2**63), 0, 2**63 - 1]))
@example(x=torch.tensor([-(2**15), 0, 2**15 - 1], dtype=torch.int16).repeat(5))
@example(x=torch.tensor([2**62, 2**62 + 255]))
@example(x=torch.tensor([0, 2, 1], dtype=torch.uint8).view(torch.bool))
@example(x=torch._neg_view(torch.tensor([0.0, -1.0])))
@example(x=torch.ones(2, 2, dtype=torch.complex64).conj())
def test_round_trip(name: str, x: Tensor) -> None:
    round_trip(name, x)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNCOMMON, torch.bool], ids=str)
def test_bits_of_spikes(dtype: torch.dtype) -> None:
    for layout, shape in itertools.product(LAYOUTS[:3], [(), (1,), (7,), (8,), (9,), (3, 0), (2, 3, 5, 7)]):
        x = layout((torch.arange(torch.Size(shape).numel()) % 3 == 1).view(shape).to(dtype))
        packed = round_trip("bit", x)
        assert not packed.raw, (layout, shape)
        assert packed.nbytes == -(-x.numel() // 8), (layout, shape)


@pytest.mark.parametrize("name", ["boolean", "uint8"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS[2:]], ids=str)
def test_one_byte_an_element(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    packed = round_trip(name, x)
    assert packed.nbytes == 6
    assert packed.data[0].dtype == HELD[name]


def test_uint8_holds_every_byte() -> None:
    packed = round_trip("uint8", torch.arange(256).float())
    assert not packed.raw
    assert packed.nbytes == 256


@pytest.mark.parametrize("value", [2.0, 0.3, -1.0, 300.0, -0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["boolean", "bit"])
def test_one_foreign_value_and_the_tensor_is_kept_raw(name: str, value: float) -> None:
    x = torch.ones(1000)
    x[517] = value
    assert round_trip(name, x).raw


@pytest.mark.parametrize("value", [0.3, -1.0, 256.0, 300.0, -0.0, float("nan"), float("inf")])
def test_uint8_foreign_values(value: float) -> None:
    x = torch.full((1000,), 200.0)
    x[517] = value
    assert round_trip("uint8", x).raw


def test_sparse_holds_positions_only_where_all_values_are_one() -> None:
    x = torch.zeros(100, dtype=torch.float64)
    x[[3, 50]] = 1
    assert round_trip("sparse", x).nbytes == 2 * 4
    x[50] = -0.0
    assert round_trip("sparse", x).nbytes == 2 * (4 + 8)


def test_sparse_of_a_dense_tensor_is_raw() -> None:
    assert round_trip("sparse", torch.ones(100, dtype=torch.float16)).raw


@pytest.mark.parametrize("name", NAMES)
def test_overlapping_gapped_and_sparse_layouts_are_raw(name: str) -> None:
    base = torch.ones(24)
    for x in (base.expand(2, 24), base[::2], base.as_strided((4, 4), (2, 1)), base.view(4, 6)[:, :3]):
        assert round_trip(name, x).raw
    assert COMPRESSORS[name].compress(torch.eye(3).to_sparse()).raw


@pytest.mark.parametrize("name", NAMES)
def test_a_raw_tensor_modified_in_between_raises(name: str) -> None:
    x = torch.randn(4, 5)
    packed = COMPRESSORS[name].compress(x)
    x[0, 0] = 1
    with pytest.raises(RuntimeError, match=r"shape \(4, 5\).*modified in place"):
        COMPRESSORS[name].decompress(packed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_what_is_held_has_no_graph(name: str, value: float) -> None:
    x = torch.full((100,), value, requires_grad=True) * 1
    packed = COMPRESSORS[name].compress(x)
    assert all(t.grad_fn is None for t in packed.data)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=["plain", "permuted", "channels_last"])
def test_one_bit_an_element_and_the_value(dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(torch.tensor([0, 1.25]).to(dtype).repeat(1050).view(5, 6, 7, 10))
    packed = round_trip("two-valued", x)
    assert not packed.raw
    assert packed.nbytes == -(-2100 // 8) + x.element_size()


@pytest.mark.parametrize("dtype", INTEGERS[2:], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=["plain", "permuted", "channels_last"])
def test_one_byte_an_index_and_the_least(dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    least = torch.iinfo(dtype).max - 255
    packed = round_trip("index", layout((torch.arange(256) + least).to(dtype).view(2, 4, 8, 4)))
    assert not packed.raw
    assert packed.nbytes == 256 + packed.data[1].element_size()


@pytest.mark.parametrize("dtype", INTEGERS[2:], ids=str)
def test_indices_further_apart_than_the_dtype_can_tell_are_raw(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    assert round_trip("index", torch.tensor([limits.min, 0, limits.max], dtype=dtype).repeat(9)).raw


@pytest.mark.parametrize("name", ["boolean", "uint8", "bit", "sparse", "two-valued", "index"])
def test_a_packed_tensor_is_independent_of_the_original(name: str) -> None:
    x = torch.zeros(64, dtype=torch.int64 if name == "index" else torch.float32)
    x[5] = 1
    before = octets(x)
    packed = COMPRESSORS[name].compress(x)
    x.fill_(7)
    assert octets(COMPRESSORS[name].decompress(packed)) == before


@pytest.mark.parametrize("name", ["bit", "two-valued"])
def test_packing_on_a_gpu_takes_little_beside_what_it_makes(name: str) -> None:
    with FakeTensorMode():
        spikes = torch.empty(2**28, dtype=torch.float64, device="meta")  # as one on a GPU, which needs none here
        with StorageLog(str) as log:
            packed = COMPRESSORS[name].compress(spikes)
    assert log.peaks.tensor_bytes - spikes.nbytes - packed.nbytes <= 41 * 2**20


@pytest.mark.parametrize("name", ["boolean", "uint8", "bit"])
def test_a_dry_run_takes_the_claim_for_granted(name: str) -> None:
    with FakeTensorMode():
        x = torch.rand(5, 20).t()
        packed = COMPRESSORS[name].compress(x)
        back = COMPRESSORS[name].decompress(packed)
    assert packed.nbytes == {"bit": 13}.get(name, 100)
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
