"""The inputs of one training step: finding their description, and making tensors from it."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import inspect
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UsageError, first_line, shorten
from memopt_cli.inputs.batch_axis import BATCH, NO_BATCH_ARGUMENT
from memopt_cli.inputs.spec_text import (
    MAX_INPUTS,
    USUAL_SIZES,
    check_spec,
    is_factory,
    parse_dims,
    parse_dtype,
    parse_range,
    parse_shape,
    parse_tensor,
    parse_values,
    require_sizes,
    require_used,
)
from memopt_cli.loading.archive import check_archive
from memopt_cli.loading.configured import guess_by_configuration
from memopt_cli.loading.interface import require_same
from memopt_cli.loading.module_pickle import load_tensors
from memopt_cli.loading.safetensors_file import read_safetensors
from memopt_cli.loading.user_function import user_function
from memopt_cli.records import GUESS, PADDED, InputSpec, ModelSource, TensorSpec, refuse_unknown
from memopt_cli.runtime.private_torch import unset_fake_temporarily
from memopt_cli.text.documents import printable, quoted_flag, read_bytes, read_yaml
from memopt_cli.text.units import format_some
from memopt_cli.training.module_calls import raised_at
from memopt_cli.training.step import dtype_in
from memopt_cli.training.user_step import StepModels

_LONG_NAMES = {"b": "B", "batch": "B", "batch_size": "B", "seq": "S", "seq_len": "S", "steps": "T", "time": "T"}
"""Names that an input script may use for the usual symbols."""

_MAX_READ = 1 << 22
"""Maximum number of values in an input that is made with data in a dry run."""
_APART_SHARE = 0.125
"""Share of the numbers that stand apart from the range, such as the labels of -100 ignored by a loss."""


def find_spec(
    source: ModelSource,
    module: nn.Module,
    given: InputSpec | None,
    carried: InputSpec | None = None,
    remembered: InputSpec | None = None,
) -> InputSpec:
    """Return the description of the inputs, from the first source that has one:

    1. ``given``, the user's, if it describes inputs and not only dimensions;
    2. ``model.inputs.yaml`` next to ``model.pt``;
    3. ``remembered``, which the user gave for an earlier command;
    4. ``carried``, the example inputs in the model file;
    5. for ``model.memopt.pt`` and ``model.traced.ts``, ``model.inputs.yaml`` of the model that they were made from;
    6. a guess from the layers of ``module``.

    Dimensions in ``given`` replace the dimensions of the description from another source.
    Raises :class:`UsageError` if nothing is known of the inputs, a symbol has no size, or no input has a symbol.
    """
    if given is not None and given.has_inputs:
        spec = given
    else:
        path = Path(source.location)
        stem = path.name if path.is_dir() else path.stem
        original = stem.removesuffix(".memopt").removesuffix(".traced")
        guessed = None if isinstance(module, StepModels) else guessed_spec(module)
        described = _spec_file_of(source, stem) or remembered or carried or _spec_file_of(source, original) or guessed
        if described is None:
            raise UsageError(
                f"memopt knows nothing about the inputs of {source.location}",
                hint="Describe them with an `-i` for each argument of forward, such as `-i 8x128` for one tensor.",
            )
        spec = described
        if given is not None:
            require_used([name for name in given.dims if name not in given.optional_dims], spec.tensors, spec.source)
            spec = replace(spec, dims=spec.dims | given.dims, optional_dims=given.optional_dims)
    spec = _without_unused(spec)
    if spec.script is not None:
        # Commands that vary the batch know it by its symbol, ``B``, not by the name of the argument, ``batch``.
        named = {BATCH if _LONG_NAMES.get(name) == BATCH else name: size for name, size in spec.dims.items()}
        _script_call(spec.script, named)
        spec = replace(spec, dims=named)
    require_sizes(spec.tensors, spec.dims)
    check_spec(spec)  # the example inputs of a model file were not checked when they were read
    if spec.data_file is None:
        return spec
    return replace(spec, data_sha256=hashlib.sha256(_data_of(spec.data_file)).hexdigest())


def read_spec_file(path: str | Path) -> InputSpec:
    """Read ``inputs: [{name, shape, dtype, values}]`` and ``dims: {B: 8}``; a shape is a list, or text as for ``-i``.

    Raises :class:`UsageError`, which names the file, for an unknown or missing key and for a wrong value.
    """
    path = Path(path)
    data = read_yaml(path, "For example: inputs: [{shape: BxS, dtype: int64}] and dims: {B: 8, S: 128}.")
    try:
        _check_keys(data, ("inputs", "dims"), "the file")
        inputs, dims = data.get("inputs"), data.get("dims") or {}
        if not isinstance(inputs, list) or not inputs:
            raise UsageError("'inputs' must be a list of at least one input", hint="Write inputs: [{shape: BxS}].")
        if not isinstance(dims, dict):
            raise UsageError(f"'dims' must map symbols to sizes, not {shorten(dims)}", hint="Write dims: {B: 8}.")
        sizes = parse_dims([f"{symbol}={size}" for symbol, size in dims.items()])
        return InputSpec(tensors=tuple(_read_tensor(item) for item in inputs), dims=sizes, source=str(path))
    except UsageError as err:
        raise UsageError(f"{path}: {printable(err.message)}", hint=err.hint) from err


def _read_tensor(item: Any) -> TensorSpec:
    if isinstance(item, str):
        return parse_tensor(item)
    _check_keys(item, ("name", "shape", "dtype", "values"), "an input")
    if "shape" not in item:
        raise UsageError("an input lacks the key 'shape'", hint="For example: shape: BxS.")
    shape = item["shape"]
    name = item.get("name")
    dtype = parse_dtype(str(item.get("dtype", "float32")))
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise UsageError(f"{shorten(name)} is not the name of an argument")
    sizes = parse_shape("[" + ",".join(map(str, shape)) + "]" if isinstance(shape, list) else str(shape))
    if "values" not in item:
        return replace(parse_tensor(f"1@{dtype}"), name=name, shape=sizes)
    return TensorSpec(name=name, shape=sizes, dtype=dtype, values=parse_values(str(item["values"]), dtype))


def _check_keys(data: Any, known_keys: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"{where} must be a mapping with the keys {', '.join(known_keys)}")
    refuse_unknown(data, known_keys, where)


def _without_unused(spec: InputSpec) -> InputSpec:
    """Return ``spec`` without the optional dimensions that neither a shape nor the input script uses."""
    if not spec.optional_dims:
        return spec
    used_names = {size for tensor in spec.tensors for size in tensor.shape}
    if spec.script is not None:
        used_names |= _sizes_taken(inspect.signature(user_function(spec.script, "--input-script")).parameters)
    dims = {name: size for name, size in spec.dims.items() if name in used_names or name not in spec.optional_dims}
    return replace(spec, dims=dims, optional_dims=())


def _spec_file_of(source: ModelSource, stem: str) -> InputSpec | None:
    if is_factory(source.location):
        return None
    path = Path(source.location).with_name(f"{stem}.inputs.yaml")
    return read_spec_file(path) if path.is_file() else None


def guessed_spec(module: nn.Module) -> InputSpec | None:
    """Guess the inputs of ``module`` from its configuration or its first layer of a known kind; ``None`` without."""
    configured = guess_by_configuration(module)
    if configured is not None:
        return configured
    for path, layer in module.named_modules():
        tensor = _guess_tensor(layer)
        if tensor is not None:
            return InputSpec(tensors=(tensor,), source=f"{GUESS}{path or 'the model'} ({type(layer).__name__})")
    return None


def _guess_tensor(layer: nn.Module) -> TensorSpec | None:
    try:
        guess = _guess_by_settings(layer)
    except (AttributeError, TypeError, LookupError, UsageError):  # a subclass, or a file, may have other attributes
        return None
    return guess if guess is not None and all(type(size) is int and size > 0 for size in guess.shape) else None


def _guess_by_settings(layer: nn.Module) -> TensorSpec | None:
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sides = {1: (256,), 2: (64, 64), 3: (16, 32, 32)}[len(layer.kernel_size)]
        return TensorSpec(shape=(2, layer.in_channels, *sides))
    if isinstance(layer, nn.Linear):
        return TensorSpec(shape=(2, layer.in_features))
    if isinstance(layer, nn.Embedding):
        return TensorSpec(shape=(2, 16), dtype="int64", values=parse_values(f"0..{layer.num_embeddings}", "int64"))
    if isinstance(layer, nn.RNNBase):
        return TensorSpec(shape=(2, 16, layer.input_size) if layer.batch_first else (16, 2, layer.input_size))
    if isinstance(layer, nn.RNNCellBase):
        return TensorSpec(shape=(2, layer.input_size))
    return None


def make_inputs(
    spec: InputSpec, *, seed: int, device: str, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the positional and keyword arguments of one step on ``device``.

    Random values come from their own generators, so equal ``spec`` and ``seed`` give equal inputs.  A script may
    use PyTorch's generator, which is seeded for it and restored.  Floating tensors are cast to ``dtype``,
    unless it is ``None``.
    Raises :class:`UsageError` for a data file or script that cannot be used.
    """
    if spec.data_file is not None:
        inputs = _read_data(spec.data_file, spec.data_sha256)
    elif spec.script is not None:
        inputs = _run_script(spec.script, spec.dims, seed)
    else:
        tensors = []
        for place, t in enumerate(spec.tensors):  # a generator for each: a dry run makes only some of them
            generator = torch.Generator().manual_seed(seed + place)
            with unset_fake_temporarily() if _may_be_read(t, spec.dims) else contextlib.nullcontext():
                tensors.append((t.name, _make_tensor(t, spec.dims, generator)))
        positional = tuple(tensor for name, tensor in tensors if name is None)
        return _moved_to(positional, device, dtype), _moved_to(
            {n: t for n, t in tensors if n is not None}, device, dtype
        )
    inputs = _moved_to(inputs, device, dtype)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}


def unnamed_arguments(model: nn.Module, kwargs: Iterable[str]) -> Iterator[str]:
    """Yield a note on each of ``kwargs`` that the forward of ``model`` does not name, such as a misspelt name.

    A forward that takes keywords by ``**`` raises nothing; if it names no argument, like a wrapper, nothing is known.
    """
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # it shows no signature, as a compiled function may
        return
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = next((f", so it goes into **{p.name}" for p in parameters if p.kind is p.VAR_KEYWORD), "")
    for name in kwargs if named else ():
        if name not in named:
            nearest_names = difflib.get_close_matches(name[:100], named, n=1)
            suggestion = f"did you mean {nearest_names[0]}?" if nearest_names else f"it names {format_some(named)}."
            yield f"forward names no argument {printable(name)}{rest}; {suggestion}"


def _moved_to(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=None if dtype is None else dtype_in(dtype, value))
    if isinstance(value, Mapping):
        return {key: _moved_to(item, device, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved_to(item, device, dtype) for item in value)
    return value


def _may_be_read(spec: TensorSpec, dims: Mapping[str, int]) -> bool:
    """Return whether a model may read the values of an input, such as tokens, masks and lengths: dry runs need them."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return not (dtype.is_floating_point or dtype.is_complex) and math.prod(_resolved_shape(spec, dims)) <= _MAX_READ


def _make_tensor(spec: TensorSpec, dims: Mapping[str, int], generator: torch.Generator) -> Tensor:
    shape = _resolved_shape(spec, dims)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.values in ("zeros", "ones"):
        return torch.full(shape, int(spec.values == "ones"), dtype=dtype)
    if spec.values == PADDED:
        return _padded_mask(shape).to(dtype)
    if spec.values == "normal":
        return torch.randn(shape, generator=generator, dtype=dtype)
    if spec.values == "uniform":
        return torch.rand(shape, generator=generator, dtype=dtype)
    if spec.values.startswith("spikes:"):
        return (torch.rand(shape, generator=generator) < float(spec.values.removeprefix("spikes:"))).to(dtype)
    bounds = parse_range(spec.values)
    assert bounds is not None, "the values were checked when they were read"
    outlier, low, high = bounds
    if dtype.is_floating_point or dtype.is_complex:
        tensor = low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype)
    else:
        tensor = torch.randint(low, high, shape, generator=generator).to(dtype)
    if outlier is not None:
        stands_apart = torch.rand(shape, generator=generator) < _APART_SHARE
        stands_apart.view(-1)[:1] = False  # the mean of a loss that ignores all labels is NaN
        tensor[stands_apart] = outlier
    return tensor


def range_like(example: Tensor) -> str:
    """Return the ``values`` of whole numbers like those in ``example``.

    Its only negative number stands apart: numbers between -100 and the least class are not labels.
    """
    if not example.numel():
        return "0..1"
    low, high = int(example.min()), int(example.max())
    others = example[example != low]
    if low < 0 <= high and int(others.min()) >= 0:
        return f"{low},{int(others.min())}..{high + 1}"
    return f"{low}..{high + 1}"


def _padded_mask(shape: tuple[int, ...]) -> Tensor:
    """Make a mask of ``shape``: row ``i`` of its last dimension ends with ``i`` zeros, at most with half its length.

    So row 0 has the full length, like the longest sequence of a padded batch.  A single row ends with one zero: some
    models make their own mask only if there is a zero.  No row is zeros alone, which would make NaN of a softmax.
    """
    *outer, length = shape
    rows = math.prod(outer)
    zeros = torch.arange(rows) + int(rows == 1)
    lengths = length - zeros % (length // 2 + 1)
    return (torch.arange(length) < lengths.unsqueeze(1)).reshape(shape)


def _resolved_shape(spec: TensorSpec, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dims[size] if isinstance(size, str) else size for size in spec.shape)


def _read_data(path: str, expected_sha256: str | None) -> Any:
    """Read the arguments in the file at ``path``.  Its hash must be the expected one, unless that is ``None``."""
    readers: dict[str, Callable[[bytes, str], Any]] = {
        ".pt": load_tensors,
        ".pth": load_tensors,
        ".npz": _read_npz,
        ".safetensors": read_safetensors,
    }
    reader = readers.get(Path(path).suffix)
    if reader is None:
        raise UsageError(
            f"`{quoted_flag('--input-data', str(path))}` has an unknown ending", hint=f"Known: {', '.join(readers)}."
        )
    data = _data_of(path)
    require_same(path, hashlib.sha256(data).hexdigest(), expected_sha256)
    inputs = reader(data, path)
    if isinstance(inputs, Mapping | list | tuple):
        _check_input_count(len(inputs), path)
    if any(tensor.is_meta for tensor in _tensors_in(inputs)):
        raise FileFormatError(
            f"{path} holds a tensor of the meta device, which has no data",
            hint="Save it again with tensors that have data.",
        )
    return inputs


def _data_of(path: str) -> bytes:
    try:
        return read_bytes(path)
    except OSError as err:
        raise UsageError(
            f"`{quoted_flag('--input-data', str(path))}` cannot be read: {err.strerror}", hint="Check the path."
        ) from err


def _check_input_count(count: int, path: str) -> None:
    if count > MAX_INPUTS:
        raise FileFormatError(
            f"{path} holds {count} inputs; memopt accepts at most {MAX_INPUTS}",
            hint="Save the arguments of forward in it, as a list or a dict of tensors.",
        )


def _read_npz(data: bytes, path: str) -> dict[str, Tensor]:
    try:
        import numpy as np
    except ImportError:
        raise UsageError(
            f"{path} needs NumPy, which is not installed", hint="pip install numpy, or save the inputs with torch.save."
        ) from None
    check_archive(data, path)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            _check_input_count(len(arrays.files), path)
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except FileFormatError:
        raise
    except Exception as err:  # a damaged archive can make NumPy raise anything
        raise FileFormatError(
            f"{path} is not an .npz file of plain arrays: {first_line(err)}",
            hint="Save it with numpy.savez(path, x=...).",
        ) from err


def _run_script(script: str, dims: Mapping[str, int], seed: int) -> Any:
    call = _script_call(script, dims)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return call()
        except Exception as err:  # the user's code may raise anything
            raise UsageError(
                f"`{quoted_flag('--input-script', script)}` failed: {first_line(err)}{raised_at(err)}",
                hint="It is called with the sizes of `--dim` alone; plain Python raises the same error.",
            ) from err


def _script_call(script: str, dims: Mapping[str, int]) -> Callable[[], Any]:
    """Return the function of ``script``, with the sizes in ``dims`` that it takes bound to its arguments.

    Raises :class:`UsageError` if there is no such function, if it needs a size that is not in ``dims``, or if it has no
    argument for a size in ``dims``.
    """
    function = user_function(script, "--input-script")
    sizes = {**{long: dims[short] for long, short in _LONG_NAMES.items() if short in dims}, **dims}
    arguments = {}
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        size = sizes.get(name, sizes.get(name.upper()))
        if size is not None:
            arguments[name] = size
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            symbol = _LONG_NAMES.get(name, name)
            hint = f"Add for example `--dim {symbol}={USUAL_SIZES.get(symbol, 8)}`."
            raise UsageError(f"`{quoted_flag('--input-script', script)}` needs the size of {name}", hint=hint)
    if unused := dims.keys() - _sizes_taken(parameters):
        raise UsageError(
            f"`{quoted_flag('--input-script', script)}` takes no {min(unused)}; its arguments are "
            f"({', '.join(parameters)})",
            hint=f"Omit `--dim {min(unused)}`, or add the argument.",
        )
    return functools.partial(function, **arguments)


def _sizes_taken(arguments: Iterable[str]) -> set[int | str]:
    """Return every symbol that ``dims`` may use to give a size to a script with these ``arguments``."""
    return {alias for name in arguments for alias in (name, name.upper(), _LONG_NAMES.get(name, name))}


def batch_of(spec: InputSpec) -> int:
    """Return the batch size of ``spec``: the size of ``B``, or else of dimension 0 of the first tensor.

    The tensor may have to be read from a file, or made by a script.  Raises :class:`UsageError` if there is none.
    """
    if BATCH in spec.dims:
        return spec.dims[BATCH]
    if spec.tensors and spec.tensors[0].shape:
        return _resolved_shape(spec.tensors[0], spec.dims)[0]
    if spec.data_file is not None:
        arguments = _read_data(spec.data_file, spec.data_sha256)
        where = spec.data_file
        hint = "Save the arguments of forward in it, as a list or a dict of tensors."
    elif spec.script is not None:  # its function may give the size any name, so look at the returned tensors
        arguments = _run_script(spec.script, spec.dims, seed=0)
        where = spec.script
        hint = NO_BATCH_ARGUMENT
    else:
        hint = "Write it into a shape, as in `-i Bx3x224x224 --dim B=8`."
        raise UsageError("memopt cannot tell the batch size of the inputs", hint=hint)
    first = next(_tensors_in(arguments), None)
    if first is not None and first.dim():
        return first.shape[0]
    raise UsageError(
        f"{where} gives no tensor with a batch: its first one has no dimensions, or there is none", hint=hint
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, Mapping | list | tuple) else ():
        yield from _tensors_in(item)
