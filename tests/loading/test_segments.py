"""A saved model whose segments no plan could make is refused where it is read, as that plan is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.records import InputDimension, Plan, PlanRange, SegmentPlan
from memopt_cli.runtime import LengthOf, settings_of


def _set(settings: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _with_segment(**values: Any) -> nn.Module:
    model = memopt_cli.apply_plan(_model(), Plan(segments=(SegmentPlan(path="2"),)))
    _set(settings_of(model.get_submodule("2")), **values)
    return model


def _by_length() -> nn.Module:
    """Its root says how long the input is; its last layer is in chunks where that is more than 4."""
    short, long = SegmentPlan(path="2"), SegmentPlan(path="2", chunks=2)
    ranges = PlanRange(up_to=4, segments=(short,)), PlanRange(up_to=8, segments=(long,))
    by = InputDimension(dim="S", argument=0, axis=0)
    return memopt_cli.apply_plan(_model(), Plan(by=by, ranges=ranges))


def _load(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    return memopt_cli.load(folder / "model.pt")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"chunks": "a"}, "an instance of Linear cannot be a segment: chunks must be a whole number, not 'a'"),
        ({"chunks": True}, "chunks must be a whole number, not True"),
        ({"chunks": -1}, "chunks must be 1 or more, not -1"),
        ({"axis": "a"}, "axis must be a whole number"),
        ({"seq_inputs": 0}, "seq_inputs must be 1 or more"),
        ({"seq_outputs": "x"}, "seq_outputs must be a whole number"),
        ({"spatial_split": "yes"}, "spatial_split must be true or false"),
        ({"spatial_split": True}, "its Linear at '2' cannot be a segment: .*no method __spatial_split__"),
        ({"spatial_split": True, "chunks": 2}, "not both"),
        ({"recompute": 0}, "recompute must be true or false, not 0"),
        ({"recompute": False, "chunks": 2}, "only a recomputed module"),
        ({"keep": "abc"}, "keep must be a tuple of names"),
        ({"keep": 7}, "keep must be a tuple of names"),
        ({"keep": ("nonsense",)}, "no operator of that name"),
        ({"compressor": 5}, "compressor must be text"),
        ({"compressor": "zip"}, "unknown compressor 'zip'"),
        ({"compressor": "own"}, "no x_compressor"),
        ({"through_loss": True}, "needs two chunks or more"),
        ({"through_loss": True, "chunks": 2, "axis": 1}, "only the number of chunks"),
        ({"inexact": True}, "inexact is for"),
        ({"recompute_states": True}, "needs two chunks or more"),
        ({"path": 5}, "path must be text"),
    ],
)
def test_settings_that_no_plan_has(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=says):
        _load(_with_segment(**values), tmp_path)


@pytest.mark.parametrize("name", ["path", "compressor"])
def test_settings_are_text_that_can_be_printed(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeFileError, match="makes a segment from unexpected arguments"):
        _load(_with_segment(**{name: "\x1b[2J\n::error::"}), tmp_path)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"argument": -3}, "the argument -3 is neither a position nor a name"),
        ({"argument": 9}, "its forward does not take the argument 9"),
        ({"argument": "nope"}, "its forward does not take the argument 'nope'"),
        ({"axis": True}, "the axis True is not a whole number"),
        ({"name": " "}, "a dimension has the symbol ' '"),
        ({"name": 7}, "a dimension has the symbol 7"),
    ],
)
def test_lengths_that_no_plan_has(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = _by_length()
    _set(settings_of(model).length, **values)  # type: ignore[union-attr]
    with pytest.raises(FileFormatError, match=says):
        _load(model, tmp_path)


def test_what_is_done_at_each_length_is_looked_at(tmp_path: Path) -> None:
    model = _by_length()
    _set(settings_of(model.get_submodule("2")).configs[1], chunks=-3)  # type: ignore[union-attr]
    with pytest.raises(FileFormatError, match="chunks must be 1 or more, not -3"):
        _load(model, tmp_path)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"up_to": (1, 2)}, "2 in it has other ranges of lengths"),
        ({"up_to": (0, 4)}, "must ascend from 1"),
        ({"length": LengthOf(name="T", argument=0, axis=0)}, "2 in it is by its own length"),
    ],
)
def test_all_of_a_model_is_by_the_lengths_of_its_root(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = _by_length()
    _set(settings_of(model.get_submodule("2")), **values)
    with pytest.raises(FileFormatError, match=says):
        _load(model, tmp_path)


def test_bounds_that_do_not_ascend_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    model = _by_length()
    _set(settings_of(model), up_to=(8, 4))
    with pytest.raises(UnsafeFileError, match="makes a segment from unexpected arguments"):
        _load(model, tmp_path)


def test_what_was_saved_in_another_mode_or_by_another_version_loads(tmp_path: Path) -> None:
    """Batch norms forbid chunks in training alone, and a segment may keep what only another PyTorch has."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    memopt_cli.apply_plan(model, Plan(segments=(SegmentPlan(path="", chunks=2),)))
    _set(settings_of(model), keep=("aten::of_another_version",))
    assert settings_of(_load(model.train(), tmp_path)) == settings_of(model)


def test_a_part_of_a_model_by_length_loads_by_itself(tmp_path: Path) -> None:
    part = _by_length().get_submodule("2")
    assert settings_of(_load(part, tmp_path)) == settings_of(part)
    both = nn.ModuleList([_by_length(), part])
    assert settings_of(_load(both, tmp_path)[0]) == settings_of(both[0])  # type: ignore[index]
