"""Runs of a Sequential's children act as one module, and leave no trace in its names."""

from __future__ import annotations

import base64
import copy
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import SegmentConfig, group_layers, named_parts, segment_of
from memopt_cli.runtime.module_state import RUNS_KEY
from memopt_cli.runtime.private_torch import WRITES_TWICE
from memopt_cli.runtime.runs import Run
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan
from memopt_cli.verification.effects import bit_equal
from tests.zoo.watching import saved_bytes


def flat() -> nn.Sequential:
    """Convolutions in a row, as in VGG: 13 children."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Flatten())


def plan(*paths: str) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths))


def effects(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    output = model(torch.randn(2, 3, 12, 12))
    output.square().sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **gradients, **{name: t.clone() for name, t in model.named_buffers()}}


RUNS = ("0-3", "4-7", "8-12")


@pytest.mark.slow
@pytest.mark.parametrize("paths", [RUNS, ("4-7",), ("1-5",), (*RUNS, ""), ("", "4-7"), ("4-7", "4-7.4"), ("5-7", "0")])
def test_a_step_is_the_same_to_the_bit(paths: tuple[str, ...]) -> None:
    model = flat()
    planned = apply_plan(copy.deepcopy(model), plan(*paths))
    assert bit_equal(effects(model), effects(planned))
    x = torch.randn(2, 3, 12, 12)
    assert saved_bytes(lambda: planned(x)) < saved_bytes(lambda: model(x))
    assert {segment.path for segment in plan_of(planned).segments} == set(paths)


def test_names_and_children_stay_as_they_were() -> None:
    model = flat()
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    apply_plan(model, plan(*RUNS))
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert len(model) == 13
    assert isinstance(model[2], nn.ReLU)
    assert type(model[:3]) is not Run
    assert [name for name, _ in named_parts(model)][:6] == ["", "0-3", "0-3.0", "0-3.1", "0-3.2", "0-3.3"]


def test_it_comes_off_without_a_trace() -> None:
    model = flat()
    before = set(vars(model))
    remove_plan(apply_plan(model, plan("", *RUNS)))
    assert type(model) is nn.Sequential
    assert set(vars(model)) == before


def test_modes_of_children_are_their_own() -> None:
    model = flat()
    model[1].eval()
    apply_plan(model, plan(*RUNS))
    assert [m.training for m in model] == [True, False, *[True] * 11]
    model.eval()
    effects(model)
    assert not any(m.training for m in model)


def test_an_exchanged_child_is_the_one_that_runs() -> None:
    model = apply_plan(flat(), plan(*RUNS))
    original = remove_plan(copy.deepcopy(model))
    new = nn.Conv2d(3, 8, 3)
    model[0], original[0] = new, copy.deepcopy(new)
    assert bit_equal(effects(original), effects(model))


def test_a_child_that_is_gone_does_not_run() -> None:
    model = apply_plan(flat(), plan(*RUNS))
    original = remove_plan(copy.deepcopy(model))
    del model[10], original[10]
    assert bit_equal(effects(original), effects(model))


def test_saved_and_loaded_without_trust(tmp_path: Path) -> None:
    model = nn.ModuleDict({"features": flat()})["features"]
    torch.save(apply_plan(model, plan("", *RUNS)), tmp_path / "model.pt")
    loaded = memopt_cli.load(tmp_path / "model.pt")
    assert plan_of(loaded) == plan_of(model)
    assert bit_equal(effects(loaded), effects(model))
    assert type(remove_plan(loaded)) is nn.Sequential


SAVED_BY_VERSION_1 = (
    "c-pm8OHUgy5Kais<sDv9sd^@dMy0=@QV&Q}3O($lvK+6Iv9fEgUqBBll|w7?uR9(>110T^)2_eoo0n(CKbAx#D^mw1O4WB!2UW@R_1R}<Vl9"
    "g+X`@7#ms#(wIm_2utyXYcX{E=ub)RqInbq9!N(Sk?Z8s!g!#EnH^HP(arn5Gh)d(mb(A^`=ybQJ@7@k!blx8eLB(uxkeh%^j^25dChP#5*P"
    "BJiN;_ZqMrYxlh%3z*fTp^t-J}H5AtGz+K`^@aYWDOE?oEYWVD3;}Og<ZeQcM>}??upq3nZ0>Iup1SCCG)Yj8HwJ$6!G$gfA>sqOt!F_B<nt"
    "v%}d%M^4&u6S+H#q?kAxSJV;hx-7_aU#2x*`&4cXDt0@gH7K`>sbh=Pv{9~wnQc<HTQ^Znw+r{B%Bk;i<h+v$6zSjL2+2`1-Yn~dGedQW5d)"
    "T|PN6i_u?xEelQUe`GJ%^R#7^q#aehJh7pc@9dK%kofx(1+vfyx5P8z?X6HgQO~oZI97=5nRRl~Dywwmo_EWIn=S+Mw5q67wx;$iqUXC2sOg"
    ">d5=^MO!Y64!FnCWlnm$C5g*8u5dZCf4&KWs55MHhE9d4aA>?YE?>r@#+Axf6An>N{6(8keyjXNi}YSvrgR-c;x=c1iD8CpC#2@-ongK%RhZ"
    "@*2sxSJ#31j<-$cr~m+#@<kOu)YocN$9;ipu40DQE@fRpPHSwjTtyTyi2$>@)_hpG0{_-pWb4LO4YID%t1iE-%Tu>TtZt*aI"
)
"""A Sequential of three with a segment on its first two, as pickle wrote it, compressed."""


def test_a_file_of_version_1_still_loads() -> None:
    written = zlib.decompress(base64.b85decode(SAVED_BY_VERSION_1))
    model = pickle.loads(written)
    assert plan_of(model) == Plan(segments=(SegmentPlan(path="0-1"),))
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(model(x), x.tanh().sigmoid().tanh())
    names = ("GroupedSequential", "Run", "restore_segment", "_memopt_runs")  # by which what is written today is found
    for name in names:
        assert (name.encode() in pickle.dumps(model, protocol=2)) is (name.encode() in written) is True
    assert type(remove_plan(model)) is nn.Sequential


@pytest.mark.slow
def test_compiled() -> None:
    model = flat()
    for module in model:
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a compiled model draws in its own way
    planned = apply_plan(copy.deepcopy(model), plan(*RUNS))
    expected = effects(model)
    # PyTorch 2.8 traces no ``vars`` of a module, so a run is no part of one graph there.
    effects(torch.compile(planned, backend="aot_eager", fullgraph=not WRITES_TWICE))
    for name, parameter in planned.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[f"gradient of {name}"])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("0-3", "3-5"), "module '3-5' cannot be a segment: it shares children with the run 0-3"),
        (("0-3", "7-4"), "the plan names module '7-4', which"),
        (("0-99",), "the plan names module '0-99'"),
        (("4-4",), "the plan names module '4-4'"),
        (("0-3", "0-3"), "the plan names module '0-3' twice"),
        (("0-3", "0-3.4"), "the plan names module '0-3.4'"),
        (("2-5",), "module '2-5' cannot be a segment: its first layer ReLU(inplace=True) writes over the input"),
    ],
)
def test_a_plan_that_does_not_fit_leaves_no_run(paths: tuple[str, ...], message: str) -> None:
    model = flat()
    with pytest.raises(PlanError) as raised:
        apply_plan(model, plan(*paths))
    assert message in raised.value.message
    assert type(model) is nn.Sequential
    assert all(segment_of(module) is None for module in model.modules())


def test_a_plan_that_does_not_fit_leaves_the_one_before() -> None:
    model = apply_plan(flat(), plan("0-3"))
    with pytest.raises(PlanError):
        apply_plan(model, plan("4-7", "9-99"))
    assert [segment.path for segment in plan_of(model).segments] == ["0-3"]


def test_only_a_plain_sequential_has_runs() -> None:
    class Backwards(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for module in reversed(list(self)):
                input = module(input)
            return input

    with pytest.raises(PlanError, match="the plan names module '0-1'"):
        apply_plan(Backwards(nn.Tanh(), nn.Linear(4, 4)), plan("0-1"))


def test_names_with_hyphens() -> None:
    layers = OrderedDict([("a-1", nn.Linear(4, 4)), ("a-2", nn.Tanh()), ("b", nn.Linear(4, 4))])
    model = apply_plan(nn.Sequential(layers), plan("a-1-a-2"))
    assert [path for path, m in named_parts(model) if segment_of(m) == SegmentConfig()] == ["a-1-a-2"]


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (flat(), ["0-3", "4-7", "8-12"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), ["0-1"]),
        (nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()), ["3-4"]),
        (nn.Sequential(_block(), _block(), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)), ["2-3"]),
        (nn.Sequential(_block(), nn.Linear(4, 4), nn.Tanh(), _block()), ["1-2"]),
        (nn.Sequential(_block(), _block(), _block()), []),
    ],
    ids=["flat", "two layers", "single layers", "blocks", "between blocks", "only blocks"],
)
def test_where_runs_begin_and_end(model: nn.Sequential, expected: list[str]) -> None:
    group_layers(model)
    assert [path for path, part in named_parts(model) if isinstance(part, Run)] == expected


def test_a_sequential_with_a_place_that_is_empty_has_no_runs() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)), nn.ReLU())
    model._modules["4"] = None
    group_layers(model)
    assert RUNS_KEY not in vars(model)


def test_a_shared_layer_runs_wherever_it_stands() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    expected = model(torch.ones(2, 4))
    group_layers(model)
    assert type(model) is nn.Sequential
    assert torch.equal(apply_plan(model, plan("0-1", "2-3"))(torch.ones(2, 4)), expected)
