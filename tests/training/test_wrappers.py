"""A model in a wrapper that only runs it: plans go onto the model within, before it is wrapped and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import memopt_cli
from memopt_cli import Plan, SegmentPlan
from memopt_cli.errors import FileFormatError, StepError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.loading import load_model
from memopt_cli.measure.jobs import MeasureAnswer, MeasureJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.records import InputSpec, ModelSource, Trust
from memopt_cli.training.wrappers import compiled_notes

X = torch.ones(8, 6)
PLAN = Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="1")))


class Block(nn.Sequential):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)), nn.Linear(6, 2))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[assignment]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "torch.compile": compiled,
    "torch.compile of DistributedDataParallel": lambda model: compiled(DistributedDataParallel(model)),
    "DistributedDataParallel of torch.compile": lambda model: DistributedDataParallel(compiled(model)),
    "DataParallel of torch.compile": lambda model: nn.DataParallel(compiled(model)),
}
CODE = {
    "DistributedDataParallel": "DistributedDataParallel(model)",
    "DataParallel": "nn.DataParallel(model)",
    "torch.compile": "torch.compile(model)",
    "torch.compile of DistributedDataParallel": "torch.compile(DistributedDataParallel(model))",
    "DistributedDataParallel of torch.compile": "DistributedDataParallel(torch.compile(model))",
    "DataParallel of torch.compile": "nn.DataParallel(torch.compile(model))",
    "AveragedModel": "AveragedModel(model)",
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@pytest.fixture(autouse=True)
def _compiled_anew(process_group: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) == 6 and all(map(torch.equal, one, other))


@pytest.mark.slow
@every_wrapper
def test_a_plan_goes_onto_the_model_within_and_off_again(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = gradients(wrap(network())), network()
    wrapped = wrap(model)
    assert memopt_cli.apply_plan(wrapped, PLAN, verify=X) is wrapped
    assert memopt_cli.plan_of(wrapped) == memopt_cli.plan_of(model) == PLAN
    assert same(gradients(wrapped), plain)
    assert memopt_cli.remove_plan(wrapped) is wrapped
    assert memopt_cli.plan_of(model) == Plan()
    assert same(gradients(wrapped), plain)


@pytest.mark.slow
@every_wrapper
def test_a_model_may_have_its_plan_when_it_is_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(memopt_cli.apply_plan(network(), PLAN))
    assert memopt_cli.plan_of(wrapped) == PLAN
    assert same(gradients(wrapped), gradients(wrap(network())))


@pytest.mark.slow
def test_one_that_ran_without_its_plan_runs_with_it() -> None:
    wrapped = compiled(network())
    plain, runs = gradients(wrapped), []
    memopt_cli.apply_plan(wrapped, PLAN)
    wrapped.get_submodule("_orig_mod.0.0").register_forward_hook(lambda *_: runs.append(1))
    assert same(gradients(wrapped), plain)
    assert len(runs) == 2, "a segment runs twice"


@pytest.mark.parametrize("wrap", [WRAPPERS["DistributedDataParallel of torch.compile"]])
def test_a_search_is_of_the_model_within(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(nn.Sequential(*(Block(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(2)), nn.Linear(16, 2)))
    x = torch.ones(512, 16)
    found, summary = memopt_cli.spikingjelly.memory_optimization(wrapped, Block, x, level=1, return_summary=True)
    assert found is wrapped
    paths = [segment.path for segment in memopt_cli.plan_of(wrapped).segments]
    assert len(paths) == summary.gc_wrap_count > 0
    assert {*paths} <= {"0", "1"}
    name = type(wrapped).__name__
    assert f"The step is measured without {name}, and the memory of {name} is not counted." in summary.notes


def test_where_nothing_is_measured_nothing_is_said_of_a_measurement() -> None:
    _, summary = memopt_cli.spikingjelly.memory_optimization(compiled(network()), Block, level=1, return_summary=True)
    assert summary.gc_wrap_count == 2
    assert not any("measured without" in note for note in summary.notes)


def test_a_sharded_model_is_to_be_optimized_before() -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(StepError, match="before fully_shard"):
        memopt_cli.spikingjelly.memory_optimization(model, Block, X, level=1)
    plain = gradients(network())
    assert same([g.full_tensor() for g in gradients(memopt_cli.apply_plan(model, PLAN))], plain)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CODE)
def test_the_model_within_is_taken_from_a_file(name: str, tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), str(tmp_path / "wrapped.pt")
    wrap = {**WRAPPERS, "AveragedModel": AveragedModel}[name]
    torch.save(wrap(model), file)
    loaded = load_model(ModelSource(location=file))
    assert type(loaded.module) is nn.Sequential
    assert all(map(torch.equal, loaded.module.parameters(), model.parameters()))
    (note,) = loaded.notes
    assert note.startswith(f"The model is wrapped, {CODE[name]}. memopt measures and writes it without the wrapper")


@pytest.mark.parametrize("name", ["DataParallel", "DataParallel of torch.compile"])
@pytest.mark.parametrize("keeps_compiled", [False, True])
def test_the_model_within_is_taken_of_a_callable(
    name: str, keeps_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "torch.compile(model, backend='eager')" if "compile" in name else "model"
    code = f"import torch\nmodel = torch.nn.Linear(2, 2)\ndef build(): return torch.nn.DataParallel({made})\n"
    (tmp_path / "build.py").write_text(code)
    torch.save(nn.DataParallel(nn.Linear(2, 2)).state_dict(), tmp_path / "weights.pt")  # "module.weight"
    monkeypatch.chdir(tmp_path)
    source = ModelSource(location="build.py:build", weights="weights.pt", keeps_compiled=keeps_compiled)
    loaded = load_model(source)
    assert isinstance(loaded.module, nn.Linear) == (not keeps_compiled or name == "DataParallel")
    code = "nn.DataParallel(model)" if keeps_compiled else CODE[name]
    assert any(note.startswith(f"The model is wrapped, {code}.") for note in loaded.notes)


def test_one_that_belongs_to_its_process_cannot_be_unpickled(tmp_path: Path) -> None:
    torch.save(DistributedDataParallel(network()), tmp_path / "ddp.pt")
    distributed.destroy_process_group()
    try:
        with pytest.raises(FileFormatError) as failed:
            load_model(ModelSource(location=str(tmp_path / "ddp.pt"), trust=Trust(pickle=True)))
    finally:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert "save model.module with torch.save, or leave `--trust-pickle` out" in failed.value.hint


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("flags", [("--level", "1", "--max-slowdown", "none"), ("--budget", "80%")])
def test_a_plan_is_found_for_a_saved_wrapper(memopt: Callable[..., Any], flags: tuple[str, ...]) -> None:
    """Every plan was tried on the wrapper, under the names of the model within."""
    layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    torch.save(nn.DataParallel(nn.Sequential(*layers)), "wrapped.pt")
    done = memopt("optimize", "wrapped.pt", "-i", "256x16", "--no-recommend-batch", "--max-slowdown", "none", *flags)
    assert done.code == 0, done.err
    assert "nn.DataParallel(model)" in done.out
    written = memopt_cli.load("wrapped.memopt.pt")
    assert not isinstance(written, nn.DataParallel)
    assert memopt_cli.plan_of(written).segments


def compiled_in_place(model: nn.Sequential, backend: Callable[..., Any]) -> None:
    model[1].compile(backend=backend)


def compiled_part(model: nn.Sequential, backend: Callable[..., Any]) -> None:
    model[1] = torch.compile(model[1], backend=backend)  # type: ignore[assignment]


def compiled_forward(model: nn.Sequential, backend: Callable[..., Any]) -> None:
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]


@pytest.mark.parametrize("compile_some", [compiled_in_place, compiled_part, compiled_forward])
@pytest.mark.parametrize("keeps_compiled", [False, True])
def test_compiled_parts_run_as_they_are_written(compile_some: Callable[..., None], keeps_compiled: bool) -> None:
    """Steps without data broke off in the compiler; ``memopt verify`` alone compares what is compiled."""
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        compile_some(model, backend)
        return model

    assert len(compiled_notes(build())) == 1
    assert not compiled_notes(network())
    source = ModelSource(location="", keeps_compiled=keeps_compiled)
    subject = Subject(source=source, spec=InputSpec(tensors=(parse_tensor("8x6"),), source="here"))
    with LocalSession(subject, 60.0, build=build) as session:
        assert isinstance(session.ask(MeasureJob(plan=Plan(), steps=1)), MeasureAnswer)
    assert bool(seen) == keeps_compiled
