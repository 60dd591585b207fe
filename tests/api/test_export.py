"""A plan as plain PyTorch code: it does what the plan does, and says what it does not."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memopt_cli
from memopt_cli.errors import OptionError
from memopt_cli.records import StepSettings
from memopt_cli.trace import count_step
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

PLAN_OR_PATH = "Pass a memopt_cli.Plan, such as the .plan of a result, or the path of its file."


@pytest.mark.parametrize(("given", "told"), [(None, "None"), (3, "3"), ({}, "a dict"), (nn.Linear, "the class Linear")])
def test_what_is_no_plan_is_said(given: Any, told: str) -> None:
    for call in (memopt_cli.export_plan, lambda plan: memopt_cli.apply_plan(nn.Linear(2, 2), plan)):
        with pytest.raises(OptionError) as caught:
            call(given)
        assert str(caught.value) == f"plan is {told}\n{PLAN_OR_PATH}"


class Block(Parts, up=lambda: nn.Linear(16, 64), norm=lambda: nn.BatchNorm1d(64), down=lambda: nn.Linear(64, 16)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.tanh(self.norm(self.up(x))), 0.3, self.training))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layers(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def exported(plan: memopt_cli.Plan) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(memopt_cli.export_plan(plan), "segments.py", "exec"), names)
    return names


def effects(model: nn.Module) -> list[Tensor]:
    """Of two steps: gradients and buffers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    for _ in range(2):
        (model(torch.randn(8, 16)) ** 2).mean().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *(b.clone() for b in model.buffers())]


def plan(*segments: Any, packed: bool = False) -> memopt_cli.Plan:
    return memopt_cli.Plan(segments=tuple(memopt_cli.SegmentPlan(**s) for s in segments), packed=packed)


PLANS = {
    "modules": plan({"path": "blocks.0"}, {"path": "blocks.2"}),
    "nested": plan({"path": "blocks.1"}, {"path": "blocks.1.up"}),
    "root": plan({"path": ""}),
    "kept": plan({"path": "blocks.0", "keep": ("aten::addmm#2",)}, {"path": "blocks.1", "keep": ("aten::addmm",)}),
    "runs": plan({"path": "layers.0-3"}, {"path": "layers.4-7"}),
    "runs in runs": plan({"path": "layers.0-7"}, {"path": "layers.0-7.0-3"}, {"path": "layers.0-7.0-3.2"}),
    "kept in a run": plan({"path": "layers.2-5", "keep": ("aten::addmm",)}),
    "in a run": plan({"path": "layers.0-3.2"}),
    "none": plan(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_it_computes_the_same_twice(name: str) -> None:
    model = exported(PLANS[name])["checkpoint_segments"](made())
    assert all(map(torch.equal, effects(model), effects(made())))
    original = made()
    effects(original)
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.ones(2, 16)), original.eval()(torch.ones(2, 16)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modules", "root", "runs"])
def test_its_peak_is_about_that_of_the_plan(name: str) -> None:
    def peak(model: nn.Module) -> int:
        step = TrainingStep(model=model, args=(torch.randn(4096, 16),), kwargs={}, settings=StepSettings())
        return count_step(step).tensor_peak_bytes

    plain, planned = exported(PLANS[name])["checkpoint_segments"](made()), memopt_cli.apply_plan(made(), PLANS[name])
    assert peak(plain) <= 1.02 * peak(planned)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "again"), [((), 1), (("aten::addmm#2",), 1), (("aten::addmm#1",), 0)])
def test_what_is_kept_is_not_computed_again(keep: tuple[str, ...], again: int) -> None:
    model = exported(plan({"path": "blocks.0", "keep": keep}))["checkpoint_segments"](made())
    with Products() as products:
        model(torch.randn(8, 16)).sum().backward()
    assert products.count == 6 + 4 + again  # the second of the block is not needed again


def test_what_has_no_plain_form_is_named() -> None:
    given = plan(
        {"path": "blocks.0", "chunks": 4, "compressor": "bit"},
        {"path": "blocks.1", "keep": ("aten::addmm",)},
        {"path": "blocks.1.up"},
        {"path": "layers.0-3", "keep": ("aten::addmm",)},
        {"path": "head", "chunks": 8, "through_loss": True},
        packed=True,
    )
    head = memopt_cli.export_plan(given).partition('"""')[0]
    assert [line.removeprefix("# ") for line in head.splitlines() if line.startswith("# - ")] == [
        "- what is saved for backward outside segments is not packed",
        "- blocks.0: run whole, not in 4 chunks",
        "- blocks.0: its input is stored as it is, not packed (bit)",
        "- blocks.1: recomputes outputs that the plan keeps (aten::addmm)",
        "- head: no segment; the plan runs it in 8 chunks through the loss",
    ]


def test_names_are_data() -> None:
    hostile = "a\"\"\"\nimport os; os.abort()\n'''\\"
    inner = f"{hostile}.b"
    given = plan({"path": hostile, "chunks": 2, "keep": (hostile,)}, {"path": inner, "keep": (hostile,)}, packed=True)
    assert exported(given)["SEGMENTS"] == {hostile: (), inner: (hostile,)}


def test_it_needs_no_memopt() -> None:
    nodes = list(ast.walk(ast.parse(memopt_cli.export_plan(PLANS["kept"]))))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "torch" in imported
    assert not any(name.startswith("memopt") for name in imported)


class Remembers(nn.Module):
    """A buffer that each forward replaces, another that it writes to, and a third that is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("replaced", torch.zeros(16))
        self.register_buffer("written", torch.zeros(16))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.replaced + self.written.clone()
        mean = y.detach().mean(0)
        self.late = mean if self.late is None else self.late + mean
        self.replaced = torch.tanh(mean)
        self.written += mean
        return y * self.late


class SpectralNorm(Parts, layer=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Dashes(Parts, parts=lambda: nn.ModuleDict({"res-block": Block(), "a-b": nn.Sequential(Block(), Block())})):
    def forward(self, x: Tensor) -> Tensor:
        return self.parts["a-b"](self.parts["res-block"](x))


class Again(nn.Sequential):
    """The same layer at two places."""

    def __init__(self) -> None:
        layer = nn.Linear(16, 16)
        super().__init__(layer, nn.Tanh(), layer, nn.Tanh())


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Remembers, plan({"path": ""})),
        (SpectralNorm, plan({"path": "layer"})),
        (Dashes, plan({"path": "parts.res-block"}, {"path": "parts.a-b.0-1"})),
        (Again, plan({"path": "0-1"}, {"path": "2-3"})),
    ],
)
def test_buffers_and_names_of_any_kind(kind: type[nn.Module], given: memopt_cli.Plan) -> None:
    torch.manual_seed(0)
    original = kind()
    model = exported(given)["checkpoint_segments"](copy.deepcopy(original))
    for _ in range(3):
        assert all(map(torch.equal, effects(model), effects(original)))


@pytest.mark.parametrize("missing", ["blocks.7", "layers.0-9", "layers.x-y", "blocks.0-1"])
def test_what_the_model_lacks_is_refused_and_nothing_done(missing: str) -> None:
    model = made()
    with pytest.raises(AttributeError, match=missing):
        exported(plan({"path": "blocks.0"}, {"path": missing}))["checkpoint_segments"](model)
    assert "forward" not in vars(model.blocks[0])


def test_a_segment_is_not_made_twice() -> None:
    model = exported(PLANS["runs"])["checkpoint_segments"](made())
    with pytest.raises(RuntimeError, match="is a segment already"):
        exported(plan({"path": "blocks.0"}, {"path": "layers.4-7"}))["checkpoint_segments"](model)
    assert "forward" not in vars(model.blocks[0])


def test_a_copy_has_segments_of_its_own() -> None:
    model = exported(PLANS["runs"])["checkpoint_segments"](made())
    copied = copy.deepcopy(model)
    assert copied.layers.forward.args[0] is copied.layers
    assert all(map(torch.equal, effects(copied), effects(made())))
