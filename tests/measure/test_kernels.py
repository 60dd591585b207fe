"""Kernels that trust their arguments are not run, in a profiling subprocess, on those that a layer must not hand on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm

from memopt_cli.measure.jobs import ORIGINAL, MeasureJob, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import InputSpec, ModelSource, StepFailed
from memopt_cli.spec_text import parse_tensor

LAYERS = {
    "ctc_loss": (
        nn.CTCLoss(),
        ["9x2x5", "2x4@int64={}", "2@int64=9..10", "2@int64=3..4"],
        ("1..5", "100000000..200000000"),
    ),
    "embedding_bag": (nn.EmbeddingBag(5, 3), ["8@int64=0..5", "1@int64={}"], ("0..1", "-9000000..-8000000")),
    "_weight_norm": (_WeightNorm(0), ["{}", "9000x30"], ("9000x1", "1x1")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_only_on_arguments_that_fit(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    layer, inputs, (right, wrong) = LAYERS[name]
    path = tmp_path_factory.mktemp("layer") / "layer.pt"
    torch.save(layer, path)

    def session(filled: str) -> Session:
        tensors = tuple(parse_tensor(text.format(filled)) for text in inputs)
        spec = InputSpec(tensors=tensors, source="here")
        return Session(Subject(source=ModelSource(location=str(path)), spec=spec), 60.0)

    with session(right) as given:
        assert "do not fit each other" not in str(
            given.ask(MeasureJob(plan=ORIGINAL, steps=1))
        )  # a layer without parameters fails
    with session(wrong) as given:
        refused = given.ask(MeasureJob(plan=ORIGINAL, steps=1))
    assert isinstance(refused, StepFailed), refused
    assert f"{name}." in refused.message
    assert "given arguments that do not fit each other" in refused.message
