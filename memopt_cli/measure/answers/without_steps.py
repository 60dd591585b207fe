"""Answers to the jobs that run no step: describe a model, inspect a file, save a model with a plan."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memopt_cli.errors import StepError, UsageError, first_line
from memopt_cli.inputs.spec_text import is_pretrained
from memopt_cli.loading import description, load_model, read_file
from memopt_cli.loading.input_spec import batch_of, find_spec
from memopt_cli.loading.memory_snapshot import read_snapshot
from memopt_cli.loading.pickles.kinds.modules import imported_libraries
from memopt_cli.loading.pretrained import files_of_weights
from memopt_cli.loading.returned import check_returned
from memopt_cli.loading.user_code import imported_files
from memopt_cli.loading.user_function import TAKEN
from memopt_cli.measure.jobs import (
    ORIGINAL,
    CompareAnswer,
    CompareJob,
    DescribeJob,
    InspectJob,
    SaveJob,
    SnapshotJob,
    Subject,
)
from memopt_cli.measure.sandbox import CACHES
from memopt_cli.model_batching import BatchModule
from memopt_cli.model_batching.module import refuse_batched
from memopt_cli.model_batching.stacked import refuse_unsupported
from memopt_cli.records import Inspection, LoadedModel, ModelFacts, Plan, SnapshotFacts
from memopt_cli.runtime import named_parts, reset_hidden_state, uninitialized
from memopt_cli.runtime.private_torch import is_fake
from memopt_cli.text.documents import quoted_path
from memopt_cli.trace import built_without_data, compressor_paths, fake_mode
from memopt_cli.trace.storages import unique_bytes
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan
from memopt_cli.training.own_checkpoints import find_switches
from memopt_cli.training.user_step import StepModels


def describe_model(subject: Subject, job: DescribeJob) -> ModelFacts:
    """Load the model of ``subject``, and return its facts."""
    environment, path = _environment(), list(sys.path)
    with built_without_data(fake_mode()) if subject.data == "none" else contextlib.nullcontext():
        facts = facts_of(load_model(subject.source), job)
    facts = replace(facts, modules=imported_files())
    if environment != _environment():
        return facts  # the model's code changed how a library is imported
    names = imported_libraries(sys.modules)
    return replace(facts, libraries=tuple(name for name in names if _is_on(path, name.partition(".")[0])))


def _is_on(path: list[str], package: str) -> bool:
    """Return whether the imported ``package`` is the one that Python finds on ``path``, and not one of the user's."""
    spec = PathFinder.find_spec(package, path)
    return spec is not None and spec.origin == getattr(sys.modules.get(package), "__file__", None)


def _environment() -> dict[str, str]:
    """Return the environment without the folders of caches, which PyTorch's compiler sets when it is imported."""
    return {name: value for name, value in os.environ.items() if name not in CACHES}


def inspect(subject: Subject, job: InspectJob) -> Inspection:
    """Describe the file at the path of ``job``, or the weights in a folder of ``save_pretrained``.

    Raises :class:`UsageError` if the weights of the folder are split into several files.
    """
    if not is_pretrained(job.path):
        return description.describe_file(read_file(job.path))
    folder = Path(job.path)
    first, *others = files_of_weights(folder)
    if others:
        raise UsageError(
            f"{job.path} splits its weights over {1 + len(others)} files; inspect reads one at a time",
            hint=f"Name one of them: `memopt inspect {quoted_path(str(folder / first))}`.",
        )
    inspection = description.describe_file(read_file(str(folder / first)))
    note = f"The weights of {job.path}; its settings are in the same folder."
    return replace(inspection, notes=(*inspection.notes, note))


def snapshot(subject: Subject, job: SnapshotJob) -> SnapshotFacts:
    """Return who held memory in the snapshot at the path of ``job``."""
    return read_snapshot(job.path)


def facts_of(loaded: LoadedModel, job: DescribeJob) -> ModelFacts:
    """Return the facts of a model for a command, and remove the plan that the model carries.

    Raises :class:`StepError` and :class:`UsageError` for a model whose step cannot be recorded, and as
    :func:`find_spec`, :func:`apply_plan` and :func:`refuse_unsupported` do.
    """
    model = loaded.module
    _refuse_names(model)
    if job.inputs:
        refuse_batched(model)
        _refuse_lazy(model)
        _refuse_without_memory(model)
    carried = plan_of(model)
    remove_plan(model)
    spec = None
    if job.inputs:
        spec = find_spec(loaded.source, model, job.spec, loaded.example_spec, job.remembered)
    if job.replicas:
        refuse_unsupported(model)
    if job.plan != ORIGINAL:
        remove_plan(apply_plan(model, job.plan.of_model))
    return ModelFacts(
        format=loaded.format,
        class_name=type(model).__name__,
        sha256=loaded.sha256,
        weights_sha256=loaded.weights_sha256,
        notes=loaded.notes,
        spec=spec,
        batch=None if spec is None else batch_of(spec),
        carried=carried,
        asked_compressors=compressor_paths(model),
        # A program of ``torch.export`` in whose example inputs no size may vary.
        fixed_sizes=loaded.format == "exported" and loaded.example_spec is not None and not loaded.example_spec.dims,
        indices=dict(_indices_in(model)),
        # TorchScript and exported programs keep the original class name.
        batch_norms=any("BatchNorm" in getattr(m, "original_name", type(m).__name__) for m in model.modules()),
        trainable_bytes=unique_bytes(p for p in model.parameters() if p.requires_grad and not is_lazy(p)),
        held_bytes=unique_bytes(t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)),
        checkpoint_switches=find_switches(model),
        sync_norms=tuple(path for path, module in named_parts(model) if isinstance(module, nn.SyncBatchNorm)),
    )


def _indices_in(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the largest value of each integer tensor that ``model`` holds: it may index an input."""
    for path, module in model.named_modules():
        for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
            has_integers = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim()
            if has_integers and value.numel() and not value.is_meta:
                yield f"{path}.{name}".removeprefix("."), int(value.max())


def save(subject: Subject, job: SaveJob, file: BinaryIO) -> None:
    """Load the model again, and write it into ``file`` with the plan of ``job``."""
    model = load_model(subject.source).module
    if isinstance(model, StepModels):
        raise StepError(
            "your own step is not a model that can be saved",
            hint="In the training script: memopt_cli.apply_plan(step, PLAN).",
        )
    write_model(model, job.plan, file)


def compare_saved(subject: Subject, job: CompareJob) -> CompareAnswer:
    """Check that the saved model at the path of ``job`` could do nothing that the original could not."""
    return CompareAnswer(size_bytes=check_returned(job.path, subject.source))


def write_model(model: nn.Module, plan: Plan, file: BinaryIO) -> None:
    """Write ``model`` with ``plan`` into ``file``.  Raises :class:`StepError` if it cannot be pickled.

    The part of the plan for the optimizer is left out: the training script makes the optimizer, not the model file.
    """
    remove_plan(model)
    # A plan names modules by their paths, which are equal in all models of a :class:`BatchModule`.
    apply_plan(model.models if isinstance(model, BatchModule) else model, plan.of_model)
    reset_hidden_state(model)
    try:
        torch.save(model, file, pickle_module=SimpleNamespace(**{**vars(pickle), "Pickler": _Pickler}))
    except (pickle.PicklingError, AttributeError, TypeError) as err:  # what pickle raises for an object that it refuses
        raise StepError(f"the model could not be saved: {first_line(err)}", hint=_WITHOUT_FILE) from err


_WITHOUT_FILE = "With `--plan-only`, no model is written. In the training script: memopt_cli.apply_plan(model, PLAN)."


class _Pickler(pickle.Pickler):
    """Pickler that refuses classes and functions of this process only: no other process could find them."""

    def reducer_override(self, value: Any) -> Any:
        """Raise :class:`StepError` for a ``value`` of a module whose name another module has; else pickle as usual."""
        module = getattr(value, "__module__", None) if isinstance(value, type | FunctionType) else None
        if module is not None and module.startswith(TAKEN):
            file = f"{module.removeprefix(TAKEN)}.py"
            raise StepError(
                f"the model cannot be saved: {file} has the name of another module, so Python could not find "
                f"{value.__qualname__} on loading",
                hint=f"Rename {file}. {_WITHOUT_FILE}",
            )
        return NotImplemented


def _refuse_names(model: nn.Module) -> None:
    """Refuse names that cannot be printed: they go to terminals, logs and plans."""
    paths = (path for path, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()))
    unprintable = next((path for path in paths if not path.isprintable()), None)
    if unprintable is not None:
        raise StepError(f"a part of the model is named {unprintable!r}", hint="Use a name that can be printed.")


def _refuse_lazy(module: nn.Module) -> None:
    if name := uninitialized(module):
        raise StepError(
            f"{name} has no value yet: a lazy module takes its shape from the first input",
            hint="Run the model on an input once, then save it; or let the callable that builds it run it.",
        )


def _refuse_without_memory(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and not is_fake(tensor):
            raise StepError(
                f"{name} is on the meta device, so it has a shape but no values",
                hint="Load the weights before the model is saved; or let a callable build it, and predict with "
                "`--fake`.",
            )
        if isinstance(tensor, nn.Parameter) and tensor.layout is not torch.strided:
            raise StepError(
                f"{name} is a parameter of the layout {tensor.layout}; memopt cannot record a step of such a model",
                hint="Make it dense (to_dense); sparse buffers are fine.",
            )
