"""A pytest plugin: ``@pytest.mark.limit_train_memory("120 MiB")`` for models that live in code.

::

    @pytest.mark.limit_train_memory("120 MiB")
    def test_net_trains_in_little_memory(train_memory):
        train_memory(Net(), torch.randn(8, 3, 64, 64))

The fixture takes one training step in this process and counts its tensor peak, the same bytes in every run.  PyTorch
is imported when the fixture is used, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.records import StepPeaks, StepSettings, to_data
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.text.paths import module_name
from memopt_cli.text.spelling import in_python, with_python_spelling
from memopt_cli.text.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

_MARKER = "limit_train_memory"
_COUNTED = "train_memory"
"""Name of a test property, which JUnit files also have: a model's class, and the tensor peak of its step."""
_HOLDERS = 5
"""Maximum number of modules that a failure names: those that hold the most memory."""


class TrainMemory:
    """Counts the memory of training steps, and fails the test if a step needs more than the limit."""

    def __init__(self, limit_bytes: int | None, properties: list[tuple[str, object]] | None = None) -> None:
        """Count against ``limit_bytes``, unless it is ``None``, and add each peak to a test's ``properties``."""
        self._limit_bytes = limit_bytes
        self._properties = [] if properties is None else properties
        self.steps = 0
        """Number of steps that were counted."""

    def __call__(
        self,
        model: nn.Module,
        *args: Any,
        inputs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        optimizer: str = "none",
        seed: int = 0,
    ) -> StepPeaks:
        """Count the tensor peak of one step on ``model(*args, **inputs)``, in bytes, and which modules hold it.

        A dict or a tuple alone in ``args`` holds the arguments of forward, as for ``memopt_cli.profile``.

        ``loss`` is called with the output.  Without it, the loss is a scalar output, an entry ``loss`` or the only
        scalar among the outputs; failing that, backward starts from random gradients of the outputs.  ``optimizer``:
        one whose state counts, named as for ``--optimizer``.  The model keeps its device, mode and state; its gradients
        are ``None`` afterwards.
        """
        alone = args[0] if len(args) == 1 else None
        if isinstance(alone, Mapping) and inputs is None:
            args, inputs = (), alone
        elif isinstance(alone, tuple):
            args = alone
        __tracebackhide__ = True  # pytest shows the line of the test, not those of memopt and PyTorch
        from memopt_cli.training.module_calls import InputsRejectedError

        try:
            counted, messages = _count(model, args, inputs or {}, loss, optimizer, seed)
        except InputsRejectedError as error:
            error.hint = "Pass each argument of forward: train_memory(model, torch.randn(8, 3, 32, 32)), or a dict."
            raise error.with_traceback(None) from None
        except MemoptError as error:
            raise error.with_traceback(None) from None
        self.steps += 1
        text = "; ".join([f"{type(model).__name__} {format_bytes(counted.tensor_peak_bytes)}", *messages])
        self._properties.append((_COUNTED, text))
        if self._limit_bytes is not None and counted.tensor_peak_bytes > self._limit_bytes:
            pytest.fail("\n".join([_complaint(model, counted, self._limit_bytes), *messages]), pytrace=False)
        return counted


@pytest.fixture
def train_memory(request: pytest.FixtureRequest) -> TrainMemory:
    """Count the memory of one training step: ``train_memory(model, *inputs)``; see the marker for a limit."""
    marker = request.node.get_closest_marker(_MARKER)
    return TrainMemory(None if marker is None else _limit(marker), request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the steps of passed tests needed, to help choose limits."""
    lines = [
        f"{report.nodeid}: {value}"
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == _COUNTED
    ]
    if lines:
        terminalreporter.section("training memory")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, so that ``--strict-markers`` accepts it."""
    config.addinivalue_line(
        "markers",
        f'{_MARKER}(size): fail if a training step measured with the fixture train_memory needs more, as in "120 MiB"',
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a marked test that counts no step: its limit could never be exceeded."""
    result = yield
    marker = pyfuncitem.get_closest_marker(_MARKER)
    if marker is not None:
        limit = format_bytes(_limit(marker))
        counter = pyfuncitem.funcargs.get(train_memory.__name__)
        if not isinstance(counter, TrainMemory) or not counter.steps:
            pytest.fail(
                f"limited to {limit}, but no training step was counted: call the fixture train_memory(model, *inputs)",
                pytrace=False,
            )
    return result


@with_python_spelling
def _count(
    model: nn.Module,
    args: tuple[Any, ...],
    inputs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    optimizer: str,
    seed: int,
) -> tuple[StepPeaks, list[str]]:
    """Count one step of ``model``, and leave its state as it was; also return sentences on what was guessed."""
    from memopt_cli.measure.local import isolate_state
    from memopt_cli.runtime.state import StartingState
    from memopt_cli.trace import count_step
    from memopt_cli.training.optimizers import optimizer_maker
    from memopt_cli.training.step import TrainingStep, reset_step

    messages: dict[str, None] = {}
    settings = StepSettings(device=_device(model), optimizer=optimizer, seed=seed)
    step = TrainingStep(
        model=model,
        args=args,
        kwargs=dict(inputs),
        settings=settings,
        loss=loss,
        optimizer=optimizer_maker(parse_optimizer(optimizer))(model),
        report=lambda message: messages.setdefault(in_python(message)),
    )
    start = StartingState(model)
    with isolate_state():
        reset_step(step, start)
        # Adam and others make their state in their first update: a second step is counted, which has the state.
        step.run_checked()
        step.update()
        reset_step(step, start)
        counted = count_step(step)
        start.restore()
    return counted, list(messages)


def _limit(marker: pytest.Mark) -> int:
    if len(marker.args) != 1 or marker.kwargs or not isinstance(marker.args[0], str):
        pytest.fail(f'write @pytest.mark.{_MARKER}("120 MiB")', pytrace=False)
    try:
        return parse_bytes(marker.args[0], needs_unit=True)
    except UsageError as err:
        message = f"@pytest.mark.{_MARKER}: {err}"
    pytest.fail(message, pytrace=False)


def _device(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device)


def _complaint(model: nn.Module, counted: StepPeaks, limit: int) -> str:
    """Return the failure message: the peak in ``counted``, its categories, and the modules that hold most."""
    peak = counted.tensor_peak_bytes
    over = f"{format_bytes(peak - limit)} more than its limit of {format_bytes(limit)}"
    parts = {kind.removesuffix("_bytes"): size for kind, size in to_data(counted.breakdown).items() if size}
    categories = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(parts.items(), key=lambda p: -p[1]))
    classes = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    holders = ", ".join(
        f"{module_name(h.path)} ({classes[h.path]}) {format_bytes(h.held_bytes)}" for h in counted.holders[:_HOLDERS]
    )
    return (
        f"a training step of {type(model).__name__} needs {format_bytes(peak)}, {over}\n"
        f"at the peak: {categories}\n"
        f"activations and temporaries are held by: {holders}"
    )
