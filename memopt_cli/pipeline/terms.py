"""Describe a step by named terms, such as its precision and inputs, and list the terms in which two steps differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.records import Difference, InputSpec, StepSettings


def step_terms(settings: StepSettings) -> dict[str, str]:
    """Return the ``settings`` that decide what a step computes, except device and seed, as texts by name."""
    return {
        "precision": settings.precision,
        "optimizer": settings.optimizer or "none",
        "micro-batches": str(settings.micro_batches),
        "clipping": "none" if settings.clip_norm is None else f"{settings.clip_norm:g}",
        "loss": settings.loss or "default",
    }


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the terms that both sides have, with different texts."""
    return tuple(
        Difference(name=name, before=text, after=after[name])
        for name, text in before.items()
        if name in after and text != after[name]
    )


def inputs_term(spec: InputSpec) -> str:
    """Return the inputs in ``spec`` as text, sizes in place of symbols: equal if they make the same tensors."""
    if spec.tensors:
        sized = (replace(t, shape=tuple(spec.dims.get(str(size), size) for size in t.shape)) for t in spec.tensors)
        return ", ".join(map(format_tensor, sized))
    dims = (f"{name}={size}" for name, size in sorted(spec.dims.items()))
    return " ".join((spec.data_file or spec.script or "none", *dims))
