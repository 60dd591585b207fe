"""Files that are given as a model and are none: what to type instead."""

from __future__ import annotations

from pathlib import Path

from memopt_cli.text.misnamed import build_hint


def test_weights_beside_their_configuration_are_named_by_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert build_hint(f"{tmp_path}/model.safetensors").endswith(f"give the folder, {tmp_path}/.")
    assert "build.py:build" in build_hint("model.safetensors")
