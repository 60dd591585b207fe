"""Operators that a lifted program may call, with arguments that no model gives: an error is fine, a signal is not."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memopt_cli.runtime.lifted.allowed import is_allowed
from memopt_cli.runtime.lifted.arguments import ArgumentError, checked
from memopt_cli.runtime.lifted.operators import EXPRESSIONS, find_operator
from tests.rows import quick

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each case runs in a forked process")

SEEDS = range(3)
"""Rounds of random arguments; every operator has one call in each."""
_SECONDS = 3
"""A call may take long: that is ended, and no failure."""
_DIED = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)

Call = Callable[[], Any]


def run_forked(calls: list[tuple[str, Call]]) -> list[str]:
    """Run the calls in children, each until one dies of a signal; the names of those that did."""
    died, first = [], 0
    while first < len(calls):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run(calls[first:], writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            reached = len(stream.read())
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            break
        first += max(reached, 1)
        if os.WTERMSIG(status) in _DIED:
            died.append(f"{calls[first - 1][0]}: {signal.Signals(os.WTERMSIG(status)).name}")
    return died


def _run(calls: list[tuple[str, Call]], writing: int) -> None:
    """The child: a byte for each call that it begins."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    warnings.simplefilter("ignore")
    try:
        for _, call in calls:
            os.write(writing, b".")
            signal.alarm(_SECONDS)
            try:
                call()
            except Exception:
                continue
    finally:
        os._exit(0)


def test_a_call_that_dies_is_seen() -> None:
    calls = [("fine", lambda: 1), ("raises", lambda: int("x")), ("dies", lambda: os.kill(os.getpid(), signal.SIGSEGV))]
    assert run_forked([*calls, *calls]) == ["dies: SIGSEGV", "dies: SIGSEGV"]


# ---------------------------------------------------------------------------------------------- random arguments

_INTEGERS = (0, 1, -1, 2, 3, 4, 7, -2, 64, -99999, 99999, 2**31, -(2**31), 2**40, 2**62, -(2**63))
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-310, float("nan"), float("inf"), 1e30, 1e-9)
_SHAPES = ((), (0,), (1,), (4,), (4, 4), (2, 4), (1, 4, 4), (2, 4, 8), (2, 4, 4, 4), (2, 4, 4, 4, 4), (64,), (2, 0, 4))
_TEXTS = ("sum", "mean", "none", "gelu", "left", "linear", "")


def operators() -> list[Any]:
    """All that take a tensor and are called as they are."""
    schemas = torch._C._jit_get_all_schemas()
    keys = sorted(f"{s.name}.{s.overload_name}".rstrip(".") for s in schemas if is_allowed(s.name))
    found = (find_operator(key) for key in dict.fromkeys(keys) if key not in EXPRESSIONS)
    return [o for o in found if o is not None and any("Tensor" in str(a.type) for a in o._schema.arguments)]


def random_tensor(choose: random.Random) -> Tensor:
    shape = choose.choice(_SHAPES)
    kind = choose.choice("fffffiiibqcdh")
    if kind == "i":
        numbers = [choose.choice((0, 1, 2, 3, -1, 5, -(10**7), 10**7)) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(numbers, dtype=torch.int64).reshape(shape)
    if kind == "b":
        return torch.rand(shape) > 0.5
    if kind == "q":
        dtype = choose.choice((torch.quint8, torch.qint8, torch.qint32))
        return torch.quantize_per_tensor(torch.rand(shape), 0.1, 1, dtype)
    dtype = {"c": torch.complex64, "d": torch.float64, "h": torch.bfloat16}.get(kind, torch.float32)
    tensor = torch.randn(shape, dtype=dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and choose.random() < 0.1 else tensor


def random_value(kind: str, choose: random.Random) -> Any:
    if kind.startswith("Optional["):
        return None if choose.random() < 0.4 else random_value(kind[9:-1], choose)
    if kind.startswith("List["):
        return [random_value(kind[5:-1], choose) for _ in range(choose.choice((0, 1, 1, 2, 2, 3, 4)))]
    makers: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: random_tensor(choose),
        "int": lambda: choose.choice(_INTEGERS),
        "SymInt": lambda: choose.choice(_INTEGERS),
        "float": lambda: choose.choice(_FLOATS),
        "number": lambda: choose.choice((*_FLOATS, *_INTEGERS)),
        "bool": lambda: choose.random() < 0.5,
        "str": lambda: choose.choice(_TEXTS),
        "Device": lambda: torch.device("cpu"),
        "ScalarType": lambda: choose.choice((6, 6, 7, 4, 11, 12, 99, -1, 99999)),
        "Layout": lambda: choose.choice((0, 0, 1, 2, 99)),
        "MemoryFormat": lambda: choose.choice((0, 1, 2, 3, 4, -1, 99)),
    }
    return makers[kind]()


def random_call(operator: Any, seed: int) -> tuple[str, Call]:
    call = checked(operator, with_codes=True)

    def run() -> None:
        choose = random.Random(f"{operator} {seed}")
        torch.manual_seed(seed)
        positional, named = [], {}
        for argument in operator._schema.arguments:
            default = argument.has_default_value() and choose.random() < 0.5
            value = argument.default_value if default else random_value(str(argument.real_type), choose)
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                positional.append(value)
        call(*positional, **named)

    return f"{operator} with seed {seed}", run


@pytest.mark.parametrize("seed", quick(SEEDS, {0}))
def test_random_arguments_end_no_process(seed: int) -> None:
    found = operators()
    assert len(found) > 1000
    assert run_forked([random_call(operator, seed) for operator in found]) == []


# ---------------------------------------------------------------------------------------------- arguments that lie

ones, zeros, numbers = torch.ones, torch.zeros, torch.tensor


def behind_its_check(key: str) -> Callable[..., Any]:
    operator = find_operator(key)
    assert operator is not None, key
    return checked(operator, with_codes=True)


def lstm(key: str = "aten::lstm.input", **other: Any) -> Any:
    """One step of four units, or with something else in the place of an argument."""
    arguments = {
        "x": ones(3, 2, 4),
        "hx": [zeros(1, 2, 64), zeros(1, 2, 64)],
        "params": [zeros(256, 4), zeros(256, 64), zeros(256), zeros(256)],
        **other,
    }
    return behind_its_check(key)(
        arguments["x"], arguments["hx"], arguments["params"], True, 1, 0.0, False, False, False
    )


def packed_lstm(sizes: Tensor, batch: int = 2) -> Any:
    states, params = [zeros(1, batch, 8)] * 2, [zeros(32, 4), zeros(32, 8)]
    return behind_its_check("aten::lstm.data")(ones(5, 4), sizes, states, params, False, 1, 0.0, False, False)


def batch_norm(key: str, x: Tensor, *rest: Any) -> Any:
    return behind_its_check(key)(x, *rest, 0.1, 1e-5)


def bag(offsets: Any, key: str = "aten::embedding_bag", indices: Any = (0, 1, 2, 3), **other: Any) -> Any:
    return behind_its_check(key)(ones(4, 8), numbers(indices), numbers(offsets), **other)


def ctc(targets: Any, lengths: Any = (2,), steps: Any = (6,)) -> Any:
    return behind_its_check("aten::ctc_loss.IntList")(zeros(6, 1, 5), numbers([targets]), list(steps), list(lengths))


def attention(key: Tensor, value: Tensor, **other: Any) -> Any:
    return behind_its_check("aten::_scaled_dot_product_flash_attention_for_cpu")(ones(2, 4, 8, 16), key, value, **other)


def quantized_bag(**other: Any) -> Any:
    weight = torch.quantize_per_channel(ones(4, 16), ones(4), zeros(4), 0, torch.quint8)
    packed = torch.ops.quantized.embedding_bag_prepack(weight)
    arguments = {"indices": numbers([0, 1]), "offsets": numbers([0]), **other}
    return behind_its_check("quantized::embedding_bag_byte")(packed, **arguments)


def packed_rows(axis: int, *shape: int) -> Any:
    channels = ones(shape[axis])
    weight = torch.quantize_per_channel(ones(*shape), channels, channels, axis, torch.quint8)
    return behind_its_check("quantized::embedding_bag_prepack")(weight if axis else weight.view(-1, 8))


def complex_ones(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.complex64)


def padded(*batch_sizes: int) -> Any:
    """Three items of sequences, padded."""
    return behind_its_check("aten::_pad_packed_sequence")(ones(3, 4), numbers(batch_sizes), False, 0.0, 2)


def grid(interpolation: int, padding: int) -> Any:
    return behind_its_check("aten::grid_sampler_2d")(ones(1, 1, 4, 4), ones(1, 4, 4, 2), interpolation, padding, True)


FINE: dict[str, Call] = {
    "packed rows": lambda: packed_rows(0, 4, 8),
    "grid": lambda: grid(2, 2),
    "eigenvalues": lambda: behind_its_check("aten::linalg_eigvals")(ones(3, 3)),
    "least squares": lambda: behind_its_check("aten::linalg_lstsq")(torch.eye(3), ones(3, 1), driver="gelss"),
    "upsampling": lambda: behind_its_check("aten::upsample_nearest1d")(ones(1, 1, 8), [12], 1.55),
    "distances": lambda: behind_its_check("aten::_pdist_forward")(ones(4, 3), 2.0),
    "interpolating by scales": lambda: behind_its_check("aten::__interpolate.scale_list")(
        ones(1, 1, 8, 8), None, [2.0, 0.5], recompute_scale_factor=True
    ),
    "interpolating to a size": lambda: behind_its_check("aten::__interpolate.size_list")(ones(1, 1, 8, 8), [16, 4]),
    "upsampling by scales": lambda: behind_its_check("aten::upsample_bilinear2d.vec")(
        ones(1, 1, 8, 8), None, False, [2.0, 0.5]
    ),
    "upsampling to a size": lambda: behind_its_check("aten::upsample_bicubic2d")(ones(1, 1, 8, 8), [3, 20], False),
    "weight norm": lambda: behind_its_check("aten::_weight_norm")(ones(4, 3), ones(4, 1)),
    "weight norm of all": lambda: behind_its_check("aten::_weight_norm")(ones(4, 3), ones(()), -1),
    "fused weight norm": lambda: behind_its_check("aten::_weight_norm_interface")(ones(4, 3), ones(1, 3), 1),
    "batch norm": lambda: batch_norm("aten::native_batch_norm", ones(2, 4), ones(4), None, zeros(4), ones(4), False),
    "batch norm that trains": lambda: batch_norm("aten::native_batch_norm", ones(2, 4), None, None, None, None, True),
    "batch norm without statistics": lambda: batch_norm(
        "aten::_native_batch_norm_legit.no_stats", ones(2, 4, 3), ones(4), ones(4), True
    ),
    "batch norm in eval": lambda: batch_norm(
        "aten::_native_batch_norm_legit_no_training", ones(2, 4), None, None, zeros(4), ones(4)
    ),
    "group norm": lambda: behind_its_check("aten::native_group_norm")(ones(2, 4, 3), ones(4), None, 2, 4, 3, 2, 1e-5),
    "lstm": lstm,
    "projecting lstm": lambda: lstm(
        hx=[zeros(1, 2, 3), zeros(1, 2, 64)],
        params=[zeros(256, 4), zeros(256, 3), zeros(256), zeros(256), zeros(3, 64)],
    ),
    "packed lstm": lambda: packed_lstm(numbers([2, 2, 1])),
    "ctc": lambda: ctc([1, 4]),
    "ctc with padding": lambda: ctc([1, 4, -100, -100]),
    "bag": lambda: bag([0, 2, 2]),
    "bag with a last offset": lambda: bag([0, 2, 4], include_last_offset=True),
    "weighed bag": lambda: bag([0, 2], per_sample_weights=ones(4)),
    "quantized bag": quantized_bag,
    "attention": lambda: attention(ones(2, 2, 5, 16), ones(2, 2, 5, 16), attn_mask=zeros(8, 5)),
    "fft": lambda: behind_its_check("aten::_fft_c2c")(complex_ones(2, 8), [0, 1], 0, True),
    "real fft": lambda: behind_its_check("aten::_fft_r2c")(ones(8), [0], 0, True),
    "inverse fft": lambda: behind_its_check("aten::_fft_c2r")(complex_ones(5), [0], 0, 8),
    "dtype": lambda: behind_its_check("aten::to.dtype")(ones(2), 5),
    "padding": lambda: padded(2, 1),
    "memory format": lambda: behind_its_check("aten::clone")(ones(2, 2), memory_format=torch.contiguous_format),
    "out": lambda: behind_its_check("aten::div.out")(ones(2), ones(2), out=ones(2)),
}

REFUSED: dict[str, Call] = {
    "transposes a sparse tensor in place": lambda: behind_its_check("aten::transpose_")(torch.eye(3).to_sparse(), 0, 1),
    "transposes a sparse matrix in place": lambda: behind_its_check("aten::t_")(torch.eye(3).to_sparse()),
    "copies to a compressed tensor": lambda: behind_its_check("aten::copy")(torch.eye(3).to_sparse_csr(), ones(3, 3)),
    "weight norm": lambda: behind_its_check("aten::_weight_norm")(ones(4096, 4), ones(1, 1), 0),
    "weight norm along the last": lambda: behind_its_check("aten::_weight_norm")(ones(4, 4096), ones(1, 1), 1),
    "empty weight norm": lambda: behind_its_check("aten::_weight_norm_interface")(ones(0), ones(0), 0),
    "fused weight norm": lambda: behind_its_check("aten::_weight_norm_interface")(ones(4096, 4), ones(1, 1), 0),
    "fused weight norm of all": lambda: behind_its_check("aten::_weight_norm_interface")(ones(4, 4), ones(()), -1),
    "batch norm's weight": lambda: batch_norm(
        "aten::native_batch_norm", ones(2, 4096), ones(1), None, zeros(4096), ones(4096), False
    ),
    "batch norm's statistics": lambda: batch_norm(
        "aten::_native_batch_norm_legit", ones(2, 4096), None, None, zeros(1), ones(1), True
    ),
    "batch norm's missing statistics": lambda: batch_norm(
        "aten::native_batch_norm", ones(2, 4), None, None, None, None, False
    ),
    "batch norm without statistics": lambda: batch_norm(
        "aten::_native_batch_norm_legit.no_stats", ones(2, 4), None, None, False
    ),
    "batch norm in eval": lambda: batch_norm(
        "aten::_native_batch_norm_legit_no_training", ones(2, 4), None, None, ones(1), ones(0)
    ),
    "functional batch norm": lambda: batch_norm(
        "aten::_native_batch_norm_legit_functional", ones(2, 4096), ones(1), None, zeros(4096), ones(4096), True
    ),
    "group norm of no groups": lambda: behind_its_check("aten::native_group_norm")(
        ones(64), None, None, 1, 64, 1, 0, 1e-5
    ),
    "lstm's recurrent weights": lambda: lstm(params=[zeros(256, 4), zeros(8, 2), zeros(256), zeros(256)]),
    "lstm's input weights": lambda: lstm(params=[zeros(4, 4), zeros(256, 64), zeros(256), zeros(256)]),
    "lstm's bias": lambda: lstm(params=[zeros(256, 4), zeros(256, 64), zeros(1), zeros(1)]),
    "lstm's parameters": lambda: lstm(params=[zeros(256, 4)]),
    "lstm's states": lambda: lstm(hx=[zeros(1, 1, 64), zeros(1, 1, 64)]),
    "lstm's state": lambda: lstm(hx=[zeros(1, 2, 64)]),
    "lstm's cell": lambda: lstm(hx=[zeros(1, 2, 64), zeros(0)]),
    "packed lstm's batch": lambda: packed_lstm(numbers([2, 2, 1]), batch=1),
    "packed lstm's sizes": lambda: packed_lstm(numbers([2, 10**6])),
    "ctc's target": lambda: ctc([10**7, 1]),
    "ctc's negative target": lambda: ctc([-(10**7), 1]),
    "ctc's target lengths": lambda: ctc([1, 1], lengths=(3,)),
    "ctc's input lengths": lambda: ctc([1, 1], steps=(7,)),
    "bag's negative offset": lambda: bag([0, -(10**9), 2], "aten::_embedding_bag"),
    "bag's falling offset": lambda: bag([0, 3, 1]),
    "bag's offset beyond": lambda: bag([0, 10**6], include_last_offset=True),
    "bag's weights": lambda: bag([0, 2], "aten::_embedding_bag_forward_only", per_sample_weights=ones(1)),
    "quantized bag's offsets": lambda: quantized_bag(offsets=numbers([-(10**8), 0])),
    "quantized bag's weights": lambda: quantized_bag(per_sample_weights=ones(1)),
    "quantized bag's mapping": lambda: quantized_bag(
        pruned_weights=True, compressed_indices_mapping=numbers([10**7] * 4, dtype=torch.int32)
    ),
    "rows of a view without a scale": lambda: packed_rows(0, 4, 16),
    "rows with the scales of columns": lambda: packed_rows(1, 16, 8),
    "attention's batch": lambda: attention(ones(1, 4, 8, 16), ones(1, 4, 8, 16)),
    "attention's values": lambda: attention(ones(2, 4, 8, 16), ones(2, 4, 2, 16)),
    "attention's heads": lambda: attention(ones(2, 3, 8, 16), ones(2, 3, 8, 16)),
    "attention's mask": lambda: attention(ones(2, 4, 8, 16), ones(2, 4, 8, 16), attn_mask=zeros(2, 3)),
    "fft's dimension": lambda: behind_its_check("aten::_fft_c2c")(complex_ones(8), [99999], 0, True),
    "fft twice": lambda: behind_its_check("aten::_fft_c2c")(complex_ones(8, 8), [0] * 6, 0, True),
    "real fft's dimension": lambda: behind_its_check("aten::_fft_r2c")(ones(8), [2**62], 0, True),
    "inverse fft's dimension": lambda: behind_its_check("aten::_fft_c2r")(complex_ones(8), [9999], 0, 8),
    "inverse fft's size": lambda: behind_its_check("aten::_fft_c2r")(complex_ones(2), [0], 0, 10**5),
    "view of quantized": lambda: behind_its_check("aten::view_copy.dtype")(
        torch.quantize_per_tensor(ones(4), 0.1, 1, torch.qint8), 5
    ),
    "dtype": lambda: behind_its_check("aten::to.dtype")(ones(2), 99999),
    "dtype in a tensor": lambda: behind_its_check("aten::to.dtype")(ones(2), numbers(99999)),
    "dtype of any kind": lambda: behind_its_check("aten::to.prim_dtype")(ones(2), 99999),
    "copy as nothing": lambda: behind_its_check("aten::to.prim_dtype")(ones(2), None, False, True),
    "copy to nowhere": lambda: behind_its_check("aten::to.prim_Device")(ones(2), None, None, False, True),
    "copy": lambda: behind_its_check("aten::to.prim_other")(ones(2), False, True),
    "pool's size": lambda: behind_its_check("aten::_adaptive_avg_pool3d")(ones(1, 1, 4, 4, 4), [7]),
    "convolution's groups": lambda: behind_its_check("quantized::conv1d_prepack")(
        torch.quantize_per_tensor(ones(4, 4, 3), 0.1, 0, torch.qint8), None, [1], [0], [1], 0
    ),
    "sequences of fewer than none": lambda: padded(2, -100),
    "sequences that grow": lambda: padded(1, 2),
    "sequences beyond the data": lambda: padded(2, 2),
    "attention without heads": lambda: behind_its_check("aten::_native_multi_head_attention")(
        *[ones(2, 3, 4)] * 3, 4, 0, ones(12, 4), ones(12), ones(4, 4), ones(4)
    ),
    "layout": lambda: behind_its_check("aten::zeros")([2], layout=2),
    "attention without keys": lambda: attention(ones(2, 2, 0, 16), ones(2, 2, 0, 16)),
    "a way to interpolate": lambda: grid(9, 0),
    "a way to pad": lambda: grid(0, -1),
    "a way to normalize": lambda: behind_its_check("aten::_fft_c2c")(complex_ones(2, 8), [0, 1], 7, True),
    "a way to sum a bag": lambda: bag([0, 2], mode=3),
    "eigenvalues of no number": lambda: behind_its_check("aten::linalg_eigvals")(ones(3, 3) * float("nan")),
    "eigenvectors of infinity": lambda: behind_its_check("aten::linalg_eig")(ones(3, 3) * float("inf")),
    "least squares of nothing": lambda: behind_its_check("aten::linalg_lstsq")(ones(3, 3), ones(3, 0), driver="gelss"),
    "a tiny scale": lambda: behind_its_check("aten::upsample_nearest1d")(ones(1, 1, 8), [8], 1e-300),
    "a scale of another size": lambda: behind_its_check("aten::upsample_nearest1d")(ones(1, 1, 8), [64], 0.5),
    "a scale that is no number": lambda: behind_its_check("aten::upsample_bilinear2d.vec")(
        ones(1, 1, 8, 8), None, False, [2.0, float("nan")]
    ),
    **{
        f"{len(scales)} scales of two dimensions": functools.partial(
            lambda scales: behind_its_check("aten::__interpolate.size_list_scale_list")(ones(1, 1, 8, 8), None, scales),
            scales,
        )
        for scales in ([], [2.0], [2.0] * 3)
    },
    "one size of two dimensions": lambda: behind_its_check("aten::__interpolate.size_list")(ones(1, 1, 8, 8), [16]),
    "distances within no list of points": lambda: behind_its_check("aten::_pdist_forward")(ones(2, 1, 0), 2.0),
    "memory format": lambda: behind_its_check("aten::clone")(ones(2, 2), memory_format=4),
}


@pytest.mark.parametrize("call", FINE.values(), ids=FINE)
def test_what_fits_runs(call: Call) -> None:
    call()


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_the_operator_runs(call: Call) -> None:
    with pytest.raises(ArgumentError):
        call()


REMOVED = (
    "slow_conv3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d thnn_conv2d "
    "_stack _transform_bias_rescale_qkv _autocast_to_reduced_precision _batch_norm_with_update _masked_softmax "
    "_batch_norm_no_update _thnn_fused_lstm_cell"
).split()


@pytest.mark.parametrize("name", REMOVED)
def test_what_no_model_has_cannot_be_called(name: str) -> None:
    assert not is_allowed(f"aten::{name}")


# ---------------------------------------------------------------------------------------------- sparse tensors

SPARSE: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(3, 4).to_sparse(),
    "csr": lambda: torch.eye(3, 4).to_sparse_csr(),
    "csc": lambda: torch.eye(3, 4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4, 8).to_sparse_bsr((2, 2)),
}


def indices_of(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices()]
    if tensor.layout is torch.sparse_csc:
        return [tensor.ccol_indices(), tensor.row_indices()]
    return [tensor.crow_indices(), tensor.col_indices()]


def validate(tensor: Tensor) -> None:
    """Raises :class:`RuntimeError` for indices that kernels must not be given."""
    if tensor.layout is torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(tensor._indices(), tensor._values(), tensor.shape)
    else:
        torch._validate_sparse_compressed_tensor_args(
            *indices_of(tensor), tensor.values(), list(tensor.shape), tensor.layout
        )


def keeps_indices(operator: Any, layout: str, choose: random.Random) -> Call:
    """Ends the process where an operator spoils the indices of a tensor that it was given, or gives them away."""

    def call() -> None:
        given = SPARSE[layout]()
        kept = given.detach()  # shares them
        needed = [a for a in operator._schema.arguments[1:] if not a.has_default_value()]
        rest = [random_value(str(a.real_type), choose) for a in needed]
        try:
            results = checked(operator, with_codes=True)(given, *rest)
        finally:
            try:
                validate(kept)
            except RuntimeError:
                os.abort()
        memory = {part.untyped_storage().data_ptr() for part in indices_of(kept) if part.numel()}
        for result in results if isinstance(results, list | tuple) else [results]:
            plain = isinstance(result, Tensor) and result.layout is torch.strided and result.numel()
            if plain and result.untyped_storage().data_ptr() in memory:
                os.abort()

    return call


@pytest.mark.parametrize("layout", SPARSE)
def test_no_operator_spoils_the_indices_of_a_sparse_tensor_or_gives_them_away(layout: str) -> None:
    on_one = [o for o in operators() if str(o._schema.arguments[0].type) == "Tensor"]
    choose = random.Random(0)
    calls = [(str(o), keeps_indices(o, layout, choose)) for o in on_one for _ in SEEDS]
    assert run_forked(calls) == []


@pytest.mark.parametrize("name", "indices _indices values _values crow_indices ccol_indices col_indices".split())
def test_the_memory_of_a_sparse_tensor_is_nobodys(name: str) -> None:
    assert find_operator(f"aten::{name}") is None


def test_a_dict_has_values_too() -> None:
    assert "aten::values.str" in EXPRESSIONS


def test_a_result_is_written_elsewhere_only_by_arithmetic() -> None:
    assert find_operator("aten::div.out") is not None
    assert find_operator("aten::cat.out") is None


EMPTY: dict[str, Call] = {
    "empty": lambda: behind_its_check("aten::empty.memory_format")([4096]),
    "permuted": lambda: behind_its_check("aten::empty_permuted")([64, 64], [1, 0]),
    "strided": lambda: behind_its_check("aten::empty_strided")([64, 64], [1, 64]),
    "like": lambda: behind_its_check("aten::empty_like")(ones(4096)),
    "new": lambda: behind_its_check("aten::new_empty")(ones(1), [4096]),
    "new strided": lambda: behind_its_check("aten::new_empty_strided")(ones(1), [64, 64], [64, 1]),
}


@pytest.mark.parametrize("call", EMPTY.values(), ids=EMPTY)
def test_memory_is_not_shown_as_it_was_left(call: Call) -> None:
    ones(4096).mul_(7)  # freed memory is given out again
    assert not call().any()


# ---------------------------------------------------------------------------------------------- nobody sees a check


def test_numbers_are_not_read_in_a_dry_run() -> None:
    weight, indices, offsets = ones(4, 8), numbers([0, 1]), numbers([0, -9])
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (weight, indices, offsets)]
        assert behind_its_check("aten::embedding_bag")(*fake)[0].shape == (2, 8)
        with pytest.raises(ArgumentError):
            behind_its_check("aten::embedding_bag")(*fake, per_sample_weights=mode.from_tensor(weight))


def test_who_watches_operators_sees_only_the_operator() -> None:
    class Watching(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def seen(call: Call) -> list[str]:
        with Watching() as watching:
            call()
        return watching.seen

    arguments = (ones(4, 8), numbers([0, 1]), numbers([0]))
    unchecked = find_operator("aten::embedding_bag")
    assert unchecked is not None
    assert seen(lambda: behind_its_check("aten::embedding_bag")(*arguments)) == seen(lambda: unchecked(*arguments))


def test_refused_arguments_end_no_process_either() -> None:
    assert run_forked(list(REFUSED.items())) == []
