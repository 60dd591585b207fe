"""Saved models name these by their import paths, which are a file format and stay."""

from __future__ import annotations

import importlib

import pytest

from memopt_cli.loading.pickles.kinds import modules, own
from memopt_cli.runtime.compressor import COMPRESSORS

RUNTIME = """
    container.restore_segment container.restore_by_length lifted.module.restore_lifted
    runs.Chain runs.Run runs.GroupedSequential script.ScriptLeaf script.ScriptPart
    compressor.BitSpikeCompressor compressor.BooleanSpikeCompressor compressor.IndexCompressor
    compressor.NullSpikeCompressor compressor.PartsCompressor compressor.SparseSpikeCompressor
    compressor.TwoValuedCompressor compressor.Uint8SpikeCompressor
""".split()
LIBRARY = """
    model_batching.module.BatchModule
    online.algorithm.D_RTRL online.algorithm.ES_D_RTRL online.algorithm.HybridTrace
    online.lanes.Vmap online.operations.ElementWise online.over_time.OverTime
    online.neurons.ExplicitState online.neurons.LIF
    online.neurons.LeakyRateReadout
    online.traces.FactoredTrace online.traces.FullTrace
""".split()


@pytest.mark.parametrize("name", [*(f"runtime.{name}" for name in RUNTIME), *LIBRARY])
def test_it_is_where_saved_models_look_for_it(name: str) -> None:
    module, _, attribute = f"memopt_cli.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert f"{found.__module__}.{found.__qualname__}" == f"{module}.{attribute}"  # where it is pickled from


def test_whatever_is_let_through_is_listed() -> None:
    compressors = {
        f"{type(compressor).__module__}.{type(compressor).__qualname__}" for compressor in COMPRESSORS.values()
    }
    restored = {str(name) for name in (*own.RESTORE_SEGMENTS, own.RESTORE_LIFTED)}
    assert {*compressors, *restored, *own._MODULES} <= {f"memopt_cli.runtime.{name}" for name in RUNTIME}
    libraries = [name for name in modules.LIBRARIES if name.startswith("memopt_cli")]
    assert libraries == ["memopt_cli.online", "memopt_cli.model_batching.module"]
