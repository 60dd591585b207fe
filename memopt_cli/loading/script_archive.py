"""Checking TorchScript archives before PyTorch reads them: PyTorch trusts their pickles, and runs their code.

Every operator in the code must be known to be harmless, and every object in the pickles must be what the code declares.
"""

from __future__ import annotations

import io
import pickletools
import re
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading.archive import FILE_LIMIT, Archive, SizeLimit
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, TRUST_SCRIPT_HINT
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.described import STORAGE_DTYPES, check_tensors, is_floating, storage_of, tensor_of
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Tuple, Walk, held_in
from memopt_cli.loading.pickles.scan import scan_pickle
from memopt_cli.loading.script_objects import TENSORS, ScriptObjects, check_lines
from memopt_cli.runtime.script_code import UnsafeScriptError, check_classes, check_code, classify_record

_DEEPEST: Final = 400
"""Maximum depth of nested objects: PyTorch takes them apart by recursion."""
_MAX_ITEMS: Final = 4_000_000
"""Maximum number of values in one object, each counted as often as it is reached: PyTorch makes as many objects."""
_MIN_CODE = 1 << 18
"""Bytes of source code that an archive may hold however small it is."""
_EXPANSION = 8
"""Bytes of source code that an archive may hold in addition, for each of its own: compression saves as much."""
_MAX_CODE = 4 << 20
"""Maximum bytes of code: each takes 300 bytes of memory."""
_READ: Final = 4
"""Maximum bytes of storages that a pickle may read, for each byte of its storages."""
_NEEDED: Final = ("data.pkl", "constants.pkl")
"""Pickles whose tensors are made when the archive is loaded; the pickle of traced inputs has no data."""
_NAMES: Final = re.compile(
    r"__torch__(\.\w+)+|torch\.jit\._pickle\.(restore_type_tag|build_(int|double|bool|tensor)list)"
    r"|torch\._utils\._rebuild_(tensor_v2|qtensor)|collections\.OrderedDict|torch\.(device|jit)|builtins\.complex"
    rf"|torch\.({'|'.join(set(STORAGE_DTYPES) - {'UntypedStorage'})})"
    r"|torch\.per_(tensor|channel)_affine(_float_qparams)?",
    re.ASCII,
)
"""Names known to PyTorch's own reader of these pickles, except functions whose tensors it does not check."""
_OPCODES: Final = frozenset(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINUNICODE8 BINPUT "
    "LONG_BINPUT BINGET LONG_BINGET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS GLOBAL REDUCE NEWOBJ BUILD BINPERSID".split()
)
"""Opcodes that PyTorch writes; its reader gives others a different meaning, or does not know them."""


def check_script_file(data: bytes, path: str) -> None:
    """Raise :class:`UnsafeFileError` unless the TorchScript archive ``data`` does nothing but compute.

    Raises :class:`FileFormatError` if it is damaged.
    """
    try:
        check_script_archive(data, path)
    except UnsafeScriptError as err:
        raise UnsafeFileError(
            f"{path} was not loaded: its TorchScript code uses {err}, which is not known to be harmless",
            hint=TRUST_SCRIPT_HINT,
        ) from err
    except ValueError as err:
        raise FileFormatError(f"{path} is a damaged TorchScript archive: {err}", hint=DOWNLOAD_AGAIN_HINT) from err


def check_script_archive(data: bytes, path: str, limit: SizeLimit = FILE_LIMIT) -> None:
    """Check the TorchScript archive ``data``, whose records may unpack to ``limit``.

    Raises :class:`UnsafeScriptError` if it may do more than compute, :class:`ValueError` if it is damaged, and as
    :class:`Archive` does.
    """
    archive = Archive(data, path, limit)
    if missing := [record for record in _NEEDED if record not in archive.sizes]:
        raise ValueError(f"it has no record {missing[0]}")
    kinds = {record: classify_record(record) for record in archive.sizes}
    code = [name for name in kinds if kinds[name] == "code"]
    if sum(archive.sizes[name] for name in code) > min(_MIN_CODE + _EXPANSION * len(data), _MAX_CODE):
        raise ValueError("it has far more code than a model of its size needs")
    trees = check_code({name: archive.read(name).decode("utf-8", "replace") for name in code})
    if misplaced := [name for name in trees if not name.startswith("code/") or not name.endswith(".py")]:
        raise UnsafeScriptError(f"a record named {misplaced[0]}, which memopt does not know")
    objects, scan = ScriptObjects(trees), PickleScan(size=len(data))
    for name in (name for name in kinds if kinds[name] == "pickle"):
        check_pickle(archive, name, scan, objects)


def check_pickle(archive: Archive, record: str, scan: PickleScan, objects: ScriptObjects) -> Pickle:
    """Follow the pickle ``record`` to its end, and check every object in it.

    Raises :class:`UnsafeScriptError` for a name unknown to PyTorch's reader, and :class:`ValueError` if reading it
    would take too much, an object is not what the code declares, or a tensor or storage leaves its record.
    """
    data = archive.read(record)
    check_classes(data)
    pickle = scan_pickle(io.BytesIO(data), scan)
    _check_opcodes(data)
    nodes = [step.node for step in pickle.steps if step.action == "make"]
    for wanted in scan.wanted:
        if not _NAMES.fullmatch(str(wanted)):
            raise UnsafeScriptError(f"the name {wanted} in {record}")
    scan.wanted.clear()
    walk = Walk(held_in, _DEEPEST, _MAX_ITEMS if record in _NEEDED else 2**63)
    for node in nodes:
        _check_known(node)
        if reason := walk.why_endless(node):
            raise ValueError(f"its objects {reason}")
        objects.check(node)
        if objects.is_packed(node):
            scan.take_copies(node.state)
    if record in _NEEDED:
        folder = record.removesuffix(".pkl") + "/"
        sizes = {n.removeprefix(folder): size for n, size in archive.sizes.items() if n.startswith(folder)}
        check_tensors(nodes, sizes, 0)
        # PyTorch reads a storage each time that a pickle names it; its own pickles name a storage once.
        if sum(storage.size_bytes for storage in map(storage_of, nodes) if storage) > _READ * sum(sizes.values()):
            raise ValueError("it reads its storages far too often")
    elif record.endswith(".debug_pkl"):
        check_lines(pickle.root)
    return pickle


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that PyTorch does not write, and an object memoized before it has its state.

    Until then, PyTorch's reader holds a number in its place, and a use would take the number for the object.
    """
    before = ""
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES or (before == "NEWOBJ" and opcode.name in ("BINPUT", "LONG_BINPUT")):
            raise ValueError(f"its pickles hold {opcode.name}, which PyTorch does not write there")
        before = opcode.name


def _check_known(node: Any) -> None:
    """Refuse a tensor or storage whose bytes cannot be located in the file."""
    if not isinstance(node, Built):
        return
    if node.how == "stored" and storage_of(node) is None:
        raise ValueError("a storage has no identity")
    if not isinstance(node.callee, Global):
        raise UnsafeScriptError("a computed name")
    if node.how == "created" and not str(node.callee).startswith("__torch__."):
        raise ValueError(f"it creates {node.callee} without calling it")
    if node.how == "called" and str(node.callee) in TENSORS:
        tensor = tensor_of(node)
        if tensor is None or tensor.storage is None:
            raise ValueError("a tensor is built from unexpected arguments")
        _check_channels(node, tensor.shape)


def _check_channels(node: Built, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is quantized by channel without one scale and one zero point for each channel."""
    match node.argument_items():
        case (_, _, _, _, Tuple(items=(Global(name="per_tensor_affine"), *_)), *_):
            return
        case (_, _, _, _, Tuple(items=(Global(), scales, zeros, int(axis))), *_):
            scale_and_zero = tensor_of(scales), tensor_of(zeros)
            has_each = all(tensor and tensor.shape == shape[axis : axis + 1] for tensor in scale_and_zero)
            # Only embeddings have zero points that are not whole numbers; they are packed by rows, axis 0.
            is_whole = scale_and_zero[1] is not None and not is_floating(scale_and_zero[1].dtype)
            if 0 <= axis < len(shape) and has_each and (is_whole or axis == 0):
                return
        case _ if str(node.callee) != TENSORS[1]:
            return
    raise ValueError("a quantized tensor has no scale for each of its channels")
