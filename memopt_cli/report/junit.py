"""Reports as JUnit XML: each limit, or kind of effect, is a test case.

The elements and attributes are those that both common schemas know, of Ant's reports and of Jenkins.  What cannot be
printed is spelled out, and so is all that XML cannot hold.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TextIO
from xml.etree import ElementTree as ET

from memopt_cli.errors import printable, printable_lines
from memopt_cli.records import Comparison, Equivalence
from memopt_cli.report import equivalence
from memopt_cli.report.comparison import growth, judged, reasons
from memopt_cli.text.documents import COMMAND


class JunitReport:
    """JUnit XML with one test suite, ``memopt check`` or ``memopt verify``."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        cases, said = [], []
        for part in found.parts:
            why = "\n".join((*growth(part), *reasons(part)))
            said += [part.at] * bool(part.at) + [why]
            for verdict in part.verdicts:
                case = _case(found.after.model, verdict.limit.text + (f" at {part.at}" if part.at else ""))
                if verdict.exceeded:
                    _fault(case, "failure", "regression", judged(verdict), f"{judged(verdict)}\n{why}")
                cases.append(case)
        _write(cases, "\n".join(said), stream)

    def verified(self, found: Equivalence, stream: TextIO) -> None:
        why = "\n".join((equivalence.headline(found), *equivalence.where(found)))
        cases = []
        for kind, gaps in equivalence.by_kind(found).items():
            case = _case(found.candidate, kind)
            if gaps:
                _fault(case, "failure", "difference", equivalence.first_gap(gaps), why)
            cases.append(case)
        for kind, reason in (("hooks", found.hooks), ("the step", found.failed)):
            case = _case(found.candidate, kind)
            if reason:
                _fault(case, "failure", "difference", reason, why)
            cases.append(case)
        _write(cases, why, stream, "memopt verify")

    def refused(self, reason: str, stream: TextIO) -> None:
        case = _case("memopt", "check")
        _fault(case, "error", "not checked", reason, reason)
        _write([case], "", stream)


def _case(model: str, name: str) -> ET.Element:
    return ET.Element("testcase", name=printable(name), classname=printable(f"memopt.{model}"), time="0")


def _fault(case: ET.Element, tag: str, kind: str, message: str, text: str) -> None:
    ET.SubElement(case, tag, type=kind, message=printable_lines(message)).text = printable_lines(text)


def _write(cases: Sequence[ET.Element], output: str, stream: TextIO, name: str = "memopt check") -> None:
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
        time="0",
    )
    ET.SubElement(suite, "properties")
    suite.extend(cases)
    ET.SubElement(suite, "system-out").text = printable_lines(output)
    ET.SubElement(suite, "system-err")
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    xml = COMMAND.sub(_last_as_reference, ET.tostring(suites, encoding="unicode"))
    stream.write(f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n')


def _last_as_reference(found: re.Match[str]) -> str:
    """Return the ``::`` or ``##[`` of ``found`` so that XML reads it back but a CI system sees no command."""
    return f"{found[0][:-1]}&#{ord(found[0][-1])};"
