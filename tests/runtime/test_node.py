"""Node: parameters, refused arguments and methods."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed
from torch import nn
from training_cases import points, small_model

from ravnest import Node, Trainer, set_seed
from ravnest.errors import LinkClosedError, RavnestError, RunError, SettingsError, StageInputError
from ravnest.runtime.stage.worker import Worker
from ravnest.wire.messages import Abort


def _one_line(error: pytest.ExceptionInfo[BaseException] | BaseException) -> str:
    text = str(error.value if isinstance(error, pytest.ExceptionInfo) else error)
    assert "\n" not in text
    return text


def _parameters(node: Node) -> dict[str, torch.Tensor]:
    return node._ensure_started().execution.module.state_dict()


# Arguments refused by the constructor and by start()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"update_frequency": 0}, "update_frequency must be a whole number from 1, not 0"),
        ({"update_frequency": True}, "update_frequency"),
        ({"in_fligth": 3}, "did you mean in_flight?"),
        ({"optimiser": torch.optim.SGD}, "did you mean optimizer?"),
        ({"zzz": 1}, "Node has no keyword 'zzz': known keywords are schedule, micro_batches"),
        ({"schedule": "gpipe"}, "schedule must be 'auto', 'sync' or 'async'"),
        ({"micro_batches": 0}, "micro_batches must be 'auto' or a whole number from 1"),
        ({"micro_batches": "many"}, "micro_batches must be 'auto' or a whole number from 1"),
        ({"in_flight": 0}, "in_flight must be a whole number from 1"),
        ({"connect_timeout": 0}, "connect_timeout must be a positive number"),
        ({"device": "abacus"}, "device must be like 'cpu' or 'cuda:0'"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(
    cluster: Formed, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        cluster().node("node_0", **given)
    assert expected in _one_line(refused)


def test_a_node_needs_a_name_of_the_plan(cluster: Formed, tmp_path: Path) -> None:
    local = cluster()
    for name, expected in (
        (None, "Node(name='node_0'"),
        ("node_7", "there are node_0, node_1"),
        ("root", "names look like 'node_0'"),
        (0, "Node(name='node_0', ...), not 0"),
    ):
        with pytest.raises(RavnestError) as refused:
            local.node(name)  # type: ignore[arg-type]
        assert expected in _one_line(refused)
    with pytest.raises(RavnestError) as refused:
        Node("node_0", folder=tmp_path / "nowhere")
    assert "run clusterize() first" in _one_line(refused)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer": None}, "Node needs an optimizer to train: Node(optimizer=torch.optim.AdamW"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss several times per step"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)},
            "optimizer is an instance of SGD: pass the class",
        ),
        ({"optimizer": "SGD"}, "optimizer must be a class of torch.optim"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm must be a positive number"),
        ({"optimizer_params": {"speed": 1}}, "the optimizer does not accept optimizer_params"),
        (
            {
                "lr_scheduler": torch.optim.lr_scheduler.StepLR,
                "lr_scheduler_params": {"stride": 1},
            },
            "lr_scheduler does not accept lr_scheduler_params",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_optimizer_is_refused_at_the_start(
    cluster: Formed, given: dict[str, Any], expected: str
) -> None:
    node = cluster(nodes=1).node("node_0", **given)
    with pytest.raises(SettingsError) as refused:
        node.start()
    assert expected in _one_line(refused)


def test_a_leaf_without_criterion_ends_the_run_on_all_nodes(cluster: Formed) -> None:
    local = cluster(criterion=None)

    def script(name: str) -> None:
        loader = points()
        Trainer(local.node(name, labels=loader), train_loader=loader).train()

    for error in local.errors(script):
        assert isinstance(error, RunError)
        assert _one_line(error).startswith("node_1: the Leaf needs a loss to train: Node(criterion=")


def test_a_leaf_without_labels_ends_the_run_on_all_nodes(cluster: Formed) -> None:
    local = cluster()
    errors = local.errors(lambda name: Trainer(local.node(name), train_loader=points()).train())
    for error in errors:
        assert isinstance(error, RunError)
        assert "node_1: the Leaf needs the labels of this phase: Node(labels=...)" in _one_line(error)


# Parameters


def test_model_initialises_the_stage(cluster: Formed) -> None:
    local = cluster(nodes=1)
    model = small_model("mlp")
    with torch.no_grad():
        model.first.weight.fill_(0.5)
    with local.node("node_0", model=model) as node:
        found = _parameters(node)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.first.weight.fill_(2.0)
    assert float(found["first.weight"][0, 0]) == 0.5, "the stage has its own weights"
    with local.node("node_0") as node:
        assert torch.equal(_parameters(node)["first.weight"], small_model("mlp").first.weight)


def test_a_model_that_does_not_fit_is_refused(cluster: Formed) -> None:
    local = cluster(nodes=1)
    with pytest.raises(SettingsError, match=r"model has no first\.(bias|weight), which the stage needs"):
        local.node("node_0", model=nn.Linear(4, 3)).start()
    wide = small_model("mlp")
    wide.last = nn.Linear(8, 5)
    with pytest.raises(SettingsError, match=r"last\.\w+ of model has shape \[5.*the stage's has \[3"):
        local.node("node_0", model=wide).start()


@pytest.mark.parametrize("device", [torch.device, None, "cpu", torch.device("cpu")])
def test_device(cluster: Formed, device: Any) -> None:
    with cluster(nodes=1).node("node_0", device=device) as node:
        assert {t.device.type for t in _parameters(node).values()} == {"cpu"}


def test_optimizer_params_may_be_a_function_of_named_parameters(cluster: Formed) -> None:
    seen: list[str] = []

    def groups(named: list[tuple[str, nn.Parameter]]) -> Any:
        seen.extend(name for name, _ in named)
        return [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.5},
        ], {"lr": 0.25}

    with cluster(nodes=1).node("node_0", optimizer_params=groups) as node:
        node.start()
        optimizer = node._ensure_started().execution.updates.optimizer
    assert seen == [name for name, _ in small_model("mlp").named_parameters()]
    assert optimizer is not None
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.25, 0.1), (0.5, 0)]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.Rprop,
    ],
)
def test_any_optimizer_without_a_closure_trains(cluster: Formed, optimizer: Any) -> None:
    local = cluster(optimizer=optimizer, optimizer_params={"lr": 0.01})
    local.train(lambda: (points(), None), node={}, save=True)
    fused, before = local.fused(), small_model("mlp").state_dict()
    assert all(not torch.equal(fused[name], before[name]) for name in before)


def test_averaging_and_compression_are_accepted(cluster: Formed) -> None:
    node = cluster().node("node_0", reduce_factor=4, average_optim=True, compression="fp16")
    assert (node.reduce_factor, node.average_optim, node.compression) == (4, True, "fp16")
    assert repr(node) == "Node(node_0, Root of cluster 0)"


# Methods


class _Steps(Trainer):
    """Trainer that runs a function at the Root."""

    def __init__(self, node: Node, steps: Any, loader: Any) -> None:
        super().__init__(node=node, train_loader=loader)
        self._steps = steps

    def train(self) -> Any:
        self.prelim_checks()
        return self._steps(self.node, self.train_loader) if self.node.is_root else None


def _train_by_hand(cluster: Formed, case: str, loader: Any, steps: Any, **node: Any) -> Any:
    """Return the Root's result of ``steps(node, loader)`` and the trained weights."""
    local = cluster(case, 2, schedule="sync", **node)

    def script(name: str) -> Any:
        with local.node(name, labels=loader()) as own:
            trainer = _Steps(own, steps, loader())
            trainer.save = True
            return trainer.train()

    return local.results(script)[0], local.fused()


def _encoder_batches() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        ids = torch.randint(0, 16, (4, 5), generator=made)
        mask = (torch.rand(4, 5, generator=made) < 0.8).long()
        mask[:, 0] = 1
        batches.append(
            {
                "input_ids": ids,
                "token_type_ids": ids % 2,
                "attention_mask": mask,
                "labels": ids.roll(1, 1),
            }
        )
    return batches


def _token_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


CALLS = {
    "several tensors": lambda node, b: node.forward_compute(
        (b["input_ids"], b["token_type_ids"], b["attention_mask"])
    ),
    "by name": lambda node, b: node.forward_compute(
        **{name: value for name, value in b.items() if name != "labels"}
    ),
    "by graph name": lambda node, b: node.forward_compute(
        data_id=5,
        tensors=b["input_ids"],
        l_token_type_ids_=b["token_type_ids"],
        l_attention_mask_=b["attention_mask"],
    ),
    "the open one": lambda node, b: node.forward_compute(
        b["token_type_ids"], input_ids=b["input_ids"], attention_mask=b["attention_mask"]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_forward_compute_takes_inputs_by_position_and_by_name(cluster: Formed, call: str) -> None:
    def steps(node: Node, loader: Any) -> None:
        for batch in loader:
            CALLS[call](node, batch)
        node.wait_for_backwards()

    _, fused = _train_by_hand(cluster, "encoder", _encoder_batches, steps, criterion=_token_loss)
    model = small_model("encoder")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _encoder_batches():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        _token_loss(model(**inputs), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(fused[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((torch.rand(5, 4), torch.rand(5, 4)), {}), "forward_compute got 2 tensors for 1 inputs: x"),
        ((None, {"y": torch.rand(5, 4)}), "the model has no input 'y'"),
        ((None, {}), "input 'x' is missing"),
    ],
)
def test_invalid_inputs_end_the_run_with_the_reason(
    cluster: Formed, given: tuple[Any, dict[str, Any]], expected: str
) -> None:
    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=points()) as own:
            _Steps(own, lambda node, _: node.forward_compute(given[0], **given[1]), points()).train()

    root, leaf = local.errors(script)
    assert isinstance(root, StageInputError)
    assert expected in _one_line(root)
    assert isinstance(leaf, RunError)
    assert expected in _one_line(leaf)
    assert "node_0" in str(leaf)


def test_inputs_of_another_shape_end_the_run_on_all_nodes(cluster: Formed) -> None:
    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=points()) as own:
            _Steps(own, lambda node, _: node.forward_compute(torch.rand(5, 7)), points()).train()

    for error in local.errors(script):
        assert isinstance(error, RunError)
        assert _one_line(error).startswith("node_0: ")


def test_the_last_word_of_a_node_counts_and_not_that_its_link_is_closed(
    cluster: Formed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour that was sending when the Root closed took it for lost, and waited for its return."""
    hear = Worker.on_message

    def closed() -> None:
        raise LinkClosedError("the link to node_0 is lost")

    def on_message(worker: Worker, link: Any, message: Any) -> None:
        if isinstance(message.head, Abort):
            worker.post(closed)
            time.sleep(0.2)
        hear(worker, link, message)

    monkeypatch.setattr(Worker, "on_message", on_message)
    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=points(), rejoin_timeout=1.0) as own:
            _Steps(own, lambda node, _: node.forward_compute(None), points()).train()

    root, leaf = local.errors(script)
    assert isinstance(root, StageInputError)
    assert type(leaf) is RunError
    assert "input 'x' is missing" in _one_line(leaf)


def test_no_grad_forward_compute_returns_predictions_and_accuracies(cluster: Formed) -> None:
    def steps(node: Node, loader: Any) -> Any:
        outputs = [node.no_grad_forward_compute(x) for x, _ in loader]
        return outputs, [node.no_grad_forward_compute(x, output_type="val_accuracy") for x, _ in loader]

    (outputs, accuracies), _ = _train_by_hand(cluster, "mlp", points, steps, test_labels=points())
    model = small_model("mlp")
    for (x, y), output, accuracy in zip(points(), outputs, accuracies, strict=True):
        expected = model(x)
        assert torch.equal(output, expected)
        assert not output.requires_grad
        assert accuracy == pytest.approx(float((expected.argmax(1) == y).float().mean()))


def test_wait_for_backwards_applies_the_whole_epoch(cluster: Formed) -> None:
    counts: list[int] = []

    def steps(node: Node, loader: Any) -> None:
        for _ in range(2):
            for x, _ in loader:
                node.forward_compute(x)
            node.wait_for_backwards()
            counts.append(len(Path("losses.txt").read_text().split()))
            assert node._ensure_started().execution.awaiting_backward == 0
        node.wait_for_backwards()

    _train_by_hand(cluster, "mlp", points, steps, update_frequency=2)
    assert counts == [3, 6], "five micro-batches are two updates and a smaller one"


def test_forward_compute_in_a_validation_is_refused(cluster: Formed) -> None:
    def steps(node: Node, loader: Any) -> None:
        x, _ = next(iter(loader))
        node.no_grad_forward_compute(x, output_type="val_accuracy")
        node.forward_compute(x)

    with pytest.raises(RunError, match="forward_compute was called in the middle of a validation"):
        _train_by_hand(cluster, "mlp", points, steps, test_labels=points())


def test_reset_allows_a_new_start_and_keeps_files(cluster: Formed) -> None:
    local = cluster(nodes=1)
    node = local.node("node_0")
    trainer = Trainer(node, train_loader=points())
    trainer.train()
    node.reset()
    assert Path("losses.txt").exists()
    assert node.epoch == 0
    assert torch.equal(_parameters(node)["first.weight"], small_model("mlp").first.weight)
    node.close()
    with pytest.raises(RunError, match="node_0 is closed: create a new Node"):
        node.start()


def test_old_server_methods(cluster: Formed, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(nodes=1).node("node_0") as node:
        node.init_server()
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            node.init_server(load_forward_buffer=[], reduce_lock=object())
        assert "['load_forward_buffer', 'reduce_lock']" in caplog.text
        node.start_grpc_server()
        runtime = node._ensure_started()
        node.check_load_forward_buffer()
        node.start()
        assert node._ensure_started() is runtime, "a second start does nothing"


def test_the_context_manager_closes_and_ends_the_run_on_other_nodes(cluster: Formed) -> None:
    local = cluster()

    def script(name: str) -> None:
        set_seed(1)
        with local.node(name, labels=points()) as own:
            Trainer(own, train_loader=points()).train()
            if own.is_root:
                raise LookupError("of the user's")
            Trainer(own, train_loader=points()).train()

    root, leaf = local.errors(script)
    assert isinstance(root, LookupError)
    assert isinstance(leaf, RunError)
    assert "node_0 failed: LookupError: of the user's" in str(leaf)
