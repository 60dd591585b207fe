"""A model that is saved is not much larger than what it was loaded from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt_cli.measure import confinement
from memopt_cli.measure.confinement import max_saved_bytes
from memopt_cli.records import ModelSource, Trust


@pytest.fixture
def without_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_MARGIN_BYTES", 0)


@pytest.mark.usefixtures("without_margin")
def test_the_file_and_that_of_weights_count(tmp_path: Path) -> None:
    model, weights = tmp_path / "model.pt", tmp_path / "weights.pt"
    model.write_bytes(bytes(10))
    weights.write_bytes(bytes(200))
    assert max_saved_bytes(ModelSource(location=str(model))) == 40
    assert max_saved_bytes(ModelSource(location=str(model), weights=str(weights))) == 840


@pytest.mark.usefixtures("without_margin")
def test_a_folder_counts_and_for_an_adapter_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_bytes(bytes(1000))
    settings = json.dumps({"base_model_name_or_path": "../base"})
    (adapter / "adapter_config.json").write_text(settings)
    (adapter / "nested").mkdir()
    assert max_saved_bytes(ModelSource(location=str(adapter))) == 4 * (1000 + len(settings))


@pytest.mark.usefixtures("without_margin")
@pytest.mark.parametrize(
    "settings", ["[]", "{", "{}", '{"base_model_name_or_path": 3}', '{"base_model_name_or_path": "\\u0000"}']
)
def test_settings_of_no_adapter_add_nothing(settings: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(settings)
    assert max_saved_bytes(ModelSource(location=str(tmp_path))) == 4 * len(settings)


def test_small_models_have_a_margin(tmp_path: Path) -> None:
    """Masks that a library makes, which the file does not hold."""
    assert max_saved_bytes(ModelSource(location=str(tmp_path / "model.pt"))) == 1 << 30


@pytest.mark.parametrize("trust", [Trust(pickle=True), Trust(sandbox=False)])
def test_what_is_trusted_is_as_large_as_it_likes(trust: Trust) -> None:
    assert max_saved_bytes(ModelSource(location="model.pt", trust=trust)) > 1 << 40
    assert max_saved_bytes(ModelSource(location="package.module:make")) > 1 << 40
