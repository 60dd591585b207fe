"""``memopt verify``: what is the same passes, and what differs is found, with the module and the likely cause."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree as ET

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memopt_cli
from memopt_cli.errors import OptionError, StepError, UsageError
from memopt_cli.measure import processes
from memopt_cli.measure.answers import followed as following
from memopt_cli.measure.jobs import ORIGINAL, FollowJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline.equivalence import compare_prepared, verify
from memopt_cli.pipeline.fingerprints import causes
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import (
    Equivalence,
    EquivalenceRequest,
    FollowedSteps,
    InputSpec,
    ModelSource,
    Plan,
    SegmentPlan,
    TensorSpec,
    Trust,
)
from memopt_cli.records.progress import Progress
from memopt_cli.report.github import GithubReport
from memopt_cli.report.json import JsonReport
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextReport
from memopt_cli.runtime.private_torch import compiled_with_eager_random, compiled_within_budget
from tests.zoo.models import GIVEN, Parts
from tests.zoo.prepared import prepare_here

ROWS = 8


class Block(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 10)
        self.inner = nn.Sequential(*inner)
        self.narrow = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(self.wide(x))
        return x + self.narrow(hidden)


def plainly(block: Callable[..., Any], *given: Any) -> Any:
    return block(*given)


class Net(nn.Module):
    """A layer, and blocks that are called by ``around``, as a checkpoint is."""

    def __init__(self, *blocks: nn.Module, around: Callable[..., Any] = plainly) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(blocks)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x


def checked(block: nn.Module, x: Tensor, **options: Any) -> Any:
    return checkpoint(block, x, **{"use_reentrant": False, **options})


forgetful = functools.partial(checked, preserve_rng_state=False)
reentrant = functools.partial(checked, use_reentrant=True)


def pair(make: Callable[[], nn.Module], around: Callable[..., Any] = checked) -> list[Callable[[], nn.Module]]:
    """Blocks as they are, and in checkpoints."""
    return [lambda: Net(make(), make()), lambda: Net(make(), make(), around=around)]


def prepared(make: Callable[[], nn.Module], carried: Plan = ORIGINAL, **settings: Any) -> PreparedModel:
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 6)),), dims={"B": ROWS}, source="here")
    return prepare_here(make, spec, ROWS, carried, **settings)


def verified(
    reference: Callable[[], nn.Module], candidate: Callable[[], nn.Module], *, steps: int = 3, **settings: Any
) -> Equivalence:
    one, other = (prepared(make, **settings) for make in (reference, candidate))
    return compare_prepared(one, other, steps)


def dropping() -> nn.Module:
    return Block(nn.Dropout(0.4))


class Expanded(Parts, scale=lambda: nn.Parameter(torch.full((1,), 0.7).expand(10), requires_grad=False)):
    """With a parameter that nobody can write to."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2)), nn.Flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        pytest.param(*pair(dropping), id="dropout in a checkpoint"),
        pytest.param(*pair(dropping, reentrant), id="dropout in a reentrant checkpoint"),
        pytest.param(*pair(lambda: Block(nn.LayerNorm(10), nn.GELU())), id="layer norm"),
        pytest.param(*pair(recurrent), id="views"),
        pytest.param(*pair(lambda: Block(Expanded())), id="an expanded parameter"),
        pytest.param(*[lambda: Net(Block(nn.BatchNorm1d(10)))] * 2, id="batch norm, twice the same"),
    ],
)
@pytest.mark.parametrize("optimizer", ["", "adamw"])
def test_what_is_the_same_is_the_same_to_the_bit(
    reference: Callable[[], nn.Module], candidate: Callable[[], nn.Module], optimizer: str
) -> None:
    found = verified(reference, candidate, optimizer=optimizer)
    assert (found.alike, found.gaps, found.cause, found.failed) == ("to the bit", (), None, "")
    assert found.compared > 10


def test_numpy_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def numpy(tensor: Tensor) -> NoReturn:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(Tensor, "numpy", numpy)
    assert verified(*pair(dropping)).alike == "to the bit"


@pytest.mark.slow
def test_a_plan_that_a_file_carries_stays_on() -> None:
    plan = Plan(segments=(SegmentPlan(path="blocks.0"), SegmentPlan(path="blocks.1", chunks=2)))
    reference, _ = pair(lambda: Block(nn.Dropout(0.4)))
    other = prepared(reference, plan)
    found = compare_prepared(prepared(reference), other, 2)
    assert found.alike != "to the bit"  # chunks draw their masks one after the other
    plan = Plan(segments=plan.segments[:1])
    assert compare_prepared(prepared(reference), prepared(reference, plan), 2).alike == "to the bit"


class InOtherOrder(Parts, weight=lambda: nn.Parameter(torch.randn(6, 6)), parts=GIVEN):
    """A product whose sums are formed in parts."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(self.parts, 1), self.weight.chunk(self.parts, 1), strict=True)
        product = torch.stack([nn.functional.linear(a, b) for a, b in pieces]).sum(0)
        return nn.functional.gelu(product)


def test_sums_in_another_order_are_rounding_and_nothing_else_is() -> None:
    found = verified(lambda: InOtherOrder(1), lambda: InOtherOrder(3))
    assert (found.alike, found.precision) == ("up to rounding", "fp64")
    assert 0 < found.worst < 1e-5

    class Off(InOtherOrder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e-6)

    off = verified(lambda: InOtherOrder(1), lambda: Off(1))
    assert (off.alike, off.precision) == ("not", "fp64")


def test_where_float64_tells_nothing_half_of_the_digits_decide() -> None:
    found = verified(lambda: InOtherOrder(1), lambda: InOtherOrder(3), precision="bf16")
    assert found.alike in ("as far as memopt can tell", "to the bit")

    class Stubborn(InOtherOrder):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise RuntimeError("no float64 here")
            return super().forward(x)

    found = verified(lambda: Stubborn(1), lambda: Stubborn(3))
    assert found.alike == "as far as memopt can tell"
    assert any("no float64 here" in note for note in found.notes)


class Noisy(Parts, layer=lambda: nn.Linear(6, 6), noise=nn.RReLU):
    """Ends with noise that it saves before it is drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.layer(x))


class Router(
    Parts,
    gate=lambda: nn.Parameter(torch.randn(1, 6)),
    experts=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(2)),
    parts=GIVEN,
):
    """One of two experts a row, whose gates are the same but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(16, 1) * torch.linspace(0.1, 3, 16 * len(x))[:, None].to(x.dtype)
        pieces = zip(x.chunk(self.parts, 1), self.gate.chunk(self.parts, 1), strict=True)
        other = torch.stack([nn.functional.linear(a, b) for a, b in pieces]).sum(0)
        gates = torch.cat([nn.functional.linear(x, self.gate), other], 1)
        chosen = gates.argmax(1)
        return torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]


class Overwriting(Parts, block=lambda: Block(nn.Tanh()), around=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        out: Tensor = self.around(self.block, x)
        x.data.mul_(2)
        return out


class Counting(Parts, layer=lambda: nn.Linear(6, 6), calls=lambda: [0]):
    """Gives something else each time that it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return torch.tanh(self.layer(x * self.calls[0]))


class Counted(Block):
    """Keeps something that no output depends on."""

    def __init__(self, kept: str) -> None:
        super().__init__(nn.Tanh())
        self.kept = kept
        self.steps, self.mean, self.held = 0, torch.zeros(6), {"seen": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        if self.kept == "steps":
            self.steps += 1
        elif self.kept == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.held["seen"].add_(len(x))
        return super().forward(x)


class DropFunction(Parts, around=GIVEN):
    """Dropout that no module does and no mode turns off."""

    def forward(self, x: Tensor) -> Tensor:
        return self.around(lambda x: nn.functional.dropout(torch.tanh(x), 0.4), x)


def drawing_first(block: nn.Module, x: Tensor) -> Any:
    torch.rand(1)
    return block(x)


def halved(block: nn.Module, x: Tensor) -> Any:
    out = block(x)
    return 0.5 * out + 0.5 * out.detach() if block.training else out


def frozen_weight() -> nn.Module:
    net = Net(Block(nn.Tanh()))
    net.blocks[0].wide.weight.requires_grad_(False)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "candidate", "module", "text"),
    [
        pytest.param(*pair(dropping, forgetful), "blocks.1.inner.0", causes.REDRAWS, id="generators not kept"),
        pytest.param(*pair(Noisy), "blocks.1.noise", causes.EARLY_STOP, id="noise at the end of a checkpoint"),
        pytest.param(*pair(lambda: Block(nn.BatchNorm1d(10))), "blocks.0.inner.0", causes.REPEAT, id="norm twice"),
        pytest.param(*pair(Counting), "blocks.1", causes.OTHER_OUTPUT, id="a counter"),
        pytest.param(
            lambda: Overwriting(plainly), lambda: Overwriting(checked), "block", causes.CHANGED_INPUT, id="an input",
        ),
        pytest.param(
            lambda: Net(Block(nn.Dropout(0.4))), lambda: Net(Block(nn.Dropout(0.5))), "blocks.0.inner.0",
            causes.OTHER_DRAWING, id="another rate",
        ),
        pytest.param(
            lambda: Net(dropping()), lambda: Net(dropping(), around=drawing_first), "blocks.0.inner.0", causes.DRAWS,
            id="a number drawn before",
        ),
        pytest.param(*pair(lambda: Counted("steps")), "blocks.0", causes.REPEAT, id="a number in an attribute twice"),
        pytest.param(*pair(lambda: Counted("mean")), "blocks.0", causes.REPEAT, id="a tensor in an attribute twice"),
        pytest.param(*pair(lambda: Counted("held")), "blocks.0", causes.REPEAT, id="a tensor in a dict twice"),
        pytest.param(
            lambda: Net(Block(nn.BatchNorm1d(10), nn.Dropout(0.4))),
            lambda: Net(Block(nn.BatchNorm1d(10, momentum=0.3), nn.Dropout(0.4))),
            "blocks.0.inner.0", causes.OTHER_VALUES, id="another momentum beside dropout",
        ),
        pytest.param(lambda: Net(Block(nn.Tanh())), lambda: frozen_weight(), "blocks.0.wide.weight", causes.FREEZING,
            id="a frozen parameter",
        ),
        pytest.param(lambda: Net(Block()), lambda: frozen_front(), "blocks.0.wide.weight", causes.FREEZING,
            id="a frozen parameter of a renamed module",
        ),
        pytest.param(
            lambda: Net(Block(DropFunction(plainly))), lambda: Net(Block(DropFunction(forgetful))), "",
            causes.REDRAWS,
            id="a function in a checkpoint",
        ),
        pytest.param(
            lambda: Net(Block(nn.GELU())), lambda: Net(Block(nn.GELU("tanh"))), "blocks.0.inner.0", causes.OTHER_CODE,
            id="another activation",
        ),
        pytest.param(*pair(dropping, halved), "blocks.1.narrow", causes.IN_BACKWARD.format(causes.FROM_MODULE),
            id="a gradient halved in training, beside dropout",
        ),
        pytest.param(
            *pair(lambda: Block(nn.Tanh()), halved), "blocks.1.narrow", causes.IN_BACKWARD.format(causes.FROM_MODULE),
            id="a gradient halved without random numbers",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_named(
    reference: Callable[[], nn.Module], candidate: Callable[[], nn.Module], module: str, text: str
) -> None:
    found = verified(reference, candidate)
    assert not found.passed
    assert found.differs_in_step == 1
    assert found.gaps
    assert (found.cause.module, found.cause.text) == (module, text)


def test_ties_that_fall_otherwise() -> None:
    found = verified(lambda: Router(1), lambda: Router(3))
    assert not found.passed
    assert found.cause.text == f"{causes.TIES} (argmax)"


def test_no_gradient_under_a_reentrant_checkpoint() -> None:
    def frozen(around: Callable[..., Any]) -> nn.Module:
        net = Net(Block(nn.Tanh()), Block(nn.Tanh()), around=around)
        net.first.requires_grad_(False)
        net.register_module("head", nn.Linear(6, 6))
        net.register_forward_hook(lambda module, args, output: module.head(output))
        return net

    found = verified(lambda: frozen(plainly), lambda: frozen(reentrant))
    missing = [gap for gap in found.gaps if gap.missing == "candidate"]
    assert missing[0].name == "gradient of blocks.0.inner.0.bias" or missing[0].name.startswith("gradient of blocks.0")
    assert found.cause.text == causes.REENTRANT


class Routed(Block):
    """Takes another way, or another expert, each time that it runs."""

    def __init__(self, *, experts: bool, drawn: bool = False) -> None:
        super().__init__(nn.Tanh())
        self.calls, self.experts, self.drawn = 0, experts, drawn
        self.ways = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.drawn:  # by a number that is the first of its seed, or is not
            self.calls = int(torch.rand(1).item() == self.first_drawn())
        if self.experts:
            chosen = self.ways[self.calls % 2](x)
            return x + (torch.tanh(torch.tanh(chosen)) if self.calls % 2 else torch.relu(chosen))
        return super().forward(x) if self.calls % 2 else x + torch.tanh(torch.tanh(self.ways[0](x)))

    def first_drawn(self) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.rand(1).item()


class RowsPicked(Block):
    """Lets through the rows that a generator of its own picks."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), generator=self.own) > 0.5
        return x.index_put((kept,), super().forward(x[kept]))


class Caching(Block):
    """Appends to a cache, of its own or that it is given."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        cache = self.cache if cache is None else cache
        cache.append(self.wide(x))
        known = torch.cat(cache)
        return x + self.narrow(torch.softmax(cache[-1] @ known.T, -1) @ known)


class Cached(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.cache = []
        return super().forward(x)


class WithACacheGiven(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.blocks[0], self.first(x), [])  # type: ignore[no-any-return]


class CachingFunction(Net):
    """A function in a checkpoint that calls no module."""

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []

        def attend(x: Tensor) -> Tensor:
            cache.append(torch.tanh(x))
            known = torch.cat(cache)
            return x + torch.softmax(x @ known.T, -1) @ known

        return self.around(attend, self.first(x))


class HookedOnce(Net):
    """A hook that is not to be called twice in a step."""

    def __init__(self, *blocks: nn.Module, around: Callable[..., Any] = plainly) -> None:
        super().__init__(*blocks, around=around)
        self.scales: list[float] = []
        for block in self.blocks:
            block.wide.register_forward_pre_hook(lambda module, args: (args[0] * self.scales.pop(),))

    def forward(self, x: Tensor) -> Tensor:
        self.scales = [0.5, 1.0]
        return super().forward(x)


class HookedThrice(Net):
    """A block that is called twice, with a hook that is not to be called twice for each."""

    def __init__(self, *blocks: nn.Module, around: Callable[..., Any] = plainly) -> None:
        super().__init__(*blocks, *blocks, around=around)
        self.left: list[None] = []
        self.blocks[0].register_forward_pre_hook(lambda module, args: self.left.pop())

    def forward(self, x: Tensor) -> Tensor:
        self.left = [None] * 3
        return super().forward(x)


class Within(Parts, block=lambda: Block(nn.Tanh())):
    """Is given a tensor, and the same in a dict."""

    def forward(self, x: Tensor, others: dict[str, Tensor]) -> Tensor:
        return self.block(x + others["x"])


class GivenADict(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.around(self.blocks[0], x, {"x": x})


def selective(block: nn.Module, x: Tensor) -> Any:
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.tanh.default]
    return checked(block, x, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))


def given_checked(block: nn.Module, *given: Any, use_reentrant: bool = False) -> Any:
    return checkpoint(block, *given, use_reentrant=use_reentrant)


given_reentrant = functools.partial(given_checked, use_reentrant=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "around", "module", "text"),
    [
        pytest.param(lambda around: Net(Routed(experts=False), around=around), checked, "blocks.0",
            causes.OTHER_CALLS.format("blocks.0.ways.0"), id="another way"),
        pytest.param(lambda around: Net(Routed(experts=True), around=around), checked, "blocks.0",
            causes.OTHER_CALLS.format("blocks.0.ways.0"), id="another expert"),
        pytest.param(lambda around: Net(RowsPicked(), around=around), checked, "blocks.0", causes.REDRAWS,
            id="rows by random numbers"),
        pytest.param(lambda around: Net(Routed(experts=True, drawn=True), around=around), forgetful, "blocks.0",
            causes.REDRAWS, id="an expert by random numbers"),
        pytest.param(lambda around: Cached(Caching(), around=around), checked, "blocks.0", causes.OTHER_OUTPUT,
            id="a cache of its own"),
        pytest.param(lambda around: WithACacheGiven(Caching(), around=around), given_checked, "blocks.0",
            causes.CHANGED_INPUT, id="a cache that it is given"),
        pytest.param(lambda around: CachingFunction(around=around), checked, "", causes.OTHER_TENSORS,
            id="a cache of a function"),
        pytest.param(lambda around: HookedOnce(Block(nn.Tanh()), Block(nn.Tanh()), around=around), checked,
            "blocks.1.wide", causes.NEW_ERROR, id="a hook"),
        pytest.param(lambda around: HookedThrice(Block(nn.Tanh()), around=around), checked, "blocks.0",
            causes.NEW_ERROR, id="a hook of a module that is called twice"),
        pytest.param(lambda around: Net(Routed(experts=False), around=around), selective, "blocks.0",
            causes.OTHER_CALLS.format("blocks.0.ways.0"), id="a selective checkpoint"),
        pytest.param(lambda around: GivenADict(Within(), around=around), given_reentrant, "", causes.REENTRANT_WITHIN,
            id="a dict in a reentrant checkpoint"),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure_is_named(
    make: Callable[[Callable[..., Any]], nn.Module], around: Callable[..., Any], module: str, text: str
) -> None:
    found = verified(lambda: make(plainly), lambda: make(around))
    assert (found.passed, found.differs_in_step) == (False, 1)
    assert found.failed
    assert found.cause is not None, found.failed
    assert (found.cause.module, found.cause.text) == (module, text), found.failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "is_kept_alike", "text"),
    [
        (0.0, False, causes.DRAWS_IN_BACKWARD),
        (0.0, True, causes.DRAWS_IN_BACKWARD),
        (1.0, False, causes.DRAWS_COMPILED),
    ],
)
def test_wrong_gradients_of_a_compiled_model_are_not_taken_for_other_random_numbers(
    budget: float, is_kept_alike: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytorch#190758: under a memory budget, dropout has another mask in backward.

    ``is_kept_alike``: not where it draws eager mode's numbers, as in Inductor, which recomputes other operators then.
    """
    import torch._functorch.config as config

    @contextlib.contextmanager
    def kept_alike() -> Iterator[None]:
        with compiled_with_eager_random(), compiled_within_budget():
            yield

    if is_kept_alike:
        monkeypatch.setitem(following._COMPILING, "same random numbers", kept_alike)  # type: ignore[arg-type]

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 6))

    with config.patch(activation_memory_budget=budget):
        found = verified(net, lambda: torch.compile(net(), backend="aot_eager_decomp_partition"))  # type: ignore[arg-type, return-value]
    assert not found.passed
    assert found.cause.text == text


def test_a_step_that_fails_says_in_which_one_and_why() -> None:
    def frozen(around: Callable[..., Any]) -> nn.Module:
        net = Net(Block(nn.Tanh()), around=around)
        net.first.requires_grad_(False)
        return net

    found = verified(lambda: frozen(plainly), lambda: frozen(reentrant))
    assert (found.differs_in_step, found.passed) == (1, False)
    assert "nothing to differentiate" in found.failed
    assert found.cause.text == causes.REENTRANT

    class Tired(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            if self.calls[0] > 1:
                raise RuntimeError("enough")
            return torch.tanh(self.layer(x))

    class Rested(Tired):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    late = verified(Rested, Tired)
    assert (late.differs_in_step, late.cause) == (2, None)
    assert late.failed.startswith("forward of Tired raised RuntimeError: enough (")


class Varied(Parts, first=lambda: nn.Linear(6, 6), second=lambda: nn.Linear(6, 6), variant=GIVEN):
    """Two layers; what a subclass does with them depends on ``variant``, which is 1 in the candidate."""

    def plain(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.variant:  # the same sums in another order
            pieces = zip(x.chunk(3, 1), self.first.weight.chunk(3, 1), strict=True)
            hidden = torch.stack([nn.functional.linear(a, b) for a, b in pieces]).sum(0) + self.first.bias
        return self.second(hidden)


class Late(Varied, calls=lambda: [0]):
    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.second(self.first(x)) * (1 + 1e-4 * (self.variant and self.calls[0] == 2))  # type: ignore[no-any-return]


class Counts(Varied, seen=0):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1 + self.variant
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Averages(Varied, mean=lambda: {"of": [0.0]}):
    def forward(self, x: Tensor) -> Tensor:
        self.mean["of"][0] += 0.5 * (1 + self.variant)
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Draws(Varied, own=lambda: torch.Generator().manual_seed(1)):
    draw: Callable[[Any], Any] = staticmethod(lambda generator: torch.rand(1, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.variant):
            self.draw(self.own)
        return self.second(self.first(x))  # type: ignore[no-any-return]


class DrawsFromNumPy(Draws, own=lambda: numpy.random.default_rng(1)):
    draw = staticmethod(lambda generator: generator.random())


class DrawsFromPython(Draws, own=lambda: random.Random(1)):
    draw = staticmethod(lambda generator: generator.random())


class Writes(Varied):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        x.data[0, 0] += self.variant * 1e-3
        return out


class Tells(Varied):
    def forward(self, x: Tensor) -> Any:
        out = self.second(self.first(x))
        return out, {"mean": float(out.mean()) * (1 + 1e-3 * self.variant)}


class Named(Varied):
    def forward(self, x: Tensor) -> Any:
        pair = self.first(x), self.second(x)
        return dict(zip(("b", "a") if self.variant else ("a", "b"), pair, strict=True))


class Overflows(Varied, zero=lambda: nn.Parameter(torch.zeros(1))):
    """One gradient is infinite, which says nothing of the others."""

    def forward(self, x: Tensor) -> Any:
        out = self.second(self.first(x))
        return out.detach() + (out - out.detach()) * (1 + 1e-3 * self.variant), self.zero.sqrt()


class Complex(Varied, turn=lambda: nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))):
    """With a complex parameter, whose imaginary part is a little wrong."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.first(x).to(torch.complex64) @ self.turn
        return torch.view_as_real(turned) * torch.tensor([1, 1 + 1e-4 * self.variant], dtype=x.dtype)


class Narrow(Varied, first=lambda: nn.Linear(6, 6).double(), second=lambda: nn.Linear(6, 6).double()):
    """In float64, and within the candidate in float32."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.double())
        return self.second(hidden.to(torch.float32).double() if self.variant else hidden)  # type: ignore[no-any-return]


def watched() -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, output: None)
    return module


class Evicted(Varied, watched=watched, times=2):
    """Its hook is called once less; or never, where sums are formed in another order besides."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times - self.variant):
            self.watched(x)
        return self.plain(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "first"),
    [
        (Late, "output"),
        (Counts, "state seen"),
        (Averages, "state mean"),
        (Draws, "state own"),
        (DrawsFromNumPy, "state own"),
        (DrawsFromPython, "state own"),
        (Writes, "input[0]"),
        (Tells, "output[1].mean"),
        (Named, "output.a"),
        (Overflows, "gradient of second.bias"),
        (Complex, "output"),
        (Narrow, "output"),
    ],
)
def test_what_is_easily_missed(model: Callable[[int], nn.Module], first: str) -> None:
    found = verified(lambda: model(0), lambda: model(1), steps=2)
    assert not found.passed
    assert first in [gap.name for gap in found.gaps]
    assert found.differs_in_step == (2 if model is Late else 1)


@pytest.mark.parametrize("times", [1, 2])
def test_a_hook_that_is_called_less_is_no_rounding(times: int) -> None:
    found = verified(lambda: Evicted(0, times=times), lambda: Evicted(1, times=times), steps=2)
    assert (found.alike, found.gaps) == ("not", ())
    assert found.hooks


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_float64_tells_counts_under_autocast(precision: str) -> None:
    class Off(Varied):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) * (1 + 0.01 * self.variant)  # type: ignore[no-any-return]

    found = verified(lambda: Off(0), lambda: Off(1), steps=1, precision=precision)
    assert (found.alike, found.precision) == ("not", "fp64")


class Scaled(Varied):
    """In float16 its gradients are finite below the scale that scalers begin with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * 30  # type: ignore[no-any-return]


def test_updates_in_float16_are_taken() -> None:
    followed = LocalSession(prepared(lambda: Scaled(0), precision="fp16").subject, 60.0, lambda: Scaled(0)).ask(
        FollowJob(steps=1)
    )
    assert isinstance(followed, FollowedSteps)
    start = {tensor.name: tensor.bits for tensor in followed.start}
    assert any(start.get(tensor.name, tensor.bits) != tensor.bits for tensor in followed.steps[0].effects)


class Masked(Varied):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x).masked_fill(torch.eye(len(x), 6, dtype=torch.bool), float("-inf"))


class Keeps(Varied, mean=lambda: torch.zeros(6)):
    """The candidate keeps a tensor, and counts, besides."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        if self.variant:
            self.last = out.detach()
            self.calls = getattr(self, "calls", 0) + 1
        self.mean = out.detach().mean(0)
        return out


class Clocked(Varied, noted=0):
    def forward(self, x: Tensor) -> Any:
        self.noted = time.perf_counter_ns()
        return self.second(self.first(x)), time.perf_counter()


class Noisy64(Varied):
    """Its sums differ in the last digit from run to run, as atomic ones do, and in the candidate a little more."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.finfo(x.dtype).eps * (int.from_bytes(os.urandom(1), "big") - 128) / 1024
        return self.plain(x) * (1 + noise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "alike"),
    [
        (Masked, ("up to rounding",)),
        (Keeps, ("to the bit",)),
        (Clocked, ("to the bit",)),
        (Noisy64, ("up to rounding", "within noise", "to the bit")),
    ],
)
def test_what_is_no_difference(model: Callable[[int], nn.Module], alike: tuple[str, ...]) -> None:
    assert verified(lambda: model(0), lambda: model(1), steps=2).alike in alike


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "module"), [(nn.Dropout(0.4), "blocks.0.inner.0"), (nn.BatchNorm1d(10), "blocks.0.inner.0")]
)
def test_eval_mode_in_one_of_the_two_is_a_difference(inner: nn.Module, module: str) -> None:
    makes = [functools.partial(in_mode, inner, training) for training in (True, False)]
    for reference, candidate, whose in ((*makes, "candidate"), (*reversed(makes), "reference")):
        found = verified(reference, candidate, steps=1)
        assert not found.passed
        assert (found.cause.module, found.cause.text) == (module, causes.EVAL_MODE.format(whose, whose))
        assert f"blocks was given in eval mode only in the {whose}." in found.notes


def in_mode(inner: nn.Module, training: bool) -> nn.Module:
    net = Net(Block(inner))
    net.blocks.train(training)
    net.blocks[0].narrow.train()  # modes are those of each module
    return net


def test_eval_mode_that_changes_nothing_is_noted() -> None:
    found = verified(lambda: in_mode(nn.Tanh(), True), lambda: in_mode(nn.Tanh(), False), steps=1)
    assert found.alike == "to the bit"
    assert found.notes == ("blocks was given in eval mode only in the candidate.",)


@pytest.mark.slow
def test_both_in_eval_mode_are_trained() -> None:
    def evaluated(around: Callable[..., Any]) -> nn.Module:
        return Net(dropping(), around=around).eval()

    assert verified(lambda: evaluated(checked), lambda: evaluated(checked), steps=1).notes == ()
    wrong = verified(lambda: evaluated(checked), lambda: evaluated(forgetful), steps=1)
    assert not wrong.passed
    both = verified(lambda: in_mode(nn.Dropout(0.4), False), lambda: in_mode(nn.Dropout(0.4), False), steps=1)
    assert both.passed
    assert "blocks was given in eval mode, but models are compared in training mode" in both.notes[0]


class InAnyOrder(Varied):
    """Its outputs are the same by their keys."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        outputs = {"hidden": hidden, "parts": [{"b": hidden.sum(1), "a": self.second(hidden)}], 3: hidden.mean()}
        return dict(reversed(outputs.items())) if self.variant else outputs


def test_outputs_are_the_same_by_their_keys() -> None:
    assert verified(lambda: InAnyOrder(0), lambda: InAnyOrder(1), steps=1).alike == "to the bit"


class NeverFinite(Varied):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out + (out * 0).sqrt() if self.variant else out


class NaN(Varied):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * math.nan  # type: ignore[no-any-return]


def test_a_reference_of_nan_says_nothing() -> None:
    with pytest.raises(StepError, match="the reference's gradients are all NaN or infinity"):
        verified(lambda: NaN(0), lambda: NaN(0), steps=1)


def test_gradients_that_are_never_finite_are_a_difference() -> None:
    found = verified(lambda: NeverFinite(0), lambda: NeverFinite(1), precision="fp16")
    assert found.failed.startswith("the gradients hold NaN or infinity, however small the loss is scaled")
    assert "set_detect_anomaly" in found.failed
    assert found.differs_in_step == 1
    with pytest.raises(StepError, match=r"the reference's step fails: the gradients hold NaN"):
        verified(lambda: NeverFinite(1), lambda: NeverFinite(0), precision="fp16")


@pytest.mark.slow
def test_gradients_of_inputs_that_want_them() -> None:
    class Cut(Varied):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + self.first(x.detach() if self.variant else x)) + x.sum() * 0  # type: ignore[no-any-return]

    reference, candidate = Cut(0), Cut(1)
    candidate.load_state_dict(reference.state_dict())
    x = torch.randn(ROWS, 6, requires_grad=True)
    found = memopt_cli.verify(reference, candidate, x, steps=1).result
    assert found.gaps[0].name == "gradient of input[0]"
    assert x.grad is None


class Carrying(Parts, layer=lambda: nn.Linear(6, 6), last=lambda: torch.zeros(ROWS, 6), cut=GIVEN):
    """Adds what it gave last time, cut from the graph or not."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.last
        self.last = out.detach() if self.cut else out
        return out


def test_a_graph_that_only_the_candidate_keeps_from_step_to_step() -> None:
    found = verified(lambda: Carrying(cut=True), lambda: Carrying(cut=False))
    assert (found.passed, found.differs_in_step) == (False, 2)
    assert "backward through the graph a second time" in found.failed
    assert found.cause.text == causes.STALE_GRAPH
    both = verified(lambda: Carrying(cut=False), lambda: Carrying(cut=False))  # as loops detach spiking neurons
    assert both.alike == "to the bit"


def hooked(*names: str, around: Callable[..., Any] = plainly) -> nn.Module:
    net = Net(Block(nn.Tanh()), around=around)
    for name in names:
        hook = lambda module, args, output: None  # noqa: E731
        hook.__name__ = name
        net.blocks[0].wide.register_forward_hook(hook)
    return net


@pytest.mark.slow
def test_hooks_that_are_not_called_or_in_another_order() -> None:
    missing = verified(lambda: hooked("record", "count"), lambda: hooked("count"))
    assert (missing.alike, missing.hooks) == ("not", "the hook record of blocks.0.wide is never called")
    turned = verified(lambda: hooked("record", "count"), lambda: hooked("count", "record"))
    assert "in a different order" in turned.hooks
    again = verified(lambda: hooked("record"), lambda: hooked("record", around=checked))
    assert again.alike == "to the bit"
    assert again.notes == (
        "The hook record of blocks.0.wide is called 2 times per step instead of 1, in recomputations too.",
    )


class Renamed(nn.Module):
    """A net of one block whose block has another name."""

    def __init__(self, drawn: int = 0) -> None:
        super().__init__()
        torch.rand(drawn)
        block = Block()  # as the argument of Net is: made before the layer in front of it
        self.first = nn.Linear(6, 6)
        self.front = block

    def forward(self, x: Tensor) -> Tensor:
        return self.front(self.first(x))


def frozen_front() -> nn.Module:
    net = Renamed()
    net.front.wide.weight.requires_grad_(False)
    return net


class Longer(Renamed):
    """The net whose block has another name, with a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(6, 6)


@pytest.mark.slow
def test_a_renamed_module_is_compared_under_the_name_of_the_reference() -> None:
    same = verified(lambda: Net(Block()), lambda: Renamed())
    assert same.alike == "to the bit"
    assert same.notes == ("Compared under the names of the reference: front is blocks.0.",)
    with pytest.raises(StepError, match=r"start with different values of parameter blocks\.0\."):
        verified(lambda: Net(Block()), lambda: Renamed(drawn=1))


class Named(Parts, layer=lambda: nn.Linear(6, 6)):
    """A net whose layer has a name of the user's choice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, self._modules.pop("layer"))

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.children()
        return layer(x)


@pytest.mark.parametrize("name", ["output", "input"])
def test_outputs_and_inputs_are_not_taken_for_a_renamed_module(name: str) -> None:
    same = verified(lambda: Named("head"), lambda: Named(name), steps=1)
    assert same.alike == "to the bit"
    assert same.notes == (f"Compared under the names of the reference: {name} is head.",)


class Renorm(nn.Module):
    """A norm that counts twice, beside one that has its old name and counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.renamed, self.norm = nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        self.renamed(x)
        return self.renamed(x)


class Norm(Parts, norm=lambda: nn.BatchNorm1d(6)):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_module_is_not_renamed_to_one_that_the_candidate_has() -> None:
    with pytest.raises(StepError, match=r"the candidate has no norm\.weight, norm\.bias; it also has renamed\."):
        verified(Norm, Renorm)


@pytest.mark.slow
def test_models_that_are_not_one_are_refused() -> None:
    with pytest.raises(StepError, match=r"the candidate has no blocks\.1\.\w+\.weight, .* and \d more\n"):
        verified(lambda: Net(Block(), Block()), lambda: Net(Block()))
    with pytest.raises(StepError, match=r"the candidate also has blocks\.1\.\w+\.weight, .* and \d more\n"):
        verified(lambda: Net(Block()), lambda: Net(Block(), Block()))
    with pytest.raises(StepError, match="the candidate has no parameter") as around:
        verified(lambda: Net(Block()), lambda: nn.Sequential(Net(Block())))
    assert "a model around it" in str(around.value.hint)

    with pytest.raises(StepError, match=r"also has more\.weight, more\.bias \(front is blocks\.0\)\n"):
        verified(lambda: Net(Block()), lambda: Longer())
    with pytest.raises(StepError, match=r"other shapes: 0\.weight 4x6 → 5x6, 0\.bias 4 → 5, 1\.weight 2x4 → 2x5\n"):
        verified(*(lambda width=width: nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2)) for width in (4, 5)))

    def other() -> nn.Module:
        net = Net(Block())
        with torch.no_grad():
            net.first.bias.add_(1)
        return net

    with pytest.raises(StepError, match=r"different values of parameter first\.bias\n.*in a different order: load"):
        verified(lambda: Net(Block()), other)


class Unsteady(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * int.from_bytes(os.urandom(6), "big")


def test_a_reference_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(StepError, match="not repeatable"):
        verified(Unsteady, Unsteady)


def test_a_reference_that_fails_is_refused() -> None:
    with pytest.raises(StepError, match=r"the reference's step fails: module .* rejected its input"):
        verified(lambda: Net(nn.Linear(7, 7)), lambda: Net(nn.Linear(7, 7)))


class Wrapped(nn.Module):
    """As DataParallel and torch.compile name what they wrap."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, model)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_names_of_wrappers_are_left_out(name: str) -> None:
    def make() -> nn.Module:
        return Net(Block(nn.BatchNorm1d(10)))

    assert verified(make, lambda: Wrapped(name, make())).alike == "to the bit"
    assert verified(lambda: Wrapped(name, make()), make).alike == "to the bit"


@pytest.mark.process
def test_live_models_are_left_alone() -> None:
    torch.manual_seed(0)
    reference = Net(dropping(), dropping())
    candidate = Net(dropping(), dropping(), around=forgetful)
    candidate.load_state_dict(reference.state_dict())
    before = {name: tensor.clone() for name, tensor in candidate.state_dict().items()}
    state = torch.get_rng_state()
    found = memopt_cli.verify(reference, candidate, torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)))
    assert not found.passed
    assert "the candidate does not train as the reference does" in repr(found)
    assert causes.REDRAWS in repr(found)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in candidate.state_dict().items())
    assert all(parameter.grad is None for parameter in candidate.parameters())


@pytest.mark.slow
def test_steps_of_ones_own() -> None:
    def step(around: Callable[..., Any]) -> Callable[[], memopt_cli.Step]:
        def make() -> memopt_cli.Step:
            torch.manual_seed(0)
            net = Net(dropping(), around=around)
            optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

            def run(x: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                return loss.detach()

            return memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=run)

        return make

    x = torch.randn(ROWS, 6)
    plain = step(plainly)
    assert memopt_cli.verify(plain, step(checked), (x,)).result.alike == "to the bit"
    wrong = memopt_cli.verify(plain, step(forgetful), (x,)).result
    assert (wrong.cause.module, wrong.cause.text) == ("net.blocks.0.inner.0", causes.REDRAWS)


def scaled_step(rate: float, times: float = 1.0) -> Callable[[], memopt_cli.Step]:
    """Its gradients are not finite at the scale that scalers begin with."""

    def make() -> memopt_cli.Step:
        torch.manual_seed(0)
        net = Net(dropping())
        optimizer = torch.optim.SGD(net.parameters(), rate)
        scaler = torch.amp.GradScaler("cpu")  # type: ignore[no-untyped-call]

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = (net(x) * 40).square().mean() * times
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=run)

    return make


@pytest.mark.slow
def test_updates_of_a_step_of_ones_own_in_float16_are_compared() -> None:
    x = torch.randn(ROWS, 6)
    found = memopt_cli.verify(scaled_step(1e-5), scaled_step(1e-2), (x,), steps=1).result
    assert not found.passed
    assert found.cause.text == causes.OTHER_UPDATE
    assert memopt_cli.verify(scaled_step(1e-5), scaled_step(1e-5), (x,), steps=2).result.alike == "to the bit"
    never = memopt_cli.verify(scaled_step(1e-5), scaled_step(1e-5, math.nan), (x,), steps=1).result
    assert never.failed.startswith("none of the step's optimizers has stepped in 33 steps")


def test_hooks_that_a_copy_would_lose_are_refused() -> None:
    model, other = nn.Linear(6, 6), nn.Linear(6, 6)
    for register in (other.weight.register_hook, other.weight.register_post_accumulate_grad_hook):
        handle = register(lambda given: None)
        with pytest.raises(OptionError, match="the candidate's parameter weight has a hook on its gradient"):
            memopt_cli.verify(model, other, torch.ones(2, 6))
        handle.remove()


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((3, nn.Linear(1, 1), torch.ones(2, 1)), {}, "reference is an int"),
        ((nn.Linear(1, 1), "model.pt", torch.ones(2, 1)), {}, "candidate is a str"),
        ((nn.Linear(1, 1), nn.Linear(1, 1), torch.ones(2, 1)), {"steps": 0}, "steps"),
        ((lambda: None, lambda: None, "2x1"), {}, "inputs cannot be text"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        memopt_cli.verify(*arguments, **options)


@pytest.fixture(scope="module")
def different() -> Equivalence:
    return verified(*pair(dropping, forgetful))


@pytest.mark.slow
def test_the_report_in_words(different: Equivalence) -> None:
    text = io.StringIO()
    TextReport().show(different, text)
    lines = text.getvalue().splitlines()
    assert lines[0] == "- does not train as - does"
    assert lines[1].startswith("in step 1 of 3 gradient of blocks.")
    assert lines[2] == "first in: blocks.1.inner.0 (Dropout)"
    assert lines[3] == f"likely cause: {causes.REDRAWS}"
    assert any(line.startswith("gradient of first.weight") for line in lines)


def test_the_report_of_what_is_the_same() -> None:
    text = io.StringIO()
    TextReport().show(verified(*pair(dropping), steps=1), text)
    assert text.getvalue().startswith("- trains as - does: one step in training mode, ")
    assert "the same bit for bit" in text.getvalue()


def test_the_report_for_programs(different: Equivalence) -> None:
    text = io.StringIO()
    JsonReport().show(different, text)
    data = json.loads(text.getvalue())
    assert (data["passed"], data["alike"], data["cause"]["module"]) == (False, "not", "blocks.1.inner.0")


def test_the_report_for_junit(different: Equivalence) -> None:
    text = io.StringIO()
    JunitReport().show(different, text)
    (suite,) = ET.fromstring(text.getvalue())
    assert suite.get("name") == "memopt verify"
    failed = {case.get("name"): fault.text for case in suite.iter("testcase") for fault in case.findall("failure")}
    assert list(failed) == ["gradients", "random numbers", "parameters after the update"]
    for kind, start in (("gradients", "gradient of "), ("parameters after the update", "parameter ")):
        first, *_ = lines = str(failed[kind]).splitlines()
        assert first.startswith(start)
        assert ("likely cause: " in str(failed[kind])) is (kind == "gradients")
        assert len([line for line in lines if line.startswith(start)]) > 1, "each tensor of the kind is named"
    assert "gradient of " in str(suite.findtext("system-out")), "the answer as a whole"
    assert suite.get("tests") == "9"


def test_the_report_for_github(different: Equivalence, tmp_path: Any) -> None:
    text, page = io.StringIO(), tmp_path / "page.md"
    GithubReport(str(page)).show(different, text)
    assert text.getvalue().startswith("::error title=memopt%3A -::- does not train as - does")
    assert "| tensor | differs by |" in page.read_text()
    markdown = io.StringIO()
    MarkdownReport().show(different, markdown)
    assert markdown.getvalue() == page.read_text()


@pytest.mark.process
def test_each_side_has_the_libraries_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process imports libraries for all subprocesses, but a checkout may have a library of that name."""
    for folder, scale in (("installed", 1), ("checkout", 3)):
        (tmp_path / folder / "norse").mkdir(parents=True)
        (tmp_path / folder / "norse/__init__.py").write_text(f"SCALE = {scale}")
    for folder in ("reference", "checkout"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "net.py").write_text(
            "import norse\nfrom torch import nn\nclass Net(nn.Linear):\n"
            "    def forward(self, x): return norse.SCALE * super().forward(x)\ndef make(): return Net(2, 3)"
        )
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setenv("MEMOPT_TEST", "a server of its own")
    sides = [ModelSource(location=f"{tmp_path / folder}/net.py:make") for folder in ("reference", "checkout")]
    given = InputSpec(tensors=(TensorSpec(shape=(4, 2), dtype="float32"),), source="--input")
    with processes.keep_server():
        for reference, candidate in (sides, sides[::-1]):
            request = EquivalenceRequest(reference=reference, candidate=candidate, spec=given, steps=1, timeout_s=60.0)
            assert not verify(request, progress=Progress()).passed


@pytest.mark.process
def test_each_side_has_the_code_of_its_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkouts have one package, and Python finds it in the first of its folders for both."""
    monkeypatch.chdir(tmp_path)
    for checkout, scale in (("main", 1), ("branch", 3)):
        for folder in ("ci", "src/seglab"):
            (tmp_path / checkout / folder).mkdir(parents=True)
        (tmp_path / checkout / "ci/memory.py").write_text(
            "def build():\n    from seglab.net import Net\n    return Net(2, 3)"
        )
        (tmp_path / checkout / "src/seglab/__init__.py").touch()
        (tmp_path / checkout / "src/seglab/net.py").write_text(
            "from torch import nn\nclass Net(nn.Linear):\n"
            f"    def forward(self, x): return {scale} * super().forward(x)"
        )
    (tmp_path / "other.py").write_text((tmp_path / "main/ci/memory.py").read_text())
    given = InputSpec(tensors=(TensorSpec(shape=(4, 2), dtype="float32"),), source="--input")
    main, branch, other = "main/ci/memory.py:build", "branch/ci/memory.py:build", "other.py:build"

    def compare(reference: str, candidate: str, *code_paths: str) -> Equivalence:
        sides = [ModelSource(location=side, trust=Trust(code_paths=code_paths)) for side in (reference, candidate)]
        request = EquivalenceRequest(reference=sides[0], candidate=sides[1], spec=given, steps=1, timeout_s=60.0)
        return verify(request, progress=Progress())

    with processes.keep_server():
        for paths in (("main/src",), ("branch/src",)):
            with pytest.raises(UsageError, match="both models import seglab from ") as refused:
                compare(main, branch, *paths)
            assert "`--code-path main/src` `--code-path branch/src`" in str(refused.value.hint)
        shutil.copytree("main/src", "lib")
        Path("lib/seglab/net.py").write_text(Path("lib/seglab/net.py").read_text() + "\nouter = 1\n")
        with pytest.raises(UsageError, match="both models import seglab from lib, but main/ci") as refused:
            compare(main, branch, "lib")
        assert "`--code-path main/src` `--code-path branch/src`" in str(refused.value.hint)
        both = compare(main, branch, "main/src", "branch/src")
        assert not both.passed
        assert "seglab: the reference imports it from main/src, the candidate from branch/src." in both.notes
        one = compare(main, other, "main/src")
        assert one.passed
        assert "seglab: both models import it from main/src." in one.notes
        shutil.move("branch/src", "branch/lib")  # where memopt does not look for it
        (note,) = (note for note in compare(main, branch, "main/src").notes if note.startswith("seglab: both models"))
        assert "code of it in branch is not compared" in note
        shutil.move("branch/lib", "branch/src")
        shutil.copy("main/src/seglab/net.py", "branch/src/seglab/net.py")
        assert compare(main, branch, "main/src").passed  # the code is the same in both
