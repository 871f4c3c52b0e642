"""A stage reads back from disk unchanged, and the loaded stage trains."""

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ravnest.errors import StageFormatError
from ravnest.split import Chain, split
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE, load_module, load_stage, save_stage
from ravnest.store.files import sha256_of


def test_round_trip_is_exact(example: Any, tmp_path: Path) -> None:
    for stage in example.split.stages:
        folder = tmp_path / str(stage.spec.index)
        digest = save_stage(folder, stage)
        found = load_stage(folder, digest.sha256)
        assert found.spec == stage.spec
        assert list(found.tensors) == [entry.key for entry in stage.spec.state]
        for key, tensor in stage.tensors.items():
            assert found.tensors[key].dtype == tensor.dtype
            assert found.tensors[key].shape == tensor.shape
            assert found.tensors[key].numpy().tobytes() == tensor.numpy().tobytes(), key


def test_a_bundle_is_two_files_with_one_digest(example: Any, tmp_path: Path) -> None:
    digest = save_stage(tmp_path, example.split.stages[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [STAGE_FILE, WEIGHTS_FILE]
    assert digest.sha256 == sha256_of(tmp_path / STAGE_FILE)
    weights = json.loads((tmp_path / STAGE_FILE).read_bytes())["weights"]
    assert weights == {"file": WEIGHTS_FILE, "sha256": sha256_of(tmp_path / WEIGHTS_FILE)}
    assert save_stage(tmp_path, example.split.stages[0]) == digest, "saving again gives other bytes"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_get_the_mode_of_the_umask(example: Any, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_stage(tmp_path, example.split.stages[0])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {STAGE_FILE: mode, WEIGHTS_FILE: mode}


def test_loaded_stages_compute_what_the_model_computes(example: Any, saved: Path) -> None:
    chain = Chain(load_module(saved / str(index)) for index in range(3)).eval()
    model = example.model.eval()
    expected = model(example.tokens, mask=example.mask)
    got = chain(example.tokens, mask=example.mask)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.hidden, expected.hidden)
    assert type(got).__name__ == "Scores"


def test_training_a_loaded_stage_does_not_change_its_file(saved: Path) -> None:
    before = sha256_of(saved / "1" / WEIGHTS_FILE)
    module = load_module(saved / "1")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert sha256_of(saved / "1" / WEIGHTS_FILE) == before
    fresh = load_module(saved / "1").parameters_by_key()
    assert all(not torch.equal(fresh[key], p) for key, p in module.parameters_by_key().items())


def test_a_stage_without_state_can_be_saved(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.relu(self.first(x)))

    stage = split(Bare(), torch.rand(4, 3), stages=[0.9, 0.1]).stages[1]
    assert stage.spec.state == ()
    save_stage(tmp_path, stage)
    assert load_stage(tmp_path).spec == stage.spec


def test_the_memory_layout_of_tensors_is_kept(tmp_path: Path) -> None:
    """Kernels, and so the last bits of a result, depend on the memory layout."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2))
    model.to(memory_format=torch.channels_last)
    weights = dict(model.named_parameters())
    assert not weights["0.weight"].is_contiguous()
    for stage in split(model, torch.rand(2, 2, 4, 4), stages=2).stages:
        save_stage(tmp_path, stage)
        loaded = load_module(tmp_path).parameters_by_key()
        assert loaded
        for key, parameter in loaded.items():
            assert parameter.stride() == weights[key].stride(), key
            assert torch.equal(parameter, weights[key]), key


class _Private(NamedTuple):
    value: torch.Tensor
    bound: float


class UnusualNames(nn.Module):
    """Model with names that are not identifiers, and a constant that JSON cannot express."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"conv-1": nn.Linear(3, 3), "a b": nn.Linear(3, 3)})
        self.spec = nn.Linear(3, 3)
        self.graph = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> _Private:
        for layer in (*self.blocks.values(), self.spec, self.graph):
            x = torch.relu(layer(x))
        return _Private(x, float("inf"))


def test_unusual_but_legal_names_are_kept(tmp_path: Path) -> None:
    model, x = UnusualNames(), torch.rand(4, 3)
    stages = split(model, x, stages=2).stages
    for stage in stages:
        save_stage(tmp_path / str(stage.spec.index), stage)
    chain = Chain(load_module(tmp_path / str(index)) for index in range(2))
    assert list(chain.state_dict()) == list(model.state_dict())
    got = chain(x)
    assert type(got).__name__ == "_Private"
    assert got.bound == float("inf")
    assert torch.equal(got.value, model(x).value)


@pytest.mark.parametrize("name", ["stage.json", "weights.safetensors"])
def test_a_missing_file_is_named(last: Path, name: str) -> None:
    (last / name).unlink()
    with pytest.raises(StageFormatError, match=f"{name} does not exist"):
        load_stage(last)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle").touch()
    with pytest.raises(StageFormatError, match=r"stage\.json"):
        load_stage(tmp_path / "bundle")


MODEL = """
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.norm = nn.BatchNorm1d(6)
            self.dropout = nn.Dropout(0.5)
            self.second = nn.Linear(6, 6)
            self.last = nn.Linear(6, 2)

        def forward(self, x):
            y = self.dropout(torch.relu(self.norm(self.first(x))))
            return {"scores": self.last(torch.relu(self.second(y)) + y)}
"""

PROVIDER = """
    import sys
    from pathlib import Path

    import torch

    from ravnest.split import Chain
    from ravnest.store.bundle import load_module

    try:
        import users_model
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("the user's module can still be imported")

    torch.set_num_threads(1)
    modules = [load_module(Path(folder)) for folder in sys.argv[1:]]
    chain = Chain(modules)
    torch.manual_seed(0)
    x, target = torch.rand(8, 4), torch.rand(8, 2)
    before = {key: p.clone() for m in modules for key, p in m.named_parameters()}
    assert "second.weight" in before and "last.bias" in before, sorted(before)

    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    first = chain.train()(x)["scores"]
    assert not torch.equal(first, chain(x)["scores"]), "dropout does nothing in train mode"
    buffers = {key: b.clone() for m in modules for key, b in m.named_buffers()}
    assert buffers["norm.num_batches_tracked"] == 2, "batch norm does not count"

    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(chain(x)["scores"], target)
        optimizer.zero_grad()
        chain.backward(loss)
        assert all(p.grad is not None for p in chain.parameters())
        optimizer.step()
        losses.append(loss.item())
    after = {key: p for m in modules for key, p in m.named_parameters()}
    assert all(not torch.equal(before[key], after[key]) for key in before), "a parameter did not move"

    chain.eval()
    tracked = chain.state_dict()["norm.num_batches_tracked"].item()
    with torch.no_grad():
        whole = chain(x)["scores"]
        assert torch.equal(whole, chain(x)["scores"]), "eval mode is not deterministic"
        for size in (1, 3):
            part = chain(x[:size])["scores"]
            assert part.shape == (size, 2)
            torch.testing.assert_close(part, whole[:size])
    assert chain.state_dict()["norm.num_batches_tracked"] == tracked, "eval mode updates batch norm"
    chain.train()(x[:3])
    assert chain.state_dict()["norm.num_batches_tracked"] == tracked + 1
    sys.stdout.write(f"{sum(losses[:3]) > sum(losses[-3:])}")
"""


def test_a_stage_trains_without_the_users_class(tmp_path: Path) -> None:
    source = tmp_path / "users_model.py"
    source.write_text(textwrap.dedent(MODEL))
    sys.path.insert(0, str(tmp_path))
    try:
        from users_model import Residual  # noqa: PLC0415  # it is written just above

        stages = split(Residual(), torch.rand(8, 4), stages=3).stages
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("users_model", None)
    source.unlink()
    folders = [tmp_path / f"stage_{stage.spec.index}" for stage in stages]
    for folder, stage in zip(folders, stages, strict=True):
        save_stage(folder, stage)
        assert "users_model" not in (folder / STAGE_FILE).read_text()

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROVIDER), *map(str, folders)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True", "the loss did not fall"
