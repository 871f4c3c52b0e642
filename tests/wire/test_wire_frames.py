"""Encoding of messages as frames: exact round trips, and rejection of invalid data."""

import contextlib
import math
import struct
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ravnest.errors import WireError
from ravnest.types import CheckpointId, MicrobatchId, is_dense
from ravnest.wire import envelope
from ravnest.wire.codecs import CODECS
from ravnest.wire.control import Ack, Closing, Control, Echo, Probe, decode_control, encode_control
from ravnest.wire.envelope import Kind, seal, split, unseal
from ravnest.wire.frames import CHUNK_BYTES, INLINE_BYTES, Assembler, encode, largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.layout import DTYPES
from ravnest.wire.messages import (
    PROTOCOL,
    Abort,
    AnyHead,
    Backward,
    CallEnd,
    CheckpointWanted,
    ClipNorm,
    Forward,
    ForwardChallenge,
    ForwardResult,
    Goodbye,
    GradientNorms,
    HeldCheckpoint,
    Hello,
    HelloRefused,
    LossSplit,
    Message,
    PhaseBegin,
    PhaseEnd,
    ReplicaStored,
    ResumeFrom,
    ResumeOffer,
    RunEnd,
    SaveStage,
    SharedGradients,
    SharedWeights,
    StageSaved,
    StageTiming,
    StateBlock,
    StateLoaded,
    TakeCheckpoint,
    ValidationResult,
    Value,
)

MICROBATCH = MicrobatchId(3, 7)
HEAD = Forward("run", MICROBATCH, 32, 1, 4, False, {"targets": "abc"})
HEADS: list[AnyHead] = [
    Hello(PROTOCOL, "plan", 3, 1, 2, "run", {"schedule": "sync"}, "fp16"),
    HelloRefused("another plan"),
    HEAD,
    Backward(
        "run",
        MICROBATCH,
        (StageTiming(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),),
        0.25,
    ),
    Backward("run", MICROBATCH),
    SharedGradients("run", 4),
    SharedWeights("run", MICROBATCH),
    GradientNorms("run", 4, ((0, 1.0), (3, math.inf))),
    LossSplit(True, "samples", 2),
    ClipNorm(5, 1.5),
    PhaseBegin("run", 1, "validate", 0),
    PhaseEnd("run", 1, 12, True),
    ForwardResult("run", MICROBATCH),
    ValidationResult("run", 1, "accuracy", 0.5, 100),
    SaveStage("run"),
    StageSaved("run", 1, '{"a": 1}'),
    CallEnd("run", "train", 1),
    TakeCheckpoint("run", 3),
    ResumeOffer({0: (HeldCheckpoint("run", CheckpointId(3, 1), 0),)}, "run", lost="node_1 was lost"),
    ResumeFrom("run", CheckpointId(3, 1), {1: 0}, 1),
    StateLoaded(),
    StateBlock(1, CheckpointId(3, 1), 0, "{}", CheckpointId(2, 0), 5, is_last=True),
    ReplicaStored(1, CheckpointId(3, 1), "the disk is full"),
    CheckpointWanted(2),
    ForwardChallenge("run", MICROBATCH, "0a1b"),
    RunEnd("run"),
    Goodbye(1),
    Abort(1, "out of memory"),
]


def through(message: Message, chunk: int = CHUNK_BYTES, limits: Limits | None = None) -> Message:
    assembler = Assembler(limits or Limits())
    *first, last = encode(message, chunk=chunk)
    assert all(assembler.feed(frame) is None for frame in first)
    result = assembler.feed(last)
    assert result is not None
    return result


def sent(**values: Value) -> dict[str, Value]:
    return dict(through(Message(HEAD, values)).values)


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor; NaN != NaN, and not every dtype can be compared."""
    flat = tensor.contiguous().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def assert_same(left: Value, right: Value) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert bits(left) == bits(right)
    else:
        assert left == right or (left != left and right != right)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_head_round_trips(head: AnyHead) -> None:
    assert through(Message(head)) == Message(head, {})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_round_trips(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (48 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(3, 16) if dtype != torch.bool else (raw % 2).bool().view(3, 16)
    assert_same(sent(x=tensor)["x"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 4).t(),
        torch.randn(3, 1, 4).transpose(0, 1),
        torch.tensor(3.5),
        torch.tensor(7),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0, 3).t(),
        torch.randn(1, 1),
        torch.randn(1).expand(1, 1, 1),
        torch.randn(INLINE_BYTES // 4),
        torch.randn(INLINE_BYTES // 4 + 1),
        torch.randn(700, 700).t(),
    ],
    ids=lambda t: f"{list(t.shape)} {list(t.stride())}",
)
def test_dense_tensors_keep_their_strides(tensor: torch.Tensor) -> None:
    assert_same(sent(x=tensor)["x"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 8)[:, ::2],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(9)[1::3],
        torch.randn(6, 6)[2:4, 1:3],
    ],
)
def test_tensors_with_gaps_arrive_contiguous(tensor: torch.Tensor) -> None:
    assert_same(sent(x=tensor)["x"], tensor.contiguous())


def test_a_slice_sends_only_its_own_bytes() -> None:
    (frame,) = encode(Message(HEAD, {"x": torch.randn(1000, 100)[10:12]}))
    assert len(frame) < 1500


def test_autograd_history_is_not_sent() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    values = sent(
        parameter=weight, result=weight * 2, conjugate=torch.randn(3, dtype=torch.cfloat).conj()
    )
    for value in values.values():
        assert isinstance(value, torch.Tensor)
        assert type(value) is torch.Tensor
        assert not value.requires_grad
        assert value.is_leaf
        assert not value._is_view()
        assert not value.is_conj()


def test_received_tensors_are_aligned_and_writable() -> None:
    values = sent(a=torch.randn(3), b=torch.randn(5, dtype=torch.float64), c=torch.randn(400_000))
    for value in values.values():
        assert isinstance(value, torch.Tensor)
        assert value.data_ptr() % 64 == 0
        value.add_(1)


def test_numbers_stay_numbers_and_the_order_is_kept() -> None:
    values = sent(z=3, a=1.5, m=torch.ones(2), b=True, n=-(2**63), i=math.inf)
    assert list(values) == ["z", "a", "m", "b", "n", "i"]
    assert [type(v) for v in values.values()] == [int, float, torch.Tensor, bool, int, float]
    assert math.isnan(float(sent(x=math.nan)["x"]))


def test_many_values_share_chunks() -> None:
    values: dict[str, Value] = {f"v{i}": torch.full((i,), float(i)) for i in range(3000)}
    message = Message(HEAD, values)
    frames = list(encode(message))
    assert len(frames) == 1 + math.ceil(sum(4 * i for i in range(3000)) / CHUNK_BYTES)
    result = through(message)
    for name, value in values.items():
        assert_same(result.values[name], value)


def test_chunks_have_the_given_size() -> None:
    opening, *chunks = encode(Message(HEAD, {"x": torch.randn(100_000)}), chunk=100_000)
    assert len(opening) < 300
    assert [len(chunk) - envelope.SIZE for chunk in chunks] == [100_000] * 4


shapes = st.lists(st.integers(0, 5), max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    tensor = torch.randint(0, 2, draw(shapes)).to(dtype)
    if tensor.dim():
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if draw(st.booleans()):
            tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=20), st.one_of(tensors(), st.integers(-(2**63), 2**63 - 1), st.floats())
    ),
    st.integers(1, 500),
)
def test_any_message_round_trips(values: dict[str, Value], chunk: int) -> None:
    result = through(Message(HEAD, values), chunk=chunk)
    assert list(result.values) == list(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not is_dense(value.shape, value.stride()):
            value = value.contiguous()  # noqa: PLW2901
        assert_same(result.values[name], value)


# Invalid data

FRAMES = list(
    encode(
        Message(HEAD, {"x": torch.randn(100, 1000), "n": 3, "y": torch.randn(4, 5).t()}), chunk=150_000
    )
)
SMALL = next(iter(encode(Message(HEAD, {"x": torch.randn(3, 4), "n": 3}))))


@pytest.mark.parametrize("cut", [0, 1, 15, 23, 24, 40, len(SMALL) - 1])
def test_a_truncated_frame_is_refused(cut: int) -> None:
    with pytest.raises(WireError, match=r"truncated|announces"):
        Assembler().feed(SMALL[:cut])


def test_a_frame_with_extra_bytes_is_refused() -> None:
    with pytest.raises(WireError, match="announces"):
        Assembler().feed(SMALL + b"\0")


def test_a_flipped_bit_anywhere_is_refused() -> None:
    for position in range(len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[position] ^= 1
        with pytest.raises(WireError):
            Assembler().feed(bytes(damaged))


def test_another_format_version_is_named() -> None:
    damaged = SMALL[:4] + bytes([envelope.VERSION + 1]) + SMALL[5:]
    with pytest.raises(WireError, match=f"format version {envelope.VERSION + 1}"):
        Assembler().feed(damaged)


def test_other_data_is_not_a_frame() -> None:
    with pytest.raises(WireError, match="not a Ravnest frame"):
        Assembler().feed(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")


def test_chunks_out_of_order_are_refused() -> None:
    opening, first, second, *_ = FRAMES
    for wrong, message in [
        ([first], "outside a message"),
        ([opening, second], "chunk 1 arrived, expected chunk 0"),
        ([opening, first, first], "chunk 0 arrived, expected chunk 1"),
        ([opening, opening], "before the previous one is complete"),
        ([opening, first, opening], "before the previous one is complete"),
    ]:
        assembler = Assembler()
        for frame in wrong[:-1]:
            assembler.feed(frame)
        with pytest.raises(WireError, match=message):
            assembler.feed(wrong[-1])


def test_a_chunk_too_long_is_refused() -> None:
    assembler = Assembler()
    for frame in FRAMES[:-1]:
        assembler.feed(frame)
    with pytest.raises(WireError, match=r"bytes arrived, but .* are missing"):
        assembler.feed(b"".join(seal(Kind.CHUNK, len(FRAMES) - 2, [b"x" * 200_000])))


def test_a_control_frame_is_not_part_of_a_message() -> None:
    with pytest.raises(WireError, match="cannot be part of a message"):
        Assembler().feed(b"".join(encode_control(Probe(1))))


def forged(
    table: list[Any], nbytes: int, inline: bool = True, payload: bytes = b"", head: Any = None
) -> bytes:
    """Return a frame with a valid format and an arbitrary table."""
    head = head or {"type": "Goodbye", "node": 1}
    opening = msgspec.msgpack.encode([head, table, nbytes, inline])
    return b"".join(seal(Kind.OPENING, 0, [struct.pack("<I", len(opening)), opening, payload]))


def tensor(**changes: Any) -> list[Any]:
    entry = {
        "tag": 0,
        "name": "x",
        "dtype": "float32",
        "shape": [2, 2],
        "strides": None,
        "codec": "raw",
        "offset": 0,
        "nbytes": 16,
    }
    return list((entry | changes).values())


def test_a_forged_frame_with_a_valid_table_is_accepted() -> None:
    message = Assembler().feed(forged([tensor()], 16, payload=bytes(16)))
    assert message is not None
    assert message.head == Goodbye(1)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (forged([tensor(nbytes=12)], 12, payload=bytes(12)), "its shape needs 16"),
        (forged([tensor(shape=[2**40, 2**40])], 16), "invalid shape"),
        (forged([tensor(shape=[2**40, 2**40], nbytes=2**63 - 1)], 2**63 - 1, False), "invalid shape"),
        (forged([tensor(shape=[-2, -2])], 16), "invalid shape"),
        (forged([tensor(shape=[2**33], nbytes=2**35)], 2**35, False), "exceed the limit"),
        (forged([tensor(shape=[2**40, 2**40, 0], nbytes=0)], 0), "invalid shape"),
        (forged([tensor(shape=[1] * 65, nbytes=4)], 4), "65 dimensions"),
        (forged([tensor(strides=[0, 1])], 16), "do not fit"),
        (forged([tensor(strides=[-2, 1])], 16), "do not fit"),
        (forged([tensor(strides=[1, 1])], 16), "do not fit"),
        (forged([tensor(strides=[2])], 16), "do not fit"),
        (forged([tensor(shape=[1, 4], strides=[2**60, 1])], 16), "invalid strides"),
        (forged([tensor(shape=[0, 4], strides=[-1, 1], nbytes=0)], 0), "invalid strides"),
        (forged([tensor(dtype="object")], 16), "unknown dtype"),
        (forged([tensor(dtype="qint8")], 16), "unknown dtype"),
        (forged([tensor(codec="zip")], 16), "unknown codec"),
        (forged([tensor(offset=4)], 16), "has offset 4"),
        (forged([tensor(), tensor(offset=16)], 32), "two values have the name"),
        (forged([tensor(name="n" * 2000)], 16), "a name of 2000 characters"),
        (forged([tensor()], 20, payload=bytes(20)), "announces 20 bytes, but its tensors have 16"),
        (forged([tensor()], 16, payload=bytes(15)), "15 bytes arrived, but 16"),
        (forged([tensor()], 16, payload=bytes(17)), "17 bytes arrived, but 16"),
        (forged([tensor()], 16, False, payload=bytes(16)), "announces chunks"),
        (forged([], 0, False), "announces chunks"),
        (forged([[1, "n", "text"]], 0), "malformed"),
        (forged([[2, "n", 1]], 0), "malformed"),
        (forged([[1, "n", 1, 1]], 0), "malformed"),
        (forged([], 0, head={"type": "Nothing"}), "malformed"),
        (forged([], 0, head={"type": "Goodbye"}), "malformed"),
        (forged([], 0, head={"type": "Goodbye", "node": "1"}), "malformed"),
        (forged([], 0, head={"type": "Goodbye", "node": 1, "more": 1}), "malformed"),
        (b"".join(seal(Kind.OPENING, 0, [b"\1"])), "truncated"),
        (
            b"".join(seal(Kind.OPENING, 0, [struct.pack("<I", 2**31), b"x"])),
            "exceeds the limit or is truncated",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_table_is_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        Assembler().feed(frame)


def test_limits_are_checked_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    limits = Limits(max_message_bytes=1000, max_values=2, max_opening_bytes=500)
    for table, nbytes, reason in [
        ([tensor(shape=[251], nbytes=1004)], 1004, "exceed the limit of 1000"),
        (
            [tensor(shape=[200], nbytes=800), tensor(name="y", shape=[51], nbytes=204, offset=800)],
            1004,
            "exceed the limit of 1000",
        ),
        ([[1, str(i), i] for i in range(3)], 0, "3 values"),
        ([tensor(name="n" * 600)], 16, "a head of"),
    ]:
        with pytest.raises(WireError, match=reason):
            Assembler(limits).feed(forged(table, nbytes, False))
    with pytest.raises(WireError, match="larger than the limit"):
        Assembler(limits).feed(bytes(largest_frame(limits) + 1))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(3).to_sparse(), "only dense tensors"),
        (torch.empty(3, device="meta"), "no values"),
        (2**64, "cannot be encoded"),
        ("text", "cannot be encoded|malformed"),
    ],
)
def test_unsupported_values_are_not_sent(value: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        through(Message(HEAD, {"x": value}))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_damage_is_a_wire_error_or_harmless(data: st.DataObject) -> None:
    """The checksum is valid again, as a hostile peer could send it."""
    frames = [bytearray(frame) for frame in FRAMES]
    frame = frames[data.draw(st.integers(0, len(frames) - 1))]
    for _ in range(data.draw(st.integers(1, 6))):
        reach = min(len(frame), 400)
        match data.draw(st.sampled_from(["set", "delete", "insert"])):
            case "set":
                frame[data.draw(st.integers(0, reach - 1))] = data.draw(st.integers(0, 255))
            case "delete":
                del frame[data.draw(st.integers(0, reach - 1))]
            case "insert":
                frame.insert(data.draw(st.integers(0, reach)), data.draw(st.integers(0, 255)))
    repaired = bytes(frame[:12]) + struct.pack("<I", len(frame) - envelope.SIZE) + bytes(frame[16:])
    checksum = xxhash.xxh3_64(repaired[:16] + repaired[24:]).intdigest()
    frame[:] = repaired[:16] + struct.pack("<Q", checksum) + repaired[24:]
    assembler = Assembler(Limits(max_message_bytes=1 << 20))
    with contextlib.suppress(WireError):
        for each in frames:
            assembler.feed(bytes(each))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_a_wire_error(noise: bytes) -> None:
    for data in (noise, b"".join(seal(Kind.OPENING, 0, [noise]))):
        with pytest.raises(WireError):
            Assembler().feed(data)


# Batches of frames and control frames


def test_a_batch_splits_into_its_frames() -> None:
    assert [bytes(part) for part in split(b"".join(FRAMES))] == FRAMES
    assert list(split(b"")) == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_splitting_terminates_and_keeps_every_byte(noise: bytes) -> None:
    assert b"".join(split(noise)) == noise


@pytest.mark.parametrize("control", [Probe(3), Echo(2**40), Ack(7, 0.25), Closing()])
def test_control_frames_round_trip(control: Control) -> None:
    assert decode_control(unseal(b"".join(encode_control(control)), 100)) == control


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=20))
def test_a_malformed_control_is_a_wire_error(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_control(unseal(b"".join(seal(Kind.CONTROL, 0, [noise])), 100))


def test_codecs_have_their_names_on_the_wire() -> None:
    assert all(codec.name == name for name, codec in CODECS.items())
