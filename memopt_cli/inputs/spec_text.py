"""Parsing the notations that users type for inputs, limits, models, devices and meshes of ranks.

``[name:]SHAPE[@dtype][=values]`` is an input, ``SYMBOL=SIZE`` a dimension, ``METRIC:LIMIT`` a limit of ``--fail-on``,
and ``module:callable`` code that builds a model.  :func:`parse_tensor` and :func:`format_tensor` are exact inverses.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from memopt_cli.errors import UsageError, shorten
from memopt_cli.records import (
    METRICS,
    PADDED,
    STRATEGIES,
    DimRange,
    InputSpec,
    Limit,
    RankLayout,
    StrategyName,
    TensorSpec,
)
from memopt_cli.text.optimizer_text import is_function
from memopt_cli.text.options import MAX_RANKS
from memopt_cli.text.units import parse_bytes

_INTEGER_RANGES = {
    "bool": range(2),
    "uint8": range(2**8),
    "int8": range(-(2**7), 2**7),
    "int16": range(-(2**15), 2**15),
    "int32": range(-(2**31), 2**31),
    "int64": range(-(2**63), 2**63),
}
_FLOATING_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
INPUT_DTYPES = (*_FLOATING_DTYPES, *_INTEGER_RANGES)
"""Names of the dtypes that an input may have."""

MODEL_SETTINGS = "config.json"
"""File of a model's settings in a folder written by ``save_pretrained``."""
ADAPTER_SETTINGS = "adapter_config.json"
"""File of an adapter's settings in a folder written by ``save_pretrained``."""

USUAL_SIZES: Final[Mapping[str, int]] = {"S": 128}
"""Symbol -> the size that a hint suggests, where it is not 8: a sequence is longer than a batch."""
_SYMBOL_PATTERN = re.compile(r"[A-Z][A-Za-z0-9_]*", re.ASCII)
_SIZE_PATTERN = re.compile(r"0*[1-9][0-9]{0,17}", re.ASCII)
_RANGE_PATTERN = re.compile(r"(?:(-?[0-9]{1,19}),)?(-?[0-9]{1,19})\.\.(-?[0-9]{1,19})", re.ASCII)
_SPIKE_RATE_PATTERN = re.compile(r"spikes:([0-9]+(?:\.[0-9]+)?)", re.ASCII)
_PERCENT_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)%", re.ASCII)
_TIME_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", re.ASCII)
_FACTORY_PATTERN = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)
_TENSOR_HINT = "Write [name:]SHAPE[@dtype][=values], for example 4x3x224x224 or input_ids:8x128@int64=0..32000."
_MAX_SIZES = 64
"""Maximum number of dimensions of a tensor, since few PyTorch operators take more."""
_ITEM_BYTES = 8
"""Maximum number of bytes of an item."""
_DIMENSIONS_HINT = f"An input may have at most {_MAX_SIZES} dimensions."
MAX_INPUTS = 1000
"""Maximum number of inputs of a step."""
_MAX_ITEMS = 10**18  # bound of one size, which then fits into 64 bits
_SIZE_HINT = "A size is a whole number such as 8, or a symbol such as B."


def parse_tensor(text: str) -> TensorSpec:
    """Parse the description of a tensor, such as ``"x:TxBx2x48x48=spikes:0.2"``.

    The shape is written ``4x10x2``, ``4,10,2`` or ``[4,10,2]`` (``[]`` for a scalar).  A symbol starts with an
    uppercase letter, and one that contains an ``x`` needs commas.  The default dtype is ``float32``; default values are
    ``normal`` for a floating dtype and ``0..2`` (zeros and ones) for an integer or ``bool``.  Raises
    :class:`UsageError` that quotes the text and the piece that is wrong.
    """
    try:
        head, has_values, values = text.replace(" ", "").partition("=")
        head, has_dtype, dtype = head.partition("@")
        name, has_name, shape = head.rpartition(":")
        return TensorSpec(
            name=_parse_name(name) if has_name else None,
            shape=parse_shape(shape),
            dtype=parse_dtype(dtype) if has_dtype else "float32",
            values=parse_values(values if has_values else _default_values(dtype), dtype or "float32"),
        )
    except UsageError as err:
        raise UsageError(f"input {shorten(text, 200)}: {err.message}", hint=err.hint or _TENSOR_HINT) from err


def format_tensor(spec: TensorSpec) -> str:
    """Return the shortest text that :func:`parse_tensor` reads back as ``spec``."""
    sizes = [str(size) for size in spec.shape]
    is_plain = bool(sizes) and not any("x" in size for size in sizes)
    name = f"{spec.name}:" if spec.name is not None else ""
    dtype = f"@{spec.dtype}" if spec.dtype != "float32" else ""
    values = f"={spec.values}" if spec.values != _default_values(spec.dtype) else ""
    return name + ("x".join(sizes) if is_plain else f"[{','.join(sizes)}]") + dtype + values


def with_sizes(tensor: TensorSpec, dims: Mapping[str, int]) -> TensorSpec:
    """Return ``tensor`` with the sizes ``dims`` in place of their names."""
    return replace(tensor, shape=tuple(dims.get(str(size), size) for size in tensor.shape))


def require_used(names: Iterable[str], tensors: Sequence[TensorSpec], where: str) -> None:
    """Raise :class:`UsageError` for the first of ``names`` that is in no shape: its size would have no effect."""
    symbols = {size for tensor in tensors for size in tensor.shape if isinstance(size, str)}
    for name in names:
        if name not in symbols:
            shapes = ", ".join(map(format_tensor, tensors)) or "of fixed size"
            raise UsageError(
                f"`--dim {name}`: no input has a dimension {name}; they are {shapes} ({where})",
                hint=f"Write {name} into a shape, as in `-i {name}x3x224x224`, or leave its size out.",
            )


def require_sizes(tensors: Iterable[TensorSpec], dims: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` that names every symbol in the shapes without a size in ``dims``."""
    symbols = [size for tensor in tensors for size in tensor.shape if isinstance(size, str)]
    if unsized := [symbol for symbol in dict.fromkeys(symbols) if symbol not in dims]:
        flags = " ".join(f"--dim {symbol}={USUAL_SIZES.get(symbol, 8)}" for symbol in unsized)
        hint = f"Add for example `{flags}`."
        unused = dims.keys() - symbols
        for name in unused:
            meant = name[0].upper()  # ``b`` or ``batch`` for ``B``
            if len(unused) == len(unsized) == 1:
                (meant,) = unsized
            if meant in unsized:
                hint = f"Did you mean `--dim {meant}={dims[name]}`, not `--dim {name}={dims[name]}`?"
        raise UsageError(f"the inputs have dimensions without a size: {', '.join(unsized)}", hint=hint)


def check_inputs(tensors: Sequence[TensorSpec], dims: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` for too many inputs, equal names, impossible sizes, and symbols without a size."""
    _check_input_count(tensors)
    names = [tensor.name for tensor in tensors if tensor.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the input '{name}' is given twice", hint="Describe each input once.")
    for tensor in tensors:
        check_sizes(tensor, dims)
    require_sizes(tensors, dims)


def parse_dims(texts: Iterable[str]) -> dict[str, int]:
    """Parse the sizes of dimensions, such as ``["B=8", "S=128"]``.

    A name is any identifier, since it may be an argument of an input script; symbols of shapes are a subset.
    Raises :class:`UsageError` for anything else and for a dimension with two sizes.
    """
    dims: dict[str, int] = {}
    for text in texts:
        name, _, size = text.replace(" ", "").partition("=")
        if name.isidentifier() and size and not size.strip("0"):
            raise UsageError(f"dimension {name} has size 0", hint="Use a size of at least 1.")
        if not name.isidentifier() or not _SIZE_PATTERN.fullmatch(size):
            hint = "For example: `--dim B=8`."
            if name.isidentifier() and re.fullmatch(r"\d+(-|\.\.|,)\d+", size, re.ASCII):
                hint = f"A range is written `--dim {name}={':'.join(re.findall(r'[0-9]+', size))}`."
            raise UsageError(f"dimension {shorten(text)} is not NAME=SIZE", hint=hint)
        if dims.setdefault(name, int(size)) != int(size):
            raise UsageError(f"dimension {name} is given two sizes, {dims[name]} and {size}", hint="Keep one of them.")
    return dims


def split_dims(texts: Sequence[str], described: Callable[[int, int], int] = min) -> tuple[list[str], DimRange | None]:
    """Split ``["B=8", "S=128:4096"]`` into dimensions with one size each, and the dimension that has a range.

    ``described``: ``min`` or ``max``, which end of the range the dimension gets as its size in the first list.

    Raises :class:`UsageError` for two ranges, or for one that is not ``LOW:HIGH``.
    """
    ranges = [text for text in texts if ":" in text]
    if not ranges:
        return list(texts), None
    if len(ranges) > 1:
        raise UsageError(
            f"two dimensions have a range: {' and '.join(ranges)}",
            hint="Use a range for one of them only. If both vary together, give both one symbol, whose largest size "
            "counts.",
        )
    match = re.fullmatch(r"(\w+)=(\d+):(\d+)", ranges[0].replace(" ", ""), re.ASCII)
    if match is None:
        raise UsageError(f"dimension '{ranges[0]}' is not NAME=LOW:HIGH", hint="For example: `--dim S=128:4096`.")
    symbol, *ends = match.groups()
    if not ends[0].strip("0"):
        raise UsageError(f"the range {ranges[0]} begins below 1", hint=f"LOW must be at least 1 in {symbol}=LOW:HIGH.")
    low, high = (parse_dims([f"{symbol}={end}"])[symbol] for end in ends)
    if low > high:
        raise UsageError(f"the range {ranges[0]} is empty", hint="Write the smaller size first.")
    sizes = [f"{symbol}={described(low, high)}" if text == ranges[0] else text for text in texts]
    return sizes, DimRange(symbol=symbol, low=low, high=high)


def parse_strategies(text: str | None) -> tuple[StrategyName, ...]:
    """Return the strategies that ``text`` names, as ``bptt,online``, in the usual order; none for ``None``.

    Raises :class:`UsageError` for one that is not known.
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(f"unknown strategy '{unknown[0]}'", hint=f"Known strategies: {', '.join(STRATEGIES)}.")
    return tuple(name for name in STRATEGIES if name in names)


def parse_limit(text: str) -> Limit:
    """Parse how much a metric may grow: ``"peak:5%"``, ``"peak:64MiB"``, ``"step:50ms"``, ``"peak:0"``.

    Bytes need a unit: ``peak:5`` most likely means 5 %.  Raises :class:`UsageError` for anything else.
    """
    name, colon, amount = text.replace(" ", "").partition(":")
    metric = next((metric for metric in METRICS if metric == name), None)
    if metric is None:
        form = "" if colon else f"Write METRIC:LIMIT: peak:{name if name[:1].isdigit() else '5%'}. "
        raise UsageError(f"'{text}': unknown metric '{name}'", hint=f"{form}Known metrics: {', '.join(METRICS)}.")
    if amount == "0":
        return Limit(text=text, metric=metric, amount=0, relative=False)
    percent, time = _PERCENT_PATTERN.fullmatch(amount), _TIME_PATTERN.fullmatch(amount)
    if percent:
        return Limit(text=text, metric=metric, amount=float(percent[1]), relative=True)
    if metric == "step":
        if not time:
            raise UsageError(f"'{text}': '{amount}' is not a time", hint="Write METRIC:LIMIT: step:20% or step:50ms.")
        return Limit(text=text, metric=metric, amount=float(time[1]) / (1000 if time[2] == "ms" else 1), relative=False)
    if amount.isdecimal() and amount.strip("0"):
        hint = f"Write {metric}:5% for a share, {metric}:64MiB, or {metric}:5B if bytes are meant."
        raise UsageError(f"'{text}': {shorten(amount)} has no unit", hint=hint)
    try:
        return Limit(text=text, metric=metric, amount=parse_bytes(amount), relative=False)
    except UsageError as err:
        hint = f"Write METRIC:LIMIT: {metric}:5% or {metric}:64MiB."
        reason = "is negative, and a limit is 0 or more" if amount.startswith("-") else "is not a memory size"
        raise UsageError(f"'{text}': '{amount}' {reason}", hint=hint) from err


def parse_device(text: str) -> str:
    """Return ``text``.  Raises :class:`UsageError` unless it has the form of a device's name."""
    if not _DEVICE_PATTERN.fullmatch(text):
        raise UsageError(f"unknown device '{text}'", hint="Write auto, cpu, cuda or cuda:N.")
    return text


def parse_factory(text: str) -> tuple[str, str] | None:
    """Split ``"package.module:callable"`` or ``"file.py:function"`` at the colon; ``None`` for other text."""
    match = _FACTORY_PATTERN.fullmatch(text)
    if match:
        return match[1], match[2]
    file, _, name = text.rpartition(":")
    return (file, name) if is_function(text) else None


def is_factory(location: str) -> bool:
    """Return whether ``location`` names code rather than a file."""
    return parse_factory(location) is not None and not Path(location).exists()


def file_of(location: str) -> str:
    """Return the file of the model at ``location``, or the file or module of the code that builds it."""
    factory = None if Path(location).exists() else parse_factory(location)
    return location if factory is None else factory[0]


def is_pretrained(location: str) -> bool:
    """Return whether ``location`` is a folder with the settings of a model, or of an adapter."""
    return any(os.path.isfile(os.path.join(location, name)) for name in (MODEL_SETTINGS, ADAPTER_SETTINGS))


def base_of(folder: str, named: object) -> str | None:
    """Return the folder of an adapter's base model, or ``None`` if there is none.

    ``named`` is the path in the adapter's settings, relative to the current folder or to the adapter's ``folder``.
    """
    bases = (named, os.path.join(folder, named)) if isinstance(named, str) else ()
    return next(filter(is_pretrained, bases), None)


def parse_shape(text: str) -> tuple[int | str, ...]:
    """Parse a shape, ``"BxSx3"``, ``"B,S,3"`` or ``"[B,S,3]"``, to sizes and symbols; raises :class:`UsageError`."""
    listed = text.startswith("[") and text.endswith("]")
    if listed and text == "[]":
        return ()
    sizes = text[1:-1].split(",") if listed else text.split("," if "," in text else "x")
    if len(sizes) > _MAX_SIZES:
        raise UsageError(f"the shape {shorten(text)} has {len(sizes)} dimensions", hint=_DIMENSIONS_HINT)
    return tuple(_parse_size(size, text) for size in sizes)


def parse_dtype(text: str) -> str:
    """Return ``text`` if it names a dtype that inputs may have; raises :class:`UsageError`."""
    if text not in INPUT_DTYPES:
        raise UsageError(f"unknown dtype {shorten(text)}", hint=f"Known dtypes: {', '.join(INPUT_DTYPES)}.")
    return text


def parse_values(text: str, dtype: str) -> str:
    """Return ``text`` if it names values that a tensor of ``dtype`` can hold; raises :class:`UsageError`."""
    rate, bounds = _SPIKE_RATE_PATTERN.fullmatch(text), parse_range(text)
    if bounds:
        apart, low, high = bounds
        _check_bounds(low, high, dtype)
        if apart is not None:
            _check_bounds(apart, apart + 1, dtype)
    elif rate and float(rate[1]) > 1:
        raise UsageError(f"the spike rate {rate[1]} is above 1", hint="Write a rate between 0 and 1: spikes:0.2.")
    elif not rate and text not in ("normal", "uniform", "zeros", "ones", PADDED):
        ranges = "LOW..HIGH (as 0..32000, or -100,0..32000)"
        known = f"spikes:RATE (as spikes:0.2), normal, uniform, zeros, ones, {PADDED}, {ranges}"
        raise UsageError(f"unknown values {shorten(text)}", hint=f"Known values: {known}.")
    elif text in ("normal", "uniform") and dtype in _INTEGER_RANGES:
        raise UsageError(f"{dtype} cannot hold '{text}' values", hint="Use a range of integers, for example =0..2.")
    return text


def parse_range(text: str) -> tuple[int | None, int, int] | None:
    """Return the numbers of ``text``, ``LOW..HIGH`` or ``APART,LOW..HIGH``, in its order; ``None`` for other text."""
    match = _RANGE_PATTERN.fullmatch(text)
    if match is None:
        return None
    return None if match[1] is None else int(match[1]), int(match[2]), int(match[3])


def check_sizes(tensor: TensorSpec, dims: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` for a ``tensor`` with nothing to pad, or more dimensions or bytes than one can have."""
    if len(tensor.shape) > _MAX_SIZES:
        raise UsageError(f"an input has {len(tensor.shape)} dimensions", hint=_DIMENSIONS_HINT)
    if tensor.values == PADDED and not tensor.shape:
        raise UsageError(f"input {format_tensor(tensor)!r} has no dimension to pad", hint="Add a length: BxS.")
    items = math.prod(size if isinstance(size, int) else dims.get(size, 1) for size in tensor.shape)
    if items * _ITEM_BYTES >= 2**63:
        raise UsageError(
            f"input {format_tensor(tensor)!r} is larger than any tensor can be", hint="Choose smaller sizes."
        )


def check_spec(spec: InputSpec) -> None:
    """Raise :class:`UsageError` if ``spec``, read from a file, has inputs that a user could not describe.

    A size of 0 is allowed, since an exported program can have one.
    """
    _check_input_count(spec.tensors)
    for name, size in spec.dims.items():
        if not name.isidentifier() or not 0 <= size < _MAX_ITEMS:
            raise UsageError(f"the dimension {shorten(name)} cannot have the size {size}", hint=_SIZE_HINT)
    for tensor in spec.tensors:
        _check_tensor(tensor)
        check_sizes(tensor, spec.dims)


def _check_input_count(tensors: Sequence[TensorSpec]) -> None:
    if len(tensors) > MAX_INPUTS:
        raise UsageError(f"there are {len(tensors)} inputs; memopt accepts at most {MAX_INPUTS}")


def _check_tensor(tensor: TensorSpec) -> None:
    for size in tensor.shape:
        is_size = size.isidentifier() if isinstance(size, str) else type(size) is int and 0 <= size < _MAX_ITEMS
        if not is_size:
            raise UsageError(f"an input cannot have the size {shorten(size)}", hint=_SIZE_HINT)
    if tensor.name is not None:
        _parse_name(tensor.name)
    parse_values(tensor.values, parse_dtype(tensor.dtype))


def _default_values(dtype: str) -> str:
    return "0..2" if dtype in _INTEGER_RANGES else "normal"


def _parse_name(text: str) -> str:
    if not text.isidentifier():
        raise UsageError(f"{shorten(text)} is not the name of an argument")
    return text


def _parse_size(text: str, shape: str) -> int | str:
    if _SIZE_PATTERN.fullmatch(text):
        return int(text)
    if _SYMBOL_PATTERN.fullmatch(text):
        return text
    raise UsageError(f"{shorten(text)} in the shape {shorten(shape)} is neither a size above 0 nor a symbol such as B")


def _check_bounds(low: int, high: int, dtype: str) -> None:
    if low >= high:
        raise UsageError(f"{low}..{high} is empty", hint="LOW must be less than HIGH, which is not included: 0..2.")
    limits = _INTEGER_RANGES.get(dtype)
    if limits and not (low in limits and high - 1 in limits):
        raise UsageError(
            f"{dtype} cannot hold {low}..{high}", hint=f"It holds {limits.start}..{limits.stop} (high not included)."
        )


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the axes of a mesh of ranks, ``"dp=32,tp=2"``, outermost first; -1 stands for the remaining length.

    Raises :class:`UsageError` for text of a different form, an axis given twice, and any other length below 1.
    """
    axes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, length = part.partition("=")
        if not name.isidentifier() or not (_SIZE_PATTERN.fullmatch(length) or length == "-1"):
            raise UsageError(f"{shorten(text, 200)} is not a mesh: {shorten(part)} is not NAME=SIZE", hint=_MESH_HINT)
        if name in axes:
            raise UsageError(f"{shorten(text, 200)} is not a mesh: it has the axis {name} twice", hint=_MESH_HINT)
        axes[name] = int(length)
    return axes


_REMAINDER_HINT = "-1 stands for the remaining length: dp=-1,tp=2."
_MESH_HINT = f"Write its axes and their lengths, the outermost first: dp=32,tp=2. {_REMAINDER_HINT}"


def layout_of(ranks: int, parallel: str, mesh: Mapping[str, int] | None = None) -> RankLayout:
    """Return the layout of a model over ``ranks``; without ``mesh``, all ranks are on one axis, ``dp``.

    Raises :class:`UsageError` for a mesh of another number of ranks, or with more axes than FSDP or DDP takes.
    """
    axes = {"dp": ranks} if mesh is None else _complete_mesh(mesh, ranks)
    product = math.prod(axes.values())
    if product != ranks:
        lengths = " × ".join(map(str, axes.values()))
        raise UsageError(
            f"the mesh has {lengths} = {product} ranks, not {ranks}",
            hint=f"The product of its lengths must be {ranks}. {_REMAINDER_HINT}",
        )
    max_axes = {"ddp": 1, "fsdp": 2}.get(parallel, len(axes))
    if len(axes) > max_axes:
        raise UsageError(
            f"{parallel} takes a mesh of at most {max_axes} {'axis' if max_axes == 1 else 'axes'}, not of {len(axes)}",
            hint="For other meshes, write a function that spreads the model: `--parallel file.py:function`.",
        )
    return RankLayout(ranks=ranks, parallel=parallel, mesh=axes)


def _complete_mesh(mesh: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return ``mesh`` with the remaining length in place of -1.  Raises :class:`UsageError` if no length fits."""
    text = _mesh_text(mesh)
    rest = [name for name, length in mesh.items() if length == -1]
    if any(length < 1 and name not in rest for name, length in mesh.items()):
        raise UsageError(f"the mesh {text} has an axis of a length below 1", hint=_MESH_HINT)
    if len(rest) > 1:
        raise UsageError(
            f"the mesh {text} has {len(rest)} axes of length -1", hint="Only one axis may have the length -1."
        )
    fixed = math.prod(length for name, length in mesh.items() if name not in rest)
    if rest and ranks % fixed:
        raise UsageError(f"the mesh {text} does not divide {ranks} ranks", hint=f"Use a multiple of {fixed} ranks.")
    return {name: ranks // fixed if name in rest else length for name, length in mesh.items()}


def check_layout(layout: RankLayout) -> None:
    """Raise :class:`UsageError` if a user could not describe ``layout``, which was read from a file."""
    if not 1 <= layout.ranks <= MAX_RANKS:
        raise UsageError(f"it has {layout.ranks} ranks", hint=f"There may be 1 to {MAX_RANKS}.")
    text = _mesh_text(layout.mesh)
    if layout_of(layout.ranks, layout.parallel, parse_mesh(text)) != layout:
        raise UsageError(f"its mesh has an axis of length -1: {text}")


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={length}" for name, length in mesh.items())


def ranks_asked(layout: RankLayout, rank: int | None) -> tuple[int, ...]:
    """Return the ranks to predict: ``rank``, or the first and the last for ``None``.

    Raises :class:`UsageError` for a rank that does not exist.
    """
    if rank is None:
        return tuple(sorted({0, layout.ranks - 1}))
    if not 0 <= rank < layout.ranks:
        raise UsageError(f"there is no rank {rank} of {layout.ranks}", hint=f"Name one from 0 to {layout.ranks - 1}.")
    return (rank,)


def format_layout(layout: RankLayout) -> str:
    """Format ``layout`` for people: ``"train.py:shard over dp 32 × tp 2"``."""
    return f"{layout.parallel} over {' × '.join(f'{name} {length}' for name, length in layout.mesh.items())}"
