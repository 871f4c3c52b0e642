"""Training with compression: similar losses, and equal shared weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from local_cluster import Formed
from torch import nn
from training_cases import image_loaders, token_loaders, token_loss

from ravnest import Trainer
from ravnest.errors import SettingsError
from ravnest.runtime.stage.execution import StageExecution
from ravnest.wire.codecs import CODECS

LOSSY = [name for name in CODECS if name != "raw"]


def _losses(local: Any) -> list[float]:
    return [float(line) for line in (local.folder / "losses.txt").read_text().split()]


@pytest.mark.parametrize("case", [pytest.param("digits-cnn", marks=pytest.mark.full), "tied-gpt"])
def test_compressed_training_has_similar_losses(cluster: Formed, case: str) -> None:
    loaders = token_loaders if case == "tied-gpt" else image_loaders
    criterion = token_loss if case == "tied-gpt" else nn.functional.cross_entropy
    rule = {"optimizer_params": {"lr": 0.01}, "criterion": criterion}
    found: dict[bool | str, list[float]] = {}
    for codec in (False, *LOSSY):
        local = cluster(case, 3, schedule="sync", compression=codec)
        outcomes = local.train(loaders, node=rule, epochs=3)
        found[codec] = _losses(local)
        assert len({outcome.result for outcome in outcomes.values()}) == 1, (
            "all nodes have the same validation result"
        )
    exact = found.pop(False)
    for codec, losses in found.items():
        assert losses != exact, "nothing was compressed"
        assert losses == pytest.approx(exact, rel=0.02), codec


@pytest.mark.parametrize("codec", LOSSY)
def test_compressed_asynchronous_training_learns(cluster: Formed, codec: str) -> None:
    local = cluster("tied-gpt", 3, compression=codec, criterion=token_loss)
    local.train(token_loaders, node={"optimizer_params": {"lr": 0.01}}, epochs=3)
    losses = _losses(local)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.parametrize("codec", LOSSY)
def test_shared_weights_stay_equal_on_all_stages(
    cluster: Formed, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []
    received: list[torch.Tensor] = []
    shared_weights, update_replicas = StageExecution.shared_weights, StageExecution.update_replicas

    def sending(self: StageExecution, *, trains: bool) -> Any:
        values = shared_weights(self, trains=trains)
        sent.extend(value.clone() for value in values.values())
        return values

    def receiving(self: StageExecution, values: Mapping[str, torch.Tensor]) -> None:
        received.extend(values.values())
        update_replicas(self, values)

    monkeypatch.setattr(StageExecution, "shared_weights", sending)
    monkeypatch.setattr(StageExecution, "update_replicas", receiving)
    local = cluster("tied-gpt", 3, schedule="sync", compression=codec, criterion=token_loss)
    local.train(token_loaders, node={}, save=True)
    assert received
    assert all(any(one.equal(other) for other in sent) for one in received)
    fused = local.fused()
    assert fused["embed.weight"].equal(fused["head.weight"])


@pytest.mark.parametrize("codec", [True, *LOSSY])
def test_a_compressed_prediction_is_close_to_the_exact_one(cluster: Formed, codec: bool | str) -> None:
    tokens = next(iter(token_loaders()[0]))[0]

    def predict(compression: bool | str) -> torch.Tensor:
        local = cluster("tied-gpt", 3, compression=compression)

        def script(name: str) -> Any:
            with local.node(name) as node:
                trainer = Trainer(node)
                return trainer.pred(tokens) if node.is_root else trainer.train()

        output = local.results(script)[0]
        assert isinstance(output, torch.Tensor)
        return output

    exact, compressed = predict(False), predict(codec)
    error = (compressed - exact).norm() / exact.norm()
    assert 0 < error < 0.02


def test_clamped_values_are_logged_at_the_end(cluster: Formed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ravnest")
    cluster("digits-cnn", 2, compression=True).train(lambda: (image_loaders()[0], None), node={})
    said = [record for record in caplog.records if "clamped" in record.getMessage()]
    assert sorted(record.getMessage()[:9] for record in said) == ["node_0: 0", "node_1: 0"]
    assert {record.levelno for record in said} == {logging.INFO}


@pytest.mark.parametrize("given", ["raw", "zip", 1, None, 8.0, ["fp16"]])
def test_invalid_values_of_compression_are_refused(cluster: Formed, given: Any) -> None:
    with pytest.raises(SettingsError, match=r"False, True .* 'fp16', 'bf16', 'int8', not"):
        cluster().node("node_0", compression=given)
