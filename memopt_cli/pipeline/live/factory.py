"""Preparing a model from the function that builds it, for predictions by the Python API.

Subprocesses import the function by name; if they cannot, it runs in this process, on fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from memopt_cli.loading.input_spec import batch_of
from memopt_cli.measure.answers.without_steps import facts_of
from memopt_cli.measure.jobs import DescribeJob, Subject
from memopt_cli.measure.local import LocalSession, isolate_state
from memopt_cli.measure.reach import UserFunction
from memopt_cli.measure.same_code import find_difference
from memopt_cli.pipeline.live.model import unimportable_functions
from memopt_cli.pipeline.prepare import Opening, Prepared, prepare
from memopt_cli.records import LoadedModel, Plan
from memopt_cli.records.progress import Progress
from memopt_cli.trace import built_without_data, fake_mode


def prepared_factory(
    subject: Subject,
    plan: Plan,
    model: UserFunction,
    functions: Sequence[UserFunction],
    timeout_s: float,
    progress: Progress,
) -> Prepared:
    """Prepare the model that ``model`` builds for a prediction; its parameters are never allocated.

    ``functions``: the functions called by the step, and the function that shards the model.  If a subprocess could not
    run one of them, it runs in this process, and a note has the reason.  Raises :class:`MemoptError` if ``plan``
    does not suit the model.
    """
    obstacle = next(filter(None, (function.obstacle for function in (model, *functions))), "")
    if not obstacle and (obstacle := find_difference(subject.source, [], (model, *functions))):
        model = replace(model, obstacle=obstacle)
    if model.obstacle and model.function is not None:
        with isolate_state(), built_without_data(fake_mode()):
            loaded = LoadedModel(module=model.function(), source=subject.source, format="factory", sha256=None)
            facts = facts_of(loaded, DescribeJob(inputs=False, plan=plan))
        facts = replace(facts, spec=subject.spec, batch=batch_of(subject.spec))
        prepared = Prepared(subject=subject, facts=facts, notes=(), progress=progress)
    else:
        opening = Opening(source=subject.source, spec=subject.spec, settings=subject.settings, timeout_s=timeout_s)
        prepared = prepare(replace(opening, plan=plan, data=subject.data), progress=progress, ask=None)
    if not obstacle:
        return prepared
    return replace(
        prepared,
        notes=(*prepared.notes, f"Predicted in this process, without a time limit: {obstacle}."),
        open_session=functools.partial(LocalSession, build=model.function, functions=unimportable_functions(functions)),
    )
