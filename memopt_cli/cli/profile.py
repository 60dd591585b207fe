"""``memopt profile``: show where the memory of one training step goes."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import DisplayOptions, InputOptions, LoadingOptions, RankOptions, StepOptions, with_options
from memopt_cli.cli.report_files import ReportFiles
from memopt_cli.measure import processes
from memopt_cli.records import DeviceProfile, ProfileRequest
from memopt_cli.report.html import profile_page


@with_options
def profile(
    context: typer.Context,
    model: str,
    *,
    inputs: InputOptions,
    plan: str | None = None,
    fake: bool = False,
    card: DeviceProfile | None = None,
    compile: str | None = None,
    step: StepOptions,
    spread: RankOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    html: str | None = None,
    snapshot: str | None = None,
    force: bool = False,
    display: DisplayOptions,
) -> None:
    """Show where the memory of a training step goes.

    When it peaks, by category, by module and by saved tensor.
    """
    request = ProfileRequest(
        source=loading.source(context, model),
        spec=inputs.spec(context),
        settings=step.settings(),
        plan_path=plan,
        fake=fake,
        card=card,
        layout=spread.predicted(without_data=fake or card is not None),
        rank=spread.rank,
        backend=compile,
        timeout_s=timeout,
    )
    files = ReportFiles(html=html, snapshot=snapshot, force=force)
    files.check(model)
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        step_profile = pipeline.profile(request, progress=progress, ask=ask)
        written = files.write(lambda: profile_page(step_profile), step_profile.trace)
    report = display.report()
    report.show(step_profile, sys.stdout)
    report.written(written, sys.stdout)
