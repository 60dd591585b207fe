"""The kinds of objects that a file may hold."""

from __future__ import annotations

from collections.abc import Sequence

from memopt_cli.loading.pickles.kinds.annotations import Annotations
from memopt_cli.loading.pickles.kinds.arrays import Arrays
from memopt_cli.loading.pickles.kinds.functions import Attributes, Functions
from memopt_cli.loading.pickles.kinds.interface import Kind
from memopt_cli.loading.pickles.kinds.modules import LIBRARIES, Libraries
from memopt_cli.loading.pickles.kinds.own import Own
from memopt_cli.loading.pickles.kinds.plain import PLAIN
from memopt_cli.loading.pickles.kinds.quantized import QUANTIZED
from memopt_cli.loading.pickles.kinds.tensors import TENSORS, Stored
from memopt_cli.loading.pickles.kinds.vouched import Vouched


def kinds_of(stored: Stored, vouched: Vouched) -> Sequence[Kind]:
    """Every kind; the first that claims a name has it.  What is listed by name comes before what a user vouches for."""
    libraries = Libraries((*LIBRARIES, *vouched.trust.libraries))
    return (
        PLAIN,
        TENSORS,
        stored,
        Arrays(),
        QUANTIZED,
        Annotations(),
        Functions(),
        Attributes(),
        Own(),
        vouched,
        libraries,
    )


def kinds_of_data(stored: Stored) -> Sequence[Kind]:
    """Those of files that hold no model: tensors in plain containers."""
    return (PLAIN, TENSORS, stored, Arrays())
