"""The description of a training step's inputs: shapes, dtypes and kinds of random values, or a file or script."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt_cli.errors import UsageError

GUESS = "a guess from "
"""Beginning of the source of inputs that memopt has guessed."""

TYPED = "--input"
"""Source of inputs that the command line describes."""

PADDED = "padded"
"""Values of a mask of a batch of sequences of several lengths: ones, and zeros where a row is padded."""

RECORDED = "the baseline"
"""Source of inputs that a baseline describes."""
REMEMBERED = "as typed last, from "
"""Beginning of the source of inputs that were typed for an earlier command and kept in a file next to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input tensor: ``[name:]SHAPE[@dtype][=values]``."""

    name: str | None = None
    """Keyword of ``forward``; ``None`` for a positional argument."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a symbol looked up in :attr:`InputSpec.dims`."""
    dtype: str = "float32"
    """Name of a torch dtype without the prefix."""
    values: str = "normal"
    """``normal``, ``uniform``, ``zeros``, ``ones``, ``padded``, ``spikes:RATE`` ``LOW..HIGH`` (high exclusive) or
    ``APART,LOW..HIGH``, in which a few numbers equal ``APART``: ``-100,0..5``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The inputs of one training step, described by ``tensors``, a ``data_file`` or a ``script``.

    Without any of these, ``dims`` resize inputs that are found elsewhere.  Raises :class:`UsageError` for more than
    one, since memopt might check one and run another.
    """

    tensors: tuple[TensorSpec, ...] = ()
    dims: dict[str, int] = field(default_factory=dict)
    """Size of each symbol, e.g. ``{"B": 8, "S": 128}``."""
    optional_dims: tuple[str, ...] = ()
    """Names in ``dims`` that are ignored if no input has them, since a config file may serve several models."""
    data_file: str | None = None
    """Path of a file that holds the inputs (``--input-data``); ``None`` if the inputs come from elsewhere."""
    data_sha256: str | None = None
    """Hash of that file when it was first read, to refuse a changed file; ``None`` if it has not been
    read."""
    script: str | None = None
    """Function ``file.py:function``, called with the dimensions it names (``--input-script``); ``None`` if absent."""
    source: str
    """Source of the description, as messages name it: ``--input``, ``model.inputs.yaml``, ``a guess from conv1`` …"""

    @property
    def is_guess(self) -> bool:
        """Whether memopt guessed the inputs."""
        return self.source.startswith(GUESS)

    @property
    def has_inputs(self) -> bool:
        """Whether inputs are described, and not only sizes for them."""
        return bool(self.tensors or self.data_file or self.script)

    @property
    def is_recorded(self) -> bool:
        """Whether a baseline described the inputs, so that the model accepted them once."""
        return self.source == RECORDED

    @property
    def is_remembered(self) -> bool:
        """Whether the inputs were typed for an earlier command."""
        return self.source.startswith(REMEMBERED)

    def __post_init__(self) -> None:
        sources = {"tensors": self.tensors, "data_file": self.data_file, "script": self.script}
        names = [name for name, value in sources.items() if value]
        if len(names) > 1:
            raise UsageError(f"the inputs are described twice, by {' and '.join(names)}", hint="Remove one of them.")
