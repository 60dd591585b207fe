"""Every job says what it is asked for and who answers it, and that is so."""

from __future__ import annotations

import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import memopt_cli.measure.online_jobs  # noqa: F401
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import CountJob, Job, SaveJob, StepJob, Subject, answer_of, class_of, name_of
from memopt_cli.records import Counted, Plan


def kinds(of: type[Job[Any]] = Job) -> Iterator[type[Job[Any]]]:
    for kind in of.__subclasses__():
        yield from kinds(kind)
        if kind is not StepJob and pkgutil.resolve_name(f"{kind.__module__}:{kind.__qualname__}") is kind:
            yield kind


KINDS = [kind for kind in kinds() if kind is not SaveJob]  # it is part of the wire


def test_there_are_those_of_every_package() -> None:
    assert {kind.__module__ for kind in KINDS} == {
        "memopt_cli.measure.jobs",
        "memopt_cli.measure.online_jobs",
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_job_is_answered_as_it_says(kind: type[Job[Any]]) -> None:
    first, job, answer = typing.get_type_hints(pkgutil.resolve_name(kind.answered_by)).values()
    assert first is (Bench if issubclass(kind, StepJob) else Subject)
    assert job is kind
    assert answer is answer_of(kind)


def test_a_job_goes_over_the_wire_by_the_name_of_its_class() -> None:
    job = CountJob(plan=Plan(), fake=True)
    assert class_of(name_of(job)) is CountJob
    assert answer_of(type(job)) is Counted
