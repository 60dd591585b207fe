"""Compare memopt's count of tensor bytes with PyTorch's allocator, on models of one operator each.

    python benchmarks/operators.py [OPERATOR ...]

The operators are those of PyTorch's own tests (``op_db``) that have a derivative in float32, on the inputs of those
tests, enlarged where possible until a step holds 64 KiB.  The tensor peak is counted on real tensors and on tensors
without data, and compared with the peak of the allocator in a plain step, without the workspace of kernels.  Outputs
and gradients of the operator are also compared with those as a segment, and with packing.

Without names, all operators run, and the section of ``benchmarks/RESULTS.md`` is written.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.results import table, this_command, write_section
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime.compressor import same_bits
from memopt_cli.trace import FakeStep, count_step, resident_bytes
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep, seed_everything
from memopt_cli.verification.effects import effects

_COPIES = {"aten::resolve_conj", "aten::resolve_neg"}
"""Operators that PyTorch runs before a kernel that takes no conjugate or negative views, seen at the dispatcher."""
_GENERATOR_BYTES = torch.get_rng_state().nbytes
"""Bytes of the random generator's state, which some of PyTorch's tests copy: no tensor of the step."""
MIN_BYTES = 1 << 16
"""Bytes that a step should hold: of a smaller one, a difference of a few bytes is a large error."""
MAX_BYTES = 1 << 25
"""Bytes that a step may hold."""
_MAX_SAMPLES = 12
"""Inputs that are tried for each operator and scale."""
_LONGEST_S = 20
"""Seconds that one operator may take."""
SCALES = (1, 2, 4, 8, 16, 32)
"""Factors by which the dimensions of PyTorch's test inputs are enlarged, in turn."""
TOLERANCE = 0.02
"""Largest relative difference between count and allocator that is not reported."""
PLANS = {"segment": Plan(segments=(SegmentPlan(path="operator"),)), "packed": Plan(packed=True)}
_OPINFO = "torch.testing._internal.opinfo"
_SIZED = (
    "torch.testing._internal.common_methods_invocations",
    f"{_OPINFO}.core",
    f"{_OPINFO}.definitions._masked",
    f"{_OPINFO}.definitions.linalg",
    f"{_OPINFO}.definitions.special",
)
"""Modules of PyTorch's tests that make the inputs; their global variables :data:`_SIZES` are the sizes."""
_SIZES = ("XS", "S", "M", "L")


class Skipped(Exception):
    """Raised for an operator that cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result for one operator."""

    allocated: int
    """Peak of the allocator in bytes."""
    counted: int
    """Peak counted on real tensors, in bytes."""
    dry_run: int | str
    """Peak counted on tensors without data, in bytes, or the reason why there is none."""
    unequal: tuple[str, ...]
    """Keys of :data:`PLANS` under which outputs or gradients differ."""

    @property
    def off_by(self) -> float:
        """Relative difference of the worse of the two counts from the allocator's peak."""
        counts = [self.counted, *([self.dry_run] if isinstance(self.dry_run, int) else [])]
        return max(abs(c / self.allocated - 1) for c in counts)

    def __str__(self) -> str:
        unequal = "".join(f", not equal {plan}" for plan in self.unequal)
        return f"{self.allocated} allocated, {self.counted} counted, {self.dry_run} in a dry run{unequal}"


class Operator(nn.Module):
    """Module that calls a function on its inputs and on constants; those that are tensors are buffers."""

    def __init__(self, call: Callable[..., Any], leaves: Sequence[Any]) -> None:
        super().__init__()
        self.call, self.own = call, list(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.own[index] = None
                if not leaf.requires_grad:
                    self.register_buffer(f"own{index}", leaf.clone())
        self.given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def forward(self, *inputs: Tensor) -> Any:
        given = dict(zip(self.given, inputs, strict=True))
        return self.call(*(given.get(i, getattr(self, f"own{i}", own)) for i, own in enumerate(self.own)))


class OneOperator(nn.Module):
    """Model of one :class:`Operator`, whose differentiated inputs are the parameters."""

    def __init__(self, call: Callable[..., Any], leaves: Sequence[Any]) -> None:
        super().__init__()
        self.operator = Operator(call, leaves)
        self.inputs = nn.ParameterList(leaves[i].detach().clone() for i in self.operator.given)

    def forward(self) -> Any:
        return self.operator(*self.inputs)


@contextmanager
def scaled(factor: int) -> Iterator[None]:
    """Multiply the sizes of the inputs that PyTorch's tests make by ``factor`` inside the context."""
    modules = [importlib.import_module(name) for name in _SIZED]
    before = [(m, name, getattr(m, name)) for m in modules for name in _SIZES if hasattr(m, name)]
    try:
        for module, name, size in before:
            setattr(module, name, size * factor)
        yield
    finally:
        for module, name, size in before:
            setattr(module, name, size)


def samples(operator: Any, factor: int) -> Iterator[TrainingStep]:
    """Yield a step of ``operator`` for each input of its tests that has a tensor to differentiate."""
    seed_everything(0)
    with scaled(factor):
        for sample in operator.sample_inputs("cpu", torch.float32, requires_grad=True):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                continue

            def call(*leaves: Any, spec: Any = spec, sample: Any = sample) -> Any:
                first, args, kwargs = tree_unflatten(list(leaves), spec)
                return sample.output_process_fn_grad(operator(first, *args, **kwargs))

            yield TrainingStep(model=OneOperator(call, leaves).train(), args=(), kwargs={}, settings=StepSettings())


def step_of(operator: Any) -> TrainingStep:
    """Return the first step of at least :data:`MIN_BYTES`, at the smallest scale that has one; else the largest."""
    best: tuple[int, TrainingStep] | None = None
    before = 0
    for factor in SCALES:
        found = [(resident_bytes(step), step) for step in islice(samples(operator, factor), _MAX_SAMPLES)]
        largest = max((held for held, _ in found), default=0)
        fitting = [pair for pair in found if pair[0] <= MAX_BYTES]
        best = max([*fitting, *([best] if best else [])], key=lambda pair: pair[0], default=None)
        told = next((step for held, step in fitting if held >= MIN_BYTES), None)
        if told is not None:
            return told
        if largest > MAX_BYTES or largest == before:
            break
        before = largest
    if best is None:
        raise Skipped("no input is differentiated")
    return best[1]


def tensors_allocated(step: TrainingStep) -> int:
    """Return the allocator's peak in a step without dispatch modes, less the workspace of kernels, in bytes."""
    held = resident_bytes(step)
    seed_everything(0)
    naming = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=naming) as profiled:
        step.backward(step.forward())
    step.model.zero_grad(set_to_none=True)
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    overloads = {(e.start_ns(), e.name()): e.overload_name() for e in results.events()}
    return held + _peak(sorted(_allocations(results.experimental_event_tree(), overloads)))


def _allocations(
    tree: Any, overloads: dict[tuple[int, str], str], kernel_ends: int | None = None
) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield time in ns, bytes (negative if freed), address, and end of the kernel then running (``None`` if none)."""
    for event in tree:
        ends = None if event.name in _COPIES else kernel_ends
        if event.name == "[memory]":
            if ends is None and abs(event.extra_fields.alloc_size) == _GENERATOR_BYTES:
                continue
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, ends
        elif ends is None and is_kernel(event.name, overloads.get((event.start_time_ns, event.name), "")):
            ends = event.end_time_ns
        yield from _allocations(event.children, overloads, ends)


@functools.cache
def is_kernel(name: str, overload: str) -> bool:
    """Return whether the dispatcher sees the operator itself, rather than the operators that it is composed of."""
    if not name.startswith("aten::"):
        return False
    full = f"{name}.{overload}" if overload else name
    try:
        return not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # the dispatcher has no operator of this name
        return True


def _peak(events: list[tuple[int, int, int, int | None]]) -> int:
    """Return the most bytes alive at once, without those freed before the kernel that allocated them ends."""
    lives: list[tuple[int, int]] = []
    born: dict[int, tuple[int, int, int | None]] = {}
    for when, change, address, kernel in events:
        if change > 0:
            born[address] = when, change, kernel
        elif address in born:
            start, size, ends = born.pop(address)
            if ends is None or when > ends:
                lives += [(start, size), (when, -size)]
    lives += [(start, size) for start, size, _ in born.values()]
    alive = most = 0
    for _, change in sorted(lives):
        alive += change
        most = max(most, alive)
    return most


def compare(operator: Any) -> Compared:
    """Compare the peaks and results of ``operator``; raise its own error, or :class:`Skipped`."""
    step = step_of(operator)
    tensors_allocated(step)  # the first run also fills caches
    allocated = tensors_allocated(step)
    if not allocated:
        raise Skipped("its tensors are empty")
    counted = count_step(step).tensor_peak_bytes
    try:
        dry_run: int | str = FakeStep(step).count().tensor_peak_bytes
    except Exception as error:
        dry_run = _first_line(error)
    return Compared(
        allocated=allocated,
        counted=counted,
        dry_run=dry_run,
        unequal=tuple(plan for plan in PLANS if not is_equal(step, PLANS[plan])),
    )


def is_equal(step: TrainingStep, plan: Plan) -> bool:
    """Return whether outputs and gradients under ``plan`` equal those of the plain step to the bit."""
    wanted = effects(replace(step, model=copy.deepcopy(step.model)))
    found = effects(replace(step, model=apply_plan(copy.deepcopy(step.model), plan)))
    return wanted.keys() == found.keys() and all(same_bits(wanted[name], found[name]) for name in wanted)


def with_derivative() -> Iterator[Any]:
    """Return the operators of PyTorch's tests that have a derivative in float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    return (o for o in op_db if o.supports_autograd and torch.float32 in o.dtypes)


def tried(operator: Any) -> Compared | str:
    """Return the comparison of ``operator``, or the reason why there is none."""
    signal.alarm(_LONGEST_S)
    try:
        return compare(operator)
    except Exception as error:
        return _first_line(error)
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise Skipped(f"it took longer than {_LONGEST_S} s")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def _name(operator: Any) -> str:
    return ".".join(filter(None, (operator.name, operator.variant_test_name)))


def report(found: dict[str, Compared | str]) -> str:
    """Return the report in Markdown: counts, and the name of each operator that differs or was not compared."""
    compared = {name: c for name, c in found.items() if isinstance(c, Compared)}
    off = {name: c for name, c in compared.items() if c.off_by > TOLERANCE}
    skipped = [[name, reason] for name, reason in found.items() if isinstance(reason, str)]
    no_dry_run = [[name, c.dry_run] for name, c in compared.items() if isinstance(c.dry_run, str)]
    unequal = [[name, " and ".join(c.unequal)] for name, c in compared.items() if c.unequal]
    small = sum(c.allocated < MIN_BYTES for c in compared.values())
    return "\n\n".join(
        (
            f"{len(compared)} operators, {small} of them with less than {MIN_BYTES >> 10} KiB; "
            f"{len(compared) - len(off)} within {TOLERANCE:.0%} of the allocator, "
            f"{len(compared) - len(unequal)} with the same outputs and gradients as a segment and packed; "
            f"{len(no_dry_run)} cannot run on tensors without data; {len(skipped)} could not be compared.",
            table(
                ["operator", "allocated", "counted", "dry run"],
                [[name, f"{c.allocated}", f"{c.counted}", f"{c.dry_run}"] for name, c in off.items()],
            ),
            table(["not equal", "under"], unequal),
            table(["no dry run", "because"], no_dry_run),
            table(["not compared", "because"], skipped),
        )
    )


def main() -> None:
    """Compare the operators one after another, and report the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    chosen = parser.parse_args().operators
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    found: dict[str, Compared | str] = {}
    for operator in with_derivative():
        if not chosen or operator.name in chosen:
            name = _name(operator)
            found[name] = tried(operator)
            print(f"{name}: {found[name]}", flush=True)
    if chosen:
        print(report(found))
    else:
        write_section("Peaks of single operators", this_command(), report(found))


if __name__ == "__main__":
    main()
