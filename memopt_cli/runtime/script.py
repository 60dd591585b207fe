"""Wrapping a TorchScript module that cannot be lifted (:mod:`memopt_cli.runtime.lifted`) in a plain module.

:class:`ScriptLeaf` holds the script, has the same names of parameters, buffers and modules, and can be pickled and
deep-copied.  TorchScript is code, and some of it runs while it is loaded, so :func:`check_script` checks it before.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from memopt_cli.runtime.private_torch import buffers_of, children_of, open_archive, parameters_of
from memopt_cli.runtime.script_code import check_classes, check_code, classify_record


def check_script(archive: bytes) -> None:
    """Read the code of a TorchScript archive as text and check every operator that it names.

    Raises :class:`UnsafeScriptError` for a record, operator, class or name that is not known to be harmless, and for
    code that cannot be read; :class:`RuntimeError` if the bytes are not such an archive.
    """
    # PyTorch's own reader: the checked code must be the code that ``torch.jit.load`` compiles.
    reader = open_archive(archive)
    code = {}
    for record in reader.get_all_records():
        kind = classify_record(record)
        if kind == "code":
            code[record] = reader.get_record(record).decode("utf-8", "replace")
        elif kind == "pickle":
            check_classes(reader.get_record(record))
    check_code(code)


def archive_bytes(archive: Tensor) -> bytes:
    """Return the bytes in ``archive``, a tensor of ``uint8``, without NumPy, which need not be installed."""
    data = bytearray(archive.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(archive)
    return bytes(data)


def restore_script(archive: bytes, device: torch.device) -> ScriptModule:
    """Check the TorchScript ``archive``, as :func:`check_script` does, then load it onto ``device``."""
    check_script(archive)
    return torch.jit.load(io.BytesIO(archive), map_location=device)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- a script as a module


class ScriptPart(nn.Module):
    """A module inside a :class:`ScriptLeaf` that has names and tensors, and is never called itself."""


class ScriptLeaf(nn.Module):
    """A TorchScript module as a plain one.

    Its tensors are the script's own, under the same names; one that is replaced here is replaced in the script before
    the next call.
    """

    script: ScriptModule

    def __init__(self, script: ScriptModule) -> None:
        super().__init__()
        self._attach(script)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._push()
        # Unoptimized: TorchScript's executor profiles its first runs, and differentiates later ones by itself.  Those
        # round differently, and a recomputation would save tensors that differ from its forward's.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            output = self.script(*args, **kwargs)
        for part, script in _pairs(self, self.script):
            for name in buffers_of(part):
                buffers_of(part)[name] = getattr(script, name)
        return output

    def train(self, mode: bool = True) -> ScriptLeaf:
        super().train(mode)
        self.script.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._push()
        buffer = io.BytesIO()
        torch.jit.save(self.script, buffer)
        state = {k: v for k, v in vars(self).items() if k not in ("script", "_parameters", "_buffers", "_modules")}
        # The archive is stored as a tensor of bytes.  The device is stored as an empty tensor on it, since
        # ``map_location`` of ``torch.load`` moves tensors.
        state["archive"] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        state["anchor"] = torch.empty(0, device=next((t.device for t in self.state_dict().values()), None))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = {k: v for k, v in state.items() if k not in ("archive", "anchor")}
        script = restore_script(archive_bytes(state["archive"]), state["anchor"].device)
        vars(self).update(rest, _parameters={}, _buffers={}, _modules={})
        self._attach(script)

    def _attach(self, script: ScriptModule) -> None:
        vars(self)["script"] = script  # not as a child: its parameters would get a second name
        _mirror(self, script)

    def _push(self) -> None:
        for part, script in _pairs(self, self.script):
            for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items()):
                if tensor is not None and getattr(script, name) is not tensor:
                    setattr(script, name, tensor)


def _mirror(part: nn.Module, script: ScriptModule) -> None:
    part.training = getattr(script, "training", True)
    for name, tensor in parameters_of(script).items():
        if tensor is not None and type(tensor) is Tensor:
            # By replacing the class: a new Parameter would be another object, and a script may hold the tensor twice,
            # as an LSTM does.
            tensor.__class__ = nn.Parameter
        parameters_of(part)[name] = tensor
    buffers_of(part).update(buffers_of(script).items())
    for name, child in children_of(script).items():
        holder = ScriptPart()
        children_of(part)[name] = holder
        _mirror(holder, child)


def _pairs(part: nn.Module, script: ScriptModule) -> Iterator[tuple[nn.Module, ScriptModule]]:
    yield part, script
    for name, child in children_of(part).items():
        if isinstance(child, ScriptPart):
            yield from _pairs(child, children_of(script)[name])
