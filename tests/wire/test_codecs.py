"""Precision, sizes and error handling of the codecs; hostile payloads do no harm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import WireError
from ravnest.wire.codecs import BF16, CODECS, FP16, INT8, RAW, Codec, Encoded, ErrorFeedback, codec_named
from ravnest.wire.frames import Assembler, encode
from ravnest.wire.layout import DTYPES, TensorLayout, dense
from ravnest.wire.messages import Forward, Message, MicrobatchId

LOSSY: list[Codec] = [FP16, BF16, INT8]
BLOCK = 32
MIN_ELEMENTS = 128
HEAD = Forward("run", MicrobatchId(0, 0), 1)
SIZES = st.one_of(
    st.integers(0, 5 * MIN_ELEMENTS), st.sampled_from([127, 128, 129, 32_736, 32_737, 70_000])
)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
lossy = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
wide = st.sampled_from([torch.float32, torch.float64])


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def encoded(codec: Codec, tensor: torch.Tensor) -> Encoded:
    tensor = dense("x", tensor)
    made = codec.encode(tensor, layout_of(tensor))
    assert made.payload.dtype is torch.uint8
    assert len(made.payload) == codec_named(made.codec).nbytes(layout_of(tensor))
    return made


def through(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    layout = layout_of(dense("x", tensor))
    made = encoded(codec, tensor)
    result = codec_named(made.codec).decode(made.payload.clone(), layout)
    assert layout_of(result) == layout
    assert not result._is_view()
    return result


def random(count: int, seed: int, exponent: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of many magnitudes around a power of two."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**exponent
    return (numbers * 2 ** torch.randint(-6, 7, (count,), generator=generator)).to(dtype)


def steps(tensor: torch.Tensor) -> torch.Tensor:
    """Return the step of each element: its block's largest by 127, with the rounding of the scale."""
    blocks = tensor.abs().double().split(BLOCK)
    largest = [block.amax().clamp(min=2.0**-119).expand(len(block)) for block in blocks]
    return torch.cat(largest) / 127 * (1 + 2**-8)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(0, 10_000), st.integers(-6, 6), wide)
def test_fp16_keeps_eleven_bits(count: int, seed: int, exponent: int, dtype: torch.dtype) -> None:
    tensor = random(count, seed, exponent, dtype)
    error = (through(FP16, tensor) - tensor).abs()
    assert (error <= tensor.abs() * 2.0**-11 * (1 + 1e-6) + 2.0**-25).all()


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(0, 10_000), st.integers(-100, 100), wide)
def test_bf16_keeps_eight_bits(count: int, seed: int, exponent: int, dtype: torch.dtype) -> None:
    tensor = random(count, seed, exponent, dtype)
    error = (through(BF16, tensor) - tensor).abs()
    assert (error <= tensor.abs() * 2.0**-8).all()


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 10_000), st.integers(-130, 100), wide)
def test_int8_is_off_by_half_a_step(count: int, seed: int, exponent: int, dtype: torch.dtype) -> None:
    tensor = random(count, seed, exponent, dtype)
    error = (through(INT8, tensor) - tensor).abs()
    assert not count or (error <= steps(tensor) / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_encodes_16_bit_types_too(dtype: torch.dtype) -> None:
    tensor = random(1000, 0, 2, dtype)
    assert encoded(INT8, tensor).codec == "int8"
    error = (through(INT8, tensor).double() - tensor.double()).abs()
    assert (error <= steps(tensor) / 2 + tensor.abs().double() * torch.finfo(dtype).eps).all()


@lossy
@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 1000), st.integers(-120, 100), wide)
def test_encoding_twice_loses_nothing_more(
    codec: Codec, count: int, seed: int, exponent: int, dtype: torch.dtype
) -> None:
    once = through(codec, random(count, seed, exponent, dtype))
    assert through(codec, once).equal(once)


@every_codec
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (127,), (128,), (129,), (7, 1, 65)])
def test_any_shape_is_restored(codec: Codec, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 0.5)
    assert torch.allclose(through(codec, tensor), tensor, rtol=0.01)


@every_codec
def test_any_layout_is_restored(codec: Codec) -> None:
    image = torch.randn(4, 3, 8, 10)
    channels_last = image.to(memory_format=torch.channels_last)
    layouts = (channels_last, image.transpose(1, 3), image[:, :, ::2, 1:], image[1].expand(5, 3, 8, 10))
    for tensor in (*layouts, torch.randn(1, 500).as_strided((1, 500), (9999, 1)), image[2:, 1:]):
        assert torch.allclose(through(codec, tensor), tensor, rtol=0.01, atol=0.03)


@every_codec
def test_large_tensors_are_restored(codec: Codec) -> None:
    tensor = torch.randn(3_000_001)
    assert torch.allclose(through(codec, tensor), tensor, rtol=0.01, atol=0.03)


@lossy
def test_compression_ratio(codec: Codec) -> None:
    tensor = torch.randn(1 << 16)
    ratio = tensor.nbytes / len(encoded(codec, tensor).payload)
    assert ratio == pytest.approx(3.76 if codec is INT8 else 2.0, abs=0.01)


@lossy
@pytest.mark.parametrize("count", [200, 100_000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_kept(codec: Codec, count: int, value: float) -> None:
    tensor = torch.randn(count)
    tensor[17] = value
    result = through(codec, tensor)
    assert torch.allclose(result, tensor, rtol=0.01, atol=0.03, equal_nan=True)
    assert encoded(codec, tensor).clamped == 0
    assert encoded(codec, tensor).codec == ("raw" if codec is INT8 else codec.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_outside_the_range_are_clamped_and_counted(dtype: torch.dtype) -> None:
    tensor = torch.zeros(300, dtype=dtype)
    tensor[:5] = torch.tensor([1e5, -1e30, 65504, math.inf, math.nan])
    made = encoded(FP16, tensor)
    assert made.clamped == 2
    assert through(FP16, tensor)[:4].tolist() == [65504, -65504, 65504, math.inf]
    assert encoded(BF16, tensor).clamped == 0
    tensor[5] = torch.finfo(torch.float32).max
    assert encoded(BF16, tensor).clamped == 1
    assert through(BF16, tensor)[5] == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_int8_clamps_nothing(dtype: torch.dtype) -> None:
    tensor = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)
    assert encoded(INT8, tensor).codec == "raw"
    result = through(INT8, tensor * 0.98)
    assert result.isfinite().all()


@lossy
def test_tiny_numbers_are_nearly_exact(codec: Codec) -> None:
    tensor = torch.full((300,), 1e-42)
    result = through(codec, tensor)
    assert ((result - tensor).abs() <= 2e-38).all()
    assert through(codec, torch.zeros(300)).equal(torch.zeros(300))


@lossy
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_types_that_are_not_wider_are_encoded_as_raw(codec: Codec, dtype: torch.dtype) -> None:
    tensor = torch.ones(300).to(dtype)
    widths = {torch.float32, torch.float64} | (
        {torch.float16, torch.bfloat16} if codec is INT8 else set()
    )
    assert encoded(codec, tensor).codec == (codec.name if dtype in widths else "raw")
    if dtype not in widths:
        with pytest.raises(WireError, match="does not support"):
            codec.nbytes(layout_of(tensor))


@every_codec
def test_small_tensors_are_encoded_as_raw(codec: Codec) -> None:
    tensor = torch.randn(MIN_ELEMENTS - 1)
    assert encoded(codec, tensor).codec == "raw"
    assert through(codec, tensor).equal(tensor)


@every_codec
@pytest.mark.parametrize("more", [-1, 1, -100])
def test_a_payload_of_a_wrong_length_is_a_wire_error(codec: Codec, more: int) -> None:
    layout = TensorLayout(torch.float32, (20, 10), (10, 1))
    with pytest.raises(WireError, match="expected"):
        codec.decode(torch.zeros(codec.nbytes(layout) + more, dtype=torch.uint8), layout)


@every_codec
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 1000), wide)
def test_any_bytes_of_the_right_length_are_a_tensor(
    codec: Codec, count: int, seed: int, dtype: torch.dtype
) -> None:
    layout = TensorLayout(dtype, (count,), (1,))
    generator = torch.Generator().manual_seed(seed)
    size = (codec.nbytes(layout),)
    payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    assert layout_of(codec.decode(payload, layout)) == layout


def test_a_nan_scale_affects_its_block_only() -> None:
    layout = TensorLayout(torch.float32, (5 * BLOCK,), (1,))
    payload = encoded(INT8, torch.ones(5 * BLOCK)).payload
    payload[2:4].view(torch.bfloat16).fill_(math.nan)
    result = INT8.decode(payload, layout).view(5, BLOCK)
    assert result[1].isnan().all()
    assert result[::2].isfinite().all()


@lossy
def test_frames_name_the_codec_of_each_tensor(codec: Codec) -> None:
    values = {"x": torch.randn(40, 50), "ids": torch.arange(2000), "w": torch.randn(40, 50), "n": 3}
    clamped: list[int] = []
    message = Message(HEAD, values | {"big": torch.full((300,), 1e6)}, frozenset({"w"}))
    (frame,) = encode(message, codec, clamped=clamped.append)
    assembled = Assembler().feed(frame)
    assert assembled is not None
    assert isinstance(assembled.values["x"], torch.Tensor)
    assert isinstance(assembled.values["w"], torch.Tensor)
    assert isinstance(assembled.values["ids"], torch.Tensor)
    assert not assembled.values["x"].equal(values["x"])
    assert assembled.values["w"].equal(values["w"])
    assert assembled.values["ids"].equal(values["ids"])
    assert clamped == ([300] if codec is FP16 else [])


@lossy
def test_feedback_corrects_rounding_errors(codec: Codec) -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    feedback = ErrorFeedback(codec)
    received = torch.zeros(1000, dtype=torch.float64)
    for _ in range(50):
        sent = feedback.apply("x", exact)
        assert through(codec, sent).equal(sent)
        received += sent
    alone = 50 * (through(codec, exact) - exact).abs().max()
    assert (received - 50 * exact.double()).abs().max() < alone / 10


@every_codec
def test_feedback_is_by_name_and_recovers_from_nan(codec: Codec) -> None:
    tensor = torch.full((200,), 0.3)
    feedback = ErrorFeedback(codec)
    first = feedback.apply("x", tensor)
    assert feedback.apply("y", tensor).equal(first)
    faulty = tensor.clone()
    faulty[0] = math.nan
    faulty[1] = math.inf
    assert feedback.apply("x", faulty)[0].isnan()
    assert feedback.apply("x", tensor).isfinite().all()
    assert RAW.encode(tensor, layout_of(tensor)).payload.data_ptr() == tensor.data_ptr()
