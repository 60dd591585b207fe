"""``python -m sample_models [NAME ...]``: write the sample models (all by default) to ``sample_models/build/``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch
import yaml

NAMES = ("spiking_vgg", "lif_rnn", "resnet", "gpt", "char_rnn")
FOLDER = Path(__file__).parent / "build"


def write_sample(name: str, folder: Path) -> Path:
    """Write ``NAME.pt`` (the whole module, pickled) and ``NAME.inputs.yaml``; return the path of the first."""
    sample = importlib.import_module(f"sample_models.{name}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    torch.save(sample.build(), path)
    path.with_suffix(".inputs.yaml").write_text(yaml.safe_dump(sample.INPUTS, sort_keys=False))
    return path


def main() -> None:
    """Parse the names, write each model and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m sample_models", description="Write the sample models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all by default")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no sample model is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        print(write_sample(name, FOLDER))


if __name__ == "__main__":
    main()
