"""The model of a profiling subprocess, loaded once, on which steps are run; every job finds it as it was loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from memopt_cli.errors import StepError, UsageError
from memopt_cli.inputs.batch_axis import with_batch
from memopt_cli.inputs.spec_text import is_built_in
from memopt_cli.loading.input_spec import batch_of, make_inputs
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.answers.model_maker import ModelMaker
from memopt_cli.measure.jobs import Subject
from memopt_cli.records import Layout, Plan
from memopt_cli.runtime import group_layers
from memopt_cli.runtime.chunk_rows import rows_untried
from memopt_cli.runtime.in_backward import check_steps_alone
from memopt_cli.runtime.private_torch import fakes_exchanged
from memopt_cli.runtime.samples import nothing_sampled
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.unsafe import forget_marks
from memopt_cli.text.optimizer_text import MadeOptimizer, parse_optimizer
from memopt_cli.training.apply import apply_plan, in_backward_error, remove_segments
from memopt_cli.training.optimizers import OptimizerMaker, optimizer_maker
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import Step, begin, input_dtype, is_out_of_memory, make_scaler, take
from memopt_cli.training.user_step import StepModels
from memopt_cli.verification.further_steps import first_samples

if TYPE_CHECKING:
    from memopt_cli.training.sharded import Spread

Found = TypeVar("Found")
Knowledge = TypeVar("Knowledge")


class Holder:
    """Holds what was made last, and what that entered, until something else is asked for."""

    def __init__(self) -> None:
        self._held: tuple[Any, Any] = None, None
        self._open = contextlib.ExitStack()

    def get(self, key: Any, make: Callable[[contextlib.ExitStack], Found]) -> Found:
        """What ``make`` makes, and what it enters, until another key is asked for: one at a time."""
        if self._held[0] != key:
            self.close()
            with contextlib.ExitStack() as entered:
                made = make(entered)
                self._open, self._held = entered.pop_all(), (key, made)
        found: Found = self._held[1]
        return found

    def close(self) -> None:
        """Leave what is held."""
        self._held = None, None
        self._open.close()


class Bench:
    """A loaded model, its steps, and what was found out of the original: nothing that depends on earlier jobs."""

    def __init__(
        self,
        subject: Subject,
        build: Callable[[], nn.Module] | None = None,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """``build`` makes the model; without it, it is loaded from its file.

        ``functions`` that the settings name are had from here, and the others from their files.
        """
        self.subject = subject
        self.settings = subject.settings
        self._maker = ModelMaker(subject, build)
        self.mode = self._maker.mode
        self._functions = functions
        with self._maker.building():
            model = self._maker.built()
            came_in_eval = [path for path, module in model.named_modules() if not module.training]
            self.model = self._maker.placed(model)
        self.evaluating = tuple(path for path in came_in_eval if self.model.get_submodule(path).training)
        """Paths of modules that came in eval mode, and were put into training mode as all are."""
        if subject.layer_runs:
            group_layers(self.model)
        self.batch = batch_of(subject.spec)
        self._start = StartingState(self.model)
        self._loss = user_function(self.settings.loss, "--loss", functions) if self.settings.loss else None
        self._make_optimizer = maker_of_optimizer(self.settings.optimizer, functions)
        self.optimizer = self._make_optimizer(self.model)
        self._scaler = make_scaler(self.settings)
        self._known: dict[Callable[[Bench], Any], Any] = {}
        self.held = Holder()

    @contextlib.contextmanager
    def rank(self, layout: Layout, plan: Plan) -> Iterator[Spread]:
        """Within, this process is one rank of many; gives the model as that has it, built anew, the plan put on before.

        Raises :class:`StepError` for what cannot be predicted, and :class:`UsageError` for a way to spread that is
        none.
        """
        from memopt_cli.training.sharded import fake_group, spread  # takes seconds to import

        check_spreadable(self.model, plan, "predicted")
        function = way_to_spread(layout, self._functions)
        with self._maker.building():
            model = apply_plan(self._maker.placed(self._maker.built()), plan)
        with fake_group(layout, self.subject.rank) as mesh:
            with fakes_exchanged():
                made = spread(model, mesh, layout, function)
            yield made

    def known(self, find_out: Callable[[Bench], Knowledge]) -> Knowledge:
        """What ``find_out(bench)`` says of the original, which stays true: asked once for all jobs."""
        if find_out not in self._known:
            self._known[find_out] = find_out(self)
        found: Knowledge = self._known[find_out]
        return found

    def knows(self, find_out: Callable[[Bench], object]) -> bool:
        """Whether that was asked, or told, before."""
        return find_out in self._known

    def tell(self, find_out: Callable[[Bench], object], found: object) -> None:
        """The same was seen in steps that were run for another reason."""
        self._known.setdefault(find_out, found)

    # ------------------------------------------------------------------------------------------ its state

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Within, a job is done: the model is as it was loaded before and after."""
        self.enter_start()
        try:
            tried = contextlib.nullcontext() if self.subject.tries_rows else rows_untried()
            with nothing_sampled(), tried:  # fingerprints and verification compare all there is, and time is measured
                yield
        finally:
            remove_segments(self.model)
            forget_marks(self.model)
            self.reset()

    @contextlib.contextmanager
    def planned(self, plan: Plan, step: Step | None = None) -> Iterator[None]:
        """Within, a plan is on the model and its optimizer, or on those of a ``step`` of a copy of it."""
        model, optimizer = (step.model, step.optimizer) if step is not None else (self.model, self.optimizer)
        self.enter_start()
        if plan.in_backward:
            self.known(_checked_alone)
        apply_plan(model, plan, optimizer)
        try:
            yield
        finally:
            remove_segments(model)

    def enter_start(self) -> None:
        """Put the model's tensors and generators where they were when it was loaded."""
        self._start.enter()

    def reset(self) -> None:
        """The same, without gradients; a plan stays on the model."""
        self.model.zero_grad(set_to_none=True)
        self.enter_start()

    # ------------------------------------------------------------------------------------------ its steps

    def step(self, batch: int | None = None, dims: Mapping[str, int] | None = None) -> Step:
        """A step at these sizes, or as the inputs are described.

        Raises :class:`UsageError` for another batch of inputs from a file.
        """
        spec = replace(self.subject.spec, dims={**self.subject.spec.dims, **(dims or {})})
        if batch is not None and batch != self.batch:
            spec = with_batch(spec, batch)
        settings = self.settings
        args, kwargs = make_inputs(spec, seed=settings.seed, device=settings.device, dtype=input_dtype(settings))
        if isinstance(self.model, StepModels):
            return OwnStep(model=self.model, args=args, kwargs=kwargs, settings=settings)
        return Step(
            model=self.model,
            args=args,
            kwargs=kwargs,
            settings=settings,
            loss=self._loss,
            optimizer=self.optimizer,
            make_optimizer=self._make_optimizer,
            scaler=self._scaler,
        )

    def resized(self, batch: int, dims: Mapping[str, int]) -> Step:
        """The same; of inputs from a file, the first samples."""
        try:
            return self.step(batch, dims)
        except UsageError:
            step = self.step(dims=dims)
            args, kwargs = first_samples(step.args, step.kwargs, batch)
            return replace(step, args=args, kwargs=kwargs)

    def begin(self, step: Step) -> None:
        """See :func:`memopt_cli.training.step.begin`."""
        begin(step, self._start)

    def settle(self, step: Step) -> None:
        """Let the step's scaler find a scale at which gradients are finite; the model is then as it was loaded."""
        step.settle(self._start)
        self.reset()

    def settled(self, step: Step) -> Step:
        """The step, at a scale at which its gradients are finite and with its optimizers' state; as it was loaded."""
        self.settle(step)
        if any(not optimizer.state for optimizer in step.optimizers()):
            take(step)
            self.reset()
        return step

    def at_full_size(self, run: Callable[[Step], Found]) -> Found | None:
        """What ``run`` finds of a step at full size; ``None`` where that does not fit, or is not to be tried."""
        if self.subject.data != "full size":
            return None
        self.enter_start()
        try:
            step = self.step()
            self.settle(step)
            return run(step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            self.reset()


def check_spreadable(model: nn.Module, plan: Plan, what: str) -> None:
    """Raises :class:`StepError` for what is not predicted, or measured, for many ranks."""
    if isinstance(model, StepModels):
        raise StepError(f"a step of one's own is not {what} for many ranks", hint="Give what builds the model.")
    if plan.in_backward:
        raise StepError(
            f"the optimizer in backward is not {what} for many ranks", hint="Take in_backward out of the plan."
        )


def way_to_spread(
    layout: Layout, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Callable[..., Any] | None:
    """The user's function; ``None`` of a built-in way.  Raises :class:`UsageError` if there is none of that name."""
    return None if is_built_in(layout.parallel) else user_function(layout.parallel, "--parallel", functions)


def _checked_alone(bench: Bench) -> None:
    """Raises :class:`PlanError` for an optimizer that updates parameters otherwise one by one."""
    if bench.optimizer is not None:
        try:
            check_steps_alone(bench.optimizer)
        except ValueError as reason:
            raise in_backward_error(bench.optimizer, reason) from reason


def maker_of_optimizer(text: str, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> OptimizerMaker:
    """Of what ``--optimizer`` says; ``functions``: see :class:`Bench`."""
    choice = parse_optimizer(text)
    made = user_function(choice.reference, "--optimizer", functions) if isinstance(choice, MadeOptimizer) else None
    return optimizer_maker(choice, made)
