"""A model: where it comes from, what the user vouched for, and what is known of it once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.plan import Plan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What the user vouched for when a file is loaded."""

    libraries: tuple[str, ...] = ()
    """Packages whose ``nn.Module`` classes may be built (``trust:``), like those of well-known model libraries."""
    packages: tuple[str, ...] = ()
    """Top-level packages vouched for (``--allow-package``): the classes that they define may be built, and their
    functions referred to; a function that the file itself calls must be named in :attr:`globals`."""
    globals: tuple[str, ...] = ()
    """Single qualified names that may be imported (``--allow-global``)."""
    code_paths: tuple[str, ...] = ()
    """Files or folders made importable, whose module classes are trusted (``--code-path``)."""
    pickle: bool = False
    """No check at all (``--trust-pickle``)."""
    sandbox: bool = True
    """Subprocesses that load and run the model are confined, unless nothing is checked (``--no-sandbox`` says no)."""

    @property
    def in_python(self) -> str:
        """Expression that makes it: ``Trust(packages=('mymodels',), code_paths=('train.py',))``."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Trust({', '.join(f'{name}={value!r}' for name, value in given.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGlobal:
    """A class or function that a model file wants to import and that is not allowed without asking."""

    name: str
    """Qualified name, e.g. ``mymodels.net.Net``."""
    package: str
    """Top-level package, e.g. ``mymodels``."""
    reason: str
    """Why it is not allowed, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from: enough for a subprocess to load the same model again."""

    location: str
    """Path of a file, or ``package.module:callable``."""
    weights: str | None = None
    """Path of a state dict that fills the model (``--weights``)."""
    key: str | None = None
    """Which entry is meant of a file that holds several, as keys joined by dots (``--key``)."""
    trust: Trust = Trust()
    keeps_compiled: bool = False
    """What ``torch.compile`` made of a model that code builds is run so; otherwise the model within is run as it is
    written."""
    own_checkpoints: bool = True
    """The model checkpoints as it comes; otherwise the attributes that ask for that are off."""
    sha256: str | None = None
    """Hash of the model file when it was first read: one that has become another is refused.  ``None``: not read yet,
    or a callable."""
    weights_sha256: str | None = None
    """The same of the file of weights."""


STEP = "step"
"""The format of the models of a step of the user's own, which has an optimizer, losses and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, with what is known of the file it came from."""

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
    """The inputs that the file carries, if it does (``.pt2``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a command must know of a model that was loaded in another process."""

    format: str
    """As of :class:`LoadedModel`."""
    class_name: str
    """Of the model itself."""
    sha256: str | None
    weights_sha256: str | None
    notes: tuple[str, ...]
    spec: InputSpec | None
    """The inputs of its step; ``None`` if they were not asked for."""
    batch: int | None
    """How many samples they are, which a file of inputs may have to tell; ``None`` if they were not asked for."""
    carried: Plan
    """The plan that the file carries."""
    asked_codecs: tuple[str, ...]
    """Paths of the modules that name a codec, other than none, for their inputs (``x_compressor``)."""
    fixed_sizes: bool
    """The file was made for inputs of one size (``torch.export`` without ``dynamic_shapes``)."""
    indices: dict[str, int]
    """Its buffers and attributes that hold integers -> the largest in each: they may point at samples, as the edges of
    a graph do."""
    batch_norms: bool
    """A layer of it normalizes by statistics of the batch."""
    trainable_bytes: int
    """Of the parameters that require gradients, as they are stored."""
    held_bytes: int
    """Of all parameters and buffers, as they are stored."""
    sync_norms: tuple[str, ...]
    """Paths of batch norms that need all processes."""
    checkpoint_switches: tuple[str, ...] = ()
    """Attributes by which the model checkpoints by itself, as :func:`memopt_cli.own_checkpoints.switches_of` finds
    them."""
