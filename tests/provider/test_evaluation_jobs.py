"""Jobs that only evaluate a model, with real worker processes, and jobs that are submitted again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_server import SECONDS, loopback_server, small_job
from running_providers import providers
from torch.nn import functional

from ravnest.errors import ServerRefusedError


def figures_of_one_process(fields: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return loss and accuracy over the validation batches of a job."""
    model, data = fields["model"], fields["val_data"]
    model.load_state_dict(state)
    model.eval()
    total, right, samples = 0.0, 0, len(data)
    loader = torch.utils.data.DataLoader(data, 8)
    with torch.no_grad():
        for inputs, labels in loader:
            output = model(inputs)
            total += float(functional.cross_entropy(output, labels).double()) * len(labels)
            right += int((output.argmax(1) == labels).sum())
    return {"loss": total / samples, "accuracy": right / samples}


def test_an_evaluation_delivers_the_figures_of_one_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 0, "train_data": None, "min_providers": 2}
    options["metrics"] = ["loss", "accuracy"]
    fields = small_job(**options)
    with (
        loopback_server(tmp_path / "server") as server,
        providers(server, tmp_path, "eval-a", "eval-b"),
        server.submit(**options) as handle,
    ):
        found = handle.metrics(timeout=SECONDS)
        assert found == figures_of_one_process(fields, fields["model"].state_dict())
        view = handle.view()
        assert view.reason == "cluster 0 has evaluated the model"
        assert {each.role for each in view.assignments} == {"Root", "Leaf"}
        assert (view.progress.updates, view.progress.epochs) == (0, 0)
        with pytest.raises(ServerRefusedError, match="it only evaluates one"):
            handle.result(timeout=SECONDS)
        again: dict[str, Any] = {"min_providers": 2, "metrics": ["loss", "accuracy"], "shuffle": False}
        with server.submit(**again, optimizer_params={"lr": 0.1, "momentum": 0.9}) as trained:
            state = trained.result(timeout=SECONDS)
            check = trained.resubmit(epochs=0, name="check", start_from="result")
            assert check.metrics(timeout=SECONDS) == figures_of_one_process(fields, state)
            assert check.view().name == "check"
