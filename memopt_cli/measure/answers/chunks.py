"""Trials of chunks: which modules give the same result when their input runs in chunks, and along which axis."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import small_step
from memopt_cli.measure.jobs import ChunkingJob
from memopt_cli.records import ChunkRule, ModuleTrace, Refused, ancestry
from memopt_cli.runtime import find_part
from memopt_cli.runtime.private_torch import hook_tables
from memopt_cli.verification.chunking import TRIAL_LENGTH, capture_call, find_rule

_WIDTHS = {"in_channels", "out_channels", "in_features", "out_features", "num_features", "input_size", "hidden_size"}
"""Attributes that do not change along which axis a module can run in chunks."""


def try_in_chunks(bench: Bench, job: ChunkingJob) -> ChunkRule | Refused:
    """Try whether the module of ``job`` can run in chunks, on its inputs in a small step."""
    return bench.cached(_TrialResults).rule(job.path, allow_inexact=job.allow_inexact)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A key that is equal for modules that differ only in their widths: one trial is enough for all of them.

    The verification of the whole plan finds differences that the key does not show.
    """

    description: str
    """Classes, every plain value but widths, and hooks."""
    lengths: tuple[int, ...]
    """Size of the input along each axis, at most ``TRIAL_LENGTH``: trials do not tell larger sizes apart."""


class _TrialResults:
    """The results of trials; of modules that differ only in their widths, only the cheapest is tried."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._small = bench.cached(small_step)
        self._rules: dict[tuple[str, bool], ChunkRule | Refused] = {}

    def rule(self, path: str, *, allow_inexact: bool) -> ChunkRule | Refused:
        """Return the rule for running the module at ``path`` in chunks, or the reason why it may not."""
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
        """Path of a module -> the path of the module that is tried for it."""
        assert self._small is not None
        flops: dict[str, int] = defaultdict(int)  # path -> work of a module's forward, children included
        for op in self._small.recorded.ops:
            if op.phase == "forward":
                for path in ancestry(op.module):
                    flops[path] += op.flops
        groups: dict[_Kind, list[ModuleTrace]] = defaultdict(list)
        for module in self._small.recorded.modules:
            lengths = tuple(min(length, TRIAL_LENGTH) for length in module.input_shape)
            groups[_Kind(_description(find_part(self._bench.model, module.path)), lengths)].append(module)
        tried_for: dict[str, str] = {}
        for modules in groups.values():
            tried = min(modules, key=lambda module: (flops[module.path], module.input_bytes, module.order))
            tried_for |= dict.fromkeys((module.path for module in modules), tried.path)
        return tried_for


def _description(module: nn.Module) -> str:
    plain_types = (int, float, bool, str, tuple)
    return repr(
        [
            (
                path,
                type(m).__qualname__,
                {k: v for k, v in vars(m).items() if isinstance(v, plain_types) and k not in _WIDTHS},
                [[_name(hook) for hook in table.values()] for table in hook_tables(m)],
            )
            for path, m in module.named_modules()
        ]
    )


def _name(hook: object) -> str:
    """Return the name of a hook that is a function, or of its class: hooks with other attributes count as equal."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
