"""memopt: train the same model in a fraction of the memory.

The public names are loaded when they are first used, so that ``memopt --help`` and ``import memopt_cli.runtime``, all
that an optimized model needs, import little.  Modules with names for few scripts load in the same way: ``batching``,
``errors``, ``model_batching``, ``online``, ``ranks``, ``records``, ``runtime`` and ``spikingjelly``.
"""

from __future__ import annotations

import importlib
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _PUBLIC and _MODULES, for editors and type checkers
    from memopt_cli import batching as batching
    from memopt_cli import errors as errors
    from memopt_cli import model_batching as model_batching
    from memopt_cli import online as online
    from memopt_cli import ranks as ranks
    from memopt_cli import records as records
    from memopt_cli import runtime as runtime
    from memopt_cli import spikingjelly as spikingjelly
    from memopt_cli.api.export import export_plan as export_plan
    from memopt_cli.api.live import baseline as baseline
    from memopt_cli.api.live import check as check
    from memopt_cli.api.live import frontier as frontier
    from memopt_cli.api.live import optimize as optimize
    from memopt_cli.api.live import profile as profile
    from memopt_cli.api.live import recommend_batch as recommend_batch
    from memopt_cli.api.oom import explain_oom as explain_oom
    from memopt_cli.api.optimized_step import optimize_step as optimize_step
    from memopt_cli.api.verified import verify as verify
    from memopt_cli.api.verified_plan import apply_plan as apply_plan
    from memopt_cli.errors import MemoptError as MemoptError
    from memopt_cli.errors import NothingFitsError as NothingFitsError
    from memopt_cli.errors import VerificationError as VerificationError
    from memopt_cli.files.memopt_files import read_plan as read_plan
    from memopt_cli.loading import load as load
    from memopt_cli.records import DeviceProfile as DeviceProfile
    from memopt_cli.records import Plan as Plan
    from memopt_cli.records import SegmentPlan as SegmentPlan
    from memopt_cli.records import Trust as Trust
    from memopt_cli.training.apply import plan_of as plan_of
    from memopt_cli.training.apply import remove_plan as remove_plan
    from memopt_cli.training.user_step import Step as Step
    from memopt_cli.version import __version__ as __version__

_NAMES = {
    "api.export": "export_plan",
    "api.live": "baseline check frontier optimize profile recommend_batch",
    "api.oom": "explain_oom",
    "api.optimized_step": "optimize_step",
    "api.verified": "verify",
    "api.verified_plan": "apply_plan",
    "errors": "MemoptError NothingFitsError VerificationError",
    "files.memopt_files": "read_plan",
    "loading": "load",
    "records": "DeviceProfile Plan SegmentPlan Trust",
    "training.apply": "plan_of remove_plan",
    "training.user_step": "Step",
    "version": "__version__",
}
_PUBLIC = {name: f"memopt_cli.{module}" for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("batching", "errors", "model_batching", "online", "ranks", "records", "runtime", "spikingjelly")

__all__ = [name for name in _PUBLIC if name != "__version__"]

on_unsafe = "warn"
"""Reaction to a segment with a forward that cannot be repeated or gives other values when it is: ``warn``, and run
the segment without recomputation from then on; or ``raise``."""

offload_folder: str | None = None
"""Folder for the tensors that a plan sends to the disk; ``None`` for the system's folder of temporary files."""


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, *_MODULES, "__all__", "__doc__", "offload_folder", "on_unsafe"])


def _import_module(module: str) -> ModuleType:
    # A name may first be used within a training, and rich, for reports, uses random numbers when it is imported.
    position = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        random.setstate(position)


if not TYPE_CHECKING:  # a type checker would take any name for Any

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(_import_module(_PUBLIC[name]), name)
        if name in _MODULES:
            return _import_module(f"memopt_cli.{name}")
        raise AttributeError(f"module 'memopt_cli' has no attribute {name!r}")
