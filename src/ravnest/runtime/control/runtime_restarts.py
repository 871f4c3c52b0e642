"""Starts of a node's runtime: the first one, and one after each loss of another node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest.averaging.peers import IgnoringHandler, Peers
from ravnest.deadlines import LINK_HELLO
from ravnest.errors import RunError, RunInterruptedError
from ravnest.runtime.control.node_runtime import NodeRuntime
from ravnest.runtime.control.resume_exchange import ResumeWish
from ravnest.runtime.control.runtime_config import RuntimeConfig
from ravnest.split.module import StageModule
from ravnest.transport.base import Transport
from ravnest.transport.generations import Generations, excluded_reason
from ravnest.wire.messages import Abort

logger = logging.getLogger(__name__)

MOST_RECOVERIES = 20
"""Recoveries in a row from the same checkpoint, after which the run fails."""


@dataclass
class RuntimeRestarts:
    """Makes the runtimes of one node, one after the other."""

    load_stage: Callable[[], StageModule]
    make_transport: Callable[[], Transport]
    _generations: Generations = field(default_factory=Generations)
    _transport: Transport | None = None
    """That of the newest runtime."""
    _recoveries: int = 0
    """Recoveries in a row from the same checkpoint."""

    def exclude(self, node: int, generation: int) -> None:
        """Close the links to a machine that may not take part any more, and refuse it from now on."""
        self._generations.exclude(node, generation)
        if self._transport is not None:
            self._transport.drop(node, generation, excluded_reason(node))

    def start(self, config: RuntimeConfig) -> NodeRuntime:
        """Return a runtime that is connected to the other nodes of its cluster."""
        settings = config.settings
        wish = ResumeWish(any_run=settings.resume)
        began = time.monotonic()
        runtime = self._open(config, wish, settings.connect_timeout, phases=0)
        resumed = runtime.resumed
        if resumed is not None and runtime.controller is not None:
            if settings.hands_over:  # to a server, which replaces what it has
                runtime.repeat_records()
            if resumed.lost:  # this Root takes the place of the one that was lost
                runtime.report_recovery(resumed.lost, time.monotonic() - began)
        return runtime

    def recover(
        self,
        config: RuntimeConfig,
        lost: NodeRuntime,
        error: RunInterruptedError,
        *,
        calls: int,
        phases: int,
    ) -> NodeRuntime:
        """Replace a runtime that has lost a neighbour, once that is back.

        ``calls`` of the script have ended before, with ``phases`` phases at the Root.
        """
        before, spec, timeout = lost.resumed, config.spec, config.settings.rejoin_timeout
        if before is None:
            raise error
        began = time.monotonic()
        lost.progress.say(
            f"{spec.name} ({spec.role}): {error}. It waits up to {timeout:.0f} s and continues from the "
            "last checkpoint"
        )
        lost.abandon(str(error))
        wish = ResumeWish(before.run, lost=str(error), calls=calls, made=lost.status.updates)
        try:
            runtime = self._open(config, wish, timeout, phases)
        except RunError as failure:
            self._say_failed(config, str(failure))
            raise
        assert runtime.resumed is not None
        same = runtime.resumed.checkpoint == before.checkpoint
        self._recoveries = self._recoveries + 1 if same else 0
        if self._recoveries >= MOST_RECOVERIES:
            reason = f"nodes were lost {self._recoveries} times at the same checkpoint: {error}"
            runtime.close(reason)
            raise RunError(reason)
        if runtime.controller is not None:
            runtime.report_recovery(str(error), time.monotonic() - began)
        return runtime

    def _say_failed(self, config: RuntimeConfig, reason: str) -> None:
        """Tell the other clusters that this one does not return, so that nobody waits for it."""
        spec = config.spec
        if spec.stage or len(spec.roots) < 2:
            return
        transport = self.make_transport()
        try:
            peers = Peers(spec, config.hello(), transport, IgnoringHandler())
            peers.say_goodbye(Abort(spec.node, reason), LINK_HELLO)
        finally:
            transport.close()

    def _open(self, config: RuntimeConfig, wish: ResumeWish, timeout: float, phases: int) -> NodeRuntime:
        """Connect to the other nodes; again if one of them is lost before all have connected."""
        ends = time.monotonic() + timeout
        while True:
            left = max(ends - time.monotonic(), 1.0)
            module, transport = self.load_stage(), self.make_transport()
            self._transport = transport
            runtime = NodeRuntime(config, module, transport, self._generations, wish, left)
            try:
                runtime.open()
            except RunInterruptedError as error:
                if not config.settings.rejoin_timeout or time.monotonic() >= ends:
                    raise
                logger.info("%s connects again: %s", config.spec.name, error)
                continue
            if runtime.controller is not None:
                try:
                    runtime.controller.start_at(phases)
                except RunError as error:
                    runtime.close(str(error))
                    raise
            return runtime
