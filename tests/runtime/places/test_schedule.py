"""Tensors that wait elsewhere: gradients are equal to the bit, the peak repeats to the byte, and nothing leaks."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import InputDimension, Plan, PlanRange, SegmentPlan, StepSettings
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.places import interface
from memopt_cli.runtime.places.disk import disk
from memopt_cli.runtime.places.interface import Elsewhere, counted_elsewhere
from memopt_cli.trace import FakeStep, count_step
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

ROWS, WIDTH = 1024, 64
TENSOR_BYTES = ROWS * WIDTH * 4
"""256 KiB; a chunk of it is more than the least that is sent, 64 KiB."""


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path_factory.getbasetemp() / "elsewhere"
    found.mkdir(exist_ok=True)
    monkeypatch.setattr(memopt_cli, "offload_folder", str(found))
    return found


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file no other test has."""
    monkeypatch.setattr(memopt_cli, "offload_folder", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[Elsewhere]:
    """The bytes that a test sends, of which none may be left."""
    with counted_elsewhere() as counted:
        yield counted
        gc.collect()
        assert counted.now_bytes == 0


class Mlp(
    Parts,
    norm=lambda: nn.LayerNorm(WIDTH),
    wide=lambda: nn.Linear(WIDTH, 2 * WIDTH),
    out=lambda: nn.Linear(2 * WIDTH, WIDTH),
):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.gelu(self.wide(self.norm(x))))


class Attention(Parts, project=lambda: nn.Linear(WIDTH, 3 * WIDTH), out=lambda: nn.Linear(WIDTH, WIDTH)):
    """Saves three views of one storage, none of which is dense."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(4, ROWS // 4, 4, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(1, 2).reshape(ROWS, WIDTH))


def model(block: Callable[[], nn.Module] = Mlp, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(count)))


def segments(count: int = 4, **settings: Any) -> tuple[SegmentPlan, ...]:
    return tuple(SegmentPlan(path=str(i), **{"place": "disk", **settings}) for i in range(count))


OUTSIDE = Plan(place="disk")
SEGMENTS = Plan(segments=segments())
PLANS = {
    "outside": OUTSIDE,
    "outside, packed": Plan(place="disk", packed=True),
    "segments": SEGMENTS,
    "kept outputs": Plan(segments=segments(keep=("aten::addmm",))),
    "chunks": Plan(segments=segments(chunks=3)),
    "both": Plan(place="disk", segments=segments()[::2]),
}


def here(plan: Plan) -> Plan:
    """The same plan that sends nothing."""
    return replace(plan, place="device", segments=tuple(replace(s, place="device") for s in plan.segments))


def planned(plan: Plan, block: Callable[[], nn.Module] = Mlp) -> nn.Sequential:
    made = model(block)
    memopt_cli.apply_plan(made, plan)
    return made


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, passes: int = 1) -> list[Tensor]:
    net.zero_grad()
    for _ in range(passes):
        net(inputs()).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def slowed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, plain=plain: (time.sleep(0.02), plain(*given))[1])


@pytest.mark.parametrize("block", [Mlp, Attention])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_equal_and_the_peak_is_predicted(name: str, block: type[nn.Module]) -> None:
    if name == "chunks" and block is Attention:
        pytest.skip("its rows are not independent")
    plan = PLANS[name]
    net = planned(plan, block)
    step = TrainingStep(model=net, args=(inputs(),), kwargs={}, settings=StepSettings())
    counted, dry = count_step(step), FakeStep(step).count()
    assert dry.tensor_peak_bytes == counted.tensor_peak_bytes == count_step(step).tensor_peak_bytes
    assert dry.elsewhere_bytes == counted.elsewhere_bytes >= 3 * TENSOR_BYTES
    assert same(gradients(net), gradients(planned(here(plan), block)))


@pytest.mark.parametrize("name", ["outside", "kept outputs"])
def test_the_peak_falls_and_is_the_same_on_a_slow_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(plan: Plan) -> int:
        return count_step(
            TrainingStep(model=planned(plan), args=(inputs(),), kwargs={}, settings=StepSettings())
        ).tensor_peak_bytes

    plain, sent = peak(here(PLANS[name])), peak(PLANS[name])
    assert sent < plain - 3 * TENSOR_BYTES
    slowed(monkeypatch, "pwritev", "preadv")
    assert peak(PLANS[name]) == sent


def test_the_waits_of_a_step_are_added_up(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    instants = itertools.count()
    monkeypatch.setattr(interface, "time", SimpleNamespace(perf_counter=lambda: next(instants)))
    gradients(planned(SEGMENTS))
    assert elsewhere.waited_s == 2 * 2, "two of four inputs go and come back: the caller holds one, the last stays"


@pytest.mark.parametrize("name", PLANS)
def test_a_reload_waits_for_the_copy_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(planned(here(PLANS[name])))
    slowed(monkeypatch, "pwritev", "preadv")
    assert same(gradients(planned(PLANS[name])), expected)


# ------------------------------------------------------------------------------------------------------ views


def test_views_of_one_storage_come_back_with_their_strides() -> None:
    def saved(plan: Plan) -> tuple[list[tuple[int, ...]], Tensor]:
        strides = []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x.t(), x[:, 3:], x[1:], x)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                strides.extend((t.shape, t.stride()) for t in ctx.saved_tensors)
                t, gapped, rows, x = ctx.saved_tensors
                return gradient * x + t.t() + gapped.sum() + rows.sum()

        class Net(Parts, after=Mlp, more=Mlp):
            def forward(self, x: Tensor) -> Tensor:
                return self.more(self.after(Look.apply(x * 1.5)))  # type: ignore[no-untyped-call]

        torch.manual_seed(0)
        net = Net()
        memopt_cli.apply_plan(net, plan)
        x = inputs().requires_grad_()
        net(x).square().sum().backward()
        assert x.grad is not None
        return strides, x.grad

    (strides, gradient), (expected, plain) = saved(OUTSIDE), saved(Plan())
    assert strides == expected
    assert torch.equal(gradient, plain)


def test_tensors_of_one_part_of_a_storage_are_sent_once(elsewhere: Elsewhere) -> None:
    class Twice(Parts, after=Mlp):
        def forward(self, x: Tensor) -> Tensor:
            made = x * 2
            return self.after(made.exp() + made.sin() + made.cos() + made.view(-1).tanh().view(x.shape))

    net = Twice()
    memopt_cli.apply_plan(net, OUTSIDE)
    net(inputs().requires_grad_()).sum()
    assert elsewhere.peak_bytes == TENSOR_BYTES * (3 + _saved_by(Mlp()))


def _saved_by(net: nn.Module) -> int:
    """Return how many tensors' worth of bytes ``net`` saves, its input not counted."""
    sizes = dict[int, int]()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.update({t.untyped_storage()._cdata: t.untyped_storage().nbytes()}), t)[1], lambda t: t
    )
    with hooks:
        kept = net(inputs().requires_grad_())
    del kept
    return sum(sizes.values()) // TENSOR_BYTES


# ------------------------------------------------------------------------------------------- what is not sent


def test_tensors_that_exist_anyway_are_not_sent(elsewhere: Elsewhere) -> None:
    class Net(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.register_buffer("scale", torch.randn(ROWS, WIDTH))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * self.weight * self.scale) * mask

    net = Net()
    memopt_cli.apply_plan(net, OUTSIDE)
    x, mask = inputs(), torch.ones(ROWS, WIDTH)
    net(x, mask).sum().backward()
    # The product of x and the weight is saved by nobody, and the others exist anyway.
    assert elsewhere.peak_bytes == 0


def test_parameters_of_no_module_are_not_sent(elsewhere: Elsewhere) -> None:
    """As those that FSDP has gathered."""
    weight = nn.Parameter(torch.randn(2 * TENSOR_BYTES // WIDTH // 4, WIDTH))

    class Net(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x[:64].exp(), weight)

    net = Net()
    memopt_cli.apply_plan(net, OUTSIDE)
    net(inputs().requires_grad_()).sum().backward()
    assert weight.grad is not None
    assert elsewhere.peak_bytes == 0


def test_a_tensor_that_somebody_holds_is_not_taken_twice() -> None:
    held = list[Tensor]()

    class Keeping(Parts, inner=Mlp):
        def forward(self, x: Tensor) -> Tensor:
            held.append(x)
            return self.inner(x)

    def peak(plan: Plan) -> int:
        held.clear()
        net = model(Keeping)
        memopt_cli.apply_plan(net, plan)
        return count_step(
            TrainingStep(model=net, args=(inputs(),), kwargs={}, settings=StepSettings())
        ).tensor_peak_bytes

    assert peak(SEGMENTS) == peak(here(SEGMENTS))
    assert all(torch.isfinite(t).all() for t in held)


def test_small_tensors_are_not_sent(elsewhere: Elsewhere) -> None:
    net = planned(OUTSIDE)
    net(inputs()[:8]).sum().backward()
    assert elsewhere.peak_bytes == 0


@pytest.mark.parametrize("plan", [Plan(place="host"), Plan(segments=segments(place="host"))])
def test_host_memory_is_where_tensors_of_the_cpu_are_already(
    plan: Plan, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "_warnings", set[str]())
    net = planned(plan)
    with pytest.warns(
        UserWarning, match="sends tensors to host, but tensors on cpu stay there: they are in host"
    ) as said:
        found = [gradients(net), gradients(net)]
    assert len(said) == 1
    assert elsewhere.peak_bytes == 0
    assert same(found[0], gradients(planned(here(plan))))


# ------------------------------------------------------------------------------------------ orders of a step


@pytest.mark.parametrize("name", PLANS)
def test_backward_twice(name: str) -> None:
    def run(plan: Plan) -> list[Tensor]:
        net = planned(plan)
        loss = net(inputs()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        net(inputs())  # and another forward between them
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    assert same(run(PLANS[name]), run(here(PLANS[name])))


@pytest.mark.parametrize("name", PLANS)
def test_backward_that_never_comes_leaves_nothing(
    name: str, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, "pwritev")
    net = planned(PLANS[name])
    loss = net(inputs()).sum()
    assert elsewhere.now_bytes > 0
    del loss  # while tensors are being written
    assert elsewhere.now_bytes == 0
    assert same(gradients(net), gradients(planned(here(PLANS[name]))))


@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_an_exception_in_forward_leaves_nothing(plan: Plan, elsewhere: Elsewhere) -> None:
    class Failing(Parts):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("on purpose")
            return x

    net = nn.Sequential(*model(), Failing())
    memopt_cli.apply_plan(net, plan)
    with pytest.raises(KeyError, match="on purpose"):
        net(inputs())
    gc.collect()
    assert elsewhere.now_bytes == 0
    Failing.fails = False
    assert same(gradients(net), gradients(planned(here(plan))))


@pytest.mark.parametrize("name", PLANS)
def test_two_forwards_before_one_backward(name: str) -> None:
    def run(plan: Plan) -> list[Tensor]:
        net, other = planned(plan), planned(plan)
        loss = net(inputs()).square().sum() + other(inputs()).sum() + net(inputs() * 2).sum()
        loss.backward()
        return [p.grad for p in (*net.parameters(), *other.parameters()) if p.grad is not None]

    assert same(run(PLANS[name]), run(here(PLANS[name])))


@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_gradients_accumulate(plan: Plan) -> None:
    assert same(gradients(planned(plan), passes=3), gradients(planned(here(plan)), passes=3))


@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_second_derivatives(plan: Plan) -> None:
    def run(plan: Plan) -> list[Tensor]:
        net, x = planned(plan), inputs().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    assert same(run(plan), run(here(plan)))


@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_threads_train_models_of_their_own(plan: Plan) -> None:
    expected, found = gradients(planned(here(plan))), list[bool]()

    def train(net: nn.Module) -> None:
        found.extend(same(gradients(net), expected) for _ in range(3))

    threads = [threading.Thread(target=train, args=(planned(plan),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12


def test_a_tensor_that_is_written_in_between_is_noticed() -> None:
    net = planned(SEGMENTS)
    x = inputs() * 2
    loss = net[1](net[0](x)).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after it was stored"):
        loss.backward()


def test_a_tensor_whose_memory_is_exchanged_while_it_is_sent_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, exchanged = os.pwritev, threading.Event()
    monkeypatch.setattr(os, "pwritev", lambda *given: (exchanged.wait(20), plain(*given))[1])

    class Sharing(nn.Module):
        """Has the memory of a tensor exchanged before the thread that writes comes to it."""

        def forward(self, x: Tensor) -> Tensor:
            old = numpy.ones((ROWS, WIDTH), dtype=numpy.float32)
            made = torch.from_numpy(old)
            output = (x.exp() * made).sin()
            made.share_memory_()
            old[:] = 7
            exchanged.set()
            return output

    net = nn.Sequential(Sharing(), *model())
    memopt_cli.apply_plan(net, OUTSIDE)
    x, again = inputs().requires_grad_(), inputs().requires_grad_()
    net(x).square().sum().backward()
    memopt_cli.remove_plan(net)
    net(again).square().sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert torch.equal(x.grad, again.grad)


def test_noise_that_is_filled_after_it_was_saved_is_sent_filled() -> None:
    def run(plan: Plan) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(), *model(count=2)).train()
        memopt_cli.apply_plan(net, plan)
        torch.manual_seed(3)
        net(inputs()).sum().backward()
        assert net[0].weight.grad is not None
        return net[0].weight.grad

    assert torch.equal(run(OUTSIDE), run(Plan()))


# ------------------------------------------------------------------------------------------------- the disk


def test_steps_leave_no_memory_threads_or_descriptors(own_folder: Path) -> None:
    net = planned(OUTSIDE)

    def taken() -> tuple[int, int, int]:
        gradients(net)
        return threading.active_count(), len(os.listdir("/proc/self/fd")), disk()._ranges.end

    first = taken()
    assert [taken() for _ in range(20)] == [first] * 20


def _files_in(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
                found.append(fd)
        except OSError:  # that of the listing itself
            continue
    return found


def test_a_process_ends_while_tensors_are_written(own_folder: Path) -> None:
    script = f"""
import os, time, torch, memopt_cli
from torch import nn
plain = os.pwritev
os.pwritev = lambda *given: (time.sleep(0.3), plain(*given))[1]
memopt_cli.offload_folder = {str(own_folder)!r}
net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
memopt_cli.apply_plan(net, memopt_cli.Plan(place="disk"))
loss = net(torch.randn(256, 256)).sum()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(own_folder.iterdir()) == []


def test_a_process_that_is_interrupted_while_it_waits_for_the_disk_ends(own_folder: Path) -> None:
    script = f"""
import os, signal, time, torch, memopt_cli
from torch import nn
plain = os.pwritev
os.pwritev = lambda *given: (time.sleep(1), plain(*given))[1]
memopt_cli.offload_folder = {str(own_folder)!r}
net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
memopt_cli.apply_plan(net, memopt_cli.Plan(place="disk"))
def interrupt(*given):
    raise RuntimeError("interrupted")
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.5)
net(torch.randn(256, 256))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: interrupted\n")


def test_the_file_has_no_name(own_folder: Path) -> None:
    net = planned(SEGMENTS)
    loss = net(inputs()).sum()
    assert list(own_folder.iterdir()) == []
    assert len(_files_in(own_folder)) == 1
    loss.backward()


@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_a_disk_that_is_full_ends_no_training(plan: Plan, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, written = os.pwritev, list[int]()

    def until_full(*given: Any) -> int:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(1)
        return plain(*given)

    monkeypatch.setattr(os, "pwritev", until_full)
    net = planned(plan)
    with pytest.warns(UserWarning, match=f"cannot send tensors to a file in {own_folder} .No space left") as said:
        found = [gradients(net), gradients(net)]
    assert len(said) == 1
    expected = gradients(planned(here(plan)))
    assert same(found[0], expected)
    assert same(found[1], expected)


@pytest.mark.parametrize("lacks", ["start_thread", "mmap"])
def test_a_process_that_can_have_no_more_threads_goes_on(
    lacks: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(12, "Cannot allocate memory") if lacks == "mmap" else RuntimeError("can't start new thread")

    monkeypatch.setattr(*((mmap, "mmap") if lacks == "mmap" else (threading.Thread, "start")), refuse)
    with pytest.warns(UserWarning, match="cannot send tensors to a file"):
        assert same(gradients(planned(OUTSIDE)), gradients(model()))
    assert _files_in(own_folder) == []


def test_a_folder_that_is_not_there_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "offload_folder", str(tmp_path / "missing"))
    with pytest.warns(UserWarning, match="missing .No such file or directory.: from now on they stay"):
        found = gradients(planned(OUTSIDE))
    assert same(found, gradients(planned(Plan())))


@pytest.mark.parametrize("refused", [getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0), ~0], ids=str)
def test_a_file_system_that_cannot_do_everything(
    refused: int, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special, plain = (os.O_DIRECT | os.O_TMPFILE) & refused, os.open

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).startswith(str(own_folder)) and flags & special & ~os.O_DIRECTORY:
            raise OSError(22, "Invalid argument")
        return plain(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", opened)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(planned(OUTSIDE))
    assert same(found, gradients(planned(Plan())))
    assert list(own_folder.iterdir()) == []


def test_a_file_that_refuses_to_be_written_past_the_cache(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, refused = os.pwritev, list[int]()

    def write(file: int, *given: Any) -> int:
        if not refused:
            refused.append(file)
            raise OSError(22, "Invalid argument")
        return plain(file, *given)

    monkeypatch.setattr(os, "pwritev", write)
    assert same(gradients(planned(OUTSIDE)), gradients(planned(Plan())))
    assert refused


def test_bytes_that_cannot_be_read_back_end_the_step(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = planned(OUTSIDE)(inputs()).sum()

    def fail(*given: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(RuntimeError, match=r"cannot read a tensor back from its file in .*Input/output error"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    "plan",
    [
        *PLANS.values(),
        Plan(
            by=InputDimension(dim="R", argument=0, axis=0),
            ranges=(PlanRange(up_to=8, place="disk"), PlanRange(up_to=ROWS, packed=True, segments=segments())),
        ),
    ],
)
def test_a_saved_model_sends_what_its_plan_says(plan: Plan, tmp_path: Path, elsewhere: Elsewhere) -> None:
    net = planned(plan)
    assert memopt_cli.plan_of(net) == plan
    torch.save(net, tmp_path / "net.pt")
    trust = memopt_cli.Trust(packages=(__name__.partition(".")[0],))
    loaded = memopt_cli.load(tmp_path / "net.pt", trust=trust)
    assert memopt_cli.plan_of(loaded) == plan
    assert same(gradients(loaded), gradients(net))
    assert elsewhere.peak_bytes > 0


@pytest.mark.parametrize("config", [SegmentConfig(place="cloud"), SegmentConfig(recompute=False, place="")])  # type: ignore[arg-type]
def test_a_place_that_there_is_not_is_refused(config: SegmentConfig) -> None:
    with pytest.raises(ValueError, match=r"unknown place '.*'; known: device, host, disk"):
        install_segment(model(), config)


def test_nothing_is_sent_where_a_compiler_traces(elsewhere: Elsewhere) -> None:
    net = planned(SEGMENTS)
    compiled = torch.compile(net, backend="eager")
    compiled(inputs()).square().sum().backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    assert same(found, gradients(planned(SEGMENTS)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("plan", [OUTSIDE, SEGMENTS])
def test_a_fork_cannot_read_what_its_parent_has_sent(plan: Plan) -> None:
    net, expected = planned(plan), gradients(model())
    loss = net(inputs()).square().sum()
    child = os.fork()
    if not child:
        signal.alarm(20)  # rather than wait for ever
        try:
            loss.backward()
        except RuntimeError as error:
            os._exit(0 if "before this process was forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    assert same([p.grad for p in net.parameters() if p.grad is not None], expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_in_forward_waits_for_nobody() -> None:
    class Forking(nn.Module):
        child = -1

        def forward(self, x: Tensor) -> Tensor:
            made = x.sin().exp()
            self.child = os.fork()
            if not self.child:
                signal.alarm(20)
            return made.cos().tanh()

    forking = Forking()
    net = nn.Sequential(Mlp(), forking, Mlp(), Mlp(), Mlp())
    memopt_cli.apply_plan(net, OUTSIDE)
    loss = net(inputs())
    if not forking.child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forking.child, 0)[1]) == 0
    del loss


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_sends_to_a_file_of_its_own() -> None:
    net = planned(OUTSIDE)
    expected, loss = gradients(net), net(inputs()).square().sum()
    child = os.fork()
    if not child:
        with torch.autograd.set_multithreading_enabled(False):
            os._exit(0 if same(gradients(planned(OUTSIDE)), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    net.zero_grad()
    loss.backward()
    assert same([p.grad for p in net.parameters() if p.grad is not None], expected)
