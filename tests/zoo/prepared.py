"""Models that are ready for the pipeline, without a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt_cli.measure.jobs import ORIGINAL, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import InputSpec, ModelFacts, ModelSource, Plan, StepSettings


def prepare_here(
    build: Callable[[], nn.Module], spec: InputSpec, batch: int, carried: Plan = ORIGINAL, **settings: Any
) -> PreparedModel:
    """The model that ``build`` makes, each time from one seed, whose steps run in this process."""

    def seeded() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build()

    facts = ModelFacts(
        format="live",
        class_name="Net",
        sha256=None,
        weights_sha256=None,
        notes=(),
        spec=spec,
        batch=batch,
        carried=carried,
        asked_compressors=(),
        fixed_sizes=False,
        indices={},
        batch_norms=True,
        trainable_bytes=0,
        held_bytes=0,
        sync_norms=(),
    )
    source = ModelSource(location="-", keeps_compiled=True)
    return PreparedModel(
        subject=Subject(source=source, spec=spec, settings=StepSettings(**settings)),
        facts=facts,
        notes=(),
        open_session=functools.partial(LocalSession, build=seeded),
        carried=carried,
    )
