"""Reports as JUnit XML: each limit of ``check``, or kind of effect of ``verify``, is a test case.

There are two common schemas, of Ant and of Jenkins; only elements and attributes allowed by both are written.  The
first test case has the seconds that the command took: all cases judge the same measurement.  Unprintable characters,
and characters outside XML, are escaped.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, TextIO
from xml.etree import ElementTree as ET

from memopt_cli.errors import MemoptError, printable, printable_lines
from memopt_cli.records import Comparison, Equivalence
from memopt_cli.report import equivalence
from memopt_cli.report.comparison import describe_verdict, growth, reasons
from memopt_cli.report.interface import VerdictResult
from memopt_cli.text.documents import COMMAND
from memopt_cli.text.spelling import on_command_line

_BEGUN_S: Final = time.monotonic()
"""Time at which the command began: it imports its report formats first."""


class JunitReport:
    """JUnit XML with one test suite, ``memopt check`` or ``memopt verify``."""

    def __init__(self, command: str = "check") -> None:
        """Name the test case of an error after ``command``, and its suite as well."""
        self._command = command

    def show(self, answer: VerdictResult, stream: TextIO) -> None:
        if isinstance(answer, Comparison):
            _write_suite(*_comparison(answer), stream, "memopt check")
        else:
            _write_suite(*_equivalence(answer), stream, "memopt verify")

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        case = _test_case(model, self._command)
        reason = on_command_line(error.message)
        _fault(case, "error", "not checked", reason, "\n".join(filter(None, (reason, on_command_line(error.hint)))))
        _write_suite([case], "", stream, f"memopt {self._command}")


def _comparison(comparison: Comparison) -> tuple[list[ET.Element], str]:
    """Return a test case for each limit that ``comparison`` was compared with, and the text of ``system-out``."""
    cases, lines = [], []
    for part in comparison.parts:
        why = "\n".join((*growth(part), *reasons(part)))
        if not any(verdict.exceeded for verdict in part.verdicts):  # else its failures contain it
            lines += [part.at, why] if part.at else [why]
        for verdict in part.verdicts:
            case = _test_case(comparison.after.model, verdict.limit.text + (f" at {part.at}" if part.at else ""))
            if verdict.exceeded:
                _fault(case, "failure", "regression", describe_verdict(verdict), f"{describe_verdict(verdict)}\n{why}")
            cases.append(case)
    return cases, "\n".join(lines)


def _equivalence(found: Equivalence) -> tuple[list[ET.Element], str]:
    """Return a test case for each kind of effect that ``found`` compared, and the text of ``system-out``."""
    why = "\n".join((equivalence.headline(found), *equivalence.location_lines(found)))
    cases = []
    for kind, fault in equivalence.faults(found).items():
        case = _test_case(found.candidate, kind)
        if fault:
            _fault(case, "failure", "difference", fault, "\n".join(equivalence.differences(found, kind) or [fault]))
        cases.append(case)
    return cases, why


def _test_case(model: str, name: str) -> ET.Element:
    return ET.Element("testcase", name=printable(name), classname=printable(f"memopt.{model}"), time="0")


def _fault(case: ET.Element, tag: str, kind: str, message: str, text: str) -> None:
    ET.SubElement(case, tag, type=kind, message=printable_lines(message)).text = printable_lines(text)


def _write_suite(cases: Sequence[ET.Element], output: str, stream: TextIO, name: str) -> None:
    spent = f"{time.monotonic() - _BEGUN_S:.3f}"
    for case in cases[:1]:
        case.set("time", spent)
    suite = ET.Element(
        "testsuite",
        name=name,
        package="memopt",
        id="0",
        hostname=printable(platform.node()) or "localhost",
        timestamp=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        time=spent,
    )
    ET.SubElement(suite, "properties")
    suite.extend(cases)
    ET.SubElement(suite, "system-out").text = printable_lines(output)
    ET.SubElement(suite, "system-err")
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    # XML reads ``::`` and ``##[`` back, and a CI system sees no command.
    xml = COMMAND.sub(lambda m: f"{m[0][:-1]}&#{ord(m[0][-1])};", ET.tostring(suites, encoding="unicode"))
    stream.write(f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n')
