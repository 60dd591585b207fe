"""What the operators that trust their arguments take for granted: a check for each, of the arguments of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memopt_cli.runtime.private_torch import is_fake, is_of_transform, unseen, without_transform

Arguments = Mapping[str, Any]
"""Those of one call by their names, defaults too."""
Check = Callable[[Arguments], bool]
"""Whether an operator may run on its arguments."""


def _readable(tensor: Tensor) -> Tensor | None:
    """The tensor with numbers in it; none in a dry run, which computes shapes alone."""
    while is_of_transform(tensor):
        tensor = without_transform(tensor)
    return None if is_fake(tensor) or tensor.is_meta else tensor


def _holds(condition: Callable[..., Any], *tensors: Tensor) -> bool:
    """Whether a condition on the numbers of small tensors holds, unseen by whoever watches the operators."""
    readable = [_readable(tensor) for tensor in tensors]
    if any(tensor is None for tensor in readable):
        return True
    with unseen(), torch.no_grad():
        return bool(condition(*readable))


def _count(numbers: Any) -> int:
    return numbers.numel() if isinstance(numbers, Tensor) else len(numbers)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _has_size(tensor: Tensor | None, *sizes: int) -> bool:
    return tensor is not None and tuple(tensor.shape) == sizes


# ---------------------------------------------------------------------------------------------- normalization


def _weight_norm(given: Arguments) -> bool:
    """Magnitudes, one for each slice of the direction; with a ``dim`` of -1 one for all, which is not fused."""
    return fits_weight_norm(given["v"], given["g"], given["dim"])


def fits_weight_norm(v: Tensor, g: Tensor, dim: int) -> bool:
    """Whether directions and magnitudes of a weight norm go together."""
    return bool(v.dim() > 0 and v.numel() > 0 and -1 <= dim < v.dim() and (dim == -1 or g.numel() == v.shape[dim]))


def _fused_weight_norm(given: Arguments) -> bool:
    v, g, dim = given["v"], given["g"], given["dim"]
    fits = _weight_norm(given) and dim in (0, v.dim() - 1) and v.dtype == g.dtype
    return bool(fits and v.is_contiguous() and g.is_contiguous())


def _batch_norm(given: Arguments) -> bool:
    """Weights and statistics, one for each channel; without statistics it must be training."""
    x, mean, variance = given["input"], given.get("running_mean"), given.get("running_var")
    if x.dim() < 2 or not x.is_floating_point() or (mean is None) != (variance is None):
        return False
    tensors = (given["weight"], given["bias"], mean, variance)
    fit = all(tensor is None or _has_size(tensor, x.shape[1]) for tensor in tensors)
    return fit and (mean is not None or given.get("training", False) is True)


def _group_norm(given: Arguments) -> bool:
    x, groups, channels = given["input"], given["group"], given["C"]
    fits = all(t is None or _has_size(t, channels) for t in (given["weight"], given["bias"]))
    sizes = given["N"] * channels * given["HxW"] == x.numel()
    return fits and x.is_floating_point() and groups > 0 and channels % groups == 0 and sizes


# ---------------------------------------------------------------------------------------------- recurrent layers


def _lstm(given: Arguments) -> bool:
    x, batch_first = given["input"], given["batch_first"]
    return x.dim() == 3 and _lstm_states(given, x.shape[-1], x.shape[0 if batch_first else 1])


def _packed_lstm(given: Arguments) -> bool:
    """The sequences of a batch, longest first: ``batch_sizes`` says how many are left at each step."""
    x, sizes = given["data"], given["batch_sizes"]
    if x.dim() != 2 or sizes.dim() != 1 or sizes.dtype != torch.int64 or not sizes.numel():
        return False
    batch = given["hx"][0].shape[1] if given["hx"] and given["hx"][0].dim() == 3 else -1

    def is_packing(sizes: Tensor) -> bool:
        numbers = sizes.tolist()
        return numbers[0] == batch and numbers[-1] > 0 and sum(numbers) == x.shape[0] and _falls(numbers)

    return _holds(is_packing, sizes) and _lstm_states(given, x.shape[-1], batch)


def _padding(given: Arguments) -> bool:
    """What :func:`_packed_lstm` takes, and its results."""
    x, sizes = given["data"], given["batch_sizes"]
    if x.dim() < 1 or sizes.dim() != 1 or sizes.dtype != torch.int64 or not sizes.numel():
        return False

    def is_packing(sizes: Tensor) -> bool:
        numbers = sizes.tolist()
        return numbers[-1] > 0 and sum(numbers) == x.shape[0] and _falls(numbers)

    return _holds(is_packing, sizes)


def _falls(numbers: Sequence[int]) -> bool:
    return all(first >= second for first, second in itertools.pairwise(numbers))


def _lstm_states(given: Arguments, width: int, batch: int) -> bool:
    """Two states and, for each layer and direction, weights, biases and a projection, in the sizes that go together."""
    states, layers, biased = given["hx"], given["num_layers"], given["has_biases"]
    directions = 2 if given["bidirectional"] else 1
    if not (_is_list(states, 2) and all(state.dim() == 3 for state in states) and layers > 0):
        return False
    output, hidden = (state.shape[-1] for state in states)
    cells = layers * directions
    if not (_has_size(states[0], cells, batch, output) and _has_size(states[1], cells, batch, hidden)):
        return False
    each = [(4 * hidden, width), (4 * hidden, output)] + [(4 * hidden,)] * (2 if biased else 0)
    each += [(output, hidden)] if output != hidden else []
    params = given["params"]
    if not _is_list(params, cells * len(each)):
        return False
    for index, parameter in enumerate(params):
        cell, position = divmod(index, len(each))
        later = position == 0 and cell >= directions
        if not _has_size(parameter, *((4 * hidden, directions * output) if later else each[position])):
            return False
    return True


# ---------------------------------------------------------------------------------------------- attention


def _attention(given: Arguments) -> bool:
    """Batch, heads, positions and features; several heads of the query may share one of the key."""
    query, key, value = given["query"], given["key"], given["value"]
    if any(t.dim() != 4 or not t.is_floating_point() for t in (query, key, value)):
        return False
    batch, heads, length, features = query.shape
    of_keys = key.shape[1]
    fits = key.shape[0] == value.shape[0] == batch and key.shape[3] == features
    fits = fits and tuple(value.shape[1:3]) == tuple(key.shape[1:3]) and of_keys > 0 and heads % of_keys == 0
    if not all(t.numel() for t in (query, key, value)):  # kernels divide by sizes
        return False
    mask = given.get("attn_mask", given.get("attn_bias"))
    return fits and (mask is None or _broadcasts(mask, (batch, heads, length, key.shape[2])))


def _heads(given: Arguments) -> bool:
    return bool(0 < given.get("num_head", given.get("num_heads", 0)) <= given["embed_dim"])


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.dim() in (2, len(shape)) and all(size in (1, wanted) for size, wanted in pairs)


# ---------------------------------------------------------------------------------------------- indices and lengths


def _ctc_loss(given: Arguments) -> bool:
    """Targets that are classes, as far as their lengths say, and lengths within the tensors."""
    scores, targets = given["log_probs"], given["targets"]
    if scores.dim() not in (2, 3) or targets.dim() not in (1, 2) or targets.is_floating_point():
        return False
    lengths = [given["input_lengths"], given["target_lengths"]]
    batch = scores.shape[1] if scores.dim() == 3 else 1
    if any(_count(numbers) != batch for numbers in lengths) or (targets.dim() == 2 and targets.shape[0] != batch):
        return False
    steps, classes = scores.shape[0], scores.shape[-1]

    def fit(targets: Tensor, *tensors: Tensor) -> bool:
        given_as = tensors or tuple(map(torch.tensor, lengths))
        inputs, sizes = (numbers.reshape(-1).to("cpu", torch.int64) for numbers in given_as)
        if not (_is_within(inputs, 0, steps) and _is_within(sizes, 0, targets.shape[-1])):
            return False
        if targets.dim() == 1:
            total = int(sizes.sum())
            return total <= targets.numel() and _is_within(targets[:total], 0, classes - 1)
        read = torch.arange(targets.shape[1]) < sizes[:, None]
        return _is_within(targets[read.to(targets.device)], 0, classes - 1)

    tensors = [numbers for numbers in lengths if isinstance(numbers, Tensor)]
    return 0 <= given["blank"] < classes and _holds(fit, targets, *tensors)


def _is_within(tensor: Tensor, low: int, high: int) -> bool:
    return not tensor.numel() or bool((tensor.min() >= low) & (tensor.max() <= high))


def _embedding_bag(given: Arguments) -> bool:
    return given["weight"].dim() == 2 and given["offsets"] is not None and _bags(given)


def _quantized_embedding_bag(given: Arguments) -> bool:
    """As the others; rows that were pruned away are looked up unchecked."""
    pruned = given["pruned_weights"] or given["compressed_indices_mapping"] is not None
    return not pruned and (given["offsets"] is not None or given["indices"].dim() == 2) and _bags(given)


def _packed_rows(given: Arguments) -> bool:
    """A scale for each row, which the kernel reads unasked: another view of a tensor keeps its scales."""

    def fits(weight: Tensor) -> bool:
        return weight.dim() > 0 and weight.q_per_channel_scales().numel() == weight.shape[0]

    by_channel = given["weight"].is_quantized and given["weight"].qscheme() is not torch.per_tensor_affine
    return not by_channel or (given["weight"].q_per_channel_axis() == 0 and _holds(fits, given["weight"]))


def _bags(given: Arguments) -> bool:
    """Where each bag begins in the list of indices: one after another, and not beyond its end."""
    indices, offsets, weights = given["indices"], given["offsets"], given["per_sample_weights"]
    if given.get("mode", 0) not in (0, 1, 2):  # sum, mean, max
        return False
    if weights is not None and weights.shape != indices.shape:
        return False
    if offsets is None:
        return True
    if indices.dim() != 1 or offsets.dim() != 1 or offsets.is_floating_point():
        return False
    if not offsets.numel():
        return not given["include_last_offset"]
    count = indices.numel()

    def ascend(offsets: Tensor) -> bool:
        return _is_within(offsets, 0, count) and bool((offsets[1:] >= offsets[:-1]).all())

    return _holds(ascend, offsets)


# ---------------------------------------------------------------------------------------------- Fourier transforms


def _fourier(given: Arguments) -> bool:
    """Dimensions that are there, each once."""
    dims, rank = given["dim"], given["self"].dim()
    return len(dims) > 0 and len(set(dims)) == len(dims) and all(0 <= dim < rank for dim in dims)


def _real_fourier(given: Arguments) -> bool:
    size = given["last_dim_size"]
    return _fourier(given) and size > 0 and given["self"].shape[given["dim"][-1]] == size // 2 + 1


# ---------------------------------------------------------------------------------------------- LAPACK


def _eigenvalues(given: Arguments) -> bool:
    """Numbers, of which no NaN and no infinity is one."""
    return _holds(lambda matrix: torch.isfinite(matrix).all(), given["self"])


def _least_squares(given: Arguments) -> bool:
    return bool(given["self"].numel() and given["b"].numel())


# ---------------------------------------------------------------------------------------------- resizing


def _upsample(given: Arguments) -> bool:
    """Scales from which no index is computed that lies outside, and one for each dimension where they are listed."""
    x, sizes = given.get("self", given.get("input")), given.get("output_size", given.get("size"))
    scales = given.get("scale_factors", given.get("scale_factor"))
    if any(isinstance(listed, list | tuple) and len(listed) != x.dim() - 2 for listed in (scales, sizes)):
        return False
    if scales is None:
        scales = [value for name, value in given.items() if name.startswith("scales")]
    scales = scales if isinstance(scales, list | tuple) else [scales]
    sizes = sizes if isinstance(sizes, list | tuple) else [sizes] * len(scales)
    return all(
        _is_scale(scale, before, after)
        for scale, before, after in itertools.zip_longest(scales, x.shape[2:], sizes, fillvalue=None)
    )


def _is_scale(scale: float | None, before: int | None, after: int | None) -> bool:
    if scale is None:
        return True
    if before is None or not _LEAST_SCALE <= scale <= 1 / _LEAST_SCALE:
        return False
    return after is None or abs(before * scale - after) <= 1


_LEAST_SCALE: Final = 2.0**-20


# ---------------------------------------------------------------------------------------------- others


def _view(given: Arguments) -> bool:
    return not given["self"].is_quantized


def _plain(given: Arguments) -> bool:
    """No sparse tensor: this changes indices that another one may share, or trusts it to be a plain one."""
    return given["self"].layout is torch.strided


def _to(given: Arguments) -> bool:
    """A copy goes somewhere, or becomes something."""
    return given.get("device") is not None or given.get("dtype") is not None or not given["copy"]


def _points(given: Arguments) -> bool:
    """A list of points: of more dimensions, the kernel would take the second for the coordinates."""
    return bool(given["self"].dim() == 2)


def _pool(rank: int) -> Check:
    return lambda given: _is_list(given["output_size"], rank)


def groups_fit(given: Arguments) -> bool:
    """Whether the groups of a convolution are more than none."""
    return bool(given["groups"] > 0)


def _prepacked(given: Arguments) -> bool:
    lists = (given["stride"], given["padding"], given["dilation"])
    return all(_is_list(numbers, 2) for numbers in lists) and _is_list(given["input_size"], 4) and given["groups"] > 0


_UPSAMPLE: Final = (
    *(f"upsample_{way}" for way in ("bicubic2d", "bilinear2d", "linear1d", "trilinear3d")),
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
    *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
    *(f"_upsample_{way}2d_aa" for way in ("bicubic", "bilinear", "lanczos")),
    *("__upsample", "__upsample_bilinear", "__upsample_nearest", "__interpolate"),
)
_QUANTIZED: Final = ("quantized", "_quantized")
_CONVOLUTIONS: Final = ("", "1d", "2d", "3d", "_transpose1d", "_transpose2d", "_transpose3d")

CHECKS: Final[Mapping[str, Check]] = {
    "aten::_weight_norm": _weight_norm,
    "aten::_weight_norm_interface": _fused_weight_norm,
    "aten::native_batch_norm": _batch_norm,
    "aten::_native_batch_norm_legit": _batch_norm,
    "aten::_native_batch_norm_legit_functional": _batch_norm,
    "aten::_native_batch_norm_legit_no_training": _batch_norm,
    "aten::native_group_norm": _group_norm,
    "aten::lstm.input": _lstm,
    "aten::lstm.data": _packed_lstm,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_pad_packed_sequence": _padding,
    "aten::_native_multi_head_attention": _heads,
    "aten::_transformer_encoder_layer_fwd": _heads,
    "aten::ctc_loss": _ctc_loss,
    "aten::embedding_bag": _embedding_bag,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "quantized::embedding_bag_prepack": _packed_rows,
    "quantized::embedding_bag_byte": _quantized_embedding_bag,
    "quantized::embedding_bag_4bit": _quantized_embedding_bag,
    "aten::_fft_r2c": _fourier,
    "aten::_fft_c2c": _fourier,
    "aten::_fft_c2r": _real_fourier,
    "aten::view_copy.dtype": _view,
    **dict.fromkeys(("aten::t_", "aten::transpose_", "aten::swapaxes_", "aten::swapdims_", "aten::copy."), _plain),
    "aten::to.prim_Device": _to,
    "aten::to.prim_dtype": _to,
    "aten::to.prim_other": _to,
    "aten::_pdist_forward": _points,
    "aten::linalg_eig": _eigenvalues,
    "aten::linalg_eigvals": _eigenvalues,
    "aten::linalg_lstsq": _least_squares,
    "aten::_adaptive_avg_pool2d": _pool(2),
    "aten::_adaptive_avg_pool3d": _pool(3),
    "mkldnn_prepacked::conv2d_prepack": _prepacked,
    **{f"aten::{name}": _upsample for name in _UPSAMPLE},
    **{f"{library}::conv{kind}_prepack": groups_fit for library in _QUANTIZED for kind in _CONVOLUTIONS},
}
"""By an operator's name; with its overload where another overload needs another check, or none."""
