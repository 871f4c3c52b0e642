"""Member of hivemind's averager, for ``allreduce.py``; runs in its own environment.

The group is formed before the start signal, as hivemind does it.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage

SECONDS = 120.0


def say(value: Any) -> None:
    """Send an answer to the parent."""
    print(json.dumps(value), flush=True)


def main(rank: int, count: int, elements: int) -> None:
    """Average on request."""
    torch.set_num_threads(1)
    vector = torch.randn(elements)
    first = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) if not rank else None
    say([str(address) for address in first.get_visible_maddrs()] if first else [])
    known = json.loads(sys.stdin.readline())[0]
    dht = first or hivemind.DHT(start=True, initial_peers=known, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.DecentralizedAverager(
        [vector], dht, prefix="benchmark", start=True, target_group_size=count, min_group_size=count
    )
    say("connected")
    step = None
    for line in sys.stdin:
        if line.strip() == "ready":
            step = averager.step(wait=False, require_trigger=True, timeout=SECONDS)
            while step.stage != AveragingStage.AWAITING_TRIGGER and not step.done():
                threading.Event().wait(0.05)
            say("ready")
        else:
            assert step is not None
            step.allow_allreduce()
            say(len(step.result(SECONDS)))
    averager.shutdown()
    dht.shutdown()  # including its daemon, which survives a killed process


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
