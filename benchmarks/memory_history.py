"""Run ``memopt check`` on each commit of a scripted repository, while other processes keep every core busy.

    python benchmarks/memory_history.py [--runs 50] [--other-torch PYTHON]

The first commit has a model in code, the plan under which it trains, and its baseline.  Each other commit makes one
change to the first.  ``memopt check`` must end with the exit code, and print the explanation, that fit the change.
``--other-torch`` is a Python interpreter with another version of PyTorch, which records the baseline of one case;
without it, that case edits the version in the baseline.  Finally the unchanged step is checked ``--runs`` times: its
peak must be the same each time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import table, this_command, write_section

REPOSITORY = Path(__file__).parents[1]
INPUTS = ("-i", "512x128")
NET = """
import memopt_cli
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.widen, self.act, self.narrow = nn.Linear(128, width), nn.Tanh(), nn.Linear(width, 128)

    def forward(self, x):
        return self.narrow(self.act(self.widen(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(Block(256), Block(256), Block(256))
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(self.features(x))


def build():
    _, plan = memopt_cli.read_plan("net.memopt.plan.yaml")
    return memopt_cli.apply_plan(Net(), plan)
"""
BUSY = "import torch\na = torch.randn(512, 512)\nwhile True: a @ a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Change of the repository, and the answer that ``memopt check`` must give."""

    subject: str
    edits: tuple[tuple[str, str], ...] = ()
    """Texts and their replacements, everywhere in the code and the plan."""
    exit_code: int
    """Exit code of ``memopt check``."""
    said: str
    """Regular expression for the sentence that explains the change."""


HISTORY = (
    Commit(
        subject="Nothing that matters", edits=(("class Net", "# A net.\nclass Net"),), exit_code=0, said="as before"
    ),
    Commit(
        subject="Widen a layer",
        edits=(("Block(256), Block(256), ", "Block(256), Block(384), "),),
        exit_code=1,
        said=r"parameters changed: features\.1\.widen \(Linear\) \+64\.5 KiB, features\.1\.narrow",
    ),
    Commit(
        subject="Train without the plan",
        edits=(("return memopt_cli.apply_plan(Net(), plan)", "return Net()"),),
        exit_code=1,
        said=r"plan: \d segments? dropped \(features",
    ),
    Commit(
        subject="Add a buffer",
        edits=(("self.head =", 'self.register_buffer("window", torch.zeros(1000))\n        self.head ='),),
        exit_code=1,
        said=r"buffers changed: \(root\) \(Net\) \+3\.9 KiB",
    ),
    Commit(
        subject="Rename the features",
        edits=(("features", "backbone"),),
        exit_code=0,
        said=r"renamed: features → backbone \(\d+ modules\), which takes no memory",
    ),
    Commit(
        subject="Switch oneDNN off",
        edits=(("class Block", "torch.backends.mkldnn.set_flags(False)\n\n\nclass Block"),),
        exit_code=5,
        said="backend: mkldnn in the baseline, none now",
    ),
)


class Repository:
    """Git repository with a model in code, its plan and its baseline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.py").write_text(NET.lstrip(), encoding="utf-8")
        self.git("init", "-q")
        self.memopt("optimize", "net:Net", *INPUTS, "--level", "1", "-q").check_returncode()
        self.memopt("baseline", "net:build", *INPUTS, "-q").check_returncode()
        self.commit("A model, its plan and its baseline")
        self.git("tag", "first")

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True)

    def commit(self, subject: str) -> None:
        self.git("add", "net.py", "net.memopt.plan.yaml", "memopt-baseline.json")
        self.git("commit", "-q", "-m", subject)

    def memopt(self, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [python, "-m", "memopt_cli", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def make(self, commit: Commit) -> None:
        """Make ``commit`` on top of the first."""
        self.git("checkout", "-q", "-B", "change", "first")
        for name in ("net.py", "net.memopt.plan.yaml"):
            text = (self.folder / name).read_text(encoding="utf-8")
            for old, new in commit.edits:
                text = text.replace(old, new)
            (self.folder / name).write_text(text, encoding="utf-8")
        self.commit(commit.subject)

    def judge(self, subject: str, exit_code: int, said: str) -> list[str]:
        """Run ``memopt check``, and return a row with its answer and whether that is the expected one."""
        done = self.memopt("check", "net:build", "-q")
        sentences = [line for line in (done.stdout + done.stderr).splitlines() if re.search(said, line)]
        is_right = done.returncode == exit_code and sentences
        return [subject, str(done.returncode), sentences[0] if sentences else "–", "yes" if is_right else "NO"]

    def record_elsewhere(self, python: str | None) -> None:
        """Replace the baseline by one of another PyTorch: recorded by ``python``, or edited if that is ``None``."""
        self.git("checkout", "-q", "-B", "change", "first")
        if python is not None:
            self.memopt("baseline", "net:build", *INPUTS, "-q", "--force", python=python).check_returncode()
            return
        path = self.folder / "memopt-baseline.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "2.6.0"}))

    def peaks(self, runs: int) -> set[int]:
        """Return the different tensor peaks of the first commit in ``runs`` checks, each in a fresh process."""
        self.git("checkout", "-q", "-f", "first")
        checks = (self.memopt("check", "net:build", "--json", "-q") for _ in range(runs))
        return {json.loads(check.stdout)["changes"][0]["after"] for check in checks}


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep every core busy with a process of its own inside the context."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Check every commit; return 1 if an exit code or explanation is wrong, or the peaks differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--other-torch", metavar="PYTHON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, load():
        repository = Repository(Path(folder))
        for commit in HISTORY:
            repository.make(commit)
            rows.append(repository.judge(commit.subject, commit.exit_code, commit.said))
            print(" | ".join(rows[-1]), flush=True)
        repository.record_elsewhere(arguments.other_torch)
        rows.append(repository.judge("A baseline of another PyTorch", 0, r"measured elsewhere than before: torch \d"))
        print(" | ".join(rows[-1]), flush=True)
        peaks = repository.peaks(arguments.runs)
    seen = f"The unchanged step, checked {arguments.runs} times: {len(peaks)} tensor peak ({min(peaks)} bytes)."
    print(seen)
    write_section(
        "memopt check along a history",
        this_command(),
        f"{table(['commit', 'exit code', 'explanation', 'right'], rows)}\n\n{seen}",
    )
    return 0 if all(row[-1] == "yes" for row in rows) and len(peaks) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
