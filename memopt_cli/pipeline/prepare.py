"""The first stage of every command that runs a step: find the device, the model and its inputs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from memopt_cli.errors import MemoptError, UnsafeFileError, UsageError
from memopt_cli.files.memopt_files import read_header, read_plan
from memopt_cli.files.outputs import output_paths
from memopt_cli.files.trusted import recall_trust, remember_trust
from memopt_cli.inputs.batch_axis import BATCH, with_batch
from memopt_cli.inputs.spec_text import format_tensor, is_factory
from memopt_cli.measure import processes
from memopt_cli.measure.confinement import is_confined
from memopt_cli.measure.devices import resolve_device
from memopt_cli.measure.folder import Folder
from memopt_cli.measure.jobs import ORIGINAL, Answer, CompareJob, Data, DescribeJob, Job, SaveJob, Subject
from memopt_cli.measure.runner import Session, import_path
from memopt_cli.pipeline.failures import raise_failure, require_answer
from memopt_cli.pipeline.terms import SETTING_FLAGS, missing_settings
from memopt_cli.records import (
    REMEMBERED,
    STEP,
    TYPED,
    DeviceProfile,
    DimRange,
    Failure,
    FileHeader,
    InputSpec,
    Measurement,
    ModelFacts,
    ModelSource,
    Plan,
    RankLayout,
    StepFailed,
    StepRequest,
    StepSettings,
    Trust,
)
from memopt_cli.records.progress import Ask, Progress

TAKEN_OFF_NOTE = "The file carries a plan already; it was removed first."
NAME_BUILDER_HINT = "Name what builds the model: package.module:callable, or file.py:function."
LEFT_OUT_NOTE = "The model carries a plan already; it is left out here."
"""Note on an answer that changes no model and leaves the model's present plan aside."""
_COMPILER_BACKENDS: Final = ("inductor",)
"""Backends of ``torch.compile`` that run their own compiler, for the CPU as for a GPU."""
_MAX_LIBRARIES: Final = 50
"""Maximum number of libraries that a subprocess may ask to import: a hostile model could name very many."""
_READERS: Final = {"torchscript": "torch.jit.load", "exported": "torch.export.load", "pretrained": "from_pretrained"}
"""Format of a model's file -> the function that scripts read it with, where that cannot read pickled modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model whose step can be run here, and in profiling subprocesses that load it by its :attr:`subject`."""

    subject: Subject
    facts: ModelFacts
    notes: tuple[str, ...]
    """Notes for the user on how the model was loaded and which inputs its step gets."""
    open_session: Callable[[Subject, float], Session] | None = None
    """A function that opens a session in this process, for a model in memory; by default sessions are subprocesses."""
    carried: Plan = ORIGINAL
    """Plan that the model carries.  The model runs without it here."""
    timeout_s: float = 600.0
    """Time limit in seconds of each answer of a session."""
    progress: Progress = field(default_factory=Progress)
    """Display of the stages that the model goes through."""
    own_checkpoints: Measurement | None = None
    """Step with the model's own checkpoints, which are off here; ``None`` if it has none or was not run with them."""
    messages: dict[str, None] = field(default_factory=dict)
    """Sentences for the user from the sessions' answers, without repeats, such as which output is taken as the loss."""

    def with_progress(self, progress: Progress, timeout_s: float) -> PreparedModel:
        """Return the model with ``progress``, which shows its notes now, and with ``timeout_s`` as its time limit."""
        for note in self.notes:
            progress.note(note)
        return replace(self, progress=progress, timeout_s=timeout_s)

    def without_carried(self, note: str) -> PreparedModel:
        """Return the model with no carried plan, and show ``note`` to the user if it carries one."""
        if self.carried == ORIGINAL:
            return self
        self.progress.note(note)
        return replace(self, carried=ORIGINAL, notes=(note, *self.notes))

    @property
    def batch(self) -> int:
        """Batch size of the inputs, in samples."""
        assert self.facts.batch is not None, "a prepared model has inputs"
        return self.facts.batch

    @property
    def dry_data(self) -> Data:
        """Data for sessions that run no step at full size: a few samples, or none for a model without parameters."""
        return "none" if self.subject.data == "none" else "small batch"

    def session(self, data: Data = "full size") -> Session:
        """Open a fresh profiling subprocess; ``data`` bounds the steps that it may run."""
        session = (self.open_session or Session)(replace(self.subject, data=data), self.timeout_s)
        session.report = self.messages.setdefault
        return session

    def ask(self, job: Job[Answer], data: Data = "full size") -> Answer | Failure:
        """Return the answer to ``job`` from a profiling subprocess that is opened for it alone."""
        with self.session(data) as session:
            return session.ask(job)

    def at(self, batch: int) -> PreparedModel:
        """Return the model with inputs of batch size ``batch``.

        Raises :class:`UsageError` where the batch of the inputs is fixed.
        """
        spec = with_batch(self.subject.spec, batch) if batch != self.batch else self.subject.spec
        return self._with_spec(spec, batch)

    def with_compiler_cache(self, folders: contextlib.ExitStack) -> PreparedModel:
        """Return the model whose subprocesses share an empty folder for the compiler's caches, until ``folders`` ends.

        An empty cache makes compiled code and compile times independent of earlier compilations.
        """
        folder = Folder()
        folders.callback(folder.remove)
        return replace(self, subject=replace(self.subject, compiler_cache=folder.path))

    def with_size(self, symbol: str, size: int) -> PreparedModel:
        """Return the model with inputs of ``size`` in dimension ``symbol``, a dimension other than the batch."""
        spec = replace(self.subject.spec, dims={**self.subject.spec.dims, symbol: size})
        return self._with_spec(spec, self.batch)

    def _with_spec(self, spec: InputSpec, batch: int) -> PreparedModel:
        """Return the model with the inputs of ``spec``; a measurement at other sizes is left behind."""
        subject, facts = replace(self.subject, spec=spec), replace(self.facts, spec=spec, batch=batch)
        own = self.own_checkpoints if spec == self.subject.spec else None
        return replace(self, subject=subject, facts=facts, own_checkpoints=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest(StepRequest):
    """A request to load a model: where it is, its step, and the checks to make while it is loaded."""

    settings: StepSettings
    plan: Plan = ORIGINAL
    """A plan that must fit the model; the original's plan fits every model."""
    replicas: bool = False
    """Whether copies of the model are to be trained together (``--replicas``)."""
    dim_range: DimRange | None = None
    """Range of sizes of a symbol in the shapes of the inputs; ``None`` if each has one size."""
    data: Data = "full size"


def load_request_for(
    request: StepRequest,
    settings: StepSettings,
    *,
    card: DeviceProfile | None = None,
    layout: RankLayout | None = None,
    fake: bool = False,
    backend: str | None = None,
) -> LoadRequest:
    """Return how to load the model of ``request``: on which data and device, for a step here or elsewhere.

    For a ``card``, and for one rank of a ``layout``, the step is recorded on the CPU.  For a card, and if ``fake``,
    only a few samples run.  For a layout, and for a fake step of a model that code builds, nothing runs on data, and
    parameters are never allocated.

    Raises :class:`UsageError` for a GPU with a card or a layout, for ranks of a model that has parameters already,
    and for a ``backend`` that must start a compiler in a sandbox.
    """
    location, device = request.source.location, settings.device
    is_gpu, is_code = device.startswith("cuda"), is_factory(location)
    if card is not None and is_gpu:
        raise UsageError(
            f"`--device {device}` runs the step, but `--for {card.name}` estimates it for a device elsewhere",
            hint="Remove one of them.",
        )
    if layout is not None and not is_code:
        raise UsageError(
            f"{location} has parameters, and one of {layout.ranks} ranks is predicted without any",
            hint=NAME_BUILDER_HINT,
        )
    if layout is not None and is_gpu:
        raise UsageError(
            f"`--device {device}` runs the step, but one of {layout.ranks} ranks is predicted on the CPU",
            hint="Leave `--device` out: tensors have the same bytes there.",
        )
    if backend in _COMPILER_BACKENDS and sys.platform == "linux" and is_confined(request.source):
        raise UsageError(
            f"{backend} starts a compiler, but the model of {location} runs in a sandbox, where no program can start",
            hint="If you trust the model, add `--no-sandbox`, or name a function that builds it: train.py:make_model.",
        )
    is_run = card is None and layout is None
    has_no_data = layout is not None or (fake and is_code)
    data: Data = "full size" if is_run and not fake else "small batch"
    return LoadRequest(
        source=request.source,
        spec=request.spec,
        settings=settings if is_run else replace(settings, device="cpu"),
        timeout_s=request.timeout_s,
        data="none" if has_no_data else data,
    )


def inputs_of_file(spec: InputSpec, source: str) -> InputSpec | None:
    """Return the part of ``spec``, read from a plan, that is data: shapes and sizes; ``None`` if it has none.

    Only the command line may name code or input files: a plan may have been downloaded with its model.
    """
    return InputSpec(tensors=spec.tensors, dims=spec.dims, source=source) if spec.tensors else None


def remembered_inputs(location: str) -> InputSpec | None:
    """Return the inputs that were typed last for the model at ``location``; ``None`` if no file next to it has any.

    The plan, the summary and the frontier that ``memopt optimize`` wrote hold them.  These files may have come with the
    model, so only inputs that name no code and no other file are taken.  Files that cannot be read, or are about
    a different model, are skipped without an error, since the user has not named them.
    """
    paths, model_path = output_paths(location, None), Path(location)
    name = model_path.absolute().name
    names = {name, name.replace(".memopt.", ".")}  # an optimized model has the inputs of its original
    headers: list[tuple[float, FileHeader, Path]] = []
    # The files next to an optimized model lie under its own name, and are about its original, whatever that is called.
    own_files = tuple(model_path.parent / f"{model_path.stem}.{end}" for end in ("plan.yaml", "summary.json"))
    for path in (paths.plan, paths.summary, paths.frontier, *own_files):
        with contextlib.suppress(OSError, ValueError, MemoptError):
            written = path.stat().st_mtime
            header = read_plan(path)[0] if path.suffix == ".yaml" else read_header(path)
            headers.append((written, header, path))
    for _, header, path in sorted(headers, key=lambda entry: -entry[0]):
        is_about = (path in own_files and model_path.is_file()) or Path(header.model).absolute().name in names
        if is_about and (inputs := typed_inputs(header, path)):
            return inputs
    return None


def typed_inputs(header: FileHeader, path: Path) -> InputSpec | None:
    """Return the inputs in the ``header`` of the file at ``path``, as data; ``None`` if nobody typed them."""
    is_typed = header.spec.source == TYPED or header.spec.is_remembered
    return inputs_of_file(header.spec, f"{REMEMBERED}{path}") if is_typed else None


def prepare(load_request: LoadRequest, *, progress: Progress, ask: Ask | None) -> PreparedModel:
    """Load a model in a subprocess, without the plan that it may carry; find its inputs and device.

    Names that the user allows when ``ask`` asks are allowed in later subprocesses too.
    Raises :class:`MemoptError` if the model cannot be loaded or its inputs are not known.
    """
    return prepare_with_plan(load_request, progress=progress, ask=ask).without_carried(TAKEN_OFF_NOTE)


def prepare_with_plan(load_request: LoadRequest, *, progress: Progress, ask: Ask | None) -> PreparedModel:
    """Load a model as :func:`prepare` does, and keep the plan that its file carries."""
    prepared = prepare_without_libraries(load_request, progress=progress, ask=ask)
    import_libraries(prepared, prepared.facts.libraries)
    return prepared


def prepare_without_libraries(load_request: LoadRequest, *, progress: Progress, ask: Ask | None) -> PreparedModel:
    """Load a model as :func:`prepare_with_plan` does, and import no libraries for all subprocesses.

    For a model that runs next to another one: libraries in the two folders may have the same names.
    """
    progress.stage("loading")
    settings = replace(load_request.settings, device=resolve_device(load_request.settings.device))
    has_inputs = load_request.spec is not None and load_request.spec.has_inputs
    remembered = None if has_inputs else remembered_inputs(load_request.source.location)
    job = DescribeJob(
        spec=load_request.spec, remembered=remembered, plan=load_request.plan, replicas=load_request.replicas
    )
    source, facts = open_model(load_request.source, job, load_request.timeout_s, ask=ask, data=load_request.data)
    assert facts.spec is not None
    if facts.format == STEP:
        _refuse_settings(settings, source.location)
    notes = (*facts.notes, inputs_note(facts.spec, load_request.dim_range))
    subject = Subject(source=source, spec=facts.spec, settings=settings, data=load_request.data)
    prepared = PreparedModel(subject=subject, facts=facts, notes=notes, carried=facts.carried)
    return prepared.with_progress(progress, load_request.timeout_s)


def import_libraries(prepared: PreparedModel, names: Sequence[str]) -> None:
    """Import the libraries ``names``, which all later subprocesses need, once for all of them."""
    source = prepared.subject.source
    if not source.trust.pickle:  # a pickle's import path may have the current folder
        processes.import_libraries(names[:_MAX_LIBRARIES], import_path(source), prepared.timeout_s)


def _refuse_settings(settings: StepSettings, location: str) -> None:
    """Raise :class:`UsageError` for options that the user's own step, at ``location``, decides itself."""
    harmless = {"seed"} if settings.has_optimizer else {"seed", "optimizer"}
    for name in missing_settings(StepSettings(), settings):
        if name not in harmless:
            also = ", or `--global-batch`," if name == "micro_batches" else ""
            raise UsageError(
                f"`{SETTING_FLAGS[name]}`{also} sets how a step is run, but {location} makes its own step",
                hint=f"Remove `{SETTING_FLAGS[name]}`, or set this in the step itself.",
            )


def open_model(
    source: ModelSource, job: DescribeJob, timeout_s: float, *, ask: Ask | None, data: Data = "full size"
) -> tuple[ModelSource, ModelFacts]:
    """Load the model of ``source`` in a subprocess; return the source with its file hashes, and the model's facts.

    The source also gains the names that the user allowed when asked.  Loading from it later finds the same files, or
    raises :class:`ChangedFileError`.
    """
    with Session(Subject(source=source, data=data), timeout_s) as session:
        answer = session.ask(job)
    if isinstance(answer, ModelFacts):
        if source.typed_trust != Trust() and answer.sha256 is not None:
            remember_trust(source.location, answer.sha256, source.typed_trust)
        return replace(source, sha256=answer.sha256, weights_sha256=answer.weights_sha256), answer
    if isinstance(answer, StepFailed) and answer.wanted and ask is not None and ask(answer.wanted):
        names = tuple(wanted.name for wanted in answer.wanted)
        trust = replace(source.trust, globals=(*source.trust.globals, *names))
        return open_model(replace(source, trust=trust), job, timeout_s, ask=None, data=data)
    try:
        raise_failure(answer)
    except UnsafeFileError as err:
        err.trusted_with = (recall_trust(source.location) or Trust()).flags
        raise


def model_writer(source: ModelSource, plan: Plan, timeout_s: float) -> Callable[[BinaryIO], None]:
    """Return a function that writes the model of ``source`` with ``plan`` to an open file.

    A fresh subprocess loads the model, installs the plan and sends the bytes.  A hostile model may have taken that
    subprocess over, so a second one, which loads neither file, compares the written file with the source.
    """

    def save(file: BinaryIO) -> None:
        with Session(Subject(source=source), timeout_s) as session:
            answer = session.save(SaveJob(plan=plan), file)
        saved = require_answer(answer, "" if isinstance(answer, StepFailed) else "the model could not be saved: ")
        if not is_confined(source):
            return
        file.flush()
        with Session(Subject(source=source), timeout_s) as session:
            comparison = session.ask(CompareJob(path=os.path.abspath(file.name)))
        if require_answer(comparison, "no model is written: ").size_bytes != saved.size_bytes:
            raise UnsafeFileError(
                "no model is written: its file changed while memopt looked at it",
                hint="Run it again where no other program writes to the folder of the output.",
            )

    return save


def switches_off(prepared: PreparedModel) -> tuple[str, ...]:
    """Return the names of the attributes that turn the model's own checkpointing off; empty if that is on."""
    is_off = not prepared.subject.source.own_checkpoints
    names = (switch.rpartition(".")[2] for switch in prepared.facts.checkpoint_switches)
    return tuple(dict.fromkeys(names)) if is_off else ()


def reader_notes(model_format: str, path: Path) -> tuple[str, ...]:
    """Return a note if the usual reader of ``model_format`` cannot read the optimized model at ``path``."""
    reader = _READERS.get(model_format)
    if reader is None:
        return ()
    return (f"{path.name} is a pickled module, which {reader} does not read: memopt_cli.load({str(path)!r}) does.",)


def file_header(prepared: PreparedModel) -> FileHeader:
    """Return the header of a file that is written now about ``prepared``."""
    return header_of(prepared.subject, prepared.facts.sha256)


def header_of(subject: Subject, sha256: str | None) -> FileHeader:
    """Return the header of a file about ``subject``; ``sha256``: of the model's file, if it has one."""
    settings = subject.settings
    return FileHeader.make(
        subject.source.location, subject.spec, sha256=sha256, seed=settings.seed, device=settings.device
    )


def inputs_note(spec: InputSpec, dim_range: DimRange | None = None) -> str:
    """Describe the inputs in ``spec`` and their source, so that the user sees where memopt has guessed.

    ``dim_range``: sizes of one of the symbols, which are shown in place of the one size in ``spec``.
    """
    dims: dict[str, int | str] = {**spec.dims}
    if dim_range is not None:
        dims[dim_range.symbol] = f"{dim_range.low}:{dim_range.high}"
    inputs = ", ".join(map(format_tensor, spec.tensors)) or spec.data_file or spec.script
    sizes = "".join(f", {symbol}={size}" for symbol, size in dims.items())
    batch = "; dimension 0 is taken as the batch" if spec.tensors and BATCH not in spec.dims else ""
    return f"Inputs: {inputs}{sizes} ({spec.source}){batch}."
