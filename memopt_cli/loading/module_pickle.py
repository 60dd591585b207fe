"""Loading modules that ``torch.save(model, path)`` or ``pickle.dump`` pickled, in any protocol.

The file is audited as a whole before any object is made, by :mod:`memopt_cli.loading.pickles`; Python's unpickler is
used only with ``--trust-pickle``.  Here are the order of the checks and the messages of refusals.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from memopt_cli.errors import FileFormatError, UnsafeFileError, UsageError, first_line, type_in_words
from memopt_cli.loading.archive import FILE_LIMIT, SizeLimit
from memopt_cli.loading.contents import class_of
from memopt_cli.loading.interface import TRUST_PICKLE_HINT, Loaded, ModelFile, suggest_unchecked
from memopt_cli.loading.pickles.audit import Audit, assign_kinds, uses_in
from memopt_cli.loading.pickles.build import build
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.entries import found_in, module_in, place_notes, place_of, several_models, unwrapped
from memopt_cli.loading.pickles.kinds import kinds_of, kinds_of_data
from memopt_cli.loading.pickles.kinds.interface import BrokenError, Denied, Missing, ObjectKind, Use
from memopt_cli.loading.pickles.kinds.modules import Libraries
from memopt_cli.loading.pickles.kinds.tensors import PickledStorages
from memopt_cli.loading.pickles.kinds.trusted_names import TrustedNames, scripts_with
from memopt_cli.loading.pickles.nodes import PERSISTENT, Global
from memopt_cli.loading.pickles.reading import PickledFile, nested_storage, read_pickled
from memopt_cli.loading.pickles.scan import suspend_collection
from memopt_cli.loading.trust import (
    UntrustedNamesError,
    attack_refusal,
    how_to_install,
    is_attack,
    merge_trusts,
    stores_code,
    unknown_refusal,
)
from memopt_cli.loading.user_code import ClassNotFoundError, UserCode, add_folder, missing_module_hint
from memopt_cli.loading.watch import watch_code
from memopt_cli.records import Trust
from memopt_cli.runtime.lifted.program import BadProgramError
from memopt_cli.runtime.script_code import UnsafeScriptError
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.misnamed import moved_hint
from memopt_cli.text.units import format_some

_SHOWN: Final = 5
"""Maximum number of refused names that a message lists; its hint has the flags for all refused names."""
_MAX_NAMES: Final = 2000
"""Maximum number of names that a file uses."""
_MAX_IMPORTS: Final = 100
"""Maximum number of modules of libraries that a file imports."""
_MAX_FLAGS_LENGTH: Final = 4000
"""Maximum number of characters of flags in a hint; in place of a longer hint, loading unchecked is advised."""
_SAVE_AGAIN: Final = "Save one with torch.save(model, path)."
_BY_HAND: Final = "The file is damaged, or made by hand."
_DAMAGED_HINT: Final = f"Save the model again with torch.save(model, path). {TRUST_PICKLE_HINT}"


class ModulePickle:
    """The format of ``torch.save``; see :class:`memopt_cli.loading.interface.Format`."""

    name = "pickle"

    def recognizes(self, file: ModelFile) -> bool:
        return True

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        if trust.pickle:
            return _load_unchecked(file, trust)
        with suspend_collection():
            pickled = read_pickled(file)
            refuse_attacks(file, pickled.scan, UserCode(trust.code_paths))
            located = module_in(pickled.pickle.root, file.key, file.path, trust.code_paths)
        trusted = TrustedNames(trust, UserCode(trust.code_paths))
        try:
            model = _audit_and_make(file, pickled, located.root, kinds_of(storages_of(pickled), trusted), trusted)
        except ClassNotFoundError as err:
            class_name = class_of(unwrapped(located.root, file.path))
            hint_text = moved_hint(file.path, (err.looked_in, *trust.code_paths), class_name)
            err.hint = f"{err.hint} {hint_text}".strip()
            raise
        if not isinstance(model, nn.Module):
            raise FileFormatError(f"{file.path} holds {type_in_words(model)}, not a model", hint=_SAVE_AGAIN)
        return Loaded(module=model, notes=located.notes, wrappers=located.wrappers)


def load_tensors(data: bytes, path: str, limit: SizeLimit = FILE_LIMIT) -> Any:
    """Return the tensors and plain containers that ``torch.save`` wrote into ``data``, on the CPU.

    ``limit``: the bytes that an archive may unpack to.

    Raises :class:`UnsafeFileError` if ``data`` holds anything else, :class:`FileFormatError` if it is damaged.
    """
    try:
        file = ModelFile(path=path, data=data)
        pickled = read_pickled(file, limit)
        refuse_attacks(file, pickled.scan, UserCode(()))
        return build_data(file, pickled, pickled.pickle.root)
    except (UnsafeFileError, FileFormatError) as err:
        kind = UnsafeFileError if isinstance(err, UnsafeFileError) else FileFormatError
        raise kind(err.message, hint="Save tensors in plain lists and dicts, with torch.save(tensors, path).") from err


def build_data(file: ModelFile, pickled: PickledFile, root: Any) -> Any:
    """Make the tensors and plain containers that ``root`` reaches; the errors are those of :func:`load_tensors`."""
    no_trust = TrustedNames(Trust(), UserCode(()))
    return _audit_and_make(file, pickled, root, kinds_of_data(storages_of(pickled)), no_trust)


def refusals_by_name(file: ModelFile, pickled: PickledFile) -> dict[Global, Denied | Missing | None]:
    """Map each name that loading ``file`` would import to its refusal, or to ``None`` if no flag is needed.

    If the file holds one model, only the names that the model needs are listed.
    """
    no_trust = TrustedNames(Trust(), UserCode(()))
    try:
        root = module_in(pickled.pickle.root, file.key, file.path).root
    except (FileFormatError, UsageError):
        root = pickled.pickle.root
    _refuse_many(file, pickled.scan.wanted)
    known, unclaimed = assign_kinds(uses_in(root), kinds_of(storages_of(pickled), no_trust))
    _refuse_libraries(file, known)
    verdicts: dict[Global, Denied | Missing | None] = {use.name: None for use, _ in known}
    refused: dict[Global, Denied | Missing] = dict(_unknown(unclaimed, no_trust.code))
    refused |= {name: attack_refusal(name) for name in pickled.scan.wanted if is_attack(name)}
    # After a refusal, loading would import nothing.
    if not any(isinstance(verdict, Denied) for verdict in refused.values()):
        audit = Audit(root, known, no_trust.trusts)
        refused |= dict(audit.refused)
        if not refused:
            _refuse_exhausting(file, audit)
            refused |= {name: Denied(reason) for name, reason in audit.objections()}
    return {name: verdict for name, verdict in (verdicts | refused).items() if name != PERSISTENT}


def _load_unchecked(file: ModelFile, trust: Trust) -> Loaded:
    """Load ``file`` by Python's own unpickler, and return the only module in it, or its entry ``file.key``."""
    code = UserCode(trust.code_paths)
    code.run_scripts()
    try:
        loaded = _load_with_pickle(file, code, trust)
    except UsageError:  # from :class:`UserCode`; its message is for the user already
        raise
    except Exception as err:  # a damaged file can make the unpickler raise anything
        is_class_missing = "on <module" in str(err)  # "Can't get attribute 'Net' on <module '__main__' …>"
        message = "it needs a class of the script that saved it" if is_class_missing else first_line(err)
        hint = (
            "Name the script: `--code-path YOUR_SCRIPT.py`."
            if is_class_missing
            else "Save the model again with torch.save(model, path)."
        )
        if isinstance(err, ModuleNotFoundError):
            missing_package = str(err.name).partition(".")[0]
            hint_text = moved_hint(file.path, trust.code_paths)
            instead = missing_module_hint(str(err.name))
            hint = f"{instead or add_folder(missing_package)} {hint_text}"
        if "process group" in str(err):
            hint = "It belongs to its process: save model.module with torch.save, or leave `--trust-pickle` out."
        raise FileFormatError(f"{file.path} cannot be read: {message}", hint=hint) from err
    whole, where = loaded, tuple[str, ...]()
    if file.key is not None:
        where, loaded, _ = place_of(loaded, file.key, file.path, entries=_live_entries)
    if not isinstance(loaded, nn.Module):
        modules = dict(found_in(loaded, lambda value: isinstance(value, nn.Module), entries=_live_entries))
        if len(modules) > 1:
            raise several_models(modules, file.path)
        within, loaded = next(iter(modules.items()), ((), loaded))
        where = (*where, *within)
    if not isinstance(loaded, nn.Module):
        raise FileFormatError(f"{file.path} holds {type_in_words(loaded)}, not a model", hint=_SAVE_AGAIN)
    return Loaded(module=loaded, notes=place_notes("The model is", where, whole, entries=_live_entries))


def _load_with_pickle(file: ModelFile, code: UserCode, trust: Trust) -> Any:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in trust.globals:
                code.require_single(Global(module, name))
            return super().find_class(module, name)

    reader = SimpleNamespace(**{**vars(pickle), "Unpickler": Unpickler})
    try:
        return torch.load(io.BytesIO(file.data), map_location="cpu", pickle_module=reader, weights_only=False)
    except (pickle.UnpicklingError, RuntimeError):
        if file.data.startswith(b"PK"):
            raise
        # A file of ``pickle.dump``: ``torch.load`` reads only its own formats.
        return Unpickler(io.BytesIO(file.data)).load()


def _live_entries(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(name), item) for name, item in value.items()]
    return [(str(number), item) for number, item in enumerate(value)] if isinstance(value, list | tuple) else []


def storages_of(pickled: PickledFile) -> PickledStorages:
    """Return the kind of object for the storages of ``pickled``."""
    return PickledStorages(pickled.storages, functools.partial(nested_storage, scan=pickled.scan))


def _audit_and_make(
    file: ModelFile, pickled: PickledFile, root: Any, kinds: Sequence[ObjectKind], trusted: TrustedNames
) -> Any:
    with suspend_collection():
        audit = audit_objects(file, pickled, root, kinds, trusted)
    try:
        with watch_code(file.path):
            return build(pickled.pickle, root, audit.recipes)
    except BrokenError as err:
        raise FileFormatError(f"{file.path} cannot be read: {err}", hint=_DAMAGED_HINT) from err
    except (BadProgramError, UnsafeScriptError) as err:
        part = "its TorchScript part uses " if isinstance(err, UnsafeScriptError) else ""
        raise UnsafeFileError(f"{file.path} was not loaded: {part}{err}", hint=TRUST_PICKLE_HINT) from err


def audit_objects(
    file: ModelFile, pickled: PickledFile, root: Any, kinds: Sequence[ObjectKind], trusted: TrustedNames
) -> Audit:
    """Check all objects that ``root`` reaches, and return their audit; no object is made yet.

    Names are checked first, then the classes that they import, then the objects as a whole: a file that no flag could
    allow is refused before anything is imported.
    Raises :class:`UnsafeFileError` for an object that must not be made, :class:`FileFormatError` for a broken one.
    """
    _refuse_many(file, pickled.scan.wanted)
    claims, unclaimed = assign_kinds(uses_in(root), kinds)
    _refuse_libraries(file, claims)
    verdicts = _unknown(unclaimed, trusted.code)
    if any(isinstance(verdict, Denied) and verdict.remedy is None for _, verdict in verdicts):
        _refuse_denied(file, verdicts, trusted.trust)  # before anything is imported
    audit = Audit(root, claims, trusted.trusts)
    _refuse_denied(file, [*verdicts, *audit.refused], trusted.trust)
    _refuse_exhausting(file, audit)
    _refuse_denied(file, ((name, Denied(reason)) for name, reason in audit.objections()), trusted.trust)
    return audit


def _unknown(unclaimed: Iterable[Use], code: UserCode) -> list[tuple[Global, Denied | Missing]]:
    """Refuse each name in ``unclaimed``, uses without a kind, once for each way of use.

    A package in ``code`` hides an installed one of that name, so no flag can make its missing modules importable.
    """
    uses = {(use.name, use.how): use for use in unclaimed}
    scripts = scripts_with({use.name for use in uses.values() if use.name.module == "__main__"})
    return [
        (
            name,
            Missing(f"No module named {name.module!r}")
            if code.defines(name.package)
            else unknown_refusal(use, scripts, code.script_folder_with(name.module)),
        )
        for (name, _), use in uses.items()
    ]


def _refuse_exhausting(file: ModelFile, audit: Audit) -> None:
    if reason := audit.why_exhausting():
        raise FileFormatError(f"{file.path} cannot be read: {reason}", hint=_BY_HAND)


def _refuse_many(file: ModelFile, wanted: Collection[Global]) -> None:
    """Refuse a file with far too many names: each is looked up among the installed packages and in this folder."""
    if len(wanted) > _MAX_NAMES:
        raise FileFormatError(
            f"{file.path} cannot be read: it uses {len(wanted)} names; no model uses more than {_MAX_NAMES}",
            hint=_BY_HAND,
        )


def _refuse_libraries(file: ModelFile, claims: Iterable[tuple[Use, ObjectKind]]) -> None:
    """Refuse a file that imports far too many modules of libraries: each import may take a second."""
    modules = {use.name.module for use, kind in claims if isinstance(kind, Libraries)} - sys.modules.keys()
    if len(modules) > _MAX_IMPORTS:
        raise FileFormatError(
            f"{file.path} cannot be read: it uses {len(modules)} modules of libraries; no model uses more than "
            f"{_MAX_IMPORTS}",
            hint=_BY_HAND,
        )


def refuse_attacks(file: ModelFile, scan: PickleScan, code: UserCode) -> None:
    """Raise :class:`UntrustedNamesError` for names that run code, even if the model does not use them.

    Another reader of the file, such as ``torch.load``, would run them.
    """
    attacks = sorted((name for name in scan.wanted if is_attack(name) and not code.defines(name.module)), key=str)
    if attacks and (saver := stores_code(scan.wanted)):
        raise UntrustedNamesError(
            f"{file.path} was not loaded: it was saved with {saver}, which stores functions as code",
            hint="Save the model with torch.save(model, path) alone, or its weights. " + TRUST_PICKLE_HINT,
            remedy=Trust(),
            denied={name: attack_refusal(name) for name in attacks},
        )
    if attacks:
        names = ", ".join(map(str, attacks[:_SHOWN]))
        reasons = {name: attack_refusal(name) for name in attacks}
        is_run = any(name in scan.called for name in attacks)
        raise UntrustedNamesError(
            f"{file.path} was not loaded: {list_names(reasons)}",
            hint=f"No model needs {names}: the file is likely an attack (`--trust-pickle` turns the check off)."
            if is_run
            else f"Remove {names} from the model and save it again. {TRUST_PICKLE_HINT}",
            remedy=Trust(),
            denied=reasons,
        )


def _refuse_denied(file: ModelFile, verdicts: Iterable[tuple[Global, Denied | Missing]], trust: Trust) -> None:
    """Raise the error for ``verdicts``, if there are any; a missing library is reported only if nothing is denied.

    ``trust``: the trust given by the user already.  The file needs it as well.
    """
    refusals = sorted(verdicts, key=lambda verdict: str(verdict[0]))
    denied = {name: verdict for name, verdict in refusals if isinstance(verdict, Denied)}
    if denied:
        raise _refusal(file, denied, trust)
    for name, verdict in refusals:
        if isinstance(verdict, Missing):
            named = " ".join(quoted_flag("--code-path", path) for path in trust.code_paths)
            raise ClassNotFoundError(
                f"{file.path} needs {name}, which cannot be imported: {verdict.reason}"
                + (f", and `{named}` has no module {name.module}" if named else ""),
                hint=missing_module_hint(name.module)
                if named
                else how_to_install(Global(verdict.lacks, "") if verdict.lacks else name),
            )


def _refusal(file: ModelFile, denied: Mapping[Global, Denied], trust: Trust) -> UntrustedNamesError:
    remedies = [verdict.remedy for verdict in denied.values()]
    has_remedy = None not in remedies  # flags for only some of the names would not load the file
    all_remedies = merge_trusts(remedy for remedy in remedies if remedy is not None)
    remedy = all_remedies if has_remedy else Trust()
    if len(remedy.flags) > _MAX_FLAGS_LENGTH:
        has_remedy, remedy = False, Trust()
    hint = (
        f"If you trust where it came from, add: {remedy.flags}"
        if has_remedy
        else suggest_unchecked(merge_trusts((trust, all_remedies)))
    )
    beyond_help = {name: verdict for name, verdict in denied.items() if verdict.remedy is None}
    message = f"{file.path} was not loaded: {list_names(beyond_help or denied)}"
    return UntrustedNamesError(message, hint=hint, remedy=remedy, denied=denied)


def list_names(denied: Mapping[Global, Denied]) -> str:
    """Return why the first few names in ``denied`` were denied, each reason once, and how many more there are."""
    names_by_reason: dict[str, list[str]] = {}
    for name, verdict in denied.items():
        names_by_reason.setdefault(verdict.reason, []).append(str(name))
    texts = [
        f"{name} {reason}" + (f" (as for {format_some(others, _SHOWN - 1)})" if others else "")
        for reason, (name, *others) in names_by_reason.items()
    ]
    return "; ".join(texts[:_SHOWN]) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
