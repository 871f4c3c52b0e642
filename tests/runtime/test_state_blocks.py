"""Checkpoints travel in blocks; what a peer sends is checked before it counts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from node_files import node_file

from ravnest.errors import StageFormatError
from ravnest.runtime.control import state_blocks
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.state_blocks import (
    BLOCK,
    BYTES,
    BlockReader,
    BlockWriter,
    ExpectedFile,
    SentFile,
)
from ravnest.runtime.stage.execution import StageExecution
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.transport.base import Link
from ravnest.types import CheckpointId
from ravnest.wire.messages import Message, StateBlock

EXPECTED = ExpectedFile("plan", 0, 1, 3)
SIZE = 3 * BLOCK // 4 + 5  # floats: about three blocks
FIRST = CheckpointId(1, 0)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"state/a": torch.rand(SIZE, generator=torch.Generator().manual_seed(seed))}


def checkpoint(
    folder: CheckpointFolder, update: int, tensors: dict[str, torch.Tensor]
) -> CheckpointManifest:
    name = CheckpointId(update, 0)
    temporary = folder.write_tensors(name, tensors)
    plain = CheckpointManifest("plan", "run", 1, 0, 1, 3, name, {}, {"x": [1, 2]}, attempt="a")
    manifest = folder.finish(temporary, plain)
    folder.add(temporary, manifest)
    return manifest


@pytest.fixture
def source(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "target")


def writer(target: CheckpointFolder, complete: CheckpointId | None = None) -> BlockWriter:
    return BlockWriter(target, EXPECTED, lambda: complete)


def messages(
    source: CheckpointFolder, manifest: CheckpointManifest, base: SentFile | None = None
) -> list[Message]:
    return list(BlockReader(source, manifest, base).messages(restore=False))


def changed(message: Message, **fields: Any) -> Message:
    return Message(msgspec.structs.replace(message.head, **fields), message.values)


def with_manifest(message: Message, **fields: Any) -> Message:
    assert isinstance(message.head, StateBlock)
    data = {**json.loads(message.head.manifest), **fields}
    return changed(message, manifest=json.dumps(data))


def sent_bytes(found: list[Message]) -> int:
    return sum(m.values[BYTES].nbytes for m in found if BYTES in m.values)  # type: ignore[union-attr]


def take_all(receiver: BlockWriter, blocks: list[Message]) -> CheckpointManifest | None:
    found = None
    for block in blocks:
        found = receiver.take(block)
    return found


def leftovers(target: CheckpointFolder) -> list[Path]:
    return list(target.path.glob(".*")) if target.path.exists() else []


def test_a_checkpoint_arrives_as_it_was(source: CheckpointFolder, target: CheckpointFolder) -> None:
    manifest = checkpoint(source, 1, state())
    blocks = messages(source, manifest)
    assert len(blocks) == 4
    receiver = writer(target)
    assert [receiver.take(block) for block in blocks] == [None] * 3 + [manifest]
    assert target.usable() == [manifest]
    assert source.tensors_path(FIRST).read_bytes() == target.tensors_path(FIRST).read_bytes()
    assert leftovers(target) == []


def test_blocks_that_did_not_change_are_not_sent(
    source: CheckpointFolder, target: CheckpointFolder
) -> None:
    reader = BlockReader(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    take_all(receiver, list(reader.messages(restore=False)))
    tensors = state()
    tensors["state/a"][SIZE // 2] += 1
    second = checkpoint(source, 2, tensors)
    blocks = messages(source, second, reader.sent)
    assert sent_bytes(blocks) == BLOCK
    take_all(receiver, blocks)
    assert target.usable()[-1] == second
    assert torch.equal(dict(target.load(second))["state/a"], tensors["state/a"])


def test_the_replica_that_all_have_is_kept(source: CheckpointFolder, target: CheckpointFolder) -> None:
    for update in (1, 2, 3, 4):
        manifest = checkpoint(source, update, {"state/a": torch.ones(3)})
        take_all(writer(target, FIRST), messages(source, manifest))
    assert [each.update for each in target.ids()] == [1, 3, 4]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ((1, 0, 2, 3), "without its beginning"),
        ((0, 2, 1, 3), "out of order"),
        ((0, 1, 1, 2), "out of order"),
        ((0, 1, 3), "out of order"),
    ],
)
def test_blocks_out_of_order_are_refused(
    source: CheckpointFolder, target: CheckpointFolder, order: tuple[int, ...], reason: str
) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    with pytest.raises(StageFormatError, match=reason):
        take_all(receiver, [blocks[number] for number in order])
    assert target.ids() == []
    assert leftovers(target) == []


def test_the_rest_of_a_refused_file_is_ignored_and_the_next_file_is_taken(
    source: CheckpointFolder, target: CheckpointFolder
) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    receiver.take(blocks[0])
    with pytest.raises(StageFormatError):
        receiver.take(blocks[2])
    assert [receiver.take(block) for block in blocks[1:]] == [None] * 3
    assert take_all(receiver, blocks) is not None


def test_a_wrong_digest_is_refused(source: CheckpointFolder, target: CheckpointFolder) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    blocks[1].values[BYTES][7] ^= 1  # type: ignore[index, operator]
    receiver = writer(target)
    with pytest.raises(StageFormatError, match="another digest"):
        take_all(receiver, blocks)
    assert target.ids() == []
    assert leftovers(target) == []


def test_a_file_that_ends_early_is_refused(source: CheckpointFolder, target: CheckpointFolder) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    receiver.take(blocks[0])
    with pytest.raises(StageFormatError, match="another digest"):
        receiver.take(changed(blocks[1], is_last=True))


def test_a_file_longer_than_its_manifest_says_is_refused(
    source: CheckpointFolder, target: CheckpointFolder
) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    receiver.take(with_manifest(blocks[0], size=BLOCK + 1))
    with pytest.raises(StageFormatError, match="longer"):
        receiver.take(blocks[1])
    assert leftovers(target) == []


def test_a_base_that_is_missing_or_too_short_is_refused(
    source: CheckpointFolder, target: CheckpointFolder
) -> None:
    manifest = checkpoint(source, 1, state())
    blocks = messages(source, manifest)
    same = Message(msgspec.structs.replace(blocks[0].head, base=CheckpointId(9, 0), same=BLOCK))
    receiver = writer(target)
    with pytest.raises(FileNotFoundError):
        receiver.take(same)
    checkpoint(target, 9, {"state/a": torch.ones(3)})
    receiver = writer(target)
    receiver.take(same)
    with pytest.raises(StageFormatError, match="out of order"):
        receiver.take(blocks[1])
    assert leftovers(target) == []


@pytest.mark.parametrize("same", [0, -1, BLOCK + 1, 1 << 60])
def test_a_block_of_the_base_has_the_size_of_a_block(
    source: CheckpointFolder, target: CheckpointFolder, same: int
) -> None:
    block = messages(source, checkpoint(source, 1, state()))[0]
    checkpoint(target, 9, state())
    hostile = Message(msgspec.structs.replace(block.head, base=CheckpointId(9, 0), same=same))
    with pytest.raises(StageFormatError, match="too large"):
        writer(target).take(hostile)


HOSTILE: dict[str, dict[str, Any]] = {
    "another plan": {"plan": "other"},
    "another cluster": {"cluster": 1},
    "another stage": {"stage": 2},
    "another number of stages": {"stages": 4},
    "another checkpoint": {"id": [2, 0]},
    "a name that leads elsewhere": {"id": ["../../x", 0]},
    "an unknown field": {"code": "import os"},
    "a size that is text": {"size": "1"},
    "tensors that are a list": {"tensors": []},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(
    source: CheckpointFolder, target: CheckpointFolder, case: str
) -> None:
    block = with_manifest(messages(source, checkpoint(source, 1, state()))[0], **HOSTILE[case])
    with pytest.raises(StageFormatError):
        writer(target).take(block)
    assert leftovers(target) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"plan": NaN}'])
def test_a_manifest_that_is_none_is_refused(
    source: CheckpointFolder, target: CheckpointFolder, text: str
) -> None:
    block = messages(source, checkpoint(source, 1, state()))[0]
    with pytest.raises(StageFormatError):
        writer(target).take(changed(block, manifest=text))


def test_a_manifest_without_end_is_refused(
    source: CheckpointFolder, target: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_blocks, "_LONGEST_MANIFEST", 10)
    block = messages(source, checkpoint(source, 1, state()))[0]
    with pytest.raises(StageFormatError, match="too long"):
        writer(target).take(block)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {BYTES: 3},
        {"other": torch.zeros(4, dtype=torch.uint8)},
        {BYTES: torch.zeros(4)},
        {BYTES: torch.zeros(2, 2, dtype=torch.uint8)},
    ],
)
def test_a_block_without_bytes_is_refused(
    source: CheckpointFolder, target: CheckpointFolder, values: dict[str, Any]
) -> None:
    block = messages(source, checkpoint(source, 1, state()))[0]
    with pytest.raises(StageFormatError, match="no bytes"):
        writer(target).take(Message(block.head, values))


def test_a_disk_without_place_is_told_before_anything_is_written(
    source: CheckpointFolder, target: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(StageFormatError, match="no place"):
        writer(target).take(blocks[0])
    assert leftovers(target) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    source: CheckpointFolder, target: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = writer(target)
    receiver.take(blocks[0])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(receiver, "_write", full)
        with pytest.raises(OSError, match="No space"):
            receiver.take(blocks[1])
    assert leftovers(target) == []
    assert take_all(receiver, blocks) is not None


def test_a_source_that_was_truncated_is_not_sent_as_a_whole(source: CheckpointFolder) -> None:
    manifest = checkpoint(source, 1, state())
    path = source.tensors_path(FIRST)
    path.write_bytes(path.read_bytes()[: BLOCK + 3])
    with pytest.raises(StageFormatError, match="ends before"):
        messages(source, manifest)


def test_a_block_that_arrives_after_closing_is_dropped(source: CheckpointFolder, tmp_path: Path) -> None:
    blocks = messages(source, checkpoint(source, 1, state()))
    receiver = Checkpoints(
        tmp_path / "checkpoints",
        tmp_path / "seed",
        node_file(0, stages=3),
        cast(StageExecution, None),
        lambda report: None,
        lambda checkpoint, seconds: None,
    )
    link = cast(Link, SimpleNamespace(peer=SimpleNamespace(stage=1, node=1)))
    assert receiver.on_message(link, blocks[0]) is None
    receiver.close()
    assert receiver.on_message(link, blocks[1]) is None
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []
