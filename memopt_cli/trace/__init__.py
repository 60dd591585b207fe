"""One training step observed at PyTorch's dispatcher: its peak counted, its operators recorded and timed."""

from memopt_cli.trace.clock import (
    Clock,
    OperatorTime,
    packing_bytes_per_s,
    recompute_factor,
    segment_overhead,
    time_operators,
    with_link,
    with_seconds,
)
from memopt_cli.trace.compressor_choice import with_contents
from memopt_cli.trace.counting import AllocatedPeak, Life, count_step, match_compressors
from memopt_cli.trace.fake import FakeStep, built_without_data, fake_mode, move_fake_model
from memopt_cli.trace.inputs import compressors_failing_on_zeros, record_inputs
from memopt_cli.trace.log import Compressors, StorageLog, resident_bytes
from memopt_cli.trace.meter import Meter, meter_on
from memopt_cli.trace.modules import compressor_paths, list_modules, requested_compressor
from memopt_cli.trace.recording import record
