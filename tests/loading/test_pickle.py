"""Full-module pickles: what loads, what is refused, and that nothing refused ever runs."""

from __future__ import annotations

import bz2
import collections
import datetime
import decimal
import functools
import gzip
import importlib
import io
import json
import logging
import lzma
import os
import pickle
import re
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from memopt_cli.errors import FileFormatError, MemoptError, UnsafeFileError, UsageError
from memopt_cli.loading import load, load_model
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.nodes import Built, Global
from memopt_cli.loading.pickles.scan import scan_pickle
from memopt_cli.loading.trust import UntrustedNamesError
from memopt_cli.loading.user_code import ClassNotFoundError
from memopt_cli.records import ModelSource, Trust
from memopt_cli.runtime import GCContainer, SegmentConfig, TCGCContainer, install_segment
from tests.loading.archives import Call, archive, saved, unzipped


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.LSTM(4, 2))


def source(path: Path, **trust: Any) -> ModelSource:
    return ModelSource(location=str(path), trust=Trust(**trust))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_loads_a_saved_module(tmp_path: Path, zipped: bool) -> None:
    model, path = small_model(), tmp_path / "model.pt"
    torch.save(model, path, _use_new_zipfile_serialization=zipped)
    loaded = load_model(source(path))
    assert loaded.format == "pickle"
    assert loaded.sha256 is not None
    assert len(loaded.sha256) == 64
    assert [type(m) for m in loaded.module.modules()] == [type(m) for m in model.modules()]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor)


def test_tensor_functions_kept_as_attributes_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.act, model.other, model.third = F.relu, torch.tanh, F.gelu  # type: ignore[assignment]
    torch.save(model, tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt")
    assert loaded.act is F.relu
    assert loaded.other is torch.tanh  # type: ignore[comparison-overlap]
    assert loaded.third is F.gelu


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [
        (frozenset({1, frozenset({2})}), frozenset(), {frozenset({3}): 4}),
        ({1, "a"}, set(), [1, [2.5]], {"a": {"b": ()}}, (1, 2, 3, 4)),
        (b"", b"\xff", bytearray(b"\xff"), "text", "\u00e9\u2028", "x" * 300),
        (0, -1, 255, 65536, -(2**31), 2**63, 2**200, 1.5, float("inf"), True, None, 1j, ...),
        (range(1, 9, 2), slice(None, 3), collections.deque([1], 3), collections.Counter("aab"), type(None)),
        (collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), types.SimpleNamespace(a=1)),
        (Path("a/b"), decimal.Decimal("0.10"), re.compile("a+", re.IGNORECASE), logging.getLogger("a.b")),
        (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), datetime.date(2026, 1, 2), datetime.timedelta(3, 4, 5)),
    ],
    ids=lambda value: type(value[0]).__name__,
)
def test_plain_values_are_kept_whatever_the_protocol(tmp_path: Path, value: tuple[Any, ...], protocol: int) -> None:
    model = nn.Linear(1, 1)
    model.kept = value  # type: ignore[assignment]
    (tmp_path / "model.pt").write_bytes(pickle.dumps(model, protocol))
    kept = load(tmp_path / "model.pt").kept
    assert kept == value  # type: ignore[comparison-overlap]
    assert list(map(type, kept)) == list(map(type, value))  # type: ignore[call-overload]


def test_neurons_that_keep_their_own_methods_load(tmp_path: Path) -> None:
    """And a surrogate gradient."""
    snntorch, surrogate = pytest.importorskip("snntorch"), pytest.importorskip("snntorch.surrogate")
    gradient = surrogate.StraightThroughEstimator.apply
    model = nn.Sequential(nn.Linear(3, 4), snntorch.Leaky(beta=0.9, init_hidden=True, spike_grad=gradient))
    torch.save(model, tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt")
    assert vars(loaded.get_submodule("1"))["spike_grad"] == gradient
    assert torch.equal(loaded(torch.ones(2, 3)), model(torch.ones(2, 3)))


def calling(name: str, path: Path) -> nn.Module:
    """Its file puts a method of a module on an object, where reading the file would call it."""
    module = nn.ReLU()
    method = Call(functools.partial, Call(getattr, nn.Linear(2, 2), name), str(path))
    vars(module).update({"__setstate__": method, "extra_repr": method})
    return module


@pytest.mark.parametrize("name", ["weight", "__class__", "__dict__", "nothing", "load_state_dict", "_base_sub"])
def test_of_a_module_getattr_reaches_nothing(tmp_path: Path, name: str) -> None:
    for value in (Call(getattr, nn.Linear(2, 2), name), calling(name, tmp_path)):
        torch.save(value, tmp_path / "model.pt")
        with pytest.raises(UnsafeFileError, match=f"'{name}' of Linear"):
            load(tmp_path / "model.pt")


def test_a_model_that_was_scripted_before_it_was_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LSTM(2, 2))
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        torch.jit.script(model)
    assert vars(model[2])["__overloads__"]["forward"][0] == "forward__0"
    torch.save(model, tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt")
    assert [vars(part)["__overloads__"] for part in loaded.modules()] == [
        vars(part)["__overloads__"] for part in model.modules()
    ]


@pytest.mark.parametrize("overloads", [{"forward": nn.ReLU()}, {"forward": [nn.ReLU()]}, {"a.b": ["f"]}, [nn.ReLU()]])
def test_overloads_are_names_alone(overloads: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    vars(model)["__overloads__"] = overloads
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(UnsafeFileError, match="overload"):
        load(tmp_path / "model.pt")


@pytest.fixture
def of_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file whose class is in ``code/own_net.py``, which imports a sibling; one of its layers is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for path, text in {"code/own_net.py": "from beside import Net", "beside/beside.py": OWN_NET}.items():
        Path(path).parent.mkdir()
        Path(path).write_text(text)
    with monkeypatch.context() as patch:
        patch.syspath_prepend("beside")
        patch.syspath_prepend("code")
        net = importlib.import_module("own_net").Net(nn.ReLU())
        vars(net[0])["__odd__"] = 1
        torch.save(net, "own.pt")
    for name in ("own_net", "beside"):
        sys.modules.pop(name)
    yield Path("own.pt")
    for name in ("own_net", "beside"):
        sys.modules.pop(name, None)


OWN_NET = """
from torch import nn
class Net(nn.Sequential): ...
Net.__module__ = "own_net"
"""


def test_one_refusal_names_all_flags_that_an_unchecked_file_needs(of_own_code: Path) -> None:
    with pytest.raises(UnsafeFileError, match="__odd__ among its attributes") as error:
        load_model(source(of_own_code, code_paths=("code", "beside")))
    assert "`--code-path code --code-path beside --trust-pickle` loads it without" in error.value.hint


@pytest.mark.parametrize(
    ("trust", "kind", "missing"),
    [({"code_paths": ("code",)}, UsageError, "beside"), ({"pickle": True}, FileFormatError, "own_net")],
)
def test_a_module_that_is_missing_is_named_with_the_flag(
    trust: dict[str, Any], kind: type[MemoptError], missing: str, of_own_code: Path
) -> None:
    with pytest.raises(kind, match="ModuleNotFoundError") as error:
        load_model(source(of_own_code, **trust))
    assert error.value.hint.startswith(f"Add the folder that has {missing}: `--code-path FOLDER`")


def test_a_module_beside_a_script_that_was_named_needs_the_folder(of_own_code: Path) -> None:
    Path("code/train.py").touch()
    with pytest.raises(UnsafeFileError, match=r"own_net\.Net is defined in another file of the folder") as error:
        load_model(source(of_own_code, code_paths=("code/train.py",)))
    assert error.value.hint.endswith("--code-path code")


def test_a_module_renamed_in_the_code_that_was_named_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_kws").mkdir()
    for name in ("__init__", "layers", "blocks"):
        (tmp_path / "own_kws" / f"{name}.py").touch()
    (tmp_path / "own_kws" / "blocks.py").write_text("from torch import nn\nclass Block(nn.Sequential): ...\n")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        torch.save(importlib.import_module("own_kws.blocks").Block(nn.ReLU()), "own.pt")
    for name in ("own_kws.blocks", "own_kws"):
        sys.modules.pop(name)
    (tmp_path / "own_kws" / "blocks.py").unlink()
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ClassNotFoundError, match=r"`--code-path \.` has no module own_kws\.blocks") as error:
        load_model(source(Path("own.pt"), code_paths=(".",)))
    assert error.value.hint.startswith("own_kws has no module blocks; it has layers. If the class was moved")
    with pytest.raises(UnsafeFileError) as unnamed:
        load_model(source(Path("own.pt"), code_paths=()))
    assert "own_kws" in unnamed.value.message


def test_a_forward_in_the_place_of_another_method_is_refused(tmp_path: Path) -> None:
    torch.save(calling("forward", tmp_path), tmp_path / "model.pt")
    with pytest.raises(UnsafeFileError, match="__setstate__ among its attributes"):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["fire", "__class__", "state_function"])
def test_of_a_neuron_getattr_reaches_only_what_it_keeps(tmp_path: Path, name: str) -> None:
    neuron = pytest.importorskip("snntorch").Leaky(0.9, spike_grad=torch.relu)
    torch.save(Call(getattr, neuron, name), tmp_path / "model.pt")
    with pytest.raises(UnsafeFileError, match=f"'{name}' of Leaky"):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize(("chunks", "kind"), [(1, GCContainer), (2, TCGCContainer)])
def test_a_model_with_segments_loads(tmp_path: Path, chunks: int, kind: type) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    install_segment(model[0], SegmentConfig(chunks=chunks))
    torch.save(model, tmp_path / "model.memopt.pt")
    loaded = load(tmp_path / "model.memopt.pt")
    assert isinstance(loaded.get_submodule("0"), kind)
    data = torch.randn(4, 3)
    assert torch.equal(loaded(data), model(data))
    assert type(loaded.get_submodule("1")) is nn.Linear


def test_settings_of_a_rotary_embedding_are_loaded(tmp_path: Path) -> None:
    """A set of the object's own takes the place of one that its class has."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.PhiModel(transformers.PhiConfig(**sizes, vocab_size=11))
    torch.save(model, tmp_path / "phi.pt")
    ignored = load(tmp_path / "phi.pt").config.ignore_keys_at_rope_validation
    assert ignored == model.config.ignore_keys_at_rope_validation != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("GPT2LMHeadModel", {"use_cache": True}, True),
        ("GPT2LMHeadModel", {"use_cache": False}, False),
        (
            "GPT2ForSequenceClassification",
            {"use_cache": True},
            True,
        ),  # it generates nothing, and fills one all the same
        ("BertForMaskedLM", {"use_cache": True}, False),  # it encodes, and fills none
        ("BertLMHeadModel", {"use_cache": True, "is_decoder": True}, True),
    ],
)
def test_a_cache_that_training_fills_is_named(tmp_path: Path, kind: str, settings: dict[str, bool], told: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11, "pad_token_id": 0}
    model = getattr(transformers, kind)
    built = model(model.config_class(**sizes, **settings)).train()
    assert (getattr(built(torch.ones(1, 3, dtype=torch.long)), "past_key_values", None) is not None) is told
    torch.save(built, tmp_path / "model.pt")
    notes = load_model(ModelSource(location=str(tmp_path / "model.pt"))).notes
    said = [note for note in notes if "config.use_cache = False" in note and "past_key_values" in note]
    assert bool(said) is told
    if told:
        (note,) = said
        takers = note.partition("with that argument (")[2].partition(")")[0].split(", ")
        assert kind in takers
        assert any(name.endswith("Attention") for name in takers)
        assert not [name for name in takers if "MLP" in name or name in ("Linear", "Dropout", "LayerNorm", "Conv1D")]
        assert '"use_cache": false in config.json' in note


def test_a_global_called_by_way_of_the_memo_is_seen() -> None:
    code = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x940" + b"0h\x00h\x01\x93\x940h\x02\x8c\x04true\x85R."
    scan = PickleScan(size=len(code))
    root = scan_pickle(io.BytesIO(code), scan).root
    assert isinstance(root, Built)
    assert (root.how, root.callee) == ("called", Global("posix", "system"))


def test_names_computed_while_reading_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x04K\x01K\x02\x93.")
    with pytest.raises(UnsafeFileError, match="cannot be checked"):
        load_model(source(tmp_path / "model.pt"))


def test_our_scan_agrees_with_pytorchs() -> None:
    data, scan = saved(small_model()), PickleScan(size=0)
    theirs = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    scan_pickle(io.BytesIO(unzipped(data)["data.pkl"]), scan)
    assert set(theirs) <= {str(wanted) for wanted in scan.wanted}


PACKAGE = """
    from pathlib import Path
    from torch import nn

    Path(__file__).with_name("imported").touch()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.settings = Settings()

    class Settings:
        pass
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of a package that memopt does not know; the package is installed, and not imported yet."""
    package = tmp_path / "foreign_models"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = __import__("foreign_models").Net()
    torch.save(model, tmp_path / "model.pt")
    del sys.modules["foreign_models"]
    (package / "imported").unlink()
    yield tmp_path / "model.pt"
    sys.modules.pop("foreign_models", None)


def test_an_unknown_package_is_refused_by_name_and_not_imported(foreign: Path) -> None:
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(foreign))
    assert "foreign_models.Net" in error.value.message
    assert "--allow-package foreign_models" in error.value.hint
    assert not (foreign.parent / "foreign_models" / "imported").exists()


def test_a_vouched_package_loads(foreign: Path) -> None:
    assert type(load_model(source(foreign, packages=("foreign_models",))).module).__name__ == "Net"


def test_a_vouched_library_gives_module_classes_and_nothing_else(foreign: Path) -> None:
    with pytest.raises(UnsafeFileError, match="Settings") as error:
        load_model(source(foreign, libraries=("foreign_models",)))
    assert "foreign_models.Net" not in error.value.message
    trust = Trust(libraries=("foreign_models",), globals=("foreign_models.Settings",))
    assert type(load(foreign, trust=trust)).__name__ == "Net"


@pytest.mark.parametrize("library", ["sympy", "builtins", "torch", ""])
def test_a_vouched_library_s_constructors_are_not_called(library: str, tmp_path: Path) -> None:
    """Those of SymPy, which comes with PyTorch, run text."""
    sympy = pytest.importorskip("sympy")
    sentinel, path = tmp_path / "ran", tmp_path / "model.pt"
    torch.save(Call(sympy.sin, f"open({str(sentinel)!r}, 'w').close()"), path)
    sentinel.unlink(missing_ok=True)
    with pytest.raises(UnsafeFileError, match="sin"):
        load_model(source(path, libraries=(library,)))
    assert not sentinel.exists()


def test_the_question_is_for_all_names_at_once_and_all_are_needed(foreign: Path) -> None:
    with pytest.raises(UntrustedNamesError) as refusal:
        load_model(source(foreign))
    requests = sorted((request.name, request.package) for request in refusal.value.requests)
    assert requests == [("foreign_models.Net", "foreign_models"), ("foreign_models.Settings", "foreign_models")]
    assert load(foreign, trust=Trust(globals=("foreign_models.Net", "foreign_models.Settings")))
    with pytest.raises(UnsafeFileError, match="Settings") as error:
        load(foreign, trust=Trust(globals=("foreign_models.Net",)))
    assert "foreign_models.Net" not in error.value.message


def test_a_vouched_package_does_not_vouch_for_what_it_imports(foreign: Path) -> None:
    init = foreign.parent / "foreign_models" / "__init__.py"
    init.write_text(init.read_text() + "\nimport subprocess\n")
    bad = foreign.parent / "bad.pt"
    bad.write_bytes(b"\x80\x02cforeign_models\nsubprocess.call\n(lX\x04\x00\x00\x00true" + b"a\x85R.")
    with pytest.raises(UnsafeFileError, match="an attribute, not a class or function of a module"):
        load_model(source(bad, packages=("foreign_models",)))


@pytest.mark.parametrize(
    "imported", ["from os import system as run", "from torch import load as run", "import runpy as run"]
)
def test_no_hint_offers_another_name_of_a_function_of_python_s(foreign: Path, imported: str) -> None:
    """A first one may vouch for the package, whose own functions would do it no harm."""
    init = foreign.parent / "foreign_models" / "__init__.py"
    init.write_text(f"{init.read_text()}\n{imported}\n")
    path = foreign.parent / "called.pt"
    path.write_bytes(archive({"data.pkl": b"\x80\x02cforeign_models\nrun\nX\x04\x00\x00\x00true\x85R."}))
    for trust in (Trust(), Trust(packages=("foreign_models",)), Trust(libraries=("foreign_models",))):
        with pytest.raises(UnsafeFileError) as error:
            load_model(ModelSource(location=str(path), trust=trust))
        assert "--allow-global" not in error.value.hint


def test_a_vouched_package_does_not_vouch_for_calls_of_its_functions(foreign: Path) -> None:
    init = foreign.parent / "foreign_models" / "__init__.py"
    init.write_text(init.read_text() + "\ndef run(text):\n    return Net()\n")
    path = foreign.parent / "called.pt"
    path.write_bytes(archive({"data.pkl": b"\x80\x02cforeign_models\nrun\nX\x04\x00\x00\x00true\x85R."}))
    with pytest.raises(UnsafeFileError, match="called with arguments from the file") as error:
        load_model(source(path, packages=("foreign_models",)))
    assert error.value.hint.endswith("--allow-global foreign_models.run")
    trust = {"packages": ("foreign_models",), "globals": ("foreign_models.run",)}
    assert type(load_model(source(path, **trust)).module).__name__ == "Net"


@pytest.mark.parametrize("name", ["operator.itemgetter", "torch.compile", "memopt_cli.text.units.parse_bytes"])
def test_no_hint_suggests_a_part_of_python_or_pytorch(tmp_path: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    path = tmp_path / "model.pt"
    path.write_bytes(archive({"data.pkl": f"c{module}\n{function}\n)R.".encode()}))
    with pytest.raises(UnsafeFileError, match=name) as error:
        load_model(source(path, packages=(module.partition(".")[0],)))
    assert "--allow" not in error.value.hint
    assert "attack" not in error.value.hint


def test_a_generator_of_numpy_loads_with_the_first_hint(tmp_path: Path) -> None:
    """One of its functions is in a compiled module, which has no source to look at."""
    path, model = tmp_path / "drawing.pt", nn.Linear(2, 2)
    model.rng = np.random.default_rng(3)
    torch.save(model, path)
    with pytest.raises(UnsafeFileError) as error:
        load(path)
    expression = error.value.hint.partition("load(path, trust=")[2].removesuffix(")")
    loaded = load(path, trust=eval(expression))
    assert loaded.rng.random() == model.rng.random()


def test_in_python_the_hint_is_python(foreign: Path) -> None:
    with pytest.raises(UnsafeFileError) as error:
        load(foreign, trust=Trust(globals=("foreign_models.Net",)))
    expression = error.value.hint.partition("load(path, trust=")[2].removesuffix(")")
    assert "--" not in error.value.hint
    assert load(foreign, trust=eval(expression))


def test_trust_pickle_loads_anything_and_says_so(foreign: Path) -> None:
    loaded = load_model(source(foreign, pickle=True))
    assert type(loaded.module).__name__ == "Net"
    assert any("--trust-pickle" in note for note in loaded.notes)


def test_what_a_package_lacks_is_what_is_to_be_installed(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = foreign.parent / "foreign_models" / "__init__.py"
    init.write_text("import sklearn\n")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(FileFormatError, match=r"foreign_models\.Net") as error:
        load_model(source(foreign, packages=("foreign_models",)))
    assert "pip install scikit-learn" in error.value.hint


def test_a_missing_package_is_named(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(foreign.parent / "elsewhere"))
    sys.path.remove(str(foreign.parent))
    with pytest.raises(FileFormatError, match="foreign_models") as error:
        load_model(source(foreign))
    assert error.value.exit_code == 3
    assert "--code-path" in error.value.hint


SCRIPT = """
    import torch
    from pathlib import Path
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    class Plain:
        pass

    if __name__ == "__main__":
        Path(__file__).with_name("trained").touch()
        torch.save(Net(), "model.pt")
        odd = Net()
        odd.plain = Plain()
        torch.save(odd, "odd.pt")
        torch.save(Net(), "legacy.pt", _use_new_zipfile_serialization=False)
"""

USE = """
    import os, sys, torch
    from memopt_cli.loading import load, load_model
    from memopt_cli.records import ModelSource, Trust

    def use(name, saved, pickle):
        trust = Trust(code_paths=("train.py",), pickle=pickle)
        model = load_model(ModelSource(location=name, trust=trust)).module
        torch.save(model, saved)
        again = load(saved, trust=trust)
        print(saved, type(again).__module__, type(again).__name__, type(again) is type(model), flush=True)
        again(torch.ones(1, 2))

    for given in sys.argv[1:]:
        name, _, way = given.partition("+")
        if os.fork() == 0:  # what one has found is unknown to the others
            use(name, f"again-{given}", way == "pickle")
            os._exit(0)
        os.wait()
    """
IN_THE_SCRIPT = """
    import runpy, sys, torch

    sys.modules["__main__"].Net = runpy.run_path("train.py")["Net"]
    for name in sys.argv[1:]:
        torch.load(name, weights_only=False)
"""
USED = ("model.pt", "legacy.pt", "model.pt+pickle")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = run(folder, "train.py")
    assert done.returncode == 0, done.stderr
    (folder / "trained").unlink()
    return folder


@pytest.fixture(scope="module")
def used(trained: Path) -> dict[str, list[str]]:
    """The file that was saved again -> what its class is; by one process for all files."""
    (trained / "use.py").write_text(textwrap.dedent(USE))
    done = run(trained, "use.py", *USED, "odd.pt")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (trained / "trained").exists()
    return {name: told for name, *told in map(str.split, done.stdout.splitlines())}


def test_what_was_saved_again_loads_where_the_original_did(trained: Path, used: dict[str, list[str]]) -> None:
    """In the script itself."""
    done = run(trained, "-c", textwrap.dedent(IN_THE_SCRIPT), *(f"again-{name}" for name in USED))
    assert done.returncode == 0, done.stderr


def test_a_class_of_a_notebook_needs_its_export(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source_lines = ["import torch\n", "%matplotlib inline\n", "class Net(torch.nn.Module):\n", "    pass\n"]
    notebook = {"cells": [{"cell_type": "code", "source": source_lines}], "nbformat": 4}
    Path("my train.ipynb").write_text(json.dumps(notebook, indent=1))
    exported = (
        "was defined in my train.ipynb, a notebook: export it with jupyter nbconvert --to script 'my train.ipynb'"
    )
    with pytest.raises(UnsafeFileError, match=exported) as error:
        load_model(source(trained / "model.pt"))
    assert error.value.hint.endswith("--code-path 'my train.py'")
    with pytest.raises(UsageError, match="export it with jupyter nbconvert"):
        load_model(source(trained / "model.pt", code_paths=("my train.ipynb",)))
    Path("train.py").write_text("class Net: ...\n")
    with pytest.raises(UnsafeFileError, match="the script that saved the file") as error:
        load_model(source(trained / "model.pt"))
    assert error.value.hint.endswith("--code-path train.py")


def test_a_class_in_a_text_is_no_definition(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'EXAMPLE = """\nclass Net(nn.Module):\n    pass\n"""\n'
    cell = {"cell_type": "code", "source": text.splitlines(keepends=True)}
    told = {"cell_type": "markdown", "source": ["class Net: ...\n"]}
    Path("notes.ipynb").write_text(json.dumps({"cells": [cell, told], "nbformat": 4}, indent=1))
    Path("a_text.py").write_text(f"{text}def make():\n    class Net: ...\n")
    Path("broken.py").write_text("class Net: ...\nprint 1\n")
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(trained / "model.pt"))
    assert error.value.hint.endswith("--code-path YOUR_SCRIPT.py")
    Path("real.py").write_text("try:\n    import timm\nexcept ImportError:\n    class Net: ...\n")
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(trained / "model.pt"))
    assert error.value.hint.endswith("--code-path real.py")


def test_the_script_that_defines_every_missing_class_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unrelated script that also defines one of them leaves no doubt; a script of some classes is no answer."""
    monkeypatch.chdir(tmp_path)
    saved = two_classes_of_main(tmp_path, monkeypatch)
    Path("net.py").write_text("class Block: ...\nclass Net: ...\n")
    Path("other.py").write_text("class Block: ...\n")
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(saved))
    assert error.value.hint.endswith("add: --code-path net.py")
    Path("net.py").write_text("class Net: ...\n")
    Path("another.py").write_text("class Block: ...\n")
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(saved))
    assert error.value.hint.endswith("add: --code-path YOUR_SCRIPT.py")
    Path("another.py").unlink()
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(saved))
    assert error.value.hint.endswith("add: --code-path other.py --code-path net.py")


def two_classes_of_main(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a ``Net`` of a ``Block``, both classes of a script that is gone."""
    main = sys.modules["__main__"]
    for name in ("Net", "Block"):
        kind = type(name, (nn.Sequential,), {"__module__": "__main__"})
        monkeypatch.setattr(main, name, kind, raising=False)
    torch.save(main.Net(main.Block(nn.Linear(2, 2))), folder / "two.pt")
    for name in ("Net", "Block"):
        monkeypatch.delattr(main, name)
    return folder / "two.pt"


@pytest.mark.parametrize("trust", [{}, {"globals": ("__main__.Net",)}, {"packages": ("__main__",)}])
def test_a_class_of_the_training_script_needs_the_script(trust: dict[str, Any], trained: Path) -> None:
    with pytest.raises(
        UntrustedNamesError, match=r"__main__\.Net was defined in the script or session that saved the file"
    ) as error:
        load_model(source(trained / "model.pt", **trust))
    assert "--code-path YOUR_SCRIPT.py" in error.value.hint
    assert error.value.requests == ()  # a yes cannot find the script
    with pytest.raises(UnsafeFileError) as refusal:
        load(trained / "model.pt", trust=Trust(**trust))
    assert "code_paths=('YOUR_SCRIPT.py',)" in refusal.value.hint
    assert "define its classes and build the model here, load its weights" in refusal.value.hint


def test_a_class_of_this_session_is_trusted_by_its_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = type("Net", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", net, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(UnsafeFileError, match="was defined in a session; this session defines it too") as refusal:
        load(trained / "model.pt")
    assert refusal.value.hint.endswith("trust=Trust(globals=('__main__.Net',)))")
    assert type(load(trained / "model.pt", trust=Trust(globals=("__main__.Net",)))) is net


def test_what_a_session_only_imports_is_not_its_class(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Net", nn.Linear, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(UnsafeFileError, match="script or session"):
        load(trained / "model.pt", trust=Trust(globals=("__main__.Net",)))


SESSION = """
    import sys, torch, memopt_cli
    from torch import nn

    class Net(nn.Sequential):
        pass

    def helper():
        pass

    mine, mine_too = Net, helper
    torch.save(Net(nn.Linear(2, 2)), sys.argv[1])
    torch.save(Net(nn.Linear(2, 2)), f"{sys.argv[1]}.legacy", _use_new_zipfile_serialization=False)

    def told(name=sys.argv[1], **trust):
        try:
            return str(type(memopt_cli.load(name, trust=memopt_cli.Trust(**trust))) is mine)
        except memopt_cli.MemoptError as error:
            return f"{error.message} | {error.hint}"

    print(told())
    for name in (sys.argv[1], f"{sys.argv[1]}.legacy"):
        for pickle in (False, True):
            print(told(name, code_paths=("train.py",), pickle=pickle))
    print(told(globals=("__main__.Net",), code_paths=("train.py",)))
    del Net
    print(told(code_paths=("train.py",)), Net is not mine)
    print(told(code_paths=("train.py",)), helper is mine_too)
"""


def test_a_class_of_this_session_is_never_replaced(trained: Path, tmp_path: Path) -> None:
    script = (trained / "train.py").read_text()
    (tmp_path / "train.py").write_text(f"def helper(): ...\n{script}")
    done = run(tmp_path, "-c", textwrap.dedent(SESSION), "mine.pt")
    assert done.returncode == 0, done.stderr
    hinted, *refused, named, first, second = done.stdout.splitlines()
    assert hinted.endswith("load(path, trust=Trust(globals=('__main__.Net',)))")
    assert len(refused) == 4
    for told in refused:
        assert told.startswith(
            "this session has one Net, and train.py defines another | To use this session's Net, add "
        )
    assert named == "True"
    assert (first, second) == ("False True", "False True")


TWO_SCRIPTS = """
    import memopt_cli

    def told(name, *scripts, pickle=False):
        trust = memopt_cli.Trust(code_paths=scripts, pickle=pickle)
        try:
            return str(memopt_cli.load(name, trust=trust).written_by)
        except memopt_cli.MemoptError as error:
            return f"{error.message} | {error.hint}"

    for pickle in (False, True):
        print(told("one.pt", "one.py", "two.py", pickle=pickle))
        print(told("one.pt", "two.py", "one.py", pickle=pickle))
        print(told("one.pt", "one.py", pickle=pickle))
        print(told("two.pt", "two.py", pickle=pickle))
        print(told("one.pt", "one.py", "same.py", pickle=pickle))
"""


def test_of_two_scripts_with_one_class_name_neither_is_taken_for_the_other(tmp_path: Path) -> None:
    """The class of the script that was named first was taken, whichever had saved the file."""
    for name in ("one", "two"):
        code = f"class Net(nn.Linear):\n    written_by = '{name}'\n"
        saving = f"if __name__ == '__main__':\n    torch.save(Net(2, 2), '{name}.pt')\n"
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{code}{saving}")
        assert run(tmp_path, f"{name}.py").returncode == 0
    (tmp_path / "same.py").write_text("from one import Net\n")
    done = run(tmp_path, "-c", textwrap.dedent(TWO_SCRIPTS))
    assert done.returncode == 0, done.stderr
    hint = "Name only the script that saved the file."
    told = [
        f"one.py defines one Net, and two.py another | {hint}",
        f"two.py defines one Net, and one.py another | {hint}",
    ]
    assert done.stdout.splitlines() == 2 * [*told, "one", "two", "one"]


@pytest.mark.parametrize("name", [*USED, "odd.pt"])
def test_classes_of_the_training_script_are_found_and_saved_again(name: str, used: dict[str, list[str]]) -> None:
    assert used[f"again-{name}"] == ["__main__", "Net", "True"]


def test_a_script_without_the_class_is_named(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "without_net.py").write_text("x = 1\n")
    with pytest.raises(FileFormatError, match=r"without_net\.py defines no Net"):
        load_model(source(trained / "model.pt", code_paths=(str(tmp_path / "without_net.py"),)))


def test_a_code_path_folder(foreign: Path) -> None:
    sys.path.remove(str(foreign.parent))
    assert type(load_model(source(foreign, code_paths=(str(foreign.parent),))).module).__name__ == "Net"


def test_a_class_that_was_renamed_is_looked_for_in_its_file(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sys.path.remove(str(foreign.parent))
    Path("code").mkdir()
    Path("code/foreign_models.py").write_text("from torch import nn\nclass Renamed(nn.Module): ...\n")
    monkeypatch.delitem(sys.modules, "foreign_models", raising=False)
    with pytest.raises(FileFormatError, match="code defines no Net") as error:
        load_model(source(foreign, code_paths=("code",)))
    assert "without it: code/foreign_models.py:Renamed `--weights" in error.value.hint


def test_names_that_are_refused_for_one_reason_have_it_once(tmp_path: Path) -> None:
    script = "import torch\nclass A(torch.nn.Linear): ...\nclass B(A): ...\n"
    (tmp_path / "save.py").write_text(f"{script}torch.save(torch.nn.Sequential(A(2, 2), B(2, 2)), 'two.pt')")
    assert run(tmp_path, "save.py").returncode == 0
    with pytest.raises(UnsafeFileError) as error:
        load_model(source(tmp_path / "two.pt"))
    assert error.value.message.count("was defined in the script or session") == 1
    assert error.value.message.endswith("(as for __main__.B)")


def test_a_missing_folder_of_code_is_named_as_trust_in_python(foreign: Path) -> None:
    sys.path.remove(str(foreign.parent))
    with pytest.raises(FileFormatError) as error:
        load(foreign, trust=Trust(packages=("foreign_models",)))
    assert 'name the folder that holds it: trust=memopt_cli.Trust(code_paths=("FOLDER",));' in error.value.hint


def test_a_code_path_that_does_not_exist(foreign: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.py") as refusal:
        load(foreign, trust=Trust(code_paths=("nowhere.py",)))
    assert "--code-path" not in str(refusal.value)


def test_weights_alone_are_loaded_into_a_model_that_the_script_builds(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(FileFormatError, match="holds 2 tensors but no model") as caught:
        load(tmp_path / "weights.pt")
    assert caught.value.hint == "Build the model, and fill it: model.load_state_dict(weights)."


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_model(source(tmp_path / "missing.pt"))
    with pytest.raises(UsageError, match="is a folder"):
        load_model(source(tmp_path))
    with pytest.raises(UsageError, match="cannot be read"):
        load_model(ModelSource(location="a\0b"))


def bad_files() -> dict[str, bytes]:
    zipped, old = saved(small_model()), saved(small_model(), _use_new_zipfile_serialization=False)
    return {
        "empty": b"",
        "random": bytes(range(256)) * 8,
        "text": b"hello world\n",
        "truncated": zipped[: len(zipped) // 2],
        "truncated legacy": old[: len(old) // 2],
        "truncated legacy pickle": old[:300],
        "state dict": saved(small_model().state_dict()),
        "something else": saved(["text"]),
        "plain pickle": pickle.dumps({"a": 1}),
    }


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_a_file_that_is_compressed_says_how(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    (tmp_path / "model.pt").write_bytes(pack(pickle.dumps(small_model())))
    with pytest.raises(FileFormatError, match=f"compressed as a whole \\({name}\\)") as error:
        load_model(source(tmp_path / "model.pt"))
    assert error.value.hint == f"Unpack it first: {name} -d."


@pytest.mark.slow
@pytest.mark.parametrize("case", bad_files())
def test_files_that_are_no_models(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.pt").write_bytes(bad_files()[case])
    with pytest.raises(FileFormatError, match=r"model\.pt") as error:
        load_model(source(tmp_path / "model.pt"))
    assert error.value.exit_code == 3
    assert "\n" not in error.value.message
    assert error.value.message.endswith("it is truncated, as after an interrupted save or download") == (
        "truncated" in case
    )


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize(
    ("wrap", "key", "place", "others"),
    [
        (lambda model: {"model": model}, None, "model", ""),
        (lambda model: {"model": model, "epoch": torch.tensor(3)}, None, "model", "'epoch'"),
        (lambda model: (1, [model]), None, "1.0", "'0'"),
        (lambda model: {"a": {"net": model, "ema": nn.Tanh()}, "lr": 1}, "a.net", "a.net", "'lr', 'a.ema'"),
        (lambda model: {"a": {"net": model, "lr": 1}, "b": nn.Tanh()}, "a", "a.net", "'b', 'a.lr'"),
        (lambda model: [model, *range(20)], None, "0", "'1', '2', '3', '4', '5', '6', '7', '8', …"),
    ],
)
def test_a_model_in_a_container_is_taken_and_the_rest_named(
    tmp_path: Path, wrap: Any, key: str | None, place: str, others: str, unchecked: bool
) -> None:
    torch.save(wrap(small_model()), tmp_path / "wrapped.pt")
    loaded = load_model(replace(source(tmp_path / "wrapped.pt", pickle=unchecked), key=key))
    assert isinstance(loaded.module, nn.Sequential)
    left_out = f" The checkpoint's other entries are not copied: {others}." if others else ""
    assert loaded.notes[-1] == f"The model is the entry '{place}' of the file.{left_out}"


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"(c"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_bytes_give_one_of_our_errors(tmp_path: Path, data: bytes, start: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(start + data)
    with pytest.raises(MemoptError):
        load_model(source(tmp_path / "model.pt"))


def with_extra(value: Any) -> nn.Module:
    module = nn.Linear(1, 1)
    vars(module)["extra"] = value
    return module


def test_sparse_blocks_of_no_size_are_refused(tmp_path: Path) -> None:
    blocks = (torch.tensor([0, 1]), torch.tensor([0]), torch.zeros(1, 0, 3), torch.Size((0, 3)))
    torch.save(with_extra(Call(torch._utils._rebuild_sparse_tensor, torch.sparse_bsr, blocks)), tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match="blocks of size 0"):
        load(tmp_path / "model.pt")


def test_a_state_that_is_no_dict_is_not_handed_to_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = torch.ao.nn.quantized.Conv2d(2, 2, 1)
    torch.save(nn.Sequential(quantized), tmp_path / "quantized.pt")
    monkeypatch.setattr(type(quantized), "set_weight_bias", lambda *given: pytest.fail("weights were packed"))
    with pytest.raises(UnsafeFileError, match=r"conv\.Conv2d has a state of an unexpected type"):
        load(tmp_path / "quantized.pt")


@pytest.mark.filterwarnings("ignore:torch.ao", "ignore:torch.quantize_per", "ignore::DeprecationWarning")
def test_a_quantized_bag_of_embeddings_is_what_it_was(tmp_path: Path) -> None:
    bag = nn.EmbeddingBag(6, 4, mode="sum", include_last_offset=True)
    bag.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    quantized = torch.ao.nn.quantized.EmbeddingBag.from_float(bag)
    torch.save(quantized, tmp_path / "model.pt")
    inputs = torch.tensor([0, 5, 3]), torch.tensor([0, 2, 3])
    assert torch.equal(load(tmp_path / "model.pt")(*inputs), quantized(*inputs))


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_embeddings_are_quantized_by_their_rows(tmp_path: Path) -> None:
    """PyTorch would pack what lies beyond the scales of columns."""
    weight = torch.quantize_per_channel(torch.ones(8, 2), torch.ones(2), torch.zeros(2), 1, torch.quint8)
    torch.save(with_extra(weight), tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match="no scale for each of its rows"):
        load(tmp_path / "model.pt")
