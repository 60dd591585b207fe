"""Read broken files of every format that memopt reads: each must load, or be refused by a memopt error.

    python -m fuzz files                          # a hundred thousand of each, for hours
    python -m fuzz files zip.pt plan.yaml --count 1000

A sound file is split into pieces (opcodes of a pickle, words of a text, otherwise bytes; in an archive, the pieces of
one or two records) and a few pieces are changed.  Forked processes, with limits on time and memory, read the results.
A file on which memopt crashes, hangs or prints unprintable characters is a failure: it is reported, and kept in
``fuzz-failures``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import pickle
import pickletools
import random
import re
import resource
import signal
import tempfile
import traceback
import unittest.mock
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import safetensors.torch
import torch
import typer
from torch import nn

import memopt_cli
from memopt_cli import pipeline
from memopt_cli.cli.app import app
from memopt_cli.errors import MemoptError
from memopt_cli.inputs.spec_text import parse_limit, parse_tensor
from memopt_cli.loading import load_model, read_file
from memopt_cli.loading.description import describe_file
from memopt_cli.loading.input_spec import make_inputs, read_spec_file
from memopt_cli.measure.jobs import Job
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline import compare_files, prepare
from memopt_cli.records import BaselineRequest, CheckRequest, InputSpec, ModelSource
from memopt_cli.records.progress import Progress
from memopt_cli.report.github import GithubReport
from memopt_cli.report.json import JsonReport
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextReport
from memopt_cli.search.batch_size.length_strategies import read_histogram, read_lengths
from memopt_cli.search.estimation.cards import device_profile

_CASE_S: Final = 60
"""Seconds that one file may take."""
_CASE_BYTES: Final = 4 << 30
"""Bytes of address space that reading may add; generous, for PyTorch reserves far more than it uses."""
_PER_PROCESS: Final = 500
"""Files that one process reads before the next process takes over."""
_NUMBERS: Final = "0 -1 1e999 -1e999 NaN Infinity .inf .nan 1_0 0x7f 1:30 9223372036854775808 4294967297".split()
_WORDS: Final = [
    *_NUMBERS,
    *("1" + "0" * 400, "[" * 300, "{a: " * 300, "null", "~", "true", "[]", "{}", '""', "!!python/name:os.system"),
    *('"\\u001b[2J"', '"\\ud800"', "&a", "*a", "? ", "<<: ", "- ", "\n", "::error::x", "os:system", "/dev/zero", "\0"),
]
_BYTES: Final = [b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0" * 8, b"PK\x03\x04", b"\x80\x02", b"("]
_OPCODES: Final = [
    *(b"(", b")", b"]", b"}", b"\x8f", b"N", b"R", b"b", b"\x81", b"\x92", b"0", b"1", b"2", b"t", b"\x85", b"\x86"),
    *(b"s", b"u", b"a", b"e", b"Q", b"\x93", b"\x94", b"h\x00", b"h\x01", b"r\x80\xd1\xf0\x08", b"J\xff\xff\xff\x7f"),
    *(b"ctorch\nbmm\n", b"cbuiltins\ntuple\n", b"cbuiltins\nrange\n", b"ctorch.nn.modules.linear\nLinear\n"),
    *(b"cfunctools\npartial\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"K\x01"),
    *(b"X\x08\x00\x00\x00__dict__", b"X\x07\x00\x00\x00forward", b"\x8a\x01\xff", b"G\x7f\xf8\0\0\0\0\0\0"),
]


# ---------------------------------------------------------------------------------------------- pieces


def _split_bytes(data: bytes, draws: random.Random) -> list[bytes]:
    size = draws.choice([1, 2, 4, 8, 32])
    return [data[at : at + size] for at in range(0, len(data), size)]


def _split_words(data: bytes, draws: random.Random) -> list[bytes]:
    return re.findall(rb"\w+|\s+|[^\w\s]", data)


def _split_opcodes(data: bytes, draws: random.Random) -> list[bytes]:
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:  # cut off, or no pickle at all
        return _split_bytes(data, draws)
    ends = [*starts[1:], starts[-1] + 1]
    return [*(data[start:end] for start, end in zip(starts, ends, strict=True)), data[ends[-1] :]]


def _change(pieces: list[bytes], others: Sequence[bytes], draws: random.Random) -> bytes:
    """Return ``pieces`` joined, after one to four changes: pieces dropped, copied, damaged or replaced."""
    for _ in range(draws.choice([1, 1, 2, 4])):
        at = draws.randrange(len(pieces))
        match draws.randrange(7):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, pieces[draws.randrange(len(pieces))])
            case 2:
                pieces[at] = pieces[draws.randrange(len(pieces))]
            case 3:
                pieces[at] = draws.choice(others)
            case 4:
                pieces.insert(at, draws.choice(others))
            case 5:
                pieces[at] = bytes(byte ^ 1 << draws.randrange(8) for byte in pieces[at])
            case _:
                del pieces[at : at + draws.randrange(1, 1 + max(1, len(pieces) // 4))]
        if not pieces:
            return b""
    return b"".join(pieces)


def _broken(data: bytes, draws: random.Random, *, text: bool = False) -> bytes:
    if text or data[:1] in b"{[":
        return _change(_split_words(data, draws), [word.encode() for word in _WORDS], draws)
    if data[:1] == b"\x80" and draws.random() < 0.8:
        return _change(_split_opcodes(data, draws), _OPCODES, draws)
    return _change(_split_bytes(data, draws), _BYTES, draws)


def _broken_archive(data: bytes, draws: random.Random) -> bytes:
    """Return the archive with one or two broken records; one time in five break the bytes of the archive itself."""
    if draws.random() < 0.2:
        return _broken(data, draws)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        records = {name: file.read(name) for name in file.namelist()}
    # Pickles and programs are few among the records of weights, but most mistakes of a reader are about them.
    weights = [4 if name.endswith((".pkl", ".py", ".json")) else 1 for name in records]
    for name in draws.choices(list(records), weights, k=draws.choice([1, 1, 2])):
        match draws.randrange(12):
            case 0:
                records.pop(name, None)
            case 1:
                records[_broken(name.encode(), draws, text=True).decode("utf-8", "replace")] = b"x"
            case _ if records.get(name):
                records[name] = _broken(records[name], draws, text=name.endswith((".py", ".json")))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draws.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as file:
        for name, record in records.items():
            file.writestr(zipfile.ZipInfo(name), record)
    return made.getvalue()


# ---------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """Format of files that memopt reads."""

    sound: Callable[[], list[bytes]]
    """Function that makes sound files."""
    broken: Callable[[bytes, random.Random], bytes]
    """Function that changes a sound file at random."""
    read: Callable[[str], object]
    """Function that reads the file at a path as memopt does."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


def _bytes_of(save: Callable[[Any], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


@functools.cache
def _zips() -> list[bytes]:
    model = _model()
    model.extra = {"dtype": torch.float16, "size": torch.Size([1]), "array": np.ones(2), "act": nn.functional.gelu}
    checkpoint = {"state_dict": model.state_dict(), "model": model, "epoch": 3}
    memopt_cli.apply_plan(optimized := _model(), memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),)))
    return [_bytes_of(functools.partial(torch.save, value)) for value in (model, checkpoint, optimized)]


def _scripts() -> list[bytes]:
    scripted, traced = torch.jit.script(_model()), torch.jit.trace(_model(), torch.ones(1, 1, 4, 4))
    return [_bytes_of(functools.partial(torch.jit.save, script)) for script in (scripted, traced)]


def _exported() -> list[bytes]:
    program = torch.export.export(_model().eval(), (torch.ones(1, 1, 4, 4),))
    return [_bytes_of(functools.partial(torch.export.save, program))]


def _read_model(path: str) -> None:
    for read in (lambda: describe_file(read_file(path)), lambda: load_model(ModelSource(location=path))):
        with contextlib.suppress(MemoptError):
            read()


@functools.cache
def _folders() -> dict[str, bytes]:
    """Return path -> content of a model that ``save_pretrained`` wrote in several files, and of an adapter on it."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = LlamaConfig(**sizes, max_position_embeddings=8, num_key_value_heads=1, vocab_size=9)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()):
        LlamaForCausalLM(config).save_pretrained("base", max_shard_size=1000)
        adapted = peft.get_peft_model(LlamaForCausalLM.from_pretrained("base"), peft.LoraConfig(r=2))
        adapted.peft_config["default"].base_model_name_or_path = "../base"
        adapted.save_pretrained("adapter")
        return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def _sound_part(part: str) -> Callable[[], list[bytes]]:
    return lambda: [_folders()[part]]


def _read_in(part: str) -> Callable[[str], None]:
    """Return a function that loads the model or adapter with its file ``part`` replaced by the broken one."""

    def read(path: str) -> None:
        for name, content in _folders().items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(Path(path).read_bytes() if name == part else content)
        load_model(ModelSource(location=str(Path(part).parent)))

    return read


def _read_inputs(path: str) -> None:
    make_inputs(InputSpec(data_file=path, source="--input-data"), seed=0, device="cpu", dtype=None)


def _read_plan(path: str) -> None:
    _, plan = memopt_cli.read_plan(path)
    memopt_cli.apply_plan(_model(), plan)


def _read_lengths(path: str) -> None:
    for read in (read_histogram, read_lengths):
        with contextlib.suppress(MemoptError):
            read(path)


def _read_config(path: str) -> None:
    group = _commands()
    Path("model.pt").touch()
    for command in ("optimize", "check", "recommend-batch"):
        context = group.make_context("memopt", [command], resilient_parsing=True)
        with contextlib.suppress(typer.Exit, typer.BadParameter):
            group.commands[command].make_context(command, ["model.pt", "--config", path], parent=context)


@functools.cache
def _commands() -> Any:
    """Return memopt's commands; cached, for Typer takes longer to build them than memopt to read a file."""
    return typer.main.get_command(app)


def _read_batch(path: str) -> None:
    """Read a file of batch shaping, and run three steps with it: whatever values it accepts must also work."""
    manager = memopt_cli.batching.BatchShapeManager(_model(), config=memopt_cli.batching.read_batch_shaping(path))
    manager.initialize_for_training()
    for step in range(3):
        manager.process_batch(torch.ones(16, 1, 4, 4), step, 1.0 / (1 + step))
        manager.update_metrics(1.0 / (1 + step), 0.1, 0.5)
    manager.get_status()


def _read_measured(path: str) -> None:
    found = compare_files(path, path)
    said = io.StringIO()
    for report in _REPORTS:
        report.show(found, said)
    _require_printable(said.getvalue())


_PLAN: Final = b"""schema_version: 1
memopt: 0.1.0
torch: 2.13.0
model: model.pt
sha256: null
spec: {tensors: [{shape: [B, 1, 4, 4], dtype: float32}], dims: {B: 4}, source: --input}
seed: 0
device: cpu
level: 3
packed: true
segments:
- {path: '0', compressor: bit, keep: ['aten::convolution#2', 'aten::mm']}
- {path: '2-3', chunks: 2, axis: 0}
- {path: '4'}
"""
_PLAN_BY_LENGTH: Final = b"""schema_version: 2
memopt: 0.1.0
torch: 2.13.0
model: model.pt
sha256: null
spec: {tensors: [{shape: [B, 1, 4, S], dtype: float32}], dims: {B: 4, S: 4}, source: --input}
seed: 0
device: cpu
level: 3
by: {dim: S, argument: 0, axis: -1}
ranges:
- {up_to: 2}
- {up_to: 3, packed: true}
- up_to: 4
  segments:
  - {path: '0', compressor: bit}
  - {path: '4', chunks: 2}
parallel: {ranks: 8, parallel: fsdp, mesh: {dp: 4, tp: 2}}
"""
_CARD: Final = b"""memory_bytes: 23GiB
bandwidth_bytes_per_s: 1.0e+12
flops_per_s: {fp32: 8.0e+13, bf16: 1.6e+14}
library_bytes: 8MiB
source: a data sheet
"""
_SPEC: Final = b"""inputs:
- {name: x, shape: [T, B, 2, 48], dtype: float32, values: 'spikes:0.2'}
- {shape: [B, S], dtype: int64, values: '0..32000'}
dims: {T: 10, B: 4, S: 16}
"""
_BATCH: Final = b"""schema_version: 2
memopt: 0.1.0
model: model.pt
batch_shaping:
  adaptive_sizing:
    enabled: true
    target_memory_usage: 0.8
    min_batch_size: 1
    max_batch_size: 128
    adaptation_interval: 1
    performance_window: 50
  memory_aware_shaping:
    memory_threshold: 0.9
    preserve_gradients: true
    optimization_hints: {attention: contiguous, convolution: channels_last, recurrent: packed_sequence}
  performance_monitoring:
    enabled: true
    metrics_window: 100
    alert_thresholds: {memory_usage: 0.95, throughput_drop: 0.2}
  validation: {strict_mode: true, hardware_checks: true, performance_validation: true}
recommended: {batch_size: 48, verified: true}
"""
_CONFIG: Final = b"""level: 3
dims: {B: 8}
input: 8x3x32x32
memory: 8GiB
timeout: 100
"""


_REPORTS: Final = (TextReport(), MarkdownReport(), GithubReport(None), JunitReport(), JsonReport())


def _read_checked(path: str) -> None:
    """Run ``memopt check`` with its own broken baseline model, and require every report to be printable."""
    Path("model.pt").write_bytes(_zips()[0])
    request = CheckRequest(source=ModelSource(location="model.pt"), baseline_path=path, limits=(parse_limit("peak:0"),))
    said = io.StringIO()
    try:
        with _in_this_process():
            found = pipeline.check(request, progress=Progress(), ask=None)
        for report in _REPORTS:
            report.show(found, said)
    except MemoptError as err:
        for report in _REPORTS:
            report.refused(err, "model.pt", said)
    _require_printable(said.getvalue())


def _require_printable(text: str) -> None:
    if not all(line.isprintable() for line in text.split("\n")):
        raise ValueError(f"a report says {text!r}")


class _Remembering(LocalSession):
    """Session that remembers the answer to each job, for only the baselines are broken: the model never changes."""

    _known: ClassVar[dict[str, Any]] = {}

    def ask(self, job: Job[Any]) -> Any:
        asked = repr((self._subject, job))
        if asked not in self._known:
            self._known[asked] = super().ask(job)
        return self._known[asked]


def _in_this_process() -> AbstractContextManager[object]:
    return unittest.mock.patch.object(prepare, "Session", _Remembering)


def _recorded() -> list[bytes]:
    """Return the baseline that ``memopt baseline`` records of the small model on this machine."""
    spec = InputSpec(tensors=(parse_tensor("2x1x4x4"),), source="--input")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _in_this_process():
        Path("model.pt").write_bytes(_zips()[0])
        request = BaselineRequest(source=ModelSource(location="model.pt"), spec=spec, output="made.json")
        pipeline.baseline(request, progress=Progress(), ask=None)
        return [Path("made.json").read_bytes()]


def _measured() -> list[bytes]:
    """Return stored baselines; the last one is changed to describe one rank of eight, and a shorter input."""
    folder = Path(__file__).parents[1] / "benchmarks" / "baselines"
    plain = [(folder / f"{name}.json").read_bytes() for name in ("char_rnn", "lif_rnn")]
    data = json.loads(plain[0])
    data["conditions"]["layout"] = {"ranks": 8, "parallel": "fsdp", "mesh": {"dp": 4, "tp": 2}}
    dim, size = next(iter(data["spec"]["dims"].items()))
    data["shorter"] = [{"dim": dim, "size": size - 1, "memory": data["memory"]}]
    return [*plain, json.dumps(data).encode()]


_TEXT: Final = functools.partial(_broken, text=True)
FORMATS: Final[dict[str, Format]] = {
    "zip.pt": Format(_zips, _broken_archive, _read_model),
    "legacy.pt": Format(
        lambda: [_bytes_of(functools.partial(torch.save, _model(), _use_new_zipfile_serialization=False))],
        _broken,
        _read_model,
    ),
    "plain.pt": Format(
        lambda: [pickle.dumps(_model(), 4), pickle.dumps({"m": np.ones(3), "n": [1.5, {2}]}, 2)], _broken, _read_model
    ),
    "script.ts": Format(_scripts, _broken_archive, _read_model),
    "program.pt2": Format(_exported, _broken_archive, _read_model),
    "weights.safetensors": Format(
        lambda: [safetensors.torch.save(_model().state_dict(), {"made": "here"})],
        lambda data, draws: _broken(data, draws, text=draws.random() < 0.8),
        _read_model,
    ),
    "inputs.npz": Format(
        lambda: [_bytes_of(lambda file: np.savez(file, x=np.ones((2, 3)), y=np.arange(4)))],
        _broken_archive,
        _read_inputs,
    ),
    "tensors.pt": Format(
        lambda: [
            _bytes_of(functools.partial(torch.save, {"x": torch.ones(2), "y": [torch.zeros(3, dtype=torch.int)]}))
        ],
        _broken_archive,
        _read_inputs,
    ),
    "model.inputs.yaml": Format(lambda: [_SPEC], _TEXT, read_spec_file),
    "memopt.yaml": Format(lambda: [_CONFIG], _TEXT, _read_config),
    "plan.yaml": Format(lambda: [_PLAN, _PLAN_BY_LENGTH], _TEXT, _read_plan),
    "card.yaml": Format(lambda: [_CARD], _TEXT, device_profile),
    "lengths.txt": Format(lambda: [b"12\n7 3\n\n64: 2\n128, 9\n"], _TEXT, _read_lengths),
    "batch.yaml": Format(lambda: [_BATCH], _TEXT, _read_batch),
    "baseline.json": Format(_measured, _TEXT, _read_measured),
    "checked.json": Format(_recorded, _TEXT, _read_checked),
    **{
        Path(part).name: Format(_sound_part(part), _TEXT, _read_in(part))
        for part in ("base/config.json", "base/model.safetensors.index.json", "adapter/adapter_config.json")
    },
}
"""Name of a file, as the command line takes it -> its format."""


# ---------------------------------------------------------------------------------------------- running


def case(name: str, seed: int, index: int) -> bytes:
    """Return the broken file number ``index`` of the format ``name``; the same arguments give the same bytes."""
    draws = random.Random(f"{name} {seed} {index}")
    return FORMATS[name].broken(draws.choice(_sound(name)), draws)


@functools.cache
def _sound(name: str) -> list[bytes]:
    return FORMATS[name].sound()


def failures(name: str, seed: int, count: int, keep: Path) -> list[str]:
    """Return a line for each failure among ``count`` broken files, and write these files to the folder ``keep``."""
    _sound(name)  # cached before the fork, so that every process has it
    found: list[str] = []
    start = 0
    while start < count:
        end = min(start + _PER_PROCESS, count)
        index, reason = _in_process(name, seed, range(start, end))
        if reason:
            keep.mkdir(exist_ok=True)
            (keep / f"{seed}-{index}-{name}").write_bytes(case(name, seed, index))
            found.append(f"{name}, seed {seed}, file {index}: {reason}")
        start = index + 1
    return found


def _in_process(name: str, seed: int, indices: range) -> tuple[int, str]:
    """Return the number of the first failure and its reason, or the last number and an empty reason."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _be_child(name, seed, indices, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    at, _, reason = said.rpartition("\n")[2].partition(" ")
    if status and not reason:
        reason = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status}"
    return int(at or indices[0]), reason


def _be_child(name: str, seed: int, indices: range, sender: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_used() + _CASE_BYTES, -1))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        output = os.open("output", os.O_CREAT | os.O_RDWR)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for index in indices:
            # Sent before reading, so that the parent knows the file if this process dies.
            os.write(sender, f"\n{index}".encode())
            Path(name).write_bytes(case(name, seed, index))
            signal.alarm(_CASE_S)  # no handler: the signal ends the process, which is a failure
            if reason := _read(name):
                os.write(sender, f" {reason}".encode())
                break
    os._exit(0)


def _read(name: str) -> str:
    """Return the reason why reading the file ``name`` is a failure; empty if it loads or is refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            FORMATS[name].read(name)
    except MemoptError as err:
        said_lines = [err.message, *err.hint.split("\n")]  # a message is one line, a hint may be more
        return "" if all(map(str.isprintable, said_lines)) else f"says {said_lines!r}"
    except BaseException as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        return f"{type(err).__name__}: {err} ({where})".replace("\n", " ")[:300]
    unexpected = re.search("unexpected .*Error.*", said.getvalue())
    return unexpected.group() if unexpected else ""


def _used() -> int:
    """Return the bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: which formats, and how many files."""
    parser.add_argument("formats", nargs="*", default=[], choices=[*FORMATS, []], help="all, if none is named")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Run every format that is named, or all, and return the number of failures."""
    failed = 0
    for name in given.formats or FORMATS:
        found = failures(name, given.seed, given.count, Path("fuzz-failures"))
        failed += len(found)
        print(f"{name}: {given.count} files, {len(found)} failures", *found, sep="\n  ", flush=True)
    return failed
