"""From flags and the config file to one request."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.cli.app import main
from memopt_cli.errors import WriteError
from memopt_cli.records import (
    ApplyRequest,
    Budget,
    DimRange,
    InputSpec,
    ModelSource,
    OptimizeRequest,
    SearchOverrides,
    StepSettings,
    TensorSpec,
    Trust,
)
from memopt_cli.search.plan.policy import resolve
from tests.zoo.records import verified

Optimize = Callable[..., OptimizeRequest]


def test_defaults(optimize: Optimize) -> None:
    request = optimize()
    assert request == OptimizeRequest(
        source=ModelSource(location="model.pt"),
        spec=None,
        settings=StepSettings(device="auto"),
        search=resolve(SearchOverrides()),
        flags=(),
        interruptible=True,
    )


def test_the_flags_that_describe_the_step_are_kept_as_typed(optimize: Optimize) -> None:
    typed = ("--input Bx3 --dim B=8", "--code-path train.py", "--optimizer adamw")
    others = "--optimizer-in-backward --level 2 --budget 60% --plan-only -o out.pt --force -q"
    assert sorted(optimize(*" ".join((*typed, others)).split()).flags or ()) == [
        "--code-path train.py",
        "--dim B=8",
        "--input Bx3",
        "--optimizer adamw",
    ]


def test_a_backend_arrives(optimize: Optimize) -> None:
    request = optimize("--compile", "inductor", "--budget", "60%")
    assert (request.backend, request.goal.budget) == ("inductor", Budget(share=0.6))


def test_every_flag_arrives(optimize: Optimize) -> None:
    request = optimize(
        *"-i B,3 -i y:Bx4@int64=0..9 --dim B=8 --level 4 --target Linear --target blocks.* --no-compress-x".split(),
        *"--temporal-split-factor 3 --max-split-rounds 5 --max-candidates-per-round 6 --device cuda:1".split(),
        *"--profile safe --prefer speed --checkpoint-budget memory --max-gc-wrapped-modules 7 --allow-inexact".split(),
        *"--offload disk:/fast --host-memory 8GiB".split(),
        *"--gc-target-budget-ratio 0.25 --no-allow-expensive-profiling".split(),
        *"--no-warmup-in-profile-workers --max-slowdown 1.5 --measure-levels --longest-step 3".split(),
        "--optimizer-in-backward",
        *"--precision fp64 --loss l.py:f --optimizer adamw --seed 7 --timeout 12.5 --weights w.pt".split(),
        *"--code-path train.py --allow-package a --allow-package b --allow-global c.D --trust-pickle".split(),
        *"-o out.pt --search-time 40 --force --dry-run --plan-only --no-recommend-batch -q".split(),
    )
    typed = Trust(packages=("a", "b"), globals=("c.D",), code_paths=("train.py",), pickle=True)
    assert replace(request, flags=None) == OptimizeRequest(
        source=ModelSource(
            location="model.pt",
            weights="w.pt",
            trust=typed,
            typed_trust=typed,
        ),
        spec=InputSpec(
            tensors=(
                TensorSpec(shape=("B", 3)),
                TensorSpec(name="y", shape=("B", 4), dtype="int64", values="0..9"),
            ),
            dims={"B": 8},
            source="--input",
        ),
        settings=StepSettings(device="cuda:1", precision="fp64", loss="l.py:f", optimizer="adamw", seed=7),
        search=resolve(
            SearchOverrides(
                level=4,
                targets=("Linear", "blocks.*"),
                compress_x=False,
                temporal_split_factor=3,
                allow_inexact=True,
                max_split_rounds=5,
                max_candidates_per_round=6,
                profile="safe",
                prefer="speed",
                checkpoint_budget="memory",
                max_gc_wrapped_modules=7,
                gc_target_budget_ratio=0.25,
                allow_expensive_profiling=False,
                warmup_in_profile_workers=False,
                max_slowdown=1.5,
                offload="disk:/fast",
                host_memory=8 << 30,
                optimizer_in_backward=True,
            )
        ),
        output="out.pt",
        force=True,
        dry_run=True,
        plan_only=True,
        recommend_batch=False,
        timeout_s=12.5,
        search_limit_s=40,
        measure_levels=True,
        longest_step_s=3.0,
        interruptible=True,
    )


@pytest.mark.parametrize(
    ("flags", "wanted", "by_runs"),
    [
        ((), True, False),
        (("--recommend-batch",), True, True),
        (("--longest-step", "3"), True, True),
        (("--no-recommend-batch", "--longest-step", "3"), False, False),
    ],
)
def test_the_batch_is_run_where_that_is_asked_for(
    flags: tuple[str, ...], wanted: bool, by_runs: bool, optimize: Optimize
) -> None:
    request = optimize(*flags)
    assert (request.recommend_batch, request.confirm_batch) == (wanted, by_runs)


def test_a_range_of_lengths(optimize: Optimize) -> None:
    request = optimize(
        "--dim", "S=64:2048", "--dim", "B=4", "--lengths", "l.txt", "--budget", "1GiB", "-i", "BxS@int64"
    )
    assert request.dim_range == DimRange(symbol="S", low=64, high=2048)
    assert request.lengths == "l.txt"
    assert request.spec.dims == {"B": 4, "S": 2048}


def test_a_slowdown_without_a_limit(optimize: Optimize) -> None:
    assert optimize("--max-slowdown", "none").search.asked_slowdown == math.inf


def test_a_factory_needs_no_file(pipeline: Any) -> None:
    assert main(["optimize", "sample_models.gpt:build"]) == 0
    assert pipeline.requests[0].source.location == "sample_models.gpt:build"


def test_input_data_and_script(optimize: Optimize) -> None:
    assert optimize("--input-data", "x.npz").spec == InputSpec(data_file="x.npz", source="--input-data")
    script = optimize("--input-script", "f.py:make", "--dim", "batch=4").spec
    assert script == InputSpec(script="f.py:make", dims={"batch": 4}, source="--input-script")


def test_dimensions_alone_are_kept(optimize: Optimize) -> None:
    assert optimize("--dim", "B=16").spec == InputSpec(dims={"B": 16}, source="--dim")


CONFIG = """
input: [BxS@int64, "mask:Bx1=ones"]
dims: {B: 8, S: 128}
level: 4
precision: bf16
timeout: 90
target: Linear
compress-x: false
quiet: true
"""


def test_config_file_of_the_folder(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text(CONFIG)
    request = optimize()
    assert request.source.trust == Trust()
    assert [tensor.shape for tensor in request.spec.tensors] == [("B", "S"), ("B", 1)]
    assert (request.spec.dims, request.spec.source) == ({"B": 8, "S": 128}, "memopt.yaml")
    search = request.search.options
    assert (search.level, search.targets, search.compress_x) == (4, ("Linear",), False)
    assert (request.settings.precision, request.timeout_s) == ("bf16", 90)


def test_flags_win_over_the_file(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text(CONFIG)
    request = optimize(*"--level 2 --dim S=64 --compress-x --allow-package mine --target Conv2d".split())
    search = request.search.options
    assert (search.level, search.compress_x, search.targets) == (2, True, ("Conv2d",))
    assert request.source.trust == Trust(packages=("mine",))
    assert request.spec.dims == {"B": 8, "S": 64}


def test_inputs_of_the_command_line_replace_those_of_the_file(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text(CONFIG)
    assert optimize("--input-data", "x.pt").spec == InputSpec(data_file="x.pt", source="--input-data")
    tensor = TensorSpec(shape=("B", 3))
    assert optimize("-i", "Bx3").spec == InputSpec(tensors=(tensor,), dims={"B": 8}, source="--input")
    named: dict[str, Any] = {"script": "x.py:make", "source": "--input-script"}
    script = InputSpec(**named, dims={"B": 8, "S": 128}, optional_dims=("B", "S"))
    assert optimize("--input-script", "x.py:make").spec == script
    script = InputSpec(**named, dims={"B": 8, "S": 64}, optional_dims=("B",))
    assert optimize("--input-script", "x.py:make", "--dim", "S=64").spec == script


def test_named_config_file(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text("level: 1")
    Path("other.yaml").write_text("level: 2")
    assert optimize("--config", "other.yaml").search.options.level == 2


def test_empty_config_file(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text("# nothing yet\n")
    assert optimize().search == resolve(SearchOverrides())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("levle: 3", "unknown key 'levle'"),
        ("trust-pickle: true", "'trust-pickle' cannot be set in a file"),
        ("force: true", "'force' cannot be set in a file"),
        ("output: model.pt", "'output' cannot be set in a file"),
        ("html: report.html", "'html' cannot be set in a file"),
        ("level: 7", "memopt.yaml also sets it."),
        ("level: [1, 2]", "level"),
        ("level:", "level cannot be None"),
        ("dims: [B]", "dims"),
        ("dims: {B: x}", "'B=x'"),
        ("input: 4xq", "'q'"),
        ("- level", "keys and values"),
        ("just text", "keys and values"),
        ("{a: &x [1], b: *x}", "alias"),
        ("level: {", "not valid YAML"),
        ("\x00", "a binary file"),
    ],
)
def test_bad_config_file(text: str, said: str, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("memopt.yaml").write_text(text)
    assert main(["optimize", "model.pt"]) == 2
    assert said in capsys.readouterr().err
    assert pipeline.requests == []


def test_a_named_config_file_vouches_for_libraries(optimize: Optimize) -> None:
    Path("memopt.yaml").write_text("trust: [sample_models]")
    assert optimize("--config", "memopt.yaml").source.trust == Trust(libraries=("sample_models",))


def test_a_named_config_file_whose_trust_is_none(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("memopt.yaml").write_text("trust: {a: b}")
    assert main(["optimize", "model.pt", "--config", "memopt.yaml"]) == 2
    assert "trust" in capsys.readouterr().err


RUNS_CODE = {
    "trust": "sympy",
    "sandbox": "false",
    "code-path": "evil.py",
    "loss": "evil.py:loss",
    "optimizer": "evil.py:make",
    "input-script": "evil.py:make",
    "allow-package": "sympy",
    "allow-global": "builtins.exec",
}
FOR_ANOTHER_COMMAND = {"parallel": "evil.py:spread"}
"""A found file is refused by every command, whichever of them the key is for."""


@pytest.mark.parametrize("key", [*RUNS_CODE, *FOR_ANOTHER_COMMAND])
def test_a_file_that_runs_code_must_be_named(
    key: str, optimize: Optimize, pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may lie in a folder that was downloaded, beside the model."""
    Path("memopt.yaml").write_text(f"{key}: {(RUNS_CODE | FOR_ANOTHER_COMMAND)[key]}")
    assert main(["optimize", "model.pt"]) == 4
    assert capsys.readouterr().err == (
        f"error: memopt.yaml in this folder sets '{key}', which may run or trust code, or write to another folder\n"
        "hint: If the file is yours, add --config memopt.yaml.\n"
    )
    assert pipeline.requests == []
    if key in RUNS_CODE:
        assert RUNS_CODE[key] in str(optimize("--config", "memopt.yaml")).lower()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--budget lots", "'lots' is not a memory size. For example: 24GiB or 512MB."),
        ("--budget -5%", "'-5%' is not a memory size"),
        ("--budget 150%", "'150%' is not a percentage between 0 and 100"),
        ("--budget 0MiB", "'0MiB' is not an amount that something fits into: 24GiB, 512MB or 60%"),
        ("--budget 8GiB --pick 2", "--budget cannot be combined with --pick"),
    ],
)
def test_bad_goals(flags: str, said: str, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "model.pt", *flags.split()]) == 2
    assert said in capsys.readouterr().err
    assert pipeline.requests == []


@pytest.mark.parametrize(
    ("text", "budget"),
    [("5.1MiB", Budget(nbytes=5_347_737)), ("60.5%", Budget(share=0.605)), ("8 GiB", Budget(nbytes=2**33))],
)
def test_budgets(text: str, budget: Budget, optimize: Optimize) -> None:
    assert optimize("--budget", text).goal.budget == budget


def test_a_folder_as_config_file(pipeline: Any) -> None:
    Path("memopt.yaml").mkdir()
    assert main(["optimize", "model.pt"]) == 2


def test_a_failed_verification_is_reported_and_is_the_exit_code(
    pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.result.summary.verification = verified(passed=False, worst_name="fc.weight", worst_difference=0.5)
    assert main(["optimize", "model.pt", "--dry-run"]) == 1
    assert "fc.weight" in capsys.readouterr().out


def test_what_ended_it_is_told_after_the_report(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.result = replace(pipeline.result, ended_by=WriteError("no room", hint="Make some."))
    assert main(["optimize", "model.pt"]) == 3
    out, diagnostics = capsys.readouterr()
    assert "wrote model.memopt.pt" in out
    assert diagnostics.endswith("error: no room\nhint: Make some.\n")
    assert main(["optimize", "model.pt", "--json"]) == 3
    assert json.loads(capsys.readouterr().out).keys() == {"header", "summary", "files", "use"}


def test_apply(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--allow-package a -o x.pt --force --verify -i 4x3 --precision bf16 --timeout 9"
    assert main(["apply", "model.pt", "p.plan.yaml", *flags.split()]) == 0
    typed = Trust(packages=("a",))
    source = ModelSource(location="model.pt", trust=typed, typed_trust=typed)
    expected = ApplyRequest(
        source=source,
        plan_path="p.plan.yaml",
        spec=InputSpec(tensors=(TensorSpec(shape=(4, 3)),), source="--input"),
        settings=StepSettings(device="auto", precision="bf16"),
        verify=True,
        output="x.pt",
        force=True,
        timeout_s=9.0,
    )
    assert pipeline.applied == [expected]
    assert capsys.readouterr().out == "wrote model.memopt.pt\n"


def test_apply_reads_a_config_file_made_for_optimize(pipeline: Any) -> None:
    Path("memopt.yaml").write_text(f"{CONFIG}trust: [sample_models]\n")
    assert main(["apply", "model.pt", "p.yaml", "--config", "memopt.yaml"]) == 0
    assert pipeline.applied[0].source.trust.libraries == ("sample_models",)
