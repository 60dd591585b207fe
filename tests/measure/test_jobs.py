"""Every job says what it is asked for and who answers it, and that is so."""

from __future__ import annotations

import pkgutil
import typing
from typing import Any

import pytest

from memopt_cli.measure import jobs
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import Job, OnlineStepJob, PeakJob, SaveJob, SizedJob, StepJob, Subject, answer_of

BASES = (Job, StepJob, SizedJob, PeakJob, OnlineStepJob)
KINDS = [
    kind
    for kind in vars(jobs).values()
    if isinstance(kind, type) and issubclass(kind, Job) and kind not in (*BASES, SaveJob)  # which is a part of the wire
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_job_is_answered_as_it_says(kind: type[Job[Any]]) -> None:
    first, job, answer = typing.get_type_hints(pkgutil.resolve_name(kind.answered_by)).values()
    assert first is (Bench if issubclass(kind, StepJob) else Subject)
    assert job is kind
    assert answer == answer_of(kind)
