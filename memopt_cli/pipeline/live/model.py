"""Preparing a model in memory, in place of a file, for the Python API.

The model goes to profiling subprocesses through a temporary file.  If a subprocess could not load it, for example
because its class is defined in a function, it is profiled in this process, and a note has the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, OptionError, StepError, VerificationError, first_line, type_in_words
from memopt_cli.inputs.spec_text import format_tensor, parse_tensor
from memopt_cli.loading.input_spec import batch_of, range_like
from memopt_cli.loading.module_pickle import load_tensors
from memopt_cli.measure.answers.without_steps import facts_of
from memopt_cli.measure.jobs import DescribeJob, Subject
from memopt_cli.measure.local import LocalSession, isolate_state
from memopt_cli.measure.reach import UserFunction, main_script, unreachable
from memopt_cli.measure.same_code import find_difference
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.records import (
    Differs,
    Dropped,
    InputSpec,
    LoadedModel,
    ModelSource,
    OptimizeRequest,
    Plan,
    StepSettings,
    TensorSpec,
    Trust,
    Verification,
)
from memopt_cli.runtime import reset_hidden_state
from memopt_cli.runtime.module_state import copy_module
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.text.units import dtype_name
from memopt_cli.training.apply import plan_of, remove_plan
from memopt_cli.training.step import Step, place
from memopt_cli.training.wrappers import compiled_notes, unwrap
from memopt_cli.verification.effects import as_leaf, gradients_kept

Arguments = tuple[Any, ...] | Mapping[str, Any]
"""Arguments of a model's forward, by position or by name."""
FORMAT = "live"
"""Format of a model in memory, for :attr:`memopt_cli.records.LoadedModel.format`."""
_thread = threading.local()


@contextlib.contextmanager
def prepared_model(
    model: nn.Module, inputs: Arguments | InputSpec, settings: StepSettings, functions: Sequence[UserFunction] = ()
) -> Iterator[Prepared]:
    """Prepare ``model``, which is in memory, to be profiled; neither it nor the inputs are changed.

    The step is prepared without the plan that ``model`` carries; ``carried`` of the result is that plan.
    Model and inputs go to subprocesses through files in a folder that is removed afterwards.  A model is
    profiled in this process if a subprocess could not read it, or could not import the ``functions`` that the settings
    name; a note has the reason.
    Raises :class:`OptionError` for inputs that are not tensors or plain containers, and :class:`StepError` for a model
    that cannot be copied, and within a profiling subprocess.
    """
    with refuse_recursion(), prepared_one_of_several(unwrap(model), inputs, settings, functions) as prepared:
        yield replace(prepared, notes=(*prepared.notes, *notes_on_wrapping(model)))


def notes_on_wrapping(model: nn.Module) -> list[str]:
    """Return notes on an omitted wrapper around ``model``, and on its compiled parts."""
    name, wrapped = type(model).__name__, unwrap(model)
    left_out = [f"The step is measured without {name}, and the memory of {name} is not counted."]
    return [*(left_out if wrapped is not model else ()), *compiled_notes(wrapped)]


@contextlib.contextmanager
def prepared_one_of_several(
    model: nn.Module,
    inputs: Arguments | InputSpec,
    settings: StepSettings,
    functions: Sequence[UserFunction] = (),
    obstacle: str = "",
) -> Iterator[Prepared]:
    """Prepare one of several models, as :func:`prepared_model` does; call it inside :func:`refuse_recursion`.

    ``obstacle``: why the model must be profiled in this process.
    """
    build = functools.partial(detached_copy, model)
    with tempfile.TemporaryDirectory(prefix="memopt-") as folder:
        model_file, input_file = Path(folder) / "model.pt", Path(folder) / "inputs.pt"
        if isinstance(inputs, InputSpec):
            spec = inputs
        else:
            save_inputs(inputs, input_file)
            spec = InputSpec(data_file=str(input_file), source="dummy_input")
        unread, names = _save_for_subprocess(build(), model_file)
        obstacle = next(filter(None, (obstacle, unread, *(function.obstacle for function in functions))), "")
        needs_script = any(name.startswith("__main__.") for name in names)
        code_paths = (str(main_script()),) if needs_script else ()
        source = ModelSource(location=str(model_file), trust=Trust(pickle=True, code_paths=code_paths))
        obstacle = obstacle or find_difference(source, names, functions)
        subject = Subject(source=source, spec=spec, settings=settings)
        prepared = prepare_here(subject, FORMAT, build, obstacle, functions)
        prepared = replace(prepared, carried=plan_of(model).of_model)
        with gradients_kept(model) if obstacle and unimportable_functions(functions) else contextlib.nullcontext():
            yield prepared


def unimportable_functions(functions: Sequence[UserFunction]) -> dict[str, Callable[..., Any]]:
    """Return those of ``functions`` that cannot be imported by their references, as a dictionary by reference."""
    return {function.reference: function.function for function in functions if function.function is not None}


def prepare_here(
    subject: Subject,
    format: str,
    build: Callable[[], nn.Module],
    obstacle: str,
    functions: Sequence[UserFunction] = (),
) -> Prepared:
    """Prepare the model that ``build`` makes; if an ``obstacle`` keeps subprocesses from it, for this process."""
    loaded = LoadedModel(module=build(), source=subject.source, format=format, sha256=None)
    open_local = functools.partial(LocalSession, build=build, functions=unimportable_functions(functions))
    return Prepared(
        subject=subject,
        facts=replace(facts_of(loaded, DescribeJob(inputs=False)), batch=batch_of(subject.spec)),
        notes=(f"Profiled in this process, without a time limit: {obstacle}.",) if obstacle else (),
        open_session=open_local if obstacle else None,
    )


class _Called(Exception):
    """Signal that ends a forward as soon as its inputs are known."""


def inputs_of(model: nn.Module, example_forward: Callable[[nn.Module], object]) -> Arguments:
    """Return the arguments of the first call of the model in ``example_forward``, which runs on a copy up to there.

    Raises :class:`OptionError` if it does not call the model, or mixes arguments by name with more positional ones than
    ``forward`` names.
    """
    model_copy = detached_copy(model)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Called

    model_copy.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    with isolate_state(), contextlib.suppress(_Called):
        example_forward(model_copy)
    if not calls:
        raise OptionError(
            "example_forward did not call the model that it was given",
            hint="Let it run the whole model once: example_forward=lambda model: model(x).",
        )
    args, kwargs = calls[0]
    return {**_by_name(model, args), **kwargs} if kwargs else args


def _by_name(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments ``args`` of the forward of ``model`` by their names."""
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise OptionError(
            f"example_forward calls the model with {len(args)} positional arguments and others by name, "
            f"and its forward names {len(names)}",
            hint="Give all by position, or all by name.",
        )
    return dict(zip(names, args, strict=False))


def detached_copy(model: nn.Module) -> nn.Module:
    """Copy ``model`` without its plan, its gradients, and hidden state that earlier steps left on its modules.

    Raises :class:`StepError` if the model cannot be copied.
    """
    try:
        model_copy = copy_module(model)
    except Exception as err:  # the user's classes may do anything
        raise StepError(
            f"the model cannot be copied, so it cannot be profiled without being changed: {first_line(err)}",
            hint=_before_sharding(model)
            or "Leave what cannot be copied (open files, locks, graphs) out of its attributes.",
        ) from err
    remove_plan(model_copy)
    model_copy.zero_grad(set_to_none=True)
    reset_hidden_state(model_copy)
    return model_copy


def _before_sharding(model: nn.Module) -> str:
    """Return what to do with a model that ``fully_shard`` has changed; empty for others."""
    sharding = sys.modules.get("torch.distributed.fsdp")  # takes seconds to import
    if sharding is None or not any(isinstance(module, sharding.FSDPModule) for module in model.modules()):
        return ""
    return "Optimize the model before fully_shard: its plan stays on it."


@contextlib.contextmanager
def refuse_recursion() -> Iterator[None]:
    """Refuse calls of memopt, in the ``with`` block, by a Python module that is being imported.

    Such a call, at the top level of the user's script, would recur without end: memopt's subprocesses import the script
    to load its classes, and this process may import it for the loss that it defines.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_subprocess = spec is not None and spec.name == "memopt_cli.measure.server"
    if is_subprocess or getattr(_thread, "prepares", False):
        raise StepError(
            "a module calls memopt while it is being imported",
            hint='Call it from a function, or under if __name__ == "__main__".',
        )
    _thread.prepares = True
    try:
        yield
    finally:
        _thread.prepares = False


def save_inputs(inputs: Arguments, path: Path) -> None:
    """Save ``inputs`` to a file that a subprocess reads.  Raises :class:`OptionError` if they cannot be saved."""
    _require_batch(inputs)
    detached = map_leaves(as_leaf, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    torch.save(detached, path)
    try:
        load_tensors(path.read_bytes(), str(path))
    except MemoptError as err:
        raise OptionError(
            f"the inputs cannot be handed to a profiling subprocess: {err.message}",
            hint="Give a tuple of tensors, numbers, strings and plain containers of them.",
        ) from err


def _require_batch(inputs: Arguments) -> None:
    first_tensor = next(iter(tensors_of(inputs)), None)
    if first_tensor is None or not first_tensor.dim():
        problem = "there is no tensor" if first_tensor is None else "the first tensor is a scalar"
        raise OptionError(
            f"the inputs have no batch: {problem}",
            hint="Give the arguments of forward; dimension 0 of the first tensor is taken as the batch.",
        )


def describe_inputs(inputs: Arguments) -> InputSpec:
    """Describe ``inputs`` as on the command line: the first dimension of the first tensor is the batch.

    Integers will be in the range of :func:`~memopt_cli.loading.input_spec.range_like`.  Raises
    :class:`OptionError` for an argument that is not a tensor.
    """
    _require_batch(inputs)
    arguments = inputs.items() if isinstance(inputs, Mapping) else ((None, value) for value in inputs)
    return InputSpec(tensors=tuple(_describe_input(name, value) for name, value in arguments), source="inputs")


def _describe_input(name: str | None, value: Any) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise OptionError(
            f"an input is {type_in_words(value)}, and batches of a different size cannot be made of it",
            hint='Describe the inputs by text: "Bx3x64x64", with dims={"B": 8}.',
        )
    is_whole = not value.is_floating_point() and not value.is_complex()
    values = range_like(value) if is_whole else "normal"
    dtype = dtype_name(value.dtype)
    tensor = TensorSpec(name=name, shape=tuple(value.shape), dtype=dtype, values=values)
    return parse_tensor(format_tensor(tensor))  # refuses a tensor that cannot be described


def step_of_copies(model: nn.Module, inputs: Arguments, settings: StepSettings) -> Step:
    """Make a step of copies of ``model`` and ``inputs``.  Raises :class:`StepError` if the model cannot be copied."""
    model_copy = place(detached_copy(model), settings)
    input_copies = map_leaves(
        lambda leaf: leaf.detach().to(settings.device, copy=True) if isinstance(leaf, Tensor) else leaf, inputs
    )
    args, kwargs = ((), dict(input_copies)) if isinstance(input_copies, Mapping) else (input_copies, {})
    return Step(model=model_copy, args=args, kwargs=kwargs, settings=settings)


def _save_for_subprocess(model: nn.Module, path: Path) -> tuple[str, list[str]]:
    """Save the model; return why a subprocess cannot load it, or the names of the classes and functions to import.

    A subprocess can load it if it can import every name that the file refers to.
    """
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # PyTorch leaves them out of the names
    try:
        for module in model.modules():
            for name in vars(module) if unwrap(module) is module else ():  # torch.compile's has a forward of its own
                if callable(vars(module)[name]) and callable(inspect.getattr_static(type(module), name, None)):
                    return f"{type(module).__qualname__}.{name} is replaced in an object", []
        torch.save(model, path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as err:  # the user's classes may do anything
        return f"the model cannot be pickled ({first_line(err)})", []
    finally:
        torch.serialization.add_safe_globals(allowed)
    for name in names:
        if obstacle := unreachable(name):
            return f"a subprocess cannot import {name} ({obstacle})", []
    return "", names


def carried_note(carried: Plan, found: Plan) -> list[str]:
    """Return a note on whether the plan ``found`` replaces the one that the model ``carried``, if there was one."""
    if carried.is_empty:
        return []
    if found.is_empty:
        return ["The model keeps the plan that it carries. memopt_cli.remove_plan(model) removes it."]
    return ["The model carried a plan already; it was taken off first."]


def find_and_verify(
    request: OptimizeRequest, prepared: Prepared, search: Callable[[OptimizeRequest, Prepared], Findings] = find_plan
) -> Findings:
    """Return the findings of ``search``, by default :func:`~memopt_cli.pipeline.plans.optimization.find_plan`.

    Raises :class:`VerificationError` for a plan whose results differ from the original's.
    """
    findings = search(request, prepared)
    if findings.verification is not None and not findings.verification.passed:
        raise difference_error(findings.decisive or dropped_unmeasured(findings.plan, findings.verification))
    return findings


def dropped_unmeasured(plan: Plan, failed: Verification) -> Dropped:
    """Return a record of ``plan`` as dropped, without a measured peak, since it ``failed`` verification."""
    return Dropped(plan=plan, peak_bytes=None, original_bytes=None, why=Differs(verification=failed))


def difference_error(dropped: Dropped) -> VerificationError:
    """Return the error to raise where the results of the plan in ``dropped`` differ from the original's."""
    return VerificationError(
        f"the optimized model differs from the original: found {dropped.in_words}, but {dropped.why.because}",
        hint=f"The model is as it was. {dropped.why.remedy}",
    )
