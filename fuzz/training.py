"""Train a model with and without a plan, and compare everything that the two trainings leave behind.

Outputs, gradients, parameters, buffers, attributes and random generators must be equal: to the bit for most plans,
within a tolerance for those that sum in another order.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import random
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

import memopt_cli
from fuzz.cases import Case, build
from fuzz.scenarios import AFTER, AROUND, BACKWARDS, CALLS, EVENTS, UPDATES, batch_of
from memopt_cli.errors import MemoptError
from memopt_cli.records import TOLERANCE
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.verification.effects import bit_equal, difference

Kind = Literal["same", "plain fails", "refused", "noisy", "differs", "fails"]
"""Outcome of a case: "plain fails" without a plan, "noisy" if two plain trainings, or roundings, differ as well."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a case, and a sentence that explains it."""

    kind: Kind
    reason: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the planned model trains differently, or fails without a reason where the plain one does not."""
        return self.kind in ("differs", "fails")

    def is_like(self, other: Outcome) -> bool:
        """Return whether ``other`` is the same failure; errors are the same if their first 60 characters are."""
        return self.kind == other.kind and (self.kind != "fails" or self.reason[:60] == other.reason[:60])


@dataclass
class Trained:
    """Tensors, other values and warnings that a training left behind, up to the error that ended it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: BaseException | None = None


def outcome(case: Case) -> Outcome:
    """Train the model of ``case`` with and without its plan, and compare the two trainings."""
    plain = _trained(case, lambda model: model)
    if plain.error is not None:
        return Outcome("plain fails", told(plain.error))
    planned = _trained(case, lambda model: memopt_cli.apply_plan(model, case.plan))
    if planned.error is not None:
        return Outcome("refused" if _is_refusal(planned.error) else "fails", told(planned.error))
    differs = _difference(plain, planned, exact=case.is_exact)
    if not differs:
        false = next((text for text in planned.warnings if _WRONG in text), "")
        return Outcome("differs", f"nothing does, and yet: {false}") if false else Outcome("same")
    again = _trained(case, lambda model: model)
    is_noisy = bool(_difference(plain, again, exact=True)) or _is_rounding(case, plain, planned)
    return Outcome("noisy" if is_noisy else "differs", differs)


def _is_rounding(case: Case, plain: Trained, planned: Trained) -> bool:
    """Return whether an inexact plan changes the training no more than nudging the parameters by rounding does."""
    if case.is_exact or plain.others != planned.others:
        return False
    by_plan = difference(plain.tensors, planned.tensors).relative
    nudged = (_trained(case, functools.partial(_nudged, seed=seed)) for seed in range(_NUDGES))
    return any(by_plan <= _LEEWAY * difference(plain.tensors, other.tensors).relative for other in nudged)


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """Change the last digits of the parameters of ``model`` at random, so that equal values are no longer equal."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for p in model.parameters():
        p.data.mul_(1 + _NUDGE * torch.randint(-1, 2, p.shape, generator=generator).double())
    return model


def _difference(plain: Trained, planned: Trained, *, exact: bool) -> str:
    """Return the first difference between the two trainings, as text; empty if there is none."""
    for name in plain.others.keys() | planned.others.keys():
        one, other = plain.others.get(name), planned.others.get(name)
        if one != other:
            return f"{name}: {one} became {other}"
    if bit_equal(plain.tensors, planned.tensors):
        return ""
    worst = difference(plain.tensors, planned.tensors)
    return f"{worst.name}: {worst.relative:.2g}" if exact or worst.relative > TOLERANCE else ""


# ---------------------------------------------------------------------------------------------- training


def _trained(case: Case, plan: Callable[[nn.Module], nn.Module]) -> Trained:
    trained = Trained()
    with _one_thread(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            _train(plan(build(case)), case, trained)
        except Exception as error:
            trained.error = error
    trained.warnings = [str(warning.message) for warning in found]
    return trained


def _train(model: nn.Module, case: Case, trained: Trained) -> None:
    scenario = case.scenario
    torch.manual_seed(case.seed), random.seed(case.seed), np.random.seed(case.seed)
    for step in range(case.steps):
        if step == 0 or scenario.after:
            optimizer = UPDATES[scenario.update](list(model.parameters()))
        x = batch_of(scenario, step)
        if x.requires_grad and not x.is_leaf:
            x.retain_grad()
        for name in scenario.before:
            EVENTS[name](model, x)
        with contextlib.ExitStack() as stack:
            for name in scenario.around:
                stack.enter_context(AROUND[name]())
            outputs = tensors_of(CALLS[scenario.call](model, x))
        _note(trained, f"step {step}: output", outputs)
        for name in scenario.between:
            EVENTS[name](model, x)
        _differentiate(model, case, outputs, x)
        _note_state(trained, f"step {step}: ", case, model, x)
        if optimizer is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # large steps would let rounding errors grow
            optimizer.step()
            optimizer.zero_grad()
        for name in scenario.after:
            model = AFTER[name](model)


def _differentiate(model: nn.Module, case: Case, outputs: list[Tensor], x: Tensor) -> None:
    roots = [t for t in outputs if t.requires_grad]
    if roots:
        cotangents = [torch.randn(t.shape).to(t.dtype) for t in roots]
        leaves = [t for t in (*model.parameters(), x) if t.requires_grad]
        BACKWARDS[case.scenario.backward](roots, cotangents, leaves)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run the context in one thread, since sums by several threads differ from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- what is left behind

_NUDGE: Final = 4 * torch.finfo(torch.float64).eps
"""Relative change of a parameter by a few roundings; inexact plans are compared in double precision."""
_NUDGES: Final = 4
"""Trainings with nudged parameters that a difference is compared with."""
_WRONG: Final = "the gradients of this step are wrong"
"""Text of memopt's warning of a recomputation that went wrong."""
_LEEWAY: Final = 30
"""Factor by which a plan may differ more than a nudge does, since a plan rounds many times."""
_STRUCTURE: Final = frozenset(vars(nn.Module())) - {"training"}


def _note_state(trained: Trained, step: str, case: Case, model: nn.Module, x: Tensor) -> None:
    _note(trained, f"gradient {step}input", x.grad if x.requires_grad else None)
    for name, p in model.named_parameters():
        _note(trained, f"gradient {step}{name}", p.grad)
        if case.is_exact:  # an update by a gradient that is mere rounding proves nothing
            _note(trained, f"{step}{name}", p)
        trained.others[f"{step}{name} is trained"] = str(p.requires_grad)
    for name, b in model.named_buffers():
        _note(trained, f"{step}{name}", b)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _STRUCTURE and not name.startswith("_memopt"):
                _note(trained, f"{step}{path}.{name}", value)
    _note(trained, f"{step}random numbers", torch.get_rng_state())
    if x.is_cuda:
        _note(trained, f"{step}random numbers of the GPU", torch.cuda.get_rng_state(x.device))
    _, words, *place = np.random.get_state()
    trained.others[f"{step}random numbers"] = str(hash((words.tobytes(), *place, random.getstate())))


def _note(trained: Trained, name: str, value: Any) -> None:
    """Record ``value`` under ``name``: tensors as copies, other values as text, containers item by item."""
    match value:
        case Tensor():
            copy = value.detach().clone().to_dense()  # NaN is made equal: its sign depends on the order of a sum
            trained.tensors[name] = copy.masked_fill_(copy.isnan(), torch.nan) if copy.is_floating_point() else copy
            trained.others[f"{name} needs a gradient"] = str(value.requires_grad)
        case torch.Generator():
            trained.tensors[name] = value.get_state()
        case np.random.Generator():
            trained.others[name] = str(value.bit_generator.state)
        case random.Random():
            trained.others[name] = str(hash(value.getstate()))
        case dict():
            for key, item in value.items():
                _note(trained, f"{name}.{key}", item)
        case np.ndarray():
            trained.others[name] = str(hash(value.tobytes()))
        case nn.Module() | weakref.ref() | None:
            pass
        case str() | int() | float():
            trained.others[name] = str(value)
        case _ if hasattr(value, "__len__"):
            for index, item in enumerate(value):
                _note(trained, f"{name}.{index}", item)
        case _:
            trained.others[name] = str(value)


# ---------------------------------------------------------------------------------------------- what went wrong


def told(error: BaseException) -> str:
    """Return ``error`` in one line, with the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}"
    return f"{type(error).__name__}: {error} ({where})".replace("\n", " ")[:400]


def _is_refusal(error: BaseException) -> bool:
    """Return whether ``error`` was raised on purpose, by memopt or by PyTorch's check of in-place changes."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_own = "/memopt_cli/" in frame.filename
    is_said = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise ")
    changed = "modified by an inplace operation" in str(error)
    return isinstance(error, MemoptError) or (is_own and is_said) or changed
