"""Folders of ``save_pretrained``: what is built of them, and what is refused before any library sees it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memopt_cli.errors import FileFormatError, UnsafeFileError, UsageError
from memopt_cli.loading import load, load_model, pretrained
from memopt_cli.loading.pretrained import _refuse_slow_names
from memopt_cli.loading.watch import suspend_watch
from memopt_cli.records import ModelSource


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def adapter(folder: Path) -> Path:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    base = GPT2LMHeadModel.from_pretrained(folder)
    peft.get_peft_model(base, config).save_pretrained(folder.parent / "lora")
    return folder.parent / "lora"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def assert_refused(location: Path, says: str) -> None:
    with pytest.raises(FileFormatError, match=says) as caught:
        load(location)
    assert caught.value.hint


def test_a_folder_is_the_model_that_was_saved(folder: Path) -> None:
    loaded = load_model(ModelSource(location=str(folder)))
    assert (loaded.format, loaded.module.training) == ("pretrained", True)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.module.eval()(tokens).logits, gpt2().eval()(tokens).logits)


def test_its_hash_is_that_of_settings_and_weights(folder: Path) -> None:
    before = load_model(ModelSource(location=str(folder))).sha256
    assert load_model(ModelSource(location=str(folder))).sha256 == before
    rewrite(folder / "config.json", lambda settings: settings.update(resid_pdrop=0.5))
    assert load_model(ModelSource(location=str(folder))).sha256 != before


def test_inspect_describes_the_weights_of_a_folder(
    folder: Path, adapter: Path, tmp_path: Path, memopt: Callable[..., Any]
) -> None:
    done = memopt("inspect", str(folder))
    assert done.out.startswith(f"{folder / 'model.safetensors'}: safetensors, ")
    assert f"The weights of {folder}; its settings are in the same folder." in done.out
    assert str(adapter / "adapter_model.safetensors") in memopt("inspect", str(adapter)).out
    gpt2().save_pretrained(tmp_path / "shards", max_shard_size="2KB")
    done = memopt("inspect", str(tmp_path / "shards"))
    assert done.code == 2
    assert re.search(r"splits its weights over \d+ files; inspect reads one at a time", done.err)
    (folder / "model.safetensors").unlink()
    assert "has no weights: no model.safetensors" in memopt("inspect", str(folder)).err


def test_weights_in_shards_and_as_pickles(folder: Path, tmp_path: Path) -> None:
    expected = load(folder).state_dict()
    gpt2().save_pretrained(tmp_path / "shards", max_shard_size="2KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    (folder / "model.safetensors").unlink()
    torch.save(gpt2().state_dict(), folder / "pytorch_model.bin")
    for found in (load(tmp_path / "shards"), load(folder)):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


def test_an_adapter_is_put_on_its_base(folder: Path, adapter: Path) -> None:
    found = load(adapter)
    assert any(parameter.requires_grad for name, parameter in found.named_parameters() if "lora_A" in name)
    tokens = torch.arange(8)[None]
    assert not torch.equal(found.eval()(tokens).logits, load(folder).eval()(tokens).logits)
    assert f"The adapter is applied to the base in {folder}." in load_model(ModelSource(location=str(adapter))).notes
    rewrite(adapter / "adapter_config.json", lambda settings: settings.update(base_model_name_or_path="someone/gpt2"))
    with pytest.raises(FileFormatError, match="'someone/gpt2', which is not a folder on this machine"):
        load(adapter)


def test_an_adapter_that_changes_meanwhile_is_the_one_that_was_looked_at(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, read_base = load(adapter).state_dict(), pretrained._model

    def read_while_it_changes(*given: Any) -> Any:
        with suspend_watch():
            rewrite(adapter / "adapter_config.json", lambda settings: settings.update(r=1, peft_type="XLORA"))
            (adapter / "adapter_model.safetensors").unlink()
            torch.save({}, adapter / "adapter_model.bin")
        return read_base(*given)

    monkeypatch.setattr(pretrained, "_model", read_while_it_changes)
    found = load(adapter).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


REFUSED = {
    "code of its own": ({"auto_map": {"AutoModel": "model.Net"}}, "auto_map names code"),
    "code deep within": ({"text_config": {"auto_map": {"AutoModel": "model.Net"}}}, "auto_map names code"),
    "a kernel of a hub": ({"_attn_implementation": "someone/kernel"}, "names a kernel of a hub"),
    "a kernel for experts": ({"experts_implementation": "sonicmoe"}, "names a kernel of a hub"),
    "a quantized model": ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
    "settings of another library": ({"model_args": {"checkpoint_path": "w.bin"}}, "model_args"),
    "weights of a hub": ({"use_pretrained_backbone": True}, "use_pretrained_backbone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_reach_further_are_refused(name: str, folder: Path) -> None:
    settings, says = REFUSED[name]
    setting(**settings)(folder)
    with pytest.raises(UnsafeFileError, match=says) as caught:
        load(folder)
    assert caught.value.hint


def test_a_library_that_misses_another_is_not_told_to_save_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("the model requires the timm library")

    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", from_pretrained)
    with pytest.raises(FileFormatError, match="timm") as caught:
        load_model(ModelSource(location=str(folder)))
    assert caught.value.hint == "Install the library that it needs."


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ModuleNotFoundError("No module named 'transformers'", name="transformers"), "Install it: pip install"),
        (ModuleNotFoundError("No module named 'regex'", name="regex"), "In plain Python, import transformers raises"),
        (OSError("libcudart.so: cannot open"), "In plain Python, import transformers raises"),
    ],
)
def test_a_library_that_cannot_be_imported(
    folder: Path, error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(pretrained, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(FileFormatError, match="needs transformers, which cannot be imported") as caught:
        load_model(ModelSource(location=str(folder)))
    assert caught.value.hint.startswith(hint)


def test_a_library_that_reads_a_pickle_meanwhile_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        return pickle.loads(b"cos\nsystem\nX\x0c\x00\x00\x00touch canary\x85R.")

    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", from_pretrained)
    monkeypatch.chdir(folder)
    with pytest.raises(UnsafeFileError, match=r"pickle\.find_class"):
        load(folder)
    assert not Path("canary").exists()


def setting(**values: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", lambda given: given.update(values))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda folder: (folder / "config.json").write_text("[]"), "holds no settings"),
    "broken settings": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "a class of nobody's": (setting(architectures=["os"]), "class os, which transformers"),
    "no class": (
        setting(architectures=None),
        r"names no class of a model(.|\n)*build\.py:build --weights .*model\.safetensors",
    ),
    "other sizes": (setting(n_embd=16), "has weights whose shapes do not fit"),
    "a layer more": (setting(n_layer=2), "lacks weights"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "half the weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors",
    ),
    "a folder of diffusers": (setting(_diffusers_version="0.30"), "folder of diffusers"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_in_a_sentence(name: str, folder: Path) -> None:
    damage, says = DAMAGED[name]
    damage(folder)
    assert_refused(folder, says)


def test_infinity_as_transformers_writes_it(folder: Path) -> None:
    setting(limits=[0.0, {"__float__": "Infinity"}], old=float("inf"))(folder)
    assert load(folder).config.limits == [0.0, float("inf")]


def test_the_environment_is_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    load(folder)
    assert "HF_HUB_OFFLINE" not in os.environ


def test_nothing_of_the_file_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(folder / "model.safetensors")
    name = "pwned\n::error::pwned\x1b[2J"
    safetensors.save_file(weights | {name: torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    printed = io.StringIO()
    handler, logger = logging.StreamHandler(printed), logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        load(folder)
    finally:
        logger.removeHandler(handler)
    assert "pwned" not in printed.getvalue()
    assert "".join(capfd.readouterr()) == ""


HUGE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"n_layer": 10**6}, "its n_layer, 1000000 in all, is far beyond"),
    "labels": ({"num_labels": 3 * 10**6}, "its num_labels, 3000000 in all, is far beyond"),
    "words": ({"vocab_size": 10**10}, "far more bytes than its weights"),
    "positions": ({"n_positions": 10**9}, "its n_positions, 1000000000 in all, is far beyond"),
    "kinds of attention": (
        {"attention_types": [[["global"], 10**10]]},
        "its attention_types, 10000000000 in all, is far",
    ),
    "cycles": ({"H_cycles": 10**9}, "its H_cycles, 1000000000 in all, is far beyond"),
    "layers in a list": ({"depths": [5_000, 6_000]}, "its depths, 11000 in all, is far beyond"),
    "features": ({"n_embd": 10**9, "n_head": 1}, "is far beyond"),
}


@pytest.mark.parametrize("name", HUGE)
def test_settings_far_larger_than_the_weights_are_refused_before_they_are_built(name: str, folder: Path) -> None:
    settings, says = HUGE[name]
    setting(**settings)(folder)
    assert_refused(folder, says)


HUGE_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank": ({"r": 10**8}, "its r, 100000000, is far beyond"),
    "a rank of some": ({"rank_pattern": {"c_attn": 10**8}}, "its rank_pattern, 100000000, is far beyond"),
    "rounds of a start": ({"init_lora_weights": "pissa_niter_99999999"}, "its init_lora_weights, .* is far beyond"),
    "nested repeats": ({"target_modules": "((a*)*)*b"}, "regular expressions that may take forever"),
    "many repeats": ({"target_modules": ".*a" * 9}, "regular expressions that may take forever"),
    "alternatives": ({"target_modules": "(a|a)" * 30 + "b"}, "regular expressions that may take forever"),
    "nothing, often": ({"target_modules": "(){100000000}c_attn"}, "regular expressions that may take forever"),
    "many slow ones": (
        {"rank_pattern": {f".*{n}.*.*": 2 for n in range(99)}},
        "regular expressions that may take forever",
    ),
    "a long one": ({"target_modules": "a" * 10**6}, "regular expressions that may take forever"),
    "options": ({"exclude_modules": ".?" * 40 + "!"}, "regular expressions that may take forever"),
    "more options than a float counts": ({"target_modules": ".?" * 1100}, "regular expressions that may take forever"),
    "references": ({"layers_pattern": r"(a*)\1*b"}, "regular expressions that may take forever"),
    "no expression": ({"layers_pattern": "("}, "regular expressions that may take forever"),
    "very many names": ({"target_modules": [f"a{n}" for n in range(50_000)]}, "50000 names in its target"),
    "very many expressions": ({"rank_pattern": {f"a{n}": 2 for n in range(50_000)}}, "50000 names in its rank_p"),
    "names of very many parts": ({"target_modules": ["a." * 1900] * 200}, "200 names in its target_modules"),
    "repeats in a key": ({"rank_pattern": {"(a+)+b": 3}}, "regular expressions that may take forever"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE_ADAPTERS)
def test_adapters_that_would_take_forever_are_refused(name: str, adapter: Path) -> None:
    settings, says = HUGE_ADAPTERS[name]
    rewrite(adapter / "adapter_config.json", lambda given: given.update(settings))
    assert_refused(adapter, says)


LISTS: dict[str, tuple[dict[str, Any], bool]] = {
    "a rank for every layer": ({"rank_pattern": {f"layers.{n}.q_proj": 4 for n in range(350)}}, True),
    "a list for every layer": ({"target_modules": [f"layers.{n}.q_proj" for n in range(2_000)]}, True),
    "ranks of AdaLoRA": (
        {"peft_type": "ADALORA", "rank_pattern": {f"layers.{n}.q_proj": [True] for n in range(1_000)}},
        True,
    ),
    "more expressions than Python remembers": ({"rank_pattern": {f"a{n}": 4 for n in range(20_000)}}, False),
    "a few that are slow on every layer": ({"rank_pattern": {f".*a.*b{n}.*c": 4 for n in range(9)}}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_an_adapter_are_bounded_by_the_names_of_its_base(name: str, tmp_path: Path) -> None:
    settings, fine = LISTS[name]
    given = {"peft_type": "LORA", **settings}
    with contextlib.nullcontext() if fine else pytest.raises(FileFormatError, match="far too long"):
        _refuse_slow_names(tmp_path, given, 2_000)
    _refuse_slow_names(tmp_path, given, 2)


READING: dict[str, tuple[dict[str, Any], str]] = {
    "layers, repeated": ({"layer_replication": [[0, 1]] * 10**5}, "layer_replication copies layers"),
    "another model": ({"peft_type": "SHADOW", "shadow_model": "/"}, "its peft_type is 'SHADOW'"),
    "other adapters": ({"peft_type": "XLORA", "adapters": {"a": "/"}}, "its peft_type is 'XLORA'"),
    "no kind": ({"peft_type": None}, "its peft_type is None"),
    "a cache": ({"corda_config": {"cache_file": "evil.pt"}}, "does not know its corda_config, .*'"),
    "a tokenizer": ({"tokenizer_name_or_path": "evil"}, "does not know its tokenizer_name_or_path"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_adapters_that_read_other_files_are_refused(name: str, adapter: Path) -> None:
    settings, says = READING[name]
    rewrite(adapter / "adapter_config.json", lambda given: given.update(settings))
    with pytest.raises(UnsafeFileError, match=says) as caught:
        load(adapter)
    assert caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.h\.\d+\.attn\.(c_attn)",
        ".*(attn).*(c_attn|v_proj).*",
        "(?:.*?(?:vision|transformer).*?(?:self_attn|attn|mlp).*?(?:q_proj|c_attn|v_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    ],
)
def test_an_adapter_may_name_its_modules_by_a_pattern(pattern: str, adapter: Path) -> None:
    rewrite(adapter / "adapter_config.json", lambda given: given.update(target_modules=pattern))
    assert any("lora_A" in name for name, _ in load(adapter).named_parameters())


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "a\x1b[2J", "a\x7f", "a" * 300, 1])
def test_an_index_names_files_of_the_folder_alone(name: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileFormatError, match="names a file that does not lie next to it") as caught:
        load(folder)
    assert caught.value.message.isprintable()


LONG = "a" * 100_000
"""Of which a message says a piece."""


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("gpt2/config.json", {"architectures": [LONG]}),
        ("gpt2/config.json", {"architectures": {LONG: 1}}),
        ("gpt2/config.json", {"activation_function": LONG}),
        ("gpt2/config.json", {"attn_implementation": LONG}),
        ("gpt2/config.json", {f"n_{LONG}": 10**9}),
        ("lora/adapter_config.json", {"base_model_name_or_path": LONG}),
        ("lora/adapter_config.json", {"peft_type": LONG}),
        ("lora/adapter_config.json", {LONG: "text"}),
        ("lora/adapter_config.json", {"other": LONG}),
    ],
    ids=range(9),
)
def test_a_message_quotes_a_piece_of_the_settings(file: str, settings: dict[str, Any], adapter: Path) -> None:
    path = adapter.parent / file
    rewrite(path, lambda given: given.update(settings))
    with pytest.raises((FileFormatError, UnsafeFileError)) as caught:
        load(path.parent)
    assert len(f"{caught.value}") < 4000


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a folder without config\.json"):
        load_model(ModelSource(location=str(tmp_path)))
