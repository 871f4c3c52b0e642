"""A provider's node, as users know it."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from ravnest.errors import RunError, SettingsError
from ravnest.runtime.control.node_runtime import NodeRuntime, RuntimeConfig
from ravnest.runtime.control.root_controller import RootController
from ravnest.runtime.data import Criterion, WatchedLoader, digests_of, has_targets, size_of
from ravnest.runtime.inputs import bind
from ravnest.runtime.schedule.events import Batch
from ravnest.runtime.settings import NodeSettings, codec_for, is_count
from ravnest.runtime.stage.updates import OptimizerParams, UpdateRule
from ravnest.split.graph import InputEntry
from ravnest.split.module import StageModule
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node
from ravnest.transport.base import Transport
from ravnest.transport.grpc_transport import GrpcTransport
from ravnest.transport.tls import Credentials
from ravnest.types import Role
from ravnest.wire.messages import Call, ValidationResult

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_IGNORED = frozenset({"data_id"})
"""Accepted and not needed: the node numbers micro-batches itself."""


class Node:
    """One stage of the model at work on this machine; its role follows from its name.

    The further keywords are those of ``NodeSettings``. Nothing happens before ``start``, which
    ``Trainer`` calls. Use it as a context manager, or ``close`` it; at the end of the script it
    closes itself.
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
        """``name`` is ``node_<i>`` of ``node_configs.json``.

        ``model`` initialises the stage from a module with the same parameter names. ``optimizer`` is
        a class, ``optimizer_params`` its settings or a function that makes parameter groups from the
        stage's named parameters. ``criterion`` and the labels are needed at the Leaf.
        ``update_frequency`` micro-batches make an update. ``compression`` is how tensors travel to
        neighbours that ask for the same: ``True`` or ``"fp16"``, ``"bf16"``, ``"int8"``.
        Clusters average their parameters every ``reduce_factor`` updates, or once an epoch, and at
        the end of training; with ``average_optim`` the optimizer's state too.
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
        self._folder = Path(settings.folder)
        self._assignment = RuntimeConfig(
            place=read_node(self._folder, name),
            rule=UpdateRule(
                optimizer,
                optimizer_params,
                lr_scheduler,
                lr_scheduler_params,
                lr_step_on_epoch_change,
                settings.clip_grad_norm,
                settings.look_ahead,
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
        )
        self._model = model
        self._device = _device(device)
        self._session: NodeRuntime | None = None
        self._closed = False
        self._watched: list[weakref.ref[WatchedLoader]] = []
        self.epoch = 0
        """The epoch that ``forward_compute`` adds to; counted from 0."""
        self.reduce_factor = reduce_factor
        self.compression = compression
        self.average_optim = average_optim

    def __repr__(self) -> str:
        place = self._assignment.place
        return f"Node({place.name}, {place.role} of cluster {place.cluster})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(None if error is None else self._blame(error))

    @property
    def name(self) -> str:
        """``node_<i>``."""
        return self._assignment.place.name

    @property
    def cluster(self) -> int:
        """The cluster that the node is in."""
        return self._assignment.place.cluster

    @property
    def role(self) -> Role:
        """Root, Stem or Leaf."""
        return self._assignment.place.role

    @property
    def is_root(self) -> bool:
        """Whether data enters the cluster here."""
        return self._assignment.place.stage == 0

    @property
    def clusters(self) -> int:
        """How many there are, this one included."""
        return len(self._assignment.place.roots)

    @property
    def started(self) -> bool:
        """Whether it works already."""
        return self._session is not None

    @property
    def session(self) -> NodeRuntime:
        """The node at work; starts it."""
        self.start()
        assert self._session is not None
        return self._session

    # Start and end

    def start(self) -> None:
        """Load the stage, meet the neighbours and begin to work; once is enough."""
        if self._session is not None:
            return
        if self._closed:
            raise RunError(f"{self.name} is closed: make a new Node for another run")
        self._assignment.rule.check()
        session = NodeRuntime(self._assignment, self._load_stage(), self._transport())
        session.open()
        self._session = session
        atexit.register(self._close_at_exit)

    def close(self, reason: str | None = None) -> None:
        """Say goodbye to the neighbours and stop; with a ``reason``, end the run on all nodes."""
        session, self._session = self._session, None
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if session is not None:
            session.close(reason)

    def reset(self) -> None:
        """Close the node, so that it can be started afresh; no file is touched."""
        self.close()
        self._closed = False
        self.epoch = 0

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
        """Accepted for older scripts: a node needs no shared buffers; given ones are not used."""
        given = {name for name, value in locals().items() if name != "self" and value is not None}
        if given:
            logger.warning("init_server does not use %s: the node keeps its own", sorted(given))

    def start_grpc_server(self) -> None:
        """Start the node; its gRPC server is part of it."""
        self.start()

    def check_load_forward_buffer(self) -> None:
        """Start the node; from then on it takes what arrives by itself."""
        self.start()

    # Computing

    def forward_compute(self, tensors: Any = None, **kwargs: Any) -> None:
        """Give a micro-batch to the pipeline; waits only for a place in it.

        ``tensors``, one or several, fill in the order of the model's forward the inputs that are not
        given by name. On other nodes than the Root there is nothing to do.
        """
        if not self.is_root:
            return
        conductor = self._conducting()
        if conductor.open is None:
            conductor.begin("train", self.epoch)
        elif conductor.open.kind != "train":
            raise RunError("forward_compute was called in the middle of a validation")
        self._submit(conductor, tensors, kwargs)

    def no_grad_forward_compute(
        self, tensors: Any = None, output_type: str | None = None, **kwargs: Any
    ) -> Any:
        """The model's output for a batch, without gradients, at the Root; None on other nodes.

        With an ``output_type`` (such as ``"val_accuracy"``), the Leaf compares with the next item of
        ``test_labels`` instead, and the accuracy of the batch (or its loss) is returned.
        """
        if not self.is_root:
            return None
        conductor = self._conducting()
        if output_type is None:
            self.end_phase()
            conductor.begin("predict", self.epoch)
            batch = self._submit(conductor, tensors, kwargs)
            conductor.end(exhausted=False)
            conductor.settle()
            return conductor.answer(batch).output
        if conductor.open is None or conductor.open.kind != "validate":
            self.end_phase()
            conductor.begin("validate", self.epoch)
        return conductor.answer(self._submit(conductor, tensors, kwargs)).value

    def wait_for_backwards(self) -> None:
        """End the epoch: wait until all its micro-batches have come back and are applied."""
        if not self.is_root:
            return
        self.end_epoch()
        self._conducting().settle()

    # For Trainer

    def end_epoch(self) -> None:
        """End the epoch without waiting for its last micro-batches."""
        conductor = self._conducting()
        if conductor.open is not None and conductor.open.kind == "train":
            self.epoch += 1
            conductor.end(exhausted=self._exhausted())

    def end_phase(self) -> ValidationResult | None:
        """End whatever phase is open and wait for it; the figure of a validation."""
        conductor = self._conducting()
        if conductor.open is None or conductor.open.kind == "train":
            self.wait_for_backwards()
            return None
        phase = conductor.end(exhausted=self._exhausted())
        conductor.settle()
        return conductor.figure(phase)

    def validate(self, batches: Iterator[tuple[Any, Mapping[str, Any]]]) -> ValidationResult | None:
        """The figure of a validation; inputs by position and by name, as the pipeline takes them."""
        self.end_phase()
        conductor = self._conducting()
        conductor.begin("validate", self.epoch)
        for tensors, named in batches:
            self._submit(conductor, tensors, named)
        return self.end_phase()

    def watch(self, loader: Any) -> WatchedLoader:
        """A loader whose batches the node may compare with the Leaf's; empty on other nodes."""
        watched = WatchedLoader(loader, active=self.is_root)
        self._watched.append(weakref.ref(watched))
        return watched

    def use_scheduler(self, scheduler: Callable[..., Any], params: Mapping[str, Any]) -> None:
        """Take the Trainer's learning rate scheduler; before the start."""
        if self._session is not None:
            raise SettingsError("the node has started already: make the Trainer first")
        rule = replace(self._assignment.rule, scheduler=scheduler, scheduler_params=params)
        self._assignment = replace(self._assignment, rule=rule)

    @property
    def rule(self) -> UpdateRule:
        """How the weights are updated."""
        return self._assignment.rule

    @property
    def signature(self) -> tuple[InputEntry, ...]:
        """The model's inputs."""
        return self.session.execution.module.spec.signature

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the run on all nodes, and this node with it."""
        try:
            yield
        except BaseException as error:
            self.close(self._blame(error))
            raise

    def finish_call(self, call: Call) -> None:
        """At the Root, end a call of the user's everywhere; elsewhere, work until the Root does."""
        if not self.is_root:
            self.session.serve(call)
            return
        self.end_phase()
        self._conducting().returns(call)

    def average(self) -> None:
        """At the Root: wait for the other clusters and take the average of all, bit for bit the same.

        ``Trainer`` does so at the end of training. With a single cluster there is nothing to do.
        """
        if self.is_root:
            self.end_phase()
            if self.clusters > 1:
                self.session.telemetry.phase("average")
            self._conducting().average(final=True)

    def save(self) -> None:
        """At the Root: have every node write its trained stage, and collect them here."""
        self.end_phase()
        self._conducting().save()

    # Inside

    def _conducting(self) -> RootController:
        conductor = self.session.conductor
        assert conductor is not None, "only the Root conducts"
        return conductor

    def _submit(self, conductor: RootController, tensors: Any, named: Mapping[str, Any]) -> Batch:
        named = {name: value for name, value in named.items() if name not in _IGNORED}
        values = bind(self.signature, tensors, named)
        loaded = next((b for b in (w.take() for w in self._loaders()) if b is not None), None)
        item = self._own_item(conductor, loaded)
        compared = loaded is not None and item is None  # else there is no other side to compare with
        digests = digests_of(loaded) if compared else {}
        return conductor.submit(values, size_of(values), digests, item)

    def _own_item(self, conductor: RootController, loaded: Any) -> Any:
        """The loaded batch, where Root and Leaf are one node and its labels are not elsewhere."""
        if self._assignment.place.stages > 1 or conductor.open is None:
            return None
        validates = conductor.open.kind == "validate"
        labels = self._assignment.test_labels if validates else self._assignment.labels
        return loaded if labels is None or has_targets(loaded) else None

    def _loaders(self) -> Iterator[WatchedLoader]:
        loaders = (reference() for reference in self._watched)
        return (loader for loader in loaders if loader is not None)

    def _exhausted(self) -> bool:
        """Whether a watched loader has just come to its end."""
        ended = [loader.was_exhausted() for loader in self._loaders()]
        return any(ended)

    def _load_stage(self) -> StageModule:
        place = self._assignment.place
        module = load_module(self._folder / place.bundle, place.sha256, self._device)
        if self._model is not None:
            _initialise(module, self._model)
        return module

    def _transport(self) -> Transport:
        given = self._assignment.settings.transport
        if given is not None:
            return given
        files = self._assignment.place.certificates
        paths = [self._folder / name for name in (files.authority, files.certificate, files.key)]
        if not all(path.exists() for path in paths):
            return GrpcTransport()
        return GrpcTransport(Credentials(*(path.read_bytes() for path in paths)))

    def _close_at_exit(self) -> None:
        """The script has ended; Python keeps the error that ended it, if there was one."""
        error = getattr(sys, "last_value", None)
        self.close(None if error is None else self._blame(error))

    def _blame(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return f"{self.name} was interrupted"
        return f"{self.name} failed: {type(error).__name__}: {error}"


def _initialise(module: StageModule, model: nn.Module) -> None:
    """Give a stage the values of a module with the same names."""
    values = model.state_dict()
    wanted = module.state_dict()
    missing = sorted(name for name in wanted if name not in values)
    if missing:
        raise SettingsError(
            f"model lacks {missing[0]}, which the stage has: give the model that clusterize() split, "
            "or None to use the weights that it had then"
        )
    wrong = [name for name, tensor in wanted.items() if values[name].shape != tensor.shape]
    if wrong:
        name = wrong[0]
        raise SettingsError(
            f"{name} of model has shape {list(values[name].shape)}, the stage's has "
            f"{list(wanted[name].shape)}"
        )
    module.load_state_dict({name: values[name] for name in wanted})


def _device(device: Any) -> torch.device:
    """The documented default is the class ``torch.device`` itself, which means the CPU."""
    if device is None or device is torch.device:
        return torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"device must be like 'cpu' or 'cuda:0', not {device!r}: {error}") from error
