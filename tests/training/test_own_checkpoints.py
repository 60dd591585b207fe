"""Models that checkpoint by themselves: plans are searched without that, and turn it off."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memopt_cli
from memopt_cli import Plan, SegmentPlan
from memopt_cli.errors import PlanError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import Subject, TraceAnswer, TraceJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.records import InputSpec, ModelSource
from memopt_cli.training.own_checkpoints import find_switches, resume, watched_checkpoints
from tests.zoo.models import GIVEN, Parts

X = torch.ones(4, 8)
PLAN = Plan(segments=(SegmentPlan(path="blocks.0"),))

MODELS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Asking(nn.Module):
    def __init__(self, use_checkpoint=True):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False) if self.use_checkpoint and self.training else block(x)

class Always(Asking):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)

class Never(Asking):
    def run(self, block, x):
        return block(x)

def always():
    return Always(use_checkpoint=False)

def plain():
    return Asking(use_checkpoint=False)
"""


class Net(nn.Module):
    """Asks an attribute of its own, and one of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.use_checkpoint = True
        for block in self.blocks:
            block.with_cp = True  # type: ignore[assignment]
        self.blocks[1].with_cp = False  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint and block.with_cp else block(x)
        return x


def flags(net: nn.Module) -> tuple[Any, ...]:
    blocks: Any = net.blocks
    return net.use_checkpoint, blocks[0].with_cp, blocks[1].with_cp


@pytest.mark.parametrize(
    ("name", "value", "is_one"),
    [
        ("gradient_checkpointing", True, True),  # transformers, diffusers
        ("grad_checkpointing", True, True),  # timm, open_clip
        ("use_checkpoint", True, True),  # Swin, MONAI
        ("with_cp", True, True),  # mmcv
        ("memory_efficient", True, True),  # torchvision's DenseNet
        ("use_grad_ckpt", True, True),
        ("gradient_checkpointing", False, False),
        ("gradient_checkpointing", 1, False),
        ("save_checkpoint", True, False),
        ("load_checkpoint", True, False),
        ("training", True, False),
        ("use_cp", True, False),  # context parallelism
    ],
)
def test_what_asks_for_checkpoints(name: str, value: Any, is_one: bool) -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    vars(net[0])[name] = value
    assert find_switches(net) == ((f"0.{name}",) if is_one else ())


class Calling(Parts, inner=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), call=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


@pytest.mark.parametrize(
    ("call", "calls"),
    [
        (lambda inner, x: checkpoint(inner, x, use_reentrant=False), True),
        (lambda inner, x: checkpoint(inner, x.clone().requires_grad_(), use_reentrant=True), True),
        (lambda inner, x: checkpoint_sequential(inner, 2, x, use_reentrant=False), True),
        (lambda inner, x: inner(x), False),
    ],
)
def test_a_call_of_pytorchs_checkpoint_is_seen(call: Callable[[nn.Module, Tensor], Any], calls: bool) -> None:
    net = nn.Sequential(Calling(call), nn.Linear(8, 8))
    for model in (net, net[0]):
        with watched_checkpoints(model) as found:
            model(X).sum().backward()
        assert set(found) == ({"0" if model is net else ""} if calls else set())
    with watched_checkpoints(net) as found:
        pass
    checkpoint(net, X, use_reentrant=False)
    assert not found


def test_what_is_watched_is_recorded_as_it_was() -> None:
    """Its inputs were held by who watched, and dry runs a third off."""
    net = nn.Sequential(Calling(lambda inner, x: checkpoint(inner, x, use_reentrant=False)), nn.Linear(8, 8))
    subject = Subject(source=ModelSource(location=""), spec=InputSpec(tensors=(parse_tensor("64x8"),), source="here"))
    with LocalSession(subject, 60.0, build=lambda: net) as session:
        fake, real = session.ask(TraceJob(plan=Plan(), fake=True)), session.ask(TraceJob(plan=Plan(), fake=False))
        planned = session.ask(TraceJob(plan=Plan(segments=(SegmentPlan(path="1"),)), fake=True))
    assert isinstance(fake, TraceAnswer)
    assert isinstance(real, TraceAnswer)
    assert isinstance(planned, TraceAnswer)
    assert fake.checkpoints == real.checkpoints == ("0",)
    assert fake.trace.tensor_peak_bytes == real.trace.tensor_peak_bytes
    assert not planned.checkpoints


def test_a_plan_turns_it_off_as_long_as_it_is_there() -> None:
    net = Net()
    assert memopt_cli.apply_plan(net, PLAN, verify=X) is net
    assert flags(net) == (False, False, False)
    memopt_cli.apply_plan(memopt_cli.remove_plan(net), Plan())
    assert flags(net) == (True, True, False)
    with pytest.raises(PlanError):
        memopt_cli.apply_plan(net, Plan(segments=(SegmentPlan(path="blocks.7"),)))
    assert flags(net) == (True, True, False)


def test_a_saved_plan_knows_what_it_turned_off(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    vars(net)["use_checkpoint"] = True
    torch.save(memopt_cli.apply_plan(net, Plan(segments=(SegmentPlan(path="0"),))), tmp_path / "net.pt")
    loaded: Any = memopt_cli.load(tmp_path / "net.pt")
    assert loaded.use_checkpoint is False
    assert memopt_cli.remove_plan(loaded).use_checkpoint is True


def turned_on(net: nn.Module) -> nn.Module:
    vars(net)["use_checkpoint"] = True
    for block in net.blocks:  # type: ignore[union-attr]
        vars(block)["with_cp"] = True
    return net


def take_steps(net: nn.Module) -> None:
    for _ in range(3):
        net(X).sum().backward()


def written_and_loaded(net: nn.Module, folder: Path) -> nn.Module:
    torch.save(net, folder / "net.pt")
    return memopt_cli.load(folder / "net.pt", trust=memopt_cli.Trust(packages=("tests",)))


@pytest.mark.parametrize("path", ["blocks.0", ""])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_is_turned_on_again_is_warned_of_once(path: str, chunks: int, is_loaded: bool, tmp_path: Path) -> None:
    plan = Plan(segments=(SegmentPlan(path=path, chunks=chunks),))
    net = memopt_cli.apply_plan(Net(), plan)
    if is_loaded:
        net = written_and_loaded(net, tmp_path)
    turned_on(net)
    with torch.no_grad():
        net(X)  # nothing is recomputed
    with pytest.warns(
        UserWarning, match=r"by itself under its plan \(use_checkpoint of 1 module, with_cp of 2"
    ) as seen:
        take_steps(net)
    assert len(seen) == 1


def test_it_is_seen_after_the_first_step_too_and_not_where_it_is_off() -> None:
    net = memopt_cli.apply_plan(Net(), Plan(segments=(*PLAN.segments, SegmentPlan(path="blocks.1"))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(X).sum().backward()
        net(X).sum().backward()
    turned_on(net)
    with pytest.warns(UserWarning, match="by itself under its plan"):
        net(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turned_on(memopt_cli.remove_plan(net))(X).sum().backward()
        copied = copy.deepcopy(memopt_cli.apply_plan(net, PLAN))
        copied(X).sum().backward()


@pytest.mark.parametrize("said", [("training", "0.bias", "0.__class__", "9.with_cp"), (3, None), 7, "training"])
def test_what_a_file_says_was_on_is_no_other_attribute(said: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2)).eval()
    vars(net)["_memopt_checkpoints_off"] = said
    before = dict(vars(net[0]))
    resume(net)
    assert not net.training
    assert type(net[0]) is nn.Linear
    assert vars(net[0]) == before


@pytest.fixture
def models(memopt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(Path.cwd())  # pickles name its classes
    monkeypatch.delitem(sys.modules, "models", raising=False)


FLAGS = ("-i", "512x16", "--level", "1", "--max-slowdown", "none", "--no-recommend-batch")
OWN = "the model's own checkpoints"
BY_ITSELF = "The model checkpoints by itself (use_checkpoint of 1 module), which takes "


@pytest.mark.slow
@pytest.mark.usefixtures("models")
class TestCommands:
    def test_plans_are_searched_without_it(self, memopt: Any) -> None:
        done = memopt("optimize", "models.py:Asking", *FLAGS, "--json")
        assert done.code == 0, done.err
        summary = json.loads(done.out)["summary"]
        assert [note for note in summary["notes"] if note.startswith(BY_ITSELF)]
        plain = json.loads(memopt("optimize", "models.py:plain", *FLAGS, "--json", "--force").out)["summary"]
        peaks = [[row["outcome"]["tensor_peak_bytes"] for row in found["levels"]] for found in (summary, plain)]
        assert peaks[0] == peaks[1]
        assert summary["plan"] == plain["plan"]
        assert summary["plan"]["segments"]
        assert not [note for note in plain["notes"] if "checkpoints by itself" in note]

    def test_what_is_written_says_so(self, memopt: Any) -> None:
        assert memopt("optimize", "models.py:Asking", *FLAGS).code == 0
        assert yaml.safe_load(Path("models.Asking.memopt.plan.yaml").read_text())["turns_off"] == ["use_checkpoint"]
        _, plan = memopt_cli.read_plan("models.Asking.memopt.plan.yaml")
        assert plan.segments
        written: Any = torch.load("models.Asking.memopt.pt", weights_only=False)
        assert written.use_checkpoint is False
        done = memopt("apply", "models.py:Asking", "models.Asking.memopt.plan.yaml", "--force")
        assert "The model's own checkpointing is off under the plan (use_checkpoint of 1 module)." in done.err

    def test_without_a_plan_it_stays_on(self, memopt: Any) -> None:
        done = memopt(
            "optimize",
            "models.py:Asking",
            "-i",
            "2x16",
            "--level",
            "1",
            "--no-recommend-batch",
            "-o",
            "models.Asking.memopt.pt",
        )
        assert "the model stays as it is" in done.out
        assert BY_ITSELF in done.out
        written: Any = torch.load("models.Asking.memopt.pt", weights_only=False)
        assert written.use_checkpoint is True
        assert not Path("models.Asking.memopt.plan.yaml").exists()

    OF_ONE = ("-i", "512x16", "--target", "blocks.0", "--max-slowdown", "none", "--no-recommend-batch")

    def test_a_plan_that_needs_more_is_not_applied(self, memopt: Any) -> None:
        done = memopt("optimize", "models.py:Asking", *self.OF_ONE, "--level", "1")
        assert done.code == 0, done.err
        assert "but the model's own checkpoints need " in done.out
        assert "A higher --level may find a smaller plan, and --budget " in done.out
        assert [line for line in done.out.splitlines() if line.strip().startswith("–  ") and OWN in line]
        assert not list(Path().glob("models.Asking.memopt.p*"))
        summary = json.loads(Path("models.Asking.memopt.summary.json").read_text())["summary"]
        found, own = summary["levels"][1]["outcome"], summary["own_checkpoints"]
        assert own["allocated_peak_bytes"] < found["allocated_peak_bytes"]
        assert (summary["applied_level"], summary["plan"]["segments"]) == (0, [])

    def test_a_budget_that_only_its_checkpoints_meet_needs_no_plan(self, memopt: Any) -> None:
        done = memopt("optimize", "models.py:Asking", *self.OF_ONE, "--budget", "640KiB", "--plan-only")
        assert done.code == 0, done.err
        assert "with its own checkpoints is within the budget of 640.0 KiB" in done.out
        assert not Path("models.Asking.memopt.plan.yaml").exists()
        assert memopt("optimize", "models.py:Asking", *self.OF_ONE, "--budget", "300KiB", "--plan-only").code != 0

    def test_it_is_a_row_of_the_frontier(self, memopt: Any) -> None:
        done = memopt("optimize", "models.py:Asking", *self.OF_ONE, "--frontier", "--plan-only")
        assert done.code == 0, done.err
        assert [line for line in done.out.splitlines() if line.strip().startswith("–  ") and OWN in line]

    def test_an_attribute_that_no_checkpoint_asks_is_left_alone(self, memopt: Any) -> None:
        done = memopt("optimize", "models.py:Never", *FLAGS)
        assert done.code == 0, done.err
        assert "checkpoints by itself" not in done.out
        assert "turns_off" not in Path("models.Never.memopt.plan.yaml").read_text()

    @pytest.mark.parametrize("command", [("profile",), ("optimize", *FLAGS[2:])])
    def test_where_nothing_turns_it_off_that_is_said(self, command: tuple[str, ...], memopt: Any) -> None:
        done = memopt(command[0], "models.py:always", "-i", "512x16", *command[1:])
        assert "The model checkpoints by itself, in the forward of '(root)'. A plan cannot change that" in done.out

    def test_other_commands_run_the_step_as_it_came(self, memopt: Any) -> None:
        peaks = {}
        for name in ("Asking", "always", "plain"):
            done = memopt("profile", f"models.py:{name}", "-i", "512x16", "--json")
            peaks[name] = json.loads(done.out)["tensor_peak_bytes"]
        assert peaks["Asking"] == peaks["always"] < peaks["plain"]

    def test_a_fastest_training_is_searched_without_it(self, memopt: Any) -> None:
        asked = ("-i", "64x16", "--memory", "256KiB", "--search", "--search-time", "1")
        done = memopt("recommend-batch", "models.py:Asking", *asked)
        assert "The model checkpoints by itself (use_checkpoint of 1 module). The search" in done.out
        assert "Batches without a plan also run with the model's own checkpointing off" in done.out

    def test_an_explanation_looks_for_plans_without_it(self, memopt: Any) -> None:
        done = memopt("explain", "models.py:Asking", "-i", "64x16", "--memory", "110KiB")
        assert "The model checkpoints by itself, in the forward of '(root)'. A plan cannot change that" in done.out
        assert "The model checkpoints by itself (use_checkpoint of 1 module). The search" in done.out


@pytest.mark.slow
def test_a_live_model_has_it_off_under_its_plan() -> None:
    from tests.api.live_model import Block

    class Live(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint else block(x)
            return x

    net, x = Live(), torch.randn(512, 8)
    found = memopt_cli.optimize(net, x, level=1, max_slowdown=float("inf"))
    assert found.summary.plan.segments
    assert not net.use_checkpoint
    assert any(note.startswith(BY_ITSELF) for note in found.summary.notes)
    assert memopt_cli.remove_plan(net).use_checkpoint
    _, summary = memopt_cli.spikingjelly.apply_gc(net, Block, x, device="cpu", return_summary=True)
    assert summary["gc_wrap_count"] == 4
    assert "The model's own checkpointing is off under the plan (use_checkpoint of 1 module)." in summary["notes"]


def test_transformers_switches_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=8
    )
    model = transformers.BertModel(config)
    assert find_switches(model) == ()
    model.gradient_checkpointing_enable()
    layers = {f"encoder.layer.{index}.gradient_checkpointing" for index in range(2)}
    assert layers <= {*find_switches(model)}
    with watched_checkpoints(model) as found:
        model.train()(torch.zeros(1, 4, dtype=torch.int64))
    assert set(found) == {"encoder.layer.0", "encoder.layer.1"}
