"""The reload bench still fits the parts that it measures."""

import importlib.util
import sys
from pathlib import Path

import anyio
import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    spec = importlib.util.spec_from_file_location("bench_reload", BENCH / "bench_reload.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SLOWEST_S", 0.001)
    monkeypatch.setattr(module, "FASTEST_S", 0.0)
    return module


@pytest.mark.parametrize("strategy", ["parallel", "serial"])
def test_simulated_instances_go_through_whole_batches(bench, strategy):
    batches = anyio.run(bench.simulate, 5, strategy, 3)
    assert [batch.record.policy_version for batch in batches] == [0, 1, 2]
    assert {batch.record.strategy for batch in batches} == {strategy}
    figures = bench.figures_of(batches, strategy)
    assert (figures["num_instances"], figures["num_batches"]) == (5, 3)
    assert figures["over_slowest"]["median"] >= 1
