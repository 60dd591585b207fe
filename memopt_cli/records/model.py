"""The records of a model: where it comes from, the trust that its file needs, and facts about it once it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.plan import Plan
from memopt_cli.text.documents import quoted_flag

if TYPE_CHECKING:
    from torch import nn

STEP = "step"
"""Format of the models in the user's own step, which brings its optimizers and losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The code that the user trusts when a model file is loaded."""

    libraries: tuple[str, ...] = ()
    """Packages whose ``nn.Module`` classes may be built (``trust:``), such as well-known model libraries."""
    packages: tuple[str, ...] = ()
    """Top-level packages (``--allow-package``) whose classes may be built and whose functions may be referred to; a
    function that the file itself calls must be named in :attr:`globals`."""
    globals: tuple[str, ...] = ()
    """Single qualified names that may be imported (``--allow-global``)."""
    code_paths: tuple[str, ...] = ()
    """Files or folders made importable, whose module classes are trusted (``--code-path``)."""
    pickle: bool = False
    """Whether nothing is checked at all (``--trust-pickle``)."""
    sandbox: bool = True
    """Whether subprocesses that load and run the model are confined (not with ``--no-sandbox``, nor if nothing is
    checked)."""

    @property
    def in_python(self) -> str:
        """Python expression for this trust: ``Trust(packages=('mymodels',), code_paths=('train.py',))``."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Trust({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @property
    def flags(self) -> str:
        """Flags of the command line for this trust: ``--allow-package mymodels --code-path train.py``."""
        values_by_flag = {
            "--allow-package": self.packages,
            "--allow-global": self.globals,
            "--code-path": self.code_paths,
        }
        switches = {"--trust-pickle": self.pickle, "--no-sandbox": not self.sandbox}
        flags = [quoted_flag(flag, value) for flag, values in values_by_flag.items() for value in values]
        return " ".join([*flags, *(flag for flag, is_set in switches.items() if is_set)])


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGlobal:
    """A class or function that a model file would import if the user allowed it."""

    name: str
    """Qualified name, e.g. ``mymodels.net.Net``."""
    package: str
    """Top-level package, e.g. ``mymodels``."""
    reason: str
    """Reason why the name is not allowed, for people."""


FIRST_USED: Final = "; the first is used."
"""Part of a note that memopt chose one of several state dicts itself, and may have chosen another than is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The source of a model, with everything that a subprocess needs to load the same model again."""

    location: str
    """Path of a file, or ``package.module:callable``."""
    weights: str | None = None
    """Path of a state dict that fills the model (``--weights``)."""
    key: str | None = None
    """Entry to take from a file that holds several, as keys joined by dots (``--key``); ``None`` for the file
    itself."""
    trust: Trust = Trust()
    typed_trust: Trust = Trust()
    """Part of ``trust`` that the user typed for this command.  It is remembered for the file."""
    keeps_compiled: bool = False
    """Whether a model that its code compiles with ``torch.compile`` runs compiled; otherwise it runs uncompiled."""
    own_checkpoints: bool = True
    """Whether the model's own checkpointing stays on; otherwise the attributes that control it are turned off."""
    sha256: str | None = None
    """Hash of the model file when it was first read, to refuse a changed file; ``None`` if it has not been
    read yet, or is a callable."""
    weights_sha256: str | None = None
    """Hash of the file of weights when it was first read; ``None`` if it has not been read yet, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, with facts about the file it came from."""

    module: nn.Module
    source: ModelSource
    format: str
    """``pickle``, ``torchscript``, ``exported``, ``pretrained``, ``factory`` or :data:`STEP`."""
    sha256: str | None
    """Hash of the model file; ``None`` for a factory."""
    weights_sha256: str | None = None
    """Hash of the file of weights; ``None`` if there is none."""
    notes: tuple[str, ...] = ()
    example_spec: InputSpec | None = None
    """Inputs that the file carries (``.pt2``); ``None`` if it carries none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that was loaded in another process."""

    format: str
    """Format, as in :class:`LoadedModel`."""
    class_name: str
    """Class of the model itself."""
    sha256: str | None
    weights_sha256: str | None
    notes: tuple[str, ...]
    spec: InputSpec | None
    """Inputs of the model's step; ``None`` if the job did not ask for them."""
    batch: int | None
    """Number of samples of the inputs; ``None`` if the job did not ask for them."""
    carried: Plan
    """Plan that the file carries; empty if none."""
    asked_compressors: tuple[str, ...]
    """Paths of the modules that name a compressor of their inputs (``x_compressor``), other than ``null``."""
    fixed_sizes: bool
    """Whether the file takes inputs of one size only (``torch.export`` without ``dynamic_shapes``)."""
    indices: dict[str, int]
    """Path of a buffer or attribute of integers -> the largest value; it may be an index of samples, as in a graph's
    edges."""
    batch_norms: bool
    """Whether the model has batch norms."""
    trainable_bytes: int
    """Bytes of the parameters that require gradients, as they are stored."""
    held_bytes: int
    """Bytes of all parameters and buffers, as they are stored."""
    sync_norms: tuple[str, ...]
    """Paths of the batch norms whose statistics need all processes (``SyncBatchNorm``)."""
    libraries: tuple[str, ...] = ()
    """Modules of model libraries imported to load the model, for later subprocesses, without modules hidden by the
    user's code; empty if loading changed the environment, since imports depend on it."""
    checkpoint_switches: tuple[str, ...] = ()
    """Attributes that make the model checkpoint by itself, as
    :func:`memopt_cli.training.own_checkpoints.find_switches` finds them."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of each module imported when the model was loaded -> its file, as in :class:`FollowedSteps`."""
