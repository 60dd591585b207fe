"""Finding a model's own checkpointing, and turning it off where a plan decides what is recomputed.

A model that calls ``torch.utils.checkpoint`` in its forward recomputes that part whatever the plan, and twice if the
part is also in a segment.  In most libraries an attribute, here called a *switch*, controls this:
``gradient_checkpointing_enable()`` of transformers sets ``gradient_checkpointing``, timm's ``set_grad_checkpointing``
sets ``grad_checkpointing``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final
from weakref import ref

from torch import nn
from torch.utils import checkpoint as checkpoints

from memopt_cli.runtime import named_parts, settings_of
from memopt_cli.runtime.private_torch import CheckpointCall, replaced
from memopt_cli.runtime.segment_call import on_first_call
from memopt_cli.runtime.warned import warn_caller
from memopt_cli.text.paths import attributes_in_words
from memopt_cli.training.module_calls import module_hooks

_SWITCH: Final = re.compile(r"(?!save|load|resume|from)\w*(checkpoint|ckpt)\w*|with_cp|memory_efficient")
"""Names of attributes that turn checkpoints on, such as ``use_checkpoint`` and mmcv's ``with_cp``."""
_SUSPENDED: Final = "_memopt_checkpoints_off"
"""Attribute of a model under a plan: a list of the switches that were on before."""
_ON_AGAIN: Final = (
    "The model checkpoints by itself under its plan ({}): those parts are recomputed twice, or without "
    "the plan, which takes more memory and time. Turn that off after the plan is applied, or do not turn it on, as "
    "gradient_checkpointing_enable() and TrainingArguments(gradient_checkpointing=True) do."
)


def find_switches(model: nn.Module) -> tuple[str, ...]:
    """Return the attributes in ``model`` that are true and by their names turn checkpoints on: ``blocks.0.with_cp``."""
    return tuple(
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is True and _SWITCH.fullmatch(name)
    )


def turn_off(model: nn.Module) -> tuple[str, ...]:
    """Turn the switches of ``model`` off permanently, and return those that were on."""
    switches = find_switches(model)
    _set_switches(model, switches, on=False)
    return switches


def suspend(model: nn.Module) -> None:
    """Turn the switches of ``model`` off until :func:`resume`; it may be saved and loaded in between."""
    if switches := turn_off(model):
        vars(model)[_SUSPENDED] = switches


def resume(model: nn.Module) -> None:
    """Turn the switches of ``model`` on again that :func:`suspend` turned off."""
    switches = vars(model).pop(_SUSPENDED, ())
    _set_switches(model, switches if isinstance(switches, tuple) else (), on=True)


def warn_if_on(model: nn.Module) -> None:
    """Make ``model``, which has a plan, warn once if its own checkpointing is on when its segments run.

    A training script may turn the switches on after the plan is applied, as ``TrainingArguments(gradient_checkpointing=
    True)`` does.  They are looked at when a segment runs for the first time, and where one runs within a checkpoint.
    """
    model_of, looked = ref(model), set[bool]()

    def look(within_checkpoint: bool) -> None:
        if within_checkpoint in looked:
            return
        looked.add(within_checkpoint)
        known = model_of()
        if known is not None and (switches := find_switches(known)):
            looked.update((False, True))
            warn_caller(_ON_AGAIN.format(attributes_in_words(switches)))

    for _, part in named_parts(model):
        if settings_of(part) is not None:
            on_first_call(part, look)


def _set_switches(model: nn.Module, switches: Sequence[str], *, on: bool) -> None:
    """Set the ``switches`` that ``model`` has: the list may come from an untrusted file."""
    modules = dict(model.named_modules())
    for switch in switches:
        path, _, name = str(switch).rpartition(".")
        if path in modules and _SWITCH.fullmatch(name) and isinstance(vars(modules[path]).get(name), bool):
            setattr(modules[path], name, on)


@contextlib.contextmanager
def watched_checkpoints(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list of the paths of modules whose forward calls ``torch.utils.checkpoint`` in the ``with`` block."""
    paths: list[str] = []
    running: list[str] = []  # paths only: a reference to a module's inputs would change the peak

    def enter(path: str, *_: Any) -> None:
        running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    with module_hooks(model, enter, leave, always_leave=True):

        def noting_module(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                paths.append(running[-1] if running else "")
                return original(*args, **kwargs)

            return call

        # Checkpoints that are not reentrant make a CheckpointCall; reentrant ones call check_backward_validity.
        with (
            replaced(CheckpointCall, "__init__", noting_module),
            replaced(checkpoints, "check_backward_validity", noting_module),
        ):
            yield paths
