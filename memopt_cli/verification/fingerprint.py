"""What a step left, in few numbers: two processes that each took it need not hand their tensors over to compare them.

A digest tells whether two tensors are the same to the bit.  Where sums were formed in another order, projections tell
how far apart they are: of each tensor, :data:`_DIRECTIONS` sums with weights drawn from the normal distribution.  The
sums of two tensors differ, squared and on average, by the square of the distance between these (as in Johnson and
Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space", 1984).  A distance ten times what is allowed is
taken for an allowed one once in ten million.
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
from memopt_cli.verification.equality import AT_UPDATE, generator_state, named_state

_DIGEST_BYTES = 16
"""Two tensors have the same digest by chance once in 2^128."""
_DIRECTIONS = 8
_PIECE = 1 << 14
"""Elements that are looked at together, on the CPU: a fingerprint needs hardly any memory."""
_SHIFT = 4099
"""The weights of the next piece begin so many later, a prime number: pieces that change places are noticed."""


def left_by(model: nn.Module, output: Any) -> dict[str, Tensor | None]:
    """What a step has left: outputs, gradients of parameters, buffers, state and generators; by name, nothing copied.

    ``None``: an output whose values nobody has asked for, and which would be computed to look at it.
    """
    return {f"output[{i}]": _values(t) for i, t in enumerate(tensors_of(output))} | left_on(model)


def _values(output: Tensor) -> Tensor | None:
    if not isinstance(output, DeferredLinear):
        return output
    return output.values() if output.is_computed else None


def left_on(model: nn.Module) -> dict[str, Tensor | None]:
    """The same without the outputs."""
    found: dict[str, Tensor | None] = {**named_state(model), **generator_state()}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def fingerprint(left: Mapping[str, Tensor | None]) -> Fingerprint:
    """Of all that a step has left, looked at in pieces; not known to repeat."""
    return Fingerprint(
        tensors=tuple(_print_of(name, t.detach(), _weights()) for name, t in left.items() if t is not None),
        put_off=tuple(name for name, t in left.items() if t is None),
        repeats=False,
    )


@functools.cache
def _weights() -> Tensor:
    """Of the directions: 2 MiB."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2 * _PIECE, _DIRECTIONS, dtype=torch.float64, generator=generator)


def repeated(once: Fingerprint, again: Fingerprint) -> Fingerprint:
    """The fingerprint of a step, with what another tells, whose outputs are gone, of whether it repeats."""
    bits = {found.name: found.bits for found in once.tensors if not _is_gone(found.name)}
    return replace(once, repeats=bits == {found.name: found.bits for found in again.tensors})


def _is_gone(name: str) -> bool:
    """Whether it is there within a step alone."""
    return name.startswith("output[") or AT_UPDATE in name


def _print_of(name: str, tensor: Tensor, weights: Tensor) -> TensorPrint:
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        indices = tensor.indices().cpu().contiguous()
        kind += f" {hashlib.blake2b(_bytes_of(indices), digest_size=_DIGEST_BYTES).hexdigest()}"
        tensor = tensor.values()
    flat = tensor.to_dense().resolve_conj().resolve_neg().reshape(-1)
    numbers = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    digest = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    square, sums = 0.0, torch.zeros(_DIRECTIONS, dtype=torch.float64)
    not_finite: list[bytes] = []
    for place, piece in enumerate(torch.split(numbers, _PIECE)):
        held = piece.cpu().contiguous()
        digest.update(_bytes_of(held))
        if held.is_floating_point():
            begin, doubled = place * _SHIFT % _PIECE, _finite(held.double(), place, not_finite)
            sums += doubled @ weights[begin : begin + len(held)]
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


def _finite(numbers: Tensor, place: int, told: list[bytes]) -> Tensor:
    """With zeros for what is not finite, and ``told`` where that is and of which kind: masks hold -inf."""
    if numbers.isfinite().all():
        return numbers
    zeros = numbers.nan_to_num(0.0, 0.0, 0.0)
    kinds = torch.where(numbers.isfinite(), 0.0, numbers).nan_to_num(2.0, 1.0, -1.0).to(torch.int8)
    told.append(place.to_bytes(8, "little") + hashlib.blake2b(_bytes_of(kinds), digest_size=_DIGEST_BYTES).digest())
    return zeros


def _bytes_of(held: Tensor) -> ctypes.Array[ctypes.c_char] | bytes:
    """Of a tensor on the CPU, contiguous; not copied."""
    return (ctypes.c_char * held.nbytes).from_address(held.data_ptr()) if held.nbytes else b""
