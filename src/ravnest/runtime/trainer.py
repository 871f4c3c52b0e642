"""The training loop, as users know it, to be used as it is or with methods of their own."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ravnest.errors import RavnestError, SettingsError
from ravnest.runtime.inputs import inputs_in
from ravnest.runtime.node import Node
from ravnest.runtime.settings import is_count
from ravnest.sharding import Shard
from ravnest.split.structure import map_tensors, tensors_in
from ravnest.wire.messages import Call, ValidationResult

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DEFAULT_BATCH_SIZE = 64


def _on_every_node(call: Call) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that the script calls on every node, and that ends on all of them together.

    The Root runs it; other nodes work for the Root until it is done there, and only ``train`` is run
    on them too: what an ``evaluate`` makes of results that only the Root has would fail there. A call
    from within another one (validation while training, ``super().train()``) is part of that.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            if self._call is not None:
                return method(self, *args, **kwargs)
            self._call = call
            try:
                with self.node.guarding():
                    self.node.start()
                    runs = self.node.is_root or call == "train"
                    result = method(self, *args, **kwargs) if runs else None
                    self._finish_call()
                    return result if runs else self._told(call)
            except (RavnestError, KeyboardInterrupt) as error:
                logger.debug("%s ends", call, exc_info=True)
                raise _shortened(error) from None
            finally:
                self._call, self._ended = None, False

        return run

    return decorate


def _shortened(error: BaseException) -> BaseException:
    """Without our frames below the user's last line: the message says what happened."""
    last, entry = None, error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_globals.get("__name__", "").startswith("ravnest."):
            last = entry
        entry = entry.tb_next
    if last is None:
        return error.with_traceback(None)
    last.tb_next = None
    return error


class Trainer:
    """Trains the model that a node is part of.

    Subclasses may override ``train``, ``evaluate`` and ``pred``. Write them for the Root: on other
    nodes ``prelim_checks`` works until the Root is done, and loaders are empty; ``evaluate`` gives the
    Root's figure there.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the documented signature
        self,
        node: Node | None = None,
        lr_scheduler: Callable[..., Any] | None = None,
        lr_scheduler_params: Mapping[str, Any] = _NOTHING,
        train_loader: Any = None,
        val_loader: Any = None,
        val_freq: int = 1,
        save: bool = False,
        epochs: int = 1,
        batch_size: int = _DEFAULT_BATCH_SIZE,
        step_size: int = 1,
        inputs_dtype: torch.dtype | None = None,
    ) -> None:
        """``val_freq``: validate after every so many epochs. ``save``: write the trained stages.

        ``batch_size`` must be the loader's. ``step_size`` is for a scheduler that takes one.
        ``inputs_dtype`` is what inputs are converted to: those with a floating point, or all where
        there is none.
        """
        if node is None:
            raise SettingsError("Trainer needs the node: Trainer(node=Node(...), ...)")
        for name, value in (("val_freq", val_freq), ("epochs", epochs), ("batch_size", batch_size)):
            if not is_count(value):
                raise SettingsError(f"{name} must be a whole number from 1, not {value!r}")
        self.node = node
        self.train_loader = None if train_loader is None else node.watch(train_loader)
        self.val_loader = None if val_loader is None else node.watch(val_loader)
        self.val_freq = val_freq
        self.save = save
        self.epochs = epochs
        self.batch_size = batch_size
        self.step_size = step_size
        self.inputs_dtype = inputs_dtype
        self.n_forwards = 0
        self._call: Call | None = None
        self._ended = False
        self._check_batch_size(train_loader)
        self._set_scheduler(lr_scheduler, lr_scheduler_params)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        calls: tuple[Call, ...] = ("train", "evaluate", "pred")
        for name in calls:
            if name in cls.__dict__:
                setattr(cls, name, _on_every_node(name)(cls.__dict__[name]))

    @_on_every_node("train")
    def train(self) -> None:
        """Train for ``epochs`` epochs, validating in between; returns on every node together."""
        self.prelim_checks()
        if not self.node.is_root:
            return
        assert self.train_loader is not None
        for epoch in range(self.epochs):
            for batch in self.train_loader:
                tensors, named = self._inputs(batch)
                self.node.forward_compute(tensors, **named)
                self.n_forwards += 1
            self.node.end_epoch()
            if self.val_loader is not None and (epoch + 1) % self.val_freq == 0:
                self._report(self._validate(), f"epoch {epoch + 1}, validation ")

    @_on_every_node("evaluate")
    def evaluate(self) -> float | None:
        """The accuracy on the validation data (or its loss), on every node; the Root prints it."""
        if self.val_loader is None:
            raise SettingsError("evaluate needs validation data: Trainer(val_loader=...)")
        figure = self._validate()
        self._report(figure, "")
        return figure.value

    @_on_every_node("pred")
    def pred(self, input: Any) -> Any:  # noqa: A002 - the documented name
        """The model's output for a batch of inputs, at the Root; None on other nodes."""
        tensors, named = (None, dict(input)) if isinstance(input, Mapping) else (input, {})
        tensors, named = self._cast((tensors, named))
        return self.node.no_grad_forward_compute(tensors, **named)

    def prelim_checks(self) -> None:
        """Check what training needs; on other nodes than the Root, work until the Root is done."""
        if not self.node.is_root:
            self._finish_call()
            return
        if self.train_loader is None:
            raise SettingsError("the Root needs data to train: Trainer(train_loader=...)")
        try:
            batches = self.epochs * len(self.train_loader)
        except TypeError:
            batches = None
        line = self.node.session.line
        line.state.expect(self.node.epoch + self.epochs, batches)
        shared = isinstance(getattr(self.train_loader, "dataset", None), Shard)
        if self.node.clusters > 1 and self.node.cluster == 0 and not shared:
            line.say(
                f"{self.node.role}: each of {self.node.clusters} clusters trains on all data; "
                "ravnest.shard(dataset, name) would give each its share"
            )

    def _finish_call(self) -> None:
        """The end of a call on all nodes; at the Root after all that it asked for is done."""
        call = self._call
        if call is None or self._ended:
            return
        self._ended = True
        if self.node.is_root and call == "train":
            self.node.average()
            if self.save:
                self.node.save()
        self.node.finish_call(call)
        if call == "train":
            self.node.session.line.sum_up()

    def _told(self, call: Call) -> float | None:
        """What a call gives on other nodes than the Root."""
        figure = self.node.session.last_figure() if call == "evaluate" else None
        return None if figure is None else figure.value

    def _validate(self) -> ValidationResult:
        assert self.val_loader is not None
        figure = self.node.validate(self._inputs(batch) for batch in self.val_loader)
        assert figure is not None
        return figure

    def _report(self, figure: ValidationResult, what: str) -> None:
        self.node.session.report_validation(figure, self.node.epoch, what)

    def _inputs(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        inputs: tuple[Any, dict[str, Any]] = self._cast(inputs_in(batch, self.node.signature))
        return inputs

    def _cast(self, inputs: tuple[Any, dict[str, Any]]) -> Any:
        dtype = self.inputs_dtype
        if dtype is None:
            return inputs
        mixed = any(tensor.is_floating_point() for tensor in tensors_in(inputs))
        return map_tensors(inputs, lambda t: t if mixed and not t.is_floating_point() else t.to(dtype))

    def _check_batch_size(self, loader: Any) -> None:
        found = getattr(loader, "batch_size", None)
        if found is not None and self.batch_size not in (found, _DEFAULT_BATCH_SIZE):
            raise SettingsError(
                f"Trainer has batch_size={self.batch_size}, but train_loader gives batches of {found}: "
                "use the same number for both"
            )

    def _set_scheduler(self, scheduler: Callable[..., Any] | None, params: Mapping[str, Any]) -> None:
        rule = self.node.rule
        if scheduler is not None and rule.scheduler is not None:
            raise SettingsError(
                "Node and Trainer both have an lr_scheduler: give it to one of them, or the learning "
                "rate would be changed twice"
            )
        chosen = rule.scheduler if scheduler is None else scheduler
        settings = dict(rule.scheduler_params if scheduler is None else params)
        if chosen is None or (scheduler is None and self.node.started):
            return
        if "step_size" in inspect.signature(chosen).parameters:
            settings.setdefault("step_size", self.step_size)
        self.node.use_scheduler(chosen, settings)
