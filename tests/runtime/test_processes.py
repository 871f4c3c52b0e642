"""Nodes in separate processes, connected by gRPC."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import provider_script
import pytest
import torch
from local_cluster import Splits
from provider_processes import ENVIRONMENT, SCRIPT, Provider, Start, await_line, ended_well
from training_cases import SMALL_MODELS, small_model, train_alone
from workloads import free_ports

from ravnest import clusterize, model_fusion

SOON = 30.0
"""Seconds within which all nodes must detect the end of one."""


Form = Callable[..., list[str]]


@pytest.fixture
def form(splits: Splits) -> Form:
    """Write a split model to a folder and return the node names, Root first."""

    def copy(folder: Path, nodes: int, case: str = "mlp") -> list[str]:
        source, names = splits(case, nodes)
        shutil.copytree(source / "node_data", folder / "node_data")
        return names

    return copy


def _message(provider: Provider) -> str:
    """Return the last line of the output."""
    return provider.output.strip().splitlines()[-1]


# Successful runs


@pytest.mark.parametrize(("order", "evaluate"), [((0, 1, 2), True), ((2, 0, 1), False)])
def test_three_nodes_start_in_any_order_and_exit_with_0(
    tmp_path: Path, form: Form, start: Start, order: tuple[int, ...], evaluate: bool
) -> None:
    names = form(tmp_path, 3)
    first, *others = [names[i] for i in order]
    providers = start(tmp_path, [first], evaluate=evaluate)
    await_line(providers[first], f"{first} (")
    assert " waits for node_" in providers[first].output
    providers |= start(tmp_path, others, evaluate=evaluate)
    ended_well(providers)
    accuracies = (tmp_path / "val_accuracies.txt").read_text().split()
    assert len(accuracies) == provider_script.EPOCHS + evaluate
    root = providers[names[0]].output
    assert f"validation accuracy {float(accuracies[-1]):.4f}" in root
    assert "Root: 20 batches in " in root
    for provider in providers.values():
        assert "Error" not in provider.output


def test_nodes_in_separate_interpreters(tmp_path: Path, form: Form) -> None:
    names = form(tmp_path, 2)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), name],
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert err == "", "no warnings"
        assert "batches/s" in out


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("case", "nodes"),
    [
        ("digits-cnn", 2),
        ("tied-gpt", 3),
        *(pytest.param("digits-cnn", nodes, marks=FULL) for nodes in (3, 4)),
        *(pytest.param("tied-gpt", nodes, marks=FULL) for nodes in (2, 4)),
    ],
)
def test_sync_equals_a_single_process(
    tmp_path: Path, form: Form, start: Start, case: str, nodes: int
) -> None:
    names = form(tmp_path, nodes, case)
    ended_well(start(tmp_path, names, case=case, schedule="sync", evaluate=False))
    model = small_model(case)
    rule = provider_script.rule()
    optimizer = rule["optimizer"](model.parameters(), **rule["optimizer_params"])
    scheduler = rule["lr_scheduler"](optimizer, **rule["lr_scheduler_params"])
    train, validation = provider_script.loaders(case)
    criterion = provider_script.criterion(case)
    losses = train_alone(
        model,
        train,
        lambda outputs, batch: criterion(outputs, batch if case == "tied-gpt" else batch[-1]),
        optimizer,
        epochs=provider_script.EPOCHS,
        scheduler=scheduler,
        after_epoch=lambda: [None for _ in validation or ()],  # draws from the generator they share
    )
    assert len(losses) == 20
    fused = torch.load(model_fusion(0, folder=tmp_path / "trained"), weights_only=True)
    expected = model.state_dict()
    assert list(fused) == list(expected)
    assert all(torch.equal(fused[name], expected[name]) for name in expected)


def test_public_addresses_use_mutual_tls(tmp_path: Path, form: Form, start: Start) -> None:
    ports = free_ports(3)
    node_data = tmp_path / "node_data"
    node_data.mkdir()
    configs = {
        str(i): {"IP": f"0.0.0.0:{port}", "benchmarks": {"ram": 4, "bandwidth": 1000}}
        for i, port in enumerate(ports)
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs))
    model, example = small_model("mlp"), SMALL_MODELS["mlp"][1]
    plan = clusterize(model, example_args=example, clusters=1, folder=node_data)
    names = [f"node_{stage.node.id}" for stage in plan.clusters[0].stages]
    providers = start(tmp_path, names[1:])
    leaf = json.loads((node_data / "nodes" / f"{names[1]}.json").read_text())
    _assert_speaks_tls_only(int(leaf["address"].rpartition(":")[2]), providers[names[1]])
    ended_well(providers | start(tmp_path, names[:1]))


def _assert_speaks_tls_only(port: int, provider: Provider) -> None:
    """Check that a client without TLS gets no answer."""
    deadline = time.monotonic() + 30
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            assert time.monotonic() < deadline, provider.output
            assert not provider.ended.wait(0.1), provider.output
    with stranger:
        stranger.settimeout(15)
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        try:
            assert stranger.recv(64)[3:4] != b"\4", "no settings frame of HTTP/2"
        except ConnectionError:
            """The server closed the connection, as expected."""


# Failed runs


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param(0, signal.SIGINT, id="SIGINT-Root"),
        pytest.param(2, signal.SIGINT, id="SIGINT-Leaf"),
        pytest.param(1, signal.SIGKILL, id="SIGKILL-Stem"),
        pytest.param(2, signal.SIGKILL, id="SIGKILL-Leaf"),
        pytest.param(1, signal.SIGINT, id="SIGINT-Stem", marks=FULL),
        pytest.param(0, signal.SIGKILL, id="SIGKILL-Root", marks=FULL),
    ],
)
def test_the_end_of_one_node_ends_the_others_with_its_name(
    tmp_path: Path, form: Form, start: Start, victim: int, how: signal.Signals
) -> None:
    names = form(tmp_path, 3)
    providers = start(tmp_path, names, endless=True, rejoin_timeout=0.0)
    await_line(providers[names[0]], "under way")
    providers[names[victim]].kill(how)
    for name, provider in providers.items():
        code = provider.wait(SOON)
        assert code not in (None, 0), f"{name}:\n{provider.output}"
    for name in set(names) - {names[victim]}:
        said = providers[name].output
        assert names[victim] in _message(providers[name]), said
        expected = "was interrupted" if how == signal.SIGINT else "lost"
        assert expected in _message(providers[name]), said
        assert said.count("Traceback") <= 1, "no chain of errors"


def test_an_error_between_calls_ends_the_other_nodes(tmp_path: Path, form: Form, start: Start) -> None:
    names = form(tmp_path, 2)
    providers = start(tmp_path, names, raises=names[0], epochs=1)
    assert [providers[name].wait() for name in names] == [1, 1]
    assert _message(providers[names[0]]) == "LookupError: of the user's"
    said = _message(providers[names[1]])
    assert said == f"ravnest.errors.RunError: {names[0]} failed: LookupError: of the user's"


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path, form: Form, start: Start) -> None:
    names = form(tmp_path, 2)
    place = json.loads((tmp_path / "node_data" / "nodes" / f"{names[1]}.json").read_text())
    host, _, port = place["address"].rpartition(":")
    # Unlike a plain bind, this ignores lingering connections of earlier tests.
    with socket.create_server((host, int(port))):
        providers = start(tmp_path, names[1:])
        assert providers[names[1]].wait() == 1
    assert f"{place['address']} is in use: stop the process" in _message(providers[names[1]])
    assert providers[names[1]].output.count("Traceback") <= 1


@pytest.mark.parametrize("missing", [0, 1], ids=["the node before", "the node behind"])
def test_a_neighbour_that_never_starts_is_named(
    tmp_path: Path, form: Form, start: Start, missing: int
) -> None:
    names = form(tmp_path, 2)
    place = json.loads((tmp_path / "node_data" / "nodes" / f"{names[missing]}.json").read_text())
    present = names[1 - missing]
    providers = start(tmp_path, [present], connect_timeout=1.0)
    assert providers[present].wait() == 1
    said = providers[present].output
    assert f"waits for {names[missing]} at {place['address']}" in said.splitlines()[0]
    assert place["address"] in _message(providers[present]), said
    assert names[missing] in _message(providers[present]), said
    assert said.count("Traceback") <= 1


def test_nodes_of_two_plans_refuse_each_other(tmp_path: Path, form: Form, start: Start) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    names = form(first, 2)
    second.mkdir()
    (second / "node_data").mkdir()
    configs = (first / "node_data" / "node_configs.json").read_text()
    (second / "node_data" / "node_configs.json").write_text(configs)
    wider = SMALL_MODELS["mlp"][0]()
    clusterize(wider, example_args=SMALL_MODELS["mlp"][1], clusters=1, folder=second / "node_data")
    leaf = start(first, names[1:], connect_timeout=20.0)
    root = start(second, names[:1], connect_timeout=20.0)
    assert root[names[0]].wait() == 1
    assert "its node_data comes from another clusterize() call" in _message(root[names[0]])
    assert "copy the same node_data to all nodes" in _message(root[names[0]])
    assert root[names[0]].output.count("Traceback") <= 1
    leaf[names[1]].kill(signal.SIGINT)
    assert leaf[names[1]].wait() != 0


def test_nodes_with_different_settings_refuse_each_other(
    tmp_path: Path, form: Form, start: Start
) -> None:
    names = form(tmp_path, 2)
    leaf = start(tmp_path, names[1:], update_frequency=2, connect_timeout=20.0)
    root = start(tmp_path, names[:1], update_frequency=4)
    assert root[names[0]].wait() == 1
    said = _message(root[names[0]])
    assert f"{names[0]} runs with update_frequency=4, {names[1]} with update_frequency=2" in said
    leaf[names[1]].kill(signal.SIGINT)
    assert leaf[names[1]].wait() != 0
