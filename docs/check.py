"""``make check-docs``: what README and docs show is made again, and must be the same.

An output is a block under a comment that names its command::

    <!-- made by: memopt inspect model.pt -->
    <!-- made by (slow): memopt optimize model.pt | varies: batch \\d+ -->

Times and ratios vary, and what matches ``varies``; a line ``...`` stands for any lines.  Slow ones are made with
``SLOW=1``.  ``UPDATE=1`` writes what was made into the page.  Blocks of Python are run page by page, in one namespace;
what they need is in comments that begin with ``<!-- python``.  ``<!-- not run: why -->`` above a block spares it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_OUTPUT = re.compile(
    r"^<!-- made by(?P<slow> \(slow\))?: (?P<command>[^\n]+?)(?: \| varies: (?P<varies>[^\n]+?))? -->\n+"
    r"```\w*\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = re.compile(
    r"^<!-- python\n(?P<hidden>.*?)-->$|(?P<spared>^<!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_VARIES = re.compile(r"~?\d[\d,.]*(?: ?(?:ms|s|min|samples/s)\b|×)")


@dataclass(frozen=True)
class Output:
    """A block of output on a page, and what makes it."""

    page: Path
    command: str
    head: str
    """What stands above it: the comment and the fence."""
    shown: str
    varies: str
    slow: bool

    def agrees(self, made: str) -> bool:
        """``made`` is what is shown, but for what varies."""
        pieces = re.split(r"^\.\.\.\n", self._masked(self.shown), flags=re.MULTILINE)
        return bool(re.fullmatch(r"(?:.*\n)?".join(map(re.escape, pieces)), self._masked(made), re.DOTALL))

    def _masked(self, text: str) -> str:
        if self.varies:
            text = re.sub(self.varies, "#", text, flags=re.MULTILINE)
        text = _VARIES.sub("#", text)
        return "".join(f"{' '.join(line.split())}\n" for line in text.strip().splitlines())


def outputs(page: Path) -> Iterator[Output]:
    """Every block of the page that names its command."""
    for found in _OUTPUT.finditer(page.read_text()):
        head = found[0][: found.start("shown") - found.start()]
        yield Output(page, found["command"], head, found["shown"], found["varies"] or "", bool(found["slow"]))


def script(page: Path) -> str:
    """The Python of the page, each line at the number that it has there; empty if it has none."""
    text, lines = page.read_text(), dict[int, str]()
    for found in _PYTHON.finditer(text):
        group = "hidden" if found["hidden"] is not None else "code"
        if not found["spared"]:
            first = text.count("\n", 0, found.start(group))
            lines |= dict(enumerate(found[group].splitlines(), first))
    return "\n".join(lines.get(number, "") for number in range(max(lines, default=-1) + 1))


def wrong_output(output: Output, *, update: bool) -> str:
    """Make it again; what differs, if anything."""
    done = _run(output.command, ROOT)
    if done.returncode:
        return f"{output.command}\nended with {done.returncode}: {done.stderr}"
    if output.agrees(done.stdout):
        return ""
    if update and "\n...\n" not in f"\n{output.shown}":
        text = output.page.read_text()
        output.page.write_text(text.replace(f"{output.head}{output.shown}", f"{output.head}{done.stdout}", 1))
        return ""
    return f"{output.command}\nshown:\n{output.shown}\nmade:\n{done.stdout}"


def wrong_python(page: Path) -> str:
    """Run the page's Python in its own folder; how it failed, if it did."""
    code = script(page)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{page.stem}.py")
        file.write_text(code)
        done = _run(f"{sys.executable} {file}", Path(folder)) if code else None
    return done.stderr if done is not None and done.returncode else ""


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Check every page; the number of what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write what was made into the pages")
    parser.add_argument("--slow", action="store_true", help="make the slow ones, too")
    parser.add_argument("pages", nargs="*", type=Path, help="README.md and all of docs if none is named")
    asked = parser.parse_args()
    wrong = 0
    for page in asked.pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        chosen = [output for output in outputs(page) if asked.slow or not output.slow]
        for problem in (wrong_python(page), *(wrong_output(output, update=asked.update) for output in chosen)):
            if problem:
                wrong += 1
                print(f"{page}: {problem}")
    print(f"{wrong} wrong" if wrong else "the pages show what is made")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
