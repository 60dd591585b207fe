"""TorchScript archives, looked at before PyTorch reads them: it trusts their pickles, and runs their code."""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Mapping
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading.archive import OF_A_FILE, Archive, Room
from memopt_cli.loading.interface import TRUNCATED, UNCHECKED_SCRIPT
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.described import STORAGE_DTYPES, check_tensors, is_floating, storage_of, tensor_of
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Tuple, Walk, held_in
from memopt_cli.loading.pickles.scan import scan_pickle
from memopt_cli.loading.script_objects import TENSORS, ScriptObjects, check_lines
from memopt_cli.runtime.script_code import UnsafeScript, check_classes, check_code, kind_of

_DEEPEST: Final = 400
"""Objects within objects: PyTorch takes them apart by recursion."""
_MOST_ITEMS: Final = 4_000_000
"""Values in one object, each counted as often as it is met: it becomes as many in Python."""
_LEAST_CODE, _EXPANSION, _MOST_CODE = 1 << 18, 8, 4 << 20
"""Bytes of source code that any archive may have, and for each of its bytes, which is what compression saves, and at
most: a byte of code takes 300 of memory."""
_READ: Final = 4
"""How often all the storages of a pickle may be read."""
_NEEDED: Final = ("data.pkl", "constants.pkl")
"""Pickles whose tensors are made when the archive is loaded; those of the inputs it was traced with have no data."""
_NAMES: Final = re.compile(
    r"__torch__(\.\w+)+|torch\.jit\._pickle\.(restore_type_tag|build_(int|double|bool|tensor)list)"
    r"|torch\._utils\._rebuild_(tensor_v2|qtensor)|collections\.OrderedDict|torch\.(device|jit)|builtins\.complex"
    rf"|torch\.({'|'.join(set(STORAGE_DTYPES) - {'UntypedStorage'})})"
    r"|torch\.per_(tensor|channel)_affine(_float_qparams)?",
    re.ASCII,
)
"""Names that PyTorch's own reader of such pickles gives a meaning to, but for those of tensors it does not check."""
_OPCODES: Final = frozenset(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINUNICODE8 BINPUT "
    "LONG_BINPUT BINGET LONG_BINGET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS GLOBAL REDUCE NEWOBJ BUILD BINPERSID".split()
)
"""What PyTorch writes: its reader gives others a meaning of its own, or none."""


def check_script_file(data: bytes, path: str) -> None:
    """Raises :class:`UnsafeFileError` unless a TorchScript archive does nothing but compute.

    Raises :class:`FileFormatError` if it is damaged.
    """
    try:
        check_script_archive(data, path)
    except UnsafeScript as err:
        raise UnsafeFileError(
            f"{path} was not loaded: its TorchScript code uses {err}, which is not known to be harmless",
            hint=UNCHECKED_SCRIPT,
        ) from err
    except ValueError as err:
        raise FileFormatError(f"{path} is a damaged TorchScript archive: {err}", hint=TRUNCATED) from err


def check_script_archive(data: bytes, path: str, room: Room = OF_A_FILE) -> None:
    """The same; raises :class:`UnsafeScript`, :class:`ValueError`, and as :class:`Archive`.

    ``room``: what the archive may unpack to.
    """
    archive = Archive(data, path, room)
    if missing := [record for record in _NEEDED if record not in archive.sizes]:
        raise ValueError(f"it has no record {missing[0]}")
    kinds = {record: kind_of(record) for record in archive.sizes}
    code = [name for name in kinds if kinds[name] == "code"]
    if sum(archive.sizes[name] for name in code) > min(_LEAST_CODE + _EXPANSION * len(data), _MOST_CODE):
        raise ValueError("it has far more code than a model of its size does")
    trees = check_code({name: archive.read(name).decode("utf-8", "replace") for name in code})
    if capitals := [name for name in trees if not name.startswith("code/") or not name.endswith(".py")]:
        raise UnsafeScript(f"a record named {capitals[0]}, which memopt does not know")
    objects, scan = ScriptObjects(trees), PickleScan(size=len(data))
    for name in (name for name in kinds if kinds[name] == "pickle"):
        check_pickle(archive, name, scan, objects)


def check_pickle(archive: Archive, record: str, scan: PickleScan, objects: ScriptObjects) -> Pickle:
    """One of its pickles, followed to its end.

    Raises :class:`UnsafeScript` for a name without a meaning there, and :class:`ValueError` where reading it would take
    too much, an object is not what the code declares, or a tensor or storage is not within its record.
    """
    data = archive.read(record)
    check_classes(data)
    pickle = scan_pickle(io.BytesIO(data), scan)
    _check_opcodes(data)
    made = [step.node for step in pickle.steps if step.action == "make"]
    for wanted in scan.wanted:
        if not _NAMES.fullmatch(str(wanted)):
            raise UnsafeScript(f"the name {wanted} in {record}")
    scan.wanted.clear()
    walk = Walk(held_in, _DEEPEST, _MOST_ITEMS if record in _NEEDED else 2**63)
    for node in made:
        _check_known(node)
        if reason := walk.endless(node):
            raise ValueError(f"its objects {reason}")
        objects.check(node)
        if objects.is_packed(node):
            scan.take_copies(node.state)
    if record in _NEEDED:
        sizes = _sizes(archive, record.removesuffix(".pkl"))
        check_tensors(made, sizes, 0)
        # PyTorch reads a storage anew wherever a pickle names it, and names it once itself.
        if sum(storage.size_bytes for storage in map(storage_of, made) if storage) > _READ * sum(sizes.values()):
            raise ValueError("it reads its storages again and again")
    elif record.endswith(".debug_pkl"):
        check_lines(pickle.root)
    return pickle


def _check_opcodes(data: bytes) -> None:
    """PyTorch's reader takes what is created for a number until it is filled: nothing may look at it before."""
    before = ""
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES or (before == "NEWOBJ" and opcode.name in ("BINPUT", "LONG_BINPUT")):
            raise ValueError(f"its pickles hold {opcode.name}, which PyTorch does not write there")
        before = opcode.name


def _check_known(node: Any) -> None:
    """A tensor or storage is one whose place in the file is known."""
    if not isinstance(node, Built):
        return
    if node.how == "stored" and storage_of(node) is None:
        raise ValueError("a storage has no identity")
    if not isinstance(node.callee, Global):
        raise UnsafeScript("a computed name")
    if node.how == "created" and not str(node.callee).startswith("__torch__."):
        raise ValueError(f"it creates {node.callee} without calling it")
    if node.how == "called" and str(node.callee) in TENSORS:
        tensor = tensor_of(node)
        if tensor is None or tensor.storage is None:
            raise ValueError("a tensor is made of something else")
        _check_channels(node, tensor.shape)


def _check_channels(node: Built, shape: tuple[int, ...]) -> None:
    """A tensor that is quantized by channels has a scale and a zero point for each."""
    match node.given():
        case (_, _, _, _, Tuple(items=(Global(name="per_tensor_affine"), *_)), *_):
            return
        case (_, _, _, _, Tuple(items=(Global(), scales, zeros, int(axis))), *_):
            found = tensor_of(scales), tensor_of(zeros)
            each = all(tensor and tensor.shape == shape[axis : axis + 1] for tensor in found)
            # With zero points that are no whole numbers it is of embeddings, which are packed as if of rows.
            whole = found[1] is not None and not is_floating(found[1].dtype)
            if 0 <= axis < len(shape) and each and (whole or axis == 0):
                return
        case _ if str(node.callee) != TENSORS[1]:
            return
    raise ValueError("a quantized tensor has no scale for each of its channels")


def _sizes(archive: Archive, folder: str) -> Mapping[str, int]:
    """Bytes of each storage of a pickle, by its key."""
    return {
        name.removeprefix(f"{folder}/"): size for name, size in archive.sizes.items() if name.startswith(f"{folder}/")
    }
