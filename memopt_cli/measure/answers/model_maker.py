"""Makes the model of a profiling subprocess, as often as it is wanted."""

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
from memopt_cli.training.step import place
from memopt_cli.training.user_step import StepModels


class ModelMaker:
    """Builds the model of a subject, and puts it where its steps are taken: with data, or without."""

    def __init__(self, subject: Subject, build: Callable[[], nn.Module] | None) -> None:
        """``build`` makes the model; without it, it is loaded from its file."""
        self._subject = subject
        self._build = build
        self._has_data = subject.data != "none"
        self.mode = trace.fake_mode()
        """Of the tensors without data."""

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Where parameters have no data, if they are to have none."""
        return contextlib.nullcontext() if self._has_data else trace.built_without_data(self.mode)

    def built(self) -> nn.Module:
        """Make a new model, without its plan, and without checkpoints of its own where the subject has none."""
        model = remove_plan(self._build() if self._build else load_model(self._subject.source).module)
        if not self._subject.source.own_checkpoints:
            turn_off(model)
        return model

    def placed(self, model: nn.Module) -> nn.Module:
        """On the step's device, in its dtype."""
        settings = self._subject.settings
        if isinstance(model, StepModels):  # in the modes that their function puts them in
            return model.on(settings.device)
        return (place if self._has_data else trace.place_fake)(model, settings)
