"""Device profiles for ``--for``: built-in ones of well-known GPUs, and profiles read from YAML.

Rates come from the vendors' data sheets, for dense products at boost clock; real kernels are slower.  Memory is the
part that a process can allocate: the total that PyTorch shows, less half a GiB for the CUDA context.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Final

from memopt_cli.errors import UsageError, printable, shorten
from memopt_cli.records import MAX_NAME_LENGTH, DeviceProfile, from_data
from memopt_cli.text.documents import read_mapping
from memopt_cli.text.units import parse_bytes

_CUBLAS: Final = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_HOPPER: Final = 8 * 4096 * 1024
"""Workspace that PyTorch gives each cuBLAS handle, in bytes (``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
_EXAMPLE: Final = (
    "A device profile contains, for example: "
    "{memory_bytes: 23GiB, bandwidth_bytes_per_s: 1.0e+12, flops_per_s: {fp32: 8.0e+13, bf16: 1.6e+14}}."
)


def _card(
    name: str,
    gib: float,
    gb_per_s: float,
    tflops: dict[str, float],
    sheet: str,
    library_bytes: int = _CUBLAS,
) -> DeviceProfile:
    """Make the profile of a card with ``gib`` GiB of usable memory; ``tflops`` has TFLOP/s by the name of the rate."""
    return from_data(
        DeviceProfile,
        {
            "name": name,
            "memory_bytes": int(gib * 2**30),
            "bandwidth_bytes_per_s": gb_per_s * 1e9,
            "flops_per_s": {rate: value * 1e12 for rate, value in tflops.items()},
            "library_bytes": library_bytes,
            "source": sheet,
        },
    )


_A100 = {"fp64": 9.7, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp64": 33.5, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
_V100 = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_RTX4090 = {"fp64": 1.29, "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}
_RTX3090 = {"fp64": 0.556, "fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}
_A6000 = {"fp64": 0.604, "fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}
_A10 = {"fp64": 0.488, "fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}
_L4 = {"fp64": 0.473, "fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0}
_L40S = {"fp64": 1.43, "fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0}
_T4 = {"fp64": 0.253, "fp32": 8.1, "fp16": 65.0}
"""Rates of matrix products in TFLOP/s, without sparsity; 16-bit products are summed in fp32."""

CARDS: Final[dict[str, DeviceProfile]] = {
    card.name: card
    for card in (
        _card("a10-24gb", 21.5, 600, _A10, "NVIDIA A10 data sheet"),
        _card("a100-40gb", 38.9, 1555, _A100, "NVIDIA A100 data sheet, SXM and PCIe"),
        _card("a100-80gb", 78.6, 2039, _A100, "NVIDIA A100 data sheet, SXM"),
        _card("h100-80gb", 78.6, 3350, _H100, "NVIDIA H100 data sheet, SXM", _CUBLAS_HOPPER),
        _card("h200-141gb", 139.3, 4800, _H100, "NVIDIA H200 data sheet, SXM", _CUBLAS_HOPPER),
        _card("l4-24gb", 21.5, 300, _L4, "NVIDIA L4 data sheet"),
        _card("l40s-48gb", 43.9, 864, _L40S, "NVIDIA L40S data sheet"),
        _card("rtx3090", 23.1, 936, _RTX3090, "NVIDIA Ampere GA102 white paper"),
        _card("rtx4090", 23.1, 1008, _RTX4090, "NVIDIA Ada white paper"),
        _card("rtxa6000-48gb", 47.0, 768, _A6000, "NVIDIA RTX A6000 data sheet, Ampere GA102 white paper"),
        _card("t4-16gb", 14.1, 320, _T4, "NVIDIA T4 data sheet"),
        _card("v100-16gb", 15.2, 900, _V100, "NVIDIA V100 data sheet, SXM2"),
        _card("v100-32gb", 31.2, 900, _V100, "NVIDIA V100 data sheet, SXM2"),
    )
}


def device_profile(text: str) -> DeviceProfile:
    """Return the profile of the card named ``text``, such as ``a100-40gb``, or the one in the YAML file at that path.

    Raises :class:`UsageError` for an unknown card, and for a file that is not a profile.
    """
    if text.lower().endswith((".yaml", ".yml")):
        return _read(Path(text))
    if text.lower() in CARDS:
        return CARDS[text.lower()]
    close = difflib.get_close_matches(text.lower(), CARDS, n=3, cutoff=0.4)
    suggestion = f"Did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        f"unknown card {shorten(text)}",
        hint=f"{suggestion}Known cards: {', '.join(CARDS)}. Describe any other in a YAML file, such as mine.yaml.",
    )


def _read(path: Path) -> DeviceProfile:
    data = read_mapping(path, _EXAMPLE)
    values: dict[str, Any] = {"name": printable(path.stem)[:MAX_NAME_LENGTH], **data}
    for key in ("memory_bytes", "library_bytes"):
        if isinstance(values.get(key), str):
            values[key] = _parse_size(values[key], f"{path}.{key}")
    try:
        return from_data(DeviceProfile, values, where=str(path))
    except UsageError as err:
        raise UsageError(err.message, hint=err.hint or _EXAMPLE) from err


def _parse_size(text: str, where: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", hint=err.hint) from err
