"""Check ``memopt explain`` on thirty steps: does its first suggestion fit the limit, and is its module right?

    python benchmarks/out_of_memory.py [--only TEXT]

Each of ten models runs under three memory limits that it exceeds.  The first suggestion is tried in a process of its
own.  The module in which memory is said to run out is compared with the record of a step on data.  The benchmark writes
its section of RESULTS.md, unless ``--only`` chooses some cases.  It needs the sample models (``make samples``) and
transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module as library
from typing import Any

import torch
from torch import nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.inputs.spec_text import parse_dims, parse_tensor
from memopt_cli.measure.jobs import ORIGINAL, Job, ProbeJob, Subject, TraceAnswer, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.memory.step_peaks import live_bytes
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, prepare
from memopt_cli.records import BatchProbe, InputSpec, ModelSource, Plan, StepSettings, StepTrace, Trust, from_data
from memopt_cli.records.progress import Progress

SHARES = (0.8, 0.6, 0.45)
"""Limits, as shares of the activation peak; the memory that stays whatever is done is added."""
IDS = "input_ids:BxS@int64=0..96"
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 256, "num_key_value_heads": 4, "use_cache": False}


@dataclass(frozen=True)
class Case:
    """Model as the command line names it, with ``-i`` and ``--dim``; no inputs if a file beside the model has them."""

    model: str
    inputs: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()


def _hugging_face(name: str, head: str, **options: Any) -> nn.Module:
    hf = library("transformers")
    torch.manual_seed(0)
    model: nn.Module = getattr(hf, f"{name}{head}")(getattr(hf, f"{name}Config")(**options))
    return model


def gpt2() -> nn.Module:
    """Build a small GPT-2."""
    return _hugging_face("GPT2", "LMHeadModel", vocab_size=96, n_embd=64, n_layer=4, n_head=4, use_cache=False)


def llama() -> nn.Module:
    """Build a small Llama."""
    return _hugging_face("Llama", "ForCausalLM", **LLAMA)


def bert() -> nn.Module:
    """Build a small BERT."""
    return _hugging_face("Bert", "ForMaskedLM", **SIZES, intermediate_size=256)


def vit() -> nn.Module:
    """Build a small vision transformer."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return _hugging_face("ViT", "ForImageClassification", **sizes, intermediate_size=256, image_size=64, patch_size=8)


def convnext() -> nn.Module:
    """Build a small ConvNeXt."""
    return _hugging_face(
        "ConvNext", "ForImageClassification", hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], image_size=64
    )


_HERE = "benchmarks/out_of_memory.py"
CASES = {
    **{name: Case(f"sample_models/build/{name}.pt") for name in ("char_rnn", "lif_rnn")},
    "gpt": Case("sample_models/build/gpt.pt", dims=("B=2",)),
    "resnet": Case("sample_models/build/resnet.pt", dims=("B=4",)),
    "spiking_vgg": Case("sample_models/build/spiking_vgg.pt", dims=("T=4", "B=2")),
    **{f"Hugging Face {name}": Case(f"{_HERE}:{name}", (IDS,), ("B=16", "S=64")) for name in ("gpt2", "llama", "bert")},
    **{f"Hugging Face {name}": Case(f"{_HERE}:{name}", ("Bx3x64x64",), ("B=16",)) for name in ("vit", "convnext")},
}


def main() -> None:
    """Run every case under every limit, print the rows and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    given = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        if given.only in name:
            for row in _rows(name, case):
                rows.append(row)
                print(*row, sep=" | ", flush=True)
    fitting, right = (sum(row[column] == "yes" for row in rows) for column in (4, 6))
    said = f"The first suggestion fits in {fitting} of {len(rows)} cases; the module is the right one in {right}."
    print(said)
    if not given.only:
        write_section("Out of memory", this_command(), f"{said}\n\n{table(_HEADINGS, rows)}")


_HEADINGS = ["step", "takes", "limit", "first suggestion", "fits", "memory runs out in", "right"]


def _rows(name: str, case: Case) -> list[list[str]]:
    prepared = _prepared(case)
    traced = _ask(prepared, TraceJob(plan=ORIGINAL, fake=False))  # on data, to record the workspaces of its kernels
    assert isinstance(traced, TraceAnswer), traced
    record = traced.trace
    held = [bytes_ + op.workspace_bytes for bytes_, op in zip(live_bytes(record)[1:], record.ops, strict=True)]
    stays = record.resident_bytes
    limits = [stays + int(share * (max(held) - stays)) for share in SHARES]
    return [_row(name, case, prepared, record, held, limit) for limit in limits]


def _row(name: str, case: Case, prepared: PreparedModel, record: StepTrace, held: list[int], limit: int) -> list[str]:
    said = _explained(case, limit)
    first = next(index for index, size in enumerate(held) if size > limit)
    module = said["instant"]["module"] if said["instant"] else "nowhere"
    suggestions = said["suggestions"]
    peak = _run_again(prepared, suggestions[0]) if suggestions else None
    return [
        name,
        f"{max(held) / 2**20:.1f} MiB",
        f"{limit / 2**20:.1f} MiB",
        suggestions[0]["text"] if suggestions else "; ".join(said["refused"]),
        "yes" if peak is not None and peak <= limit else "no",
        module or "the step",
        "yes" if module == record.ops[first].module else f"no, {record.ops[first].module}",
    ]


def _flags(case: Case) -> list[str]:
    inputs = [flag for text in case.inputs for flag in ("-i", text)]
    return [*inputs, *(flag for text in case.dims for flag in ("--dim", text)), "--allow-package", "sample_models"]


def _explained(case: Case, limit: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "memopt_cli", "explain", case.model, *_flags(case)]
    done = subprocess.run(
        [*command, "--memory", f"{limit}B", "--json", "-q"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _prepared(case: Case) -> PreparedModel:
    tensors = tuple(map(parse_tensor, case.inputs))
    spec = InputSpec(tensors=tensors, dims=parse_dims(case.dims), source="--input")
    source = ModelSource(location=case.model, trust=Trust(packages=("sample_models",)))
    load_request = LoadRequest(source=source, spec=spec, settings=StepSettings(), timeout_s=600)
    return prepare(load_request, progress=Progress(), ask=None)


def _ask(prepared: PreparedModel, job: Job[Any]) -> Any:
    with Session(prepared.subject, 600) as session:
        return session.ask(job)


def _run_again(prepared: PreparedModel, said: dict[str, Any]) -> int | None:
    """Return the allocated peak in bytes of the suggestion ``said``, in another process; ``None`` if it fails."""
    settings = prepared.subject.settings
    if said["change"] == "autocast":
        settings = replace(settings, precision="bf16")
    if said["batch"] is not None:
        settings = replace(settings, micro_batches=2)
    changed = replace(
        prepared, subject=Subject(source=prepared.subject.source, spec=prepared.subject.spec, settings=settings)
    )
    found = _ask(changed, ProbeJob(plan=from_data(Plan, said["plan"]), batch=said["batch"] or prepared.batch))
    return found.allocated_peak_bytes if isinstance(found, BatchProbe) else None


if __name__ == "__main__":
    main()
