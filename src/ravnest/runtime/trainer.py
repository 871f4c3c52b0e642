"""Public class ``Trainer``: the training loop, usable as it is or with overridden methods."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ravnest.errors import RavnestError, RunInterruptedError, SettingsError
from ravnest.keywords import refuses_unknown_keywords
from ravnest.runtime.inputs import inputs_in
from ravnest.runtime.model_selection import early_stopping_rule, keep_best_rule, needed_metrics
from ravnest.runtime.node import Node
from ravnest.runtime.random_state import capture_random_state, restore_random_state
from ravnest.runtime.settings import is_count
from ravnest.sharding import Shard
from ravnest.split.structure import map_tensors, tensors_in
from ravnest.wire.messages import Call, ValidationResult

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DEFAULT_BATCH_SIZE = 64


def _on_every_node(call: Call) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method that the script calls on every node and that returns on all of them together.

    The Root runs the method. Other nodes serve the Root until it is done there; only ``train`` runs on
    them too, since an ``evaluate`` may use results that only the Root has. A call from within another
    one (validation while training, ``super().train()``) is part of the outer call.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            if self._call is not None:
                return method(self, *args, **kwargs)
            self._call = call

            def once() -> Any:
                self.node.start()
                runs = self.node.is_root or call == "train"
                result = method(self, *args, **kwargs) if runs else None
                self._finish_call()
                return result if runs else self._result_elsewhere(call)

            try:
                with self.node._guarding():
                    return self._repeat_if_interrupted(once)
            except (RavnestError, KeyboardInterrupt) as error:
                logger.debug("%s failed", call, exc_info=True)
                raise _shortened(error) from None
            finally:
                self._call, self._ended = None, False

        return run

    return decorate


def _shortened(error: BaseException) -> BaseException:
    """Remove our own frames below the user's last line from the traceback; the message suffices."""
    last, entry = None, error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_globals.get("__name__", "").startswith("ravnest."):
            last = entry
        entry = entry.tb_next
    if last is None:
        return error.with_traceback(None)
    last.tb_next = None
    return error


@refuses_unknown_keywords(SettingsError)
class Trainer:
    """Training loop of a node.

    Subclasses may override ``train``, ``evaluate`` and ``pred``. Write them for the Root: on other nodes
    ``prelim_checks`` returns when the Root is done, loaders are empty, and ``evaluate`` returns the
    Root's result.
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
        resume: bool = False,
        *,
        early_stopping: Mapping[str, Any] | None = None,
        keep_best: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments and wrap the loaders.

        ``val_freq`` is the number of epochs between validations. ``save``: write the trained stages.
        ``batch_size`` must be equal to the loader's. ``step_size`` is passed to a scheduler that takes
        one. ``inputs_dtype``: convert inputs to this type; if some inputs are floating point, only
        those, otherwise all. ``resume``: continue from the newest checkpoint that all nodes have.
        ``early_stopping``: stop after ``patience`` validations without a better ``metric``.
        ``keep_best``: a metric; the weights with its best value are kept below ``trained/best``.
        """
        if node is None:
            raise SettingsError("Trainer needs the node: Trainer(node=Node(...), ...)")
        for name, value in (("val_freq", val_freq), ("epochs", epochs), ("batch_size", batch_size)):
            if not is_count(value):
                raise SettingsError(f"{name} must be a whole number from 1, not {value!r}")
        self.node = node
        self.train_loader = None if train_loader is None else node._watch(train_loader)
        self.val_loader = None if val_loader is None else node._watch(val_loader)
        self.val_freq = val_freq
        self.save = save
        self.epochs = epochs
        self.batch_size = batch_size
        self.step_size = step_size
        self.inputs_dtype = inputs_dtype
        self.n_forwards = 0
        self._call: Call | None = None
        self._ended = False
        self._results: list[ValidationResult] = []
        """Results of the validations of this training, at the Root."""
        if resume:
            node._use_resume()
        self._check_batch_size(train_loader)
        self._select(early_stopping, keep_best)
        self._set_scheduler(lr_scheduler, lr_scheduler_params)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        calls: tuple[Call, ...] = ("train", "evaluate", "pred")
        for name in calls:
            if name in cls.__dict__:
                setattr(cls, name, _on_every_node(name)(cls.__dict__[name]))

    def _repeat_if_interrupted(self, once: Callable[[], Any]) -> Any:
        """Make a call; repeat it if a node was lost, without what the last checkpoint contains."""
        node = self.node
        node._begin_call()
        loaders = [loader for loader in (self.train_loader, self.val_loader) if loader is not None]
        before, forwards, epoch = capture_random_state(loaders), self.n_forwards, node.epoch
        while True:
            try:
                return once()
            except RunInterruptedError as error:
                node._recover(error)
                self._ended = False
                self.n_forwards, node.epoch = forwards, epoch
                restore_random_state(before, loaders)

    @_on_every_node("train")
    def train(self) -> None:
        """Train for ``epochs`` epochs with validations; returns on all nodes at the same time."""
        self.prelim_checks()
        if not self.node.is_root:
            return
        assert self.train_loader is not None
        self._results = []
        for epoch in range(self.epochs):
            if self.node._skip("train") is False:
                self._train_epoch()
            if self.val_loader is None or (epoch + 1) % self.val_freq:
                continue
            self._results.append(self._validate_epoch(epoch))
            if self._stops(epoch):
                break

    def _validate_epoch(self, epoch: int) -> ValidationResult:
        """Return the result of the validation after an epoch, or the one that a checkpoint has."""
        stored = self.node._skip("validate")
        if isinstance(stored, ValidationResult):
            return stored
        result = self._validate()
        self._report(result, f"epoch {epoch + 1}, validation ")
        self._keep_if_best(result)
        return result

    def _keep_if_best(self, result: ValidationResult) -> None:
        """Keep the weights of a validation that is better than all before in this training."""
        rule = self._best
        if rule is None:
            return
        best = rule.best(each.metrics[rule.metric] for each in self._results)
        if rule.improves(result.metrics[rule.metric], best):
            self.node._keep_best(rule.metric, result.metrics[rule.metric])

    def _stops(self, epoch: int) -> bool:
        """Return whether training stops early, and report it."""
        rule = self._stopping
        if rule is None or epoch + 1 == self.epochs:
            return False
        reason = rule.reason([result.metrics[rule.rule.metric] for result in self._results])
        if reason:
            runtime = self.node._ensure_started()
            words = f"training stops after epoch {epoch + 1} of {self.epochs}: {reason}"
            runtime.progress.say(f"{self.node.role}: {words}")
            runtime.telemetry.stopped(words)
        return bool(reason)

    def _select(self, early_stopping: object, keep_best: object) -> None:
        """Check by which metrics training stops and the best model is kept."""
        names = needed_metrics(early_stopping, keep_best)
        metrics = self.node._use_metrics(names) if names else ()
        self._stopping = early_stopping_rule(early_stopping, metrics)
        self._best = keep_best_rule(keep_best, metrics)
        if (self._stopping or self._best) and self.node.is_root and self.val_loader is None:
            raise SettingsError("early_stopping and keep_best need validation data: val_loader=...")

    def _train_epoch(self) -> None:
        assert self.train_loader is not None
        self.node._restore_random()
        for batch in self.train_loader:
            tensors, named = self._inputs(batch)
            self.node.forward_compute(tensors, **named)
            self.n_forwards += 1
        self.node._end_epoch()

    @_on_every_node("evaluate")
    def evaluate(self) -> float | None:
        """Return the accuracy (or loss) on the validation data, on every node; the Root prints it."""
        if self.val_loader is None:
            raise SettingsError("evaluate needs validation data: Trainer(val_loader=...)")
        result = self._validate()
        self._report(result, "")
        self._keep_if_best(result)
        return result.value

    @_on_every_node("pred")
    def pred(self, input: Any) -> Any:  # noqa: A002 - the documented name
        """Return the model's output for a batch of inputs at the Root; None on other nodes."""
        tensors, named = (None, dict(input)) if isinstance(input, Mapping) else (input, {})
        tensors, named = self._cast((tensors, named))
        return self.node.no_grad_forward_compute(tensors, **named)

    def prelim_checks(self) -> None:
        """Check what training needs; on nodes other than the Root, wait until the Root is done."""
        if not self.node.is_root:
            self._finish_call()
            return
        if self.train_loader is None:
            raise SettingsError("the Root needs data to train: Trainer(train_loader=...)")
        try:
            per_epoch = len(self.train_loader)
        except TypeError:
            per_epoch = None
        progress = self.node._ensure_started().progress
        progress.state.expect(
            self.node.epoch + self.epochs,
            None if per_epoch is None else self.epochs * per_epoch,
            per_epoch,
            self.node._config.update_frequency,
        )
        shared = isinstance(getattr(self.train_loader, "dataset", None), Shard)
        if self.node.clusters > 1 and self.node.cluster == 0 and not shared:
            progress.say(
                f"{self.node.role}: each of {self.node.clusters} clusters trains on all data; "
                "use ravnest.shard(dataset, name) to give each cluster its share"
            )

    def _finish_call(self) -> None:
        """End the call on all nodes; at the Root after everything that it requested is done."""
        call = self._call
        if call is None or self._ended:
            return
        self._ended = True
        if self.node.is_root and call == "train":
            self.node._end_training()
            if self.save:
                self.node._save()
        self.node._finish_call(call)
        if call == "train":
            self.node._ensure_started().progress.sum_up()

    def _result_elsewhere(self, call: Call) -> float | None:
        """Return the result of a call on nodes other than the Root."""
        result = self.node._ensure_started().last_validation() if call == "evaluate" else None
        return None if result is None else result.value

    def _validate(self) -> ValidationResult:
        assert self.val_loader is not None
        self.node._restore_random()
        return self.node._validate(self._inputs(batch) for batch in self.val_loader)

    def _report(self, result: ValidationResult, title: str) -> None:
        self.node._ensure_started().report_validation(result, self.node.epoch, title)

    def _inputs(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        inputs: tuple[Any, dict[str, Any]] = self._cast(inputs_in(batch, self.node._signature))
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
                f"Trainer has batch_size={self.batch_size}, but train_loader has batches of {found}: "
                "use the same number for both"
            )

    def _set_scheduler(self, scheduler: Callable[..., Any] | None, params: Mapping[str, Any]) -> None:
        rule = self.node._rule
        if scheduler is not None and rule.scheduler is not None:
            raise SettingsError(
                "Node and Trainer both have an lr_scheduler: pass it to only one of them, otherwise the "
                "learning rate would be changed twice"
            )
        chosen = rule.scheduler if scheduler is None else scheduler
        settings = dict(rule.scheduler_params if scheduler is None else params)
        if chosen is None or (scheduler is None and self.node._started):
            return
        if "step_size" in inspect.signature(chosen).parameters:
            settings.setdefault("step_size", self.step_size)
        self.node._use_scheduler(chosen, settings)
