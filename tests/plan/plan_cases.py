"""Models and node pools that the planning tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from ravnest.plan.cost import NodeCapacity
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.types import Address


def load_benchmark(name: str = "planning") -> ModuleType:
    """Import a file of ``benchmarks``; the brute force of ``planning`` is the tests' reference too."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def unit(work: float = 1e9, activation: int = 0, workspace: int = 0, crossing: int = 0) -> UnitCost:
    return UnitCost(work, activation, workspace, crossing, crossing, crossing, crossing)


def chain(units: int, *, weight: int = 1000, rows: int | None = None, **costs: Any) -> ModelProfile:
    """Return a model of equal units with one weight each; micro-batches have at least ``rows``."""
    return ModelProfile(
        units=tuple(unit(**costs) for _ in range(units)),
        state=tuple(
            TensorProfile(f"layer{u}.weight", weight, trainable=True, averaged=True, units=(u,))
            for u in range(units)
        ),
        batch_size=32,
        input_bytes=0,
        smallest_rows=rows,
    )


def planned(profile: ModelProfile, nodes: Sequence[NodeConfig], **options: Any) -> Plan:
    """Return the plan for these nodes, which must exist."""
    plan = make_plan(profile, nodes, **options)
    assert isinstance(plan, Plan), plan
    return plan


def node(number: int, ram: float = 8, bandwidth: float = 100, compute: float | None = 50) -> NodeConfig:
    return NodeConfig(number, Address("10.0.0.1", 8080 + number), ram, bandwidth, compute)


steady = settings(deadline=None, derandomize=True)
"""Settings for the same examples in every run, even on a busy machine."""

small_bytes = st.integers(0, 50)


@st.composite
def profiles(draw: st.DrawFn, max_units: int = 7) -> ModelProfile:
    """Draw any small model: frozen tensors, tied tensors, cuts without a gradient."""
    count = draw(st.integers(1, max_units))
    units = tuple(
        UnitCost(float(draw(st.integers(0, 20))), *(draw(small_bytes) for _ in range(8)))
        for _ in range(count)
    )
    users = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted).map(tuple)
    state = draw(st.lists(st.tuples(small_bytes, st.booleans(), users), max_size=6))
    return ModelProfile(
        units=units,
        state=tuple(
            TensorProfile(f"t{index}", size, trainable, averaged=True, units=uses)
            for index, (size, trainable, uses) in enumerate(state)
        ),
        batch_size=4,
        input_bytes=draw(small_bytes),
        loss_bytes=draw(small_bytes),
        optimizer_bytes_per_parameter_byte=draw(st.sampled_from((0.0, 1.0, 2.0))),
        update_copies=draw(st.sampled_from((0.0, 2.0))),
        smallest_rows=draw(st.sampled_from((None, 1))),
    )


machines = st.builds(
    NodeCapacity,
    ram=st.integers(50, 2000).map(float),
    bandwidth=st.integers(1, 200).map(float),
    flops=st.integers(1, 10).map(float),
)
