"""Loading saved models as modules in memory.

:func:`load_model` takes files of every format, folders of ``save_pretrained`` and the user's own functions.  Code runs
only if it is PyTorch's, a known library's, or the user allowed it (``--code-path``, ``--allow-package`` and the like).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from torch import nn

from memopt_cli.errors import UnsafeFileError, UsageError
from memopt_cli.inputs.spec_text import is_factory, is_pretrained
from memopt_cli.loading.bounds import check_paths
from memopt_cli.loading.exported import Exported
from memopt_cli.loading.factory import build, fill
from memopt_cli.loading.generation import cache_notes
from memopt_cli.loading.interface import Format, Loaded, ModelFile, WithoutModel, require_same
from memopt_cli.loading.module_pickle import ModulePickle
from memopt_cli.loading.pickles.kinds.trusted_names import UNKNOWN_SCRIPT
from memopt_cli.loading.pretrained import load_pretrained
from memopt_cli.loading.safetensors_file import SafeTensors
from memopt_cli.loading.torchscript import TorchScript
from memopt_cli.loading.trust import UntrustedNamesError, merge_trusts
from memopt_cli.loading.user_code import UserCode, make_importable
from memopt_cli.records import STEP, LoadedModel, ModelSource, Trust
from memopt_cli.runtime.private_torch import reserve_hook_numbers
from memopt_cli.text.documents import read_bytes
from memopt_cli.text.spelling import with_python_spelling
from memopt_cli.training.compiling import compile_again
from memopt_cli.training.own_checkpoints import warn_if_on
from memopt_cli.training.user_step import StepModels
from memopt_cli.training.wrappers import compiled_notes, split_wrappers, unwrap, wrapper_notes

__all__ = ["format_of", "load", "load_model", "read_file", "read_same"]

_FORMATS: Final[tuple[Format, ...]] = (TorchScript(), Exported(), SafeTensors(), ModulePickle())
"""The formats, in the order in which a file is tried; :class:`ModulePickle` accepts every file, so it comes last."""
_FROM_A_SESSION = """
If it came from a session without a script: define its classes and build the model here, load its weights
(model.load_state_dict), and apply its plan (memopt_cli.apply_plan)."""


def load_model(source: ModelSource) -> LoadedModel:
    """Load the model that ``source`` names onto the CPU; its code may import from the current folder.

    Raises :class:`UsageError` for a path that cannot be read, :class:`FileFormatError` for a file without a model,
    :class:`UnsafeFileError` for one that wants more than is allowed, and :class:`ChangedFileError` for one whose
    hash differs from the hash in ``source``.
    """
    notes = ("Loaded without any check of its code (`--trust-pickle`).",) if source.trust.pickle else ()
    if is_factory(source.location):
        make_importable(Path.cwd(), first=False)
        UserCode(source.trust.code_paths)
        loaded = Loaded(module=build(source.location))
        sha256 = None
        notes = ()
        kind = STEP if isinstance(loaded.module, StepModels) else "factory"
    elif Path(source.location).is_dir():
        loaded, sha256 = load_pretrained(source.location)
        kind = "pretrained"
        require_same(source.location, sha256, source.sha256)
    else:
        file, sha256 = read_same(source.location, source.key if source.weights is None else None, source.sha256)
        loaded, kind = _load_file(file, source.trust)
    reserve_hook_numbers(loaded.module)
    around, module = split_wrappers(loaded.module, keep_compiled=source.keeps_compiled)
    weights_sha256 = None
    if source.weights is not None:
        file, weights_sha256 = read_same(source.weights, source.key, source.weights_sha256)
        notes = (*notes, *fill(unwrap(module), file, source.location))
    notes = (*notes, *loaded.notes, *wrapper_notes((*loaded.wrappers, *around)), *cache_notes(module))
    return LoadedModel(
        module=module,
        source=source,
        format=kind,
        sha256=sha256,
        weights_sha256=weights_sha256,
        notes=notes if source.keeps_compiled else (*notes, *compiled_notes(module)),
        example_spec=loaded.example_spec,
    )


@with_python_spelling
def load(path: str | os.PathLike[str], *, key: str | None = None, trust: Trust = Trust()) -> nn.Module:
    """Load the model at ``path`` onto the CPU: memopt's own file, any saved module, a folder of ``save_pretrained``.

    Reading runs no code of the file.  The model is not confined, as it is in memopt's own subprocesses: when you run
    it, PyTorch's policy applies, that running an untrusted model is like running untrusted code.

    Parameters
    ----------
    path:
        The file or folder.
    key:
        The entry to load from a file with several, as keys joined by dots.
    trust:
        Packages and names whose classes may be built in addition to PyTorch and well-known model libraries, such as
        ``Trust(packages=("mymodels",))``.

    Returns
    -------
    nn.Module
        The model, in the mode in which it was saved; one of ``save_pretrained`` is in training mode.  If it was saved
        with a plan that compiles it, it is compiled when it is called.

    Raises
    ------
    UsageError, FileFormatError, UnsafeFileError
        As ``load_model`` does.
    """
    try:
        if Path(path).is_dir():
            return load_pretrained(os.fspath(path))[0].module
        model = _load_file(read_file(os.fspath(path), key), trust)[0].module
        compile_again(unwrap(model))
        warn_if_on(unwrap(model))
        return model
    except UntrustedNamesError as err:
        if err.remedy == Trust():
            raise
        hint = f"If you trust where it came from: load(path, trust={merge_trusts((trust, err.remedy)).in_python})"
        if UNKNOWN_SCRIPT in err.remedy.code_paths:
            hint += _FROM_A_SESSION
        raise UnsafeFileError(err.message, hint=hint) from None
    except WithoutModel as err:
        err.hint = "Build the model, and fill it: model.load_state_dict(weights)."
        raise


def read_same(path: str, key: str | None, expected_sha256: str | None) -> tuple[ModelFile, str]:
    """Return the file at ``path`` and its hash.  Raises :class:`ChangedFileError` for a hash that is not expected."""
    file = read_file(path, key)
    sha256 = hashlib.sha256(file.data).hexdigest()
    require_same(path, sha256, expected_sha256)
    return file, sha256


def _load_file(file: ModelFile, trust: Trust) -> tuple[Loaded, str]:
    format_ = format_of(file)
    loaded = format_.load(file, trust)
    if not trust.pickle:
        check_paths(loaded.module, file.path)
    return loaded, format_.name


def format_of(file: ModelFile) -> Format:
    """Return the first format that recognizes ``file``."""
    return next(format_ for format_ in _FORMATS if format_.recognizes(file))


def read_file(path: str, key: str | None = None, max_bytes: int | None = None) -> ModelFile:
    """Read the file at ``path``.  Raises :class:`UsageError` if it cannot be read, or has more than ``max_bytes``."""
    try:
        return ModelFile(path=path, data=read_bytes(path, max_bytes), key=key)
    except IsADirectoryError as err:
        hint = (
            "memopt profile and memopt optimize take folders of save_pretrained."
            if is_pretrained(path)
            else "Name a file in it."
        )
        raise UsageError(f"{path} is a folder, not a model file", hint=hint) from err
    except FileNotFoundError:
        hint = "For a model built by code write package.module:callable." if ":" in path else "Check the path."
        raise UsageError(f"{path} does not exist", hint=hint) from None
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else err
        raise UsageError(f"{path} cannot be read: {reason}", hint="Check the path, and the rights to it.") from err
