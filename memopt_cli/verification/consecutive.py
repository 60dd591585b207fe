"""Consecutive training steps for ``memopt verify``: takes them, and records the fingerprint of all that each leaves.

Two models run in two processes, and only these records are compared (:mod:`memopt_cli.pipeline.equivalence`).  One
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

from memopt_cli.errors import MemoptError, first_line
from memopt_cli.records import CallPrint, ChoicePrint, FollowedSteps, StepPrint, TensorPrint
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import copy_of
from memopt_cli.runtime.private_torch import TorchDispatchMode, compiled_anew, engine_watched, hook_tables, is_compiled
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import LIST_OPTIMIZERS, NEVER_STEPPED, OwnStep
from memopt_cli.training.step import SCALES, Step, is_out_of_memory, seed_everything
from memopt_cli.verification.effects import Updates, as_leaf, copied, generators_kept, parameters_kept
from memopt_cli.verification.fingerprint import fingerprint
from memopt_cli.verification.named import Others, computed, effects_on, numbers_by_name, own_positions, tensors_by_name
from memopt_cli.verification.updates import RATE, set_rate

_LIBRARIES = ("torch", "memopt_cli")
"""Packages whose hooks are not the user's."""


def consecutive(step: Step, count: int, watched: int | None, between: Callable[[nn.Module], object]) -> FollowedSteps:
    """Take ``count`` steps on the same inputs, record what each leaves, and restore the parameters afterwards.

    The optimizer is ``step``'s, or SGD.  ``between`` is called with the model before each step, but not for a
    user's own step.  ``watched`` is the index of the step in which calls of modules are recorded, too; ``None`` for no
    step.  A step that fails is the last, and its record tells why; only an out-of-memory error is raised.
    """
    is_unseen = any(map(is_compiled, step.model.modules()))  # hooks and modes do not see into compiled code
    with compiled_anew() if is_unseen else contextlib.nullcontext(), generators_kept(), _from_start(step) as training:
        model = training.model
        start, names = _prints(_parameters(model) | effects_on(model)), Others.of(model)
        seed_everything(step.settings.seed)
        begun = _drawn(model)

        def take(index: int) -> StepPrint:
            return _taken(training, names, between, watched=index == watched and not is_unseen)

        steps_taken = [_first(lambda: take(0), step.settings.seed)]
        while len(steps_taken) < count and not steps_taken[-1].failed:
            steps_taken.append(take(len(steps_taken)))
        return FollowedSteps(
            start=start,
            others=names.names,
            steps=tuple(steps_taken),
            draws=_drawn(model) != begun,
            is_compiled=is_unseen,
            frozen=tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        )


def _first(take: Callable[[], StepPrint], seed: int) -> StepPrint:
    """Call ``take`` until a step updates, as the scaler of a user's own step skips updates until it finds its scale."""
    for _ in range(SCALES):
        step_print = take()
        if step_print.updated or step_print.failed:
            return step_print
        seed_everything(seed)
    return replace(step_print, failed=f"{NEVER_STEPPED}: {LIST_OPTIMIZERS}")


@contextlib.contextmanager
def _from_start(step: Step) -> Iterator[Step]:
    """Yield ``step`` with an optimizer that moves parameters, and restore these afterwards."""
    if isinstance(step, OwnStep):  # a copy, as its function holds its own optimizers: the copy makes new ones
        yield replace(step, model=copy_of(step.model))
        return
    with parameters_kept(step.model):
        yield replace(step, optimizer=_optimizer(step))


def _optimizer(step: Step) -> Optimizer:
    """Make the optimizer of ``step``, with a learning rate, since measured steps have the learning rate 0."""
    optimizer = step.make_optimizer(step.model)
    if optimizer is None:
        return SGD([p for p in step.model.parameters() if p.requires_grad], lr=RATE)
    set_rate(optimizer)
    return optimizer


def _taken(step: Step, start: Others, between: Callable[[nn.Module], object], *, watched: bool) -> StepPrint:
    """Take one step on fresh copies of the inputs, and return its record; ``start`` is from before the first step."""
    leaves = map_leaves(as_leaf, (step.args, step.kwargs))
    args, kwargs = copied(leaves)
    current = replace(step, args=args, kwargs=kwargs)
    watch, hooks = _Watch(step.model), list[str]()
    watching = watch.seeing() if watched else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as warned, _hooks_logged(step.model, hooks), watching:
        warnings.simplefilter("always")
        left_behind = _attempted(current, start, between)
    of_inputs = {f"gradient of {name}": t.grad for name, t in _inputs(*leaves).items() if t.grad is not None}
    return replace(
        left_behind,
        effects=left_behind.effects + _prints(of_inputs),
        hooks=tuple(hooks),
        calls=tuple(watch.calls),
        choices=tuple(watch.choices),
        nested_backward=watch.nested,
        warnings=tuple(dict.fromkeys(str(warning.message) for warning in warned)),
    )


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    return tensors_by_name("input", args) | tensors_by_name("input", kwargs)


def _attempted(step: Step, start: Others, between: Callable[[nn.Module], object]) -> StepPrint:
    """Return a record of the tensors that ``step`` leaves, or of why it failed; hooks and calls are added later."""
    try:
        left_behind = _own_effects(step) if isinstance(step, OwnStep) else _model_effects(step, between)
    except Exception as error:  # the model's own classes may raise anything
        if is_out_of_memory(error):
            raise
        failed = error.message if isinstance(error, MemoptError) else first_line(error)
        return StepPrint(effects=(), others=(), hooks=(), failed=failed)
    after = _prints(_parameters(step.model) | _inputs(step.args, step.kwargs))
    moved = _prints(Others.of(step.model).moved_since(start))
    return replace(left_behind, effects=left_behind.effects + after, others=left_behind.others + moved)


def _model_effects(step: Step, between: Callable[[nn.Module], object]) -> StepPrint:
    """Take ``step``, and return the prints of its outputs, gradients and state, taken before the update."""
    between(step.model)
    step.reset_gradients()
    output = step.forward()
    outputs = tensors_by_name("output", output)
    early = {name: t.detach().clone() for name, t in outputs.items() if type(t) is Tensor}  # the loss may write to them
    step.backward(output)
    step.unscale()  # the two models that are compared may have found different scales
    effects = computed(outputs | early) | effects_on(step.model)
    left_behind = StepPrint(effects=_prints(effects), others=_prints(numbers_by_name("output", output)), hooks=())
    del output, outputs, early, effects  # the update may need their memory
    step.limit()
    step.update()
    return left_behind


def _own_effects(step: OwnStep) -> StepPrint:
    """Take a user's own ``step``, whose function steps its optimizers itself, at their own rates."""
    updates = Updates(step)
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: updates.see(optimizer))
    try:
        output = step.models.step.run(*step.args, **step.kwargs)
    finally:
        handle.remove()
    effects = computed(tensors_by_name("output", output)) | effects_on(step.model) | updates.gradients
    updated = updates.count > 0 or not step.optimizers()
    others = _prints(numbers_by_name("output", output))
    return StepPrint(effects=_prints(effects), others=others, hooks=(), updated=updated)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {f"parameter {name}": parameter for name, parameter in model.named_parameters()}


def _prints(tensors: Mapping[str, Tensor]) -> tuple[TensorPrint, ...]:
    return fingerprint(tensors).tensors


def _drawn(model: nn.Module) -> str:
    """Return a digest of the states of all random generators, those that ``model`` owns included."""
    return hashlib.blake2b(Generators().to_bytes() + own_positions(model), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------- hooks


@contextlib.contextmanager
def _hooks_logged(model: nn.Module, log: list[str]) -> Iterator[None]:
    """Add the name of each hook of the user's that is called in the block to ``log``."""
    replaced: list[tuple[dict[Any, Any], Any, Any]] = []
    for path, module in model.named_modules():
        for table in hook_tables(module):
            for key, hook in table.items():
                if callable(hook) and not _is_of_library(hook):
                    replaced.append((table, key, hook))
                    table[key] = _logged(hook, f"{getattr(hook, '__name__', type(hook).__name__)} of {path}", log)
    try:
        yield
    finally:
        for table, key, hook in replaced:
            if key in table:
                table[key] = hook


def _is_of_library(hook: Callable[..., Any]) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] in _LIBRARIES


def _logged(hook: Callable[..., Any], name: str, log: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return hook(*args, **kwargs)

    return called


# ---------------------------------------------------------------------------------------------- calls

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
"""Operator that chooses among values -> index of its output that tells which were chosen.  If two values are nearly
equal, a difference in rounding can change the choice, and then all that follows."""


@dataclass(slots=True)
class _Watch:
    """Records the calls of a model's modules, in forward and in recomputations, and choices among values."""

    model: nn.Module
    calls: list[CallPrint] = field(default_factory=list)
    """Calls that have returned."""
    choices: list[ChoicePrint] = field(default_factory=list)
    _open: list[CallPrint] = field(default_factory=list)
    """Calls that have not returned yet, the innermost last."""
    nested: bool = False
    """Whether a backward was started inside another."""
    _engines: int = 0
    """Number of backwards that are running."""

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """Record the calls in the block."""
        mode = _Choosing(self.choose)
        with (
            module_hooks(self.model, self._enter, self._leave, always_leave=True),
            engine_watched(lambda: self._count(1), lambda: self._count(-1)),
            mode,
        ):
            yield

    def choose(self, operator: str, values: Tensor, chosen: Tensor) -> None:
        """Record a choice of ``operator`` among ``values``."""
        path = self._open[-1].path if self._open else ""
        choice = ChoicePrint(
            operator=operator,
            path=path,
            recomputed=self._engines > 0,
            values=_printed(values)[0],
            chosen=_printed(chosen)[0],
        )
        self.choices.append(choice)

    def _count(self, change: int) -> None:
        self._engines += change
        self.nested |= self._engines > 1

    def _enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        self._open.append(
            CallPrint(
                path=path,
                class_name=type(module).__name__,
                recomputed=self._engines > 0,
                training=module.training,
                begun=_drawn(self.model),
                inputs=_printed(inputs),
                outputs=(),
                finished=False,
                draws=False,
            )
        )

    def _leave(self, path: str, module: nn.Module, output: Any) -> None:
        call = self._open.pop()
        finished, draws = output is not None, _drawn(self.model) != call.begun
        self.calls.append(replace(call, outputs=_printed(output), finished=finished, draws=draws))


def _printed(value: Any) -> tuple[TensorPrint, ...]:
    return _prints({str(i): t for i, t in enumerate(tensors_of(value)) if type(t) in (Tensor, nn.Parameter)})


class _Choosing(TorchDispatchMode):
    """Dispatch mode that reports every operator that chooses among values."""

    def __init__(self, report: Callable[[str, Tensor, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        place = _CHOICES.get(func)
        if place is not None:
            chosen = output[place] if isinstance(output, Sequence) else output
            self._report(func.overloadpacket.__name__, args[0], chosen)
        return output
