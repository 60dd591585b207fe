"""The bench: the loaded model of a profiling subprocess, and its steps for the functions that answer jobs.

The model is loaded once.  Before and after each job its tensors, modes and random generators are restored to the state
in which it was loaded, so no answer depends on earlier jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch import nn

from memopt_cli.errors import StepError, UsageError
from memopt_cli.inputs.batch_axis import with_batch
from memopt_cli.loading.input_spec import batch_of, make_inputs, unnamed_arguments
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.answers.model_maker import ModelMaker
from memopt_cli.measure.jobs import Subject
from memopt_cli.records import BUILT_IN, SKIPS_LAYERS, Plan, RankLayout
from memopt_cli.runtime import group_layers
from memopt_cli.runtime.chunk_rows import rows_untried
from memopt_cli.runtime.in_backward import check_steps_alone
from memopt_cli.runtime.private_torch import fake_parameters_swappable
from memopt_cli.runtime.samples import sampling_off
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.unsafe import forget_unsafe
from memopt_cli.text.optimizer_text import MadeOptimizer, parse_optimizer
from memopt_cli.training.apply import apply_plan, refusing_in_backward, remove_segments
from memopt_cli.training.module_calls import called_modules, calls_of_all_layers, one_step_noted, skipped_layers
from memopt_cli.training.optimizers import OptimizerMaker, optimizer_maker
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep, input_dtype, make_scaler, reset_step, seed_everything
from memopt_cli.training.user_step import StepModels
from memopt_cli.training.wrappers import suspend_compilation, unwrap
from memopt_cli.verification.further_steps import first_samples

if TYPE_CHECKING:
    from memopt_cli.training.sharded.spread import ShardedRank

_Sizes = tuple[int | None, Mapping[str, int] | None]
"""Batch and further sizes of a step; ``None`` for those that the description of the inputs gives."""
_MAX_EXTRA_SEEDS: Final = 8
"""Number of further seeds to try for a step that skips no layers."""
Value = TypeVar("Value")
Fact = TypeVar("Fact")


class CachedValue:
    """A cache of one value, with the contexts that must stay entered while the value is used."""

    def __init__(self) -> None:
        self._cached: tuple[Any, Any] = None, None
        self._open = contextlib.ExitStack()

    def get(self, key: Any, make: Callable[[contextlib.ExitStack], Value]) -> Value:
        """Return the cached value if it was made for ``key``; otherwise drop it, and cache what ``make`` returns.

        ``make`` gets a stack for the contexts that it enters; they are left when the value is dropped.
        """
        if self._cached[0] != key:
            self.close()
            with contextlib.ExitStack() as entered:
                fresh = make(entered)
                self._open, self._cached = entered.pop_all(), (key, fresh)
        value: Value = self._cached[1]
        return value

    def close(self) -> None:
        """Drop the value, and leave its contexts."""
        self._cached = None, None
        self._open.close()


class Bench:
    """A loaded model, its steps, and a cache of facts about the model without a plan."""

    def __init__(
        self,
        subject: Subject,
        build: Callable[[], nn.Module] | None = None,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Load the model of ``subject``, or let ``build`` make it.

        Functions that the settings name are taken from ``functions``, others from their files.
        """
        self.subject = subject
        self.settings = subject.settings
        self._maker = ModelMaker(subject, build)
        self.mode = self._maker.mode
        self._functions = functions
        with self._maker.without_data():
            model = self._maker.build()
            came_in_eval = [path for path, module in model.named_modules() if not module.training]
            self.model = self._maker.move(model)
        self.evaluating = tuple(path for path in came_in_eval if self.model.get_submodule(path).training)
        """Paths of the modules that were saved in eval mode; they are in training mode now, as all modules are."""
        if subject.layer_runs:
            group_layers(self.model)
        self.batch = batch_of(subject.spec)
        self._start = StartingState(self.model)
        self._loss = user_function(self.settings.loss, "--loss", functions) if self.settings.loss else None
        self._make_optimizer = maker_of_optimizer(self.settings.optimizer, functions)
        self.optimizer = self._make_optimizer(self.model)
        self._scaler = make_scaler(self.settings)
        self.messages: dict[str, None] = {}
        """Sentences for the user on the steps that were run, each once."""
        self._facts: dict[Callable[[Bench], Any], Any] = {}
        """Function that computes a fact about the original -> the fact."""
        self._sizes: _Sizes = None, None
        """The sizes of the last step that was made."""
        self._skipping: dict[tuple[str, ...], _Sizes | None] = {}
        """Groups of layers of which a step skipped some -> the sizes of that step; ``None`` once a note says so."""
        self.rank_step = CachedValue()
        """The step of a rank, which takes long to make."""

    @contextlib.contextmanager
    def rank(self, layout: RankLayout, plan: Plan) -> Iterator[ShardedRank]:
        """Act as one rank of ``layout`` in the ``with`` block; yield that rank's part of a new model with ``plan``.

        Raises :class:`StepError` for a model or plan whose ranks cannot be predicted, and :class:`UsageError` if the
        function that spreads the model cannot be found.
        """
        from memopt_cli.training.sharded.process_groups import fake_group  # takes seconds to import
        from memopt_cli.training.sharded.spread import shard_for_prediction

        check_spreadable(self.model, plan, "predicted")
        function = spread_function(layout, self._functions)
        with self._maker.without_data():
            model = apply_plan(self._maker.move(self._maker.build()), plan)
        with fake_group(layout, self.subject.rank) as mesh:
            with fake_parameters_swappable():
                sharded = shard_for_prediction(model, mesh, layout, function)
            yield sharded

    def cached(self, compute: Callable[[Bench], Fact]) -> Fact:
        """Return ``compute(bench)``, a fact about the original, which is computed once for all jobs."""
        if compute not in self._facts:
            self._facts[compute] = compute(self)
        fact: Fact = self._facts[compute]
        return fact

    def is_cached(self, compute: Callable[[Bench], object]) -> bool:
        """Return whether the result of ``compute`` is known."""
        return compute in self._facts

    def remember(self, compute: Callable[[Bench], object], fact: object) -> None:
        """Cache ``fact`` as the result of ``compute``, if steps that ran for another purpose have shown it."""
        self._facts.setdefault(compute, fact)

    # ------------------------------------------------------------------------------------------ state of the bench

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the model as it was loaded, before and after the block that answers a job."""
        self.enter_start()
        try:
            trials = contextlib.nullcontext() if self.subject.tries_rows else rows_untried()
            with sampling_off(), trials:  # sampled checks would take time, and results are compared in full anyway
                yield
        finally:
            remove_segments(self.model)
            forget_unsafe(self.model)
            self.reset()
        self._note_skipped_layers()

    @contextlib.contextmanager
    def with_plan(self, plan: Plan, step: TrainingStep | None = None) -> Iterator[None]:
        """Apply ``plan`` in the ``with`` block, to the model and optimizer of ``step``, or to the bench's own."""
        model, optimizer = (step.model, step.optimizer) if step is not None else (self.model, self.optimizer)
        self.enter_start()
        if plan.in_backward:
            self.cached(_check_steps_alone)
        apply_plan(model, plan, optimizer)
        try:
            yield
        finally:
            remove_segments(model)

    def enter_start(self) -> None:
        """Restore the model's tensors and the random generators as they were when the model was loaded."""
        self._start.restore()

    def reset(self) -> None:
        """Restore the model as it was loaded and drop its gradients; a plan stays on it."""
        self.model.zero_grad(set_to_none=True)
        self.enter_start()

    # ------------------------------------------------------------------------------------------ steps of the bench

    def step(
        self, batch: int | None = None, dims: Mapping[str, int] | None = None, *, seed: int | None = None
    ) -> TrainingStep:
        """Make a step at the sizes ``batch`` and ``dims``; the description of the inputs gives the other sizes.

        ``seed``: in place of that of the settings.

        Raises :class:`UsageError` for another batch size of inputs from a file.
        """
        spec = replace(self.subject.spec, dims={**self.subject.spec.dims, **(dims or {})})
        if batch is not None and batch != self.batch:
            spec = with_batch(spec, batch)
        self._sizes = batch, dims
        settings = self.settings if seed is None else replace(self.settings, seed=seed)
        args, kwargs = make_inputs(spec, seed=settings.seed, device=settings.device, dtype=input_dtype(settings))
        if isinstance(self.model, StepModels):
            return OwnStep(model=self.model, args=args, kwargs=kwargs, settings=settings)
        for note in unnamed_arguments(unwrap(self.model), kwargs):
            self.messages.setdefault(note)
        return TrainingStep(
            model=self.model,
            args=args,
            kwargs=kwargs,
            settings=settings,
            loss=self._loss,
            optimizer=self.optimizer,
            make_optimizer=self._make_optimizer,
            scaler=self._scaler,
            report=lambda message: self.messages.setdefault(message),
        )

    def look_for_skipped_layers(self) -> None:
        """Find the layers without gradients of the last step, which skipped them, for a note after the job."""
        if groups := tuple(skipped_layers(self.model)):
            self._skipping.setdefault(groups, self._sizes)

    def _note_skipped_layers(self) -> None:
        """Note each group of which a step skipped some layers, once, and a seed that runs all of them.

        The seeds are tried when the job is done: its measurements, and hooks on its step, see nothing of them.
        """
        for groups, sizes in self._skipping.items():
            if sizes is None:
                continue
            seed = self._seed_of_all(groups, sizes)
            with_seed = f"give `--seed {seed}`, which runs all of them"
            remedy = "make the model run all of them" if seed is None else with_seed
            self.messages.setdefault(
                f"Of {', '.join(map(repr, groups))}, {SKIPS_LAYERS}, as with layer drop: "
                f"a step that runs all of them needs more memory. To plan for that step, {remedy}."
            )
            self._skipping[groups] = None
            self.reset()

    def _seed_of_all(self, groups: Collection[str], sizes: _Sizes) -> int | None:
        """Return the first other seed whose forward runs all layers of ``groups``; ``None`` if few tries find none."""
        if isinstance(self.model, StepModels):  # a step of the user's own has no forward alone
            return None
        first = self.settings.seed + 1
        called = {seed: self._called_modules(seed, sizes) for seed in range(first, first + _MAX_EXTRA_SEEDS)}
        all_calls = calls_of_all_layers(self.model, groups, frozenset().union(*called.values()))
        return next((seed for seed, modules in called.items() if all_calls and modules >= all_calls), None)

    def _called_modules(self, seed: int, sizes: _Sizes) -> frozenset[str]:
        """Return the paths of the modules that a forward with ``seed`` calls; empty if it does not run."""
        self.enter_start()
        step = self.step(*sizes, seed=seed)
        seed_everything(seed)
        # A seed that forward does not take is none to name, and no reason to end the measurement.
        with suspend_compilation(self.model), contextlib.suppress(Exception):
            return called_modules(self.model, step.run_forward)
        return frozenset()

    def one_step_noted(self) -> contextlib.AbstractContextManager[None]:
        """Note if the step in the ``with`` block is one time step of a loop that the user's script runs."""
        return one_step_noted(self.model, self.messages.setdefault)

    def step_at(self, batch: int, dims: Mapping[str, int]) -> TrainingStep:
        """Make a step at the sizes ``batch`` and ``dims``; of inputs from a file it takes the first samples."""
        try:
            return self.step(batch, dims)
        except UsageError:
            step = self.step(dims=dims)
            args, kwargs = first_samples(step.args, step.kwargs, batch)
            return replace(step, args=args, kwargs=kwargs)

    def reset_step(self, step: TrainingStep) -> None:
        """Reset ``step`` to the state in which the model was loaded: :func:`memopt_cli.training.step.reset_step`."""
        reset_step(step, self._start)

    def find_scale(self, step: TrainingStep) -> None:
        """Let the gradient scaler of ``step`` find a scale at which gradients are finite, then restore the model."""
        step.find_scale(self._start)
        self.reset()

    def warmed_up(self, step: TrainingStep) -> TrainingStep:
        """Return ``step`` after its scaler has found a scale and its optimizers have made their state."""
        self.find_scale(step)
        if any(not optimizer.state for optimizer in step.optimizers()):
            step.take()
            self.reset()
        return step


def check_spreadable(model: nn.Module, plan: Plan, what: str) -> None:
    """Raise :class:`StepError` for a step that is not ``what``, predicted or measured, for many ranks."""
    if isinstance(model, StepModels):
        raise StepError(f"your own step cannot be {what} for many ranks", hint="Name a function that builds the model.")
    if plan.in_backward:
        raise StepError(
            f"the optimizer in backward cannot be {what} for many ranks", hint="Take in_backward out of the plan."
        )


def spread_function(
    layout: RankLayout, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Callable[..., Any] | None:
    """Return the user's function that spreads the model over ranks; ``None`` for a built-in one, such as ``fsdp``.

    Raises :class:`UsageError` if the function cannot be found.
    """
    return None if layout.parallel in BUILT_IN else user_function(layout.parallel, "--parallel", functions)


def _check_steps_alone(bench: Bench) -> None:
    """Raise :class:`PlanError` if the optimizer updates a single parameter differently from all of them together."""
    if bench.optimizer is not None:
        with refusing_in_backward(bench.optimizer):
            check_steps_alone(bench.optimizer)


def maker_of_optimizer(text: str, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> OptimizerMaker:
    """Return a maker of the optimizer that ``text`` of ``--optimizer`` names; ``functions``: see :class:`Bench`."""
    choice = parse_optimizer(text)
    function = user_function(choice.reference, "--optimizer", functions) if isinstance(choice, MadeOptimizer) else None
    return optimizer_maker(choice, function)
