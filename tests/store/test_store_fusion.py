"""Trained stages are fused into one state_dict of the original model, or an error says why not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from node_files import node_file

from ravnest import model_fusion
from ravnest.errors import FusionError
from ravnest.split import Chain, StageModule
from ravnest.store import files
from ravnest.store.files import sha256_of
from ravnest.store.trained import save_trained


@pytest.fixture(scope="module")
def chain(example: Any) -> Chain:
    """The three stages after one optimizer step, so that they differ from the model."""
    chain = Chain.of(example.split).train()
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.5)
    chain.backward(chain(example.tokens, mask=example.mask).logits.square().mean())
    optimizer.step()
    return chain


@pytest.fixture
def trained(chain: Chain, tmp_path: Path) -> Path:
    """The stages as saved by nodes 5, 3 and 4 of cluster 0: node order differs from stage order."""
    for module, node in zip(chain.modules, (5, 3, 4), strict=True):
        save_trained(
            tmp_path / "trained", node_file(node, stage=module.spec.index, stages=3), module, run="run-1"
        )
    return tmp_path / "trained"


def test_files_of_a_trained_stage(trained: Path) -> None:
    assert sorted(path.relative_to(trained).as_posix() for path in trained.rglob("*.*")) == [
        f"cluster_0/node_{node}.{kind}" for node in (3, 4, 5) for kind in ("json", "safetensors")
    ]


def test_the_fused_state_dict_equals_the_models(example: Any, chain: Chain, trained: Path) -> None:
    path = model_fusion(0, folder=trained)
    assert path == trained / "trained_state_dict.pt"
    fused = torch.load(path, weights_only=True)
    original = example.model.state_dict()
    assert list(fused) == list(original), "the keys or their order differ"
    assert "scale" not in fused, "a buffer that is not persistent was saved"
    for key, tensor in chain.state_dict().items():
        assert torch.equal(fused[key], tensor), key
        assert fused[key].dtype == original[key].dtype
    changed = [key for key in fused if not torch.equal(fused[key], original[key])]
    assert changed == list(fused), "training did not change all of it, so the test compares too little"

    assert fused._metadata == original._metadata, "the modules' versions are lost"

    model = type(example.model)()
    assert not any(model.load_state_dict(fused, strict=True))
    got, expected = model.eval(), chain.eval()
    with torch.no_grad():
        assert torch.equal(
            got(example.tokens, mask=example.mask).logits,
            expected(example.tokens, mask=example.mask).logits,
        )
    chain.train()


def test_a_tied_weight_comes_from_its_owner(chain: Chain, trained: Path) -> None:
    owner, replica = chain.modules[0], chain.modules[2]
    assert "embed.weight" in owner.parameters_by_key()
    assert "embed.weight" in replica.parameters_by_key()
    stale = StageModule(
        replica.spec, {key: torch.zeros_like(t) for key, t in replica.state_tensors().items()}
    )
    save_trained(trained, node_file(4, stage=2, stages=3), stale, run="run-1")
    fused = torch.load(model_fusion(folder=trained), weights_only=True)
    assert torch.equal(fused["embed.weight"], owner.state_tensors()["embed.weight"])
    assert torch.equal(fused["head.weight"], fused["embed.weight"])


def test_fusion_reads_trained_by_default(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.parent)
    assert model_fusion() == Path("trained/trained_state_dict.pt")
    assert (trained / "trained_state_dict.pt").exists()


def test_each_cluster_is_fused_separately(chain: Chain, trained: Path) -> None:
    for module, node in zip(chain.modules, (0, 1, 2), strict=True):
        zeros = {key: torch.zeros_like(t) for key, t in module.state_tensors().items()}
        other = node_file(node, stage=module.spec.index, stages=3, cluster=1)
        save_trained(trained, other, StageModule(module.spec, zeros), run="run-1")
    first = torch.load(model_fusion(0, folder=trained), weights_only=True)
    second = torch.load(model_fusion(cluster_id=1, folder=trained), weights_only=True)
    assert list(first) == list(second)
    assert first["body.weight"].any()
    assert not any(tensor.any() for tensor in second.values())


def edit(trained: Path, number: int, **fields: Any) -> None:
    path = trained / "cluster_0" / f"node_{number}.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


def edit_stage(trained: Path, node: int, **fields: Any) -> None:
    manifest = json.loads((trained / "cluster_0" / f"node_{node}.json").read_bytes())
    edit(trained, node, stage=manifest["stage"] | fields)


def remove(trained: Path, *names: str) -> None:
    for name in names:
        (trained / "cluster_0" / name).unlink()


def damage(trained: Path, change: Callable[[bytes], bytes], *, sign: bool = False) -> None:
    path = trained / "cluster_0" / "node_3.safetensors"
    path.write_bytes(change(path.read_bytes()))
    if sign:
        edit(trained, 3, sha256=sha256_of(path))


def copy_as(trained: Path, old: int, new: int) -> None:
    folder = trained / "cluster_0"
    for kind in ("json", "safetensors"):
        shutil.copy(folder / f"node_{old}.{kind}", folder / f"node_{new}.{kind}")
    edit(trained, new, node=new)


def lose_a_name(trained: Path) -> None:
    path = trained / "cluster_0" / "node_3.json"
    manifest = json.loads(path.read_bytes())
    entry = next(entry for entry in manifest["stage"]["state"] if entry["persistent"])
    entry["positions"] = [0 for _ in entry["names"]]
    path.write_text(json.dumps(manifest))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing stage": (
        lambda t: remove(t, "node_3.json", "node_3.safetensors"),
        r"cluster_0 lacks stage 1 of 3: it has stage 2 \(node_4\), stage 0 \(node_5\)",
    ),
    "two missing stages": (
        lambda t: remove(t, "node_3.json", "node_5.json"),
        r"lacks stage 0, 1 of 3: it has stage 2 \(node_4\)",
    ),
    "manifest without weights": (
        lambda t: remove(t, "node_3.safetensors"),
        r"node_3\.safetensors does not exist",
    ),
    "stage twice": (lambda t: copy_as(t, 3, 7), "has stage 1 twice: node_3 and node_7"),
    "mixed runs": (lambda t: edit(t, 4, run="run-2"), "node_3 is of run run-1 .*node_4 of run run-2"),
    "mixed plans": (lambda t: edit(t, 5, plan="other"), "mixes stages .*node_5 of .* plan other"),
    "mixed counts": (lambda t: edit_stage(t, 5, stages=4), "mixes stages"),
    "truncated": (lambda t: damage(t, lambda c: c[:-1]), r"node_3\.safetensors is truncated"),
    "too long": (lambda t: damage(t, lambda c: c + b"x"), r"node_3\.safetensors is longer"),
    "flipped bit": (
        lambda t: damage(t, lambda c: c[:-1] + bytes([c[-1] ^ 1])),
        r"node_3\.safetensors is not the file that node_3\.json describes",
    ),
    "weights of another stage": (
        lambda t: shutil.copy(
            t / "cluster_0" / "node_5.safetensors", t / "cluster_0" / "node_3.safetensors"
        ),
        r"node_3\.safetensors",
    ),
    "another format": (lambda t: edit(t, 3, format="other"), r"node_3\.json is not the manifest"),
    "later version": (lambda t: edit(t, 3, version=9), r"node_3\.json is not the manifest"),
    "no run": (lambda t: drop(t, 3, "run"), r"node_3\.json is malformed: .*`run`"),
    "no stage": (lambda t: drop(t, 3, "stage"), r"node_3\.json is malformed: .*`stage`"),
    "forged stage": (lambda t: edit(t, 3, stage=[]), r"node_3\.json: the stage is malformed"),
    "not JSON": (
        lambda t: (t / "cluster_0" / "node_3.json").write_text("{"),
        r"node_3\.json is not valid JSON",
    ),
    "manifest is a folder": (
        lambda t: (remove(t, "node_3.json"), (t / "cluster_0" / "node_3.json").mkdir()),
        r"node_3\.json is not a file",
    ),
    "name lost": (lose_a_name, "do not form one state_dict"),
    "empty folder": (
        lambda t: (shutil.rmtree(t / "cluster_0"), (t / "cluster_0").mkdir()),
        r"holds no trained stage of cluster 0: train with Trainer\(save=True\)",
    ),
    "no folder": (shutil.rmtree, "holds no trained stage of cluster 0"),
}


def drop(trained: Path, node: int, field: str) -> None:
    path = trained / "cluster_0" / f"node_{node}.json"
    manifest = json.loads(path.read_bytes())
    del manifest[field]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", REFUSED)
def test_an_incomplete_model_is_refused(trained: Path, name: str) -> None:
    change, says = REFUSED[name]
    change(trained)
    with pytest.raises(FusionError) as caught:
        model_fusion(folder=trained)
    assert re.search(says, str(caught.value)), caught.value
    assert isinstance(caught.value, ValueError)
    assert not (trained / "trained_state_dict.pt").exists()


def test_another_cluster_has_nothing_to_fuse(trained: Path) -> None:
    with pytest.raises(FusionError, match="holds no trained stage of cluster 7"):
        model_fusion(7, folder=trained)


def test_a_failed_fusion_keeps_the_earlier_file(trained: Path) -> None:
    path = model_fusion(folder=trained)
    before = path.read_bytes()
    remove(trained, "node_3.json")
    with pytest.raises(FusionError):
        model_fusion(folder=trained)
    assert path.read_bytes() == before


def test_the_fused_file_is_replaced_whole(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trained / "trained_state_dict.pt").write_bytes(b"an earlier result")

    def fail(state_dict: object, path: Path) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="the disk is full"):
            model_fusion(folder=trained)
    assert (trained / "trained_state_dict.pt").read_bytes() == b"an earlier result"
    assert not list(trained.glob(".*")), "a half-written file was left"

    model_fusion(folder=trained)
    assert torch.load(trained / "trained_state_dict.pt", weights_only=True)


def test_saving_again_replaces_a_trained_stage_whole(
    chain: Chain, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained / "cluster_0"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(self: Path, target: Path) -> None:
        raise OSError("the machine went down")

    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "replace", fail)
        with pytest.raises(OSError, match="went down"):
            save_trained(trained, node_file(3, stage=1, stages=3), chain.modules[1], run="run-2")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_other_files_in_the_folder_are_left_alone(trained: Path) -> None:
    notes = {trained / "notes.txt": b"mine", trained / "cluster_0" / "node_x.json": b"mine too"}
    for path, content in notes.items():
        path.write_bytes(content)
    model_fusion(folder=trained)
    assert {path: path.read_bytes() for path in notes} == notes
