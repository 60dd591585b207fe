"""Answers of a profiling subprocess to the jobs about copies of a model."""

from __future__ import annotations

from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.timed import device_of, measure_peak_and_time
from memopt_cli.measure.jobs import ReplicasJob
from memopt_cli.model_batching.replication import replicated_step
from memopt_cli.records import BatchProbe
from memopt_cli.training.apply import apply_plan


def probe(bench: Bench, job: ReplicasJob) -> BatchProbe:
    """Measure a step of ``job.replicas`` copies trained as one, on the route that is fastest at the described batch."""
    step = bench.step(job.batch, job.dims)
    apply_plan(bench.model, job.plan)
    with device_of(job.limit_bytes, bench.settings.device):
        example = bench.step(min(job.batch, bench.batch), job.dims)
        together, route = replicated_step(step, job.replicas, example)
        peak_bytes, step_s = measure_peak_and_time(bench, together)
    return BatchProbe(
        batch=job.batch, allocated_peak_bytes=peak_bytes, step_s=step_s, replicas=job.replicas, route=route
    )
