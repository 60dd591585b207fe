"""Finding the batch dimension of described inputs, and describing the same inputs at another batch size."""

from __future__ import annotations

import shlex
from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.records import InputSpec

BATCH = "B"
"""Symbol of the batch dimension."""
NO_BATCH_ARGUMENT = "Let the function of the script take an argument named batch, and add for example `--dim B=8`."


def check_batch(spec: InputSpec, batch: int) -> None:
    """Raise :class:`UsageError` if the batch of the inputs cannot be varied.

    That is so if they come from a data file, or from a script without a batch argument, or if they have no symbol ``B``
    and do not share their first dimension.
    """
    with_batch(spec, batch + 1)
    sized = [tensor for tensor in spec.tensors if tensor.shape]
    if BATCH in spec.dims or len({tensor.shape[0] for tensor in sized}) <= 1:
        return
    shapes = ", ".join(map(format_tensor, sized))
    first = replace(sized[0], shape=(BATCH, *sized[0].shape[1:]))
    raise UsageError(
        f"memopt cannot tell which dimension is the batch: the inputs differ in their first ({shapes})",
        hint=f"Write {BATCH} for it in every shape that has it: `-i {shlex.quote(format_tensor(first))} --dim "
        f"{BATCH}={batch}`. Inputs such as the nodes and edges of one graph have no batch.",
    )


def with_batch(spec: InputSpec, batch: int) -> InputSpec:
    """Return the inputs of ``spec`` at ``batch`` samples.

    The symbol ``B`` gets the size.  Without the symbol, dimension 0 of the first tensor gets it, and dimension 0 of
    all other tensors where it has the same size.
    Raises :class:`UsageError` for a data file, and for a script that does not take ``B``.
    """
    if spec.data_file is not None:
        raise UsageError(
            f"the inputs in {spec.data_file} cannot be resized", hint="Describe them: `-i Bx3x224x224 --dim B=8`."
        )
    if BATCH in spec.dims:
        return replace(spec, dims={**spec.dims, BATCH: batch})
    if not spec.tensors:
        raise UsageError(f"{spec.script} takes no batch size", hint=NO_BATCH_ARGUMENT)
    old = spec.tensors[0].shape[:1]
    return replace(
        spec,
        tensors=tuple(replace(t, shape=(batch, *t.shape[1:])) if t.shape[:1] == old else t for t in spec.tensors),
    )
