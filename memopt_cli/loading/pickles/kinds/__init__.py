"""The kinds of objects that a pickled file may hold: each has a file here, which says how to check and make one."""

from __future__ import annotations

from collections.abc import Sequence

from memopt_cli.loading.pickles.kinds.annotations import Annotations
from memopt_cli.loading.pickles.kinds.arrays import Arrays
from memopt_cli.loading.pickles.kinds.functions import ATTRIBUTES, Functions
from memopt_cli.loading.pickles.kinds.interface import ObjectKind
from memopt_cli.loading.pickles.kinds.modules import LIBRARIES, Libraries
from memopt_cli.loading.pickles.kinds.own import RuntimeNames
from memopt_cli.loading.pickles.kinds.plain import PLAIN
from memopt_cli.loading.pickles.kinds.quantized import QUANTIZED
from memopt_cli.loading.pickles.kinds.tensors import TENSORS, PickledStorages
from memopt_cli.loading.pickles.kinds.trusted_names import TrustedNames


def kinds_of(stored: PickledStorages, trusted: TrustedNames) -> Sequence[ObjectKind]:
    """List every kind in the order in which a name is offered to them: tables of names first, then the user's trust."""
    libraries = Libraries((*LIBRARIES, *trusted.trust.libraries))
    builtin = (PLAIN, TENSORS, stored, Arrays(), QUANTIZED, Annotations(), Functions(), ATTRIBUTES, RuntimeNames())
    return (*builtin, trusted, libraries)


def kinds_of_data(stored: PickledStorages) -> Sequence[ObjectKind]:
    """List the kinds for files without a model: tensors in plain containers."""
    return (PLAIN, TENSORS, stored, Arrays())
