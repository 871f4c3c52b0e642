"""Small models, each with one pattern of user code that is difficult for a splitter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from zoo_models.registry import BATCH, Example, ZooModel, entry, image, tokens
from zoo_models.vision import torchvision_models
from zoo_models.written import MLP

MODELS: list[ZooModel] = []


def features(width: int = 8) -> Tensor:
    """Return a batch of vectors."""
    return torch.randn(BATCH, width)


class Layers(nn.Module):
    """Base class of most models here: three linear layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one = nn.Linear(width, 16)
        self.two = nn.Linear(16, 16)
        self.three = nn.Linear(16, 4)


# Inputs and outputs


@dataclass
class Prediction:
    """An output class that torch does not know."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "unscaled"
    loss: Tensor | None = None


class Scored(NamedTuple):
    """A named tuple as output."""

    score: Tensor
    hidden: Tensor


class DataclassOutput(Layers):
    def forward(self, x: Tensor) -> Prediction:
        a = self.one(x).relu()
        b = self.two(a).relu()
        return Prediction(self.three(b), hidden=(a, b))


class NamedTupleOutput(Layers):
    def forward(self, x: Tensor) -> Scored:
        hidden = self.two(self.one(x).relu()).relu()
        return Scored(self.three(hidden), hidden)


class NestedOutput(Layers):
    def forward(self, x: Tensor) -> dict[str, Any]:
        a = self.one(x).relu()
        b = self.two(a).relu()
        return {
            "logits": self.three(b),
            "hidden": [a, (b, {"mean": b.mean()})],
            "step": 3,
            "kind": "nested",
            "nothing": None,
        }


class KeywordOnly(Layers):
    def forward(self, *, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.three(self.two(self.one(left).relu()) * scale + self.one(right))


class NestedInput(Layers):
    def forward(self, batch: dict[str, Any], bias: Tensor | None = None) -> Tensor:
        first, (second, third) = batch["pair"], batch["rest"]
        x = self.two(self.one(first).relu() + self.one(second))
        x = x if bias is None else x + bias
        return self.three(x) * third[:, None]


class IntegerInputs(Layers):
    def __init__(self) -> None:
        super().__init__(width=12)
        self.embeds = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))

    def forward(self, columns: Tensor) -> Tensor:
        parts = [embed(columns[:, i]) for i, embed in enumerate(self.embeds)]
        return self.three(self.two(self.one(torch.cat(parts, dim=1)).relu()).relu())


class VariableArguments(Layers):
    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        x = self.one(torch.stack(parts).sum(0)).relu()
        for name in sorted(named):
            x = x + self.two(named[name])
        return self.three(x)


class LateInput(Layers):
    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        logits = self.three(self.two(self.one(x).relu()).relu())
        losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
        return (losses * weight).mean()


class InputAsOutput(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.two(self.one(x).relu())
        return x, self.three(a), self.three.weight


class AliasedOutputs(Layers):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.two(self.one(x).relu())
        b = self.three(a)
        return {"whole": b, "same": b, "flat": b.view(-1), "first": b[:, 0], "hidden": a.t()}


class MutatedInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        x[:, 0] = 0
        a = self.one(x)
        return self.three(self.two(a.relu()) + self.one(x * 2))


@entry(MODELS, "torch.nn")
def dataclass_output() -> Example:
    return DataclassOutput(), (features(),), {}


@entry(MODELS, "torch.nn")
def namedtuple_output() -> Example:
    return NamedTupleOutput(), (features(),), {}


@entry(MODELS, "torch.nn")
def nested_output() -> Example:
    return NestedOutput(), (features(),), {}


@entry(MODELS, "torch.nn")
def keyword_only() -> Example:
    return KeywordOnly(), (), {"left": features(), "right": features(), "scale": 0.5}


@entry(MODELS, "torch.nn")
def nested_input() -> Example:
    batch = {"pair": features(), "rest": [features(), torch.rand(BATCH)]}
    return NestedInput(), (batch,), {"bias": None}


@entry(MODELS, "torch.nn")
def integer_inputs() -> Example:
    return IntegerInputs(), (torch.randint(0, 10, (BATCH, 3), dtype=torch.int32),), {}


@entry(MODELS, "torch.nn")
def variable_arguments() -> Example:
    named = {"extra": features(16), "more": features(16)}
    return VariableArguments(), (features(), features(), features()), named


@entry(MODELS, "torch.nn")
def late_input() -> Example:
    return LateInput(), (features(), torch.randint(0, 4, (BATCH,)), torch.rand(BATCH)), {}


@entry(MODELS, "torch.nn")
def input_as_output() -> Example:
    return InputAsOutput(), (features(),), {}


@entry(MODELS, "torch.nn")
def aliased_outputs() -> Example:
    return AliasedOutputs(), (features(),), {}


@entry(MODELS, "torch.nn")
def mutated_input() -> Example:
    return MutatedInput(), (features(),), {}


# In-place writes


class InPlace(nn.Module):
    """Activations, additions and slices written in place, between and across blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.enter = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for conv in self.convs:
            change = conv(x)
            change += 0.1
            change[:, :2] *= 0.5
            x = x + change.relu_()
            x.clamp_(max=5.0)
        return self.head(x.mean((2, 3)).sub_(0.1))


class Scatter(Layers):
    """Masks, indexed writes and scatters."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        a = self.one(x)
        table = torch.zeros_like(a)
        table[torch.arange(a.shape[0]), index] = a.amax(1)
        table = table.scatter_add(1, index[:, None].expand(-1, 3), a[:, :3])
        b = self.two(table + a).masked_fill(a < -0.5, 0.0)
        b = b.index_copy(1, torch.tensor([1, 3]), a[:, :2])
        b[b > 1.5] = 1.5
        return self.three(torch.where(b > 0, b, b.exp() - 1))


class Preallocated(Layers):
    """Several layers write their results into slices of an empty tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 3, 16)
        out[:, 0] = self.one(x)
        out[:, 1] = self.two(out[:, 0].relu())
        out[:, 2].copy_(self.two(out[:, 1].relu()))
        return self.three(out).mean(1)


@entry(MODELS, "torch.nn")
def in_place() -> Example:
    return InPlace(), (image(6),), {}


@entry(MODELS, "torch.nn")
def scatter() -> Example:
    return Scatter(), (features(), torch.randint(0, 16, (BATCH,))), {}


@entry(MODELS, "torch.nn")
def preallocated() -> Example:
    return Preallocated(), (features(),), {}


# Parameters


class Lora(nn.Module):
    """A frozen weight and a trainable low-rank correction (LoRA)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, before) / 4)
        self.up = nn.Parameter(torch.randn(after, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class SharedPieces(nn.Module):
    """Weights shared between layers of different kinds, transposed, and through a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16, bias=False)
        self.middle = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.middle[1].weight = self.middle[0].weight
        self.leave = nn.Linear(16, 8)
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("alias", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.scale
        for layer in self.middle:
            x = layer(x).tanh()
        return self.leave(x * self.alias) + F.linear(x, self.enter.weight.t())


class Spares(Layers):
    """A parameter that forward never uses, one that only eval uses, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.calibration = nn.Parameter(torch.ones(4))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("idle", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.three(self.two(self.one(x).relu()).relu())
        return x if self.training else x * self.calibration


class Containers(nn.Module):
    """Parameters in lists and dicts, modules in dicts, and nested names with unusual letters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"first": torch.randn(8, 16), "Second-2": torch.randn(16)})
        self.shifts = nn.ParameterList([torch.randn(16), torch.randn(16)])
        self.heads = nn.ModuleDict({"head a": nn.Linear(16, 4), "head_b": nn.Linear(16, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = (x @ self.weights["first"] * self.weights["Second-2"]).relu()
        for shift in self.shifts:
            x = torch.tanh(x + shift)
        return {name: head(x) for name, head in self.heads.items()}


class Precisions(Layers):
    """Layers in float64 and bfloat16 between layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.two = self.two.double()
        self.narrow = nn.Linear(16, 16).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).double()).relu().float()
        return self.three(self.narrow(x.bfloat16()).float())


@entry(MODELS, "torch.nn")
def frozen_backbone() -> Example:
    backbone = torchvision_models().resnet18(weights=None).requires_grad_(False)
    backbone.fc = nn.Identity()
    return nn.Sequential(backbone, MLP(512, 32, 32, 5)), (image(32),), {}


@entry(MODELS, "torch.nn")
def frozen_middle() -> Example:
    model = MLP(8, 16, 24, 24, 16, 4)
    model[4].requires_grad_(False)
    model[5].requires_grad_(False)
    model[8].requires_grad_(False)
    return model, (features(),), {}


@entry(MODELS, "torch.nn")
def lora() -> Example:
    layers = [Lora(8, 16), nn.GELU(), Lora(16, 16), nn.GELU(), Lora(16, 16), nn.Linear(16, 3)]
    return nn.Sequential(*layers), (features(),), {}


@entry(MODELS, "torch.nn")
def shared_pieces() -> Example:
    return SharedPieces(), (features(),), {}


@entry(MODELS, "torch.nn")
def spare_parameters() -> Example:
    return Spares(), (features(),), {}


@entry(MODELS, "torch.nn")
def parameter_containers() -> Example:
    return Containers(), (features(),), {}


@entry(MODELS, "torch.nn")
def mixed_precision_parts() -> Example:
    return Precisions(), (features(),), {}


@entry(MODELS, "torch.nn")
def float64_model() -> Example:
    return MLP(8, 16, 24, 16, 4).double(), (features().double(),), {}


@entry(MODELS, "torch.nn")
def bfloat16_model() -> Example:
    return MLP(8, 16, 24, 16, 4).bfloat16(), (features().bfloat16(),), {}


@entry(MODELS, "torch.nn")
def channels_last() -> Example:
    model = torchvision_models().resnet18(weights=None, num_classes=5)
    model = model.to(memory_format=torch.channels_last)
    return model, (image(32).to(memory_format=torch.channels_last),), {}


@entry(MODELS, "torch.nn")
def spectral_norm() -> Example:
    normal = parametrizations.spectral_norm
    model = nn.Sequential(
        normal(nn.Conv2d(3, 8, 3, padding=1)),
        nn.LeakyReLU(0.1),
        normal(nn.Conv2d(8, 8, 3, padding=1)),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        normal(nn.Linear(8 * 36, 4)),
    )
    return model, (image(6),), {}


@entry(MODELS, "torch.nn")
def spectral_norm_by_hook() -> Example:
    normal = nn.utils.spectral_norm
    layers = [normal(nn.Linear(8, 16)), nn.ReLU(), normal(nn.Linear(16, 16)), nn.ReLU()]
    return nn.Sequential(*layers, normal(nn.Linear(16, 4))), (features(),), {}


@entry(MODELS, "torch.nn")
def weight_norm() -> Example:
    normal = parametrizations.weight_norm
    layers = [normal(nn.Linear(8, 16)), nn.ReLU(), normal(nn.Linear(16, 16), dim=None), nn.ReLU()]
    return nn.Sequential(*layers, normal(nn.Linear(16, 4))), (features(),), {}


@entry(MODELS, "torch.nn")
def weight_norm_by_hook() -> Example:
    normal = nn.utils.weight_norm
    layers = [normal(nn.Linear(8, 16)), nn.ReLU(), normal(nn.Linear(16, 16)), nn.ReLU()]
    return nn.Sequential(*layers, normal(nn.Linear(16, 4))), (features(),), {}


@entry(MODELS, "torch.nn")
def orthogonal() -> Example:
    normal = parametrizations.orthogonal
    layers = [nn.Linear(8, 16), nn.Tanh(), normal(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers), (features(),), {}


# Buffers and randomness


class Counter(Layers):
    """Buffers that forward reassigns, adds to and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("history", torch.zeros(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x).relu()
        if self.training:
            self.calls += 1
            self.average = 0.9 * self.average + 0.1 * a.detach().mean(0)
            self.history.index_put_((self.calls % 5,), a.detach().mean())
        b = self.two(a - self.average) / (1 + self.calls)
        return self.three(b + self.history.sum())


class Codebook(nn.Module):
    """Vector quantisation with a moving-average codebook and straight-through gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.register_buffer("codes", torch.randn(10, 6))
        self.register_buffer("counts", torch.ones(10))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        quantised = F.embedding(chosen, self.codes)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, 10).to(z.dtype)
                self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        commitment = F.mse_loss(z, quantised.detach())
        quantised = z + (quantised - z).detach()
        return self.decoder(quantised), commitment, chosen


class Noise(Layers):
    """Random numbers of several kinds in forward, in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x + 0.1 * torch.randn_like(x))
        keep = torch.rand(x.shape[0], 1) > 0.3
        x = self.two(x * keep)
        x = x[:, torch.randperm(16)] + torch.bernoulli(torch.full_like(x, 0.5))
        return self.three(x + torch.normal(0.0, 0.1, (1, 16)))


class Gumbel(Layers):
    """Gumbel-softmax sampling, soft and hard."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gumbel_softmax(self.one(x), tau=0.7)
        x = F.gumbel_softmax(self.two(x), tau=0.5, hard=True)
        return self.three(x)


class Dropouts(nn.Module):
    """Dropout of every kind, one of them always on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.channel = nn.Dropout2d(0.3)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.feature = nn.FeatureAlphaDropout(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channel(self.enter(x))
        x = self.feature(self.conv(F.dropout(x.transpose(1, 2), 0.1, True).transpose(1, 2)))
        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training))


@entry(MODELS, "torch.nn")
def counting_buffers() -> Example:
    return Counter(), (features(),), {}


@entry(MODELS, "torch.nn")
def vector_quantised() -> Example:
    return Codebook(), (features(),), {}


@entry(MODELS, "torch.nn")
def random_in_forward() -> Example:
    return Noise(), (features(),), {}


@entry(MODELS, "torch.nn")
def gumbel_softmax() -> Example:
    return Gumbel(), (features(),), {}


@entry(MODELS, "torch.nn")
def dropouts() -> Example:
    return Dropouts(), (image(6),), {}


@entry(MODELS, "torch.nn")
def submodule_in_eval() -> Example:
    model = MLP(8, 16, 24, 24, 16, 4)
    model[1].eval()
    model[3].eval()
    model[9].eval()
    return model, (features(),), {}


class KeepsEval(Layers):
    """A frozen batch norm that always stays in eval mode, as in detection backbones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.norm.running_var.uniform_(0.5, 2)

    def train(self, mode: bool = True) -> KeepsEval:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.norm(self.one(x))).relu())


@entry(MODELS, "torch.nn")
def always_eval_norm() -> Example:
    return KeepsEval(), (features(),), {}


# Autograd


class NoGradRegion(Layers):
    """A target network run without gradients, and a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x)
            weight = self.one(x).abs().mean(1, keepdim=True)
        y = self.three(self.two(self.one(x).relu()).relu())
        with torch.set_grad_enabled(False):
            shift = y.mean(0)
        return (y - wanted - shift) * weight + y.detach().tanh()


class Checkpointed(nn.Module):
    """Blocks with dropout, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class ForwardHooks(Layers):
    """Hooks that change the inputs and outputs of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.two.gain = nn.Parameter(torch.ones(16))
        self.one.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        self.two.register_forward_hook(lambda layer, _, out: out * layer.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).relu()).relu())


class InnerGradient(Layers):
    """enable_grad inside no_grad, and gradients detached at each layer but the last."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.one(x).relu()
            with torch.enable_grad():
                b = self.two(a)
        return self.three(b.relu())


class Functional(Layers):
    """A layer called with weights other than its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu()
        halved = {name: value * 0.5 for name, value in self.two.named_parameters()}
        x = torch.func.functional_call(self.two, halved, (x,))
        return self.three(x)


class Recursive(nn.Module):
    """A tree of modules: each node calls itself on both halves of its input."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.join = nn.Linear(width, width)
        half = width // 2
        self.children_ = nn.ModuleList(
            [Recursive(depth - 1, half), Recursive(depth - 1, half)] if depth > 1 else []
        )

    def forward(self, x: Tensor) -> Tensor:
        if len(self.children_):
            left, right = x.chunk(2, dim=1)
            x = torch.cat([self.children_[0](left), self.children_[1](right)], dim=1)
        return self.join(x).tanh() + x


class LongSkips(nn.Module):
    """Every layer reads the outputs of all layers before it, and the input."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 * (i + 1), 8) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, dim=1)).relu())
        return torch.stack(seen, dim=1)


class ShapeArithmetic(Layers):
    """Results that depend on the batch size: manual means, sizes as factors, expansions."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        a = self.one(x)
        centred = a - a.sum(0, keepdim=True) / batch
        pairs = (centred.unsqueeze(0) - centred.unsqueeze(1)).pow(2).sum(-1)
        b = self.two(pairs @ a / (batch * 2)).reshape(batch * 2, 8)
        b = torch.cat([b, torch.ones(batch * 2, 8) * batch**-0.5], dim=1)
        return self.three(b).view(batch, 8) + torch.eye(batch).sum(1, keepdim=True)


class Doubled(Layers):
    """Contrastive learning: two views of each example form one batch of twice the size."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x * 0.9 + 0.1 * torch.rand_like(x)])
        z = F.normalize(self.three(self.two(self.one(both).relu()).relu()))
        logits = z @ z.t() / 0.5
        logits = logits.masked_fill(torch.eye(logits.shape[0], dtype=torch.bool), -1e9)
        half = x.shape[0]
        targets = torch.arange(2 * half).roll(half)
        return F.cross_entropy(logits, targets)


class Constants(Layers):
    """Tensors that are neither parameters nor buffers: an attribute and one created in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [torch.linspace(0, 1, 16)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) + self.plain[0]
        x = self.two(x.relu()) * torch.tensor([1.0, 2.0] * 8)
        return self.three(x + torch.arange(16) / 16)


class BranchOnMode(nn.Module):
    """Different layers in train and in eval mode, in a different order."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.auxiliary = nn.Linear(16, 4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        x = self.enter(x).relu()
        if self.training:
            middle = self.a(x).relu()
            return self.head(self.b(middle).relu()), self.auxiliary(middle)
        return self.head(self.a(self.b(x).relu()).relu())


@entry(MODELS, "torch.nn")
def no_grad_region() -> Example:
    return NoGradRegion(), (features(),), {}


@entry(MODELS, "torch.nn")
def checkpointed_blocks() -> Example:
    return Checkpointed(), (features(),), {}


@entry(MODELS, "torch.nn")
def forward_hooks() -> Example:
    return ForwardHooks(), (features(),), {}


@entry(MODELS, "torch.nn")
def inner_enable_grad() -> Example:
    return InnerGradient(), (features(),), {}


@entry(MODELS, "torch.nn")
def functional_call() -> Example:
    return Functional(), (features(),), {}


@entry(MODELS, "torch.nn")
def recursive_tree() -> Example:
    return Recursive(), (features(),), {}


@entry(MODELS, "torch.nn")
def long_skips() -> Example:
    return LongSkips(), (features(),), {}


@entry(MODELS, "torch.nn")
def shape_arithmetic() -> Example:
    return ShapeArithmetic(), (features(),), {}


@entry(MODELS, "torch.nn")
def doubled_batch() -> Example:
    return Doubled(), (features(),), {}


@entry(MODELS, "torch.nn")
def plain_constants() -> Example:
    return Constants(), (features(),), {}


@entry(MODELS, "torch.nn")
def branch_on_mode() -> Example:
    return BranchOnMode(), (features(),), {}


@entry(MODELS, "torch.nn")
def sparse_embedding() -> Example:
    model = nn.Sequential(
        nn.Embedding(50, 8, sparse=True, padding_idx=0),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )
    return model, (tokens(9, vocabulary=50),), {}


@entry(MODELS, "torch.nn")
def lazy_layers() -> Example:
    model = nn.Sequential(
        nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    model(image(6))
    return model, (image(6),), {}
