"""Public class ``Node``: one stage of the model on this machine."""

from __future__ import annotations

import atexit
import logging
import platform
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from ravnest.deadlines import LAST_CHECKPOINT
from ravnest.errors import RunError, RunInterruptedError, SettingsError
from ravnest.host import map_large_blocks
from ravnest.runtime.control.node_runtime import NodeRuntime
from ravnest.runtime.control.root_controller import RootController
from ravnest.runtime.control.runtime_config import RuntimeConfig
from ravnest.runtime.control.runtime_restarts import RuntimeRestarts
from ravnest.runtime.data import Criterion, WatchedLoader, digests_of, has_targets, size_of
from ravnest.runtime.inputs import bind
from ravnest.runtime.machine_failures import is_machine_failure
from ravnest.runtime.module_setup import device_for, initialise
from ravnest.runtime.random_state import RandomState, capture_random_state, restore_random_state
from ravnest.runtime.settings import NodeSettings, check_state_form, codec_for, is_count
from ravnest.runtime.stage.updates import OptimizerParams, UpdateRule
from ravnest.runtime.stage.validation_metrics import ChosenMetric, with_needed
from ravnest.split.graph import InputEntry
from ravnest.split.module import StageModule
from ravnest.store.best_model import BestModel, BestModelFolder
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node
from ravnest.tracing.files import SpanFiles
from ravnest.tracing.node_trace import TracedNode
from ravnest.tracing.recorder import SpanRecorder, SpanWriter
from ravnest.transport.base import Transport
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials
from ravnest.types import MicrobatchId, Role
from ravnest.wire.messages import Call, PhaseKind, ValidationResult

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_IGNORED = frozenset({"data_id"})
"""Accepted keywords that are not needed: the node numbers micro-batches itself."""


class Node:
    """One stage of the model on this machine; its role follows from its name.

    Further keywords are the fields of ``NodeSettings``. The node does nothing before ``start``, which
    ``Trainer`` calls. Use it as a context manager or call ``close``; at the end of the script it closes
    by itself.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the documented signature
        self,
        name: str | None = None,
        model: nn.Module | None = None,
        optimizer: type[torch.optim.Optimizer] | None = None,
        optimizer_params: OptimizerParams = _NOTHING,
        lr_scheduler: Callable[..., Any] | None = None,
        lr_scheduler_params: Mapping[str, Any] = _NOTHING,
        lr_step_on_epoch_change: bool = True,
        criterion: Callable[..., Any] | None = None,
        update_frequency: int = 1,
        reduce_factor: int | None = None,
        labels: Any = None,
        test_labels: Any = None,
        device: Any = torch.device,
        loss_filename: str | Path = "losses.txt",
        compression: bool | str = False,
        average_optim: bool = False,
        **kwargs: Any,
    ) -> None:
        """Check the arguments and read the node's file; nothing is started.

        ``name`` is ``node_<i>`` of ``node_configs.json``. ``model`` initialises the stage from a module
        with the same parameter names. ``optimizer`` is a class; ``optimizer_params`` are its settings,
        or a function that creates parameter groups from the stage's named parameters. The Leaf needs
        ``criterion`` and the labels. An update consists of ``update_frequency`` batches.
        ``compression`` is the codec for tensors sent to neighbours with the same setting: ``True`` or
        ``"fp16"``, ``"bf16"``, ``"int8"``. Clusters average their parameters every ``reduce_factor``
        updates, or once per epoch, and at the end of training; with ``average_optim`` also the
        optimizer's state.
        """
        if not isinstance(name, str):
            given = "" if name is None else f", not {name!r}"
            raise SettingsError(f"Node needs its name: Node(name='node_0', ...){given}")
        if not is_count(update_frequency):
            raise SettingsError(
                f"update_frequency must be a whole number from 1, not {update_frequency!r}"
            )
        if reduce_factor is not None and not is_count(reduce_factor):
            raise SettingsError(
                f"reduce_factor must be a whole number of updates from 1, or None for once an epoch, "
                f"not {reduce_factor!r}"
            )
        settings = NodeSettings.of(kwargs)
        check_state_form(settings.optimizer_state, average_optim=bool(average_optim))
        self._folder = Path(settings.folder)
        spec = read_node(self._folder, name)
        settings.check_clusters(len(spec.roots))
        self._config = RuntimeConfig(
            spec=spec,
            rule=UpdateRule(
                optimizer,
                optimizer_params,
                lr_scheduler,
                lr_scheduler_params,
                lr_step_on_epoch_change,
                settings.scheduler_steps,
                settings.clip_grad_norm,
                settings.clip_grad_value,
                settings.plateau_metric,
                settings.look_ahead,
                settings.stop_on_nan,
                settings.ema,
                settings.optimizer_state,
            ),
            settings=settings,
            update_frequency=update_frequency,
            criterion=None if criterion is None else Criterion(criterion),
            labels=labels,
            test_labels=test_labels,
            loss_filename=loss_filename,
            reduce_factor=reduce_factor,
            average_optim=bool(average_optim),
            codec=codec_for(compression),
            trace=None if settings.trace is None else SpanRecorder(),
        )
        self._spans: SpanWriter | None = None
        """Writes what ``trace`` records, between start and end."""
        self._model = model
        self._device = device_for(device)
        self._runtime: NodeRuntime | None = None
        self._closed = False
        self._calls = 0
        """Calls of the script that have begun, this one included."""
        self._call_phases = 0
        """Phases of the calls before this one; at the Root."""
        self._restores_random = False
        """The next iteration of a loader begins with the generators of a checkpoint."""
        self._restarts = RuntimeRestarts(self._load_stage, self._transport)
        self._watched: list[weakref.ref[WatchedLoader]] = []
        self.epoch = 0
        """Epoch that ``forward_compute`` submits to, from 0."""
        self.reduce_factor = reduce_factor
        self.compression = compression
        self.average_optim = average_optim

    def __repr__(self) -> str:
        spec = self._config.spec
        return f"Node({spec.name}, {spec.role} of cluster {spec.cluster})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(None if error is None else self._blame(error))

    @property
    def name(self) -> str:
        """Name of the node, ``node_<i>``."""
        return self._config.spec.name

    @property
    def cluster(self) -> int:
        """Number of the node's cluster."""
        return self._config.spec.cluster

    @property
    def role(self) -> Role:
        """Role of the node: Root, Stem or Leaf."""
        return self._config.spec.role

    @property
    def is_root(self) -> bool:
        """True if the node is the Root, where data enters the cluster."""
        return self._config.spec.stage == 0

    @property
    def clusters(self) -> int:
        """Number of clusters, including this one."""
        return len(self._config.spec.roots)

    # Start and end

    def start(self) -> None:
        """Load the stage, connect to the neighbours and start; a second call does nothing."""
        if self._runtime is not None:
            return
        if self._closed:
            raise RunError(f"{self.name} is closed: create a new Node for another run")
        self._config.rule.check()
        self._start_trace()
        self._use(self._restarts.start(self._config))
        atexit.register(self._close_at_exit)

    def _use(self, runtime: NodeRuntime) -> None:
        self._restores_random = runtime.random_state is not None
        self._runtime = runtime

    def _recover(self, error: RunInterruptedError) -> None:
        """Go back to the newest checkpoint that all nodes have, once the lost one is back."""
        lost, self._runtime = self._runtime, None
        if lost is None:
            raise error
        self._use(
            self._restarts.recover(
                self._config, lost, error, calls=self._calls - 1, phases=self._call_phases
            )
        )

    def close(self, reason: str | None = None, *, recoverable: bool = False) -> None:
        """Leave the run and stop; with a ``reason``, end the run on all nodes.

        ``recoverable``: the other nodes wait for this one to return, or for one that takes its place.
        """
        runtime, self._runtime = self._runtime, None
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if runtime is not None:
            runtime.close(reason, recoverable=recoverable)
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.close()

    def _start_trace(self) -> None:
        """Write what is recorded from now on, to the folder or the receiver of the settings."""
        recorder, sink, spec = self._config.trace, self._config.settings.trace, self._config.spec
        if recorder is None or sink is None or self._spans is not None:
            return
        if isinstance(sink, str | Path):
            place = TracedNode(spec.node, spec.cluster, spec.stage, str(spec.role), platform.node())
            sink = SpanFiles(sink, place)
        self._spans = SpanWriter(recorder, sink)
        self._spans.start()

    def exclude(self, node: int, generation: int) -> None:
        """Close the links to the machine that has this generation of a node; it may not return.

        May be called from any thread. Training goes on as after a loss of that node.
        """
        self._restarts.exclude(node, generation)

    def hand_over(self, timeout: float = LAST_CHECKPOINT) -> bool:
        """Have a checkpoint taken that outlives this node; call it before a node leaves on purpose.

        Who calls it must leave then: the Root makes no further update until it has, or for 15 seconds.
        May be called from any thread. Return False, and warn, if there was no such checkpoint within
        ``timeout`` seconds.
        """
        runtime = self._runtime
        if runtime is None:
            logger.warning(
                "%s leaves while its cluster waits for a lost node: nothing is newer than the last "
                "checkpoint",
                self.name,
            )
            return False
        handed_over = runtime.hand_over(timeout)
        if not handed_over:
            logger.warning("%s leaves without a last checkpoint of all nodes", self.name)
        return handed_over

    def reset(self) -> None:
        """Close the node, so that it can be started again; files are not touched."""
        self.close()
        self._closed = False
        self.epoch = self._calls = self._call_phases = 0

    def init_server(  # noqa: PLR0913, PLR0917 - the documented signature
        self,
        load_forward_buffer: Any = None,
        load_backward_buffer: Any = None,
        reduce_ring_buffers: Any = None,
        gather_ring_buffers: Any = None,
        latest_weights_buffer: Any = None,
        forward_lock: Any = None,
        backward_lock: Any = None,
        reduce_lock: Any = None,
        gather_lock: Any = None,
        latest_weights_lock: Any = None,
        reduce_iteration: Any = None,
        gather_iteration: Any = None,
    ) -> None:
        """Do nothing; kept for older scripts. A node needs no shared buffers and ignores them."""
        given = {name for name, value in locals().items() if name != "self" and value is not None}
        if given:
            logger.warning("init_server ignores %s: the node has its own buffers", sorted(given))

    def start_grpc_server(self) -> None:
        """Start the node, including its listener."""
        self.start()

    def check_load_forward_buffer(self) -> None:
        """Start the node; it then receives messages by itself."""
        self.start()

    # Computing

    def forward_compute(self, tensors: Any = None, **kwargs: Any) -> None:
        """Submit a micro-batch to the pipeline; waits only for a free place in it.

        ``tensors``, one or several, are assigned in the order of the model's ``forward`` to the inputs
        that are not given by name. On nodes other than the Root, do nothing.
        """
        if not self.is_root:
            return
        controller = self._controller()
        if controller.open is None:
            controller.begin("train", self.epoch, self._random_at_begin())
        elif controller.open.kind != "train":
            raise RunError("forward_compute was called in the middle of a validation")
        self._submit(controller, tensors, kwargs)

    def no_grad_forward_compute(
        self, tensors: Any = None, output_type: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the model's output for a batch, without gradients, at the Root; None elsewhere.

        With an ``output_type`` (such as ``"val_accuracy"``), return the accuracy of the batch (or its
        loss) instead, which the Leaf computes with the next item of ``test_labels``.
        """
        if not self.is_root:
            return None
        controller = self._controller()
        if output_type is None:
            self._end_phase()
            controller.begin("predict", self.epoch)
            microbatch = self._submit(controller, tensors, kwargs)
            controller.end(exhausted=False)
            controller.settle()
            return controller.result(microbatch).output
        if controller.open is None or controller.open.kind != "validate":
            self._end_phase()
            controller.begin("validate", self.epoch)
        return controller.result(self._submit(controller, tensors, kwargs)).value

    def wait_for_backwards(self) -> None:
        """End the epoch: wait until all its micro-batches have returned and are applied."""
        if not self.is_root:
            return
        self._end_epoch()
        self._controller().settle()

    # Used by Trainer

    def _ensure_started(self) -> NodeRuntime:
        """Start the node if necessary and return its runtime."""
        self.start()
        assert self._runtime is not None
        return self._runtime

    def _end_epoch(self) -> None:
        """End the epoch without waiting for its last micro-batches."""
        controller = self._controller()
        if controller.open is not None and controller.open.kind == "train":
            self.epoch += 1
            random = capture_random_state(self._loaders())
            controller.end(exhausted=self._exhausted(), random=random)

    def _end_phase(self) -> ValidationResult | None:
        """End the open phase and wait for it; return the result of a validation."""
        controller = self._controller()
        if controller.open is None or controller.open.kind == "train":
            self.wait_for_backwards()
            return None
        phase = controller.end(exhausted=self._exhausted())
        controller.settle()
        return controller.validation(phase)

    def _validate(self, batches: Iterator[tuple[Any, Mapping[str, Any]]]) -> ValidationResult:
        """Run a validation and return its result; ``batches`` are inputs by position and by name."""
        self._end_phase()
        controller = self._controller()
        controller.begin("validate", self.epoch)
        for tensors, named in batches:
            self._submit(controller, tensors, named)
        result = self._end_phase()
        assert result is not None
        return result

    def _watch(self, loader: Any) -> WatchedLoader:
        """Wrap a loader, so that its batches can be compared with the Leaf's; empty at other nodes."""
        watched = WatchedLoader(
            loader,
            active=self.is_root,
            random=lambda: capture_random_state(self._loaders()),
            epoch=lambda: self.epoch,
        )
        self._watched.append(weakref.ref(watched))
        return watched

    def _use_scheduler(self, scheduler: Callable[..., Any], params: Mapping[str, Any]) -> None:
        """Use the Trainer's learning rate scheduler; only before the start."""
        if self._runtime is not None:
            raise SettingsError("the node has already started: create the Trainer first")
        rule = replace(self._config.rule, scheduler=scheduler, scheduler_params=params)
        self._config = replace(self._config, rule=rule)

    def _use_metrics(self, names: Sequence[str]) -> tuple[ChosenMetric, ...]:
        """Compute these metrics too; return all. Only before the start."""
        settings = self._config.settings
        metrics = with_needed(settings.chosen_metrics, names)
        if self._runtime is None:
            chosen = {each.label: each.given for each in metrics}
            self._config = replace(self._config, settings=replace(settings, metrics=chosen))
        elif len(metrics) > len(settings.chosen_metrics):
            raise SettingsError("the node has already started: create the Trainer first")
        return metrics

    def _use_resume(self) -> None:
        """Continue from a checkpoint; only before the start."""
        if self._runtime is not None:
            raise SettingsError("the node has already started: create the Trainer first")
        settings = replace(self._config.settings, resume=True)
        self._config = replace(self._config, settings=settings)

    @property
    def _started(self) -> bool:
        return self._runtime is not None

    @property
    def _rule(self) -> UpdateRule:
        return self._config.rule

    @property
    def _signature(self) -> tuple[InputEntry, ...]:
        """Inputs of the model."""
        return self._ensure_started().execution.module.spec.signature

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """End the run on all nodes, and close this one, if an error occurs inside the context."""
        try:
            yield
        except BaseException as error:
            passing = self._config.settings.hands_over and is_machine_failure(error)
            self.close(self._blame(error), recoverable=passing)
            raise

    def _begin_call(self) -> None:
        """Count a call of the script."""
        self._calls += 1
        runtime = self._runtime
        if runtime is not None and runtime.controller is not None:
            self._call_phases = runtime.controller.phases

    def _finish_call(self, call: Call) -> None:
        """End a call of the user on all nodes; on nodes other than the Root, wait for that."""
        if not self.is_root:
            self._ensure_started().serve(self._calls)
            return
        self._end_phase()
        self._controller().end_call(call, self._calls)

    def _skip(self, kind: PhaseKind) -> ValidationResult | bool | None:
        """Leave out a phase that is part of the checkpoint.

        Return False if it is not part of it, else its validation result, or None for training.
        """
        controller = self._controller()
        if controller.open is not None or not controller.skips(kind):
            return False
        controller.begin(kind, self.epoch)
        if kind == "train":
            self.epoch += 1
        phase = controller.end(exhausted=True)
        return controller.validation(phase) if kind == "validate" else None

    def _restore_random(self) -> None:
        """Set the generators for the first iteration of a loader after a checkpoint."""
        if self._restores_random:
            self._restores_random = False
            state = self._ensure_started().random_state
            assert state is not None
            restore_random_state(state, self._loaders())

    def _random_at_begin(self) -> RandomState | None:
        """Return the state of the generators when the iteration in progress began."""
        states = [loader.random for loader in self._loaders() if loader.random is not None]
        return states[-1] if states else None

    def _end_training(self) -> None:
        """Average with the other clusters for the last time and write a checkpoint (Root only).

        Waits for the other clusters. Afterwards all have bit-identical parameters.
        """
        self._end_phase()
        if self.clusters > 1:
            self._ensure_started().telemetry.phase("average")
        random = capture_random_state(self._loaders())
        self._controller().end_training(self.epoch, random, self._calls)

    def _keep_best(self, metric: str, value: float) -> None:
        """Keep the current weights as the best ones so far, by this value of a metric (Root only)."""
        controller = self._controller()
        controller.save(best=True)
        folder = BestModelFolder(Path(self._config.settings.trained_folder), self.cluster)
        folder.replace(BestModel(controller.run, self.epoch, metric, value))
        self._ensure_started().telemetry.best(metric, value, self.epoch)

    def _save(self) -> None:
        """Make every node write its trained stage, and collect the stages here (Root only)."""
        self._end_phase()
        self._controller().save()

    # Private

    def _controller(self) -> RootController:
        controller = self._ensure_started().controller
        assert controller is not None, "only the Root has a controller"
        return controller

    def _submit(
        self, controller: RootController, tensors: Any, named: Mapping[str, Any]
    ) -> MicrobatchId:
        named = {name: value for name, value in named.items() if name not in _IGNORED}
        values = bind(self._signature, tensors, named)
        loaded = next((b for b in (w.take() for w in self._loaders()) if b is not None), None)
        item = self._own_item(controller, loaded)
        digests = {} if loaded is None else digests_of(loaded)
        return controller.submit(values, size_of(values), digests, item)

    def _own_item(self, controller: RootController, loaded: Any) -> Any:
        """Return the loaded batch if this node is Root and Leaf and the batch has the labels."""
        if self._config.spec.stages > 1 or controller.open is None:
            return None
        validates = controller.open.kind == "validate"
        labels = self._config.test_labels if validates else self._config.labels
        return loaded if labels is None or has_targets(loaded) else None

    def _loaders(self) -> Iterator[WatchedLoader]:
        loaders = (reference() for reference in self._watched)
        return (loader for loader in loaders if loader is not None)

    def _exhausted(self) -> bool:
        """Return whether a watched loader has reached its end since the last call."""
        ended = [loader.was_exhausted() for loader in self._loaders()]
        return any(ended)

    def _load_stage(self) -> StageModule:
        spec = self._config.spec
        if spec.tight:
            map_large_blocks()
        module = load_module(self._folder / spec.bundle, spec.sha256, self._device)
        self._rule.check_row_blocks(module.spec.state)
        if self._model is not None:
            initialise(module, self._model)
        return module

    def _transport(self) -> Transport:
        given = self._config.settings.transport
        if callable(given):
            return given()
        if given is not None:
            return given
        spec, outage = self._config.spec, self._config.settings.outage
        files = spec.certificates
        paths = [self._folder / name for name in (files.authority, files.certificate, files.key)]
        identity = None
        if all(path.exists() for path in paths):
            identity = Credentials(*(path.read_bytes() for path in paths))
        return SocketTransport(
            identity,
            outage=spec.outage if outage is None else outage,
            relay=spec.relay_access,
            secret=spec.secret,
            trace=self._config.trace,
        )

    def _close_at_exit(self) -> None:
        """Close at the end of the script; Python keeps the error that ended it, if there was one."""
        error = getattr(sys, "last_value", None)
        self.close(None if error is None else self._blame(error))

    def _blame(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return f"{self.name} was interrupted"
        return f"{self.name} failed: {type(error).__name__}: {error}"
