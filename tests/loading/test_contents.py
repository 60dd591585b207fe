"""The module tree of a pickle, from its opcodes: agrees with the loaded model, and ends on files made to be endless."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt_cli.errors import FileFormatError
from memopt_cli.loading import read_file
from memopt_cli.loading.contents import FileContents, contents_of
from memopt_cli.loading.description import describe_file
from memopt_cli.loading.factory import fill
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.pickles.described import NESTED, storage_of, tensor_of
from memopt_cli.loading.pickles.nodes import Built, Tuple
from memopt_cli.loading.pickles.reading import read_pickled
from memopt_cli.records import Inspection
from tests.loading.archives import archive, saved


def contents(value: object, *, zipped: bool = True) -> FileContents:
    data = saved(value, _use_new_zipfile_serialization=zipped)
    return contents_of(read_pickled(ModelFile(path="model.pt", data=data)).pickle.root)


def described(path: Path, pickle: bytes) -> Inspection:
    path.write_bytes(archive({"data.pkl": b"\x80\x02" + pickle}))
    return describe_file(read_file(str(path)))


TENSORS = {
    "strided": torch.arange(12.0).view(3, 4)[:, 1:3],
    "expanded": torch.ones(1).expand(5),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "uint16": torch.ones(4, dtype=torch.uint16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "meta": torch.empty(2, 3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
}


def test_a_compiled_model_has_the_modules_and_tensors_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert contents(torch.compile(model)) == contents(model)


def test_tensors_inside_a_plain_pickle_are_told_and_serve_as_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    file = ModelFile(path="model.pkl", data=pickle.dumps(model))
    found = describe_file(file)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert [tensor.name for tensor in found.tensors] == list(model.state_dict())
    assert not found.tied
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fill(other, file)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("data", [b"", b"\x80\x02K\x01.", pickle.dumps(os.getcwd), b"\x80\x02(" * 1000])
def test_a_storage_that_is_damaged_makes_no_tensor(data: bytes) -> None:
    storage = Built("called", NESTED, Tuple((data,), depth=1, weight=1))
    assert storage_of(storage) is None


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_told_as_it_is(name: str, zipped: bool) -> None:
    tensor = TENSORS[name]
    (found,) = contents([tensor], zipped=zipped).tensors
    assert found.shape == tuple(tensor.shape)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert found.trainable == tensor.requires_grad
    assert found.size_bytes == tensor.numel() * tensor.element_size()


def test_views_of_one_storage_are_tied_only_if_they_are_the_same_view() -> None:
    base = torch.arange(6.0)
    assert contents({"a": base, "b": base[:3], "c": base.view(6), "d": base.view(2, 3)}).tied() == (("a", "c"),)


def test_a_shared_module_is_told_once_and_a_cycle_ends() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    model[0]._modules["above"] = model
    assert [module.path for module in contents(model).modules] == ["", "0"]


def test_objects_that_share_one_state_are_no_modules_each_time(tmp_path: Path) -> None:
    """A dictionary of a thousand entries under a thousand modules would be a million."""
    state = b"}(X\x08\x00\x00\x00_modules}X\x0b\x00\x00\x00_parameters}uq\x00"
    modules = b"".join(b"ctorch.nn\nModule\n)\x81h\x00b" for _ in range(50))
    assert len(described(tmp_path / "model.pt", state + b"0](" + modules + b"e.").modules) == 1


def test_nesting_has_an_end(tmp_path: Path) -> None:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(120):
        model = nn.Sequential(model)
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match="nested deeper than 100"):
        describe_file(read_file(str(tmp_path / "model.pt")))


def test_sizes_beyond_any_machine_are_still_sizes(tmp_path: Path) -> None:
    size = b"\x8a\x08" + (2**63 - 1).to_bytes(8, "little")
    meta = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n(" + size * 40 + b"t)\x89tR"
    (found,) = described(tmp_path / "model.pt", b"](" + meta + b"e.").tensors
    assert found.size_bytes == 2**63 - 1


def test_long_and_obscene_names_are_tamed(tmp_path: Path) -> None:
    name = b"\x1b]0;owned\x07" + b"n" * 1000
    key = b"X" + len(name).to_bytes(4, "little") + name
    tensor = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n))\x89tR"
    (found,) = described(tmp_path / "model.pt", b"}" + key + tensor + b"s.").tensors
    assert found.name.isprintable()
    assert len(found.name) < 300


def test_what_is_no_tensor_is_none() -> None:
    for value in (None, 3, "text", object()):
        assert tensor_of(value) is None
