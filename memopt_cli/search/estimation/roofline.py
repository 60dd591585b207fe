"""The time of an operator on another device: the longer of the times to compute, and to move its bytes.

This is the roofline model (S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model",
2009), operator by operator, with a minimum time for the launch of a kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memopt_cli.records import DeviceProfile, OpTrace, Rate, StepTrace

_RATES: Final[dict[str, Rate]] = {"float64": "fp64", "complex128": "fp64", "bfloat16": "bf16", "float16": "fp16"}
"""Dtype -> the rate of its matrix products; float32 has two, tf32 and fp32 (see :func:`choose_rate`)."""
_IN_TF32: Final = ("convolution", "_rnn")
"""Parts of the names of operators that PyTorch runs with cuDNN, by default in TF32."""
_PACKING_PASSES: Final = 10
"""Approximate number of times that a tensor goes through memory to be packed, checked and unpacked."""


def operator_s(op: OpTrace, device: DeviceProfile) -> float:
    """Return the seconds of ``op`` on ``device``; 0 if it only makes a view, for which no kernel runs."""
    if not op.makes and not op.mutates:
        return 0.0
    products_s = op.flops / choose_rate(op, device)
    return max(products_s, op.moved_bytes / device.bandwidth_bytes_per_s, device.launch_s)


def choose_rate(op: OpTrace, device: DeviceProfile) -> float:
    """Return the floating-point operations per second of ``op`` on ``device``; by default, the rate of fp32."""
    rate = _RATES.get(op.dtype, "tf32" if any(part in op.name for part in _IN_TF32) else "fp32")
    return device.flops_per_s.get(rate, device.flops_per_s["fp32"])


def add_seconds(trace: StepTrace, device: DeviceProfile) -> StepTrace:
    """Return ``trace`` with the seconds of its operators on ``device``, and without workspaces of another device."""
    ops = tuple(
        replace(op, seconds=operator_s(op, device), workspace_bytes=0, fixed_workspace_bytes=0) for op in trace.ops
    )
    rate = device.bandwidth_bytes_per_s / _PACKING_PASSES
    return replace(trace, ops=ops, allocated_peak_bytes=trace.tensor_peak_bytes, packing_bytes_per_s=rate)
