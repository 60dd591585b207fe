"""Level 4: segments whose removal does not raise the peak become plain modules again."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, Probes
from memopt_cli.records import Counted, SearchOptions


class GreedyUnwrap:
    """Tries every segment once, the one whose recomputation takes longest first."""

    level = 4

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Remove what the peak does not need."""
        best = replace(start, plan=replace(start.plan, level=4))
        tried = 0
        for segment in sorted(start.plan.segments, key=lambda s: -tree[s.path].forward_s):
            rest = tuple(s for s in best.plan.segments if s is not segment)
            probes.report(f"unwrap {segment.path or '(root)'}")
            counted = probes.count(replace(best.plan, segments=rest))
            tried += 1
            if isinstance(counted, Counted) and counted.allocated_peak_bytes <= best.peak_bytes:
                best = Candidate(plan=replace(best.plan, segments=rest), counted=counted)
        return Improvement(best=best, tried=tried)
