"""From the flags that name and vouch for a model to one :class:`ModelSource`."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from memopt_cli.cli.config import Config
from memopt_cli.records import ModelSource, Trust


def model_source(
    context: typer.Context,
    model: str,
    key: str | None,
    weights: str | None,
    code_paths: Sequence[str],
    packages: Sequence[str],
    single_globals: Sequence[str],
    trust_pickle: bool,
    sandbox: bool,
) -> ModelSource:
    """Where the model comes from, trusting what the flags and the config file's ``trust`` name."""
    config: Config = context.obj
    return ModelSource(
        location=model,
        key=key,
        weights=weights,
        trust=Trust(
            libraries=config.trust,
            packages=tuple(packages),
            globals=tuple(single_globals),
            code_paths=tuple(code_paths),
            pickle=trust_pickle,
            sandbox=sandbox,
        ),
    )
