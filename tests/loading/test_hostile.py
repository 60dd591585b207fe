"""Files made to do harm: none runs anything, each ends with its exit code and one clear sentence, and soon."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib.util
import io
import json
import random
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memopt_cli.errors import FileFormatError, MemoptError, UnsafeFileError
from memopt_cli.loading import load_model, read_file, trust
from memopt_cli.loading.description import describe_file
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.safetensors_file import read_safetensors
from memopt_cli.records import InputSpec, ModelSource, Trust
from tests.loading.archives import archive
from tests.loading.hostile import NO_MODEL, REFUSED, Hostile, corpus, holding, payloads

CANARY = "canary"

Memopt = Callable[..., Any]


@functools.cache
def files() -> dict[str, Hostile]:
    """The corpus, made once; the scripts in it write their file while they are made."""
    made = corpus(CANARY)
    Path(CANARY).unlink(missing_ok=True)
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sorted(files()))


IMPORT = """
    import resource, time
    start = time.process_time()
    import torch
    print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture(scope="module")
def importing_pytorch() -> tuple[float, int]:
    """What it costs: CPU seconds, and memory."""
    import transformers.models.bert.modeling_bert  # noqa: F401 a library that a file may name, with its own cost

    command = [sys.executable, "-c", textwrap.dedent(IMPORT)]
    seconds, memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), int(memory)


@pytest.fixture
def costs_little(importing_pytorch: tuple[float, int]) -> Iterator[None]:
    """The test takes no more time than importing PyTorch, about, and no more memory."""
    with contextlib.suppress(OSError):  # where it can be, the peak of the tests before is forgotten
        Path("/proc/self/clear_refs").write_text("5")
    start, before = time.process_time(), most_resident()
    yield
    took, grown = time.process_time() - start, most_resident() - before
    assert took < 1.5 * importing_pytorch[0]
    assert grown < importing_pytorch[1]


def most_resident() -> int:
    """Memory of this process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "costs_little")
def test_no_hostile_model_runs_or_is_loaded(case: str, memopt: Memopt) -> None:
    """Not confined either: a subprocess would hide what runs.  Nor does it cost more than importing PyTorch."""
    refuse(case, memopt)


@pytest.mark.parametrize("name", ["INST, plain", "os.system, zip", "a list of a range", "many lists"])
def test_a_subprocess_refuses_it_in_the_same_words(name: str, memopt: Memopt) -> None:
    refuse(name, memopt)


def refuse(case: str, memopt: Memopt) -> None:
    """The hostile file is, with its exit code and one clear sentence."""
    hostile = files()[case]
    Path("model.pt").write_bytes(hostile.data)
    done = memopt("optimize", "model.pt", "-i", "2x3", "-q")
    assert (done.code, done.changed, done.out) == (hostile.code, set(), "")
    first, *rest = done.err.splitlines()
    assert first.startswith("error: model.pt")
    assert hostile.says in first
    assert rest[0].startswith("hint: ")
    assert all(line.startswith("      The whole command: memopt optimize build.py:build ") for line in rest[1:])
    assert len(rest) <= 2
    assert first.isprintable()
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "costs_little")
def test_inspecting_a_hostile_model_runs_nothing(case: str, memopt: Memopt) -> None:
    Path("model.pt").write_bytes(files()[case].data)
    done = memopt("inspect", "model.pt", "--json")
    assert done.changed == set()
    if done.code == 0:
        found = json.loads(done.out)
        verdicts = {item["verdict"] for item in found["globals"]}
        assert verdicts - {"allowed"} or "--trust-pickle" in "".join(found["notes"]) or case in HARMLESS_TO_READ
    else:
        assert done.code in (NO_MODEL, REFUSED)
        assert done.out == ""


HARMLESS_TO_READ = {
    "a random generator of an older version",
    "a logger of five thousand parts",
    "a lifted module whose child is taken away later",
    "an array of forty dimensions",
    "an array of nothing, far too wide",
    "a text identity",
    "an archive behind a pickle",
    "example inputs that call",
    "a script within a pickle",
    "a text decoded as punycode",
    "settings created of arguments",
    "a property set as a slot",
    "a tensor made wider",
    "an array of nothing",
    *(f"getattr of a class, {form}" for form in ("zip", "legacy", "plain")),
}
"""Nothing that is described imports what is not allowed: what is made of it fails, harmlessly, when it is built."""


@pytest.mark.parametrize("name", ["os.system", "eval", "in a module", "in a hook", "in a state"])
def test_the_payloads_are_live(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(payloads(CANARY)[name], "model.pt")
    assert not Path(CANARY).exists()
    torch.load("model.pt", weights_only=False)
    assert Path(CANARY).exists()


def test_a_yes_does_not_excuse_an_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(files()["os.system, zip"].data)
    with pytest.raises(trust.UntrustedNamesError, match="attack") as refusal:
        load_model(ModelSource(location="model.pt", trust=Trust(globals=("posix.system",))))
    assert refusal.value.requests == ()
    assert not Path(CANARY).exists()


def test_nothing_is_let_through_by_a_package_that_is_too_wide(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(files()["torch.hub, zip"].data)
    trust = Trust(packages=("torch", "os", "builtins", "posix"))
    with pytest.raises(UnsafeFileError, match=r"torch\.hub") as error:
        load_model(ModelSource(location=str(path), trust=trust))
    assert "--allow" not in error.value.hint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sound file of each format."""
    folder, model = tmp_path_factory.mktemp("sound"), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torch.save(model, folder / "zip.pt")
    torch.save(model, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.trace(model, torch.ones(1, 2)), str(folder / "traced.pt"))
    torch.export.save(torch.export.export(model, (torch.ones(1, 2),)), folder / "exported.pt2")
    pytest.importorskip("safetensors.torch").save_file(model.state_dict(), folder / "weights.safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damaged(data: bytes, draws: random.Random) -> Iterator[bytes]:
    """Cut off, with a bit flipped, with bytes overwritten."""
    for _ in range(25):
        yield data[: draws.randrange(len(data))]
        position = draws.randrange(len(data))
        yield data[:position] + bytes([data[position] ^ 1 << draws.randrange(8)]) + data[position + 1 :]
        yield data[:position] + draws.randbytes(8) + data[position + 8 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "traced.pt", "exported.pt2", "weights.safetensors"])
def test_a_damaged_file_is_described_and_loaded_or_refused(name: str, sound: dict[str, bytes], tmp_path: Path) -> None:
    path, refused = tmp_path / name, []
    path.write_bytes(sound[name])
    assert describe_file(read_file(str(path))).tensors
    for broken in damaged(sound[name], random.Random(0)):
        path.write_bytes(broken)
        for use in (lambda: describe_file(read_file(str(path))), lambda: load_model(ModelSource(location=str(path)))):
            try:
                use()
            except (FileFormatError, UnsafeFileError) as err:
                refused.append(err)
    assert refused
    assert not any("\n" in err.message for err in refused)


def arrays(save: Callable[..., None], *values: Any, **named: Any) -> bytes:
    save(buffer := io.BytesIO(), *values, **named)
    return buffer.getvalue()


_ARRAY = arrays(np.save, np.ones(2))
HOSTILE_INPUTS: dict[str, tuple[str, Callable[[], bytes], type[MemoptError], str]] = {
    "object arrays": (
        "x.npz",
        lambda: arrays(np.savez, x=np.array([{"a": 1}], dtype=object)),
        FileFormatError,
        "plain arrays",
    ),
    "a bomb": (
        "x.npz",
        lambda: arrays(np.savez_compressed, x=np.zeros(64 << 20, dtype=np.uint8)),
        UnsafeFileError,
        "unpack to",
    ),
    "a path": ("x.npz", lambda: archive({"../../x.npy": _ARRAY}), UnsafeFileError, "a record named"),
    "no array": ("x.npz", lambda: archive({"x.npy": b"\x80\x02cos\nsystem\n."}), FileFormatError, "plain arrays"),
    "a shape that lies": ("x.npz", lambda: archive({"x.npy": _ARRAY.replace(b"(2,)", b"(9,)")}), FileFormatError, ""),
    "a pickle": ("x.npz", lambda: b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", FileFormatError, "damaged"),
    "a pickle of calls": ("x.pt", lambda: files()["os.system, zip"].data, UnsafeFileError, "posix.system"),
    "a list of a range": ("x.pt", lambda: files()["a list of a range"].data, FileFormatError, "work"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE_INPUTS)
def test_hostile_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, make, error, says = HOSTILE_INPUTS[name]
    Path(file).write_bytes(make())
    with pytest.raises(error, match=says) as caught:
        make_inputs(InputSpec(data_file=file, source="--input-data"), seed=0, device="cpu", dtype=None)
    assert caught.value.hint
    assert "--allow" not in caught.value.hint
    assert not Path(CANARY).exists()


def safetensors(header: Any, data: bytes = bytes(8), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (safetensors({}, b"", length=2**63), "header"),
        (safetensors({}, b"", length=99_999_999), "header"),
        (safetensors({"a": entry(0, 8)}, length=5), "not JSON"),
        (safetensors({"a": entry(0, 8), "b": entry(4, 8)}), "overlap"),
        (safetensors({"a": entry(4, 8)}), "gap"),
        (safetensors({"a": entry(0, 4)}), "end at"),
        (safetensors({"a": entry(0, 16)}), "end at"),
        (safetensors({"a": entry(-8, 8)}), "whole number"),
        (safetensors({"a": entry(0, 8, [3])}), "are not"),
        (safetensors({"a": entry(0, 8, [-2])}), "whole number"),
        (safetensors({"a": entry(0, 8, [2.0])}), "whole number"),
        (safetensors({"a": entry(0, 8, [2**62, 2**62])}), "are not"),
        (safetensors({"a": entry(0, 8, [2**62] * 10_000)}), "sizes"),
        (safetensors({"a": entry(0, 8, [0, 2**62, 2**62])}), "sizes"),
        (safetensors({"a": entry(0, 8, dtype="O")}), "broken"),
        (safetensors({"a": 3}), "broken"),
        (safetensors(b'{"a": 1, "a": 2}'), "twice"),
        (safetensors(b'{"a":' + b"[" * 100_000), "nested deeper"),
        (safetensors([]), "header"),
    ],
)
def test_a_hostile_safetensors_header(data: bytes, says: str) -> None:
    with pytest.raises(FileFormatError, match=says) as error:
        read_safetensors(data, "x.safetensors")
    assert len(error.value.message) < 300


def test_safetensors_are_read_as_the_library_writes_them() -> None:
    library = pytest.importorskip("safetensors.torch")
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16]
    tensors = {f"t{i}": torch.arange(6).view(2, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    found = read_safetensors(library.save(tensors, metadata={"made": "here"}), "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
        assert found[name].shape == tensor.shape


HOSTILE_YAML = {
    "a call": "!!python/object/apply:os.system ['touch canary']",
    "an object": "level: !!python/object:pathlib.Path {}",
    "a name": "level: !!python/name:os.system",
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "depth": "level: " + "[" * 20_000,
    "a huge number": "level: 1" + "0" * 10_000,
    "a huge power": "level: 1e999999999",
    "a base-60 number": "level: " + "1:" * 5000 + "1",
    "a wrong kind": "level: {a: [1]}",
    "a list": "[1, 2]",
    "a key twice": "level: 1\nlevel: 2",
    "a key that is a list": "? [1, 2]\n: 3",
    "no text": "\x00\x01",
    "a binary": "level: !!binary x",
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
@pytest.mark.parametrize("role", ["plan", "config", "inputs"])
def test_hostile_text_files(name: str, role: str, memopt: Memopt) -> None:
    torch.save(nn.Linear(3, 4), "model.pt")
    path = {"plan": "plan.yaml", "config": "memopt.yaml", "inputs": "model.inputs.yaml"}[role]
    Path(path).write_text(HOSTILE_YAML[name])
    command = ["apply", "model.pt", "plan.yaml"] if role == "plan" else ["optimize", "model.pt"]
    done = memopt(*command, "-q")
    assert (done.code, done.changed, done.out) == (2, set(), "")
    assert done.err.startswith("error: ")
    assert path in done.err or name == "a huge power"
    assert "Traceback" not in done.err
    assert len(done.err) < 1000


LOADERS = (
    *("numpy.load", "numpy.lib.npyio.load", "yaml.unsafe_load", "joblib.load", "pandas.read_pickle", "torch.load"),
    *("pip.main", "setuptools.setup", "IPython.start_ipython", "pexpect.spawn", "requests.get", "httpx.get"),
    *("huggingface_hub.snapshot_download", "fsspec.open", "pytest.main", "transformers.utils.hub.cached_file"),
)


@pytest.mark.parametrize("name", LOADERS)
def test_what_runs_files_is_offered_by_no_flag(name: str, memopt: Memopt) -> None:
    module, _, attribute = name.rpartition(".")
    Path("model.pt").write_bytes(holding(f"c{module}\n{attribute}\n(X\x01\x00\x00\x00xtR".encode()))
    done = memopt("optimize", "model.pt", "-i", "2x3", "-q")
    assert (done.code, done.changed) == (REFUSED, set())
    assert "--allow" not in done.err


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "torch.load", "json.loads"])
def test_a_file_beside_the_model_vouches_for_no_module_that_it_hides_behind(name: str, memopt: Memopt) -> None:
    """Python has a module of that name already: the flag would lead nowhere, or to what the file wants to run."""
    module, _, attribute = name.rpartition(".")
    Path(f"{module}.py").write_text(f"class {attribute}: pass\n")
    Path("model.pt").write_bytes(holding(f"c{module}\n{attribute}\n(X\x01\x00\x00\x00xtR".encode()))
    done = memopt("optimize", "model.pt", "-i", "2x3", "-q")
    assert (done.code, done.changed) == (REFUSED, set())
    assert "--code-path" not in done.err
    assert "--allow" not in done.err


@pytest.mark.skipif(importlib.util.find_spec("norse") is not None, reason="norse is installed")
def test_code_in_the_place_of_a_missing_library_is_not_offered_as_that(memopt: Memopt) -> None:
    Path("norse.py").write_text("open('ran', 'w')\n")
    Path("model.pt").write_bytes(holding(b"cnorse\nNet\n)\x81"))
    done = memopt("optimize", "model.pt", "-i", "2x3", "-q")
    assert done.changed == set()
    assert "If the norse in this folder is your own: --code-path .; else pip install norse." in done.err


def test_a_large_file_may_not_take_as_much_work_as_a_small_one_for_each_byte() -> None:
    """It is large because of its weights; opcodes take hundreds of bytes of memory each."""
    small, large = (PickleScan(size=size) for size in (8 << 20, 64 << 20))
    assert large.max_work < 2 * small.max_work
    assert PickleScan(size=1 << 40).max_work == 8_000_000  # of an expert model with 50,000 modules


def test_nothing_is_looked_through_for_garbage_while_a_file_is_judged(memopt: Memopt) -> None:
    """The collector would walk a million stand-ins each time that as many more are made."""
    Path("model.pt").write_bytes(archive({"data.pkl": b"\x80\x02](" + b"]" * 90_000 + b"e."}))
    collected = list[int]()
    gc.callbacks.append(lambda phase, told: collected.append(told["generation"]))
    try:
        with pytest.raises(FileFormatError, match="holds a list, not a model"):
            load_model(ModelSource(location="model.pt"))
        assert len(collected) < 10  # afterwards; there were hundreds
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()


def test_a_script_is_looked_at_once_for_all_names(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    """And parsed once, if it seems to define one of them: that takes Python seconds for a script of a megabyte."""
    script = "".join(f"class Net{number}: pass\n" for number in range(300))
    Path("train.py").write_text(script)
    Path("other.py").write_text("x = []\n" * 1000)
    names = b"".join(b"c__main__\nNet%d\n)R" % number for number in range(300))
    Path("model.pt").write_bytes(holding(b"](" + names + b"e"))
    looked, parsed, read, parse = list[str](), list[bytes](), Path.read_bytes, ast.parse
    monkeypatch.setattr(Path, "read_bytes", lambda path: looked.append(path.name) or read(path))  # type: ignore[func-returns-value]
    monkeypatch.setattr(ast, "parse", lambda source: parsed.append(source) or parse(source))  # type: ignore[func-returns-value]
    with pytest.raises(UnsafeFileError, match="the script that saved the file") as error:
        load_model(ModelSource(location="model.pt"))
    assert error.value.hint.endswith("--code-path train.py")
    assert sorted(looked) == ["other.py", "train.py", "train.py"]
    assert parsed == [script.encode()]


@pytest.mark.parametrize("module", ["images", "images.photo", "images." + "a" * 300, "images/photo", "", ".."])
def test_a_folder_of_data_is_no_code_nor_is_a_name_that_python_has_not(module: str, memopt: Memopt) -> None:
    for folder in ("images", "own"):
        Path(folder).mkdir()
    Path("images/photo.png").touch()
    Path("model.pt").write_bytes(holding(f"c{module}\nNet\n)\x81".encode("latin1")))
    with pytest.raises(FileFormatError, match=r"no package .* is installed"):
        load_model(ModelSource(location="model.pt", trust=Trust(code_paths=("own",))))


def test_a_folder_with_python_in_it_is_code(memopt: Memopt) -> None:
    Path("mine/deep").mkdir(parents=True)
    Path("mine/deep/net.py").touch()
    Path("model.pt").write_bytes(holding(b"cmine.deep.net\nNet\n)\x81"))
    with pytest.raises(UnsafeFileError, match="code in this folder") as error:
        load_model(ModelSource(location="model.pt"))
    assert "--code-path ." in error.value.hint


def test_a_hint_names_a_few_of_many_attacks(memopt: Memopt) -> None:
    Path("model.pt").write_bytes(b"(" + b"".join(b"cos\nsystem%d\n" % number for number in range(3000)) + b"l.")
    with pytest.raises(UnsafeFileError, match="and 2995 more") as error:
        load_model(ModelSource(location="model.pt"))
    assert len(error.value.hint) < 300


def test_a_hint_has_no_more_flags_than_people_read(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_defined_as", lambda wanted: "def")
    names = b"".join(b"csympy.core.numbers\nmake_%d\n)R" % number for number in range(500))
    Path("model.pt").write_bytes(holding(b"](" + names + b"e"))
    with pytest.raises(UnsafeFileError, match=r"and 495 more") as error:
        load_model(ModelSource(location="model.pt"))
    assert "--allow" not in error.value.hint
