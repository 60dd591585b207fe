"""Turning the flags that describe the inputs (``-i``, ``--input-data``, ``--input-script``, ``--dim``) into one
:class:`InputSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from memopt_cli.cli.config import Config
from memopt_cli.cli.typed_flags import is_typed
from memopt_cli.errors import UsageError
from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.inputs.spec_text import check_inputs, parse_dims, parse_tensor, require_used
from memopt_cli.records import InputSpec


def input_spec(
    context: typer.Context,
    inputs: Sequence[str],
    data_file: str | None,
    script: str | None,
    dims: Sequence[str],
    batch: int | None = None,
) -> InputSpec | None:
    """Return the inputs that the command line describes, or else the config file; ``None`` if neither does.

    With dimensions alone (``--dim B=16``) the spec has no tensors, file or script: the sizes apply to a description
    that is found later, such as ``model.inputs.yaml``.
    ``batch``: the size of ``B`` in ``inputs`` that lack one; ``None`` to ask for one.

    Raises :class:`UsageError` for text that does not parse, two descriptions at once, a symbol without a size, and a
    ``--dim`` that no shape uses.  Sizes in the config file may be unused: one file can serve several models.
    """
    config: Config = context.obj
    flags: dict[str, Any] = {"inputs": inputs, "input_data": data_file, "input_script": script}
    given = [name for name, value in flags.items() if value]
    typed_names = [name for name in given if is_typed(context, name)]
    if len(typed_names or given) > 1:
        names = " and ".join(_flag(name) for name in typed_names or given)
        raise UsageError(f"the inputs are given twice, by {names}", hint="Remove one of them.")
    asked_batch = parse_dims(dims)
    sizes = {**parse_dims(config.dims), **asked_batch}
    optional = tuple(name for name in sizes if name not in asked_batch)
    if not given:
        source = "--dim" if dims else config.path
        return InputSpec(dims=sizes, optional_dims=optional, source=source) if sizes else None
    chosen = (typed_names or given)[0]
    tensors = tuple(parse_tensor(text) for text in inputs) if chosen == "inputs" else ()
    if tensors and batch is not None:
        sizes = {BATCH: batch, **sizes}
    check_inputs(tensors, sizes)
    if chosen != "input_script":  # a script's arguments are not known yet
        require_used(asked_batch, tensors, _flag(chosen))
        sizes = {name: size for name, size in sizes.items() if any(name in tensor.shape for tensor in tensors)}
        optional = ()
    return InputSpec(
        tensors=tensors,
        dims=sizes,
        optional_dims=optional,
        data_file=data_file if chosen == "input_data" else None,
        script=script if chosen == "input_script" else None,
        source=_flag(chosen) if typed_names else config.path,
    )


def _flag(name: str) -> str:
    return "--" + name.removesuffix("s").replace("_", "-")
