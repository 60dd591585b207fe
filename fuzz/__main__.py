"""Try memopt on random models, plans, trainings and broken files, and report what fails.

export OMP_NUM_THREADS=1
python -m fuzz training --count 1000          # random models, plans, trainings: a plan must change nothing
python -m fuzz training --seed 7 --first 500  # other cases; a failure is reduced to a small one and printed
python -m fuzz training --case '{"blocks":[{"kind":"lstm"}],"packed":true}'
python -m fuzz files zip.pt plan.yaml         # broken files of every format
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from fuzz import files, peaks, training
from fuzz.cases import Case, drawn_case, from_text, to_text
from fuzz.shrinking import shrunk
from fuzz.training import Outcome
from memopt_cli.runtime.places import schedule

Judge = Callable[[Case], Outcome]

_PROGRESS = 1000
"""Number of cases between two lines of progress, which count the outcomes so far."""


def main() -> None:
    """Run the kind of fuzz that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, judge in (("training", training.outcome), ("peaks", peaks.outcome)):
        _add_arguments(kinds.add_parser(name), judge)
    files.add_arguments(kinds.add_parser("files"))
    given = parser.parse_args()
    schedule._MIN_SENT_BYTES = 1  # type: ignore[misc]  # else the small tensors of these models are never sent
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("threads of a case would sum in another order than the main one: set OMP_NUM_THREADS=1")
    sys.exit(min(given.run(given), 1))


def _add_arguments(parser: argparse.ArgumentParser, judge: Judge) -> None:
    parser.add_argument("--case", type=from_text, help="one case, as a failure prints it")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where the cases are run")
    parser.set_defaults(run=_run, judge=judge, name=f"fuzz {parser.prog.split()[-1]}")


def _run(given: argparse.Namespace) -> int:
    """Run the cases, print failures and counts, and return the number of failures."""
    torch.set_num_threads(1)
    if given.device.type != "cpu":
        torch.set_default_device(given.device)
        torch.use_deterministic_algorithms(True, warn_only=True)  # sums of atomics differ from run to run
    found: Counter[str] = Counter()
    for index, (name, case) in enumerate(_cases(given), 1):
        result = given.judge(case)
        found[result.kind] += 1
        if given.case or result.kind == "refused":
            print(f"{name}: {result.kind} {result.reason}", flush=True)
        if result.is_failure:
            print(_report(given, name, case, result), flush=True)
        if index % _PROGRESS == 0:
            print(f"{index} cases: {_counts(found)}", flush=True)
    print(_counts(found))
    return found["differs"] + found["fails"]


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in found.most_common())


def _cases(given: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    if given.case:
        yield "case", given.case
    else:
        for index in range(given.first, given.first + given.count):
            yield f"seed {given.seed}, case {index}", drawn_case(given.seed, index)


def _report(given: argparse.Namespace, name: str, case: Case, result: Outcome) -> str:
    smallest = shrunk(case, lambda smaller: given.judge(smaller).is_like(result))
    return (
        f"{name}: {result.kind}: {result.reason}\n"
        f"  {given.judge(smallest).reason}\n  python -m {given.name} --case '{to_text(smallest)}'"
    )


if __name__ == "__main__":
    main()
