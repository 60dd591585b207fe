"""``memopt explain``: where memory runs out, who holds what then, and changes that were run and fit."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.measure.answers import without_data
from memopt_cli.measure.jobs import ORIGINAL, MeasureJob, RecordJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline import explain
from memopt_cli.pipeline.memory.step_peaks import live_bytes
from memopt_cli.pipeline.out_of_memory import change_trials, explanation
from memopt_cli.pipeline.out_of_memory.change_trials import ChangeTrials, plan_in_words
from memopt_cli.pipeline.out_of_memory.oom_text import read_oom
from memopt_cli.records import (
    ExplainRequest,
    Explanation,
    InputSpec,
    Instant,
    LevelRow,
    ModelSource,
    OptimizeRequest,
    Plan,
    SearchGoal,
    SegmentPlan,
    StepSettings,
    StepTrace,
    Suggestion,
    TensorSpec,
    Trust,
    break_down,
)
from memopt_cli.records.progress import Progress
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport
from memopt_cli.text.units import exact_bytes
from tests.conftest import Done
from tests.zoo.models import Parts
from tests.zoo.records import a_header, measured

pytestmark = pytest.mark.usefixtures("in_process")

BATCH, LESS = 256, 512 << 10
FLAGS = ("--code-path .", f"--dim B={BATCH}")
_found: dict[object, Explanation] = {}
SPEC = InputSpec(tensors=(TensorSpec(shape=("B", 64)),), dims={"B": BATCH}, source="here")


class Block(Parts, wide=lambda: nn.Linear(64, 256), narrow=lambda: nn.Linear(256, 64)):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x))
        return x + self.narrow(hidden)


class Net(Parts, blocks=lambda: nn.Sequential(*(Block() for _ in range(4)))):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("explained") / "net.pt"
    torch.manual_seed(0)
    torch.save(Net(), path)
    return ModelSource(location=str(path), trust=Trust(pickle=True))


@pytest.fixture(scope="module")
def recorded(source: ModelSource) -> StepTrace:
    with LocalSession(Subject(source=source, spec=SPEC), 60.0) as session:
        found = session.ask(RecordJob(plan=ORIGINAL))
    assert isinstance(found, StepTrace)
    return found


@pytest.fixture
def explained(source: ModelSource) -> Callable[..., Explanation]:
    def run(memory: int | None, **options: Any) -> Explanation:
        request = ExplainRequest(
            source=source, spec=SPEC, settings=StepSettings(), memory=memory, flags=FLAGS, **options
        )
        key = (memory, *options.items())
        if key not in _found:
            _found[key] = explain(request, progress=Progress())
        return _found[key]

    return run


def needed_bytes(recorded: StepTrace) -> int:
    return recorded.allocated_peak_bytes


@pytest.mark.slow
def test_the_instant_is_that_of_the_step_that_is_run(
    recorded: StepTrace, explained: Callable[..., Explanation]
) -> None:
    limit = needed_bytes(recorded) - LESS
    found = explained(limit)
    live = live_bytes(recorded)
    first = next(i for i, op in enumerate(recorded.ops) if live[i + 1] + op.workspace_bytes > limit)
    assert (found.instant.module, found.instant.phase) == (recorded.ops[first].module, recorded.ops[first].phase)
    assert found.instant.allocated_bytes > limit
    assert found.breakdown is not None
    assert found.breakdown.parameters_bytes == sum(p.nbytes for p in Net().parameters())


def test_who_holds_what_by_module_and_by_line(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    found = explained(needed_bytes(recorded) - LESS)
    assert {"blocks.0", "blocks.1"} <= {holder.name for holder in found.modules}
    lines = {Path(holder.name).name for holder in found.lines}
    first = Block.forward.__code__.co_firstlineno
    assert f"{Path(__file__).name}:{first + 1}" in lines
    sizes = [holder.nbytes for holder in found.lines]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_suggested_fits_when_it_is_run_again(
    source: ModelSource, recorded: StepTrace, explained: Callable[..., Explanation]
) -> None:
    limit = needed_bytes(recorded) - LESS
    found = explained(limit)
    assert {"plan", "micro-batches"} <= {said.change for said in found.suggestions}
    exact = [said.seconds for said in found.suggestions if said.change != "autocast"]
    assert exact == sorted(exact)
    assert found.suggestions[0].change != "autocast"
    for said in found.suggestions:
        assert said.peak_bytes <= limit
        if said.change in ("plan", "offload"):
            with LocalSession(Subject(source=source, spec=SPEC), 60.0) as session:
                again = session.ask(MeasureJob(plan=said.plan))
            assert again.measurement.allocated_peak_bytes <= limit


@pytest.mark.slow
def test_what_cannot_fit_is_told_at_once(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    found = explained(recorded.resident_bytes // 2)
    assert found.instant.op == -1
    text = io.StringIO()
    TextReport().show(found, text)
    assert "memory runs out before the first operator runs" in text.getvalue()
    assert not found.suggestions
    assert found.refused[0].startswith(
        "memopt cannot make it fit: parameters, gradients, optimizer state and buffers take "
    )


@pytest.mark.slow
def test_a_step_that_fits_is_told_so(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    found = explained(2 * needed_bytes(recorded))
    assert (found.instant, found.suggestions, found.refused) == (None, (), ())
    text = io.StringIO()
    TextReport().show(found, text)
    assert text.getvalue().startswith("the step fits: it needs about")


ON_A_GPU = (
    'File "/me/train.py", line 9, in <module>\nCUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total '
    "capacity of 1.00 GiB of which 16.00 MiB is free. Of the allocated memory 512.00 MiB is allocated by PyTorch, and "
    "128.00 MiB is reserved by PyTorch but unallocated"
)
NO_LIMIT = (
    "memory ran out, and the error does not say how much there was: add `--memory 16GiB`, or use the `--log` that "
    "explain_oom wrote"
)
ON_THE_CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12"


def text_of(found: Explanation) -> str:
    text = io.StringIO()
    TextReport().show(found, text)
    return text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "first"),
    [
        (ON_A_GPU, "memory ran out, but this step alone fits: it needs about "),
        (
            ON_THE_CPU,
            f"{NO_LIMIT}. This step needs about ",
        ),
    ],
)
def test_an_error_is_not_denied_where_the_step_alone_would_fit(
    log: str, first: str, tmp_path: Path, explained: Callable[..., Explanation]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(log)
    found = explained(None, log_path=str(path))
    assert found.instant is None
    text = text_of(found)
    assert text.startswith(first)
    assert (
        f"the step was counted at batch {BATCH}, without `--optimizer` and `--loss`: describe the step as it was"
        in text
    )
    assert (", which alone is more than this step needs" in text) is (found.asked_bytes > found.needed_bytes)
    assert bool(found.limit_bytes) is (log == ON_A_GPU)


def test_an_error_alone_says_what_its_message_says(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU)
    text = text_of(explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress()))
    assert text.startswith(
        "in use: 512.0 MiB of 528.0 MiB (bytes held by tensors plus free bytes, according to the error)\n"
    )
    assert "the error asked for 64.0 MiB more\nthe error was raised at /me/train.py:9\n" in text
    assert "PyTorch's allocator held 128.0 MiB that no tensor used, and 16.0 MiB were free." in text
    assert "Name the model as well, with the inputs of a step (memopt explain model.pt `-i " in text
    log.write_text(ON_THE_CPU)
    text = text_of(explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress()))
    assert text.startswith(f"{NO_LIMIT}\n")
    assert "According to the error" not in text


class Lossy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean()


def test_a_loss_that_the_model_computes_is_not_missing(tmp_path: Path) -> None:
    log, model = tmp_path / "train.log", tmp_path / "lossy.pt"
    log.write_text(ON_A_GPU)
    torch.save(Lossy(), model)
    source = ModelSource(location=str(model), trust=Trust(pickle=True))
    found = explain(ExplainRequest(source=source, spec=SPEC, log_path=str(log)), progress=Progress())
    assert found.counted_as.startswith(f"the step was counted at batch {BATCH}, without `--optimizer`: describe")


def test_a_search_that_ends_names_the_command_that_searches_longer(
    monkeypatch: pytest.MonkeyPatch, recorded: StepTrace, explained: Callable[..., Explanation]
) -> None:
    monkeypatch.setattr(change_trials, "_SEARCH_S", 0.0)
    limit = needed_bytes(recorded) - 2 * LESS
    (refused,) = (text for text in explained(limit).refused if text.startswith("A plan: "))
    assert f"--budget {exact_bytes(limit)} --search-time 0 searches longer)." in refused
    assert "memopt optimize " in refused


@pytest.mark.slow
def test_the_limit_comes_from_the_error(tmp_path: Path, explained: Callable[..., Explanation]) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU)
    found = explained(None, log_path=str(log))
    assert found.limit_bytes == 528 * 2**20
    assert (found.asked_bytes, found.raised_at) == (64 * 2**20, "/me/train.py:9")
    assert explained(100 * 2**20, log_path=str(log)).limit_bytes == 100 * 2**20


LIMITS = (
    "memopt: RLIMIT_AS (ulimit -v) {space}, VmPeak 1887436800, before the block 629145600; "
    "memory 25769803776 (the machine's memory), VmHWM 1468006400, before the block 209715200\n"
)
"""Sizes of which the block took 1200 MiB, by both."""


@pytest.mark.parametrize(
    ("space", "free_mib", "said"),
    [
        ("1992294400", 100, "Of the 1.9 GiB of RLIMIT_AS (ulimit -v), the process held 600.0 MiB before"),
        ("unlimited", 23176, "Of the 24.0 GiB of the machine's memory, the process held 200.0 MiB before"),
    ],
)
def test_of_a_process_with_a_limit_the_shares_are_named(
    space: str, free_mib: int, said: str, tmp_path: Path, explained: Callable[..., Explanation]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(ON_THE_CPU + "\n" + LIMITS.format(space=space))
    alone = text_of(explain(ExplainRequest(source=None, log_path=str(path)), progress=Progress()))
    assert said in alone
    assert "MALLOC" not in alone  # what the tensors held is not known
    found = explained(None, log_path=str(path))
    assert found.limit_bytes == int(0.9 * ((1200 + free_mib) << 10)) << 10  # the process grows, too
    assert found.limit.startswith("90% of ")
    text = text_of(found)
    assert text.startswith("memory ran out, but this step alone fits: it needs about ")
    assert "train with MALLOC_MMAP_THRESHOLD_=1048576 in the environment" in text


def test_what_fits_is_told_with_the_variable_that_it_rests_on(
    recorded: StepTrace, tmp_path: Path, explained: Callable[..., Explanation]
) -> None:
    path = tmp_path / "train.log"
    space = 629145600 + needed_bytes(recorded)
    path.write_text(ON_THE_CPU + "\n" + LIMITS.replace("1887436800", str(space)).format(space=space))
    found = explained(None, log_path=str(path))
    assert found.suggestions
    assert all(each.text.endswith(", with MALLOC_MMAP_THRESHOLD_=1048576") for each in found.suggestions)
    assert "train with MALLOC_MMAP_THRESHOLD_=1048576 in the environment" in text_of(found)


def test_an_error_of_loading_data_changes_no_step(tmp_path: Path, explained: Callable[..., Explanation]) -> None:
    path = tmp_path / "train.log"
    path.write_text("RuntimeError: DataLoader worker (pid 4161) is killed by signal: Killed.")
    found = explained(None, log_path=str(path))
    assert found.header is None
    text = text_of(found)
    assert text.startswith("the kernel killed a worker process of the DataLoader, as it does when memory runs out\n")
    assert "What helps: fewer workers (DataLoader(num_workers=1))" in text
    assert "memory ran out, and" not in text


def snapshot(folder: Path) -> str:
    path = folder / "snapshot.pickle"
    frames = [{"filename": "/me/train.py", "line": 4, "name": "f"}]
    block = {"size": 700, "state": "active_allocated", "frames": frames}
    trace = [{"action": "oom", "size": 64, "device_free": 10, "frames": []}]
    path.write_bytes(pickle.dumps({"segments": [{"total_size": 800, "blocks": [block]}], "device_traces": [trace]}))
    return str(path)


def test_a_snapshot_alone_says_who_held_what(tmp_path: Path) -> None:
    found = explain(ExplainRequest(source=None, snapshot_path=snapshot(tmp_path)), progress=Progress())
    assert (found.limit_bytes, found.asked_bytes) == (810, 64)
    text = io.StringIO()
    TextReport().show(found, text)
    assert "/me/train.py:4  700 B" in text.getvalue()


@pytest.mark.slow
def test_a_snapshot_beside_a_model(tmp_path: Path, explained: Callable[..., Explanation]) -> None:
    found = explained(None, snapshot_path=snapshot(tmp_path))
    assert found.limit_bytes == 710
    assert [holder.name for holder in found.lines] == ["/me/train.py:4"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is no model"),
        ({"log_path": "none.log"}, "cannot be read"),
        ({"log_path": __file__.replace("test_explanation", "__init__")}, "cannot be read"),
    ],
)
def test_what_cannot_be_explained_is_said(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        explain(ExplainRequest(source=None, **options), progress=Progress())


@pytest.mark.slow
def test_a_step_that_does_not_fit_here_is_not_run(
    recorded: StepTrace, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = recorded.resident_bytes // 2
    for module in (without_data, explanation):
        monkeypatch.setattr(module, "runnable_bytes", lambda device: free)
    request = ExplainRequest(source=source, spec=SPEC, memory=needed_bytes(recorded) - LESS, flags=FLAGS)
    found = explain(request, progress=Progress())
    (plan,) = (said for said in found.suggestions if said.change == "plan")
    assert (plan.peak_bytes, plan.seconds) == (None, None)
    assert plan.predicted_bytes <= found.limit_bytes
    assert plan.not_run.startswith("not run: it needs ")
    assert plan.command.startswith("memopt optimize ")
    text = text_of(found)
    assert plan.not_run in text
    assert f"for {plan.text}: {plan.command}" in text


@pytest.mark.slow
def test_of_an_error_of_a_gpu_the_answer_is_for_a_gpu(
    tmp_path: Path, recorded: StepTrace, explained: Callable[..., Explanation]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU)
    found = explained(needed_bytes(recorded) - LESS, log_path=str(log))
    assert "The error is from a GPU; the step was counted on the CPU." in found.notes
    assert "offload" not in {said.change for said in found.suggestions}
    assert any("--offload host --device cuda" in refused for refused in found.refused)
    assert all('autocast("cuda"' in said.command for said in found.suggestions if said.change == "autocast")


def test_a_process_that_was_killed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = b"[1.2] Out of memory: Killed process 4 (python) total-vm:31kB, anon-rss:15728640kB, file-rss:1kB\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(killed)))
    text = text_of(explain(ExplainRequest(source=None, log_path="-"), progress=Progress()))
    assert text.startswith("the kernel killed python at 15.0 GiB\n")
    assert "tensors held" not in text
    assert "Name the model as well" in text


def test_the_memory_of_a_killed_process_is_not_called_that_of_its_tensors() -> None:
    error = read_oom("[1.2] Out of memory: Killed process 4 (python) total-vm:31kB, anon-rss:15728640kB, file-rss:1kB")
    limit = explanation._reported_limit(error, None)
    assert limit is not None
    assert limit[0] == 15 << 30
    assert limit[1].startswith("the process's memory when it was killed, its libraries included")


def test_of_standard_input_no_more_than_the_end_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class InPieces(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert 0 < size <= 1 << 20
            return super().read(size)

    monkeypatch.setattr(explanation, "_MAX_LOG_BYTES", 1000)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(InPieces(b"x" * (3 << 20) + b"\n[1]+  Killed  python\n")))
    assert explanation._read_error("-").event.startswith("the kernel killed")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_log_of_powershell_is_read(encoding: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU, encoding=encoding)
    found = explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress())
    assert found.asked_bytes == 64 << 20


@pytest.mark.parametrize(("unused", "is_fragmented"), [(0, False), (40, False), (50, True), (128, True)])
def test_pieces_that_would_do_together_are_told_of(unused: int, is_fragmented: bool, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU.replace("128.00 MiB is reserved", f"{unused}.00 MiB is reserved"))  # 16 of 64 MiB were free
    found = explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress())
    assert any("expandable_segments" in note for note in found.notes) is is_fragmented


def test_where_what_was_free_would_do_nothing_is_said_of_pieces(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(ON_A_GPU.replace("16.00 MiB is free", "64.00 MiB is free"))
    found = explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress())
    assert found.asked_bytes == 64 << 20
    assert not any("expandable_segments" in note for note in found.notes)


AT_ONCE = Instant(allocated_bytes=8, op=0, name="aten::mm", phase="forward", module="")


@pytest.mark.parametrize(("instant", "heading"), [(None, "held at the peak"), (AT_ONCE, "held then")])
def test_where_memory_does_not_run_out_the_peak_is_shown(instant: Instant | None, heading: str) -> None:
    breakdown = break_down([("activations", 7)])
    shown = Explanation(
        header=None, limit_bytes=9, limit="--memory 9B", needed_bytes=8, instant=instant, breakdown=breakdown
    )
    lines = text_of(shown).splitlines()
    assert heading in [line.strip() for line in lines]


def test_what_a_step_needs_does_not_look_like_the_memory_there_is() -> None:
    shown = Explanation(
        header=a_header(), limit_bytes=1414 << 20, limit="here", needed_bytes=1425 << 20, instant=AT_ONCE
    )
    assert text_of(shown).startswith("the step needs about 1.39 GiB; available: 1.38 GiB (here)\n")


def test_a_log_without_an_error_is_refused_and_the_errors_of_a_gpu_and_of_the_cpu_are_named(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("loss 0.3\n")
    with pytest.raises(UsageError, match="no out-of-memory message") as refused:
        explain(ExplainRequest(source=None, log_path=str(log)), progress=Progress())
    for named in ("CUDA out of memory. Tried to allocate", "DefaultCPUAllocator: can't allocate memory"):
        assert f'"{named}"' in refused.value.hint
        assert read_oom(f"RuntimeError: {named}: you tried to allocate 4096 bytes") is not None


def test_of_a_long_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "_MAX_LOG_BYTES", 1000)
    log = tmp_path / "train.log"
    log.write_text("Tried to allocate 1.00 MiB\n" + "step\n" * 1000 + "Tried to allocate 2.00 MiB\n")
    found = explain(
        ExplainRequest(source=None, log_path=str(log), snapshot_path=snapshot(tmp_path)), progress=Progress()
    )
    assert found.asked_bytes == 2 << 20


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no out-of-memory message"):
        explain(ExplainRequest(source=None, log_path=str(tmp_path / "pipe")), progress=Progress())


@pytest.mark.slow
def test_a_snapshot_in_which_nothing_ran_out_says_nothing_of_the_limit(
    tmp_path: Path, recorded: StepTrace, explained: Callable[..., Explanation]
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert explained(None, snapshot_path=str(path)).limit_bytes > needed_bytes(recorded)


def test_a_step_that_fits_was_raised_nowhere(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    text = io.StringIO()
    TextReport().show(explained(2 * needed_bytes(recorded)), text)
    assert "raised at" not in text.getvalue()


def test_commands_repeat_the_flags_of_the_user(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    found = explained(needed_bytes(recorded) - LESS)
    commands = {said.change: said.command for said in found.suggestions}
    assert f" --code-path . --dim B={BATCH} --level 4 --budget " in commands["plan"]
    assert f" --code-path . --dim B={BATCH} --memory " in commands["micro-batches"]


@pytest.mark.parametrize("exact", [True, False])
def test_a_plan_that_rounds_says_so(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(segments=(SegmentPlan(path="a"),))
    row = LevelRow(level=4, plan=plan, outcome=measured(900, 0.5), dry_runs=1, search_s=0.0)
    found = SimpleNamespace(plan=plan, rows=[row], verification=SimpleNamespace(is_bit_exact=exact))
    prepared = SimpleNamespace(subject=Subject(source=ModelSource(location="net.pt")))
    trial = ChangeTrials(ExplainRequest(source=None, flags=FLAGS), prepared, 1 << 20)  # type: ignore[arg-type]
    monkeypatch.setattr(trial, "_search", lambda *_, **__: found)
    (said,) = trial._try_plan()
    assert said.text == "a plan of 1 segment" + ", equal within rounding" * (not exact)


def test_memory_that_runs_out_in_the_update_asks_for_another_update(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef net(): return nn.Linear(512, 512)\n")
    request = ExplainRequest(
        source=ModelSource(location=f"{tmp_path / 'net.py'}:net"),
        spec=InputSpec(tensors=(TensorSpec(shape=(1, 512)),), source="--input"),
        settings=StepSettings(optimizer="adamw", device="cpu"),
        memory=int(4.6 * 2**20),  # parameters, gradients and state take 4 MiB, a temporary of the update 1 MiB
    )
    found = explain(request, progress=Progress())
    assert found.instant.phase == "update"
    fused = next(said for said in found.suggestions if said.change == "fused optimizer")
    assert fused.peak_bytes <= request.memory
    assert fused.command == "torch.optim.AdamW(…, fused=True), and `--optimizer adamw:fused` here"
    assert any(refused.startswith("The optimizer in backward: needs about ") for refused in found.refused)


def test_the_optimizer_in_backward_is_named_where_it_fits(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))\n"
    )
    request = ExplainRequest(
        source=ModelSource(location=f"{tmp_path / 'net.py'}:net"),
        spec=InputSpec(tensors=(TensorSpec(shape=(1, 256)),), source="--input"),
        settings=StepSettings(optimizer="adamw", device="cpu"),
        memory=8400 << 10,  # parameters, gradients and state take 8 MiB, temporaries of the update 0.5 MiB
    )
    found = explain(request, progress=Progress())
    said = next(said for said in found.suggestions if said.change == "optimizer in backward")
    assert said.peak_bytes <= request.memory
    assert said.command.endswith(" --level 4 --budget 8400KiB --optimizer-in-backward")


@pytest.mark.parametrize("plan", [Plan(place="disk"), Plan(segments=(SegmentPlan(path="a"),))])
def test_a_plan_that_sends_is_a_suggestion_of_its_own(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = measured(900, 0.5, elsewhere_bytes=3 << 20)
    row = LevelRow(level=4, plan=plan, outcome=outcome, dry_runs=1, search_s=0.0, predicted_slowdown=1.25)
    asked = []

    def search(*_: object, offload: str) -> object:
        asked.append(offload)
        return SimpleNamespace(plan=plan, rows=[row], verification=None)

    prepared = SimpleNamespace(subject=Subject(source=ModelSource(location="net.pt")))
    trial = ChangeTrials(ExplainRequest(source=None, flags=FLAGS), prepared, 1 << 20)  # type: ignore[arg-type]
    monkeypatch.setattr(trial, "_search", search)
    found = list(trial._try_plan(sends=True))
    assert asked == ["disk"]
    assert [said.change for said in found] == ["offload"] * plan.sends
    for said in found:
        assert said.text.endswith(", sending 3.0 MiB to the disk at 1.25 times the step (predicted)")
        assert said.command.endswith(f" --dim B={BATCH} --level 4 --budget 1MiB --offload disk")


@pytest.mark.parametrize("plan", [Plan(in_backward=True), Plan(segments=(SegmentPlan(path="a"),))])
def test_the_command_lets_the_optimizer_run_in_backward_where_the_plan_does(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = LevelRow(level=4, plan=plan, outcome=measured(900, 0.5), dry_runs=1, search_s=0.0)
    prepared = SimpleNamespace(subject=Subject(source=ModelSource(location="net.pt")))
    trial = ChangeTrials(ExplainRequest(source=None, flags=FLAGS), prepared, 1 << 20)  # type: ignore[arg-type]
    monkeypatch.setattr(trial, "_search", lambda *_, **__: SimpleNamespace(plan=plan, rows=[row], verification=None))
    (said,) = trial._try_plan()
    assert said.command.endswith(" --level 4 --budget 1MiB" + " --optimizer-in-backward" * plan.in_backward)


@pytest.mark.parametrize(
    ("asked", "is_searched"),
    [({}, False), ({"optimizer_in_backward": True}, True)],
)
def test_an_optimizer_runs_in_backward_only_where_that_is_asked_for(
    asked: dict[str, bool], is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, searched = StepSettings(optimizer="adamw"), []

    def find(request: OptimizeRequest, prepared: object) -> object:
        searched.append(request.search.options.optimizer_in_backward)
        return SimpleNamespace(verification=None, plan=Plan())

    monkeypatch.setattr(change_trials, "find_plan", find)
    monkeypatch.setattr(change_trials, "without_own_checkpoints", lambda prepared, **_: prepared)
    subject = Subject(source=ModelSource(location="net.pt"), spec=SPEC, settings=settings)
    prepared = SimpleNamespace(subject=subject, notes=())
    trial = ChangeTrials(ExplainRequest(source=None, settings=settings, **asked), prepared, 1 << 20)  # type: ignore[arg-type]
    trial._search(prepared, SearchGoal())  # type: ignore[arg-type]
    accumulating = SimpleNamespace(subject=replace(subject, settings=replace(settings, micro_batches=2)), notes=())
    trial._search(accumulating, SearchGoal())  # type: ignore[arg-type]
    assert searched == [is_searched, False]
    assert trial.suggestions(2 << 20, 3 << 19) == ()
    assert ("`--optimizer-in-backward` frees each gradient" in trial.refused[0]) is not is_searched
    assert trial.suggestions(2 << 20, 1 << 19) == ()
    assert "`--optimizer-in-backward`" not in trial.refused[1]  # 1.5 MiB would be left of the 1 MiB


def wide(folder: Path, *more: nn.Module) -> ExplainRequest:
    """Of a step that takes nearly nothing but inputs, of which half fit."""
    torch.save(nn.Sequential(nn.Linear(4096, 1), *more), folder / "wide.pt")
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 4096)),), dims={"B": 256}, source="here")
    source = ModelSource(location=str(folder / "wide.pt"), trust=Trust(pickle=True))
    return ExplainRequest(source=source, spec=spec, memory=2 << 20)


@pytest.mark.slow
def test_an_interruption_of_what_is_tried_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(rows=[None], chosen=0, interrupted=True)
    monkeypatch.setattr(change_trials, "recommend_prepared", lambda *_: found)
    with pytest.raises(KeyboardInterrupt):
        explain(wide(tmp_path), progress=Progress())


@pytest.mark.parametrize(("memory", "code"), [("100B", 6), ("1GiB", 0)])
def test_the_exit_code_tells_that_nothing_fits(memory: str, code: int, memopt: Callable[..., Done]) -> None:
    Path("net.py").write_text("from torch import nn\ndef net(): return nn.Linear(8, 8)\n")
    assert memopt("explain", "net.py:net", "-i", "4x8", "--memory", memory).code == code


def test_one_sample_is_not_offered_in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StepSettings(optimizer="adamw")
    subject = Subject(source=ModelSource(location="net.pt"), spec=SPEC, settings=settings)
    prepared = SimpleNamespace(subject=subject, notes=(), batch=1, facts=SimpleNamespace(format="pickle"))
    trial = ChangeTrials(ExplainRequest(source=None, settings=settings), prepared, 1 << 20)  # type: ignore[arg-type]
    monkeypatch.setattr(change_trials, "recommend_prepared", lambda *_: pytest.fail("nothing is run"))
    for name in ("_try_plan", "_try_autocast", "_try_plan_under_autocast"):
        monkeypatch.setattr(trial, name, lambda **_: iter(()))
    assert trial.suggestions(0, 0) == ()
    assert trial.refused == ["Micro-batches: the batch has one sample, which cannot be split."]


@pytest.mark.parametrize("norms", [False, True])
def test_exact_changes_come_before_another_training_step(norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(source=ModelSource(location="net.pt"), spec=SPEC, settings=StepSettings())
    facts = SimpleNamespace(format="pickle", batch_norms=norms)
    prepared = SimpleNamespace(subject=subject, notes=(), batch=2, facts=facts)
    trial = ChangeTrials(ExplainRequest(source=None), prepared, 1 << 20)  # type: ignore[arg-type]

    def found(change: str, seconds: float) -> Any:
        tried = Suggestion(change=change, text="", command="", predicted_bytes=None, peak_bytes=1, seconds=seconds)  # type: ignore[arg-type]
        return lambda *_, **__: iter((tried,))

    for name, change, seconds in (
        ("plan", "plan", 3.0),
        ("micro_batches", "micro-batches", 2.0),
        ("autocast", "autocast", 1.0),
    ):
        monkeypatch.setattr(trial, f"_try_{name}", found(change, seconds))
    monkeypatch.setattr(trial, "_try_sending", lambda: iter(()))
    first = ["plan", "micro-batches"] if norms else ["micro-batches", "plan"]
    assert [said.change for said in trial.suggestions(0, 0)] == [*first, "autocast"]


def test_where_one_sample_does_not_fit_each_figure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "build.py"
    script.write_text("from torch import nn\ndef net(): return nn.Sequential(nn.Linear(512, 512), nn.GELU())\n")
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 512)),), dims={"B": 512}, source="here")
    request = ExplainRequest(source=ModelSource(location=f"{script}:net"), spec=spec, memory=2560 << 10)
    for name in ("_try_plan", "_try_autocast", "_try_plan_under_autocast"):
        monkeypatch.setattr(ChangeTrials, name, lambda *_, **__: iter(()))
    found = SimpleNamespace(plan=Plan(segments=(SegmentPlan(path="1"),)))
    monkeypatch.setattr(ChangeTrials, "_search", lambda *_, **__: found)
    alone, planned = explain(request, progress=Progress()).refused
    earlier = r"it took [\d.]+ MiB, with the gradients of earlier micro-batches in memory\.$"
    assert re.search(rf"^Micro-batches: not even a batch of 1 fits in .*: {earlier}", alone)
    assert re.search(rf"^A plan and micro-batches: .*: it took [\d.]+ MiB; under the plan, {earlier}", planned)


@pytest.mark.slow
def test_large_inputs_leave_micro_batches_to_try(tmp_path: Path) -> None:
    found = explain(wide(tmp_path), progress=Progress())
    assert "micro-batches" in {said.change for said in found.suggestions}
    assert not [note for note in found.notes if "batch normalization" in note]


@pytest.mark.parametrize("passes", [1, 3])
def test_micro_batches_make_up_the_samples_of_all_passes(passes: int, tmp_path: Path) -> None:
    asked = replace(wide(tmp_path), settings=StepSettings(micro_batches=passes), flags=(f"--accumulate {passes}",))
    (run,) = (each for each in explain(asked, progress=Progress()).suggestions if each.change == "micro-batches")
    assert run.batch is not None
    assert run.batch < 256
    assert run.text == f"{-(-256 * passes // run.batch)} micro-batches of {run.batch}"
    assert f" --global-batch {256 * passes}" in run.command
    assert "--accumulate" not in run.command


def test_micro_batches_have_statistics_of_their_own(tmp_path: Path) -> None:
    found = explain(wide(tmp_path, nn.BatchNorm1d(1)), progress=Progress())
    (run,) = (said for said in found.suggestions if said.change == "micro-batches")
    (note,) = (note for note in found.notes if "batch normalization" in note)
    assert f"statistics cover {run.batch} samples, not 256" in note
    assert "Accumulation trains as one large batch does only if the loss is a mean over samples." in found.notes
    lines = text_of(found).splitlines()
    assert f"# {run.text}" in lines
    assert not any("labels of -100" in line or "objective" in line for line in lines)
    assert "for number, (inputs, targets) in enumerate(loader, start=1):" in lines


STEP = """
import torch, memopt_cli
from torch import nn

def make_step():
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    def run(x):
        loss = net(x).square().mean()
        loss.backward()
        net.zero_grad()
        return loss
    return memopt_cli.Step(models={"net": net}, run=run)
"""


@pytest.mark.slow
def test_a_step_of_ones_own_gets_suggestions_that_it_can_follow(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STEP)
    source = ModelSource(location=f"{script}:make_step")
    request = ExplainRequest(source=source, spec=SPEC, settings=StepSettings(), memory=900 << 10)
    found = explain(request, progress=Progress())
    assert {said.change for said in found.suggestions} <= {"plan", "offload"}
    assert [refused for refused in found.refused if "in its code" in refused]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(segments=(SegmentPlan(path="a"),), packed=True), "a plan of 1 segment"),
        (Plan(packed=True), "a plan that packs saved tensors"),
        (Plan(in_backward=True), "the optimizer in backward"),
        (
            Plan(segments=(SegmentPlan(path="a"),) * 2, in_backward=True),
            "a plan of 2 segments, the optimizer in backward",
        ),
        (Plan(), "the step as it is"),
    ],
)
def test_a_plan_is_called_by_what_it_does(plan: Plan, text: str) -> None:
    assert plan_in_words(plan) == text


def test_the_report_for_programs(recorded: StepTrace, explained: Callable[..., Explanation]) -> None:
    text = io.StringIO()
    JsonReport().show(explained(needed_bytes(recorded) - LESS), text)
    data = json.loads(text.getvalue())
    assert data["suggestions"][0]["change"] in ("plan", "offload", "micro-batches", "autocast")
    assert data["instant"]["module"]


@pytest.mark.slow
def test_where_neither_is_enough_a_plan_is_tried_under_autocast(tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU()) for _ in range(6)])\n"
    )
    source, spec = (
        ModelSource(location=f"{script}:net"),
        InputSpec(tensors=(TensorSpec(shape=(1, 8, 256, 256)),), source="--input"),
    )
    request = ExplainRequest(source=source, spec=spec, memory=int(15.5 * 2**20), settings=StepSettings(device="cpu"))
    (said,) = explain(request, progress=Progress()).suggestions
    assert said.change == "autocast"
    assert said.text.endswith(", under autocast to bfloat16, which rounds")
    assert "--precision bf16 --level 4 --budget 15.5MiB" in said.command
    assert said.peak_bytes is not None
    assert said.peak_bytes <= request.memory
