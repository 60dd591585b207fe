"""``memopt profile``: flags to one request, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.cli import app
from memopt_cli.cli.app import main
from memopt_cli.records import InputSpec, ModelSource, ProfileRequest, RankLayout, StepSettings, TensorSpec, Trust
from memopt_cli.search.estimation.cards import CARDS


def test_defaults(requests: list[ProfileRequest]) -> None:
    assert main(["profile", "model.pt"]) == 3
    settings = StepSettings(device="auto")
    assert requests == [ProfileRequest(source=ModelSource(location="model.pt"), spec=None, settings=settings)]


def test_every_flag_arrives(requests: list[ProfileRequest]) -> None:
    flags = (
        "-i Bx3 --dim B=8 --fake --plan p.plan.yaml "
        "--device cuda:1 --precision fp64 --loss l.py:f --optimizer adamw "
        "--seed 7 --timeout 12.5 --weights w.pt --code-path train.py --allow-package a --allow-global c.D -q"
    )
    assert main(["profile", "model.pt", *flags.split()]) == 3
    trust = Trust(packages=("a",), globals=("c.D",), code_paths=("train.py",))
    assert requests == [
        ProfileRequest(
            source=ModelSource(location="model.pt", weights="w.pt", trust=trust, typed_trust=trust),
            spec=InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 8}, source="--input"),
            settings=StepSettings(device="cuda:1", precision="fp64", loss="l.py:f", optimizer="adamw", seed=7),
            plan_path="p.plan.yaml",
            fake=True,
            timeout_s=12.5,
        )
    ]
    assert main(["profile", "model.pt", "--compile", "aot_eager"]) == 3
    assert requests[1].backend == "aot_eager"


def test_a_config_file_made_for_optimize(requests: list[ProfileRequest]) -> None:
    Path("memopt.yaml").write_text("level: 4\ntrust: [mine]\noptimizer: sgd\ninput: 4x3\n")
    assert main(["profile", "model.pt", "--config", "memopt.yaml"]) == 3
    (request,) = requests
    assert request.source.trust.libraries == ("mine",)
    assert request.settings.optimizer == "sgd"
    assert request.spec is not None


@pytest.fixture
def net(tmp_path: Path) -> str:
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = [nn.Linear(64, 64), nn.Tanh()]
    torch.save(nn.Sequential(*block, nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())), tmp_path / "net.pt")
    return "net.pt"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_for_people(memopt: Callable[..., Any], net: str) -> None:
    done = memopt("profile", net, "-i", "512x64=spikes:0.2")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("allocated peak ")
    assert "tensor peak" in lines[0]
    assert ", step " in lines[0]
    assert "operator" in lines[1]
    assert any("│" in line and "█" in line for line in lines)
    assert any(line.split()[:1] == ["activations"] for line in lines)
    assert any(line.split()[:2] == ["(model)", "Sequential"] for line in lines)
    assert "packs into 4.0 KiB (bit)" in done.out
    assert "net.pt" not in done.changed
    assert not done.changed


@pytest.mark.usefixtures("in_process")
def test_the_report_for_programs(memopt: Callable[..., Any], net: str) -> None:
    done = memopt("profile", net, "-i", "512x64", "--json", "--fake")
    found = json.loads(done.out)
    assert found["measurement"] is None
    assert found["fake"] is True
    assert found["header"]["spec"]["tensors"][0]["shape"] == [512, 64]
    assert found["tensor_peak_bytes"] == max(found["live_bytes"])
    assert len(found["trace"]["ops"]) + 1 == len(found["live_bytes"])


def test_a_card_arrives(requests: list[ProfileRequest]) -> None:
    assert main(["profile", "model.pt", "--for", "A100-40GB"]) == 3
    assert [request.card for request in requests] == [CARDS["a100-40gb"]]


@pytest.mark.parametrize("card", ["a101", "mine.yaml", "", "../mine.yml"])
def test_a_card_that_is_none(card: str, requests: list[ProfileRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "model.pt", "--for", card]) == 2
    assert "error: Invalid value for '--for'" in capsys.readouterr().err
    assert requests == []


def test_a_found_file_names_cards_and_files_beside_it(
    requests: list[ProfileRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("memopt.yaml").write_text("for: rtx4090\n")
    assert main(["profile", "model.pt"]) == 3
    assert [request.card for request in requests] == [CARDS["rtx4090"]]
    Path("memopt.yaml").write_text("for: ../mine.yaml\n")
    assert main(["profile", "model.pt"]) == 4
    assert "to a path outside it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_estimate_for_a_card(memopt: Callable[..., Any], net: str) -> None:
    Path("tiny.yaml").write_text(
        "memory_bytes: 1MiB\nbandwidth_bytes_per_s: 1.0e+9\nflops_per_s: {fp32: 1.0e+9}\nlaunch_s: 0.5\n"
    )
    done = memopt("profile", net, "-i", "512x64", "--for", "tiny.yaml", "--json")
    found = json.loads(done.out)
    estimate = found["estimate"]
    assert found["measurement"] is None
    assert (estimate["device"], estimate["memory_bytes"], estimate["fits"]) == ("tiny", 2**20, False)
    assert estimate["reserved_peak_bytes"] >= estimate["allocated_peak_bytes"] >= found["tensor_peak_bytes"]
    assert found["tensor_peak_bytes"] > 512 * 64 * 4
    timed = [op["seconds"] for op in found["trace"]["ops"]]
    assert set(timed) == {0.0, 0.5}  # views, and what takes no longer than its launch
    assert estimate["step_s"] == sum(timed)
    products = [op for op in found["trace"]["ops"] if op["flops"]]
    assert {op["dtype"] for op in products} == {"float32"}
    assert all(op["moved_bytes"] >= 512 * 64 * 4 for op in products)
    first = memopt("profile", net, "-i", "512x64", "--for", "tiny.yaml").out.splitlines()[0]
    assert first.startswith("estimated for tiny: allocated peak ")
    assert first.endswith("it does not fit: 2.0 MiB reserved of 1.0 MiB")


def test_a_card_and_a_device_exclude_each_other(memopt: Callable[..., Any], net: str) -> None:
    done = memopt("profile", net, "-i", "512x64", "--for", "t4-16gb", "--device", "cuda:0")
    assert done.code == 2
    assert "--device cuda:0 runs the step, but --for t4-16gb" in done.err


def test_one_rank_of_many(requests: list[ProfileRequest]) -> None:
    flags = "--fake --ranks 64 --parallel train.py:shard --mesh dp=32,tp=2 --rank 3"
    Path("train.py").touch()
    assert main(["profile", "net:build", *flags.split()]) == 3
    (request,) = requests
    assert request.layout == RankLayout(ranks=64, parallel="train.py:shard", mesh={"dp": 32, "tp": 2})
    assert request.rank == 3


def test_the_first_and_the_last_rank_are_asked_for(requests: list[ProfileRequest]) -> None:
    assert main(["profile", "net:build", *"--fake --ranks 8 --parallel fsdp".split()]) == 3
    (request,) = requests
    assert request.layout == RankLayout(ranks=8, parallel="fsdp", mesh={"dp": 8})
    assert request.rank is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--fake --ranks 64 --parallel fsdp --mesh dp=32,tp=3", "the mesh has 32 × 3 = 96 ranks, not 64"),
        ("--fake --ranks 64 --parallel fsdp --mesh dp=32,dp=2", "the axis dp twice"),
        ("--fake --ranks 64 --parallel fsdp --mesh 64", "'64' is not NAME=SIZE"),
        ("--fake --ranks 64 --parallel fsdp --mesh dp=0", "'dp=0' is not NAME=SIZE"),
        ("--fake --ranks 8 --parallel fsdp --mesh a=2,b=2,c=2", "fsdp takes a mesh of at most 2 axes, not of 3"),
        ("--fake --ranks 64 --parallel fsdp --rank 64", "there is no rank 64 of 64"),
        ("--fake --ranks 0 --parallel fsdp", "'0' is not a whole number from 1 to 1048576"),
        ("--fake --ranks 2 --parallel missing.py:shard", "there is no file 'missing.py'"),
        ("--fake --ranks 2 --parallel zero3", "'zero3' is neither fsdp nor ddp nor of the form"),
        ("--fake --ranks 2", "needs --parallel fsdp, ddp or FILE.py:NAME"),
        ("--fake --parallel fsdp", "needs --ranks N"),
        ("--fake --mesh dp=2", "needs --ranks N"),
        ("--ranks 2 --parallel fsdp", "one rank of many is predicted on tensors without data"),
    ],
)
def test_ranks_that_make_no_sense(
    flags: str, reason: str, requests: list[ProfileRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before PyTorch is imported."""
    assert main(["profile", "net:build", *flags.split()]) == 2
    assert reason in capsys.readouterr().err
    assert not requests


def test_one_of_several_processes_is_refused(
    requests: list[ProfileRequest], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(app, "await_turn_to_print", lambda *_: True)
    assert main(["profile", "model.pt"]) == 2
    told = capsys.readouterr().err
    assert "memopt profile runs in one process, but this one is rank 1 of 2" in told
    assert "only memopt measure runs on all ranks of torchrun" in told
    assert not requests
    assert main(["profile", "--help"]) == 0
