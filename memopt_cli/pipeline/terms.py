"""Describing a step by named terms, such as its precision and inputs, and listing the terms in which two steps differ.

From a memopt file, a command takes the settings of the recorded step, where the user gave none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from memopt_cli.inputs.spec_text import format_tensor, with_sizes
from memopt_cli.records import Difference, InputSpec, StepSettings
from memopt_cli.text.documents import quoted_flag, quoted_path
from memopt_cli.text.optimizer_text import MadeOptimizer, parse_optimizer

SETTING_FLAGS: Final[Mapping[str, str]] = {
    field.name: "--accumulate" if field.name == "micro_batches" else f"--{field.name.replace('_', '-')}"
    for field in fields(StepSettings)
    if field.name != "device"
}
"""Field of :class:`StepSettings`, other than the device -> the flag that sets it."""


def missing_settings(settings: StepSettings, file_settings: StepSettings) -> list[str]:
    """Return the fields that have the default in ``settings``, and not in ``file_settings``, the step of a file."""
    defaults = StepSettings()
    return [
        name
        for name in SETTING_FLAGS
        if getattr(settings, name) == getattr(defaults, name) != getattr(file_settings, name)
    ]


def fill_in(settings: StepSettings, file_settings: StepSettings) -> StepSettings:
    """Return ``settings`` with the fields that it leaves out as they are in ``file_settings``, the step of a file."""
    return replace(
        settings, **{name: getattr(file_settings, name) for name in missing_settings(settings, file_settings)}
    )


def settings_naming_code(settings: StepSettings, file_settings: StepSettings) -> list[str]:
    """Return the fields left out by ``settings`` for which ``file_settings`` names a user function.

    The file may have come with the model, and memopt only runs code that the user names.
    """
    is_made = isinstance(parse_optimizer(file_settings.optimizer), MadeOptimizer)
    return [
        name
        for name in missing_settings(settings, file_settings)
        if name == "loss" or (name == "optimizer" and is_made)
    ]


def flags_in_words(settings: StepSettings, names: Sequence[str]) -> str:
    """Return the flags that set the fields ``names`` as in ``settings``, as the user types them."""
    return " and ".join(f"`{flag}`" for flag in _setting_flags(settings, names))


def _setting_flags(settings: StepSettings, names: Iterable[str]) -> list[str]:
    values = {name: getattr(settings, name) for name in names}
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return [quoted_flag(SETTING_FLAGS[name], text) for name, text in texts.items()]


def step_flags(spec: InputSpec, settings: StepSettings) -> list[str]:
    """Return the flags that describe the step with the inputs in ``spec`` and with ``settings``."""
    sources = {"--input-data": spec.data_file, "--input-script": spec.script}
    return [
        *(quoted_flag("-i", format_tensor(tensor)) for tensor in spec.tensors),
        *(quoted_flag(flag, source) for flag, source in sources.items() if source),
        *(quoted_flag("--dim", f"{name}={size}") for name, size in spec.dims.items()),
        *([] if settings.device == "cpu" else [quoted_flag("--device", settings.device)]),
        *_setting_flags(settings, missing_settings(StepSettings(), settings)),
    ]


def command_line(command: str, location: str, flags: Sequence[str]) -> str:
    """Return the line that runs a ``command`` of memopt on the model at ``location``; empty ``flags`` are left out."""
    return " ".join((f"memopt {command} {quoted_path(location)}", *filter(None, flags)))


def step_terms(settings: StepSettings) -> dict[str, str]:
    """Return the ``settings`` that decide what a step computes, except device and seed, as strings by name.

    A function is named without its folder, which depends on where memopt is run.
    """
    return {
        "precision": settings.precision,
        "optimizer": Path(settings.optimizer or "none").name,
        "micro-batches": str(settings.micro_batches),
        "clipping": "none" if settings.clip_norm is None else f"{settings.clip_norm:g}",
        "loss": Path(settings.loss or "default").name,
    }


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the terms that both sides have with different values."""
    return tuple(
        Difference(name=name, before=text, after=after[name])
        for name, text in before.items()
        if name in after and text != after[name]
    )


def inputs_term(spec: InputSpec) -> str:
    """Return the inputs in ``spec`` as text, sizes in place of symbols: equal if they make the same tensors.

    A script is named without its folder, which depends on where memopt is run.
    """
    if spec.tensors:
        return ", ".join(format_tensor(with_sizes(tensor, spec.dims)) for tensor in spec.tensors)
    dims = (f"{name}={size}" for name, size in sorted(spec.dims.items()))
    return " ".join((spec.data_file or Path(spec.script or "none").name, *dims))
