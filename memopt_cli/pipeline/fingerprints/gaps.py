"""Comparing two trainings tensor by tensor, by the fingerprints that each step left, and listing the gaps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from memopt_cli.errors import StepError
from memopt_cli.pipeline.fingerprints.steps import ROUNDING_SHARE, relative_distance, root_mean_square
from memopt_cli.pipeline.renames import find_renames
from memopt_cli.records import NOT_FINITE, FollowedSteps, ModuleBytes, StepPrint, TensorGap, TensorPrint
from memopt_cli.text.paths import is_within, stems_of
from memopt_cli.text.units import format_some

_RenameFunction = Callable[[str], str]
_TensorsByName = Mapping[str, TensorPrint]

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Prefixes that torch.compile, PyTorch's checkpoint wrapper and FSDP add to names in the modules that they wrap."""
_REPLICATED = "module."
"""Prefix that DataParallel adds to all names; a model may also have a child of that name."""
_PARAMETER = "parameter "
_BUFFER = "buffer "
_NAME_PREFIXES = ("output", "input", "gradient", "buffer", "state", "the random", "parameter")
"""Beginnings of tensor names, in the order in which a step makes the tensors: an early gap may cause later ones."""
_FLOAT64_EPSILON: Final = 2.0**-52
"""Distance of 1 to the next number of float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first step in which two trainings differ."""

    step: int
    """Index of the step, from 0."""
    gaps: tuple[TensorGap, ...]
    """Gaps in the order in which a step makes the tensors; the largest of a kind first."""

    @property
    def is_rounding(self) -> bool:
        """Whether the order of sums may cause all gaps: no tensor is missing, of a different kind, or of integers."""
        return all(math.isfinite(gap.apart) for gap in self.gaps)


def first_difference(reference: FollowedSteps, other: FollowedSteps, tolerance: float = 0.0) -> FirstDifference | None:
    """Return the first step in which ``other`` differs by more than ``tolerance`` (0: in any bit), or ``None``."""
    for index, (reference_step, other_step) in enumerate(zip(reference.steps, other.steps, strict=True)):
        gaps = gaps_between(reference_step.effects, other_step.effects, tolerance)
        if gaps:
            return FirstDifference(step=index, gaps=gaps)
    return None


def largest_gap(reference: FollowedSteps, other: FollowedSteps) -> float:
    """Return the largest gap between all tensors in all steps."""
    pairs = zip(reference.steps, other.steps, strict=True)
    return max(
        (
            gap.apart
            for reference_step, other_step in pairs
            for gap in gaps_between(reference_step.effects, other_step.effects)
        ),
        default=0.0,
    )


def is_in_double(training: FollowedSteps) -> bool:
    """Return whether all tensors in ``training`` are in float64 already, so that no dtype compares more precisely."""
    tensors = (tensor for step in training.steps for tensor in step.effects if not tensor.name.startswith("input"))
    return all(tensor.epsilon in (0.0, _FLOAT64_EPSILON) for tensor in tensors)


def is_nowhere_finite(tensor: TensorPrint) -> bool:
    """Return whether ``tensor`` holds NaN or infinity alone."""
    return NOT_FINITE in tensor.kind and not tensor.norm


def largest_gap_of_first_step(reference: FollowedSteps, other: FollowedSteps) -> float:
    """Return the largest gap in the first step before its update, while parameters are still equal.

    The update may blow gaps up: Adam turns gradients of pure rounding into steps of a full learning rate.
    """
    gaps = gaps_between(reference.steps[0].effects, other.steps[0].effects)
    return max((gap.apart for gap in gaps if not gap.name.startswith("parameter")), default=0.0)


def half_of_digits(training: FollowedSteps, epsilon: float) -> float:
    """Return the relative difference up to which half of the digits agree; ``epsilon``: of autocast's dtype."""
    digits = (tensor.epsilon for step in training.steps for tensor in step.effects if tensor.epsilon)
    return math.sqrt(max((epsilon, *digits)))


def gaps_between(
    reference: Iterable[TensorPrint], other: Iterable[TensorPrint], tolerance: float = 0.0
) -> tuple[TensorGap, ...]:
    """Return the tensors that differ by more than ``tolerance``."""
    reference_tensors, other_tensors = ({tensor.name: tensor for tensor in side} for side in (reference, other))
    # Gradients far smaller than the largest gradient may be pure rounding: take their gaps relative to a share of it.
    largest = max(
        (root_mean_square(tensor) for name, tensor in reference_tensors.items() if name.startswith("gradient")),
        default=0.0,
    )
    gaps = []
    for name in reference_tensors.keys() | other_tensors.keys():
        reference_tensor, other_tensor = reference_tensors.get(name), other_tensors.get(name)
        if reference_tensor is not None and other_tensor is not None and reference_tensor.bits == other_tensor.bits:
            continue
        distance = relative_distance(
            reference_tensor, other_tensor, ROUNDING_SHARE * (largest if name.startswith("gradient") else 1.0)
        )
        if distance > tolerance or not tolerance:
            has_rounding = reference_tensor is not None and reference_tensor.epsilon  # integers have none
            gaps.append(
                TensorGap(
                    name=name,
                    apart=distance if has_rounding else math.inf,
                    missing="reference" if reference_tensor is None else "candidate" if other_tensor is None else "",
                )
            )
    return tuple(sorted(gaps, key=_sort_key))


def _sort_key(gap: TensorGap) -> tuple[int, float, str]:
    kind = next(
        (i for i, beginning in enumerate(_NAME_PREFIXES) if gap.name.startswith(beginning)), len(_NAME_PREFIXES)
    )
    return kind, -gap.apart, gap.name


def with_equal_names(reference: FollowedSteps, other: FollowedSteps) -> tuple[FollowedSteps, FollowedSteps]:
    """Return both trainings without the prefixes that wrappers add to names, and with the names of the reference.

    Raises :class:`StepError` if they do not start with the same parameters, of the same values.
    """
    reference, other = _without_wrappers(reference, other)
    if stems := _renamed(reference, other):
        # After a space: the candidate may have a module named ``output``, and outputs and inputs have no such paths.
        names = re.compile(rf"(?<= )({'|'.join(map(re.escape, sorted(stems, key=len, reverse=True)))})(?![^.])")
        other = _with_names(other, lambda name: names.sub(lambda stem: stems[stem[1]], name))
    _require_same_start(reference, other)
    return reference, other


def rename_notes(reference: FollowedSteps, other: FollowedSteps) -> tuple[str, ...]:
    """Return a note if parts of the model have different names in ``other``."""
    stems = _renamed(*_without_wrappers(reference, other))
    names = ", ".join(f"{new} is {old}" for new, old in stems.items())
    return (f"Compared under the names of the reference: {names}.",) if stems else ()


def _without_wrappers(reference: FollowedSteps, other: FollowedSteps) -> tuple[FollowedSteps, FollowedSteps]:
    reference, other = (_with_names(side, lambda name: _WRAPPERS.sub("", name)) for side in (reference, other))
    if _start_parameters(reference) != _start_parameters(other):
        reference, other = (
            _without_replicas(side, other_side) for side, other_side in ((reference, other), (other, reference))
        )
    return reference, other


def _renamed(reference: FollowedSteps, other: FollowedSteps) -> dict[str, str]:
    """Return the renamed parts of the model, such as a module: path in ``other`` -> path in the ``reference``.

    The parameters missing on one side have the shapes of those missing on the other, in the same order.
    """
    sides = [
        {
            tensor.name.removeprefix(_PARAMETER): tensor.kind
            for tensor in side.start
            if tensor.name.startswith(_PARAMETER)
        }
        for side in (reference, other)
    ]
    old, new = ([name for name in names if name not in others] for names, others in (sides, reversed(sides)))
    if [sides[0][name] for name in old] != [sides[1][name] for name in new]:
        return {}
    stems = {after: before for before, after in map(stems_of, old, new)}
    paths = [tensor.name.partition(" ")[2] for tensor in other.start]
    is_taken = any(is_within(path, before) for before in stems.values() for path in paths)
    # With an empty path, one model is in a wrapper, which may do more.
    return {} if is_taken or "" in stems or "" in stems.values() else stems


def _is_wrapped_in(name: str, other: str) -> bool:
    """Return whether ``other`` is ``name`` in a wrapper: ``parameter norm.weight``, ``parameter net.norm.weight``."""
    return other.endswith(f".{name.removeprefix('parameter ')}")


def _require_same_start(reference: FollowedSteps, other: FollowedSteps) -> None:
    before, after = (
        {tensor.name: tensor for tensor in side.start if tensor.name.startswith((_PARAMETER, _BUFFER))}
        for side in (reference, other)
    )
    gone, added = (
        [name for name in names if name.startswith(_PARAMETER) and name not in others]
        for names, others in ((before, after), (after, before))
    )
    if any(_is_wrapped_in(name, new) or _is_wrapped_in(new, name) for name in gone[:1] for new in after):
        raise StepError(
            f"the candidate has no {gone[0]}",
            hint="memopt does not compare a model with a step, or with a model around it: give two of the same kind.",
        )
    if differences := _other_parameters(before, after, gone, added):
        raise StepError(f"the candidate {differences}", hint="Compare two ways to train the same model.")
    differing_name = next(
        (name for name in sorted(before.keys() & after.keys()) if before[name].bits != after[name].bits), None
    )
    if differing_name is not None:
        raise StepError(
            f"the two start with different values of {differing_name}",
            hint="Save both from one model, or seed at the top of the functions that make them. If both are seeded, "
            "they may make their modules in a different order: load the reference's state_dict() in the candidate.",
        )


def _other_parameters(before: _TensorsByName, after: _TensorsByName, gone: Sequence[str], added: Sequence[str]) -> str:
    """Return what the candidate lacks, what only it has, and what differs in shape; empty if there is nothing.

    ``gone``, ``added``: parameters that only one side has.  Those of renamed modules are left out, unless there are no
    others: names that match only in a different order are not the same model.
    """
    renames, moves = find_renames(_modules_of(gone, before), _modules_of(added, after))
    new_names = {
        name: f"{_PARAMETER}{moves[path]}.{own}"
        for name in gone
        for path, own in [_split_parameter(name)]
        if path in moves
    }
    new_names = {name: target for name, target in new_names.items() if target in added}
    taken_names = {*new_names.values()}
    shapes = [
        f"{name.removeprefix(_PARAMETER)} {_shape_text(tensor)} → {_shape_text(after[target])}"
        for name, tensor in before.items()
        if (target := new_names.get(name, name)) in after and _shape_text(tensor) != _shape_text(after[target])
    ]
    parts: dict[str, Sequence[str]] = {
        "has no": [name for name in gone if name not in new_names],
        "also has": [name for name in added if name not in taken_names],
        "has other shapes:": shapes,
    }
    if not any(parts.values()):
        parts, renames = {"has no": gone, "also has": added}, ()
    clauses = (
        f"{verb} {format_some([name.removeprefix(_PARAMETER) for name in names])}"
        for verb, names in parts.items()
        if names
    )
    renamed = [f"{rename.after} is {rename.before}" for rename in renames if rename.before and rename.after]
    return "; it ".join(clauses) + (f" ({', '.join(renamed)})" if renamed else "")


def _modules_of(names: Iterable[str], tensors: _TensorsByName) -> list[ModuleBytes]:
    """Return the modules of the parameters ``names``; those with equal names and shapes count as of one class."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        path, own = _split_parameter(name)
        parts[path].append(f"{own} {_shape_text(tensors[name])}")
    return [
        ModuleBytes(path=path, class_name=", ".join(own), output_bytes=0, held_bytes={}) for path, own in parts.items()
    ]


def _split_parameter(name: str) -> tuple[str, str]:
    """Return the path of the module of the parameter ``name``, and the parameter's own name in it."""
    path, _, own = name.removeprefix(_PARAMETER).rpartition(".")
    return path, own


def _shape_text(tensor: TensorPrint) -> str:
    """Return the shape of ``tensor``, ``192x64``, from its kind: ``torch.float32 (192, 64) torch.strided``."""
    sizes = re.findall(r"\d+", tensor.kind.partition("(")[2].partition(")")[0])
    return "x".join(sizes) or "scalar"


def unsteady_names(first_run: FollowedSteps, second_run: FollowedSteps) -> frozenset[str]:
    """Return the names of numbers and generators that differ between two runs of one model, such as a time of day."""
    pairs = (
        ({tensor.name: tensor.bits for tensor in side.others} for side in steps)
        for steps in zip(first_run.steps, second_run.steps, strict=True)
    )
    return frozenset(
        name
        for first_bits, second_bits in pairs
        for name in first_bits.keys() | second_bits.keys()
        if first_bits.get(name) != second_bits.get(name)
    )


def with_shared_values(
    reference: FollowedSteps, candidate: FollowedSteps, ignored: Set[str]
) -> tuple[FollowedSteps, FollowedSteps]:
    """Add the numbers and generators that both models have to the effects of their steps.

    ``ignored``: names of numbers and generators to leave out.  State that only the ``candidate`` keeps is left out too.
    """
    shared = (set(reference.others) & set(candidate.others)) - ignored
    pairs = [
        _step_with_shared_values(*steps, shared, ignored)
        for steps in zip(reference.steps, candidate.steps, strict=True)
    ]
    reference_steps, candidate_steps = zip(*pairs, strict=True)
    return replace(reference, steps=reference_steps), replace(candidate, steps=candidate_steps)


def _step_with_shared_values(
    reference: StepPrint, candidate: StepPrint, shared: Set[str], ignored: Set[str]
) -> tuple[StepPrint, StepPrint]:
    reference_values, candidate_values = (
        {tensor.name: tensor for tensor in step.others if tensor.name not in ignored} for step in (reference, candidate)
    )
    reference_names = {tensor.name for tensor in reference.effects}
    effects = tuple(
        tensor for tensor in candidate.effects if tensor.name in reference_names or not tensor.name.startswith("state")
    )
    return replace(
        reference, effects=reference.effects + _shared_values(reference_values, candidate_values, shared)
    ), replace(candidate, effects=effects + _shared_values(candidate_values, reference_values, shared))


def _shared_values(values: _TensorsByName, other_values: _TensorsByName, shared: Set[str]) -> tuple[TensorPrint, ...]:
    """Return the ``shared`` tensors that moved on at least one side, and all numbers of the outputs.

    A tensor that moved only on the other side, ``other_values``, gets a placeholder: then the two differ.
    """
    unmoved = {name: replace(tensor, kind="unmoved", bits="") for name, tensor in other_values.items()}
    tensors = (tensor for name, tensor in {**unmoved, **values}.items() if name in shared)
    return (*tensors, *(number for name, number in values.items() if name.startswith("output")))


def _start_parameters(training: FollowedSteps) -> dict[str, str]:
    return {tensor.name: tensor.bits for tensor in training.start if tensor.name.startswith("parameter")}


def _without_replicas(training: FollowedSteps, other: FollowedSteps) -> FollowedSteps:
    other_parameters = _start_parameters(other)
    is_wrapped = all(name.partition(" ")[2].startswith(_REPLICATED) for name in _start_parameters(training))
    if not is_wrapped or all(name in other_parameters for name in _start_parameters(training)):
        return training
    return _with_names(training, lambda name: name.replace(f" {_REPLICATED}", " ", 1).removeprefix(_REPLICATED))


def _with_names(training: FollowedSteps, rename: _RenameFunction) -> FollowedSteps:
    return replace(
        training,
        start=_rename_tensors(training.start, rename),
        others=tuple(map(rename, training.others)),
        evaluating=tuple(_rename_path(path, rename) for path in training.evaluating),
        frozen=tuple(_rename_path(name, rename) for name in training.frozen),
        steps=tuple(_rename_step(step, rename) for step in training.steps),
    )


def _rename_step(step: StepPrint, rename: _RenameFunction) -> StepPrint:
    return replace(
        step,
        effects=_rename_tensors(step.effects, rename),
        others=_rename_tensors(step.others, rename),
        hooks=tuple(map(rename, step.hooks)),
        calls=tuple(replace(call, path=_rename_path(call.path, rename)) for call in step.calls),
        choices=tuple(replace(choice, path=_rename_path(choice.path, rename)) for choice in step.choices),
    )


def _rename_path(path: str, rename: _RenameFunction) -> str:
    """Return the ``path`` of a module or parameter under its new name; ``rename`` takes names of tensors."""
    return rename(f" {path}.")[1:-1]


def _rename_tensors(tensors: Sequence[TensorPrint], rename: _RenameFunction) -> tuple[TensorPrint, ...]:
    return tuple(replace(tensor, name=rename(tensor.name)) for tensor in tensors)
