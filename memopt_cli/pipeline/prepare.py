"""What every command that runs a step does first: find the device, the model and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from torch import nn

from memopt_cli.apply import plan_of, remove_plan
from memopt_cli.errors import StepError, UsageError
from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import BATCH, find_spec
from memopt_cli.measure.jobs import ORIGINAL, Data, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.model_batching.module import refuse_batched
from memopt_cli.progress import Ask, Progress, WantedGlobal
from memopt_cli.records import SCHEMA_VERSION, FileHeader, InputSpec, LoadedModel, ModelSource, Plan, StepSettings
from memopt_cli.runtime import uninitialized
from memopt_cli.spec_text import format_tensor


def resolve_device(text: str) -> str:
    """``auto``, ``cpu`` or ``cuda[:N]`` -> a device that exists.  Raises :class:`UsageError`."""
    if text == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if text == "cpu":
        return text
    index = int(text.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {text}: PyTorch sees {torch.cuda.device_count()} CUDA devices",
            hint="Use --device cpu, or check the driver and the PyTorch build.",
        )
    return f"cuda:{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model whose step can be run: here and, by its subject, in profiling subprocesses."""

    subject: Subject
    loaded: LoadedModel
    notes: tuple[str, ...]
    """What the user should know of how it was loaded and what it is fed."""
    open_session: Callable[[Subject, float], Session] | None = None
    """Opens a session that is no subprocess."""
    carried: Plan = ORIGINAL
    """The plan that the file carries; it is taken off the loaded model."""

    def session(self, timeout_s: float, data: Data = "full size") -> Session:
        """A fresh profiling subprocess; ``timeout_s`` bounds each of its answers, ``data`` what it may run."""
        return (self.open_session or Session)(replace(self.subject, data=data), timeout_s)


def prepare(
    source: ModelSource, spec: InputSpec | None, settings: StepSettings, *, progress: Progress, ask: Ask | None
) -> Prepared:
    """Load the model without the plan that it may carry, find its inputs and its device.

    What the user vouches for when asked goes to the subprocesses too.  Raises :class:`MemoptError`.
    """
    prepared = prepare_with_plan(source, spec, settings, progress=progress, ask=ask)
    if prepared.carried == ORIGINAL:
        return prepared
    note = "The file carries a plan already; it was taken off first."
    progress.note(note)
    return replace(prepared, carried=ORIGINAL, notes=(note, *prepared.notes))


def prepare_with_plan(
    source: ModelSource, spec: InputSpec | None, settings: StepSettings, *, progress: Progress, ask: Ask | None
) -> Prepared:
    """The same for a command that runs the step as the file says, under the plan that it carries."""
    progress.stage("loading")
    settings = replace(settings, device=resolve_device(settings.device))
    loaded = _load(source, ask)
    refuse_batched(loaded.module)
    _refuse_lazy(loaded.module)
    notes = list(loaded.notes)
    carried = plan_of(loaded.module)
    remove_plan(loaded.module)
    spec = find_spec(loaded.source, loaded.module, spec, loaded.example_spec)
    notes.append(_inputs_note(spec))
    for note in notes:
        progress.note(note)
    return Prepared(
        subject=Subject(source=loaded.source, spec=spec, settings=settings),
        loaded=loaded,
        notes=tuple(notes),
        carried=carried,
    )


def file_header(prepared: Prepared) -> FileHeader:
    """Where a file that is written now comes from."""
    subject = prepared.subject
    return FileHeader(
        schema_version=SCHEMA_VERSION,
        memopt=version("memopt"),
        torch=str(torch.__version__),
        model=subject.source.location,
        sha256=prepared.loaded.sha256,
        spec=subject.spec,
        seed=subject.settings.seed,
        device=subject.settings.device,
    )


def _load(source: ModelSource, ask: Ask | None) -> LoadedModel:
    vouched: list[str] = []

    def ask_and_remember(wanted: Sequence[WantedGlobal]) -> bool:
        allowed = ask is not None and ask(wanted)
        vouched.extend(item.name for item in wanted if allowed)
        return allowed

    loaded = load_model(source, ask_and_remember if ask else None)
    trust = replace(loaded.source.trust, globals=(*loaded.source.trust.globals, *vouched))
    return replace(loaded, source=replace(loaded.source, trust=trust))


def _refuse_lazy(module: nn.Module) -> None:
    if name := uninitialized(module):
        raise StepError(
            f"{name} has no value yet: a lazy module takes its shape from the first input",
            hint="Run the model on an input once, then save it; or let the callable that builds it do so.",
        )


def _inputs_note(spec: InputSpec) -> str:
    """What the step is fed and who said so, a guess above all."""
    inputs = ", ".join(map(format_tensor, spec.tensors)) or spec.data_file or spec.script
    sizes = "".join(f", {symbol}={size}" for symbol, size in spec.dims.items())
    batch = "; dimension 0 is taken as the batch" if spec.tensors and BATCH not in spec.dims else ""
    return f"Inputs: {inputs}{sizes} ({spec.source}){batch}."
