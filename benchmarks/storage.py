"""Measure packing, and plans with packing, kept outputs and exact chunks.

    python benchmarks/storage.py [--case CASE] [--rounds 5] [--threads 2]

Cases, each a section of ``benchmarks/RESULTS.md``:

kernels  speed of packing 64 MiB of float32 spikes into bits, with the check, and of unpacking, relative to a copy.
vgg      SpikingJelly's own VGG with packing alone, with SpikingJelly's level 4, and with memopt's plans at three
         budgets: the peak of that level, 0.60 of its activation peak, and the least peak.
resnet   the sample model with plans for a half and a third of its activation peak.
unet     a 2-D U-Net with plans for a half and a third of its activation peak.

Peaks repeat to the byte.  Steps are taken in turns, but the machine should do nothing else.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from benchmarks.contest import Contestant, contest, left_out, make_step
from benchmarks.planning import LEVEL, SPIKINGJELLY, UNET, bench, prepared
from benchmarks.plans import as_it_is, planned, spikingjelly
from benchmarks.results import table, this_command, write_section
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Subject
from memopt_cli.records import Plan
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.trace import resident_bytes

_SPIKES = 16 * 2**20
"""Elements of a float32 tensor of 64 MiB."""
_LEVEL_4 = "SpikingJelly level 4"
_SHARE = 0.60
"""Budget, as a share of the activation peak of SpikingJelly's level 4."""


# ---------------------------------------------------------------------------------------------- kernels


def kernels(options: argparse.Namespace) -> None:
    """Compare the speed of packing and unpacking spikes with that of a copy."""
    spikes = (torch.rand(_SPIKES, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    compressor = COMPRESSORS["bit"]
    packed = compressor.compress(spikes)
    assert torch.equal(compressor.decompress(packed), spikes)
    ways: dict[str, Callable[[], object]] = {
        "copy": spikes.clone,
        "pack, checked": lambda: compressor.compress(spikes),
        "unpack": lambda: compressor.decompress(packed),
    }
    medians = _in_turns(ways, options.rounds)
    rows = [[name, f"{s * 1e3:.1f} ms", f"{medians['copy'] / s:.2f}"] for name, s in medians.items()]
    text = f"64 MiB of float32 spikes, {options.threads} threads, in turns, medians of {options.rounds}.\n\n"
    text += table(["", "time", "speed of a copy's"], rows)
    _write("kernels", text)


def _in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each of ``ways``, which take turns; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


# ---------------------------------------------------------------------------------------------- plans


def vgg(options: argparse.Namespace) -> None:
    """Compare packing and memopt's plans with level 4 of SpikingJelly, on its own VGG."""
    subject = prepared(SPIKINGJELLY).subject
    theirs = Contestant(_LEVEL_4, subject, functools.partial(spikingjelly, level=4))
    failed = theirs.start(options.threads)
    if failed:
        raise SystemExit(f"{_LEVEL_4}: {failed}")
    resident = _resident_bytes(subject)
    budgets: dict[str, int | None] = {
        "memopt at the peak of SpikingJelly's level 4": theirs.peak_bytes,
        f"memopt at {_SHARE} of its activation peak": resident + int(_SHARE * (theirs.peak_bytes - resident)),
        "memopt at the least peak": None,
    }
    packing = Contestant("packing alone", subject, functools.partial(planned, plan=Plan(packed=True)))
    _contest("vgg", subject, [packing, theirs, *_plans(SPIKINGJELLY, budgets)], options)


def shares(name: str, options: argparse.Namespace) -> None:
    """Compare plans for a half and a third of the original's activation peak, on model ``name``."""
    with bench(name) as one:
        peak, resident = one.original.allocated_peak_bytes, one.original.resident_bytes
    budgets = {f"memopt at 1/{part}": resident + (peak - resident) // part for part in (2, 3)}
    _contest(name, prepared(name).subject, list(_plans(name, budgets)), options)


def _plans(name: str, budgets: Mapping[str, int | None]) -> Iterator[Contestant]:
    """Yield the planner's plan for each budget in bytes (``None``: the least peak), each found by a new search."""
    for label, budget in budgets.items():
        with bench(name) as one:
            started = time.perf_counter()
            planner = one.planner()
            found = planner.least(LEVEL) if budget is None else planner.within(LEVEL, budget)
            seconds = one.recorded_s + time.perf_counter() - started
            if found is None:
                print(f"{label}: nothing found in {seconds:.0f} s", file=sys.stderr)
                continue
            print(f"{label}: {found.plan}", file=sys.stderr)
            prepare = functools.partial(planned, plan=found.plan)
            yield Contestant(label, one.prepared.subject, prepare, search_s=seconds)


def _contest(case: str, subject: Subject, contestants: Sequence[Contestant], options: argparse.Namespace) -> None:
    first, resident = Contestant("as it is", subject, as_it_is), _resident_bytes(subject)
    for ran, failed in contest([first, *contestants], options.rounds, options.threads):
        _show(case, ran, failed, resident, options)


def _show(
    case: str, ran: Sequence[Contestant], failed: Sequence[str], resident: int, options: argparse.Namespace
) -> None:
    base = ran[0].peak_bytes - resident
    rows = []
    for one in ran:
        step_s, activations = statistics.median(one.times_s), one.peak_bytes - resident
        mib = [f"{nbytes / 2**20:.1f} MiB" for nbytes in (one.peak_bytes, activations)]
        found_s = f"{one.search_s:.1f} s" if one.search_s is not None else ""
        rows.append([one.name, found_s, *mib, f"{activations / base:.3f}", f"{step_s:.3f} s", f"{one.ratio:.3f}"])
    text = (
        f"{options.threads} threads; every way in a process of its own, steps in turns, medians of {options.rounds}; "
        "ratios to the step of the same round. *Activation peak*: less all parameters, gradients and inputs. "
        "*Found in*: of memopt's plans recording and planning; of nobody's the import of PyTorch.\n\n"
    )
    header = ["", "found in", "allocated peak", "activation peak", "of as it is", "step", "of as it is"]
    _write(case, text + table(header, rows) + left_out(failed))


def _resident_bytes(subject: Subject) -> int:
    """Return the bytes of parameters, gradients and inputs, which an activation peak leaves out."""
    step = make_step(subject)
    return resident_bytes(step) + sum(p.nbytes for p in step.model.parameters() if p.requires_grad)


def _write(case: str, text: str) -> None:
    write_section(f"Storage: {case}", this_command(), text)
    print(text)


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "kernels": kernels,
    "vgg": vgg,
    "resnet": functools.partial(shares, "resnet"),
    UNET: functools.partial(shares, UNET),
}


def main() -> None:
    """Run the case that ``--case`` names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="all of them, one after another, if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with processes.keep_server(early=True):
        for case in [options.case] if options.case else CASES:
            CASES[case](options)


if __name__ == "__main__":
    main()
