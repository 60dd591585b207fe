"""What --optimizer takes."""

from __future__ import annotations

import pytest
import torch

from memopt_cli.errors import UsageError
from memopt_cli.text.optimizer_text import _CLASSES, MadeOptimizer, NamedOptimizer, NoOptimizer, parse_optimizer


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", NoOptimizer()),
        ("none", NoOptimizer()),
        ("adamw", NamedOptimizer("AdamW")),
        ("adamw:fused", NamedOptimizer("AdamW", "fused")),
        ("sgd:for-loop", NamedOptimizer("SGD", "for-loop")),
        ("muon", NamedOptimizer("Muon")),
        ("a/train.py:make", MadeOptimizer("a/train.py:make")),
    ],
)
def test_what_it_names(text: str, choice: object) -> None:
    assert parse_optimizer(text) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lion", "unknown optimizer 'lion'"),
        ("AdamW", "unknown optimizer 'AdamW'"),
        ("adamw:", "adamw has no implementation ''"),
        ("adamw:fast", "adamw has no implementation 'fast'"),
        ("adafactor:fused", "adafactor has no implementation 'fused'"),
        ("lbfgs", "lbfgs takes a closure, so it runs forward and backward inside step()"),
        ("train.py", "unknown optimizer"),
        ("train.py:1", "unknown optimizer"),
    ],
)
def test_what_there_is_not(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_optimizer(text)
    assert message in error.value.message


@pytest.mark.parametrize("name", _CLASSES)
def test_every_name_is_a_class_of_pytorch_with_these_implementations(name: str) -> None:
    class_name, implementations = _CLASSES[name]
    if not hasattr(torch.optim, class_name):
        pytest.skip(f"PyTorch {torch.__version__} has no {class_name}")
    parameters = torch.optim.__dict__[class_name].__init__.__annotations__
    assert {"foreach", "fused"} & parameters.keys() == {"foreach", "fused"} & set(implementations)
