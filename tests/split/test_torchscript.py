"""A converted TorchScript module exports to a program with bitwise equal outputs and gradients."""

import copy
import enum
import inspect
import io
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from ravnest.errors import CaptureError
from ravnest.split.torchscript import from_torchscript

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

BATCH, OTHER_BATCH = 4, 3


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.features(x)).mean((2, 3)))


class Looping(Base):
    def forward(self, x: Tensor) -> Tensor:
        step = 0
        while step < 6:
            step += 1
            if step == 2:
                continue
            if step == 4:
                break
            x = torch.tanh(self.layer(x)) * step
        for i in range(x.shape[1] // 2):
            x = x + x[:, i : i + 1]
        return x


class ModeDependent(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).abs().mean()
        if self.training:
            return self.layer(x) / scale
        return self.layer(x)


class Optionals(Base):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, power: int = 2, kind: str = "relu"
    ) -> Tensor:
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if kind == "relu":
            x = torch.relu(x)
        return self.layer(x) ** power


class Containers(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts: list[Tensor] = []
        for part in x.split([1, 3], dim=1):
            parts.append(part * len(parts))
        sizes = [x.size(0), 4]
        sizes.extend([1])
        found: dict[str, Tensor] = {}
        found["parts"] = torch.cat(parts[::-1], 1).view(sizes)
        found["logits"] = self.layer(x)
        for name, value in found.items():
            found[name + "_sum"] = value.sum()
        return found


class Pair(NamedTuple):
    logits: Tensor
    hidden: tuple[Tensor, int]


class NamedOutput(Base):
    def forward(self, x: Tensor) -> Pair:
        hidden = self.layer(x)
        return Pair(torch.relu(hidden), (hidden, 3))


class TupleOutput(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        first, second = self.layer(x).chunk(2, dim=1)
        return first, [second, first + second]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layer.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.layer(self.embed(tokens) + positions[:, None]))


class Counting(Base):
    """Writes one buffer in place, assigns another, and has a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("before", torch.zeros(4))
        self.plain = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            last = self.mean
            self.mean = last * 0.9 + x.detach().mean(0)
            self.before = last
        return self.layer(x) - self.mean + self.before * self.calls + self.plain


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@torch.jit.interface
class Layer(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        pass


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            layer: Layer = self.layers[i]
            x = layer.forward(x)
        return x


def doubled(x: Tensor, times: int) -> Tensor:
    return x * times


class Forked(Base):
    def forward(self, x: Tensor) -> Tensor:
        future = torch.jit.fork(doubled, self.layer(x), 3)
        return torch.jit.wait(future) + x


class Sizes(Base):
    """Arithmetic on sizes, which a trace records as zero-dimensional tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, width = x.size(0), x.size(1)
        grid = self.layer(x).view(batch * 2, width // 2)
        mean = x.sum(0) / batch
        tail = x[:, -(width % 3) :]
        return grid.reshape(-1, width), mean + width, tail


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@torch.jit.script
class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


class Language(Base):
    """Language features of TorchScript: classes, enums, strings, numbers, lists."""

    def forward(self, x: Tensor, color: Color = Color.BLUE) -> tuple[Tensor, Tensor, Tensor]:
        counter = Counter(3)
        counter.add(len(f"{color.name}{color.value}"))
        rows, columns = x.shape
        numbers = [columns * 2, 5, max(rows, 1) // 1000]
        numbers.sort()
        numbers.insert(0, numbers.pop())
        numbers += [min(columns, 3), int(2.4)]
        scale = math.sqrt(float(sum(numbers[1:4]))) + rows / 2 + math.ceil(columns / 3)
        text = "nothing".upper()[:2]
        found = {"a": 1, "b": 2}
        if "b" in found and text == "NO" and color == Color.BLUE:
            scale = scale * found.get("b", 7)
        filled = torch.zeros(rows, columns, dtype=x.dtype, device=x.device)
        filled[:, 1:3] = 2.0
        filled[:, torch.tensor([0, 3])] += torch.tensor(rows)
        order = torch.arange(rows, device=x.device).unsqueeze(1).to(x.dtype)
        return self.layer(x) * scale, filled * counter.value, (order + x.T.mT).to(torch.float64)


def maybe_double(x: Tensor | int) -> Tensor:
    if isinstance(x, int):
        return torch.full((1, 4), x * 2.0)
    return x * 2


class Unions(Base):
    def forward(self, x: Tensor) -> Tensor:
        return maybe_double(self.layer(x)) + maybe_double(x.size(1))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 6, 6)


def rows(batch: int) -> Tensor:
    return torch.randn(batch, 4)


def sequences(batch: int) -> Tensor:
    return torch.randn(batch, 5, 4)


def tokens(batch: int) -> Tensor:
    return torch.randint(0, 11, (batch, 5))


Sample = Callable[[int], Tensor]

SCRIPTED: dict[str, tuple[Callable[[], nn.Module], Sample]] = {
    "cnn": (ConvNet, images),
    "loops": (Looping, rows),
    "mode": (ModeDependent, rows),
    "optionals": (Optionals, rows),
    "containers": (Containers, rows),
    "namedtuple": (NamedOutput, rows),
    "tuple": (TupleOutput, rows),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences),
    "gru": (lambda: Recurrent(nn.GRU), sequences),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), sequences),
    "tied": (Tied, tokens),
    "buffers": (Counting, rows),
    "nested buffers": (Outer, rows),
    "interface": (Indexed, rows),
    "fork": (Forked, rows),
    "sizes": (Sizes, rows),
    "language": (Language, rows),
    "unions": (Unions, rows),
}

TRACED: dict[str, tuple[Callable[[], nn.Module], Sample]] = {
    "cnn": (ConvNet, images),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences),
    "tied": (Tied, tokens),
    "sizes": (Sizes, rows),
}


def reloaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def exported(module: nn.Module, sample: Tensor) -> ExportedProgram:
    (name,) = list(inspect.signature(module.forward).parameters)[:1]
    return torch.export.export(module, (sample,), dynamic_shapes={name: {0: Dim.AUTO}}, strict=False)


def run(module: Callable[..., Any], sample: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the output for a fixed seed, after the backward of a weighted sum of it."""
    torch.manual_seed(7)
    with torch.jit.optimized_execution(False):  # else the JIT draws dropout masks differently
        output = module(sample)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    sum((leaf * torch.randn(leaf.shape)).sum() for leaf in leaves).backward()
    return output, leaves


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(value, other), name


def assert_exports_equal(script: torch.jit.ScriptModule, make_sample: Sample) -> None:
    original = reloaded(script)
    converted = from_torchscript(script)
    assert list(converted.state_dict()) == list(original.state_dict())
    state = copy.deepcopy(original.state_dict())
    for training in (True, False):
        original.train(training)
        converted.train(training)
        program = exported(converted, make_sample(BATCH)).module()
        for sample in (make_sample(BATCH), make_sample(OTHER_BATCH)):
            original.load_state_dict(state)
            program.load_state_dict(state)
            original.zero_grad()
            program.zero_grad()
            _, expected = run(original, sample)
            _, got = run(program, sample)
            assert all(map(torch.equal, expected, got))
            assert len(expected) == len(got)
            named = gradients(program)
            assert_same({name: gradients(original)[name] for name in named}, named)
            assert_same(dict(original.state_dict()), dict(program.state_dict()))


LOADED = ("language", "lstm", "nested buffers", "tied")
"""Models that differ most after loading from a file; the others run loaded in the full suite only."""


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        *((name, False) for name in SCRIPTED),
        *(
            pytest.param(name, True, marks=[] if name in LOADED else [pytest.mark.full])
            for name in SCRIPTED
        ),
    ],
)
def test_a_scripted_module_exports_to_an_equal_program(name: str, saved: bool) -> None:
    torch.manual_seed(1)
    make, make_sample = SCRIPTED[name]
    script = torch.jit.script(make())
    assert_exports_equal(reloaded(script) if saved else script, make_sample)


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("saved", [False, True], ids=["fresh", "loaded"])
def test_a_traced_module_exports_to_an_equal_program(name: str, saved: bool) -> None:
    torch.manual_seed(1)
    make, make_sample = TRACED[name]
    trace = torch.jit.trace(make(), make_sample(BATCH), check_trace=False)
    assert_exports_equal(reloaded(trace) if saved else trace, make_sample)


def test_the_output_keeps_its_structure() -> None:
    x = rows(BATCH)
    named = from_torchscript(reloaded(torch.jit.script(NamedOutput())))(x)
    assert type(named).__name__ == "Pair"
    assert named._fields == ("logits", "hidden")
    assert named.hidden[1] == 3
    assert list(from_torchscript(torch.jit.script(Containers()))(x)) == [
        *("parts", "logits", "parts_sum", "logits_sum")
    ]
    first, rest = from_torchscript(torch.jit.script(TupleOutput()))(x)
    assert isinstance(first, Tensor)
    assert len(rest) == 2


def test_arguments_follow_the_schema() -> None:
    script = torch.jit.script(Optionals())
    converted = from_torchscript(script)
    x = rows(BATCH)
    mask = x > 0
    assert list(inspect.signature(converted.forward).parameters) == ["x", "mask", "power", "kind"]
    for args, kwargs in [
        ((x,), {}),
        ((x, mask), {"power": 3}),
        ((), {"x": x, "kind": "none", "mask": mask}),
    ]:
        assert torch.equal(script(*args, **kwargs), converted(*args, **kwargs))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        converted()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        converted(x, y=1)


def test_optional_argument_exports() -> None:
    script = torch.jit.script(Optionals())
    x = rows(BATCH)
    shapes = {"x": {0: Dim.AUTO}, "mask": {0: Dim.AUTO}}
    program = torch.export.export(
        from_torchscript(script), (x,), {"mask": x > 0}, dynamic_shapes=shapes, strict=False
    )
    other = rows(OTHER_BATCH)
    assert torch.equal(program.module()(other, mask=other > 1), script(other, other > 1))


@pytest.mark.parametrize("saved", [False, True], ids=["fresh", "loaded"])
def test_tensors_are_shared_and_ties_kept(saved: bool) -> None:
    fresh = torch.jit.script(Tied())
    script = reloaded(fresh) if saved else fresh
    converted = from_torchscript(script)
    assert converted.head.weight is converted.embed.weight
    assert isinstance(converted.embed.weight, nn.Parameter)
    assert [name for name, _ in converted.named_parameters()] == [
        *("embed.weight", "layer.weight", "layer.bias")
    ]
    assert not converted.layer.bias.requires_grad
    assert converted.layer.weight.requires_grad
    for name, tensor in script.state_dict().items():
        assert converted.state_dict()[name].data_ptr() == tensor.data_ptr()
    with torch.no_grad():
        converted.embed.weight.add_(1)
    assert torch.equal(script.state_dict()["head.weight"], converted.embed.weight)


def test_a_non_persistent_buffer_is_saved_as_in_the_script() -> None:
    class Hidden(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("hidden", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.hidden

    script = torch.jit.script(Hidden())
    assert list(script.state_dict()) == ["hidden", "layer.weight", "layer.bias"]
    assert list(from_torchscript(script).state_dict()) == list(script.state_dict())


def test_submodules_in_eval_mode_stay_in_eval_mode() -> None:
    model = ConvNet()
    model.features[1].eval()
    converted = from_torchscript(torch.jit.script(model))
    assert converted.training
    assert converted.drop.training
    assert not converted.get_submodule("features.1").training


def test_a_moved_module_reads_its_own_weights() -> None:
    converted = from_torchscript(torch.jit.script(Recurrent(nn.LSTM))).double()
    program = exported(converted, sequences(BATCH).double())
    assert not program.graph_signature.lifted_tensor_constants
    assert len(program.graph_signature.parameters) == 10


def test_a_copy_has_its_own_tensors() -> None:
    converted = from_torchscript(torch.jit.script(Recurrent(nn.LSTM))).eval()
    twin = copy.deepcopy(converted)
    x = sequences(BATCH)
    before = converted(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(converted(x), before)
    assert not twin(x).any()


def test_a_constant_tensor_keeps_its_name() -> None:
    program = exported(from_torchscript(torch.jit.script(Counting())), rows(BATCH))
    assert program.graph_signature.lifted_tensor_constants == ("plain",)


@pytest.mark.parametrize("saved", [False, True], ids=["fresh", "loaded"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_traced_module_warns_that_its_mode_is_fixed(
    training: bool, saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trace = torch.jit.trace(ConvNet().train(training), images(BATCH), check_trace=False)
    with caplog.at_level(logging.WARNING, "ravnest"):
        from_torchscript(reloaded(trace) if saved else trace)
    (record,) = caplog.records
    assert record.name.startswith("ravnest")
    message = record.getMessage()
    assert f"{'training' if training else 'evaluation'} mode" in message
    assert "torch.jit.script" in message
    assert "test_torchscript.py" in message


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_module_does_not_warn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ravnest"):
        from_torchscript(reloaded(torch.jit.script(SCRIPTED[name][0]())))
    assert not caplog.records


class DataDependentIf(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            return self.layer(x)
        return x


class DataDependentLoop(Base):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() < 10:  # the line
            x = x + self.layer(x).abs()
        return x


class DataDependentSize(Base):
    def forward(self, x: Tensor) -> Tensor:
        positive = x[x > 0]
        if positive.shape[0] > 2:  # the line
            return self.layer(x)
        return x


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.max())  # the line
        return self.layer(x) * scale


class Remembering(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # the line
        return self.layer(x)


class Growing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])  # the line
        return self.layer(x)


class Autocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):  # the line
            return self.layer(x)


class Ignoring(Base):
    @torch.jit.ignore
    def in_python(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.in_python(x))  # the line


class Asserting(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 7, "seven columns"  # the line
        return self.layer(x)


class BadShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(3, 5)  # the line


class Pickling(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.save(x, "/tmp/never-written")  # the line
        return self.layer(x)


REJECTED: dict[type[nn.Module], str] = {
    DataDependentIf: "torch.where",
    DataDependentLoop: "torch.where",
    DataDependentSize: "torch.where",
    Item: "torch.where",
    Remembering: "register_buffer",
    Growing: "shape and dtype",
    Autocast: "autocast",
    Ignoring: "torch.jit.ignore",
    Asserting: "seven columns",
    BadShape: "aten::view",
    Pickling: "aten::save",
}


@pytest.mark.parametrize("kind", REJECTED, ids=lambda kind: kind.__name__)
def test_the_error_names_the_line_and_the_remedy(kind: type[nn.Module]) -> None:
    lines, start = inspect.getsourcelines(kind)
    number = next(i for i, line in enumerate(lines, start) if "# the line" in line)
    converted = from_torchscript(torch.jit.script(kind()))
    with pytest.raises(CaptureError) as error:
        exported(converted, rows(BATCH))
    message = str(error.value)
    assert f"test_torchscript.py:{number}: " in message
    assert lines[number - start].split("#")[0].strip() in message
    assert REJECTED[kind] in message


def test_the_error_of_a_loaded_module_names_the_original_line() -> None:
    converted = from_torchscript(reloaded(torch.jit.script(DataDependentIf())))
    with pytest.raises(CaptureError, match=r"test_torchscript\.py:\d+: if x\.sum\(\) > 0"):
        exported(converted, rows(BATCH))


def test_a_list_that_forward_changes_is_rejected() -> None:
    class Collecting(Base):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = [4]

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(x.shape[1])
            return self.layer(x) * len(self.sizes)

    converted = from_torchscript(torch.jit.script(Collecting()))
    with pytest.raises(CaptureError, match=r"list self\.sizes of Collecting in place"):
        exported(converted, rows(BATCH))


def test_a_failed_forward_assigns_no_buffer() -> None:
    class FailsLater(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            mean = self.mean
            self.mean = x.mean(0)
            assert x.shape[0] > 1
            return self.layer(x) - mean

    converted = from_torchscript(torch.jit.script(FailsLater()))
    with pytest.raises(CaptureError):
        converted(rows(1))
    assert not converted.mean.any()
    x = rows(BATCH)
    converted(x)
    assert torch.equal(converted.mean, x.mean(0))


def test_a_failed_forward_leaves_gradients_enabled() -> None:
    class FailsInside(Base):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                assert x.shape[0] > 1
            return self.layer(x)

    with pytest.raises(CaptureError):
        from_torchscript(torch.jit.script(FailsInside()))(rows(1))
    assert torch.is_grad_enabled()


def test_a_module_without_forward_is_rejected() -> None:
    with pytest.raises(CaptureError, match="no method forward"):
        from_torchscript(torch.jit.script(nn.LSTM(3, 4)))


def test_a_frozen_module_is_rejected() -> None:
    frozen = torch.jit.freeze(torch.jit.script(ConvNet().eval()))
    with pytest.raises(CaptureError, match=r"torch\.jit\.freeze"):
        from_torchscript(frozen)


def double_output(module: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("saved", [False, True], ids=["fresh", "loaded"])
def test_a_hook_of_the_outermost_module_is_rejected(saved: bool) -> None:
    model = ConvNet()
    model.register_forward_hook(double_output)
    script = torch.jit.script(model)
    with pytest.raises(CaptureError, match="hooks"):
        from_torchscript(reloaded(script) if saved else script)


def test_a_hook_of_an_inner_module_is_kept() -> None:
    model = ConvNet().eval()
    model.head.register_forward_hook(double_output)
    script = torch.jit.script(model)
    x = images(BATCH)
    assert torch.equal(from_torchscript(script)(x), script(x))
