"""The online algorithms: gradients of a recurrent model step by step, in memory that does not grow with time.

D-RTRL and ES-D-RTRL are by Wang et al. (BrainScale); :mod:`memopt_cli.online.traces` has the equations.  Both
follow how the states of a neuron depend on its own past states, and ignore how they depend on other neurons through
recurrent weights.  On the graph without these paths, D-RTRL gives exactly the gradient of backpropagation through
time, and ES-D-RTRL approximates it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, UsageError, type_in_words
from memopt_cli.online.calls import Past, SampleShapes
from memopt_cli.online.finding import find_structure
from memopt_cli.online.operations import Operation, has_tags, make_operation, trace_kind
from memopt_cli.online.states import Batching, check_mode, environ, init_all_states, states_of
from memopt_cli.online.traced_step import TracedStep
from memopt_cli.online.traces import FactoredTrace, FullTrace, Group, ModuleUse, Trace
from memopt_cli.runtime.private_torch import buffers_of, is_of_vmap, tree_map, tree_map_only, without_transform

VjpMethod = Literal["single-step", "multi-step"]
Correction = Literal["reference", "exact", "none"]


class OnlineAlgorithm(nn.Module):
    """A model that learns while it runs: call it once per time step, and ``backward`` on the loss of each step.

    Tagged weights (``traced``) for which :meth:`compile_graph` finds a path to a state carry traces.  Gradients
    accumulate in ``.grad``.  A parameter without a trace gets the gradient of each step only.
    """

    def __init__(
        self, model: nn.Module, *, mode: Batching | None = None, vjp_method: VjpMethod = "single-step"
    ) -> None:
        """Learn the weights of ``model``, a module of one time step.

        ``mode``: ``Batching()`` if inputs and states have a batch axis; by default the mode of ``environ``.
        ``vjp_method``: ``"single-step"`` takes ``[...]``, the inputs of one step.  ``"multi-step"`` takes a window
        ``[steps, ...]`` and differentiates within it through every path, through weights as well; the traces carry the
        past before the window.
        """
        super().__init__()
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is {type_in_words(model)}", hint="Pass a torch.nn.Module of one time step.")
        check_mode(mode)
        if vjp_method not in ("single-step", "multi-step"):
            raise UsageError(f"unknown vjp_method {vjp_method!r}", hint='Pass "single-step" or "multi-step".')
        self.model = model
        self.mode = environ.mode if mode is None else mode
        self.vjp_method = vjp_method
        self.traces = nn.ModuleList()
        self._step: TracedStep | None = None
        self._sizes = SampleShapes((), has_batch=self.mode is not None)
        self._past = Past()

    def compile_graph(self, *inputs: Tensor) -> None:
        """Find by a step on ``inputs`` which weights carry traces, and make the traces; later calls do nothing.

        The model's states must be initialized.  Warns if no weight was given to ``traced`` or ``untraced``, and of
        plain parameters that a traced state depends on.  Raises :class:`MemoptError` for a model that traces cannot
        follow.
        """
        if self._step is not None:
            return
        has_batch = self.mode is not None
        SampleShapes(states_of(self.model).values(), has_batch=has_batch).check(inputs)
        if not has_tags(self.model):
            warnings.warn(
                f"no weight of {type(self.model).__name__} is tagged, so each of them gets only the gradient of each "
                "step. Tag the layers that should learn from the past with traced(layer), or call untraced(model) to "
                "silence this warning.",
                stacklevel=2,
            )
        structure = find_structure(self.model, inputs, batched=has_batch)
        if structure.plain_parameters:
            warnings.warn(
                f"states depend on {', '.join(structure.plain_parameters)}, which no trace follows: the gradient "
                "leaves out the past. Replace such a parameter in your cell with ElementWise, or freeze it.",
                stacklevel=2,
            )
        for use, groups in structure.groups.items():
            operation = make_operation(self.model.get_submodule(use.path))
            example = operation.bias if operation.weight is None else operation.weight
            trace = self._make_trace(use, groups, operation, structure.input_shapes[use])
            if use in structure.doubled_uses and isinstance(trace, FactoredTrace):
                raise MemoptError(
                    f"the output of {use.path} is read by a cell that has parameters or inputs of its own, and also "
                    "outside cells: a factored trace cannot separate the two gradients",
                    hint="Use D_RTRL, or give each reader its own weight.",
                )
            self.traces.append(trace.to(example))
        init_all_states(self.traces, inputs[0].shape[0] if has_batch else None)
        self._begin_sequence(inputs[0].device)
        traces = cast(list[Trace], list(self.traces))
        self._step = TracedStep(
            self.model, structure, traces, batched=has_batch, window=self.vjp_method == "multi-step"
        )
        self._sizes = SampleShapes(self._step.all_states, inputs, has_batch=has_batch)

    def reset_state(self, batch_size: int | None = None) -> None:
        """Begin a new sequence: reset states and traces, for one sample or for ``batch_size`` samples."""
        init_all_states(self, batch_size)
        self._past = Past()
        self._begin_sequence(next(self.model.parameters(), torch.empty(0)).device)

    @property
    def untraced(self) -> dict[str, str]:
        """Path of a tagged module that carries no trace -> the reason."""
        return dict(self._compiled_step().structure.untraced_reasons)

    def get_etrace_of(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return the traces of ``weight`` by name, in the shapes in which they are kept.

        Raises :class:`MemoptError` if the weight carries no trace.
        """
        traces: dict[str, Tensor] = {}
        step = self._compiled_step()
        for trace in step.traces.by_use.values():
            operation = make_operation(step.weights[trace.use.path])
            if operation.weight is weight or operation.bias is weight:
                traces |= {f"{trace.use.path}[{trace.use.call}].{n}": s.value for n, s in states_of(trace).items()}
        if not traces:
            raise MemoptError(
                "the parameter carries no eligibility trace",
                hint=f"These carry traces: {', '.join(step.weights) or 'none'}.",
            )
        return traces

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's output for one time step, or for a window, ``[steps, ...]``; its states advance."""
        run = self._compiled_step()
        window = self.vjp_method == "multi-step"
        steps = list(zip(*inputs, strict=True)) if window else [inputs]
        if not steps:
            raise MemoptError("the window has no steps", hint="Pass inputs [steps, ...] of at least one time step.")
        self._sizes.check(steps[0])
        if self.traces:
            self._past.check(self._carried_tensors())
        first, *_ = steps[0]
        with torch.enable_grad(), run.batch.like(first), run.traces_loaded():
            run.tie_to_past(self._scale_of_past())
            outputs = [run.step(self.model, step, self._next_scale()) for step in steps]
        self.accept_states()
        output = tree_map(_stack, *outputs) if window else outputs[0]
        return output if torch.is_grad_enabled() else tree_map_only(Tensor, Tensor.detach, output)

    def update(self, *inputs: Tensor) -> Any:
        """Return the output for ``inputs``; BrainScale's name for a call of the algorithm."""
        return self(*inputs)

    def _begin_sequence(self, device: torch.device) -> None:
        """Prepare for the first step of a sequence."""

    def _next_scale(self) -> float | Tensor:
        """Return the divisor of the gradients of the step that begins."""
        return 1.0

    def _scale_of_past(self) -> float | Tensor:
        """Return the divisor of the gradients of the last step."""
        return 1.0

    def _make_trace(
        self, use: ModuleUse, groups: Sequence[Group], operation: Operation, z_shape: Sequence[int] | None
    ) -> Trace:
        raise NotImplementedError

    def _compiled_step(self) -> TracedStep:
        if self._step is None:
            raise MemoptError("the algorithm is not compiled yet", hint="Call compile_graph(inputs) first.")
        return self._step

    def _carried_tensors(self) -> list[tuple[str, Tensor]]:
        """Return name and tensor of all that a step hands to the next: followed states, traces, buffers."""
        run = self._compiled_step()
        followed = [(name, state.value) for name, state in run.followed_states.items()]
        traces = [(name, state.value) for name, state in states_of(self.traces).items()]
        buffers = [(name, buffer) for name, buffer in buffers_of(self).items() if buffer is not None]
        return [(name, without_transform(t) if is_of_vmap(t) else t) for name, t in (*followed, *traces, *buffers)]

    def accept_states(self) -> None:
        """Accept the current states and traces as the result of the last step, even if the user has set them."""
        self._past.remember(self._carried_tensors())


class D_RTRL(OnlineAlgorithm):
    """Diagonal real-time recurrent learning: exact on the cut graph; memory ``B * I * H * k`` numbers per weight."""

    def _make_trace(
        self, use: ModuleUse, groups: Sequence[Group], operation: Operation, z_shape: Sequence[int] | None
    ) -> Trace:
        return FullTrace(use, groups, operation)


class ES_D_RTRL(OnlineAlgorithm):
    """D-RTRL with exponentially smoothed, factored traces; memory ``B * (I + k * H)`` numbers per weight."""

    unseen: Tensor
    """Weight of the time before the sequence in the correction's filter: ``base^t`` after t steps, in float64."""

    def __init__(
        self,
        model: nn.Module,
        decay_or_rank: float | int,
        *,
        correction: Correction = "exact",
        mode: Batching | None = None,
        vjp_method: VjpMethod = "single-step",
    ) -> None:
        """Filter by ``decay_or_rank``: a float ``a`` in (0, 1), or a rank n > 0, which is ``a = (n - 1) / (n + 1)``.

        ``correction``: the divisor of the gradients of step t, from 0.  ``"exact"`` is ``1 - a^(t + 1)``, which removes
        the bias of the filter's start: the first gradient is the gradient of D-RTRL.  ``"reference"`` is
        ``1 - (1 - a)^(t + 1)``, as in the authors' first code.  ``"none"`` is 1.
        """
        super().__init__(model, mode=mode, vjp_method=vjp_method)
        if correction not in ("reference", "exact", "none"):
            raise UsageError(f"unknown correction {correction!r}", hint='Pass "reference", "exact" or "none".')
        self.decay, self.rank = parse_decay_or_rank(decay_or_rank)
        if correction == "reference" and self.decay == 0:
            raise UsageError(
                "a decay of 0 (rank 1) excludes the reference's correction, which would divide by 1 - 1^t = 0",
                hint='Pass correction="exact", or a rank of 2 or more.',
            )
        self.correction = correction
        self._base = 1 - self.decay if correction == "reference" else self.decay
        self.register_buffer("unseen", torch.ones((), dtype=torch.float64), persistent=False)

    def _begin_sequence(self, device: torch.device) -> None:
        self.unseen = torch.ones((), dtype=torch.float64, device=device)

    def _next_scale(self) -> float | Tensor:
        if self.correction == "none":
            return 1.0
        unseen = buffers_of(self)["unseen"] = self.unseen * self._base
        return 1 - unseen

    def _scale_of_past(self) -> float | Tensor:
        # Before the first step the traces are zero; the clamp only avoids dividing these zeros by zero.
        return 1.0 if self.correction == "none" else 1 - self.unseen.clamp_max(self._base)

    def _make_trace(
        self, use: ModuleUse, groups: Sequence[Group], operation: Operation, z_shape: Sequence[int] | None
    ) -> Trace:
        return FactoredTrace(use, groups, operation, self.decay, z_shape)


class HybridTrace(ES_D_RTRL):
    """D-RTRL with the smaller trace for each weight, full or factored; ``traced(layer, kind)`` overrides the choice.

    A weight gets a full trace if ``k * O * K <= I + k * O`` numbers per sample, for I inputs, O outputs, K weights per
    output and k states.  For linear layers with one state this is nearly the reference's rule ``I + O > numel(W)``.  A
    convolution's trace is kept, and counted, for every position; the reference sums over positions, which is not exact.
    """

    def _make_trace(
        self, use: ModuleUse, groups: Sequence[Group], operation: Operation, z_shape: Sequence[int] | None
    ) -> Trace:
        full = FullTrace(use, groups, operation)
        factored = FactoredTrace(use, groups, operation, self.decay, z_shape)
        kind = trace_kind(self.model.get_submodule(use.path))
        if kind == "adaptive":
            kind = "full" if _element_count(full) <= _element_count(factored) else "approx"
        return full if kind == "full" else factored


def parse_decay_or_rank(decay_or_rank: float | int) -> tuple[float, int]:
    """Return decay ``a`` and rank ``n``, with ``a = (n - 1) / (n + 1)``; ``decay_or_rank`` is either of them."""
    if isinstance(decay_or_rank, int) and not isinstance(decay_or_rank, bool) and decay_or_rank > 0:
        return (decay_or_rank - 1) / (decay_or_rank + 1), decay_or_rank
    if isinstance(decay_or_rank, float) and 0 < decay_or_rank < 1:
        return decay_or_rank, round(2 / (1 - decay_or_rank) - 1)
    raise UsageError(
        f"invalid decay_or_rank {decay_or_rank!r}", hint="Pass a decay above 0.0 and below 1.0, or a rank: 1, 2 …"
    )


def _element_count(trace: Trace) -> int:
    return sum(state.value.numel() for state in states_of(trace).values())


def _stack(*steps: Any) -> Any:
    return torch.stack(steps) if isinstance(steps[0], Tensor) else steps[-1]
