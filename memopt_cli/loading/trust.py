"""Refusing names that a pickled file uses: the reason for the user, and the flag that would allow the name.

A name is judged here before it is imported, since importing runs code.  The objects of these names are judged by
:mod:`memopt_cli.loading.pickles.kinds`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from memopt_cli.errors import UnsafeFileError
from memopt_cli.loading.pickles.kinds.interface import TOO_WIDE, Denied, Missing, Use
from memopt_cli.loading.pickles.kinds.modules import LIBRARIES
from memopt_cli.loading.pickles.kinds.trusted_names import Definition, defined_as, needs_script
from memopt_cli.loading.pickles.nodes import COMPUTED, Global
from memopt_cli.loading.user_code import file_in
from memopt_cli.records import Trust, WantedGlobal
from memopt_cli.text.documents import printable

_ATTACK_NAMES: Final = frozenset(
    (
        # processes, imports and code
        "posix nt os sys subprocess runpy importlib shutil pty code codeop timeit cProfile profile pdb bdb trace "
        "doctest ctypes _ctypes multiprocessing types.CodeType types.FunctionType operator.methodcaller "
        "_operator.methodcaller "
        # built-in functions
        "builtins.eval builtins.exec builtins.compile builtins.open builtins.__import__ builtins.breakpoint "
        "builtins.input builtins.globals builtins.setattr builtins.map builtins.filter "
        # files and pickles
        "io.open _io.open io.FileIO _io.FileIO pickle _pickle marshal jsonpickle joblib.load joblib.dump "
        # network
        "socket asyncio webbrowser requests urllib3 httpx httpcore aiohttp fsspec huggingface_hub "
        # PyTorch, libraries of models, and memopt
        "torch.load torch.save torch.serialization.load torch.serialization.save torch.hub torch.jit torch.package "
        "torch.utils.cpp_extension torch.utils.model_zoo torchvision.io torchvision.datasets transformers.utils.hub "
        "transformers.dynamic_module_utils timm.models._hub sklearn.datasets memopt_cli.loading memopt_cli.cli "
        # NumPy
        "numpy.load numpy.fromfile numpy.loadtxt numpy.genfromtxt numpy.memmap numpy.save numpy.savez numpy.savetxt "
        "numpy.savez_compressed numpy.lib.npyio numpy.lib._npyio_impl numpy.lib.format numpy.testing numpy.f2py "
        "numpy.ctypeslib numpy.distutils "
        # YAML, tables and expressions
        "yaml.load yaml.load_all yaml.unsafe_load yaml.unsafe_load_all yaml.full_load yaml.full_load_all "
        "pandas.read_pickle pandas.eval numexpr.evaluate "
        # tools that install, test, compile or run programs
        "pip setuptools pkg_resources distutils pytest _pytest IPython ipykernel pexpect ptyprocess sh plumbum "
        "paramiko fabric invoke execnet cffi pyximport Cython"
    ).split()
)
"""Modules and names that run their arguments as code, or reach out of the process: no saved model refers to them."""

_HANDLE: Final = Global("torch.utils.hooks", "RemovableHandle")
_CODE_PICKLERS: Final = ("cloudpickle", "dill")
"""Packages that store functions as code."""
_CYTHON: Final = "__pyx_unpickle_"
"""Prefix of the functions that unpickle classes of compiled modules, without a source to look at."""
_DISTRIBUTIONS: Final = {
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "torch_geometric": "torch-geometric",
    "pytorch_lightning": "pytorch-lightning",
}
"""Package -> the distribution that installs it, if its name is another."""


class UntrustedNamesError(UnsafeFileError):
    """The file uses names that the user did not allow; ``remedy``: the flags that allow them, or an empty trust."""

    def __init__(self, message: str, *, hint: str, remedy: Trust, denied: Mapping[Global, Denied]) -> None:
        super().__init__(message, hint=hint)
        self.remedy = remedy
        self._denied = dict(denied)

    @property
    def requests(self) -> tuple[WantedGlobal, ...]:
        """The names that the user may be asked to allow; empty for an attack, or for a class that needs a script."""
        if self.remedy == Trust() or self.remedy.code_paths:
            return ()
        return tuple(
            WantedGlobal(name=str(wanted), package=wanted.package, reason=verdict.reason)
            for wanted, verdict in self._denied.items()
        )


def merge_trusts(trusts: Iterable[Trust]) -> Trust:
    """Merge ``trusts`` into one that allows everything allowed by any of them."""
    all_of = tuple(trusts)
    return Trust(
        libraries=tuple(dict.fromkeys(name for trust in all_of for name in trust.libraries)),
        packages=tuple(dict.fromkeys(name for trust in all_of for name in trust.packages)),
        globals=tuple(dict.fromkeys(name for trust in all_of for name in trust.globals)),
        code_paths=tuple(dict.fromkeys(path for trust in all_of for path in trust.code_paths)),
        pickle=any(trust.pickle for trust in all_of),
    )


def is_attack(wanted: Global) -> bool:
    """Return whether no model needs ``wanted``, so that only ``Trust(pickle=True)`` allows it."""
    parts = f"{wanted.module}.{wanted.name}".split(".")
    if not any(".".join(parts[:length]) in _ATTACK_NAMES for length in range(1, len(parts) + 1)):
        return wanted == COMPUTED
    # A file of that name in the current folder is the user's own: many people have a test.py or a code.py.
    return wanted.package in sys.builtin_module_names or not _is_here(wanted)


def stores_code(wanted: Iterable[Global]) -> str:
    """Return the package among ``wanted`` that stores functions as code; empty if there is none."""
    return next((name.package for name in wanted if name.package in _CODE_PICKLERS), "")


def attack_refusal(wanted: Global) -> Denied:
    """Return the refusal of ``wanted``, a name for which :func:`is_attack` holds."""
    computed = wanted == COMPUTED
    return Denied(
        "decides what to call only while it is read, so it cannot be checked"
        if computed
        else "runs its arguments as code, or reaches outside this process"
    )


def unknown_refusal(use: Use, scripts: Mapping[Global, Path], folder: str) -> Denied | Missing:
    """Return the refusal of an unclaimed name, with the flags that would allow the name.

    ``folder``: that of a script that the user named, if the module of the name is in it; empty if not.
    ``scripts``: what :func:`~memopt_cli.loading.pickles.kinds.trusted_names.scripts_with` found for each name of
    ``__main__``.
    """
    wanted = use.name
    if wanted.module == "__main__":
        return needs_script(wanted, scripts[wanted])
    if wanted == _HANDLE:
        return Denied(
            "is the handle of a hook: remove it before saving; if the model has lazy layers, run it once first"
        )
    if folder:
        return Denied("is defined in another file of the folder of the script you named", Trust(code_paths=(folder,)))
    here = _is_here(wanted)
    if wanted.package in TOO_WIDE:
        remedy = Trust(code_paths=(".",)) if here and not _is_installed(wanted.package) else None
        return Denied("is not among the names from which memopt rebuilds objects", remedy)
    if not here and not _is_installed(wanted.package):
        return Missing(f"no package {printable(wanted.package)} is installed")
    if here and not _is_installed(wanted.package):
        return Denied("is code in this folder, which you have not named yet", Trust(code_paths=(".",)))
    # A name that the source only imports may also be a function; this shows when the package is imported later.
    is_function = use.how == "called" and (wanted.name.startswith(_CYTHON) or _defined_as(wanted) == "def")
    remedy = Trust(globals=(str(wanted),)) if is_function else Trust(packages=(wanted.package,))
    return Denied("comes from a package that memopt does not know", remedy)


def how_to_install(wanted: Global) -> str:
    """Suggest how to get the package of ``wanted``, which is missing."""
    if not wanted.package.isidentifier():
        return "The file was made by hand, or is damaged."
    name = _DISTRIBUTIONS.get(wanted.package, wanted.package)
    is_known_library = name != wanted.package or any(
        wanted.package == library.partition(".")[0] for library in LIBRARIES
    )
    install = (
        f"pip install {name}" if is_known_library else "install its package, if you trust where the file came from"
    )
    if _is_here(wanted):
        return f"If the {wanted.package} in this folder is your own: `--code-path .`; else {install}."
    return f"If it is your own code, name the folder that holds it: `--code-path FOLDER`; else {install}."


def _is_installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _is_here(wanted: Global) -> bool:
    """Return whether the current folder has the module of ``wanted``, where nothing is imported without a flag."""
    return file_in(Path.cwd(), wanted.module) is not None


def _defined_as(wanted: Global) -> Definition:
    """Return the definition of ``wanted`` in the source of its module, which is read, not imported."""
    try:
        spec = importlib.util.find_spec(wanted.package)
        for length in range(2, wanted.module.count(".") + 2):
            name = ".".join(wanted.module.split(".")[:length])
            folders = spec.submodule_search_locations if spec else None
            spec = importlib.machinery.PathFinder.find_spec(name, list(folders or ()))
        if spec is None or spec.origin is None:
            return ""
    except (ImportError, OSError, ValueError):
        return ""
    return defined_as(Path(spec.origin), wanted)
