"""Consecutive training steps for ``memopt verify``: takes them, and records fingerprints of all that they leave.

Two models run in two processes, and only their records are compared (:mod:`memopt_cli.pipeline.equivalence`).  One
step may also be *watched*: then the calls of its modules are recorded, to name the module that first differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt_cli.errors import MemoptError
from memopt_cli.records import CallPrint, ChoicePrint, FollowedSteps, StepPrint, TensorPrint
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import copy_module
from memopt_cli.runtime.private_torch import TorchDispatchMode, compiled_again, engine_watched, hook_tables, is_compiled
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import LIST_OPTIMIZERS, NEVER_STEPPED, OwnStep
from memopt_cli.training.step import MAX_SCALE_TRIES, TrainingStep, failure_named, seed_everything
from memopt_cli.verification.effects import UpdateGradients, as_leaf, copy_tensors, generators_kept, parameters_kept
from memopt_cli.verification.fingerprint import fingerprint
from memopt_cli.verification.named import (
    AttributeValues,
    compute_deferred,
    named_tensors_on,
    numbers_by_name,
    own_generator_states,
    tensors_by_name,
)
from memopt_cli.verification.updates import LEARNING_RATE, set_learning_rate

_LIBRARIES = ("torch", "memopt_cli")
"""Packages whose hooks are not the user's."""


def take_steps(
    step: TrainingStep, count: int, watched: int | None, between: Callable[[nn.Module], object]
) -> FollowedSteps:
    """Take ``count`` steps on the same inputs, record what each leaves, and restore the parameters afterwards.

    The steps use the optimizer of ``step``, or SGD.  ``between`` is called with the model before each step, but not for
    a user's own step.  ``watched`` is the index of the step in which calls of modules are recorded as well, or
    ``None``.  A step that fails is the last, and its record has the error; only an out-of-memory error is
    raised.
    """
    # Hooks and modes do not see into compiled code.
    has_compiled = any(map(is_compiled, step.model.modules()))
    with (
        compiled_again() if has_compiled else contextlib.nullcontext(),
        generators_kept(),
        _trainable(step) as training,
    ):
        model = training.model
        start = _print_named(_parameters(model) | named_tensors_on(model))
        values = AttributeValues.read(model)
        seed_everything(step.settings.seed)
        first_digest = _generator_digest(model)

        def take(index: int) -> StepPrint:
            return _record_step(training, values, between, watched=index == watched and not has_compiled)

        records = [_take_first(lambda: take(0), step.settings.seed)]
        while len(records) < count and not records[-1].failed:
            records.append(take(len(records)))
        return FollowedSteps(
            start=start,
            others=values.names,
            steps=tuple(records),
            draws=_generator_digest(model) != first_digest,
            is_compiled=has_compiled,
            frozen=tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        )


def _take_first(take: Callable[[], StepPrint], seed: int) -> StepPrint:
    """Call ``take`` until a step updates: the scaler of the user's own step skips updates until it finds its scale."""
    for _ in range(MAX_SCALE_TRIES):
        record = take()
        if record.updated or record.failed:
            return record
        seed_everything(seed)
    return replace(record, failed=f"{NEVER_STEPPED}: {LIST_OPTIMIZERS}")


@contextlib.contextmanager
def _trainable(step: TrainingStep) -> Iterator[TrainingStep]:
    """Yield ``step`` with an optimizer that moves parameters, and restore the parameters afterwards."""
    if isinstance(step, OwnStep):  # a copy, since its function holds its own optimizers; the copy makes new ones
        yield replace(step, model=copy_module(step.model))
        return
    with parameters_kept(step.model):
        yield replace(step, optimizer=_optimizer(step))


def _optimizer(step: TrainingStep) -> Optimizer:
    """Make the optimizer of ``step`` with a learning rate, which is zero in measured steps."""
    optimizer = step.make_optimizer(step.model)
    if optimizer is None:
        return SGD([p for p in step.model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    set_learning_rate(optimizer)
    return optimizer


def _record_step(
    step: TrainingStep, start: AttributeValues, between: Callable[[nn.Module], object], *, watched: bool
) -> StepPrint:
    """Take one step on fresh copies of the inputs, and return its record; ``start`` is from before the first step."""
    leaves = map_leaves(as_leaf, (step.args, step.kwargs))
    args, kwargs = copy_tensors(leaves)
    current = replace(step, args=args, kwargs=kwargs)
    watch, hooks = _Watch(step.model), list[str]()
    watching = watch.recording() if watched else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, _hooks_logged(step.model, hooks), watching:
        warnings.simplefilter("always")
        record = _take_recorded(current, start, between)
    input_gradients = {
        f"gradient of {name}": t.grad for name, t in _named_inputs(*leaves).items() if t.grad is not None
    }
    return replace(
        record,
        effects=record.effects + _print_named(input_gradients),
        hooks=tuple(hooks),
        calls=tuple(watch.calls),
        choices=tuple(watch.choices),
        nested_backward=watch.is_nested,
        draws_in_backward=watch.draws_in_backward,
        warnings=tuple(dict.fromkeys(str(warning.message) for warning in caught)),
    )


def _named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    return tensors_by_name("input", args) | tensors_by_name("input", kwargs)


def _take_recorded(step: TrainingStep, start: AttributeValues, between: Callable[[nn.Module], object]) -> StepPrint:
    """Return a record of the tensors that ``step`` leaves, or of why it failed; hooks and calls are added later."""
    try:
        with failure_named(step.model):
            record = _take_own(step) if isinstance(step, OwnStep) else _take_plain(step, between)
    except MemoptError as error:
        return StepPrint(effects=(), others=(), hooks=(), failed=error.message)
    after = _print_named(_parameters(step.model) | _named_inputs(step.args, step.kwargs))
    changes = _print_named(AttributeValues.read(step.model).changes_since(start))
    return replace(record, effects=record.effects + after, others=record.others + changes)


def _take_plain(step: TrainingStep, between: Callable[[nn.Module], object]) -> StepPrint:
    """Take ``step``, and return fingerprints of its outputs, gradients and state, taken before the update."""
    between(step.model)
    step.reset_gradients()
    output = step.forward()
    outputs = tensors_by_name("output", output)
    early = {name: t.detach().clone() for name, t in outputs.items() if type(t) is Tensor}  # the loss may write to them
    step.backward(output)
    step.unscale()  # the two models that are compared may have found different scales
    effects = compute_deferred(outputs | early) | named_tensors_on(step.model)
    record = StepPrint(effects=_print_named(effects), others=_print_named(numbers_by_name("output", output)), hooks=())
    del output, outputs, early, effects  # the update may need their memory
    step.clip_gradients()
    step.update()
    return record


def _take_own(step: OwnStep) -> StepPrint:
    """Take a user's own ``step``, whose function steps its optimizers itself, at their own rates."""
    updates = UpdateGradients(step)
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: updates.collect(optimizer))
    try:
        output = step.models.step.run(*step.args, **step.kwargs)
    finally:
        handle.remove()
    outputs = compute_deferred(tensors_by_name("output", output))
    effects = outputs | named_tensors_on(step.model) | updates.gradients
    has_updated = updates.count > 0 or not step.optimizers()
    numbers = _print_named(numbers_by_name("output", output))
    return StepPrint(effects=_print_named(effects), others=numbers, hooks=(), updated=has_updated)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {f"parameter {name}": parameter for name, parameter in model.named_parameters()}


def _print_named(tensors: Mapping[str, Tensor]) -> tuple[TensorPrint, ...]:
    return fingerprint(tensors).tensors


def _generator_digest(model: nn.Module) -> str:
    return hashlib.blake2b(Generators().to_bytes() + own_generator_states(model), digest_size=16).hexdigest()


@contextlib.contextmanager
def _hooks_logged(model: nn.Module, log: list[str]) -> Iterator[None]:
    """Add the name of each user hook that is called in the ``with`` block to ``log``."""
    replaced_hooks: list[tuple[dict[Any, Any], Any, Any]] = []
    for path, module in model.named_modules():
        for table in hook_tables(module):
            for key, hook in table.items():
                if callable(hook) and not _is_library_hook(hook):
                    replaced_hooks.append((table, key, hook))
                    table[key] = _log_calls(hook, f"{getattr(hook, '__name__', type(hook).__name__)} of {path}", log)
    try:
        yield
    finally:
        for table, key, hook in replaced_hooks:
            if key in table:
                table[key] = hook


def _is_library_hook(hook: Callable[..., Any]) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] in _LIBRARIES


def _log_calls(hook: Callable[..., Any], name: str, log: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return hook(*args, **kwargs)

    return called


_aten = torch.ops.aten
_CHOICES = {
    _aten.topk.default: 1,
    _aten.sort.default: 1,
    _aten.sort.stable: 1,
    _aten.max.dim: 1,
    _aten.min.dim: 1,
    _aten.kthvalue.default: 1,
    _aten.median.dim: 1,
    _aten.argmax.default: 0,
    _aten.argmin.default: 0,
}
"""Operator that chooses among values -> index of the output with the indices of the chosen ones.  If two values are
nearly equal, a difference in rounding can change the choice, and then all later results."""


@dataclass(slots=True)
class _Watch:
    """Records the calls of a model's modules, in forward and in recomputations, and choices among values."""

    model: nn.Module
    calls: list[CallPrint] = field(default_factory=list)
    """Calls that have returned."""
    choices: list[ChoicePrint] = field(default_factory=list)
    _running: list[CallPrint] = field(default_factory=list)
    """Calls that have not returned yet, the innermost last."""
    is_nested: bool = False
    """Whether a backward was started inside another."""
    draws_in_backward: bool = False
    """Whether backward ran an operator that makes random numbers."""
    _backwards: int = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        mode = _Choosing(self.choose, self._draw)
        with (
            module_hooks(self.model, self._enter, self._leave, always_leave=True),
            engine_watched(lambda: self._count(1), lambda: self._count(-1)),
            mode,
        ):
            yield

    def choose(self, operator: str, values: Tensor, chosen: Tensor) -> None:
        path = self._running[-1].path if self._running else ""
        choice = ChoicePrint(
            operator=operator,
            path=path,
            recomputed=self._backwards > 0,
            values=_print_tensors(values)[0],
            chosen=_print_tensors(chosen)[0],
        )
        self.choices.append(choice)

    def _draw(self) -> None:
        self.draws_in_backward |= self._backwards > 0

    def _count(self, change: int) -> None:
        self._backwards += change
        self.is_nested |= self._backwards > 1

    def _enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        self._running.append(
            CallPrint(
                path=path,
                class_name=type(module).__name__,
                recomputed=self._backwards > 0,
                training=module.training,
                begun=_generator_digest(self.model),
                inputs=_print_tensors(inputs),
                outputs=(),
                finished=False,
                draws=False,
            )
        )

    def _leave(self, path: str, module: nn.Module, output: Any) -> None:
        call = self._running.pop()
        draws = _generator_digest(self.model) != call.begun
        self.calls.append(replace(call, outputs=_print_tensors(output), finished=output is not None, draws=draws))


def _print_tensors(value: Any) -> tuple[TensorPrint, ...]:
    return _print_named({str(i): t for i, t in enumerate(tensors_of(value)) if type(t) in (Tensor, nn.Parameter)})


class _Choosing(TorchDispatchMode):
    """Dispatch mode that reports every choice of an operator among values, and operators that make random numbers."""

    def __init__(self, report: Callable[[str, Tensor, Tensor], None], report_draw: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report, self._report_draw = report, report_draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self._report_draw()
        index = _CHOICES.get(func)
        if index is not None:
            chosen = output[index] if isinstance(output, Sequence) else output
            self._report(func.overloadpacket.__name__, args[0], chosen)
        return output
