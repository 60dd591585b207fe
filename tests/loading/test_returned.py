"""What a subprocess returns as the optimized model is compared with the original: nothing but that may be in it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, ViTConfig, ViTModel

from memopt_cli.errors import ChangedFileError, UnsafeFileError
from memopt_cli.loading import load, load_model
from memopt_cli.loading.returned import check_returned
from memopt_cli.measure.answers.without_steps import write_model
from memopt_cli.records import ModelSource, Plan, SegmentPlan, Trust
from tests.loading.archives import Call, saved, scripted, unzipped, zipped
from tests.loading.test_pretrained import gpt2

PLANS = {
    "no plan": Plan(),
    "segments": Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="2", compressor="bit"))),
    "chunks": Plan(packed=True, segments=(SegmentPlan(path="0", chunks=2), SegmentPlan(path="1-2"))),
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def original(folder: Path, **trust: Any) -> ModelSource:
    torch.save(model(), folder / "original.pt")
    return ModelSource(location=str(folder / "original.pt"), trust=Trust(**trust))


def returned(source: ModelSource, plan: Plan, path: Path) -> None:
    """What an honest subprocess writes."""
    with path.open("wb") as file:
        write_model(load_model(source).module, plan, file)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_optimized_model_is_its_original(plan: Plan, tmp_path: Path) -> None:
    source, path = original(tmp_path), tmp_path / "returned.pt"
    returned(source, plan, path)
    assert check_returned(str(path), source) == path.stat().st_size


FORMS: dict[str, Callable[[nn.Module, Path], object]] = {
    "legacy": lambda m, path: torch.save(m, path, _use_new_zipfile_serialization=False),
    "plain": lambda m, path: path.write_bytes(pickle.dumps(m, 0)),
    "one of several entries": lambda m, path: torch.save({"model": m, "epoch": 3}, path),
    "wrapped": lambda m, path: torch.save(nn.DataParallel(m), path),
    "TorchScript": lambda m, path: torch.jit.save(torch.jit.script(m), path),
    "exported": lambda m, path: torch.export.save(torch.export.export(m, (torch.ones(2, 3),)), path),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_of_an_original_of_any_form(form: str, tmp_path: Path) -> None:
    FORMS[form](model(), tmp_path / "original")
    source, path = ModelSource(location=str(tmp_path / "original")), tmp_path / "returned.pt"
    returned(source, Plan(segments=(SegmentPlan(path=""),)), path)
    assert check_returned(str(path), source)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with renamed weights, whose transformers keep how, and one with an adapter."""
    folder = tmp_path_factory.mktemp("folders")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(folder / "vit")
    gpt2().save_pretrained(folder / "gpt")
    base = GPT2LMHeadModel.from_pretrained(folder / "gpt")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    peft.get_peft_model(base, config).save_pretrained(folder / "lora")
    return {name: folder / name for name in ("vit", "lora")}


@pytest.mark.parametrize(("name", "trust"), [("vit", Trust()), ("lora", Trust(packages=("peft",)))])
def test_of_a_folder(name: str, trust: Trust, folders: dict[str, Path], tmp_path: Path) -> None:
    source, path = ModelSource(location=str(folders[name])), tmp_path / "returned.pt"
    returned(source, Plan(segments=(SegmentPlan(path=""),)), path)
    assert check_returned(str(path), source)
    assert load(path, trust=trust)


def test_of_the_users_own_classes(user_code: str, tmp_path: Path) -> None:
    source, path = original(tmp_path, code_paths=(user_code,)), tmp_path / "returned.pt"
    made = load_model(ModelSource(location="faulty:Spare", trust=source.trust)).module
    torch.save(made, path)
    with pytest.raises(UnsafeFileError, match=r"it has faulty\.Spare, which the original does not have"):
        check_returned(str(path), source)
    torch.save(made, source.location)
    assert check_returned(str(path), source)


def holding(value: Any, name: str = "kept") -> bytes:
    """The model with one more attribute."""
    kept = model()
    setattr(kept, name, value)
    return saved(kept)


def dropping(code: bytes) -> bytes:
    """The model with opcodes before its own that leave nothing behind; no part of it refers to what they make."""
    records = unzipped(saved(model()))
    data = records["data.pkl"]
    return zipped({**records, "data.pkl": data[:2] + code + data[2:]})


class Calling(nn.Linear):
    """Pickles as a call of its class."""

    def __reduce__(self) -> Any:
        return nn.Linear, (1, 1)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a call": (lambda: saved(Call(os.system, "true")), r"posix\.system runs its arguments as code"),
    "a call within": (lambda: holding(Call(os.system, "true")), r"posix\.system runs its arguments as code"),
    "a call in a file within": (
        lambda: holding(Call(torch.storage._load_from_bytes, saved(Call(os.system, "true")))),
        "not part of the model",
    ),
    "a module that is imported and dropped": (lambda: dropping(b"cantigravity\nx\n0"), "not part of the model"),
    "an object that is made and dropped": (
        lambda: dropping(b"ctorch.nn.modules.linear\nLinear\n)\x810"),
        "not part of the model",
    ),
    "another class": (lambda: holding(nn.Bilinear(1, 1, 1)), r"it has torch\.nn\.modules\.linear\.Bilinear"),
    "the same class, called": (lambda: holding(Calling(1, 1)), "is called with arguments from the file"),
    "a function for a method": (
        lambda: holding(nn.functional.gelu, "forward"),
        "replaces its method forward",
    ),
    "TorchScript": (lambda: scripted(model()), "not an archive of torch.save"),
    "a legacy file": (
        lambda: saved(model(), _use_new_zipfile_serialization=False),
        "not an archive of torch.save",
    ),
    "bytes": (lambda: b"PK\x03\x04 and no more", "the file"),
    "nothing": (lambda: b"", "not an archive of torch.save"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_the_original_is_refused(name: str, tmp_path: Path) -> None:
    make, says = HOSTILE[name]
    source, path = original(tmp_path), tmp_path / "returned.pt"
    path.write_bytes(make())
    with pytest.raises(UnsafeFileError, match=says) as error:
        check_returned(str(path), source)
    assert error.value.message.startswith("the subprocess returned something that is not an optimized model: ")
    assert str(path) not in error.value.message
    assert "--trust-pickle" not in error.value.hint


def test_an_original_that_changed_ends_it(tmp_path: Path) -> None:
    source, path = original(tmp_path), tmp_path / "returned.pt"
    returned(source, Plan(), path)
    with pytest.raises(ChangedFileError):
        check_returned(str(path), ModelSource(location=source.location, sha256="0" * 64))
