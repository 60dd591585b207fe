"""The inputs of a step are guessed from the configuration of a model, as transformers and timm have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.loading.configured import guess_by_configuration

TEXT = {"vocab_size": 100, "max_position_embeddings": 64}
SOUND = {"num_mel_bins": 20, "max_source_positions": 50, "max_target_positions": 40, "vocab_size": 100}


def model(kind: str, main_input: str, arguments: str, **config: Any) -> nn.Module:
    """Make a model of class ``kind`` whose forward takes ``arguments``."""
    forward = eval(f"lambda self, {', '.join(f'{name}=None' for name in arguments.split())}: None")
    made: nn.Module = type(kind, (nn.Module,), {"forward": forward})()
    vars(made).update(main_input_name=main_input, config=SimpleNamespace(**config))
    return made


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        (
            model("SomeForCausalLM", "input_ids", "input_ids attention_mask labels", **TEXT),
            ["input_ids:BxS@int64=0..100", "attention_mask:BxS@int64=padded", "labels:BxS@int64=0..100"],
        ),
        (
            model("SomeForQuestionAnswering", "input_ids", "input_ids start_positions end_positions", **TEXT),
            ["input_ids:BxS@int64=0..100", "start_positions:B@int64=0..64", "end_positions:B@int64=0..64"],
        ),
        (
            model("SomeForImageClassification", "pixel_values", "pixel_values labels", image_size=32, num_labels=5),
            ["pixel_values:Bx3x32x32", "labels:B@int64=0..5"],
        ),
        (
            model("SomeForImageClassification", "pixel_values", "pixel_values labels", image_size=32, num_labels=1),
            ["pixel_values:Bx3x32x32"],
        ),
        (
            model("SomeForCTC", "input_values", "input_values labels", conv_stride=(5,), vocab_size=32),
            ["input_values:Bx16000", "labels:Bx32@int64=0..32"],
        ),
        (
            model("SomeForConditionalGeneration", "input_features", "input_features labels", **SOUND),
            ["input_features:Bx20x100", "labels:BxS@int64=0..100"],
        ),
        (
            model(
                "SomeModel",
                "input_ids",
                "input_ids pixel_values",
                text_config=SimpleNamespace(**TEXT),
                vision_config=SimpleNamespace(image_size=32),
            ),
            ["input_ids:BxS@int64=0..100", "pixel_values:Bx3x32x32"],
        ),
        (
            model("SomeModel", "input_ids", "input_ids pixel_values", **TEXT, image_token_id=7),
            ["input_ids:BxS@int64=0..100"],
        ),
        (model("SomeModel", "input_features", "input_features", num_mel_bins=20), None),
    ],
)
def test_inputs_and_labels(made: nn.Module, inputs: list[str] | None) -> None:
    guess = guess_by_configuration(made)
    assert (None if guess is None else [format_tensor(tensor) for tensor in guess.tensors]) == inputs


@pytest.mark.parametrize(("positions", "padding", "length"), [(512, None, 512), (514, 1, 512), (512, 1, 256)])
def test_positions_of_padding_are_no_tokens(positions: int, padding: int | None, length: int) -> None:
    made = model("SomeModel", "input_ids", "input_ids", vocab_size=100, max_position_embeddings=positions)
    made.position_embeddings = nn.Embedding(positions, 4, padding_idx=padding)
    guess = guess_by_configuration(made)
    assert guess is not None
    assert guess.dims["S"] == length
