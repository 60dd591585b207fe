"""TorchScript: lifted, same names and same numbers, and nothing harmful is ever compiled."""

from __future__ import annotations

import copy
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from memopt_cli.errors import UnsafeFileError
from memopt_cli.loading import load, load_model
from memopt_cli.records import LoadedModel, ModelSource, Trust
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.lifted.module import LiftedModule
from memopt_cli.runtime.script import ScriptLeaf
from memopt_cli.runtime.script_code import UnsafeScriptError, check_code, parse_code
from tests.loading.script_corpus import CORPUS, compiled, differing, peak_bytes, run, with_segments
from tests.rows import quick
from tests.zoo.models import GIVEN, Parts

MEASURED = ["resnet", "traced resnet", "char_rnn", "traced gpt", "shapes", "lists", "transformer", "break"]
"""Models whose memory is compared."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@functools.cache
def archive(name: str) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(compiled(name), buffer)
    return buffer.getvalue()


def lifted(script: torch.jit.ScriptModule | bytes, folder: Path) -> LoadedModel:
    path = folder / "script.ts"
    if isinstance(script, bytes):
        path.write_bytes(script)
    else:
        torch.jit.save(script, str(path))
    return load_model(ModelSource(location=str(path)))


TRACED_TOO = {"traced resnet", "traced gpt"}
"""Large ones, of which the script is compared as well, and smaller models that are traced."""


@pytest.fixture(params=quick(CORPUS, CORPUS.keys() - TRACED_TOO))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.jit.ScriptModule, nn.Module, Any]:
    """The script, the lifted model and what makes its arguments."""
    loaded = lifted(archive(request.param), tmp_path)
    fixed = request.param in ("traced resnet", "traced lstm", "traced char_rnn", "traced bert")
    assert loaded.format == "torchscript"
    assert [note[:26] for note in loaded.notes] == ["Tracing kept training mode"] * fixed
    assert all(isinstance(m, LiftedModule | nn.Sequential) for m in loaded.module.modules())
    return torch.jit.load(io.BytesIO(archive(request.param))), loaded.module, CORPUS[request.param].arguments


@pytest.mark.slow
def test_two_steps_in_either_mode_are_the_scripts(case: tuple) -> None:
    script, module, arguments = case
    assert [n for n, _ in module.named_modules()] == [n for n, _ in script.named_modules()]
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    for mode in (True, False):
        script.train(mode)
        module.train(mode)
        for step in range(2):
            torch.manual_seed(step)
            given = arguments()
            assert differing(run(script, given), run(module, given)) == []


@pytest.mark.slow
def test_copies_saved_files_and_segments_do_what_the_original_does(case: tuple, tmp_path: Path) -> None:
    _, module, arguments = case
    torch.manual_seed(0)
    given = arguments()
    twin, segmented = copy.deepcopy(module), with_segments(module)
    for model, path in ((module, tmp_path / "plain.pt"), (segmented, tmp_path / "segmented.pt")):
        torch.save(model, path)
    again, unchecked = load(tmp_path / "segmented.pt"), torch.load(tmp_path / "plain.pt", weights_only=False)
    expected = run(module, given)
    assert [type(m) for m in again.modules()] == [type(m) for m in segmented.modules()]
    for model in (twin, load(tmp_path / "plain.pt"), unchecked, copy.deepcopy(segmented), again, segmented):
        assert differing(expected, run(model, given)) == []


@pytest.mark.parametrize("name", ["buffers", "attributes", "traced lstm"])
def test_copies_are_independent(name: str, tmp_path: Path) -> None:
    module, given = lifted(archive(name), tmp_path).module, CORPUS[name].arguments()
    twin = copy.deepcopy(module)
    before = run(copy.deepcopy(module), given)
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.add_(1)
    assert differing(before, run(module, given)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_memory_is_that_of_the_model_as_it_was_written(name: str, tmp_path: Path) -> None:
    arguments = CORPUS[name].arguments()
    lifted_bytes = peak_bytes(lifted(archive(name), tmp_path).module, arguments)
    assert lifted_bytes <= 1.03 * peak_bytes(CORPUS[name].make(), arguments)


def test_dtype_mode_and_frozen_parameters(tmp_path: Path) -> None:
    script, module = compiled("methods"), lifted(archive("methods"), tmp_path).module
    doubles = (torch.randn(2, 3, dtype=torch.float64),)
    for model in (script.eval().double(), module.eval().double()):
        next(model.parameters()).requires_grad_(False)
    assert differing(run(script, doubles), run(module, doubles)) == []
    assert not any(m.training for m in module.modules())


def test_a_failing_program_says_where(tmp_path: Path) -> None:
    module = lifted(archive("comprehensions"), tmp_path).module
    with pytest.raises(RuntimeError, match="101 rows are too many"):
        module([torch.randn(101, 2), torch.randn(1, 2)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.third = nn.Linear(3, 3)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def test_what_was_shared_stays_shared(tmp_path: Path) -> None:
    script = torch.jit.script(Tied())
    module = lifted(script, tmp_path).module
    assert module.third.weight is module.first.weight
    torch.save(module, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    assert again.third.weight is again.first.weight
    given = (torch.randn(2, 3),)
    assert torch.equal(again(*given), script(*given))


class Listing(Parts, norm=lambda: nn.BatchNorm1d(3)):
    """``tolist`` has no stored form."""

    def forward(self, x: Tensor) -> Tensor:
        values: list[list[float]] = x.tolist()
        return self.norm(x) * len(values)


class Around(Parts, layers=lambda: nn.Sequential(nn.Linear(3, 3), Listing(), nn.Linear(3, 3))):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh()


def test_what_cannot_be_lifted_stays_a_script_and_is_named(tmp_path: Path) -> None:
    script = torch.jit.script(Around())
    loaded = lifted(script, tmp_path)
    module, given = loaded.module, (torch.randn(4, 3),)
    assert [type(m).__name__ for m in module.layers.children()] == ["Linear", "ScriptLeaf", "Linear"]
    (note,) = loaded.notes
    assert "layers.1 stays TorchScript: the operator prim::tolist" in note
    assert "test_torchscript.py line" in note
    for path in ("layers.0", "layers.1"):
        install_segment(module.get_submodule(path), SegmentConfig())
    torch.save(module, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    expected = run(script, given)
    assert differing(expected, run(module, given)) == []
    assert differing(expected, run(again, given)) == []


class Scaled(Parts, linear=lambda: nn.Linear(3, 3), scale=3.0, ends=GIVEN):
    __constants__ = ("ends",)

    def forward(self, x: Tensor) -> Tensor:
        if self.ends:
            self.training = False
        return self.linear(x)


class ScaledByItsOwner(nn.Module):
    """Uses a number that its part has, and that the part itself does not."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.part = Scaled(ends)

    def forward(self, x: Tensor) -> Tensor:
        self.part.scale += 1.0
        return self.part(x) * self.part.scale


@pytest.mark.parametrize("ends", [False, True], ids=["lifted", "a part that sets its mode"])
def test_a_number_that_only_the_owner_of_a_part_uses(ends: bool, tmp_path: Path) -> None:
    script = torch.jit.script(ScaledByItsOwner(ends))
    loaded = lifted(script, tmp_path)
    assert isinstance(loaded.module, ScriptLeaf) is ends
    given = (torch.randn(4, 3),)
    assert differing(run(script, given), run(loaded.module, given)) == []


def test_a_script_in_a_saved_module_is_read_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(nn.Sequential(ScriptLeaf(torch.jit.script(nn.Linear(3, 2)))), tmp_path / "model.pt")
    monkeypatch.setattr(Tensor, "numpy", None)
    (leaf,) = load(tmp_path / "model.pt").children()
    assert isinstance(leaf, ScriptLeaf)


class Padded(Parts, recurrent=lambda: nn.LSTM(3, 4, batch_first=True)):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return output


@pytest.mark.slow
def test_a_script_that_packs_sequences_is_loaded_saved_and_loaded_again(tmp_path: Path) -> None:
    path, script = tmp_path / "padded.ts", torch.jit.script(Padded())
    torch.jit.save(script, str(path))
    given = torch.randn(2, 5, 3), torch.tensor([5, 2])
    module = load(path)
    assert torch.equal(copy.deepcopy(module)(*given), script(*given))
    torch.save(module, tmp_path / "again.pt")
    assert torch.equal(load(tmp_path / "again.pt")(*given), script(*given))


class Sharing(nn.Module):
    """The part that cannot be lifted shares its weight with one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.listing, self.other = Listing(), nn.BatchNorm1d(3)
        self.other.weight = self.listing.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.listing(x))


def test_a_script_that_shares_tensors_is_not_taken_apart(tmp_path: Path) -> None:
    loaded = lifted(torch.jit.script(Sharing()), tmp_path)
    assert isinstance(loaded.module, ScriptLeaf)
    assert "shares tensors" in loaded.notes[-1]


def test_a_replaced_tensor_is_replaced_in_the_script() -> None:
    leaf = ScriptLeaf(torch.jit.script(nn.BatchNorm1d(2).eval()))
    leaf.running_mean = torch.full((2,), 5.0)
    assert torch.allclose(leaf(torch.full((1, 2), 5.0)), torch.zeros(1, 2), atol=1e-5)
    leaf.load_state_dict({**leaf.state_dict(), "running_mean": torch.zeros(2)})
    assert leaf(torch.ones(1, 2)).mean() > 0.9


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_file("/etc/hostname", False, 4, dtype=torch.uint8)


def test_code_that_touches_files_is_compiled_only_if_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(Reading()), str(path))
    with pytest.raises(UnsafeFileError, match=r"torch\.from_file") as error:
        load_model(ModelSource(location=str(path)))
    assert "--trust-pickle" in error.value.hint
    assert load_model(ModelSource(location=str(path), trust=Trust(pickle=True))).notes


@pytest.mark.parametrize(
    "code",
    [
        "torch.save(x, 'f')",
        "torch.from_file('f')",
        "t = torch\n  t.save(x, 'f')",
        "o = ops.aten\n  o.save(x, 'f')",
        "torch = ops",
        "ops.aten.save(x, 'f')",
        "ops.image.read_file('f')",
        "ops.c10d.send(x)",
        "ops.prim.rpc_sync(x)",
        "rpc_async(x)",
        "rpc_async = x",
        "torch.classes.mine.Thing(x)",
        "__torch__.torch.classes.mine.Thing(x)",
        "(x).save('f')",
        "open('f')",
        "getattr(x, '\\ud800')",
        "import os",
        "a = (",
    ],
)
def test_code_is_refused_unless_every_name_is_known(code: str) -> None:
    with pytest.raises(UnsafeScriptError):
        check_code({"code/__torch__.py": f"def forward(x: Tensor) -> Tensor:\n  {code}\n  return x\n"})


class _NamedAsBuiltins(nn.Module):
    """Of a script, whose methods have names of Python's functions."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.len([1.0]) + len([1, 2, 3])

    @torch.jit.export
    def len(self, numbers: list[float]) -> float:
        return numbers[0] * 100


def test_a_method_may_be_called_as_a_function_of_pythons_is(tmp_path: Path) -> None:
    module = lifted(torch.jit.script(_NamedAsBuiltins()), tmp_path).module
    assert module(torch.ones(1)) == 104


@pytest.mark.parametrize("text", ["a = " + "(" * 250 + "1" + ")" * 250, "a = " + "-" * 100_000 + "1"])
def test_why_code_cannot_be_read_is_said(text: str) -> None:
    with pytest.raises(UnsafeScriptError, match=r"cannot be read \(\w"):
        parse_code(text)
