"""The pytest plugin, in test sessions of its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from textwrap import dedent

import pytest

from memopt_cli.pytest_plugin import TrainMemory

pytest_plugins = ["pytester"]

PLUGIN = "memopt_cli.pytest_plugin"
IS_INSTALLED = any(point.value == PLUGIN for point in entry_points(group="pytest11"))

NET = """
import pytest, torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

X = torch.ones(64, 256)
"""


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported() -> None:
    """pytester forgets what a session of its own imports, and PyTorch cannot be imported twice."""
    from torch import nn, ones

    TrainMemory(None)(nn.Linear(1, 1), ones(1, 1), optimizer="adamw")


@pytest.fixture
def run(pytester: pytest.Pytester):  # type: ignore[no-untyped-def]
    """Run a file of tests with the plugin, as it is when memopt is installed."""

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(NET + dedent(source))
        plugin = () if IS_INSTALLED else ("-p", PLUGIN)
        return pytester.runpytest_inprocess(*plugin, "--strict-markers", *arguments)

    return run


def test_a_step_within_its_limit_passes(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        @pytest.mark.limit_train_memory("2 MiB")
        def test_net(train_memory):
            counted = train_memory(net(), X)
            assert counted.breakdown.parameters_bytes == 2 * 257 * 256 * 4
            assert counted.tensor_peak_bytes == train_memory(net(), X).tensor_peak_bytes
    """)
    done.assert_outcomes(passed=1)


def test_the_summary_says_what_a_passed_test_needed(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        def test_net(train_memory):
            train_memory(net(), X)

        @pytest.mark.limit_train_memory("1 KiB")
        def test_too_much(train_memory):
            train_memory(net(), X)
    """)
    done.stdout.re_match_lines([r"=+ training memory =+", r".*::test_net: Sequential 1\.\d MiB$"])
    done.stdout.no_fnmatch_line("*::test_too_much: Sequential*")


def test_a_step_past_its_limit_fails_and_says_why(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        @pytest.mark.limit_train_memory("512 KiB")
        def test_net(train_memory):
            train_memory(net(), X)
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "a training step of Sequential needs 1.* MiB, * more than its limit of 512.0 KiB",
            "at the peak: *parameters 514.0 KiB*",
            "activations and temporaries are held by: * (Linear) * KiB*",
        ]
    )


def test_the_limit_is_exact(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        from memopt_cli.pytest_plugin import TrainMemory

        def test_net(train_memory):
            peak = train_memory(net(), X).tensor_peak_bytes
            TrainMemory(peak)(net(), X)
            with pytest.raises(pytest.fail.Exception, match="1 B more than its limit"):
                TrainMemory(peak - 1)(net(), X)
    """)
    done.assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["def test_net(train_memory): pass", "def test_net(): net()(X).sum().backward()"])
def test_a_limit_on_nothing_is_not_green(run, body: str) -> None:  # type: ignore[no-untyped-def]
    done = run(f"""
        @pytest.mark.limit_train_memory("2 GiB")
        {body}
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["limited to 2.0 GiB, but no training step was counted*"])


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["()", "(5)", "('much')", "(size='2 MiB')"])
def test_a_limit_that_is_none_is_explained(run, marker: str) -> None:  # type: ignore[no-untyped-def]
    done = run(f"""
        @pytest.mark.limit_train_memory{marker}
        def test_net(train_memory):
            train_memory(net(), X)
    """)
    done.assert_outcomes(errors=1)
    assert "limit_train_memory" in done.stdout.str()
    assert "During handling" not in done.stdout.str()


def test_loss_optimizer_and_keywords(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, x, scale):
                return {"out": self.inner(x) * scale}

        def test_net(train_memory):
            plain = train_memory(Named(), inputs={"x": X, "scale": 2.0})
            for given in ({"x": X, "scale": 2.0}, (X, 2.0)):
                assert train_memory(Named(), given) == plain
            calls = []

            def loss(output):
                calls.append(output)
                return output["out"].square().mean()

            model = Named()
            weights = [p.clone() for p in model.parameters()]
            state = train_memory(model, inputs={"x": X, "scale": 2.0}, loss=loss, optimizer="adamw")
            assert calls
            assert plain.breakdown.optimizer_bytes == 0
            assert state.breakdown.optimizer_bytes >= 2 * state.breakdown.parameters_bytes
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
            assert all(p.grad is None for p in model.parameters())
    """)
    done.assert_outcomes(passed=1)


def test_the_random_numbers_of_the_test_are_its_own(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        def test_net(train_memory):
            model = nn.Sequential(net(), nn.Dropout())
            torch.manual_seed(1)
            expected = torch.rand(3)
            torch.manual_seed(1)
            train_memory(model, X)
            assert torch.equal(torch.rand(3), expected)
    """)
    done.assert_outcomes(passed=1)


def test_a_step_that_fails_says_where(run) -> None:  # type: ignore[no-untyped-def]
    done = run("""
        def test_net(train_memory):
            train_memory(net(), torch.ones(64, 255))
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        ["*module '0' (Linear) rejected its input 64x255@float32*", "*Pass each argument of forward*"]
    )
    assert "memopt_cli/" not in done.stdout.str()  # no frame of memopt's


def test_the_marker_is_listed(run) -> None:  # type: ignore[no-untyped-def]
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.limit_train_memory(size): *"])
