"""Compare predicted with measured peaks in each phase of a step.

    python benchmarks/phases.py [--models gpt,resnet,lora]

Models: gpt and resnet of ``sample_models``, and a small Llama of Hugging Face whose attention has LoRA adapters
(``pip install transformers peft``).  Each takes a step with each of :data:`SETTINGS`.  The profiler measures the peaks
of forward, backward, clipping and update; a dry run on tensors without data predicts them, but takes the workspaces of
kernels from the measurement.  The largest error of all phases may be 1 %.

Each model has a section in RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.results import table, write_section
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.records import Phase, Precision, StepSettings
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.text.units import format_bytes
from memopt_cli.trace import FakeStep
from memopt_cli.trace.log import resident_bytes
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep, make_scaler

ALLOWED = 0.01
"""Largest relative error that is allowed."""
# Optimizer, micro-batches, largest gradient norm (``None``: gradients are not clipped), and precision of each step.
_STEPS: tuple[tuple[str, int, float | None, Precision], ...] = (
    ("sgd", 1, None, "stored"),
    ("sgd", 4, None, "stored"),
    ("adamw", 1, None, "stored"),
    ("adamw", 4, None, "stored"),
    ("adamw:fused", 1, None, "stored"),
    ("adamw:fused", 4, None, "stored"),
    ("adamw", 1, 1.0, "stored"),
    ("adamw:fused", 4, 1.0, "bf16"),
    ("adamw", 1, 1.0, "fp16"),
)
SETTINGS = tuple(
    StepSettings(optimizer=optimizer, micro_batches=micro_batches, clip_norm=clip_norm, precision=precision)
    for optimizer, micro_batches, clip_norm, precision in _STEPS
)
_MAX_SKIPPED = 16
"""Most steps that a gradient scaler may skip at first, while gradients overflow."""
HEADER = ["step", "phase", "measured", "predicted", "error"]


def gpt() -> tuple[nn.Module, dict[str, Any]]:
    """Return the GPT of ``sample_models``, and two sequences."""
    tokens = torch.randint(8000, (2, 2, 256))
    return importlib.import_module("sample_models.gpt").build(), {"input_ids": tokens[0], "targets": tokens[1]}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    """Return the ResNet of ``sample_models``, and two small images."""
    return importlib.import_module("sample_models.resnet").build(), {"images": torch.randn(2, 3, 32, 32)}


def lora() -> tuple[nn.Module, dict[str, Any]]:
    """Return a frozen Llama of four layers with LoRA adapters, and two sequences."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=4000, **sizes))
    model = get_peft_model(whole, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    tokens = torch.randint(4000, (2, 128))
    return model, {"input_ids": tokens, "labels": tokens}


MODELS = {"gpt": gpt, "resnet": resnet, "lora": lora}


def step_of(model: nn.Module, inputs: dict[str, Any], settings: StepSettings) -> TrainingStep:
    """Return a step of ``model`` whose optimizer has its state already, and whose gradients are reset."""
    make = optimizer_maker(parse_optimizer(settings.optimizer))
    step = TrainingStep(
        model=model.train(),
        args=(),
        kwargs=inputs,
        settings=settings,
        optimizer=make(model),
        make_optimizer=make,
        scaler=make_scaler(settings),
    )
    for _ in range(_MAX_SKIPPED):
        step.reset_gradients()
        step.take()
        if any(optimizer.state for optimizer in step.optimizers()):
            break  # the scaler has found a scale at which gradients are finite
    step.reset_gradients()
    return step


def peaks(step: TrainingStep) -> tuple[Mapping[Phase, int], Mapping[Phase, int]]:
    """Return the measured and the predicted peaks of every phase, in bytes."""
    measured = measure_allocated(step.take, "cpu", resident_bytes(step))
    predicted = FakeStep(step).count(measured.workspaces).phases
    return measured.phases, {peak.phase: peak.allocated_peak_bytes for peak in predicted}


def told(settings: StepSettings) -> str:
    """Return ``settings`` in a few words."""
    parts = [settings.optimizer]
    parts += [f"accumulates {settings.micro_batches}"] if settings.micro_batches > 1 else []
    parts += ["clips"] if settings.clip_norm else []
    parts += [f"autocast {settings.precision}"] if settings.precision != "stored" else []
    return ", ".join(parts + (["scaler"] if settings.precision == "fp16" else []))


def run(name: str) -> tuple[list[list[str]], float]:
    """Return the rows of model ``name`` under :data:`HEADER`, and the largest error."""
    rows, worst = [], 0.0
    for settings in SETTINGS:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        measured, predicted = peaks(step_of(model, inputs, settings))
        for phase, found in measured.items():
            error = predicted[phase] / found - 1
            worst = max(worst, abs(error))
            rows.append([told(settings), phase, format_bytes(found), format_bytes(predicted[phase]), f"{error:+.2%}"])
            print(name, " | ".join(rows[-1]), flush=True)
    return rows, worst


def main() -> int:
    """Run the models that ``--models`` names; return 1 if an error is larger than :data:`ALLOWED`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    is_near = True
    for name in parser.parse_args().models.split(","):
        rows, worst = run(name)
        is_near &= worst <= ALLOWED
        text = f"largest error: {worst:.2%}\n\n{table(HEADER, rows)}"
        write_section(f"phases: {name}", f"python benchmarks/phases.py --models {name}", text)
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
