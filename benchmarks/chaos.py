"""Training while its processes are killed: goodput, recovery times, and the state at the end.

Three clusters of two nodes train a small model as real processes, without a server. A seeded plan kills
random nodes with SIGKILL at random moments; they are started again as ``ravnest launch --restart`` does.
The same training runs undisturbed in the same invocation. Goodput is the rate of useful updates (those
that are made again do not count) of the disturbed run, divided by that of the undisturbed one. Updates
are paced, since on few cores the nodes that are down would otherwise leave more of them to the others.

Run as a script: ``python benchmarks/chaos.py --kills 300``. It prints a report and the fault plan as one
line, writes both as JSON with ``--json``, and ends with code 1 if something hung, failed or is wrong, or
if a limit is missed. ``--plan`` repeats the run of such a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from chaos_run import run
from chaos_values import ChaosRun, RunResult
from fault_plan import FaultPlan
from fork_server import ForkServer

GOODPUT = 0.85
"""Least goodput."""
LOSS = 0.02
"""Largest relative difference of the final losses."""
_EPOCHS = 10
"""Epochs of a long run. With more, the model would learn the random classes by heart, and the ratio of
two losses near zero says little: after 240 epochs they were 12% apart, at 0.095 and 0.085."""
_REFERENCE_SECONDS = 60.0
"""Length of the undisturbed run whose rate is measured."""


@dataclass(frozen=True)
class ChaosReport:
    """Comparison of a disturbed run with an undisturbed one."""

    disturbed: RunResult
    rate: float
    """Updates per second of the undisturbed run at the same pace."""
    loss: float
    """Final loss of the undisturbed run of the same length."""

    @property
    def goodput(self) -> float:
        """Useful updates per second, compared with the undisturbed run."""
        return self.disturbed.rate / self.rate

    @property
    def loss_difference(self) -> float:
        """Relative difference of the final losses."""
        loss = self.disturbed.loss
        return float("inf") if loss is None else abs(loss - self.loss) / self.loss

    @property
    def holds(self) -> bool:
        """True if nothing hung or is wrong, and the limits are kept."""
        limits = self.goodput >= GOODPUT and self.loss_difference <= LOSS
        return self.disturbed.good and limits

    def times(self) -> tuple[list[float], list[float]]:
        """Return the seconds until clusters trained again, and until they made new progress."""
        recoveries = self.disturbed.recoveries
        return (
            sorted(r.under_way for r in recoveries if r.under_way is not None),
            sorted(r.regained for r in recoveries if r.regained is not None),
        )

    def as_json(self) -> str:
        """Return everything as JSON."""
        result = self.disturbed
        fields = {
            **{k: v for k, v in asdict(result).items() if k not in {"plan", "recoveries"}},
            "plan": str(result.plan),
            "recoveries": [asdict(each) | {"fault": str(each.fault)} for each in result.recoveries],
            "goodput": self.goodput,
            "undisturbed_rate": self.rate,
            "undisturbed_loss": self.loss,
            "loss_difference": self.loss_difference,
            "holds": self.holds,
        }
        return json.dumps(fields, indent=2)

    def __str__(self) -> str:
        result = self.disturbed
        under_way, regained = self.times()
        lines = [
            "| | | |",
            "|---|--:|---|",
            f"| faults | {len(result.recoveries)} | {result.restarts} restarts |",
            f"| hangs | {int(bool(result.hang))} | {result.hang} |",
            f"| failures | {len(result.failures)} | {'; '.join(result.failures)} |",
            f"| corrupt states | {len(result.corrupt)} | {'; '.join(result.corrupt)} |",
            f"| goodput | {self.goodput:.1%} | {result.rate:.1f} of {self.rate:.1f} updates/s; "
            f"at least {GOODPUT:.0%} |",
            f"| updates made again | {result.repeated} | of {sum(result.updates)} |",
            f"| final loss | {_figure(result.loss)} | {self.loss:.4f} undisturbed: "
            f"{self.loss_difference:.2%} apart, at most {LOSS:.0%} |",
            f"| seconds until training goes on | {_quantiles(under_way)} | median, 90%, most |",
            f"| seconds until new progress | {_quantiles(regained)} | median, 90%, most |",
        ]
        return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _quantiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ", ".join(f"{value:.1f}" for value in values)
    most = statistics.quantiles(values, n=10)[-1]
    return f"{statistics.median(values):.1f}, {most:.1f}, {values[-1]:.1f}"


def compare(settings: ChaosRun, plan: FaultPlan, folder: Path) -> ChaosReport:
    """Train under the plan and undisturbed."""
    none = FaultPlan(plan.seed, ())
    short = min(settings.updates, int(_REFERENCE_SECONDS / max(settings.pace, 0.01)))
    with ForkServer(("chaos_node",)) as server:
        disturbed = run(settings, plan, folder / "disturbed", server)
        reference = run(replace(settings, updates=short), none, folder / "reference", server)
        _expect_good(reference)
        undisturbed = reference
        if short < settings.updates:  # the pace changes no loss, and none is needed here
            undisturbed = run(replace(settings, pace=0.0), none, folder / "undisturbed", server)
            _expect_good(undisturbed)
    assert undisturbed.loss is not None
    return ChaosReport(disturbed, reference.rate, undisturbed.loss)


def _expect_good(result: RunResult) -> None:
    if not result.good:
        sys.exit(f"the undisturbed run went wrong: {result.hang} {result.failures} {result.corrupt}")


def plan_kills(settings: ChaosRun, kills: int, seed: int, until: float = 0.95) -> FaultPlan:
    """Return kills of random nodes, until a share of the updates is made.

    The rest is for the last recoveries, so that what they cost is part of the run.
    """
    nodes = range(settings.clusters * settings.nodes)
    start, end = 0.02 * settings.total, until * settings.total
    return FaultPlan.random(seed, nodes, kills, start=start, end=end, in_updates=True)


def main() -> None:
    """Run, print the report, and exit with 1 if it does not hold."""
    options = _options()
    updates = max(int(options.kills * options.every / options.pace), 200)
    settings = ChaosRun(
        nodes=options.nodes,
        updates=updates,
        epoch=max(updates // _EPOCHS, 100),
        pace=options.pace,
        checkpoint_updates=options.checkpoint_updates,
        limit=600.0 + 4 * options.kills * options.every,
        settings={"averaging": options.averaging},
    )
    plan = plan_kills(settings, options.kills, options.seed)
    if options.plan:
        plan = FaultPlan.parse(options.plan)
    print(plan, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        report = compare(settings, plan, folder)
    if options.json:
        Path(options.json).write_text(report.as_json(), encoding="utf-8")
    print(report)
    sys.exit(0 if report.holds else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="number of kills")
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plan", help="fault plan to repeat, as a line that was printed")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of each of the three clusters")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two updates")
    parser.add_argument("--checkpoint-updates", type=int, default=10)
    parser.add_argument("--averaging", choices=("background", "blocking"), default="background")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files of the runs, with their logs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
