"""A plan goes onto a model whole or not at all, and comes off without a trace."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import OptionError, PlanError, StepError, VerificationError
from memopt_cli.records import InputSpec, Plan, SegmentPlan, TensorSpec
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.runtime import GCContainer, SegmentConfig, TCGCContainer, segment_of
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan, replacing_plan
from memopt_cli.training.user_step import join_models
from tests.zoo.models import Parts
from tests.zoo.records import a_header


class Splitting(nn.Sequential):
    def __spatial_split__(self) -> list[nn.Module]:
        return list(self)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Splitting(nn.Linear(4, 4), nn.Tanh()), nn.ModuleList([nn.Linear(4, 4)]))


def plan(*paths: str) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths))


def test_a_plan_and_the_runtime_say_the_same_of_a_segment() -> None:
    planned = {field.name: field.default for field in fields(SegmentPlan) if field.name != "path"}
    others = ("path", "recompute", "packs")  # of what autograd saves, and no segment
    running = {field.name: field.default for field in fields(SegmentConfig) if field.name not in others}
    assert planned == running


def test_every_field_reaches_the_segment() -> None:
    model = net()
    segments = (
        SegmentPlan(path="0", compressor="bit", chunks=3, axis=1, seq_inputs=2, seq_outputs=4),
        SegmentPlan(path="1", compressor="sparse", spatial_split=True),
    )
    assert apply_plan(model, Plan(segments=segments)) is model
    assert segment_of(model[0]) == SegmentConfig(compressor="bit", chunks=3, axis=1, seq_inputs=2, seq_outputs=4)
    assert segment_of(model[1]) == SegmentConfig(compressor="sparse", spatial_split=True)
    assert isinstance(model[0], TCGCContainer)
    assert not isinstance(model[1], TCGCContainer)


def test_root_and_nested_targets() -> None:
    model = apply_plan(net()[:2], plan("", "1", "1.0"))
    assert all(isinstance(m, GCContainer) for m in (model, model[1], model[1][0]))
    assert segment_of(model[0]) is None
    model(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("0", "1.7"), "the plan names module '1.7', which Sequential does not have"),
        (("0", "nowhere.at.all"), "the plan names module 'nowhere.at.all'"),
        (("0", ".."), "the plan names module '..', which Sequential does not have"),
        (("0.",), "the plan names module '0.', which Sequential does not have"),
        (("0", "_modules.1"), "the plan names module '_modules.1'"),
        (("0", "2"), "module '2' cannot be a segment: ModuleList has no forward"),
        (("1", "0", "1"), "the plan names module '1' twice"),
    ],
)
def test_all_or_nothing(paths: tuple[str, ...], message: str) -> None:
    model = net()
    before = [(type(m), sorted(vars(m))) for m in model.modules()]
    with pytest.raises(PlanError) as error:
        apply_plan(model, plan(*paths))
    assert message in str(error.value)
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == before


def test_a_plan_of_a_model_that_is_wrapped_now_says_where_it_is() -> None:
    wrapped = nn.ModuleDict({"base_model": nn.ModuleDict({"model": net()})})
    with pytest.raises(PlanError, match=r"'1\.0', which ModuleDict does not have") as error:
        apply_plan(wrapped, plan("1.0"))
    assert error.value.hint.endswith("or to model.get_submodule('base_model.model').")


@pytest.mark.parametrize("path", ["base_model.model.1.0", "base_model.model.0-1"])
def test_a_plan_of_a_wrapped_model_says_that_it_belongs_to_the_wrapper(path: str) -> None:
    with pytest.raises(PlanError) as error:
        apply_plan(net(), plan(path))
    assert error.value.hint.startswith(
        "Without 'base_model.model.', the model has it. If the plan was made for a model"
    )
    apply_plan(nn.ModuleDict({"base_model": nn.ModuleDict({"model": net()})}), plan(path))


@pytest.mark.parametrize("path", ["net.1.0", "net.0-1"])
def test_a_plan_of_a_step_says_how_to_name_the_model(path: str) -> None:
    for model, owner in ((net(), "Sequential"), (join_models({"other": net()}), "the step")):
        with pytest.raises(PlanError, match=f"'{path}', which {owner} does not have") as error:
            apply_plan(model, plan(path))
        assert error.value.hint.endswith("If 'net' is this one: memopt_cli.apply_plan({\"net\": model}, plan).")
    apply_plan(join_models({"net": net()}), plan(path))


def test_a_plan_of_a_model_on_a_step_says_which_model_has_it() -> None:
    with pytest.raises(PlanError, match=r"'1\.0', which the step does not have") as error:
        apply_plan(join_models({"net": net()}), plan("1.0"))
    assert error.value.hint == "net has it: apply the plan to that model."


def test_a_path_is_no_model() -> None:
    with pytest.raises(OptionError, match=r"model is 'net.pt', not a torch.nn.Module\n.*memopt_cli.load\(path\)"):
        memopt_cli.apply_plan("net.pt", plan("1"))  # type: ignore[type-var]


def test_a_failed_plan_leaves_an_earlier_one_alone() -> None:
    model = apply_plan(net(), plan("1"))
    with pytest.raises(PlanError):
        apply_plan(model, plan("0", "1"))
    assert segment_of(model[1]) is not None
    assert segment_of(model[0]) is None


@pytest.mark.parametrize("second", [plan("0"), Plan(packed=True), Plan(place="disk")])
def test_a_plan_over_another_is_told_how_to_take_that_off(second: Plan) -> None:
    model = apply_plan(net(), replace(plan("0"), packed=True))
    with pytest.raises(PlanError, match=r"^the model has a plan already, which memopt_cli.plan_of\(model\)") as caught:
        apply_plan(model, second)
    assert "memopt_cli.remove_plan(model)" in caught.value.hint
    apply_plan(remove_plan(model), second)


def test_a_module_of_two_names_is_one_module() -> None:
    model = net()
    model.append(model[0])
    with pytest.raises(PlanError, match="the plan names module '3' twice, the first time as '0'"):
        apply_plan(model, plan("0", "3"))
    assert segment_of(model[0]) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compressor": "zip"}, "unknown compressor 'zip'; known: null, boolean, uint8, bit, sparse, two-valued"),
        ({"compressor": "own"}, "its compressor is own, but Linear has no x_compressor"),
        ({"chunks": 0}, "chunks must be 1 or more, not 0"),
        ({"chunks": -2}, "chunks must be 1 or more, not -2"),
        ({"seq_inputs": -1}, "seq_inputs must be 1 or more, not -1"),
        ({"seq_outputs": 0}, "seq_outputs must be 1 or more, not 0"),
        ({"spatial_split": True}, "spatial_split is on, but Linear has no method __spatial_split__"),
    ],
)
def test_what_a_hand_edited_plan_may_say(fields: dict[str, Any], reason: str) -> None:
    model = net()
    with pytest.raises(PlanError) as error:
        apply_plan(model, Plan(segments=(SegmentPlan(path="1"), SegmentPlan(path="0", **fields))))
    assert str(error.value).startswith(f"module '0' cannot be a segment: {reason}")
    assert "'0' in the plan" in error.value.hint
    assert segment_of(model[1]) is None


def test_split_or_in_chunks() -> None:
    bad = Plan(segments=(SegmentPlan(path="1", spatial_split=True, chunks=2),))
    with pytest.raises(PlanError, match="split in space or run in 2 chunks, not both"):
        apply_plan(net(), bad)


def test_the_root_is_named() -> None:
    with pytest.raises(PlanError, match=r"module '\(root\)' cannot be a segment"):
        apply_plan(nn.ModuleList(), plan(""))


def test_removal_restores_the_classes() -> None:
    model = net()
    before = [(type(m), sorted(vars(m))) for m in model.modules()]
    apply_plan(model, plan("", "0", "1", "1.0"))
    assert remove_plan(model) is model
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == before
    assert remove_plan(model) is model


def test_it_is_public() -> None:
    assert memopt_cli.apply_plan(net(), plan()).__class__ is nn.Sequential
    assert memopt_cli.remove_plan is remove_plan


class Ending(Parts, linear=lambda: nn.Linear(4, 4)):
    """Ends in an error where it is recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if memopt_cli.runtime.is_recomputing():
            raise ValueError("not again")
        return self.linear(x).tanh()


def test_an_error_in_the_comparison_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(Ending())
    with pytest.raises(StepError, match=r"with it the step failed: ValueError: not again \(.*test_apply.py, line"):
        memopt_cli.apply_plan(model, plan("0"), verify=torch.ones(3, 4))
    assert segment_of(model[0]) is None


class Masked(Parts, linear=lambda: nn.Linear(4, 4)):
    """Computes something else in a recomputation where an item of its input is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2 if memopt_cli.runtime.is_recomputing() and bool((x == 0).any()) else 1
        return (self.linear(x) * factor).tanh()


def test_a_plan_is_compared_on_the_inputs_given_before_it_stays() -> None:
    model = nn.Sequential(Masked(), nn.Dropout(0.5))
    model[0].linear.weight.grad = kept = torch.ones(4, 4)
    full, padded = torch.ones(3, 4), torch.ones(5, 4).index_fill(0, torch.tensor([4]), 0)
    before = torch.get_rng_state()
    with pytest.raises(VerificationError, match=r"gradient of .* for inputs of the shape 5x4"):
        memopt_cli.apply_plan(model, plan("0"), verify=[(full,), {"input": padded}])
    assert segment_of(model[0]) is None
    assert model[0].linear.weight.grad is kept
    assert torch.equal(torch.get_rng_state(), before)
    assert memopt_cli.apply_plan(model, plan("0"), verify=full) is model
    assert segment_of(model[0]) == SegmentConfig()
    assert model[0].linear.weight.grad is kept


def test_a_dictionary_in_a_tuple_is_explained_where_the_model_fails_on_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(StepError, match=r"\nverify=\[batch\] calls model"):
        memopt_cli.apply_plan(model, plan("0"), verify=[({"input": torch.ones(3, 4)},)])
    assert memopt_cli.plan_of(model) == memopt_cli.Plan()
    memopt_cli.apply_plan(model, plan("0"), verify=[{"input": torch.ones(3, 4)}])


def test_inputs_that_the_model_rejects_leave_it_as_it_was() -> None:
    model = net()[:2]
    with pytest.raises(StepError, match=r"module '0' \(Linear\) rejected its input 3x5@float32.*\n.* verify="):
        memopt_cli.apply_plan(model, plan("0"), verify=torch.ones(3, 5))
    assert segment_of(model[0]) is None


def test_a_plan_may_be_given_by_its_file(tmp_path: Path) -> None:
    header = a_header(spec=InputSpec(tensors=(TensorSpec(shape=(2, 4)),), source="-i"))
    (tmp_path / "net.plan.yaml").write_bytes(plan_yaml(header, plan("0"), 3))
    model = memopt_cli.apply_plan(net(), tmp_path / "net.plan.yaml")
    assert memopt_cli.plan_of(model).segments == plan("0").segments


def test_a_plan_brings_the_optimizer_into_backward_and_out_again() -> None:
    model = net()[:2]
    optimizer = torch.optim.AdamW(model.parameters())
    given = Plan(segments=(SegmentPlan(path="1"),), in_backward=True)
    memopt_cli.apply_plan(model, given, optimizer=optimizer)
    assert memopt_cli.plan_of(model) == given
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    remove_plan(model)
    assert memopt_cli.plan_of(model) == Plan()
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_that_has_its_segments_takes_the_optimizer_alone() -> None:
    model = apply_plan(net()[:2], plan("1"))
    optimizer = torch.optim.SGD(model.parameters())
    memopt_cli.apply_plan(model, Plan(in_backward=True), optimizer=optimizer)
    assert memopt_cli.plan_of(model) == Plan(segments=(SegmentPlan(path="1"),), in_backward=True)


def test_a_model_of_torch_jit_is_to_be_loaded_by_memopt(tmp_path: Path) -> None:
    torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).save(tmp_path / "script.pt")
    plan = Plan(segments=(SegmentPlan(path="0"),))
    for unfit in (plan, Plan(packed=True)):
        with pytest.raises(PlanError, match="the model is TorchScript") as refused:
            apply_plan(torch.jit.load(tmp_path / "script.pt"), unfit)
        assert "memopt_cli.load('script.pt')" in refused.value.hint
    assert plan_of(apply_plan(memopt_cli.load(tmp_path / "script.pt"), plan)).segments == plan.segments


def test_without_an_optimizer_such_a_plan_is_refused() -> None:
    model = net()
    with pytest.raises(PlanError, match="runs the optimizer in backward, but no optimizer is given") as refused:
        memopt_cli.apply_plan(model, Plan(segments=(SegmentPlan(path="0"),), in_backward=True))
    assert "optimizer=optimizer" in (refused.value.hint or "")
    assert memopt_cli.plan_of(model) == Plan()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(torch.optim.LBFGS, "closure"), (lambda _: torch.optim.SGD(net().parameters()), "no parameter of the model")],
)
def test_an_optimizer_that_cannot_run_in_backward_leaves_the_model_as_it_was(make: Any, reason: str) -> None:
    model = net()
    optimizer = make(model.parameters())
    with pytest.raises(PlanError, match=reason) as refused:
        memopt_cli.apply_plan(model, Plan(segments=(SegmentPlan(path="0"),), in_backward=True), optimizer=optimizer)
    assert type(optimizer).__name__ in refused.value.message
    assert memopt_cli.plan_of(model) == Plan()


class _Tells(nn.Sequential):
    @property
    def device(self) -> str:
        raise RuntimeError("a property was asked")


def test_a_plan_that_changes_nothing_is_said_to() -> None:
    for model in (net(), {"net": net()}):
        with pytest.warns(UserWarning, match="^The plan changes nothing: it has no segments") as warned:
            assert memopt_cli.apply_plan(model, Plan()) is model
        assert [warning.filename for warning in warned] == [__file__]


def test_a_path_of_a_plan_asks_no_property() -> None:
    with pytest.raises(PlanError, match=r"the plan names module 'device\.x'"):
        apply_plan(_Tells(nn.Linear(2, 2)), Plan(segments=(SegmentPlan(path="device.x"),)))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_plan_that_was_taken_off_is_put_back_where_something_fails(error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(segments=(SegmentPlan(path="0-1"), SegmentPlan(path="2", chunks=2)), packed=True, in_backward=True)
    apply_plan(model, plan, optimizer)
    carried = plan_of(model)

    def fails() -> None:
        with replacing_plan(model):
            assert plan_of(model).is_empty
            apply_plan(model, Plan(segments=(SegmentPlan(path="1"),)))
            raise error

    with pytest.raises(error):
        fails()
    assert plan_of(model) == carried
    assert {segment.path for segment in carried.segments} == {"0-1", "2"}
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "updated in backward"


@pytest.mark.parametrize("plan", [Plan(), Plan(segments=(SegmentPlan(path="1"),))])
def test_a_plan_that_was_taken_off_stays_off_where_another_is_put_on(plan: Plan) -> None:
    model, carried = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Plan(segments=(SegmentPlan(path="0"),))
    apply_plan(model, carried)
    with replacing_plan(model):
        assert not plan_of(model)
        apply_plan(model, plan)
    assert plan_of(model) == (plan or carried)
