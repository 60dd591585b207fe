"""``explain_oom``: what is kept where a script runs out of memory, and what is raised then."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memopt_cli
from memopt_cli.api import oom
from memopt_cli.errors import OptionError
from memopt_cli.pipeline.out_of_memory.oom_text import read_oom


@pytest.fixture(autouse=True)
def in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)


def run_out() -> None:
    torch.empty(1 << 60)


def test_the_error_is_kept_and_raised_with_a_note(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised, memopt_cli.explain_oom(tmp_path / "a b"):
        run_out()
    told = f"--log '{tmp_path / 'a b.log'}'"
    first, second, third = raised.value.__notes__[0].splitlines()
    assert first == f"memopt explain {told}"
    assert second == f"and to find what would fit: memopt explain MODEL -i SHAPE --code-path train.py {told}"
    assert third.startswith("MODEL is a saved model, or net.py:build ")
    found = read_oom((tmp_path / "a b.log").read_text())
    assert found.asked_bytes == 4 << 60
    assert found.line.startswith(__file__)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the size of a process")
def test_the_limit_and_the_size_of_the_process_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import resource, torch, memopt_cli\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "with memopt_cli.explain_oom():\n"
        "    held = torch.zeros(1 << 28)\n"  # 1 GiB
        "    torch.empty(1 << 32)\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "memopt explain --log memopt-oom.log" in ended.stderr
    found = read_oom((tmp_path / "memopt-oom.log").read_text())
    assert (found.limit, found.asked_bytes) == ("RLIMIT_AS (ulimit -v)", 16 << 30)
    assert found.available_bytes + found.before_bytes == 3 << 30
    assert 1 << 30 <= found.allocated_bytes < 1.2 * (1 << 30)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the size of a process")
def test_what_the_block_took_is_its_peak_without_what_an_optimizer_loads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import resource, torch, memopt_cli\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "def step(held):\n"
        "    torch.optim.SGD([torch.zeros(1)])\n"
        "    del held[:]\n"  # as memory is freed on the way of the error
        "    torch.empty(1 << 32)\n"
        "with memopt_cli.explain_oom():\n"
        "    step([torch.zeros(1 << 26)])\n"  # 256 MiB
    )
    subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, check=False)
    found = read_oom((tmp_path / "memopt-oom.log").read_text())
    assert 256 << 20 <= found.allocated_bytes < 300 << 20


@pytest.mark.parametrize(
    ("source", "is_asked"), [("train()\n", True), ('if __name__ == "__main__":\n    train()\n', False)]
)
def test_a_script_that_trains_when_it_is_imported_is_to_be_guarded(
    source: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script))
    with pytest.raises(RuntimeError) as raised, memopt_cli.explain_oom(tmp_path / "kept"):
        run_out()
    asked = f'the command imports {script}: first put what trains there under if __name__ == "__main__":'
    assert (raised.value.__notes__[0].splitlines()[-1] == asked) is is_asked


@pytest.mark.parametrize(("made", "flag"), [(torch.optim.AdamW, " --optimizer adamw "), (torch.optim.ASGD, None)])
def test_the_note_names_the_optimizer_that_trained(
    made: type[torch.optim.Optimizer], flag: str | None, tmp_path: Path
) -> None:
    def train() -> None:
        optimizer = made([torch.nn.Parameter(torch.zeros(1))])  # noqa: F841
        run_out()

    with pytest.raises(RuntimeError) as raised, memopt_cli.explain_oom(tmp_path / "kept"):
        train()
    note = raised.value.__notes__[0]
    assert (flag or "-i SHAPE --code-path ") in note
    assert ("--optimizer" in note) is bool(flag)


@pytest.mark.parametrize(
    ("network", "model"),
    [
        ("def __init__(self, width=8): super().__init__(); self.layer = nn.Linear(width, 8)", "train.py:Net"),
        ("def __init__(self, *args, **kwargs): super().__init__(); self.layer = nn.Linear(8, 8)", "train.py:Net"),
        ("def __init__(self, width): super().__init__(); self.layer = nn.Linear(width, 8)", "MODEL"),
        ("def __init__(self): torch.empty(1 << 60)", "MODEL"),
    ],
)
def test_the_note_names_the_class_of_the_model_that_ran(network: str, model: str, tmp_path: Path) -> None:
    made = "Net(8)" if "width)" in network else "Net()"
    (tmp_path / "train.py").write_text(
        "import memopt_cli, torch\nfrom torch import nn\n"
        "class Loss(nn.Module):\n    def forward(self, y): return torch.empty(1 << 60)\n"
        f"class Net(nn.Module):\n    {network}\n    def forward(self, x): return self.layer(x)\n"
        f"def train():\n    loss, net = Loss(), {made}\n    loss(net(torch.ones(2, 8)))\n"
        'if __name__ == "__main__":\n    with memopt_cli.explain_oom(): train()\n'
    )
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    told = f"memopt explain {model} -i SHAPE --code-path train.py --log memopt-oom.log\n{model} is "
    assert told in ended.stderr.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("file", "module", "model"), [("unet.py", "unet", "unet.py:Net"), ("models/unet.py", "models.unet", "MODEL")]
)
def test_the_note_names_the_folder_of_a_class_that_the_script_imports_and_each_input(
    file: str, module: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self): super().__init__(); self.layer = nn.Linear(8, 8)\n"
        "    def forward(self, mel, lengths, mask=None): return torch.empty(1 << 60)\n"
    )
    (tmp_path / "train.py").write_text(
        f"import memopt_cli, torch\nfrom {module} import Net\n"
        "def train():\n    net = Net()\n    torch.save(net, 'net.pt')\n    net(torch.ones(2, 8), torch.ones(2))\n"
        "with memopt_cli.explain_oom(): train()\n"
    )
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (
        f": memopt explain {model} -i mel:SHAPE -i lengths:SHAPE --code-path . --log memopt-oom.log\n" in ended.stderr
    )
    assert "imports" not in ended.stderr.rpartition("to find what would fit")[2]  # the script is not imported


@pytest.mark.parametrize("path", ["", "layer"])
def test_the_note_names_the_class_of_a_model_with_a_plan_and_says_that_it_had_one(path: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import memopt_cli, torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self): super().__init__(); self.layer = nn.Linear(8, 8)\n"
        "    def forward(self, x): return self.layer(x)\n"
        "def train():\n    net = Net()\n"
        f"    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path={path!r}),))\n"
        "    memopt_cli.apply_plan(net, plan)\n    net(torch.ones(2, 8))\n    torch.empty(1 << 60)\n"
        'if __name__ == "__main__":\n    with memopt_cli.explain_oom(): train()\n'
    )
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "memopt explain train.py:Net -i SHAPE" in ended.stderr.replace(f"{tmp_path}/", "")
    assert ended.stderr.endswith(
        "\nthe model carried a plan when memory ran out: the command looks for changes of the step without it\n"
    )


def test_it_decorates_a_function_and_replaces_what_it_kept_before(tmp_path: Path) -> None:
    decorated = memopt_cli.explain_oom(tmp_path / "kept")(run_out)
    (tmp_path / "kept.log").write_text("old")
    with pytest.raises(RuntimeError):
        decorated()
    assert "old" not in (tmp_path / "kept.log").read_text()


@pytest.mark.parametrize("ending", ["raise MemoryError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_an_error_of_loading_data_is_kept_as_one(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, memopt_cli, torch.utils.data\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        f"    def __getitem__(self, at): {ending}\n"
        "with memopt_cli.explain_oom():\n"
        "    list(torch.utils.data.DataLoader(Rows(), num_workers=1))\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr.endswith("\nmemopt explain --log memopt-oom.log\n")
    assert read_oom((tmp_path / "memopt-oom.log").read_text()).is_of_loading


def test_other_errors_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other") as raised, memopt_cli.explain_oom(tmp_path / "kept"):
        raise ValueError("other")
    assert not getattr(raised.value, "__notes__", [])
    with memopt_cli.explain_oom(tmp_path / "kept"):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_does_not_hide_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate") as raised, memopt_cli.explain_oom(tmp_path / "no" / "kept"):
        run_out()
    assert raised.value.__notes__[0].startswith("memopt could not write the files that explain it: ")


@pytest.mark.parametrize("fails", [True, False])
def test_a_snapshot_is_kept_as_well_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def memory_snapshot() -> object:
        if fails:
            raise RuntimeError("no snapshot")
        return {"segments": []}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(oom, "memory_history", contextlib.nullcontext)
    monkeypatch.setattr(oom, "memory_snapshot", memory_snapshot)
    with pytest.raises(RuntimeError, match="allocate") as raised, memopt_cli.explain_oom(tmp_path / "kept"):
        run_out()
    said = (
        "could not write the files that explain it: no snapshot"
        if fails
        else f"--snapshot {tmp_path}/kept.snapshot.pickle"
    )
    assert said in raised.value.__notes__[0]


def test_a_path_of_another_type_is_refused() -> None:
    with pytest.raises(OptionError), memopt_cli.explain_oom(3):  # type: ignore[arg-type]
        pass


FRAME = 'Traceback (most recent call last):\n  File "/me/{name}.py", line {line}, in f\n    x = f(x)\n'
MESSAGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\n"


def test_the_line_is_that_of_the_traceback_that_ends_in_the_message() -> None:
    earlier = FRAME.format(name="earlier", line=3) + "ValueError: x\n" + "step 7\n" * 20
    named = read_oom(earlier + FRAME.format(name="train", line=9) + MESSAGE)
    assert named.line == "/me/train.py:9"
    bare = read_oom(earlier + MESSAGE)
    assert bare.line == ""


def test_the_message_of_another_backend() -> None:
    said = "MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB). Tried to allocate 256.00 MB on"
    found = read_oom(said)
    assert found.asked_bytes == 256 * 2**20
    assert (found.allocated_bytes, round(found.available_bytes / 2**30, 2)) == (8 << 30, 9.07)
    shared = read_oom(said.replace("max", "other allocations: 1.00 GB, max"))
    assert round(shared.available_bytes / 2**30, 2) == 8.07
