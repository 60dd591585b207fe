"""``memopt recommend-batch``: flags to one request, and what is printed and written."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memopt_cli.cli.app import main
from memopt_cli.errors import StepError
from memopt_cli.pipeline.batches import fastest_search
from memopt_cli.records import (
    BatchRequest,
    DimRange,
    InputSpec,
    ModelSource,
    Plan,
    SearchOverrides,
    SegmentPlan,
    StepSettings,
    TensorSpec,
    Trust,
)
from memopt_cli.search.plan.policy import resolve


def test_defaults(requests: list[BatchRequest]) -> None:
    assert main(["recommend-batch", "model.pt"]) == 3
    settings = StepSettings(device="auto")
    assert requests == [BatchRequest(source=ModelSource(location="model.pt"), spec=None, settings=settings)]
    assert requests[0].memory == 0.9


@pytest.mark.parametrize(("flags", "dims"), [("", {"B": 2}), ("--dim B=8", {"B": 8}), ("--dim S=4", None)])
def test_the_batch_needs_no_size(flags: str, dims: dict[str, int] | None, requests: list[BatchRequest]) -> None:
    main(["recommend-batch", "model.pt", "-i", "Bx4", *flags.split()])
    assert [request.spec.dims for request in requests if request.spec] == ([dims] if dims else [])
    requests.clear()
    main(["recommend-batch", "model.pt", "-i", "8x4"])
    assert [request.spec.dims for request in requests if request.spec] == [{}]


def test_every_flag_arrives(requests: list[BatchRequest]) -> None:
    flags = (
        "-i BxS --dim B=8 --dim S=128:4096 --memory 24GiB --global-batch 512 --multiple-of 8 --objective throughput "
        "--plan p.plan.yaml --lengths l.txt -o b.yaml --force --device cuda:1 --precision fp64 --loss l.py:f "
        "--optimizer adamw --seed 7 --timeout 12.5 --longest-step 3 --weights w.pt --code-path train.py "
        "--allow-package a --allow-global c.D -q"
    )
    assert main(["recommend-batch", "model.pt", *flags.split()]) == 3
    assert main(["recommend-batch", "model.pt", "--compile", "inductor"]) == 3
    assert requests.pop().backend == "inductor"
    trust = Trust(packages=("a",), globals=("c.D",), code_paths=("train.py",))
    assert requests == [
        BatchRequest(
            source=ModelSource(location="model.pt", weights="w.pt", trust=trust, typed_trust=trust),
            spec=InputSpec(tensors=(TensorSpec(shape=("B", "S")),), dims={"B": 8, "S": 128}, source="--input"),
            settings=StepSettings(device="cuda:1", precision="fp64", loss="l.py:f", optimizer="adamw", seed=7),
            memory=24 << 30,
            objective="throughput",
            global_batch=512,
            multiple_of=8,
            dim_range=DimRange(symbol="S", low=128, high=4096),
            plan_path="p.plan.yaml",
            lengths_path="l.txt",
            output="b.yaml",
            force=True,
            timeout_s=12.5,
            longest_step_s=3.0,
        )
    ]


@pytest.fixture
def searches(requests: list[BatchRequest], monkeypatch: pytest.MonkeyPatch) -> list[BatchRequest]:
    """The same of a search."""
    pipeline = sys.modules["memopt_cli.pipeline"]
    monkeypatch.setattr(pipeline, "recommend_fastest", pipeline.recommend_batch, raising=False)
    return requests


def test_the_flags_of_a_search_arrive(searches: list[BatchRequest]) -> None:
    flags = "--search --level 2 --target Linear --target a.b --allow-inexact --search-time 60 --global-batch 512"
    assert main(["recommend-batch", "model.pt", *flags.split()]) == 3
    search = resolve(SearchOverrides(level=2, targets=("Linear", "a.b"), allow_inexact=True))
    assert (searches[0].search, searches[0].search_limit_s, searches[0].global_batch) == (search, 60.0, 512)


@pytest.mark.parametrize(
    "other",
    [
        ["--plan", "p.plan.yaml"],
        ["--objective", "max"],
        ["--dim", "S=128:4096", "-i", "BxS", "--dim", "B=8"],
        ["--replicas", "1:4"],
        ["--lengths", "l.txt"],
        ["--strategy", "bptt", "--dim", "T=1:4"],
    ],
)
def test_what_does_not_go_with_a_search(
    other: list[str], searches: list[BatchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend-batch", "model.pt", "--search", *other]) == 2
    assert other[0] in capsys.readouterr().err
    assert searches == []


@pytest.mark.parametrize(
    "flag", [["--level", "2"], ["--target", "x"], ["--allow-inexact"], ["--search-time", "5"], ["--html", "r.html"]]
)
def test_what_goes_with_a_search_alone(
    flag: list[str], searches: list[BatchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend-batch", "model.pt", *flag]) == 2
    said = capsys.readouterr().err
    assert flag[0] in said
    assert "Add --search." in said
    assert searches == []


def test_a_config_file_may_set_the_level_of_other_commands(searches: list[BatchRequest]) -> None:
    Path("memopt.yaml").write_text("level: 4\n")
    assert main(["recommend-batch", "model.pt"]) == 3
    assert main(["recommend-batch", "model.pt", "--search"]) == 3
    assert [asked.search and asked.search.options.level for asked in searches] == [None, 4]


@pytest.mark.parametrize(("text", "memory"), [("50%", 0.5), ("100 %", 1.0), ("1KiB", 1024), ("1024B", 1024)])
def test_memory(text: str, memory: float, requests: list[BatchRequest]) -> None:
    assert main(["recommend-batch", "model.pt", "--memory", text]) == 3
    assert requests[0].memory == memory
    assert type(requests[0].memory) is type(memory)


@pytest.mark.parametrize(("text", "low", "high"), [("1:64", 1, 64), ("8", 8, 8), (" 2 : 3 ", 2, 3)])
def test_replicas(text: str, low: int, high: int, requests: list[BatchRequest]) -> None:
    assert main(["recommend-batch", "model.pt", "--replicas", text]) == 3
    assert requests[0].replicas == DimRange(symbol="replicas", low=low, high=high)
    assert requests[0].aim == "throughput"
    assert main(["recommend-batch", "model.pt", "--replicas", text, "--objective", "max"]) == 3
    assert requests[1].aim == "max"


@pytest.mark.parametrize("text", ["1:64", "1:32"])  # YAML 1.1 reads the second as 92, in base 60
def test_replicas_in_a_config_file(text: str, requests: list[BatchRequest]) -> None:
    Path("memopt.yaml").write_text(f"replicas: {text}\n")
    assert main(["recommend-batch", "model.pt"]) == 3
    assert requests[0].replicas == DimRange(symbol="replicas", low=1, high=int(text[2:]))


def test_a_config_file(requests: list[BatchRequest]) -> None:
    Path("memopt.yaml").write_text("memory: 60%\nglobal-batch: 64\nlevel: 4\n")
    assert main(["recommend-batch", "model.pt"]) == 3
    assert (requests[0].memory, requests[0].global_batch) == (0.6, 64)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (["--memory", "lots"], "'lots' is not a memory size"),
        (["--memory", "0"], "'0' is not an amount that something fits into"),
        (["--memory", "101%"], "not a percentage between 0 and 100"),
        (["--memory", "-1GiB"], "is not a memory size"),
        (["--global-batch", "0"], "at least 1"),
        (["--multiple-of", "0"], "at least 1"),
        (["--objective", "fun"], "fun"),
        (["--replicas", "0:5"], "at least 1"),
        (["--replicas", "64:1"], "is empty"),
        (["--replicas", "1:"], "is not LOW:HIGH"),
        (["--replicas", "-1:4"], "is not LOW:HIGH"),
        (["--replicas", "1:99999999999999999999"], "a whole number below 2**63"),
        (["--dim", "S=128:"], "not NAME=LOW:HIGH"),
        (["--dim", "S=128:64"], "is empty"),
        (["--dim", "S=0:64"], "the range S=0:64 begins below 1\nhint: LOW must be at least 1 in S=LOW:HIGH."),
        (["--dim", "S=0"], "dimension S has size 0\nhint: Use a size of at least 1."),
        (["--dim", "S=1:2", "--dim", "T=1:2"], "two dimensions have a range"),
        (["--dim", "S=1:2", "--dim", "S=8"], "two sizes"),
        (["--level", "2"], "--level"),
    ],
)
def test_bad_usage(bad: list[str], said: str, requests: list[BatchRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend-batch", "model.pt", *bad]) == 2
    assert said in capsys.readouterr().err
    assert requests == []


@pytest.mark.parametrize(
    ("low", "high", "sizes"),
    [(128, 4096, (128, 256, 512, 1024, 2048, 4096)), (3, 13, (3, 6, 12, 13)), (5, 5, (5,)), (1, 2, (1, 2))],
)
def test_a_range_is_doubled(low: int, high: int, sizes: tuple[int, ...]) -> None:
    assert DimRange(symbol="S", low=low, high=high).sizes() == sizes


@pytest.fixture
def net(tmp_path: Path) -> str:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)]
    torch.save(nn.Sequential(*layers), tmp_path / "net.pt")
    return "net.pt"


@pytest.fixture
def six_blocks(tmp_path: Path) -> str:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6))
    torch.save(nn.Sequential(*blocks), tmp_path / "net.pt")
    return "net.pt"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_for_people(memopt: Callable[..., Any], net: str) -> None:
    done = memopt("recommend-batch", net, "-i", "64x64", "--memory", "1MiB", "--global-batch", "4096")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("batch ")
    assert lines[0].endswith(" fits, the largest that does (confirmed by a run)")
    (line,) = (line for line in lines if line.startswith("global batch 4096: "))
    steps, batch = (int(word) for word in line.removeprefix("global batch 4096: ").split(" × batch "))
    assert steps * batch == 4096
    limit = "memory limit: 1.0 MiB (--memory 1MiB)"
    assert f"{limit}, without an optimizer's state, which --optimizer adamw counts" in lines
    for pasted in (
        f"DataLoader(dataset, batch_size={batch}, shuffle=True, drop_last=True)",
        f"Trainer(accumulate_grad_batches={steps})",
        f"TrainingArguments(per_device_train_batch_size={batch}, gradient_accumulation_steps={steps})",
        f"/ {steps}).backward()",
    ):
        assert pasted in done.out
    assert f"whose statistics cover {batch} samples, not 4096" in done.out
    assert not done.changed


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("header", "flags", "is_offered"),
    [
        ({}, (), True),
        ({"sha256": "0" * 64}, (), False),  # of another model
        ({"segments": []}, (), False),
        ({"segments": 3}, (), False),
        ({"segments": [], "compile": {"backend": "eager"}}, (), False),  # predictions are of steps without a compiler
        ({}, ("--plan", "net.memopt.plan.yaml"), False),
    ],
)
def test_a_plan_beside_the_model_is_offered_and_not_used(
    header: dict[str, Any], flags: tuple[str, ...], is_offered: bool, memopt: Callable[..., Any], net: str
) -> None:
    plan = {"memopt": "0", "torch": "2", "model": net, "seed": 0, "device": "cpu", "spec": {"source": "--input"}}
    sha256 = hashlib.sha256(Path(net).read_bytes()).hexdigest()
    plan |= {"schema_version": 2, "sha256": sha256, "level": 1, "segments": [{"path": "0"}], **header}
    Path("net.memopt.plan.yaml").write_text(json.dumps(plan))
    done = memopt("recommend-batch", net, "-i", "64x64", "--memory", "1MiB", "--fake", *flags)
    assert done.code == 0, done.err
    said = "The plan in net.memopt.plan.yaml is not used. "
    said += "Add --plan net.memopt.plan.yaml to see also which batch fits under the plan."
    assert (said in done.out.splitlines()) == is_offered


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_report_for_programs_and_the_file(memopt: Callable[..., Any], net: str) -> None:
    from memopt_cli.batching.config import read_batch_shaping

    flags = ("-i", "TxBx64", "--dim", "B=8", "--dim", "T=1:2", "--memory", "512KiB", "--json", "-o", "b.yaml")
    import torch
    from torch import nn

    torch.save(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), net)
    done = memopt("recommend-batch", net, *flags)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    one, two = (row["outcome"] for row in found["rows"])
    assert [row["dims"] for row in found["rows"]] == [{"T": 1}, {"T": 2}]
    assert one["kind"] == two["kind"] == "BatchAdvice"
    assert one["recommended_batch"] == pytest.approx(2 * two["recommended_batch"], rel=0.06)
    assert found["probes"] <= 6
    assert found["batch"] == two["recommended_batch"]
    assert done.changed == {"b.yaml"}
    assert read_batch_shaping("b.yaml").adaptive_sizing.max_batch_size == found["batch"]
    again = memopt("recommend-batch", net, *flags)
    assert again.code == 2
    assert "b.yaml exists" in again.err
    assert f"To replace it: memopt recommend-batch {net} {' '.join(flags)} --force" in again.err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_copies_for_people(memopt: Callable[..., Any], net: str) -> None:
    done = memopt("recommend-batch", net, "-i", "16x64", "--memory", "2MiB", "--replicas", "2:4", "--seed", "1")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    found = re.match(r"(?:about )?(\d+) copies × batch \d+ fits", lines[0])  # about: a busy machine ran fewer batches
    assert found
    copies = int(found[1])
    if lines[1].startswith("fastest of those run: batch "):
        del lines[1]
    assert lines[1].startswith(f"{copies} copies at batch 16: ")
    assert f"models = memopt_cli.model_batching.BatchModule(model, batch={copies})" in lines
    loader = re.search(r"DataLoader\(dataset, batch_size=(\d+), shuffle=True, drop_last=True\)", done.out)
    assert loader
    assert int(loader[1]) % copies == 0
    (heading,) = (number for number, line in enumerate(lines) if "of each" in line)
    assert [line.split()[0] for line in lines[heading + 1 : heading + 3]] == ["2", "4"]


@pytest.mark.usefixtures("in_process")
def test_nothing_fits(memopt: Callable[..., Any], net: str) -> None:
    import torch
    from torch import nn

    torch.save(nn.Linear(64, 64), net)
    done = memopt("recommend-batch", net, "-i", "8x64", "--memory", "16KiB", "-o", "b.yaml")
    assert done.code == 6
    assert "error: not even a batch of 1 fits in 16.0 KiB (--memory 16KiB): it took 3" in done.err
    assert done.out == ""
    assert not done.changed


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_where_nothing_fits_without_a_plan(memopt: Callable[..., Any], six_blocks: str) -> None:
    from memopt_cli.files.memopt_files import read_plan

    net = six_blocks
    flags = ("-i", "2x1024x16", "--memory", "1700KiB", "--search")
    done = memopt("recommend-batch", net, *flags, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    answer = found["runs"][found["chosen"]]
    assert found["original"] is None
    assert answer["plan"]["segments"]
    assert answer["outcome"]["allocated_peak_bytes"] <= 1700 << 10
    assert found["verification"]["passed"]
    assert len(found["runs"]) <= 8
    assert done.changed == {"net.memopt.batch.yaml", "net.memopt.plan.yaml"}
    assert "plan: net.memopt.plan.yaml" in Path("net.memopt.batch.yaml").read_text()
    header, plan = read_plan("net.memopt.plan.yaml")
    assert [segment.path for segment in plan.segments] == [s["path"] for s in answer["plan"]["segments"]]
    assert header.spec.tensors[0].shape[0] == answer["batch"]
    again = memopt("recommend-batch", net, *flags)
    assert again.code == 2
    assert "net.memopt.batch.yaml exists" in again.err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--memory", "1700KiB", "--search-time", "0"),
            "without a plan, and the search was ended after 0 s (--search-time)",
        ),
        (("--memory", "10KiB"), "with any plan that was found; the smallest "),
    ],
)
def test_a_search_that_finds_nothing_says_why(
    memopt: Callable[..., Any], six_blocks: str, flags: tuple[str, ...], said: str
) -> None:
    done = memopt("recommend-batch", six_blocks, "-i", "2x1024x16", *flags, "--search")
    assert done.code == 6
    assert said in done.err
    assert not done.changed


@pytest.mark.usefixtures("in_process")
def test_a_search_runs_a_batch_of_use_though_its_share_of_runs_is_spent(
    memopt: Callable[..., Any], six_blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the runs was of a batch that makes up the global one, and nothing was said to fit."""
    monkeypatch.setattr(fastest_search, "_MAX_ORIGINAL_RUNS", 1)
    flags = ("-i", "3x1024x16", "--memory", "8MiB", "--search", "--global-batch", "16", "--level", "1", "--json")
    found = json.loads(memopt("recommend-batch", six_blocks, *flags).out)
    answer = found["runs"][found["chosen"]]
    assert [run["batch"] for run in found["runs"]][:2] == [3, 2]
    assert answer["usable"]
    assert answer["batch"] * answer["steps"] == 16


@pytest.mark.usefixtures("in_process")
def test_a_search_whose_answer_is_the_global_batch_says_why_it_tried_no_plan(
    memopt: Callable[..., Any], six_blocks: str
) -> None:
    done = memopt("recommend-batch", six_blocks, "-i", "1x64x16", "--memory", "1GiB", "--search", "--global-batch", "1")
    assert "samples/s; no plan was tried, as no batch may be larger than the global one" in done.out


@pytest.mark.usefixtures("in_process")
def test_a_search_that_has_no_time_left_runs_the_original_until_it_fits(
    memopt: Callable[..., Any], six_blocks: str
) -> None:
    flags = ("-i", "2x64x16", "--memory", "1GiB", "--search", "--search-time", "0", "--json")
    found = json.loads(memopt("recommend-batch", six_blocks, *flags).out)
    assert len(found["runs"]) == found["times_run"] == 1
    assert "The search was ended after 0 s (--search-time)." in found["notes"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_where_no_step_is_in_time(memopt: Callable[..., Any], six_blocks: str) -> None:
    """As without a plan, the smallest batch is the answer; nothing was said to fit, not even the plan that did."""
    flags = ("-i", "2x8192x16", "--memory", "13MiB", "--search", "--longest-step", "0.001", "--json")
    done = memopt("recommend-batch", six_blocks, *flags)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    answer = found["runs"][found["chosen"]]
    assert answer["late"]
    assert answer["batch"] == 1
    assert answer["plan"]["segments"]
    note = "No step took 0.001 s or less (--longest-step): the recommended batch has the shortest step."
    assert note in found["notes"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_tries_the_least_plan_where_those_of_the_sums_do_not_fit(
    memopt: Callable[..., Any], six_blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums promised too much, and nothing was said to fit."""
    from memopt_cli.pipeline.batches.pricing import Pricing

    plan = Plan(segments=(SegmentPlan(path="0"),))
    monkeypatch.setattr(Pricing, "fastest", lambda self, batch, budget_bytes: plan if batch == 1 else None)
    done = memopt("recommend-batch", six_blocks, "-i", "2x1024x16", "--memory", "1700KiB", "--search", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert len(found["runs"][found["chosen"]]["plan"]["segments"]) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_where_a_single_sample_runs_other_operators(memopt: Callable[..., Any]) -> None:
    """Its record says nothing of larger batches: two others are recorded."""
    Path("net.py").write_text(
        "from torch import nn\n\n"
        "class Block(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) if len(x) > 1 else super().forward(x[0].clone())[None]\n\n"
        "def build():\n"
        "    return nn.Sequential(*(Block(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)))\n"
    )
    flags = ("-i", "2x1024x16", "--memory", "3400KiB", "--search", "--json", "--code-path", ".")
    done = memopt("recommend-batch", "net.py:build", *flags)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    original = found["runs"][found["original"]]
    assert original["batch"] == 1
    assert found["priced"] > 0
    assert "No plan was tried" not in " ".join(found["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_for_people(memopt: Callable[..., Any], net: str) -> None:
    flags = ("-i", "64x64", "--memory", "1MiB", "--global-batch", "4096", "--search", "--level", "1", "-o", "b.yaml")
    done = memopt("recommend-batch", net, *flags, "--html", "r.html")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("recommended: batch ")
    steps, batch = (int(word) for word in lines[2].removeprefix("global batch 4096: ").split(" × batch "))
    assert steps * batch == 4096
    (answer,) = (line for line in lines if line.rstrip().endswith("recommended"))
    assert answer.split()[0] == str(batch)
    plans = [] if " no plan " in answer else ["b.plan.yaml"]  # by the clock
    written = ["b.yaml", *plans, "r.html"]
    assert lines[-len(written) :] == [f"wrote {name}" for name in written]
    assert done.changed == {*written}
    assert f"<b>{batch}</b>" in Path("r.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["-i", "8x63", "--search"], 3, "rejected its input"),
        (["--input-data", "x.pt", "--search"], 2, "cannot be resized"),
        (["-i", "8x64", "--search", "--target", "Nothing"], 2, "Nothing"),
        (["-i", "8x64", "--search", "-o", "no/such/folder.yaml"], 3, "there is no folder"),
        (["-i", "8x63"], 3, "rejected its input"),
        (["-i", "Bx64", "--dim", "B=2:4"], 2, "B cannot have a range"),
        (["-i", "8x64", "--plan", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["-i", "8x64", "-o", "no/such/folder.yaml"], 3, "there is no folder"),
        (["--input-data", "x.pt"], 2, "cannot be resized"),
        (["-i", "8x64", "--lengths", "nowhere.txt"], 2, "nowhere.txt"),
        (["-i", "8x64", "--lengths", "lengths.txt"], 2, "--lengths needs a dimension S or T"),
        (["-i", "8x63", "--replicas", "1:4"], 3, "1 copy with batch 8: "),
    ],
)
def test_bad_input(flags: list[str], code: int, said: str, memopt: Callable[..., Any], net: str) -> None:
    import torch

    torch.save([torch.randn(8, 64)], "x.pt")
    Path("lengths.txt").write_text("3\n4\n")
    done = memopt("recommend-batch", net, *flags, "--memory", "1MiB", "-q")
    assert done.code == code, done.err
    assert said in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--strategy bptt,magic --dim T=16:64", "unknown strategy 'magic'"),
        ("--strategy bptt --dim T=16", "tabulates memory over time steps"),
        ("--strategy online --dim T=16:64 --global-batch 64 -o b.yaml", "--global-batch and --output cannot be used"),
        ("--strategy online --dim T=16:64 --multiple-of 8", "--multiple-of cannot be used with --strategy"),
        ("--strategy online --dim T=16:64 --objective max", "--objective cannot be used with --strategy"),
        ("--strategy bptt,online --dim T=16:64 --plan p.yaml", "--strategy bptt,online does not use --plan"),
    ],
)
@pytest.mark.usefixtures("requests")
def test_strategies_that_cannot_be_asked_for(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend-batch", "model.pt", "-i", "TxBx3", "--dim", "B=8", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_strategies_are_compared_instead(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BatchRequest] = []

    def compare_strategies(request: BatchRequest, *, progress: Any, ask: Any) -> None:
        asked.append(request)
        raise StepError("enough")

    module = ModuleType("memopt_cli.pipeline.comparisons.strategies")
    vars(module)["compare_strategies"] = compare_strategies
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main("recommend-batch model.pt -i TxBx3 --dim B=8 --dim T=16:64 --strategy online,bptt".split()) == 3
    assert asked[0].strategies == ("bptt", "online")
    assert asked[0].dim_range == DimRange(symbol="T", low=16, high=64)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_table_of_strategies(memopt: Callable[..., Any], net: str) -> None:
    import torch
    from torch import nn

    from memopt_cli.online import LIF, OverTime

    wide = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    torch.save(OverTime(nn.Sequential(wide, LIF(64), nn.Linear(64, 4))), net)
    flags = "-i TxBx64=uniform --dim B=4 --dim T=4:64 --memory 700KiB --strategy plan,bptt,online"
    done = memopt("recommend-batch", net, *flags.split())
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:2] == [
        "memory of a training step by its time steps T, batch 4",
        "memory limit: 700.0 KiB (--memory 700KiB)",
    ]
    assert lines[3].split() == ["T", "bptt", "plan", "online", "D-RTRL", "online", "ES-D-RTRL"]
    assert [line.split()[0] for line in lines[4:10]] == ["4", "8", "16", "32", "64", "exact"]
    assert lines[8].count("~") >= 1
    assert lines[9].split() == ["exact", "yes", "yes", "no", "no"]
    assert "bptt: exact, by definition; grows by " in done.out
    assert "online D-RTRL: approximate, cosine " in done.out
    assert "does not grow with T" in done.out
    assert not done.changed
