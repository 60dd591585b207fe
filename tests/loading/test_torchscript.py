"""TorchScript: taken apart where possible, same names and same numbers, and nothing harmful is ever compiled."""

from __future__ import annotations

import copy
import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import load, load_model
from memopt_cli.records import LoadedModel, ModelSource, Trust
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.script import ScriptCalls, ScriptLeaf, UnsafeScript, _check_code


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.recurrent = nn.LSTM(3, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(x)
        if scale > 1:
            x = x * scale
        return self.recurrent(x)[0]


class Calling(nn.Module):
    """Forward only calls children, with a tuple and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
        self.split = Splitting()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, int]]:
        for layer in self.stack:
            x = layer(x)
        a, b = self.split(x, y)
        return a, (b, 3)


class Splitting(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), nn.Flatten())


CASES = {
    "leaf": (Branching, (torch.randn(5, 3),), ScriptLeaf),
    "calls": (Calling, (torch.randn(2, 3), torch.randn(2, 3)), ScriptCalls),
    "sequential": (convolutional, (torch.randn(2, 1, 6),), ScriptCalls),
    "tied": (Tied, (torch.randn(2, 3),), ScriptLeaf),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[torch.jit.ScriptModule, LoadedModel, tuple[Tensor, ...]]:
    make, inputs, kind = CASES[request.param]
    path = str(tmp_path / "script.pt")
    torch.jit.save(torch.jit.script(make()), path)
    loaded = load_model(ModelSource(location=path))
    assert type(loaded.module) is kind
    assert loaded.format == "torchscript"
    return torch.jit.load(path), loaded, inputs


def flat(output: object) -> list[object]:
    return [leaf for item in output for leaf in flat(item)] if isinstance(output, tuple) else [output]


def equal(a: object, b: object) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(flat(a), flat(b), strict=True)
    )


def test_names_outputs_gradients_and_buffers_are_the_scripts(case: tuple) -> None:
    script, loaded, inputs = case
    module = loaded.module
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in script.named_parameters()]
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    assert list(module.state_dict()) == list(script.state_dict())
    ours, theirs = module(*inputs), script(*inputs)
    assert equal(ours, theirs)
    torch.manual_seed(0)
    for output in (ours, theirs):
        sum(
            (t * torch.linspace(1, 2, t.numel()).view_as(t)).sum() for t in flat(output) if isinstance(t, Tensor)
        ).backward()
    assert equal(tuple(p.grad for p in module.parameters()), tuple(p.grad for p in script.parameters()))
    assert equal(tuple(module.state_dict().values()), tuple(script.state_dict().values()))


def test_mode_dtype_and_frozen_parameters_reach_the_script(case: tuple) -> None:
    script, loaded, inputs = case
    module = loaded.module.eval().double()
    next(module.parameters()).requires_grad_(False)
    doubles = tuple(t.double() for t in inputs)
    assert equal(module(*doubles), script.eval().double()(*doubles))
    assert not any(m.training for m in module.modules())
    again = copy.deepcopy(module)
    assert not again.training
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in module.parameters()]
    assert equal(again(*doubles), module(*doubles))


def test_copies_are_independent(case: tuple) -> None:
    _, loaded, inputs = case
    twin = copy.deepcopy(loaded.module)
    before = loaded.module.eval()(*inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert equal(loaded.module(*inputs), before)
    assert not equal(twin.eval()(*inputs), before)


def test_a_saved_model_loads_safely(case: tuple, tmp_path: Path) -> None:
    _, loaded, inputs = case
    torch.save(loaded.module.eval(), tmp_path / "model.memopt.pt")
    again = load(tmp_path / "model.memopt.pt")
    assert equal(again(*inputs), loaded.module(*inputs))
    assert equal(torch.load(tmp_path / "model.memopt.pt", weights_only=False)(*inputs), again(*inputs))


def test_a_replaced_tensor_is_replaced_in_the_script() -> None:
    leaf = ScriptLeaf(torch.jit.script(nn.BatchNorm1d(2).eval()))
    leaf.running_mean = torch.full((2,), 5.0)
    assert torch.allclose(leaf(torch.full((1, 2), 5.0)), torch.zeros(1, 2), atol=1e-5)
    leaf.load_state_dict({**leaf.state_dict(), "running_mean": torch.zeros(2)})
    assert leaf(torch.ones(1, 2)).mean() > 0.9


def test_a_leaf_can_be_a_segment(tmp_path: Path) -> None:
    plain, segment = (ScriptLeaf(torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))) for _ in range(2))
    segment.load_state_dict(plain.state_dict())
    install_segment(segment, SegmentConfig())
    data = torch.randn(4, 3)
    for model in (plain, segment):
        model(data).pow(3).sum().backward()
    assert equal(tuple(p.grad for p in plain.parameters()), tuple(p.grad for p in segment.parameters()))
    assert equal(tuple(plain.state_dict().values()), tuple(segment.state_dict().values()))
    torch.save(segment, tmp_path / "model.pt")
    assert equal(load(tmp_path / "model.pt").eval()(data), plain.eval()(data))


def test_arguments_by_name_and_wrong_arguments(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Calling()), str(tmp_path / "script.pt"))
    module = load(tmp_path / "script.pt")
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert equal(module(x, y=y), module(x, y))
    for args, kwargs in (((x,), {}), ((x, y, y), {}), ((x, y), {"y": y}), ((x, y), {"z": y})):
        with pytest.raises(TypeError, match="forward takes x, y"):
            module(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- hostile archives


class Writing(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_file("/etc/hostname", False, 4, dtype=torch.uint8)


@pytest.mark.parametrize("make", [Writing, lambda path: Reading()], ids=["save", "from_file"])
def test_code_that_touches_files_is_never_compiled(tmp_path: Path, make: type) -> None:
    sentinel, path = tmp_path / "ran", tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(make(str(sentinel))), str(path))
    sentinel.unlink(missing_ok=True)
    with pytest.raises(UnsafeFileError, match=r"torch\.(save|from_file)") as error:
        load_model(ModelSource(location=str(path)))
    assert "--trust-pickle" in error.value.hint
    assert not sentinel.exists()
    assert load_model(ModelSource(location=str(path), trust=Trust(pickle=True))).notes


def test_a_saved_leaf_with_harmful_code_is_never_compiled(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    torch.save(ScriptLeaf(torch.jit.script(Writing(str(sentinel)))), tmp_path / "model.pt")
    sentinel.unlink(missing_ok=True)
    with pytest.raises(UnsafeFileError, match=r"torch\.save"):
        load(tmp_path / "model.pt")
    assert not sentinel.exists()


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
        "import os",
        "a = (",
    ],
)
def test_code_is_refused_unless_every_name_is_known(code: str) -> None:
    with pytest.raises(UnsafeScript):
        _check_code(f"def forward(x: Tensor) -> Tensor:\n  {code}\n  return x\n")


def test_a_damaged_archive(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(convolutional()), buffer)
    data = bytearray(buffer.getvalue())
    code = next(record for record in zipfile.ZipFile(buffer).infolist() if record.filename.endswith(".py"))
    data[code.header_offset + code.compress_size] ^= 255
    (tmp_path / "script.pt").write_bytes(data)
    with pytest.raises(FileFormatError, match="damaged"):
        load_model(ModelSource(location=str(tmp_path / "script.pt")))
