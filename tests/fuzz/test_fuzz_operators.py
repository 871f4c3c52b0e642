"""A short run of the fuzzer over all operators that a stage may use; ``make fuzz`` makes a long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from call_plans import SIGNED, CallPlan, TensorPlan, plan_call
from canaries import check_call

from ravnest.split.operator_guards import executable

FUZZER = Path(__file__).parent / "fuzz_operators.py"
VECTOR = TensorPlan(torch.float32, (4,), (1,), seed=1)


@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer forks and limits memory as on Linux")
def test_no_operator_leaves_its_tensors(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(FUZZER), "--calls", "3000", "--seed", "1", "2", "3"]
    done = subprocess.run(
        [*command, "--json", str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["calls"] == 3000
    assert found["outcomes"]["value"] > 1000, "most calls were refused: the fuzzer tests nothing"


@pytest.mark.parametrize("dtype", SIGNED)
def test_the_ends_of_the_integers_meet(dtype: torch.dtype) -> None:
    """The lowest integer with 7, or with the largest one, ended the process in ``lcm``."""
    found = torch.iinfo(dtype)
    wanted = {(found.min, other) for other in (-1, 0, 7, found.max, found.min)}
    operator = torch.ops.aten.mul.Tensor
    for number in range(3000):
        args = plan_call("aten::mul.Tensor", operator, 1, number).args
        plans = [each for each in args if isinstance(each, TensorPlan) and each.dtype == dtype]
        if len(plans) == 2 and all(each.values for each in plans):
            pairs = torch.broadcast_tensors(*(_made(each) for each in plans)) if _fit(*plans) else ()
            wanted -= set(zip(*(each.flatten().tolist() for each in pairs), strict=True))
    assert not wanted


def _made(plan: TensorPlan) -> torch.Tensor:
    count = plan.extent
    values = torch.tensor(plan.values).repeat(count // len(plan.values) + 1)[:count]
    return values.as_strided(plan.sizes, plan.strides)


def _fit(first: TensorPlan, second: TensorPlan) -> bool:
    pairs = zip(reversed(first.sizes), reversed(second.sizes), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def reading(distance: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an operator that reads an element at a distance after the end of its tensor."""
    return lambda x: torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel() + distance).clone()


@pytest.mark.parametrize("distance", [0, 7, 900, -5])
def test_a_read_outside_is_found(distance: int) -> None:
    found, outcome = check_call(reading(distance), CallPlan("test", (VECTOR,), {}, False, 1))
    assert found.startswith("it read outside of its tensors")
    assert outcome == "value"


def test_a_write_outside_is_found() -> None:
    def write(x: torch.Tensor) -> None:
        torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).fill_(0.0)

    found, _ = check_call(write, CallPlan("test", (VECTOR,), {}, False, 1))
    assert found == "it wrote outside of its tensors"


def test_uninitialised_memory_is_found() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(1000, dtype=x.dtype)

    found, _ = check_call(fresh, CallPlan("test", (VECTOR,), {}, False, 1))
    assert found.startswith("it read outside of its tensors")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten::add.Tensor", (VECTOR, VECTOR)),
        ("aten::rand.default", ([5],)),
        ("aten::empty_like.default", (VECTOR,)),
    ],
)
def test_a_call_that_stays_inside_has_no_finding(target: str, args: tuple[Any, ...]) -> None:
    assert check_call(executable(target, "x"), CallPlan(target, args, {}, False, 1)) == ("", "value")
