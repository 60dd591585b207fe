"""The inputs of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt_cli.errors import UsageError

GUESS = "a guess from "
"""How the source of a spec begins that memopt has made up itself."""


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
    """``normal``, ``uniform``, ``zeros``, ``ones``, ``spikes:RATE`` or ``LOW..HIGH`` (high exclusive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The inputs of one training step, by one of ``tensors``, ``data_file`` and ``script``.

    With none of them its ``dims`` resize those that are found elsewhere.  Raises :class:`UsageError` for two at once:
    whoever looked at the one would run the other.
    """

    tensors: tuple[TensorSpec, ...] = ()
    dims: dict[str, int] = field(default_factory=dict)
    """Size of each symbol, e.g. ``{"B": 8, "S": 128}``."""
    optional_dims: tuple[str, ...] = ()
    """Those of ``dims`` that are left out where nothing takes them: a config file may be of other models, too."""
    data_file: str | None = None
    """``--input-data``: a file that holds the inputs."""
    data_sha256: str | None = None
    """Hash of that file when it was first read: one that has become another is refused.  ``None``: not read yet."""
    script: str | None = None
    """``--input-script``: ``file.py:function``, called with the dimensions it names."""
    source: str
    """Where the spec was found, for people: ``--input``, ``model.inputs.yaml``, ``a guess from conv1`` …"""

    @property
    def is_guess(self) -> bool:
        """Nobody has said it: it is memopt's own."""
        return self.source.startswith(GUESS)

    def __post_init__(self) -> None:
        ways = {"tensors": self.tensors, "data_file": self.data_file, "script": self.script}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise UsageError(f"the inputs are described twice, by {' and '.join(given)}", hint="Keep one of them.")
