"""Fingerprints of a step: a few numbers for each tensor, so that two processes can compare all that their steps left.

A digest shows whether two tensors are bit-identical.  If not, since sums may have been formed in a different order,
projections show how far apart they are.  A projection is the sum of a tensor's elements with weights from the normal
distribution; there are :data:`_DIRECTIONS`.  The squared difference of two tensors' projections is, on average, the
squared distance of the tensors (Johnson and Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space",
1984).  With eight projections, a distance of ten times the tolerance passes for an allowed one once in ten million.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.records import NOT_FINITE, Fingerprint, TensorPrint
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.verification.effects import AT_UPDATE, tensors_on

_DIGEST_BYTES = 16
"""Length of a digest: two different tensors have the same one by chance once in 2^128."""
_DIRECTIONS = 8
_PIECE = 1 << 14
"""Elements that are copied to the CPU at a time, so that a fingerprint needs hardly any memory."""
_SHIFT = 4099
"""Offset from the weights of one piece to the weights of the next: a prime number, so that swapped pieces differ."""


def tensors_after_step(model: nn.Module, output: Any) -> dict[str, Tensor | None]:
    """Return the tensors that a step left, not copied: ``output``, gradients, buffers, state and generators, by name.

    A deferred output that nothing has read is ``None``, since reading it here would compute it.
    """
    return {f"output[{i}]": _values(t) for i, t in enumerate(tensors_of(output))} | tensors_on(model)


def _values(output: Tensor) -> Tensor | None:
    if not isinstance(output, DeferredLinear):
        return output
    return output.values() if output.is_computed else None


def fingerprint(effects: Mapping[str, Tensor | None]) -> Fingerprint:
    """Make the fingerprint of the tensors in ``effects``; :func:`mark_repeatable` sets later whether it repeats."""
    return Fingerprint(
        tensors=tuple(
            _fingerprint_tensor(name, t.detach(), _projection_weights()) for name, t in effects.items() if t is not None
        ),
        put_off=tuple(name for name, t in effects.items() if t is None),
        repeats=False,
    )


@functools.cache
def _projection_weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2 * _PIECE, _DIRECTIONS, dtype=torch.float64, generator=generator)


def mark_repeatable(first: Fingerprint, second: Fingerprint) -> Fingerprint:
    """Return ``first``, marked as repeatable if ``second``, of another run without outputs, has the same bits."""
    # Outputs, and gradients at an update, exist only during a step.
    lasting = (t for t in first.tensors if not t.name.startswith("output[") and AT_UPDATE not in t.name)
    bits = {tensor.name: tensor.bits for tensor in lasting}
    return replace(first, repeats=bits == {tensor.name: tensor.bits for tensor in second.tensors})


def _fingerprint_tensor(name: str, tensor: Tensor, weights: Tensor) -> TensorPrint:
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        indices = tensor.indices().cpu().contiguous()
        kind += f" {hashlib.blake2b(_bytes_of(indices), digest_size=_DIGEST_BYTES).hexdigest()}"
        tensor = tensor.values()
    flat = tensor.to_dense().resolve_conj().resolve_neg().reshape(-1)
    numbers = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    digest = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    square = 0.0
    sums = torch.zeros(_DIRECTIONS, dtype=torch.float64)
    not_finite: list[bytes] = []
    for index, piece in enumerate(torch.split(numbers, _PIECE)):
        on_cpu = piece.cpu().contiguous()
        digest.update(_bytes_of(on_cpu))
        if on_cpu.is_floating_point():
            begin = index * _SHIFT % _PIECE
            doubled = _finite(on_cpu.double(), index, not_finite)
            sums += doubled @ weights[begin : begin + len(on_cpu)]
            square += float(doubled @ doubled)
    if not_finite:
        kind += f" {NOT_FINITE} {hashlib.blake2b(b''.join(not_finite), digest_size=_DIGEST_BYTES).hexdigest()}"
    return TensorPrint(
        name=name,
        kind=kind,
        bits=digest.hexdigest(),
        elements=len(numbers),
        epsilon=torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else 0.0,
        norm=math.sqrt(square),
        projections=tuple(sums.tolist()),
    )


def _finite(numbers: Tensor, index: int, not_finite: list[bytes]) -> Tensor:
    """Return ``numbers``, the piece at ``index``, with zeros in place of numbers that are not finite.

    A digest of the latter, with positions and kinds, is added to ``not_finite``.  They are not a failure: masks contain
    -inf.
    """
    if numbers.isfinite().all():
        return numbers
    zeros = numbers.nan_to_num(0.0, 0.0, 0.0)
    kinds = torch.where(numbers.isfinite(), 0.0, numbers).nan_to_num(2.0, 1.0, -1.0).to(torch.int8)
    digest = hashlib.blake2b(_bytes_of(kinds), digest_size=_DIGEST_BYTES).digest()
    not_finite.append(index.to_bytes(8, "little") + digest)
    return zeros


def _bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char] | bytes:
    """Return the bytes of ``tensor``, contiguous and on the CPU, without a copy."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
