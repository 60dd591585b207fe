"""Plans that compile the model: put on it and taken off, in a file and out of it, each with a budget of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import MemoptError, PlanError, UsageError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.records import CompilePlan, FileHeader, InputDimension, InputSpec, Plan, PlanRange, SegmentPlan
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.runtime.private_torch import is_compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKEND = "aot_eager_decomp_partition"
"""Divides graphs as inductor does, and needs no C++ compiler."""
HEADER = FileHeader(
    schema_version=2,
    memopt="0",
    torch="2",
    model="net.pt",
    sha256=None,
    spec=InputSpec(source="here"),
    seed=0,
    device="cpu",
)


def made() -> nn.Sequential:
    """Three blocks of PyTorch's own classes alone, in whose files the compiler looks for nothing to compile."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))


def compiling(budget: float | None = None, *paths: str, **settings: Any) -> Plan:
    how = CompilePlan(**{"backend": BACKEND, "activation_memory_budget": budget, **settings})
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths), compile=how)


def kept_bytes(model: nn.Module) -> int:
    """Return what the compiled forward of ``model`` keeps for backward."""
    output = model(torch.randn(64, 8))
    kept: tuple[Tensor, ...] = output.grad_fn.saved_tensors  # of what is not compiled, an attribute that is missing
    return sum(tensor.nbytes for tensor in kept)


@pytest.mark.slow
def test_each_model_has_its_own_budget() -> None:
    models = [memopt_cli.apply_plan(made(), compiling(budget)) for budget in (None, 0.0, 1.0, 0.0)]
    kept = [kept_bytes(model) for model in models]
    assert kept[0] == kept[2] > kept[1] == kept[3]
    assert functorch.activation_memory_budget == 1.0
    with functorch.patch(activation_memory_budget=0.0):
        torch._dynamo.reset()
        assert kept_bytes(models[2]) == kept[2]


@pytest.mark.slow
def test_segments_are_checkpoint_regions_in_the_compiled_model() -> None:
    plain, regions = made(), memopt_cli.apply_plan(made(), compiling(None, "0", "1", "2"))
    memopt_cli.apply_plan(plain, compiling())
    assert kept_bytes(regions) < kept_bytes(plain)
    x = torch.randn(4, 8)
    for model in (plain, regions):
        model.zero_grad()
        model(x).sum().backward()
    for one, other in zip(plain.parameters(), regions.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_a_plan_compiles_it_leaves_uncompiled() -> None:
    model, plan = made(), compiling(0.5, "0")
    assert memopt_cli.apply_plan(model, plan) is model
    assert is_compiled(model)
    assert memopt_cli.plan_of(model) == plan
    memopt_cli.remove_plan(model)
    assert not is_compiled(model)
    assert memopt_cli.plan_of(model).is_empty
    assert vars(model).keys() == vars(made()).keys()


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"backend": "nope"}, UsageError, "no backend 'nope' here"),
        ({"backend": "inductor", "mode": "fastest"}, PlanError, "Unrecognized mode=fastest"),
        ({"backend": "eager", "budget": 0.5}, UsageError, "eager does not read activation_memory_budget"),
        ({"backend": "eager", "mode": "default"}, UsageError, "eager has no modes"),
        ({"budget": 1.5}, UsageError, "activation_memory_budget is 1.5; it must be from 0 to 1"),
    ],
)
def test_a_plan_that_cannot_compile_leaves_the_model_as_it_was(
    settings: dict[str, Any], kind: type[MemoptError], text: str
) -> None:
    model = made()
    with pytest.raises(kind, match=text):
        memopt_cli.apply_plan(model, compiling(settings.pop("budget", None), "0", **settings))
    assert not is_compiled(model)
    assert memopt_cli.plan_of(model).is_empty


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    model = made()
    model.compile(backend="eager")
    with pytest.raises(PlanError, match="compiled already"):
        memopt_cli.apply_plan(model, compiling())
    assert is_compiled(memopt_cli.remove_plan(model))


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.DataParallel(torch.compile(model))])
def test_what_is_compiled_around_is_not_compiled_again(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = made()
    with pytest.raises(PlanError, match="compiled already"):
        memopt_cli.apply_plan(wrap(model), compiling(0.5))
    assert not is_compiled(model)


def test_any_number_of_models_is_compiled() -> None:
    count, stats = torch._dynamo.config.recompile_limit + 1, torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for width in range(count):
        memopt_cli.apply_plan(nn.Linear(4, 1 + width), compiling(backend="eager"))(torch.ones(2, 4))
    assert stats["unique_graphs"] - before == count


def test_hooks_that_the_model_gets_after_its_first_call_are_called() -> None:
    model, called = memopt_cli.apply_plan(made(), compiling(backend="aot_eager")), list[str]()
    x = torch.randn(4, 8, requires_grad=True)
    model(x)
    hooks = [
        model.register_forward_pre_hook(lambda *given: called.append("before")),
        model.register_forward_hook(lambda *given: called.append("after")),
        model.register_full_backward_hook(lambda *given: called.append("backward")),
    ]
    model(x).sum().backward()
    assert called == ["before", "after", "backward"]
    for hook in hooks:
        hook.remove()
    model(x).sum().backward()
    assert called == ["before", "after", "backward"]


def test_lengths_are_not_compiled_each() -> None:
    by = InputDimension(dim="S", argument=0, axis=1)
    with pytest.raises(UsageError, match="every length would be compiled again"):
        Plan(by=by, ranges=(PlanRange(up_to=8),), compile=CompilePlan(backend=BACKEND))


def test_it_is_in_the_file_of_the_plan_and_older_files_have_none(tmp_path: Path) -> None:
    path, plan = tmp_path / "net.plan.yaml", compiling(0.5, "0")
    path.write_bytes(plan_yaml(HEADER, plan, 3))
    assert read_plan(path)[1] == plan
    path.write_bytes(plan_yaml(HEADER, plan.eager, 3))
    assert "compile" not in path.read_text()
    assert read_plan(path)[1] == plan.eager


def test_a_saved_model_is_compiled_when_it_is_loaded(tmp_path: Path) -> None:
    model, plan = memopt_cli.apply_plan(made(), compiling(0.5, "0")), compiling(0.5, "0")
    torch.save(model, tmp_path / "net.pt")
    loaded = memopt_cli.load(tmp_path / "net.pt")
    assert is_compiled(loaded)
    assert memopt_cli.plan_of(loaded) == plan
    copied = copy.deepcopy(loaded)
    assert memopt_cli.plan_of(copied) == plan
    assert not is_compiled(copied)


def test_a_plan_on_a_copy_leaves_no_settings_of_the_plan_before() -> None:
    copied, plan = copy.deepcopy(memopt_cli.apply_plan(made(), compiling())), compiling(None, "0").eager
    with pytest.raises(PlanError):
        memopt_cli.apply_plan(copied, compiling(None, "nowhere").eager)
    assert memopt_cli.plan_of(copied) == compiling()
    assert memopt_cli.plan_of(memopt_cli.apply_plan(copied, plan)) == plan
    copied = copy.deepcopy(memopt_cli.apply_plan(made(), compiling()))
    copied.compile(backend="eager")
    assert is_compiled(memopt_cli.remove_plan(copied))
    running = memopt_cli.apply_plan(memopt_cli.apply_plan(made(), compiling()), plan)
    assert memopt_cli.plan_of(running) == compiling(None, "0")


def test_a_file_compiles_by_nothing_but_settings(tmp_path: Path) -> None:
    model = memopt_cli.apply_plan(made(), compiling())
    vars(model)["_memopt_compiled"] = {"backend": BACKEND, "options": {"run": "this"}}
    torch.save(model, tmp_path / "net.pt")
    with pytest.raises(UsageError, match="compile in the model's plan has an unknown key 'options'"):
        memopt_cli.load(tmp_path / "net.pt")
