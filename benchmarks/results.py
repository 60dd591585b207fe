"""Write ``benchmarks/RESULTS.md``, which has a section for every benchmark case, with the command that wrote it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")
_HEAD = """# Results

Each section is written by the command that stands in it.  *Plans: contest* compares memopt with other ways to save
memory.

"""
_SECTION = re.compile(r"^## (?P<title>.+)$", re.MULTILINE)


def write_section(title: str, command: str, markdown: str, path: Path = RESULTS) -> None:
    """Replace the section ``## title`` by ``markdown`` with the command, the versions and the machine.

    Its headings begin at ``###``.  Sections are in alphabetical order, after a list of their titles.
    """
    sections = _sections(path.read_text(encoding="utf-8")) if path.exists() else {}
    sections[title] = f"\n`{command}`\n\n{machine()}\n\n{markdown.strip()}\n"
    _write_all(sections, path)


def _write_all(sections: Mapping[str, str], path: Path) -> None:
    """Write ``sections``, title -> text, after a list of links to them."""
    titles = sorted(sections, key=str.lower)
    contents = "".join(f"- [{name}](#{_anchor(name)})\n" for name in titles)
    text = "".join(f"\n## {name}\n{sections[name]}" for name in titles)
    partial = path.with_suffix(".partial")
    partial.write_text(_HEAD + contents + text, encoding="utf-8")
    partial.replace(path)


def this_command() -> str:
    """Return the command that started this script, as typed in the repository."""
    script = Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1])
    return shlex.join(["python", script.as_posix(), *sys.argv[1:]])


def machine(
    packages: tuple[str, ...] = ("torch", "torchvision", "timm", "spikingjelly", "snntorch", "transformers"),
) -> str:
    """Return the date, the versions of Python and of the installed ``packages``, and the machine with its GPU."""
    found = [f"Python {platform.python_version()}", *(v for v in map(_version, packages) if v)]
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hardware = f"{platform.machine()}, {os.cpu_count()} cores, {ram_bytes / 2**30:.0f} GiB RAM"
    if torch.cuda.is_available():
        hardware += f", {torch.cuda.get_device_name()}"
    return f"{date.today()}; {', '.join(found)}; {hardware}."


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _anchor(title: str) -> str:
    """Return the name under which GitHub and other renderers link a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _sections(text: str) -> dict[str, str]:
    """Return title -> text of each section."""
    titles = list(_SECTION.finditer(text))
    ends = [following.start() for following in titles[1:]] + [len(text)]
    return {
        found["title"]: text[found.end() + 1 : end].rstrip("\n") + "\n" for found, end in zip(titles, ends, strict=True)
    }
