"""``--offload``: where plans may send tensors, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import OptionError, UsageError
from memopt_cli.pipeline.plans import offload_place
from memopt_cli.records import Plan, SearchOptions, SegmentPlan, StepTrace
from tests.zoo.models import Parts


def wide() -> nn.Module:
    """A model of a class that only this process has, so that it is profiled here."""

    class Wide(Parts, layers=lambda: nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Wide()


@pytest.fixture(autouse=True)
def folder_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "offload_folder", None)


def optimized(**asked: object) -> object:
    return memopt_cli.optimize(wide(), torch.randn(1024, 64), **asked)  # type: ignore[arg-type]


def test_a_plan_that_sends_is_found_measured_verified_and_says_what_the_script_sets(tmp_path: Path) -> None:
    model, x = wide(), torch.randn(1024, 64)
    found = memopt_cli.optimize(model, x, level=1, max_slowdown=1000, offload=f"disk:{tmp_path}")
    plan, summary = found.plan, found.summary
    assert plan.sends
    outcome = summary.levels[-1].outcome
    assert summary.verification is not None
    assert summary.verification.passed
    assert outcome.elsewhere_bytes > 4 * x.nbytes  # type: ignore[union-attr]
    assert memopt_cli.offload_folder == str(tmp_path)
    assert any(f"memopt_cli.offload_folder = {str(tmp_path)!r}" in note for note in summary.notes)
    assert list(tmp_path.iterdir()) == []


def test_host_memory_is_where_tensors_of_the_cpu_are_already() -> None:
    found = optimized(level=1, offload="host")
    assert not found.plan.sends  # type: ignore[attr-defined]
    assert any("already" in note for note in found.summary.notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("offload", ["nowhere", "disk:", "host:/tmp", "disk/tmp", 3])
def test_a_place_that_there_is_not(offload: object) -> None:
    with pytest.raises(OptionError, match=r"offload is .*"):
        optimized(offload=offload)


@pytest.mark.parametrize("offload", ["disk", "none"])
def test_a_limit_on_host_memory_that_nothing_is_sent_to(offload: str) -> None:
    with pytest.raises(UsageError, match=r'host_memory="8GiB" limits .* nothing is sent there\nUse offload="host"'):
        optimized(offload=offload, host_memory="8GiB")


@pytest.mark.parametrize("memory", ["50%", 0.5, "much", 0, -1, True])
def test_a_limit_on_host_memory_that_is_no_size(memory: object) -> None:
    with pytest.raises((OptionError, UsageError), match=r"Use a size that something fits into|is not a memory size"):
        optimized(offload="host", host_memory=memory)


@pytest.mark.parametrize(
    ("room_bytes", "asked", "said"),
    [
        (4 << 30, None, "4.0 GiB to host memory: half of the free memory"),
        (4 << 30, 8 << 30, "4.0 GiB to host memory: half of the free memory"),
        (4 << 30, 1 << 30, "1.0 GiB to host memory: `--host-memory`"),
        (None, 1 << 30, "1.0 GiB to host memory: `--host-memory`"),
    ],
)
def test_the_limit_on_host_memory_is_named(room_bytes: int | None, asked: int | None, said: str) -> None:
    trace = StepTrace(modules=(), tensor_peak_bytes=0, resident_bytes=0, batch=1, room_bytes=room_bytes)
    (note,) = offload_place.room_notes(SearchOptions(host_memory=asked), trace, "host")
    assert said in note
    assert not list(offload_place.room_notes(SearchOptions(), trace, "disk"))


def test_a_folder_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        optimized(offload=f"disk:{tmp_path / 'none'}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written to"):
        optimized(offload=f"disk:{tmp_path}")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no such folder")
def test_a_folder_that_takes_no_files() -> None:
    with pytest.raises(UsageError, match="'/proc' cannot be written to"):
        optimized(offload="disk:/proc")


def test_a_folder_in_memory_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_place, "_file_system", lambda path: "tmpfs")
    with pytest.raises(UsageError, match=r"lies in memory \(tmpfs\)"):
        optimized(offload=f"disk:{tmp_path}")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no such mount")
def test_the_mount_that_a_folder_is_in_says_so() -> None:
    assert offload_place._file_system("/dev/shm/a/b") == "tmpfs"
    assert offload_place._file_system("/dev/shmx") != "tmpfs"


def test_a_device_elsewhere_has_no_disk_here() -> None:
    with pytest.raises(UsageError, match="a step that runs here"):
        optimized(offload="disk", for_device="a100-40gb")


def test_a_script_is_told_the_folder_if_the_plan_sends() -> None:
    plan = Plan(segments=(SegmentPlan(path="a", place="disk"),))
    assert offload_place.offload_folder_notes(plan, None) == offload_place.offload_folder_notes(Plan(), "/fast") == []
    assert "'/fast'" in offload_place.offload_folder_notes(plan, "/fast")[0]
