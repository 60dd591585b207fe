"""``python -m sample_models [NAME ...] [--programs]``: write the sample models to ``sample_models/build/``."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.export import Dim

from memopt_cli.loading.input_spec import make_inputs, read_spec_file
from memopt_cli.records import InputSpec

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


def write_programs(build: Callable[[], nn.Module], path: Path) -> tuple[Path, ...]:
    """Write the model of ``NAME.pt`` scripted, traced and exported: ``NAME.ts``, ``NAME.traced.ts``, ``NAME.pt2``."""
    spec = read_spec_file(path.with_suffix(".inputs.yaml"))
    args, kwargs = make_inputs(spec, seed=0, device="cpu", dtype=None)
    scripted, traced, exported = (path.with_suffix(suffix) for suffix in (".ts", ".traced.ts", ".pt2"))
    torch.jit.save(torch.jit.script(build()), scripted)
    run_once: Any = torch.jit.trace  # PyTorch's stubs do not know it
    trace = run_once(build(), args or None, example_kwarg_inputs=kwargs or None, check_trace=False)
    trace.load_state_dict(build().state_dict(), strict=False)  # running statistics as before that run
    torch.jit.save(trace, traced)
    torch.export.save(torch.export.export(build(), args, kwargs, dynamic_shapes=_dynamic(spec)), exported)
    return scripted, traced, exported


def _dynamic(spec: InputSpec) -> tuple[dict[int, Any], ...]:
    """The dimensions that the exported program leaves open: those with a name but time, whose steps it unrolls."""
    names = {symbol: Dim(symbol) for symbol in spec.dims if symbol != "T"}
    return tuple({i: names.get(str(size), Dim.STATIC) for i, size in enumerate(t.shape)} for t in spec.tensors)


def main() -> None:
    """Parse the names, write each model, its programs too if they are asked for, and say where they are."""
    parser = argparse.ArgumentParser(prog="python -m sample_models", description="Write the sample models as files.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--programs", action="store_true", help="scripted, traced and exported as well")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no sample model is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    warnings.simplefilter("ignore")  # tracing warns of what it freezes, TorchScript of its age
    for name in arguments.names or NAMES:
        written = [write_sample(name, arguments.folder)]
        if arguments.programs:
            written += write_programs(importlib.import_module(f"sample_models.{name}").build, written[0])
        print(*written)


if __name__ == "__main__":
    main()
