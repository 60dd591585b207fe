"""The folders from which models import the user's code, and whether their checkouts have other code of that name.

Python finds a package by its name alone.  Functions in ``main/ci/memory.py`` and ``branch/ci/memory.py`` that both
import ``seglab`` get the same ``seglab`` if only one is on the path, and then ``memopt verify`` compares a package with
itself, and ``memopt check`` may measure the package of the main branch for the function in ``branch``.
"""

from __future__ import annotations

import filecmp
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import file_of
from memopt_cli.records import FollowedSteps
from memopt_cli.text.documents import from_here, quoted_flag
from memopt_cli.text.units import format_some

_INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders of installed packages."""
_SHOWN = 3
"""Maximum number of packages that a note lists."""


def code_in_words(location: str, modules: Mapping[str, str]) -> str:
    """Return where the model at ``location`` imported the user's code from: ``seglab from src``; empty without any.

    ``modules``: name of each imported module -> its file.  Raises :class:`UsageError` if other code of a package lies
    in the checkout of the model's file, which would not be measured.
    """
    file = Path(file_of(location)).resolve()
    packages: defaultdict[Path, list[str]] = defaultdict(list)
    for package, folders in _sources(modules, file).items():
        for folder, loaded in folders.items():
            if file.exists() and (other := _other_code(folder, loaded, file)):
                used, unused = from_here(folder), from_here(other)
                raise UsageError(
                    f"{location} imports {package} from {used}, and other code of it, in {unused}, would not be "
                    "measured",
                    hint=f"To measure {unused}, name it: `{quoted_flag('--code-path', unused)}`; if the model's code "
                    f"itself puts a folder on sys.path, it must be that one. To measure {used}, name the model's file "
                    "of that checkout.",
                )
            if not any(part in _INSTALLED for part in folder.parts):
                packages[folder].append(package)
    return "; ".join(f"{format_some(names, _SHOWN)} from {from_here(folder)}" for folder, names in packages.items())


def import_notes(
    reference: str, candidate: str, reference_run: FollowedSteps, candidate_run: FollowedSteps
) -> tuple[str, ...]:
    """Return notes on the folders from which the models at ``reference`` and ``candidate`` import the user's code.

    There is none if both models come from one folder and import the same code.  Raises :class:`UsageError` if both
    import a package from one folder, while other code of it lies in the checkout of one of the two.
    """
    files = [Path(file_of(location)).resolve() for location in (reference, candidate)]
    if files[0] == files[1] or not all(map(os.path.exists, files)):
        return ()
    sources = [_sources(run.modules, file) for run, file in zip((reference_run, candidate_run), files, strict=True)]
    packages: defaultdict[tuple[Path, Path], list[str]] = defaultdict(list)
    for package in sorted(sources[0].keys() & sources[1].keys()):
        folders = next(iter(sources[0][package])), next(iter(sources[1][package]))
        packages[folders].append(package)
        for folder, loaded in sources[0][package].items():
            if common := loaded & sources[1][package].get(folder, set()):
                meant = [_other_code(folder, common, file) or folder for file in files]
                if meant != [folder, folder]:
                    location, other = (reference, meant[0]) if meant[0] != folder else (candidate, meant[1])
                    first, second = (quoted_flag("--code-path", from_here(each)) for each in meant)
                    raise UsageError(
                        f"both models import {package} from {from_here(folder)}, but {location} has other code of it "
                        f"in {from_here(other)}, which would not be compared",
                        hint=f"Name both folders: `{first}` `{second}`. Of two modules of one name, the reference "
                        "imports the first, the candidate the last.",
                    )
    notes = []
    for (folder, other), names in packages.items():
        if folder != other:
            sides = f"the reference imports it from {from_here(folder)}, the candidate from {from_here(other)}"
            notes.append(f"{format_some(names, _SHOWN)}: {sides}.")
        elif {file.parent for file in files} != {folder} and not any(part in _INSTALLED for part in folder.parts):
            both = f"both models import it from {from_here(folder)}{_checkout_hint(folder, files)}"
            notes.append(f"{format_some(names, _SHOWN)}: {both}.")
    return tuple(notes)


def _checkout_hint(folder: Path, files: Sequence[Path]) -> str:
    """Return what to do if ``folder`` lies in the checkout of one of the two ``files`` alone; else an empty string."""
    common = Path(os.path.commonpath([file.parent for file in files]))
    checkouts = [common.joinpath(*file.parent.relative_to(common).parts[:1]) for file in files]
    inside = [folder.is_relative_to(checkout) for checkout in checkouts]
    if common in checkouts or not any(inside):
        return ""
    other = from_here(checkouts[inside.index(False)])
    return f", and code of it in {other} is not compared: if there is any, name its folder by a second `--code-path`"


def _sources(modules: Mapping[str, str], own: Path) -> dict[str, dict[Path, set[Path]]]:
    """Return each package with the folders that Python found it in, and its loaded files, relative to the folder.

    ``own``: the file of the model itself, which is left out.
    """
    folders: dict[str, dict[Path, set[Path]]] = {}
    for name, file in sorted(modules.items()):
        path = Path(file).resolve()
        depth = name.count(".") + (path.stem == "__init__")
        if path == own or depth >= len(path.parents):
            continue
        folder, package = path.parents[depth], name.partition(".")[0]
        file_in_folder = path.relative_to(folder)
        if file_in_folder.parts[0].partition(".")[0] == package:  # else it was loaded under its own name
            folders.setdefault(package, {}).setdefault(folder, set()).add(file_in_folder)
    return folders


def _other_code(folder: Path, loaded: set[Path], file: Path) -> Path | None:
    """Return the folder in the checkout of ``file`` that has other code of a package than ``folder``, if any.

    ``loaded``: the files of the package that were loaded, relative to ``folder``.
    """
    telling = {path for path in loaded if path.stem != "__init__"} or loaded  # tests mirror a package's folders
    top = next(iter(loaded)).parts[0]
    for other in _folders_near(file, folder):
        if (
            (other / top).exists()
            and any((other / path).is_file() for path in telling)
            and not all(
                (other / path).is_file() and filecmp.cmp(folder / path, other / path, shallow=False) for path in loaded
            )
        ):
            return other
    return None


def _folders_near(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the folders around ``file``, but not around ``folder``, that correspond to ``folder`` in a checkout.

    Example: ``branch/ci/src``, ``branch/ci``, ``branch/src`` and ``branch`` for ``branch/ci/memory.py`` and
    ``main/src``.
    """
    parts = () if any(part in _INSTALLED for part in folder.parts) else folder.parts[1:]
    ends = dict.fromkeys([*(os.path.join(*parts[start:]) for start in range(len(parts))), "src", ""])
    for around in file.parents:
        if around != folder and around not in folder.parents:
            yield from (around / end for end in ends if around / end != folder)
