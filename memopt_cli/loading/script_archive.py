"""TorchScript archives, looked at before PyTorch reads them: it trusts their pickles, and runs their code."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading.archive import Archive
from memopt_cli.loading.pickles.described import check_tensors, storage_of, tensor_of
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Walk, held_in
from memopt_cli.loading.pickles.scan import PickleScan, scan_pickle
from memopt_cli.runtime.script_code import UnsafeScript, check_classes, check_code, kind_of

_DEEPEST: Final = 400
"""Objects within objects: PyTorch takes them apart by recursion."""
_WITH_TENSORS: Final = ("data.pkl", "constants.pkl")
"""Pickles whose tensors are made when the archive is loaded; those of the inputs it was traced with have no data."""
_TENSORS: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_qtensor")
_NAMES: Final = re.compile(
    r"__torch__(\.\w+)+|torch\.jit\._pickle\.\w+|torch\._utils\._rebuild_(tensor_v2|qtensor)|torch\.\w+Storage"
    r"|collections\.OrderedDict|torch\.per_(tensor|channel)_affine(_float_qparams)?|torch\.(device|jit)|\w+\.\w*complex"
)
"""Names that PyTorch's own reader of such pickles gives a meaning to, but for those of tensors it does not check."""


def check_script_file(data: bytes, path: str) -> None:
    """Raises :class:`UnsafeFileError` unless a TorchScript archive does nothing but compute.

    Raises :class:`FileFormatError` if it is damaged.
    """
    try:
        check_script_archive(data, path)
    except UnsafeScript as err:
        raise UnsafeFileError(
            f"{path} was not loaded: its TorchScript code uses {err}, which is not known to be harmless",
            hint="If you trust where it came from, add --trust-pickle.",
        ) from err
    except ValueError as err:
        raise FileFormatError(
            f"{path} is a damaged TorchScript archive: {err}", hint="It may be truncated: download it or save it again."
        ) from err


def check_script_archive(data: bytes, path: str) -> None:
    """The same; raises :class:`UnsafeScript`, :class:`ValueError`, and as :class:`Archive`."""
    archive = Archive(data, path)
    kinds = {record: kind_of(record) for record in archive.sizes}
    check_code({name: archive.read(name).decode("utf-8", "replace") for name in kinds if kinds[name] == "code"})
    scan = PickleScan(size=len(data))
    for name in (name for name in kinds if kinds[name] == "pickle"):
        check_classes(archive.read(name))
        check_pickle(archive, name, scan)


def check_pickle(archive: Archive, record: str, scan: PickleScan) -> Pickle:
    """One of its pickles, followed to its end.

    Raises :class:`UnsafeScript` for a name without a meaning there, and :class:`ValueError` where reading it would take
    too much, or a tensor or storage is not within its record.
    """
    pickle = scan_pickle(io.BytesIO(archive.view(record)), scan)
    made = [step.node for step in pickle.steps if step.action == "make"]
    for wanted in scan.wanted:
        if not _NAMES.fullmatch(str(wanted)):
            raise UnsafeScript(f"the name {wanted} in {record}")
    walk = Walk(held_in, _DEEPEST, 2**63)
    for node in made:
        _check_known(node)
        if reason := walk.endless(node):
            raise ValueError(f"its objects {reason}")
    if record in _WITH_TENSORS:
        check_tensors(made, _sizes(archive, record.removesuffix(".pkl")), 0)
    return pickle


def _check_known(node: Any) -> None:
    """A tensor or storage is one whose place in the file is known."""
    if not isinstance(node, Built):
        return
    if node.how == "stored" and storage_of(node) is None:
        raise ValueError("a storage has no identity")
    if node.how == "called":
        tensor = tensor_of(node) if str(node.callee) in _TENSORS else None
        if not isinstance(node.callee, Global):
            raise UnsafeScript("a computed name")
        if str(node.callee) in _TENSORS and (tensor is None or tensor.storage is None):
            raise ValueError("a tensor is made of something else")


def _sizes(archive: Archive, folder: str) -> Mapping[str, int]:
    """Bytes of each storage of a pickle, by its key."""
    return {
        name.removeprefix(f"{folder}/"): size for name, size in archive.sizes.items() if name.startswith(f"{folder}/")
    }
