"""Optimizing a model in memory."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli import spikingjelly as api
from memopt_cli.errors import MemoptError, OptionError, StepError, VerificationError
from memopt_cli.measure.importable import _unreachable_in_main
from memopt_cli.measure.jobs import CountJob, MeasureJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.live.model import prepared_model
from memopt_cli.records import Differs, Measurement, StepSettings, from_data
from memopt_cli.runtime import segment_of
from memopt_cli.spikingjelly import (
    GCContainer,
    MemOptSummary,
    apply_gc,
    get_module_and_parent,
    memory_optimization,
    resolve_device,
)
from tests.zoo.models import Parts
from tests.zoo.records import verified


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).tanh()


class Spike(nn.Module):
    """Gives 0 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


def blocks(count: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(64) for _ in range(count)), nn.Linear(64, 3))


X = torch.linspace(-1, 1, 512 * 64).reshape(512, 64)


def segments(net: nn.Module) -> list[str]:
    return [path for path, module in net.named_modules() if isinstance(module, GCContainer)]


def gradients(net: nn.Module, x: Tensor = X) -> list[Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def summary_of(*arguments: Any, **options: Any) -> MemOptSummary:
    _, summary = memory_optimization(*arguments, **options, return_summary=True)
    assert isinstance(summary, MemOptSummary)
    return summary


MEMORY_OPTIMIZATION = """net instance dummy_input=None compress_x=None level=None verbose=False temporal_split_factor=2
max_split_rounds=None max_candidates_per_round=None warmup_in_main_process=None warmup_in_profile_workers=None
prefer=None profile=None allow_expensive_profiling=None checkpoint_budget=None max_gc_wrapped_modules=None
gc_target_budget_ratio=None return_summary=False example_forward=None split_fn=None can_chunk=None process_group=None"""
APPLY_GC = """net instance dummy_input=None compress_x=True device='cuda' checkpoint_budget=None
max_gc_wrapped_modules=None gc_target_budget_ratio=None return_summary=False"""
SUMMARY = """profile checkpoint_budget prefer device requested_level applied_level compress_x allow_expensive_profiling
applied_steps skipped_steps notes gc_wrap_count manual_compressor_count bit_compressor_count null_compressor_count
spatial_split_count temporal_split_count unwrap_count gc_container_count tcgc_container_count options gc_candidate_count
gc_selected_count gc_selection_policy gc_selected_modules gc_selection_explanation recommendation
peak_memory_mb total_gc_count total_sliding_count compressed_layers skipped_errors"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (memory_optimization, MEMORY_OPTIMIZATION),
        (apply_gc, APPLY_GC),
        (get_module_and_parent, "net module_name"),
        (resolve_device, ""),
    ],
)
def test_signatures(function: Callable[..., Any], expected: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert shown == expected.split()


def test_the_summary_has_both_sets_of_fields_in_their_order() -> None:
    names = [f.name for f in fields(MemOptSummary)]
    assert names[: len(SUMMARY.split())] == SUMMARY.split()


def test_option_tuples() -> None:
    assert api.MEMOPT_PROFILES == ("safe", "balanced", "memory", "exhaustive")
    assert api.MEMOPT_CHECKPOINT_BUDGETS == api.MEMOPT_PREFERENCES == ("speed", "balanced", "memory")


def test_module_and_parent() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert get_module_and_parent(net, "1.0") == (net[1][0], net[1], "0")
    assert get_module_and_parent(net, "0") == (net[0], net, "0")
    with pytest.raises(ValueError, match="has no parent"):
        get_module_and_parent(net, "")
    with pytest.raises(AttributeError):
        get_module_and_parent(net, "1.7")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("first", range(4))
def test_the_local_rank_names_the_device(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, name in enumerate(RANKS[first:]):
        monkeypatch.setenv(name, str(rank if rank < 3 else 2))
    assert resolve_device() == "cuda:0"


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("rank", ["3", "-1", "one", "", "1.0"])
def test_a_bad_local_rank_is_an_error(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", rank)
    with pytest.raises(ValueError, match=f"SLURM_LOCALID is '{rank}', and there are 3 CUDA devices"):
        resolve_device()


@pytest.mark.usefixtures("three_gpus")
def test_distributed_rank_then_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device() == "cuda:2"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 7)
    assert resolve_device() == "cuda:1"


def test_without_cuda_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "99")
    assert resolve_device() == "cpu"


def gc(net: nn.Module, instance: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    found, summary = apply_gc(net, instance, *arguments, **options, return_summary=True)
    assert found is net
    assert isinstance(summary, dict)
    return summary


@pytest.mark.slow
def test_every_instance_becomes_a_segment_and_computes_the_same() -> None:
    net = blocks()
    expected = gradients(net)
    assert apply_gc(net, Block, (X,)) is net
    assert segments(net) == ["0", "1", "2", "3"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), expected, strict=True))


@pytest.mark.parametrize(
    ("instance", "expected"),
    [(nn.Linear, 9), ((Block, nn.Linear), 5), (Block, 4), (nn.Sequential, 1), (nn.Module, 1), (nn.Conv2d, 0), ((), 0)],
)
def test_only_outermost_instances_are_counted(instance: Any, expected: int) -> None:
    net = blocks()
    summary = gc(net, instance)
    assert len(segments(net)) == summary["gc_wrap_count"] == summary["gc_candidate_count"] == expected
    assert summary["gc_selection_policy"] == ("all_candidates" if expected else "no_candidates")
    assert summary["applied_steps"] == (["level1_gc"] if expected else [])
    assert bool(summary["skipped_steps"]) is not bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "policy", "selected"),
    [
        ({"max_gc_wrapped_modules": 2}, "largest_input_activations", "01"),
        ({"gc_target_budget_ratio": 0.5}, "largest_input_activations", "012"),
        ({"checkpoint_budget": "speed"}, "largest_input_activations", "012"),
        ({"checkpoint_budget": "balanced"}, "largest_input_activations", "0123"),
        ({"checkpoint_budget": "memory"}, "budget_covers_all", "01234"),
        ({"max_gc_wrapped_modules": 0}, "explicit_zero_budget", ""),
        ({"gc_target_budget_ratio": -0.5}, "zero_ratio_budget", ""),
        ({"max_gc_wrapped_modules": 4, "checkpoint_budget": "speed"}, "largest_input_activations", "0123"),
    ],
)
def test_budgets(options: dict[str, Any], policy: str, selected: str) -> None:
    net = nn.Sequential(*(Block(8) for _ in range(5)))
    summary = gc(net, Block, (torch.randn(4, 8),), **options)
    assert summary["gc_selection_policy"] == policy
    assert summary["gc_selected_modules"] == segments(net) == list(selected)
    assert (summary["gc_candidate_count"], summary["gc_selected_count"]) == (5, len(selected))
    assert str(len(selected)) in summary["gc_selection_explanation"] or not selected


def test_modules_with_the_largest_inputs_are_preferred() -> None:
    net = nn.Sequential(nn.Linear(8, 2), Spike(), nn.Linear(2, 64), Spike(), nn.Linear(64, 4), Spike())
    assert gc(net, Spike, (torch.randn(4, 8),), max_gc_wrapped_modules=1)["gc_selected_modules"] == ["3"]
    net = nn.Sequential(nn.Linear(8, 2), Spike(), nn.Linear(2, 64), Spike(), nn.Linear(64, 4), Spike())
    summary = gc(net, Spike, max_gc_wrapped_modules=1)
    assert (summary["gc_selected_modules"], summary["gc_selection_policy"]) == (["1"], "fallback_module_order")


def spiking() -> nn.Sequential:
    return nn.Sequential(Spike(), Block(8), Spike(), nn.Linear(8, 8), Block(8))


@pytest.mark.parametrize(
    ("compress_x", "dummy", "compressors"),
    [
        (True, True, ["bit", "null"]),
        (None, True, ["bit", "null"]),
        (False, True, ["null", "null"]),
        (True, False, ["null", "null"]),
    ],
)
def test_inputs_are_probed_for_a_compressor(compress_x: bool | None, dummy: bool, compressors: list[str]) -> None:
    net = spiking()
    summary = gc(net, Block, (torch.randn(64, 8),) if dummy else None, compress_x=compress_x)
    found = [segment_of(net[1]), segment_of(net[4])]
    assert [config.compressor for config in found if config] == compressors
    assert summary["bit_compressor_count"] == summary["compressed_layers"] == compressors.count("bit")
    assert summary["null_compressor_count"] == compressors.count("null")
    assert any("inputs are stored packed only" in note for note in summary["notes"]) is (
        not dummy and compress_x is True
    )


def test_a_compressor_asked_for_by_the_module_is_counted_as_manual() -> None:
    net = spiking()
    net[1].x_compressor = "BooleanSpikeCompressor"
    summary = gc(net, Block, (torch.randn(64, 8),))
    config = segment_of(net[1])
    assert config.compressor == "boolean"
    counts = [summary[f"{kind}_compressor_count"] for kind in ("manual", "bit", "null")]
    assert counts == [1, 0, 1]
    net = spiking()
    net[1].x_compressor = "BooleanSpikeCompressor"
    assert gc(net, Block)["manual_compressor_count"] == 1
    assert gc(net, Block, compress_x=False)["manual_compressor_count"] == 0


def unused_compressors(net: nn.Module, said: dict[int, str], **options: Any) -> list[str]:
    """The notes on compressors asked for, of a step on inputs of which only those of the modules after spikes pack."""
    for index, name in said.items():
        net[index].x_compressor = name
    return [note for note in gc(net, Block, (torch.randn(64, 8),), **options)["notes"] if "x_compressor" in note]


def test_a_compressor_asked_for_that_does_not_fit_the_inputs_is_noted() -> None:
    (note,) = unused_compressors(spiking(), {1: "BitSpikeCompressor", 4: "BitSpikeCompressor"})
    assert note.startswith("x_compressor is not used by '4': it does not make all their inputs")
    assert not unused_compressors(spiking(), {4: "NullSpikeCompressor"})
    assert not unused_compressors(spiking(), {4: "BitSpikeCompressor"}, compress_x=False)
    (note,) = unused_compressors(
        nn.Sequential(*(Block(8) for _ in range(5))), dict.fromkeys(range(5), "BitSpikeCompressor")
    )
    assert "by '0', '1', '2' and 2 more: " in note


class Bytes:
    """A compressor in the way of SpikingJelly 1.x, told the shape."""

    def compress(self, s_seq: Tensor) -> Tensor:
        return s_seq.to(torch.uint8)

    def decompress(self, s_seq: Tensor, shape: tuple[int, ...]) -> Tensor:
        return s_seq.view(shape)


class Typed(Bytes):
    def decompress(self, s_seq: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return s_seq.view(shape).to(dtype)


def said_of(net: nn.Module, instance: Any, *inputs: Tensor, level: int = 1, **options: Any) -> list[str]:
    summary = summary_of(net, instance, inputs or None, level=level, **options)
    return [note for note in summary.notes if "x_compressor" in note or note.startswith("No segment of")]


def test_a_compressor_of_ones_own_that_loses_something_says_what_and_what_is_wanted() -> None:
    net = spiking()
    net[1].x_compressor = Bytes()
    said = (
        "x_compressor is not used by '1': its decompress returned dtype uint8, and compress was given float32. "
        "decompress(packed), or decompress(packed, shape), must return the tensor that compress(x) was given, in its "
        "dtype and shape."
    )
    assert gc(net, Block, (torch.randn(64, 8),))["notes"] == [said]
    net = spiking()[:2]
    net[1].x_compressor = Bytes()
    assert said in said_of(net, Block, torch.randn(4, 8))
    assert segments(net) == ["1"]


def test_a_compressor_that_cannot_be_called_is_refused_with_the_signature_that_is_wanted() -> None:
    net = spiking()
    net[1].x_compressor = Typed()
    (note,) = gc(net, Block, (torch.randn(64, 8),))["notes"]
    assert "'1' (its x_compressor is Typed with decompress(s_seq: 'Tensor', shape: " in note
    assert "and memopt calls decompress(packed) or decompress(packed, shape))" in note


class Halves:
    """Loses what a half cannot hold."""

    def compress(self, x: Tensor) -> Tensor:
        return x.half()

    def decompress(self, packed: Tensor) -> Tensor:
        return packed.float()


class SpikesOnly(Bytes):
    def compress(self, s_seq: Tensor) -> Tensor:
        if not ((s_seq == 0) | (s_seq == 1)).all():
            raise ValueError("only spikes")
        return super().compress(s_seq)

    def decompress(self, s_seq: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().decompress(s_seq, shape).float()


def installed_without_inputs(compressor: object, *calls: Callable[[nn.Module], Any]) -> list[tuple[str, str]]:
    """For each call: the compressor of the segment, and the note of its inputs that names ``x_compressor`` alone."""
    found = []
    for call in calls:
        net = nn.Sequential(nn.Linear(8, 8), Block(8), nn.Linear(8, 3))
        net[1].x_compressor = compressor
        summary = call(net)
        notes = summary["notes"] if isinstance(summary, dict) else summary.notes
        config = segment_of(net[1])
        assert config is not None
        found.append((config.compressor, *[note for note in notes if note.startswith("x_compressor")]))
    return found


UNMEASURED = (lambda net: gc(net, Block), lambda net: summary_of(net, Block, level=1))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("compressor", "name"), [(Halves(), "own"), (SpikesOnly(), "own"), ("BitSpikeCompressor", "bit")]
)
@pytest.mark.filterwarnings("ignore:x_compressor:UserWarning")
def test_without_inputs_the_compressors_that_were_not_tried_on_them_are_named(compressor: object, name: str) -> None:
    said = (
        "x_compressor was not tried on your inputs in '1': an input that it would not restore bit for bit is stored "
        "as it is. Pass dummy_input."
    )
    assert installed_without_inputs(compressor, *UNMEASURED) == [(name, said)] * 2


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [(Halves(), "its decompress returned other values than"), (SpikesOnly(), "it raises ValueError: only spikes")],
)
def test_a_compressor_that_does_not_fit_in_training_says_so_and_changes_nothing(
    compressor: object, reason: str
) -> None:
    x = torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 8), Block(8), nn.Linear(8, 3))
    expected = gradients(net, x)
    net[1].x_compressor = compressor
    gc(net, Block)
    with pytest.warns(
        UserWarning, match=f"x_compressor {type(compressor).__name__}: {reason}.*; this input is stored uncompressed"
    ):
        found = gradients(net, x)
    assert all(map(torch.equal, found, expected))
    (note,) = gc(net, Block, (x,))["notes"][1:]
    assert note.startswith(f"x_compressor is not used by '1': {reason}")


class Rooted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(x)).exp()


def test_a_net_without_parameters_is_wrapped_unmeasured_and_refused_with_a_hint_where_it_is_measured() -> None:
    net = nn.Sequential(Rooted(), Rooted())
    _, summary = api.memory_optimization(net, Rooted, level=1, return_summary=True)
    assert segments(net) == ["0", "1"]
    assert any(note.startswith("Not verified: ") for note in summary.notes)
    with pytest.raises(StepError, match="nothing to differentiate") as caught:
        api.memory_optimization(nn.Sequential(Rooted()), Rooted, (torch.randn(2, 8),), level=1)
    assert "A part without parameters is optimized with" in caught.value.hint


class Forgetful(nn.Module):
    """Has a child that it never calls, and one that cannot be a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.idle = Block(8), Block(8)
        self.bypassed = Block(8)
        self.bypassed.forward = self.called.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.bypassed(x))


def test_modules_that_cannot_be_segments_are_left_out_and_named() -> None:
    net = Forgetful()
    summary = gc(net, Block, (torch.randn(4, 8),))
    assert segments(net) == ["called"]
    assert summary["gc_candidate_count"] == 1
    (note,) = summary["notes"]
    assert "'idle' (the step never calls it)" in note
    assert "'bypassed' (forward is set on the instance" in note


@pytest.mark.parametrize("inputs", [(), (torch.ones(2, 8),)], ids=["unmeasured", "measured"])
def test_where_level_1_wraps_nothing_each_class_says_why(inputs: tuple[Tensor, ...]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    absent, refused = said_of(net, (nn.Conv2d, nn.ReLU), *inputs)
    assert not segments(net)
    assert absent == "No segment of Conv2d: the model has none."
    assert refused.startswith("No segment of ReLU: none can be one, as its first layer ReLU(inplace=True) writes over")


def test_a_class_that_is_never_called_or_not_allowed_says_so() -> None:
    net = nn.Sequential(Forgetful())
    net[0].called, net[0].bypassed = nn.Linear(8, 8), nn.Identity()
    assert gc(net, Block, (torch.randn(4, 8),))["notes"][1:] == ["No segment of Block: the step calls none of them."]
    assert said_of(blocks(), Block, max_gc_wrapped_modules=0) == [
        "No segment of Block: max_gc_wrapped_modules allows none."
    ]
    (note,) = said_of(nn.Sequential(Block(8)), Block, torch.randn(2, 8), level=2)
    assert note == "No segment of Block: no plan that was found with one lowers the peak."


def test_a_plan_is_taken_off_before_another_is_put_on() -> None:
    net = blocks()
    apply_gc(net, nn.Linear)
    summary = gc(net, Block)
    assert segments(net) == ["0", "1", "2", "3"]
    assert summary["notes"][0] == "The model carried a plan already; it was removed first."


def test_apply_gc_changes_nothing_else() -> None:
    net = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.5), Block(64)).eval()
    x = X.clone()
    gradients(net, x)
    before = surroundings(net, x)
    apply_gc(net, Block, (x,))
    assert surroundings(net, x) == before


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test leaves behind are told from those of tests beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def surroundings(net: nn.Module, x: Tensor) -> dict[str, Any]:
    """All that optimizing must leave as it is."""
    return {
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in net.parameters()],
        "parameters": [(id(p), p.tolist()) for p in net.parameters()],
        "buffers": [(id(b), b.tolist()) for b in net.buffers()],
        "mode": [m.training for m in net.modules()],
        "device": {str(p.device) for p in net.parameters()},
        "input": (x.tolist(), x.requires_grad, x.grad),
        "names": [name for name, _ in net.named_modules()],
        "attributes": [sorted(set(vars(m)) - {"_memopt_segment"}) for m in net.modules()],
        "gradient mode": torch.is_grad_enabled(),
        "files": sorted(f for f in os.listdir(tempfile.gettempdir()) if f.startswith("memopt-")),
    }


def test_by_default_nothing_is_changed() -> None:
    for arguments in ((), ((X,),)):
        net = blocks()
        summary = summary_of(net, Block, *arguments)
        assert segments(net) == []
        assert (summary.requested_level, summary.applied_level) == (0, 0)
        assert (summary.levels, summary.peak_memory_mb, summary.skipped_steps) == ([], None, [])


@pytest.mark.process
@pytest.mark.parametrize("level", [1, 2])
def test_a_step_of_one_time_step_is_noted_at_every_level(level: int) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(8, 8), neuron.LIFNode(), nn.Linear(8, 8), neuron.LIFNode())
    summary = summary_of(net, neuron.LIFNode, (torch.randn(64, 8),), level=level)
    assert any(note.startswith("The step that was run is of one time step") for note in summary.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_level_1_without_inputs_is_installed_unmeasured() -> None:
    net = blocks()
    assert memory_optimization(net, Block, level=1) is net
    assert segments(net) == ["0", "1", "2", "3"]
    summary = summary_of(blocks(), Block, level=1, prefer="speed")
    assert (summary.profile, summary.checkpoint_budget, summary.prefer) == ("safe", "speed", "speed")
    assert (summary.gc_selection_policy, summary.gc_selected_modules) == ("fallback_module_order", ["0", "1"])
    assert summary.allow_expensive_profiling is False
    assert summary.recommendation.startswith("With prefer=speed")


class DiffersInBackward(Block):
    """Computes something else in a recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (2 if memopt_cli.runtime.is_recomputing() else 1))


class Scaled(Block):
    """Its first layer does not tell of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : x.shape[1] // 2])


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_level_1_without_inputs_is_verified_where_its_layers_suggest_them() -> None:
    summary = summary_of(blocks(), Block, level=1)
    assert (summary.verification.passed, summary.verification.batch) == (True, 2)
    assert not any("Not verified" in note for note in summary.notes)
    net = nn.Sequential(DiffersInBackward(8), nn.Linear(8, 3))
    with pytest.raises(VerificationError, match="differs from the original"):
        memory_optimization(net, Block, level=1)
    assert segments(net) == []
    for unknown, reason in ((Scaled(8), "cannot be multiplied"), (nn.Sequential(Spike()), "no layer reveals")):
        net = nn.Sequential(unknown)
        summary = summary_of(net, (Block, Spike), level=1)
        assert summary.verification is None
        (note,) = (note for note in summary.notes if note.startswith("Not verified: "))
        assert reason in note
        assert note.endswith(" Pass inputs as dummy_input.")
        assert segments(net)


@pytest.mark.usefixtures("in_process")
def test_a_level_above_1_needs_inputs() -> None:
    net = blocks()
    with pytest.raises(ValueError, match="level 2 measures the model, and needs a dummy_input"):
        memory_optimization(net, Block, level=2)
    assert segments(net) == []
    summary = summary_of(net, Block, profile="memory")
    assert (summary.requested_level, summary.applied_level) == (3, 1)
    assert any(note.startswith("Level 1 is used instead of level 3") for note in summary.notes)
    assert segments(net) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "options", [{"level": 9}, {"gc_target_budget_ratio": 5}, {"profile": "fast"}, {"level": 1, "prefer": "safe"}]
)
def test_values_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(list(options.values())[-1])):
        memory_optimization(blocks(), Block, (X,), **options)


@pytest.mark.parametrize("options", [{"gc_target_budget_ratio": 5.0}, {"checkpoint_budget": "much"}])
def test_apply_gc_refuses_them_as_well(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=str(next(iter(options.values())))):
        apply_gc(blocks(), Block, **options)


@pytest.mark.parametrize("instance", ["Block", (Block, "Linear"), None])
def test_instances_are_classes(instance: Any) -> None:
    with pytest.raises(OptionError, match="which is not a class"):
        memory_optimization(blocks(), instance, level=1)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
class TestLevelOne:
    """The caller has named the modules: each is a segment, whatever it saves."""

    def test_every_module_that_matches_is_wrapped_though_none_saves_anything(self) -> None:
        net = nn.Sequential(*(Block(8) for _ in range(3)), nn.Linear(8, 8))
        summary = summary_of(net, (Block, nn.Linear), (torch.randn(2, 8),), level=1)
        assert segments(net) == ["0", "1", "2", "3"]
        assert (summary.gc_wrap_count, summary.gc_candidate_count, summary.gc_selected_count) == (4, 4, 4)
        assert [row.level for row in summary.levels] == [0, 1]
        assert all(isinstance(row.outcome, Measurement) for row in summary.levels)
        assert summary.verification.passed
        (note,) = (note for note in summary.notes if "do not lower the peak" in note)
        assert "level 2 and above choose among them" in note
        assert summary.options["max_slowdown"] is None

    def test_where_it_saves_nothing_is_said_of_that(self) -> None:
        net = nn.Sequential(*(Block(64) for _ in range(4)))
        summary = summary_of(net, Block, (torch.randn(512, 64),), level=1)
        assert segments(net) == ["0", "1", "2", "3"]
        assert not [note for note in summary.notes if "do not lower the peak" in note]

    def test_limits_take_the_largest_inputs(self) -> None:
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4), nn.Linear(4, 4))
        summary = summary_of(net, nn.Linear, (torch.randn(8, 4),), level=1, max_gc_wrapped_modules=1)
        assert segments(net) == ["2"]
        assert summary.gc_selection_policy == "largest_input_activations"
        assert summary_of(net, nn.Linear, (torch.randn(8, 4),), prefer="speed").gc_wrap_count == 2
        carried = segments(net)
        summary = summary_of(net, nn.Linear, (torch.randn(8, 4),), level=1, gc_target_budget_ratio=0.0)
        assert not summary.plan
        assert segments(net) == carried
        assert summary.notes[0].startswith("The model keeps the plan that it carries.")
        assert summary.skipped_steps == ["level1:no_improving_candidate"]

    def test_a_segment_that_computes_something_else_is_left_out_by_name(self) -> None:
        class SeesBackward(Block):
            def forward(self, x: Tensor) -> Tensor:
                hidden = self.first(x).tanh()
                return self.second(hidden * 2 if memopt_cli.runtime.is_recomputing() else hidden)

        net = nn.Sequential(Block(8), SeesBackward(8), Block(8))
        summary = summary_of(net, Block, (torch.randn(2, 8),), level=1)
        assert segments(net) == ["0", "2"]
        (dropped,) = summary.dropped
        assert isinstance(dropped.why, Differs)
        (left_out,) = dropped.why.left_out
        assert left_out.sentence.startswith("'1' is not a segment: as a segment, gradient of 1.")
        *_, said = said_of(net[1:2], Block, torch.randn(2, 8))
        assert said.startswith("No segment of Block: a plan was found, but verification failed: gradient of 1.")

    def test_a_compressor_of_what_is_no_segment_is_named(self) -> None:
        net = nn.Sequential(Block(8), nn.Linear(8, 8), nn.Linear(8, 8))
        net[0].first.x_compressor = net[1].x_compressor = "BitSpikeCompressor"
        notes = said_of(net, Block, torch.randn(2, 8))
        assert notes == ["x_compressor is not used by '0.first', '1', which is not a segment."]
        assert gc(net, Block, (torch.randn(2, 8),))["notes"][1:] == notes


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "profile", ["safe", "balanced", pytest.param("memory", id="memory"), pytest.param("exhaustive", id="exhaustive")]
)
def test_a_profile_on_a_live_model(profile: Any) -> None:
    net, x = blocks(3), X[:32].clone()
    original = copy.deepcopy(net)
    gradients(net, x)
    before = surroundings(net, x)
    summary = summary_of(net, Block, (x,), profile=profile)
    assert surroundings(net, x) == before
    assert summary.profile == profile
    assert [row.level for row in summary.levels] == list(range(summary.requested_level + 1))
    assert summary.verification.passed
    measured = {row.level: row.outcome for row in summary.levels}
    applied = measured[summary.applied_level]
    assert summary.peak_memory_mb == applied.allocated_peak_bytes / 2**20
    assert len(segments(net)) == summary.gc_container_count == summary.total_gc_count
    policy = "all_candidates" if profile == "safe" else "least_predicted_peak"
    assert (summary.gc_candidate_count, summary.gc_selection_policy) == (3, policy)
    chunked = any(config.chunks > 1 for config in map(segment_of, net.modules()) if config)
    for ours, expected in zip(gradients(net, x), gradients(original, x), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-6) if chunked else torch.equal(ours, expected)
    assert set(summary.applied_steps).isdisjoint(f"level{step[5]}" for step in summary.skipped_steps)


def large_net() -> nn.Sequential:
    """Its activations are most of its memory: segments pay."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_command_line_finds_the_same(memopt: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 1, 4096 * 8).reshape(4096, 8)
    torch.save(large_net(), "net.pt")
    torch.save([x], "x.pt")
    arguments = "optimize net.pt --input-data x.pt --target ?  --profile balanced --checkpoint-budget balanced --json"
    arguments += " --max-slowdown none"
    done = memopt(*arguments.split(), "--dry-run")
    assert done.code == 0, done.err
    theirs = from_data(MemOptSummary, json.loads(done.out)["summary"])
    net = large_net()
    children = {id(child) for child in net}

    class Child(type):
        def __instancecheck__(cls, module: object) -> bool:
            return id(module) in children

    ours = summary_of(net, Child("Child", (), {}), (x,), profile="balanced", checkpoint_budget="balanced")
    assert ours.plan == theirs.plan
    assert ours.plan.segments
    for name in SUMMARY.split():
        if name not in ("notes", "options", "recommendation"):  # paths of files, measured times
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.gc_candidate_count == 4
    assert ours.gc_selected_count <= 3
    for found in (ours, theirs):
        before, after = (found.levels[level].outcome for level in (0, found.applied_level))
        assert isinstance(before, Measurement)
        assert isinstance(after, Measurement)
        peaks = [outcome.allocated_peak_bytes / 2**20 for outcome in (before, after)]
        assert peaks[1] < peaks[0]
        assert f"Measured: {peaks[0]:.1f} MiB → {peaks[1]:.1f} MiB" in found.recommendation


@pytest.mark.usefixtures("in_process")
def test_keyword_inputs() -> None:
    class Keyword(Parts, block=lambda: Block(64)):
        def forward(self, *, x: Tensor) -> Tensor:
            return self.block(x)

    summary = summary_of(Keyword(), Block, {"x": X}, level=1)
    assert summary.gc_candidate_count == 1


class ByName(Parts, inner=blocks):
    """Takes an argument by position and one by name."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_inputs_may_come_from_an_example_of_a_call() -> None:
    seen = []

    def example(model: nn.Module) -> Tensor:
        seen.append(model)
        return model(X, scale=2.0).sum()

    net = ByName()
    summary = summary_of(net, Block, level=1, example_forward=example)
    assert summary.gc_selected_modules
    assert segments(net) == [f"inner.{path}" for path in segments(net.inner)]
    assert seen[0] is not net


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"example_forward": lambda net: net(X), "dummy_input": (X,)}, "both dummy_input and example_forward"),
        ({"example_forward": lambda net: net[0](X)}, "did not call the model"),
        ({"example_forward": lambda net: net(X, X, x=X)}, "with 2 positional arguments and others by name"),
        ({"dummy_input": (X,), "split_fn": lambda module: [nn.Tanh()]}, "returned Tanh, which does not lie in it"),
        ({"dummy_input": (X,), "split_fn": lambda module: None}, "a value of type NoneType, not a list of modules"),
        ({"dummy_input": (X,), "split_fn": lambda module: [module]}, "returned Block, which does not lie in it"),
    ],
)
def test_an_example_or_a_split_that_makes_no_sense(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason) as raised:
        memory_optimization(blocks(), Block, level=2, **options)
    assert raised.value.hint


class Pair(Parts, left=lambda: nn.Sequential(Block(64), Block(64)), right=lambda: nn.Sequential(Block(64), Block(64))):
    """Two blocks, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_only_what_a_split_names_lies_in_segments() -> None:
    net = nn.Sequential(Pair(), Pair())
    named = []

    def split(module: nn.Module) -> list[nn.Module]:
        named.append(type(module).__name__)
        return [module.right] if isinstance(module, Pair) else []

    memory_optimization(net, Pair, (X,), level=2, split_fn=split)
    assert sorted(named) == ["Pair", "Pair", "Sequential", "Sequential"]
    assert segments(net)
    assert set(segments(net)) <= {"0", "1", "0.right", "1.right"}


@pytest.mark.usefixtures("in_process")
def test_a_split_written_for_one_class_leaves_parts_of_others_whole() -> None:
    net = nn.Sequential(Pair(), Pair())
    memory_optimization(
        net, Pair, (X,), level=2, split_fn=lambda pair: (pair.left, pair.right)
    )  # SpikingJelly's example
    assert segments(net)
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'middle'"):
        memory_optimization(net, Pair, (X,), level=2, split_fn=lambda pair: [pair.middle])
    with pytest.raises(AttributeError, match="'list' object has no attribute 'left'"):
        memory_optimization(
            net, Pair, (X,), level=2, split_fn=lambda pair: [pair.left] if hasattr(pair, "left") else [].left
        )


def test_of_modules_within_another_a_split_names_one() -> None:
    with pytest.raises(OptionError, match=r"returned 'left\.0' and a module that contains it"):
        memory_optimization(
            Pair(), Pair, (X,), level=2, split_fn=lambda m: [m.left, m.left[0]] if type(m) is Pair else []
        )


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("may", [True, False])
def test_only_what_may_runs_in_chunks(may: bool) -> None:
    net, asked = blocks(2), set()

    def can_chunk(module: nn.Module) -> bool:
        asked.add(type(module).__name__)
        return may and isinstance(module, Block)

    summary = summary_of(net, Block, (X,), level=3, max_split_rounds=1, can_chunk=can_chunk)
    assert asked == {"Block", "Linear"}
    assert bool(summary.tcgc_container_count) == may


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_model_that_differs_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verified(passed=False, worst_name="output[0]", worst_difference=0.5, batch=512)
    monkeypatch.setattr("memopt_cli.measure.answers.verified.verify_step", lambda *_, **__: found)
    net = blocks()
    with pytest.raises(VerificationError, match=r"output\[0\] differs by 0.5, at batch 512"):
        memory_optimization(net, Block, (X,), level=1)
    assert segments(net) == []


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("options", "workers", "main"),
    [
        ({"level": 2}, True, True),
        ({"level": 2, "allow_expensive_profiling": False}, False, True),
        ({"level": 1, "allow_expensive_profiling": False}, True, True),
        ({"level": 1, "warmup_in_main_process": False, "warmup_in_profile_workers": False}, False, False),
        ({"profile": "safe"}, False, False),
        ({"profile": "safe", "warmup_in_main_process": True}, False, True),
    ],
)
def test_who_warms_up(options: dict[str, Any], workers: bool, main: bool, answered: Callable[..., None]) -> None:
    told: list[bool] = []
    steps: list[bool] = []

    def measure(session: Session, job: MeasureJob, ask: Callable[..., Any]) -> Any:
        told.append(job.warm_up)
        return ask(job)

    def count(session: Session, job: CountJob, ask: Callable[..., Any]) -> Any:
        if not job.fake:
            steps.append(job.fake)
        return ask(job)

    answered(MeasureJob, measure)
    answered(CountJob, count)
    memory_optimization(blocks(1), Block, (X,), **options)
    assert set(told) == {workers}
    assert len(steps) == main


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_an_interrupted_warm_up_leaves_the_plan_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memopt_cli.spikingjelly._warm_up", interrupt)
    net = blocks()
    with pytest.raises(KeyboardInterrupt):
        memory_optimization(net, Block, (X,), level=1)
    assert len(memopt_cli.plan_of(net).segments) == len(segments(net)) > 0


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("memopt_cli")
    level = logger.level
    yield logger
    assert (logger.level, logger.handlers) == (level, [])


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_logs_the_search(verbose: bool, log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    memory_optimization(blocks(), Block, (X,), level=2, verbose=verbose)
    lines = [record.getMessage() for record in caplog.records if record.name == "memopt_cli"]
    assert (lines[:2] == ["level 0: measuring the original", "level 1 of 2: searching"]) is verbose
    assert any("segment" in line and "the least so far" in line for line in lines) is verbose


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def no_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a subprocess was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def local_class() -> nn.Module:
    class Local(Block):
        pass

    return nn.Sequential(Local(64), Local(64))


def with_a_lambda() -> nn.Module:
    net = blocks(2)
    net.activation = lambda x: x  # type: ignore[assignment]
    return net


def of_a_module_without_a_file() -> nn.Module:
    net = blocks(2)
    kind = type("Made", (Block,), {"__module__": "made_up_module"})
    sys.modules["made_up_module"] = type(sys)("made_up_module")
    vars(sys.modules["made_up_module"])["Made"] = kind
    net.append(kind(3))
    return net


@pytest.mark.usefixtures("no_subprocess")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (local_class, "the model cannot be pickled (AttributeError: Can't pickle local object 'local_class"),
        (with_a_lambda, "the model cannot be pickled ("),
        (
            of_a_module_without_a_file,
            "a subprocess cannot import made_up_module.Made (it was not imported from a file)",
        ),
    ],
)
def test_a_model_that_no_subprocess_can_read(build: Callable[[], nn.Module], said: str) -> None:
    net, x = build(), X.clone()
    before = surroundings(net, x)
    with torch.no_grad():
        summary = summary_of(net, Block, (x,), level=1)
    assert surroundings(net, x) == before
    assert summary.notes[0].startswith(f"Profiled in this process, without a time limit: {said}")
    assert summary.verification.passed
    sys.modules.pop("made_up_module", None)


class Odd:
    """Not a container."""


def test_inputs_that_cannot_be_handed_over() -> None:
    with pytest.raises(OptionError, match="the inputs cannot be sent to a profiling subprocess"):
        memory_optimization(blocks(), Block, (X, Odd()), level=1)


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.generator = (n for n in range(3))


def test_a_model_that_cannot_be_copied() -> None:
    with pytest.raises(StepError, match=r"the model cannot be copied.*generator"):
        memory_optimization(nn.Sequential(Locked()), Locked, (X,), level=1)


SCRIPT = """
import torch
from torch import nn
from memopt_cli.spikingjelly import memory_optimization
from memopt_cli.measure.jobs import MeasureJob
from memopt_cli.pipeline.live.model import prepared_model
from memopt_cli.records import Plan, StepSettings

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).tanh()

net, x = nn.Sequential(Net()), torch.randn(16, 32)

def measure():
    with prepared_model(net, (x,), StepSettings()) as prepared, prepared.session() as session:
        print(type(session).__name__, type(session.ask(MeasureJob(plan=Plan())).measurement).__name__, *prepared.notes)

def optimize():
    _, summary = memory_optimization(net, Net, (x,), level=1, return_summary=True, verbose=True)
    print(summary.verification.passed, summary.notes[0])
"""


@pytest.mark.process
def test_a_script_is_left_alone_unless_the_model_needs_it() -> None:
    with prepared_model(blocks(), (X,), StepSettings()) as prepared:
        assert prepared.open_session is None
        assert prepared.subject.source.trust.code_paths == ()


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_a_subprocess_finds_the_classes_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + 'if __name__ == "__main__":\n    print("main part")\n    measure()\n')
    done = python(tmp_path, "train.py")
    assert done.stdout == "main part\nSession Measurement\n", done.stderr


def test_a_script_without_a_main_part_is_profiled_in_its_process_and_logs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + "optimize()\n")
    done = python(tmp_path, "train.py")
    note = (
        "Profiled in this process, without a time limit: a subprocess cannot import __main__.Net "
        '(train.py calls memopt outside its if __name__ == "__main__" part).'
    )
    assert done.stdout == f"True {note}\n", done.stderr
    lines = done.stderr.splitlines()
    stages = ["level 0: measuring the original", "level 1: measuring its plan"]
    assert [line for line in lines if line in (note, *stages)] == [note, *stages]


@pytest.mark.process
def test_a_module_that_optimizes_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its subprocess, too, imports it."""
    (tmp_path / "optimizes_itself.py").write_text(SCRIPT + "optimize()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MemoptError, match="a module calls memopt while it is being imported"):
        importlib.import_module("optimizes_itself")


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("class Net: pass\nif __name__ == '__main__':\n    find()", "Net", ""),
        ("if True:\n    class Net: pass\nif '__main__' == __name__:\n    find()", "Net.Inner", ""),
        ("class Net: pass\nfind()", "Net", 'calls memopt outside its if __name__ == "__main__" part'),
        ("if __name__ == '__main__':\n    class Net: pass\n    find()", "Net", "defines it in its main part"),
    ],
)
def test_what_of_a_script_can_be_imported(source: str, name: str, reason: str, tmp_path: Path) -> None:
    assert found_in_script(source, name, tmp_path) == (f"script.py {reason}" if reason else "")


def found_in_script(source: str, name: str, folder: Path) -> str:
    """What is said of ``__main__.name`` while a script is running as ``__main__``."""
    script = folder / "script.py"
    script.write_text(source)
    said: list[str] = []
    main = type(sys)("__main__")
    main.__file__ = str(script)
    vars(main)["find"] = lambda: said.append(_unreachable_in_main(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", main)
        exec(compile(source, script, "exec"), vars(main))
    return said[0]


def test_what_fails_leaves_the_plan_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise KeyboardInterrupt

    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="1"),))
    model = memopt_cli.apply_plan(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), plan)
    monkeypatch.setattr(api, "find_and_verify", fails)
    with pytest.raises(KeyboardInterrupt):
        api.memory_optimization(model, nn.Linear, (torch.ones(2, 4),), level=1)
    assert memopt_cli.plan_of(model) == plan
    with pytest.raises(Exception, match="mat1 and mat2"):
        api.apply_gc(model, nn.Linear, (torch.ones(2, 5),), device="cpu")
    assert memopt_cli.plan_of(model) == plan
