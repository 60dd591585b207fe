"""Groups of options that commands share: one parameter of the command, several on its command line."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

import typer

from memopt_cli.cli import batch_options, options, search_options
from memopt_cli.cli.config import Config
from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import layout_of, parse_mesh, ranks_asked
from memopt_cli.records import Layout, ModelSource, SearchOverrides, StepSettings, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """Which model of the file is meant, and what is vouched for."""

    key: options.Key = None
    weights: options.Weights = None
    code_path: options.CodePath
    allow_package: options.AllowPackage
    allow_global: options.AllowGlobal
    trust_pickle: options.TrustPickle = False
    sandbox: options.Sandbox = True

    def source(self, context: typer.Context, model: str) -> ModelSource:
        """Where the model comes from, trusting what the flags and the config file's ``trust`` name."""
        config: Config = context.obj
        return ModelSource(
            location=model,
            key=self.key,
            weights=self.weights,
            trust=Trust(
                libraries=config.trust,
                packages=tuple(self.allow_package),
                globals=tuple(self.allow_global),
                code_paths=tuple(self.code_path),
                pickle=self.trust_pickle,
                sandbox=self.sandbox,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How the step is run."""

    device: options.Device = "auto"
    precision: options.PrecisionChoice = "stored"
    loss: options.Loss = None
    optimizer: options.Optimizer = None
    accumulate: options.Accumulate = 1
    clip_norm: options.ClipNorm = None
    seed: options.Seed = 0

    def settings(self) -> StepSettings:
        """The same, as the pipeline takes it."""
        return StepSettings(
            device=self.device,
            precision=self.precision,
            loss=self.loss,
            optimizer=self.optimizer or "",
            micro_batches=self.accumulate,
            clip_norm=self.clip_norm,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions:
    """Of how many ranks one is predicted, and how the model is spread over them."""

    ranks: options.Ranks = None
    parallel: options.Parallel = None
    mesh: options.MeshAxes = None

    def layout(self) -> Layout | None:
        """``None``: of one device.  Raises :class:`UsageError` for flags that do not go together."""
        given = [f"--{f.name}" for f in fields(self) if getattr(self, f.name) is not None]
        numbers = None if self.ranks is None else (self.ranks,)
        return next(iter(_layouts(numbers, self.parallel, self.mesh, given)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """The same of several numbers of ranks."""

    ranks: batch_options.Ranks = None
    parallel: options.Parallel = None
    mesh: options.MeshAxes = None

    def layouts(self) -> tuple[Layout, ...]:
        """Empty: of one device.  Raises :class:`UsageError` for flags that do not go together."""
        given = [f"--{f.name}" for f in fields(self) if getattr(self, f.name) is not None]
        return _layouts(None if self.ranks is None else self.ranks.sizes(), self.parallel, self.mesh, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealOptions:
    """How the model is spread over ranks that there are."""

    parallel: options.Parallel = None
    mesh: options.MeshAxes = None

    def layout(self, ranks: int) -> Layout:
        """Raises :class:`UsageError` for flags that do not go together, or a mesh of another number of ranks."""
        if self.parallel is None:
            raise UsageError(
                "--parallel fsdp, ddp or FILE.py:NAME is missing", hint="For example: --parallel train.py:shard"
            )
        return layout_of(ranks, self.parallel, None if self.mesh is None else parse_mesh(self.mesh))


def _layouts(
    numbers: Sequence[int] | None, parallel: str | None, mesh: str | None, given: Sequence[str]
) -> tuple[Layout, ...]:
    """One for each number of ranks.  Raises :class:`UsageError` for flags, of those ``given``, that lack another."""
    if numbers is not None and parallel is not None:
        axes = None if mesh is None else parse_mesh(mesh)
        return tuple(layout_of(number, parallel, axes) for number in numbers)
    if given:
        missing = "--ranks N" if numbers is None else "--parallel fsdp, ddp or FILE.py:NAME"
        raise UsageError(
            f"{given[0]} says something of one rank of many, and {missing} is missing",
            hint="For example: --ranks 8 --parallel train.py:shard",
        )
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(SpreadOptions):
    """The same, and which rank."""

    rank: options.Rank = None

    def predicted(self, *, without_data: bool) -> Layout | None:
        """The same.  Raises :class:`UsageError` also for a rank that there is not, and a step that runs on data."""
        layout = self.layout()
        if layout is not None:
            ranks_asked(layout, self.rank)
            if not without_data:
                raise UsageError("one rank of many is predicted on tensors without data", hint="Add --fake.")
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSearchOptions:
    """Whether plans are looked for beside a batch, and which."""

    search: batch_options.Search = False
    level: batch_options.Level = None
    target: search_options.Target
    allow_inexact: search_options.AllowInexact = False
    search_time: batch_options.SearchTime = None

    def overrides(self, context: typer.Context) -> SearchOverrides | None:
        """What plans may do; ``None``: none are looked for.

        Raises :class:`UsageError` for a flag of the command line that says it of none.
        """
        if self.search:
            return SearchOverrides(level=self.level, targets=tuple(self.target), allow_inexact=self.allow_inexact)
        names = [f.name for f in fields(self)]
        sources = {name: context.get_parameter_source(name) for name in names}
        if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
            raise UsageError(f"--{given[0].replace('_', '-')} says how plans are looked for", hint="Add --search.")
        return None


def with_parts(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it: each parameter that is a group is spelled out, option by option."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        spelled_out = _options_of(group) if group else [parameter.replace(annotation=hints[parameter.name])]
        parameters.extend(spelled_out)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(run)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
