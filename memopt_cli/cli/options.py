"""Building the options of every command from the table in ``text/options.py``.

A command declares only the names and types of its parameters; :func:`with_options` looks up help, flags and checks by
name.  Options that several commands share form a group: one parameter whose type is a dataclass here, such as
``step: StepOptions``, and whose fields are the options ``--device``, ``--precision`` and so on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Final

import typer

from memopt_cli.cli.config import Config, read_config
from memopt_cli.cli.help import show_all
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.typed_flags import is_typed
from memopt_cli.cli.values import CHECKS, parsed_by
from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import layout_of, parse_mesh, ranks_asked
from memopt_cli.records import (
    DimRange,
    InputSpec,
    ModelSource,
    Precision,
    RankLayout,
    ResolvedSearch,
    SearchOverrides,
    StepSettings,
    Trust,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.options import ARGUMENTS, OPTIONS, find_option
from memopt_cli.text.values import Choice

_LOG = logging.getLogger("memopt_cli")
_TRUSTS: Final = {
    "allow_package": "packages",
    "allow_global": "globals",
    "code_path": "code_paths",
    "trust_pickle": "pickle",
    "sandbox": "sandbox",
}
"""Option for trust in code -> field of :class:`Trust`."""
_NO_DEFAULT: Final = inspect.Parameter.empty


def is_verbose() -> bool:
    """Return whether ``-v`` was given."""
    return _LOG.isEnabledFor(logging.DEBUG)


def _set_verbose(verbose: bool) -> bool:
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
    _LOG.setLevel(logging.DEBUG if verbose else logging.WARNING)
    return verbose


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Options that describe the inputs of a step."""

    inputs: list[str]
    dims: list[str]
    input_data: str | None = None
    input_script: str | None = None

    def spec(
        self, context: typer.Context, dims: Sequence[str] | None = None, batch: int | None = None
    ) -> InputSpec | None:
        """Return the inputs that the command line describes, or else the config file; ``None`` if neither does.

        ``dims``: ``--dim`` with one size in place of each range; by default as typed.
        ``batch``: see :func:`~memopt_cli.cli.inputs.input_spec`.
        """
        sizes = self.dims if dims is None else dims
        return input_spec(context, self.inputs, self.input_data, self.input_script, sizes, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """Options for the model of a file to load, and for the code in it that the user trusts."""

    config: str | None = None
    """Path of the config file; not read here: the option's callback has read it before the command begins."""
    key: str | None = None
    weights: str | None = None
    code_path: list[str]
    allow_package: list[str]
    allow_global: list[str]
    trust_pickle: bool = False
    sandbox: bool = True

    def source(self, context: typer.Context, model: str) -> ModelSource:
        """Return the source of ``model``, with the trust that the flags and the config file's ``trust`` give it."""
        config: Config = context.obj
        trust = Trust(
            libraries=config.trust,
            packages=tuple(self.allow_package),
            globals=tuple(self.allow_global),
            code_paths=tuple(self.code_path),
            pickle=self.trust_pickle,
            sandbox=self.sandbox,
        )
        untyped = {name: getattr(Trust(), name) for option, name in _TRUSTS.items() if not is_typed(context, option)}
        typed_trust = replace(trust, libraries=(), **untyped)
        return ModelSource(location=model, key=self.key, weights=self.weights, trust=trust, typed_trust=typed_trust)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options for the way a step is run."""

    device: str = "auto"
    precision: Precision = "stored"
    loss: str | None = None
    optimizer: str | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    seed: int = 0

    def settings(self) -> StepSettings:
        """Return these options as the settings of a step, for a request."""
        return StepSettings(
            device=self.device,
            precision=self.precision,
            loss=self.loss,
            optimizer=self.optimizer or "",
            micro_batches=self.accumulate,
            clip_norm=self.clip_norm,
            seed=self.seed,
        )


REPEATED_IN_SUGGESTIONS: Final = {
    "timeout",
    *(f.name for group in (InputOptions, LoadingOptions, StepOptions) for f in fields(group)),
}
"""Parameters that describe the model, its inputs and its step.  Suggested commands repeat them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayOptions:
    """Options for the amount and the form of output."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def progress(self) -> AbstractContextManager[tuple[Progress, Ask | None]]:
        """Show the progress of a long job on stderr, in the ``with`` block."""
        return shown_progress(quiet=self.quiet, verbose=self.verbose)

    def report(self) -> Report:
        """Return the report format that ``--json`` and ``-v`` select."""
        return JsonReport() if self.json else TextReport(verbose=self.verbose)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Options for a prediction of one rank: the number of ranks, and how the model is spread over them."""

    ranks: int | None = None
    parallel: str | None = None
    mesh: str | None = None

    def layout(self) -> RankLayout | None:
        """Return the layout; ``None`` for one device.  Raises :class:`UsageError` if one of the flags lacks another."""
        return next(iter(_layouts(self, () if self.ranks is None else (self.ranks,))), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRangeOptions:
    """Options for predictions of several numbers of ranks, and how the model is spread over each."""

    ranks: DimRange | None = None
    parallel: str | None = None
    mesh: str | None = None

    def layouts(self) -> tuple[RankLayout, ...]:
        """Return the layouts, one for each number of ranks; empty for one device.

        Raises :class:`UsageError` if one of the flags lacks another.
        """
        return _layouts(self, () if self.ranks is None else self.ranks.sizes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupOptions:
    """Options for sharding a model over the ranks of a real group, whose number the launcher knows."""

    parallel: str | None = None
    mesh: str | None = None

    def layout(self, ranks: int) -> RankLayout:
        """Return the layout over ``ranks``.

        Raises :class:`UsageError` for flags that do not go together, or a mesh of another number of ranks.
        """
        if self.parallel is None:
            raise UsageError(
                "`--parallel` fsdp, ddp or FILE.py:NAME is missing", hint="For example: `--parallel train.py:shard`"
            )
        return layout_of(ranks, self.parallel, None if self.mesh is None else parse_mesh(self.mesh))


def _layouts(asked: LayoutOptions | LayoutRangeOptions, numbers: Sequence[int]) -> tuple[RankLayout, ...]:
    """Return a layout for each of the ``numbers`` of ranks.

    Raises :class:`UsageError` if one of the flags in ``asked`` lacks another.
    """
    if numbers and asked.parallel is not None:
        axes = None if asked.mesh is None else parse_mesh(asked.mesh)
        return tuple(layout_of(number, asked.parallel, axes) for number in numbers)
    given = [f"--{f.name}" for f in fields(asked) if getattr(asked, f.name) is not None]
    if given:
        missing = "`--parallel` fsdp, ddp or FILE.py:NAME" if numbers else "`--ranks N`"
        raise UsageError(
            f"{given[0]} needs {missing}",
            hint="For example: `--ranks 8 --parallel train.py:shard`",
        )
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(LayoutOptions):
    """Options for sharding a model, and for the rank that is predicted."""

    rank: int | None = None

    def predicted(self, *, without_data: bool) -> RankLayout | None:
        """Return the layout to predict one rank of; ``None`` for one device.

        Raises :class:`UsageError` as :meth:`layout`, for a rank outside the layout, and for a step that runs on data.
        """
        layout = self.layout()
        if layout is not None:
            ranks_asked(layout, self.rank)
            if not without_data:
                raise UsageError("one rank of many is predicted on tensors without data", hint="Add `--fake`.")
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSearchOptions:
    """Options of ``recommend-batch --search``, which searches for a batch and a plan together."""

    search: bool = False
    level: int | None = None
    targets: list[str]
    allow_inexact: bool = False
    search_time: float | None = None

    def resolved(self, context: typer.Context) -> ResolvedSearch | None:
        """Return the limits of the search for plans; ``None`` without ``--search``.

        Raises :class:`UsageError` for a flag that needs ``--search`` and was typed without it.
        """
        if self.search:
            asked = SearchOverrides(level=self.level, targets=tuple(self.targets), allow_inexact=self.allow_inexact)
            return resolve(asked)
        for parameter in context.command.params:
            name = parameter.name or ""
            if name in {f.name for f in fields(self)} and is_typed(context, name):
                raise UsageError(f"`{parameter.opts[-1]}` applies only to a search for plans", hint="Add `--search`.")
        return None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the signature that Typer needs: every parameter described by the table, groups expanded.

    Typer sees ``(context, model, device, precision, …)``; the wrapper collects the values of each group again, and
    calls ``command(context, model, step=StepOptions(…))``.
    """
    hints = typing.get_type_hints(command)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint) or typing.is_typeddict(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if parameter.name in groups:
            parameters += [_annotate(command.__name__, field) for field in _fields(hint)]
        elif hint is typer.Context:
            parameters.append(parameter.replace(annotation=hint))
        else:
            parameters.append(_annotate(command.__name__, parameter.replace(annotation=hint)))

    help_all = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    parameters.append(_annotate(command.__name__, help_all))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        given.pop("help_all", None)  # its callback has done the work
        for name, group in groups.items():
            values = {field.name: given.pop(field.name) for field in _fields(group)}
            if typing.is_typeddict(group):  # SearchOverrides, whose repeated options are tuples; Typer gives lists
                given[name] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
            else:
                given[name] = group(**values)
        command(**given)

    vars(run)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of ``group`` as parameters; of a TypedDict (``SearchOverrides``), only those in the table.

    ``SearchOverrides`` also has fields that only Python can give, such as modules.
    """
    if is_dataclass(group):
        defaults = {field.name: field.default for field in fields(group) if field.default is not MISSING}
    else:
        defaults = {name: False if hint is bool else None for name, hint in typing.get_type_hints(group).items()}
    for name, hint in typing.get_type_hints(group).items():
        if is_dataclass(group) or name in OPTIONS:
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, _NO_DEFAULT), annotation=hint
            )


def _annotate(command: str, parameter: inspect.Parameter) -> inspect.Parameter:
    """Return ``parameter`` annotated with the option of that name in the table, as Typer reads it."""
    option = find_option(command, parameter.name)
    hint = parameter.annotation
    default = parameter.default
    info: dict[str, Any] = {"metavar": option.takes, "help": option.help}
    if typing.get_origin(hint) in (list, tuple):
        hint, default = list[str], _NO_DEFAULT
        info["default_factory"] = list
    has_shown_default = default not in (None, _NO_DEFAULT) and hint is not bool
    info["show_default"] = option.default or has_shown_default
    if isinstance(option.kind, str):
        info |= _CALLBACKS.get(option.kind) or {"parser": CHECKS[option.kind]}
    elif option.kind is not None and not isinstance(option.kind, Choice):  # Typer checks choices by the Literal type
        info["parser"] = parsed_by(option.kind)
    flags = option.flags or ((f"--{parameter.name.replace('_', '-')}",) if hint is bool else ())
    is_argument = option.group == ARGUMENTS
    kind = typer.Argument(**info) if is_argument else typer.Option(*flags, rich_help_panel=option.group, **info)
    return parameter.replace(default=default, annotation=Annotated[hint, kind])


_CALLBACKS: Final[dict[str, dict[str, Any]]] = {
    "config": {"is_eager": True, "callback": read_config},
    "help all": {"is_eager": True, "callback": show_all},
    "verbose": {"callback": _set_verbose},
}
"""Kind of an option that acts when it is parsed, such as ``--help-all`` -> Typer's arguments for its callback."""
