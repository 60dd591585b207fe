"""``.pt2``: modules restored, trainable, the numbers of the model; nothing of a hostile file runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import load, load_model
from memopt_cli.loading.exported_contents import PROGRAM
from memopt_cli.loading.exported_graph import _function_in
from memopt_cli.loading.input_spec import find_spec
from memopt_cli.records import LoadedModel, ModelSource, TensorSpec
from memopt_cli.runtime.lifted.module import LiftedModule
from tests.loading.archives import (
    WEIGHTS_CONFIG,
    Call,
    saved,
    unzipped,
    with_record_by_weight,
    with_weights_in_one_pickle,
    zipped,
)
from tests.loading.script_corpus import CORPUS, differing, peak_bytes, run, with_segments
from tests.zoo.models import Parts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

EXPORTABLE = [
    *"break lstm transformer dicts buffers methods dropout optional lists resnet char_rnn".split(),
    "traced gpt",
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls.add_(1)
        return self.dropout(self.norm(self.linear(x))) * self.scale, x.shape[0]


class Whole(nn.Module):
    """A module called twice, sizes as values, a tied weight, a constant, a block without gradients, nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.recurrent, self.head = nn.LSTM(3, 4), nn.Linear(3, 4, bias=False)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor, flag: bool, *, rest: dict[str, Any]) -> dict[str, Any]:
        size = 1
        for part in self.parts:
            x, size = part(x)
            x = part(x)[0]
        with torch.no_grad():
            doubled = self.head(x) * 2
        y = self.recurrent(x[None])[0][0] + self.tied(x)
        return {"sum": y * rest["k"][0] / size + torch.tensor([1.0, 2, 3, 4]), "more": [doubled, (y, 3)]}


def export(model: nn.Module, path: Path, *args: Any, **keywords: Any) -> None:
    torch.export.save(torch.export.export(model, copy.deepcopy(args), **keywords), path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTABLE)
def test_steps_are_those_of_the_model_that_was_exported(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, arguments = CORPUS[name].make(), CORPUS[name].arguments()
    written = copy.deepcopy(model)
    try:
        export(model, tmp_path / "model.pt2", *arguments, strict=False)
    except RuntimeError as error:
        assert name == "lstm"
        pytest.skip(f"this PyTorch cannot export layers of LSTMs: {error}")
    loaded = load_model(ModelSource(location=str(tmp_path / "model.pt2")))
    assert loaded.format == "exported"
    segmented = with_segments(loaded.module)
    torch.save(segmented, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    called = {path for path, module in again.named_modules() if isinstance(module, nn.Module)}
    assert called <= {path for path, _ in model.named_modules()}
    for _ in range(2):
        expected = run(written, arguments)
        assert differing(expected, run(loaded.module, arguments)) == []
        assert differing(expected, run(again, arguments)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stored", [lambda archive: archive, with_weights_in_one_pickle], ids=["as it is", "of 2.8"])
def test_everything_at_once_and_dynamic_sizes(stored: Callable[[bytes], bytes], tmp_path: Path) -> None:
    def arguments(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(size, 3), True), {"rest": {"k": (torch.randn(size, 1),)}}

    args, kwargs = arguments(5)
    shapes = {"x": {0: Dim("batch")}, "flag": None, "rest": {"k": ({0: Dim("batch")},)}}
    written = Whole()
    path = tmp_path / "model.pt2"
    export(copy.deepcopy(written), path, *args, kwargs=kwargs, dynamic_shapes=shapes)
    path.write_bytes(stored(path.read_bytes()))
    loaded = load_model(ModelSource(location=str(path)))
    module = loaded.module
    assert {path for path, _ in written.named_modules()} == {path for path, _ in module.named_modules()}
    assert module.tied.weight is module.head.weight
    assert any("nested" in note for note in loaded.notes)
    for size in (5, 2):
        args, kwargs = arguments(size)
        assert differing(run(written, args, kwargs), run(module, args, kwargs)) == []
    output = module(*args, **kwargs)
    assert (list(output), [type(item) for item in output["more"]], output["more"][1][1]) == (
        ["sum", "more"],
        [Tensor, tuple],
        3,
    )
    assert not output["more"][0].requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "char_rnn", "traced gpt"])
def test_memory_is_that_of_the_model_as_it_was_written(name: str, tmp_path: Path) -> None:
    model, arguments = CORPUS[name].make(), CORPUS[name].arguments()
    export(model, tmp_path / "model.pt2", *arguments)
    assert peak_bytes(load(tmp_path / "model.pt2"), arguments) <= 1.03 * peak_bytes(CORPUS[name].make(), arguments)


class Tokens(Parts, embedding=lambda: nn.Embedding(50, 4)):
    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.embedding(ids) * mask[..., None]


def loaded_tokens(folder: Path, **keywords: Any) -> LoadedModel:
    ids, mask = torch.randint(0, 40, (2, 7)), torch.ones(2, 7)
    export(Tokens(), folder / "model.pt2", ids, mask, **keywords)
    return load_model(ModelSource(location=str(folder / "model.pt2")))


def test_example_inputs_are_the_spec_and_dynamic_sizes_its_symbols(tmp_path: Path) -> None:
    sizes = {0: Dim("batch"), 1: Dim("length")}
    loaded = loaded_tokens(tmp_path, dynamic_shapes={"ids": sizes, "mask": sizes})
    spec = find_spec(loaded.source, loaded.module, None, loaded.example_spec)
    assert spec.dims == {"B": 2, "S": 7}
    first, second = spec.tensors
    assert (first.shape, first.dtype, second) == (("B", "S"), "int64", TensorSpec(shape=("B", "S"), values="ones"))
    assert first.values.startswith("0..")
    assert not any("fixed" in note for note in loaded.notes)


def test_a_spec_beside_the_model_comes_first(tmp_path: Path) -> None:
    loaded = loaded_tokens(tmp_path)
    assert any("fixed every size" in note for note in loaded.notes)
    assert loaded.example_spec.tensors[0].shape == (2, 7)
    (tmp_path / "model.inputs.yaml").write_text("inputs: [{shape: [3, 4], dtype: int64}]")
    assert find_spec(loaded.source, loaded.module, None, loaded.example_spec).tensors[0].shape == (3, 4)


@pytest.mark.parametrize(("training", "word"), [(True, "training"), (False, "evaluation")])
def test_the_mode_that_was_kept_is_said(training: bool, word: str, tmp_path: Path) -> None:
    export(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training), tmp_path / "m.pt2", torch.randn(3, 2))
    (note, *_) = load_model(ModelSource(location=str(tmp_path / "m.pt2"))).notes
    assert f"kept {word} mode" in note


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class Spiking(Parts, linear=lambda: nn.Linear(2, 2)):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Step.apply(self.linear(x)))


def test_a_backward_that_export_lost_is_said(tmp_path: Path) -> None:
    export(Spiking(), tmp_path / "m.pt2", torch.randn(3, 2), strict=False)
    notes = load_model(ModelSource(location=str(tmp_path / "m.pt2"))).notes
    assert any("dropped the custom backward of Step (" in note for note in notes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "small.pt2"
    export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), path, torch.randn(3, 2))
    return path.read_bytes()


@pytest.fixture(scope="module")
def small_by_weight(small: bytes) -> bytes:
    return with_record_by_weight(small)


def rewritten(archive: bytes, ending: str, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with one record changed."""
    records = unzipped(archive)
    return zipped({name: change(data) if name.endswith(ending) else data for name, data in records.items()})


def edited(archive: bytes, ending: str, change: Callable[[Any], object]) -> bytes:
    """The archive with a record of JSON changed."""

    def edit(data: bytes) -> bytes:
        values = json.loads(data)
        change(values)
        return json.dumps(values).encode()

    return rewritten(archive, ending, edit)


def first_node(program: Any) -> Any:
    return program["graph_module"]["graph"]["nodes"][0]


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.c10d.send.default",
        "_operator.methodcaller",
        "builtins.eval",
        "math.nothing",
        "torch.ops.higher_order.wrap_with_autocast",
        "torch.ops.aten.__class__.default",
    ],
)
def test_an_operator_that_is_not_on_the_list_is_refused(target: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(edited(small, PROGRAM, lambda program: first_node(program).update(target=target)))
    with pytest.raises(UnsafeFileError, match="not on memopt's list"):
        load(path)


@pytest.mark.parametrize(
    "name", ["data/aotinductor/model/a.wrapper.so", "data/constants/custom_obj_0", "data.pkl", "code/__torch__.py"]
)
def test_a_record_of_another_kind_is_refused(name: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(zipped({**unzipped(small), name: b"x"}))
    with pytest.raises(UnsafeFileError, match=f"a record named {name}"):
        load(path)


@pytest.mark.parametrize("where", ["the example inputs", "all weights", "a weight"])
def test_pickled_objects_are_never_built(where: str, small: bytes, tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / "m.pt2"
    call = Call(Path.touch, ran)
    if where == "the example inputs":
        archive = rewritten(small, "sample_inputs/model.pt", lambda data: saved((call,)))
    elif where == "all weights":
        archive = with_weights_in_one_pickle(small, {"0.weight": call})
    else:
        archive = with_weight(with_record_by_weight(small), (call,))
    path.write_bytes(archive)
    with pytest.raises(UnsafeFileError):
        load(path)
    assert not ran.exists()


def with_weight(archive: bytes, tensor: Any) -> bytes:
    """The archive with every weight pickled, and another one in the place of each."""

    def pickled(config: Any) -> None:
        for entry in config["config"].values():
            entry["use_pickle"] = True

    archive = edited(archive, WEIGHTS_CONFIG, pickled)
    return rewritten(archive, "weights/weight_0", lambda data: saved(tensor))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"0.weight": 1.0, "0.bias": torch.ones(2)}, r"0\.weight is not a tensor"),
        ([torch.ones(2)], "holds no exported program"),
        ({"0.weight": nn.Parameter(torch.ones(2, 2))}, "holds no exported program"),
        ({"0.__class__": torch.ones(2)}, "holds no exported program"),
    ],
    ids=["a number", "a list", "one is missing", "a name of another kind"],
)
def test_weights_in_one_pickle_are_tensors_by_name(weights: Any, says: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(with_weights_in_one_pickle(small, weights))
    with pytest.raises((FileFormatError, UnsafeFileError), match=says):
        load(path)


def test_a_sparse_example_tells_nothing(small: bytes, tmp_path: Path) -> None:
    path, examples = tmp_path / "m.pt2", saved(((torch.eye(3, 2).to_sparse(),), {}))
    path.write_bytes(rewritten(small, "sample_inputs/model.pt", lambda data: examples))
    spec = load_model(ModelSource(location=str(path))).example_spec
    assert spec is not None
    assert [tensor.values for tensor in spec.tensors] == ["normal"]


PLACES = {
    "beyond its record": {"storage_offset": {"as_int": 1}},
    "far larger than its record": {"sizes": [{"as_int": 2**20}, {"as_int": 2**20}], "strides": [{"as_int": 0}] * 2},
    "a stride below 0": {"strides": [{"as_int": -1}, {"as_int": 1}]},
    "more strides than sizes": {"strides": [{"as_int": 0}] * 3},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_weight_lies_within_its_record_and_is_not_far_larger(
    place: dict[str, Any], small_by_weight: bytes, tmp_path: Path
) -> None:
    def move(config: Any) -> None:
        config["config"]["0.weight"]["tensor_meta"].update(place)

    path = tmp_path / "m.pt2"
    path.write_bytes(edited(small_by_weight, WEIGHTS_CONFIG, move))
    with pytest.raises(FileFormatError, match="a tensor "):
        load(path)


@pytest.mark.parametrize("name", ["__class__", "forward", "x\ny", "to", "lambda"])
def test_names_that_mean_something_else_are_refused(name: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    text = json.dumps(f"0.{name}")[1:-1].encode()
    archive = rewritten(small, ".json", lambda data: data.replace(b"0.weight", text))
    path.write_bytes(archive)
    with pytest.raises((FileFormatError, UnsafeFileError)):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program.update(schema_version={"major": 99}),
        lambda program: program["graph_module"].pop("signature"),
        lambda program: program["graph_module"]["graph"]["nodes"].clear(),
        lambda program: first_node(program)["inputs"][0]["arg"].update(as_tensor={"name": "nothing"}),
    ],
)
def test_a_damaged_program_is_an_error(change: Callable[[Any], Any], small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(edited(small, PROGRAM, change))
    with pytest.raises(FileFormatError):
        load(path)


def test_a_name_with_code_in_it_is_only_a_name(small_by_weight: bytes, tmp_path: Path) -> None:
    name, path = "weight'] or open('x', 'w') #", tmp_path / "m.pt2"
    path.write_bytes(rewritten(small_by_weight, ".json", lambda data: data.replace(b"0.weight", f"0.{name}".encode())))
    module = load(path)
    assert name in dict(module.get_submodule("0").named_parameters())
    assert module(torch.randn(3, 2)).shape == (3, 2)
    assert not (Path("x")).exists()


class Odd(nn.Module):
    """Names that are no identifiers, and a branch inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2), torch.full((2,), 2.0)])
        self.layers = nn.ModuleDict({"a-b": nn.Linear(2, 2), "1st": nn.Linear(2, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["1st"](self.layers["a-b"](x) * self.scales[0]) * self.scales[1]
        return torch.cond(x.sum() > 0, lambda y: self.layers["a-b"](y).sin(), lambda y: y * 2 - self.scales[0], (x,))


@pytest.mark.slow
def test_odd_names_and_branches(tmp_path: Path) -> None:
    written = Odd()
    export(copy.deepcopy(written), tmp_path / "m.pt2", torch.ones(3, 2))
    module = load(tmp_path / "m.pt2")
    torch.save(with_segments(module), tmp_path / "m.pt")
    for sign in (1, -1):
        x = sign * torch.ones(3, 2) * 10
        expected = run(written, (x,))
        assert differing(expected, run(module, (x,))) == []
        assert differing(expected, run(load(tmp_path / "m.pt"), (x,))) == []


def test_only_lifted_modules_come_out(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(small)
    module = load(tmp_path / "m.pt2")
    assert [type(m).__name__ for m in module.modules()] == ["Sequential", "Linear", "ReLU"]
    assert all(isinstance(m, LiftedModule | nn.Sequential) for m in module.modules())


def test_an_autograd_function_is_found_by_its_lines() -> None:
    above = 'File "net.py", line 7, in forward\n'
    call, below = "    return Step.apply(x)\n", 'File "net.py", line 3, in forward\n    y\n'
    assert _function_in(above + call + below) == "Step (net.py line 7)"
    assert _function_in(above + "    return step(x)\n" + below) == ""
    assert _function_in(above + "a.apply(" * 100_000 + "\n" + ", in forward" * 100_000) == "a (net.py line 7)"
    assert _function_in(above + "a.apply(" * 100_000 + "\n" + ", in forward" * 100_000 + "!") == ""
