"""Making the model of a profiling subprocess: loading or building it, with data or without, as often as needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from memopt_cli import trace
from memopt_cli.loading import load_model
from memopt_cli.measure.jobs import Subject
from memopt_cli.training.apply import remove_plan
from memopt_cli.training.own_checkpoints import turn_off
from memopt_cli.training.step import move_model
from memopt_cli.training.user_step import StepModels


class ModelMaker:
    """Makes the model of a subject, with data or without, on the device of its steps."""

    def __init__(self, subject: Subject, build: Callable[[], nn.Module] | None) -> None:
        """Prepare to make the model by ``build``, or to load it from its file."""
        self._subject = subject
        self._build = build
        self._has_data = subject.data != "none"
        self.mode = trace.fake_mode()
        """The mode in which tensors without data are made."""

    def without_data(self) -> contextlib.AbstractContextManager[Any]:
        """Make parameters without data in the ``with`` block, if the subject has no data."""
        return contextlib.nullcontext() if self._has_data else trace.built_without_data(self.mode)

    def build(self) -> nn.Module:
        """Make a new model without its plan, and without its own checkpoints unless the subject keeps them."""
        model = remove_plan(self._build() if self._build else load_model(self._subject.source).module)
        if not self._subject.source.own_checkpoints:
            turn_off(model)
        return model

    def move(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the step's device and dtype, and set it to training mode."""
        settings = self._subject.settings
        if isinstance(model, StepModels):  # the user's step sets the modes of its models itself
            return model.on_device(settings.device)
        return (move_model if self._has_data else trace.move_fake_model)(model, settings)
