"""``memopt apply``: a plan made elsewhere, onto this model."""

from __future__ import annotations

from memopt_cli.measure.jobs import DescribeJob
from memopt_cli.pipeline.prepare import open_model, saved_model
from memopt_cli.progress import Ask
from memopt_cli.records import ModelSource
from memopt_cli.write import check_targets, output_paths, read_plan, write_all


def apply(
    source: ModelSource,
    plan_path: str,
    *,
    output: str | None,
    force: bool,
    timeout_s: float = 600.0,
    ask: Ask | None = None,
) -> tuple[str, ...]:
    """Put a plan made elsewhere onto a model and write the optimized model; returns the path written.

    ``timeout_s``: of loading the model, and of each piece of the file that is written.  Raises :class:`MemoptError`.
    """
    target = output_paths(source.location, output).model
    check_targets([target], force=force)
    _, plan = read_plan(plan_path)
    source, _ = open_model(source, DescribeJob(inputs=False), timeout_s, ask=ask)
    return write_all({target: saved_model(source, plan, timeout_s)}, force=force)
