"""Loading TorchScript archives (``torch.jit.save``): checked before PyTorch reads them, then lifted into plain modules.

Lifting turns each script module into a :class:`~memopt_cli.runtime.lifted.module.LiftedModule`, with the same names and
tensors, whose forward runs the graph's operators in Python.  Without lifting, no module could be a segment: TorchScript
runs a graph as a whole, and does not call modules one by one.  A class that cannot be lifted stays TorchScript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from memopt_cli.errors import FileFormatError, UnsafeFileError, first_line
from memopt_cli.loading.archive import record_names
from memopt_cli.loading.fixed_mode import mode_notes
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, TRUST_SCRIPT_HINT, Loaded, ModelFile
from memopt_cli.loading.script_archive import check_script_file
from memopt_cli.loading.script_graph import ScriptClass, attributes_of, calls_of, lift_class, set_attributes
from memopt_cli.loading.script_nodes import find_module
from memopt_cli.loading.sequentials import restore_sequentials
from memopt_cli.records import Trust
from memopt_cli.runtime.lifted.module import LiftedModule, make_module
from memopt_cli.runtime.lifted.program import BadProgramError
from memopt_cli.runtime.private_torch import (
    buffers_of,
    children_of,
    has_method,
    hooks_of,
    load_script,
    parameters_of,
    program_of,
)
from memopt_cli.runtime.script import ScriptLeaf
from memopt_cli.runtime.script_code import UnsafeScriptError

_SHARED_TENSORS_NOTE = "The model stays TorchScript as a whole: what could not be lifted shares tensors with the rest."


class TorchScript:
    """The format of ``torch.jit.save``; see :class:`memopt_cli.loading.interface.Format`."""

    name = "torchscript"

    def recognizes(self, file: ModelFile) -> bool:
        return "constants.pkl" in record_names(file.data)

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        if not trust.pickle:
            check_script_file(file.data, file.path)
        try:
            script, unit = load_script(file.data)
        except Exception as err:  # a damaged archive can make the compiler raise anything
            raise FileFormatError(
                f"{file.path} is a damaged TorchScript archive: {type(err).__name__}: {first_line(err)}",
                hint=DOWNLOAD_AGAIN_HINT,
            ) from err
        try:
            return lift_script(script, unit)
        except (UnsafeScriptError, BadProgramError) as err:
            raise UnsafeFileError(
                f"{file.path} was not loaded: its TorchScript code uses {err}",
                hint=TRUST_SCRIPT_HINT,
            ) from err


def lift_script(script: ScriptModule, unit: Any) -> Loaded:
    """Return a plain module that computes what ``script`` does, with the same names and tensors.

    ``unit`` is the compilation unit that holds the script's code.  A module that cannot be lifted stays a script inside
    a :class:`ScriptLeaf`; a note says why.
    """
    lifting = _Lifting(script, unit)
    lifted = restore_sequentials(lifting.convert(script, ""))
    leaves = [m for m in lifted.modules() if isinstance(m, ScriptLeaf)]
    owners = _owners(lifted, leaves)
    if len(leaves) > 0 and not isinstance(lifted, ScriptLeaf) and any(count > 1 for count in owners.values()):
        # Leaves are saved one by one, so tensors that share memory with another module would be saved as copies.
        return Loaded(module=ScriptLeaf(script), notes=(*lifting.notes, _SHARED_TENSORS_NOTE))
    return Loaded(module=lifted, notes=(*lifting.notes, *mode_notes(lifting.programs(), "Tracing")))


def _owners(lifted: nn.Module, leaves: list[ScriptLeaf]) -> Counter[int]:
    """Count for each address of memory the leaves with a tensor there; the modules outside leaves count as one."""
    parts = [list(leaf.modules()) for leaf in leaves]
    inside = {id(module) for part in parts for module in part}
    parts.append([module for module in lifted.modules() if id(module) not in inside])
    owners = Counter[int]()
    for part in parts:
        tensors = (t for m in part for t in (*parameters_of(m).values(), *buffers_of(m).values()))
        owners.update({t.untyped_storage().data_ptr() for t in tensors if t is not None} - {0})
    return owners


class _Lifting:
    """Lifts a tree of script modules, and collects notes on the modules that must stay TorchScript."""

    def __init__(self, root: ScriptModule, unit: Any) -> None:
        self.notes: list[str] = []
        self._unit = unit
        self._mutable = set_attributes(function.graph for function in unit.get_functions())
        self._classes: dict[str, ScriptClass] = {}
        self._reasons: dict[str, str] = {}
        self._called: dict[str, set[str]] = {}
        """Class -> its methods that any module calls."""
        self._used: dict[str, set[str]] = {}
        """Class -> its attributes that any method reads or sets."""
        self._modules: dict[Any, nn.Module] = {}
        for module in root.modules():
            self._note_uses(module)

    def programs(self) -> Iterator[tuple[Any, ...]]:
        """Yield the programs of all classes."""
        return (lifted.program for lifted in self._classes.values())

    def convert(self, script: Any, path: str) -> nn.Module:
        """Return ``script`` as a plain module; a script at two paths becomes one module."""
        known = self._modules.get(program_of(script))
        if known is not None:
            return known
        reason = self._reason_against(script)
        if reason:
            self.notes.append(f"{path or 'The model'} stays TorchScript: {reason}.")
            module: nn.Module = ScriptLeaf(script)
        else:
            module = self._lift(script, path)
        self._modules[program_of(script)] = module
        return module

    def _lift(self, script: Any, path: str) -> LiftedModule:
        lifted = self._class(script)
        module = make_module(lifted.program, lifted.constants)
        module.training = getattr(script, "training", True)
        for name, tensor in parameters_of(script).items():
            parameters_of(module)[name] = as_parameter(tensor)
        buffers_of(module).update(buffers_of(script).items())
        for name in sorted(self._used.get(program_of(script).qualified_name, set()) - {"training"}):
            if not any(name in held for held in (parameters_of(script), buffers_of(script), children_of(script))):
                setattr(module, name, program_of(script).getattr(name))
        for name, child in children_of(script).items():
            children_of(module)[name] = self.convert(child, f"{path}.{name}".lstrip("."))
        return module

    def _class(self, script: Any) -> ScriptClass:
        name = program_of(script).qualified_name
        if name not in self._classes:
            self._classes[name] = lift_class(script, self._unit, self._mutable)
        return self._classes[name]

    def _note_uses(self, script: Any) -> None:
        program = self._class(script).program
        for path, method in calls_of(program):
            _note_attribute(self._called, find_module(script, path), method)
        for attribute in attributes_of(program):
            _note_attribute(self._used, find_module(script, attribute[:-1]), attribute[-1])

    def _reason_against(self, script: Any) -> str:
        name = program_of(script).qualified_name
        if name not in self._reasons:
            self._reasons[name] = next(self._obstacles(script), "")
        return self._reasons[name]

    def _obstacles(self, script: Any) -> Iterator[str]:
        lifted = self._class(script)
        called = self._called.get(program_of(script).qualified_name, ())
        for method, failure in lifted.failures.items():
            if method == "forward" or method in called:
                yield failure
        if has_method(script, "forward") and hooks_of(script):
            yield "it has hooks"
        for path, method in calls_of(lifted.program):
            # A part that stays TorchScript can run its forward as a whole, but nothing inside it can be reached.
            owners = [find_module(script, path[:length]) for length in range(1, len(path) + (method != "forward"))]
            if any(owner is not None and self._reason_against(owner) for owner in owners):
                yield f"it calls a part of {'.'.join(path)}, which cannot be lifted"
        for attribute in attributes_of(lifted.program):
            owner = find_module(script, attribute[:-1]) if len(attribute) > 1 else None
            # Parameters and buffers can be read even in a part that stays TorchScript.
            if owner is None or attribute[-1] in parameters_of(owner) or attribute[-1] in buffers_of(owner):
                continue
            if self._reason_against(owner):
                yield f"it uses {'.'.join(attribute)} of a part that cannot be lifted"


def _note_attribute(noted: dict[str, set[str]], owner: Any, name: str) -> None:
    if owner is not None:
        noted.setdefault(program_of(owner).qualified_name, set()).add(name)


def as_parameter(tensor: Tensor | None) -> nn.Parameter | None:
    """Turn ``tensor`` into a parameter in place: a script, such as an LSTM's, may also hold it elsewhere."""
    if tensor is not None and type(tensor) is Tensor:
        tensor.__class__ = nn.Parameter
    return tensor  # type: ignore[return-value]
