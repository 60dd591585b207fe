"""Kernels that trust their arguments are not run, in a profiling subprocess, on those that a layer must not hand on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

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


CALLS = {
    "bags before the first index": "bag(indices, torch.tensor([-(10**9), 4]))",
    "rows that were pruned away": "bag(indices, offsets, None, torch.full((5,), 10**8, dtype=torch.int32))",
    "fewer weights than indices": "bag(indices, offsets, torch.ones(1))",
    "no heads": "encoder(torch.ones(1, 3, 8))",
}


@pytest.mark.parametrize("name", CALLS)
def test_settings_of_a_layer_that_its_kernel_trusts(name: str) -> None:
    """In a process of its own: the kernels stay guarded, and would end it."""
    code = f"""
        import torch
        from torch import nn
        from torch.ao.nn import quantized
        from memopt_cli.measure.kernels import guard_kernels
        from memopt_cli.runtime.lifted.arguments import ArgumentError
        from memopt_cli.runtime.lifted.operators import find_operator

        guard_kernels()
        assert find_operator("quantized::embedding_bag_byte") is not None
        indices, offsets = torch.zeros(8, dtype=torch.int64), torch.tensor([0, 4])
        bag = quantized.EmbeddingBag(5, 3, mode="sum")
        assert bag(indices, offsets).shape == (2, 3)
        bag.pruned_weights = {name == "rows that were pruned away"}
        encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
        assert encoder(torch.ones(1, 3, 8)).shape == (1, 3, 8)
        encoder.self_attn.num_heads = 0
        try:
            {CALLS[name]}
        except ArgumentError:
            print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n", done.stderr
