"""Trials: which modules run in chunks with the same result."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import small_step
from memopt_cli.measure.jobs import ChunkingFound, ChunkingJob
from memopt_cli.records import ChunkRule, ModuleTrace, Refused, ancestry
from memopt_cli.runtime import find_part
from memopt_cli.runtime.private_torch import hook_tables
from memopt_cli.verification.chunking import SHORT, capture_call, find_rule

_WIDTHS = {"in_channels", "out_channels", "in_features", "out_features", "num_features", "input_size", "hidden_size"}
"""Attributes that do not tell along which axis a module is independent."""


def try_in_chunks(bench: Bench, job: ChunkingJob) -> ChunkingFound:
    """On the inputs of a small step."""
    return ChunkingFound(rule=bench.known(Trials).rule(job.path, allow_inexact=job.allow_inexact))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What modules have in common of which one is tried: all but their widths.  The whole plan is verified later."""

    description: str
    """Classes, every plain value but widths, and hooks."""
    lengths: tuple[int, ...]
    """Of the input along each axis, as far as trials in chunks can tell them apart."""


class Trials:
    """What was tried: of modules that are alike but for their widths, the one of the least work."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._small = bench.known(small_step)
        self._rules: dict[tuple[str, bool], ChunkRule | Refused] = {}

    def rule(self, path: str, *, allow_inexact: bool) -> ChunkRule | Refused:
        """Of a module; it does not matter which of its like were asked for before."""
        find_part(self._bench.model, path)
        if self._small is None:
            return Refused(reason="no step of it may be run on data")
        tried = self._representatives.get(path, path), allow_inexact
        if tried not in self._rules:
            module, args, kwargs = capture_call(self._small.step, tried[0])
            self._rules[tried] = find_rule(module, args, kwargs, allow_inexact=allow_inexact)
        return self._rules[tried]

    @functools.cached_property
    def _representatives(self) -> dict[str, str]:
        """Path -> that of the module that stands for it."""
        alike: dict[_Kind, list[ModuleTrace]] = defaultdict(list)
        assert self._small is not None
        for module in self._small.recorded.modules:
            alike[self._kind(module)].append(module)
        return {module.path: min(modules, key=self._work).path for modules in alike.values() for module in modules}

    def _work(self, module: ModuleTrace) -> tuple[int, int, int]:
        return self._flops[module.path], module.input_bytes, module.order

    def _kind(self, module: ModuleTrace) -> _Kind:
        lengths = tuple(min(length, SHORT) for length in module.input_shape)
        return _Kind(_description(find_part(self._bench.model, module.path)), lengths)

    @functools.cached_property
    def _flops(self) -> dict[str, int]:
        """Of each module's forward, with those below it."""
        assert self._small is not None
        total: dict[str, int] = defaultdict(int)
        for op in self._small.recorded.ops:
            if op.phase == "forward":
                for path in ancestry(op.module):
                    total[path] += op.flops
        return total


def _description(module: nn.Module) -> str:
    plain = (int, float, bool, str, tuple)
    return repr(
        [
            (
                path,
                type(m).__qualname__,
                {k: v for k, v in vars(m).items() if isinstance(v, plain) and k not in _WIDTHS},
                [[_name(hook) for hook in table.values()] for table in hook_tables(m)],
            )
            for path, m in module.named_modules()
        ]
    )


def _name(hook: object) -> str:
    """A function's, or its class's: those that differ in what they hold are alike, as modules are."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
