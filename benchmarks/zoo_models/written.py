"""Architectures in plain PyTorch, as users write them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from zoo_models.registry import BATCH, Example, ZooModel, entry, image, padding_mask, tokens

MODELS: list[ZooModel] = []


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        weights = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        weights = weights.masked_fill(~self.bias[:length, :length], float("-inf"))
        mixed = self.drop(weights.softmax(dim=-1)) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class TiedGPT(nn.Module):
    """A GPT whose output layer shares the weight of its token embedding."""

    def __init__(self, vocabulary: int = 99, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(16, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, 4, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, text: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.drop(self.wte(text) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@entry(MODELS, "torch.nn")
def tied_gpt() -> Example:
    return TiedGPT(), (tokens(12),), {"targets": tokens(12)}


@entry(MODELS, "torch.nn")
def tied_gpt_without_targets() -> Example:
    return TiedGPT(), (tokens(12),), {}


class MLP(nn.Sequential):
    """Linear layers with batch norm and dropout between them."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(0.2)]
        super().__init__(*layers, nn.Linear(widths[-2], widths[-1]))


@entry(MODELS, "torch.nn")
def mlp() -> Example:
    return MLP(12, 32, 48, 32, 16, 5), (torch.randn(BATCH, 12),), {}


@entry(MODELS, "torch.nn")
def digits_cnn() -> Example:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(128, 10),
    )
    return model, (image(8, channels=1),), {}


def double_conv(before: int, after: int) -> nn.Sequential:
    """Two convolutions, as in each level of a U-Net."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net with skip connections from the contracting to the expanding path."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.stem = double_conv(3, widths[0])
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(double_conv(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for level in self.down:
            skips.append(x)
            x = level(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


@entry(MODELS, "torch.nn")
def unet() -> Example:
    return UNet(), (image(32),), {}


class LSTMTagger(nn.Module):
    """Token tagger of stacked LSTM layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=4, dropout=0.3, batch_first=True)
        self.head = nn.Linear(24, 7)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(text))
        return self.head(states)


@entry(MODELS, "torch.nn")
def lstm_tagger() -> Example:
    return LSTMTagger(), (tokens(9),), {}


class LSTMLanguageModel(nn.Module):
    """An LSTM with projection, time first, that takes an initial state and returns the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, proj_size=16)
        self.head = nn.Linear(16, 99)

    def forward(
        self, text: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = state
        states, (hidden, cell) = self.lstm(
            self.embed(text).transpose(0, 1),
            (hidden.transpose(0, 1).contiguous(), cell.transpose(0, 1).contiguous()),
        )
        return self.head(states.transpose(0, 1)), (hidden.transpose(0, 1), cell.transpose(0, 1))


@entry(MODELS, "torch.nn")
def lstm_with_state() -> Example:
    state = (torch.randn(BATCH, 2, 16), torch.randn(BATCH, 2, 24))
    return LSTMLanguageModel(), (tokens(9), state), {}


class GRUClassifier(nn.Module):
    """Text classifier of a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.gru = nn.GRU(16, 12, num_layers=3, bidirectional=True, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, text: Tensor) -> Tensor:
        _, last = self.gru(self.embed(text))
        return self.head(torch.cat([last[-2], last[-1]], dim=1))


@entry(MODELS, "torch.nn")
def gru_classifier() -> Example:
    return GRUClassifier(), (tokens(9),), {}


class RNNRegressor(nn.Module):
    """A plain recurrent network, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, 16, num_layers=3, nonlinearity="relu")
        self.head = nn.Linear(16, 1)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.rnn(series.transpose(0, 1))
        return self.head(states[-1])


@entry(MODELS, "torch.nn")
def rnn_regressor() -> Example:
    return RNNRegressor(), (torch.randn(BATCH, 7, 6),), {}


class CellLoop(nn.Module):
    """Recurrent cells stepped by a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(6, 16)
        self.gru = nn.GRUCell(16, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, series: Tensor) -> Tensor:
        batch = series.shape[0]
        hidden, cell = series.new_zeros(batch, 16), series.new_zeros(batch, 16)
        state = series.new_zeros(batch, 12)
        outputs = []
        for step in series.unbind(1):
            hidden, cell = self.lstm(step, (hidden, cell))
            state = self.gru(hidden, state)
            outputs.append(self.head(state))
        return torch.stack(outputs, dim=1)


@entry(MODELS, "torch.nn")
def cell_loop() -> Example:
    return CellLoop(), (torch.randn(BATCH, 5, 6),), {}


class Translator(nn.Module):
    """``nn.Transformer`` with its own masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.transformer = nn.Transformer(
            d_model=32,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=64,
            batch_first=True,
        )
        self.head = nn.Linear(32, 99)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(
            self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        )


@entry(MODELS, "torch.nn")
def transformer() -> Example:
    return Translator(), (tokens(12), tokens(9)), {}


class MaskedEncoder(nn.Module):
    """``nn.TransformerEncoder`` with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, text: Tensor, *, mask: Tensor) -> Tensor:
        states = self.encoder(self.embed(text), src_key_padding_mask=mask == 0)
        kept = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * kept).sum(1) / kept.sum(1))


@entry(MODELS, "torch.nn")
def transformer_encoder_masked() -> Example:
    return MaskedEncoder(), (tokens(9),), {"mask": padding_mask(9)}


@entry(MODELS, "torch.nn")
def transformer_encoder() -> Example:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3), (torch.randn(BATCH, 9, 32),), {}


class Attention(nn.Module):
    """Multi-head attention that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32)
        self.first = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.second = nn.MultiheadAttention(
            32, 4, batch_first=True, kdim=8, vdim=8, add_bias_kv=True, add_zero_attn=True
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.enter(x)
        y, first = self.first(y, y, y, average_attn_weights=False)
        y, second = self.second(y, x, x)
        return y, first, second


@entry(MODELS, "torch.nn")
def attention_weights() -> Example:
    return Attention(), (torch.randn(BATCH, 9, 8),), {}


class Autoencoder(nn.Module):
    """Autoencoder of convolutions and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(32 * 16, 24),
        )
        self.decoder = nn.Sequential(
            nn.Linear(24, 32 * 16),
            nn.Unflatten(1, (32, 4, 4)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return self.decoder(code), code


@entry(MODELS, "torch.nn")
def autoencoder() -> Example:
    return Autoencoder(), (image(16),), {}


class VAE(nn.Module):
    """A variational autoencoder that samples the code and computes the loss in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ELU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 24))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        rebuilt = self.decoder(code)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return {"rebuilt": rebuilt, "loss": F.mse_loss(rebuilt, x) + divergence}


@entry(MODELS, "torch.nn")
def vae() -> Example:
    return VAE(), (torch.randn(BATCH, 24),), {}


@entry(MODELS, "torch.nn")
def gan_generator() -> Example:
    model = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1, bias=False),
        nn.Tanh(),
    )
    return model, (torch.randn(BATCH, 16, 1, 1),), {}


@entry(MODELS, "torch.nn")
def normalisations() -> Example:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
        nn.Mish(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.LocalResponseNorm(2),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.BatchNorm2d(8, momentum=0.3, eps=1e-3),
        nn.Flatten(),
        nn.LayerNorm(512),
        nn.Linear(512, 32),
        nn.RMSNorm(32),
        nn.Linear(32, 8),
        nn.BatchNorm1d(8, affine=False, track_running_stats=False),
    )
    return model, (image(8),), {}


class Activations(nn.Module):
    """Every activation function of torch, including the random ones of training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(16))
        self.activations = nn.ModuleList(
            [
                nn.PReLU(16),
                nn.RReLU(),
                nn.ELU(inplace=True),
                nn.SELU(),
                nn.CELU(),
                nn.GLU(),
                nn.Hardswish(),
                nn.Hardsigmoid(),
                nn.Softplus(),
                nn.Softsign(),
                nn.LogSigmoid(),
                nn.AlphaDropout(0.2),
                nn.Hardtanh(),
                nn.GELU("tanh"),
                nn.Threshold(0.1, 0.0),
                nn.Softshrink(),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            change = activation(layer(x))
            x = x + (torch.cat([change, change], dim=1) if change.shape[1] == 8 else change)
        return x


@entry(MODELS, "torch.nn")
def activations() -> Example:
    return Activations(), (torch.randn(BATCH, 16),), {}


class GraphConvolution(nn.Module):
    """Graph convolutions over one dense adjacency matrix that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)])

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(1).clamp(min=1).rsqrt()
        normal = degree[:, None] * adjacency * degree[None, :]
        for layer in self.layers:
            nodes = F.relu(normal @ layer(nodes))
        return nodes.mean(1)


@entry(MODELS, "torch.nn")
def graph_convolution() -> Example:
    return GraphConvolution(), (torch.randn(BATCH, 7, 6), (torch.rand(7, 7) > 0.5).float()), {}


class Recommender(nn.Module):
    """Embedding bags for sparse features, a bottom and a top network, pairwise interactions."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        parts = [self.bottom(dense)]
        parts += [bag(ids) for bag, ids in zip(self.bags, sparse, strict=True)]
        stacked = torch.stack(parts, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        pairs = products[:, rows, columns]
        return torch.sigmoid(self.top(torch.cat([parts[0], pairs], dim=1)))


@entry(MODELS, "torch.nn")
def recommender() -> Example:
    sparse = [torch.randint(0, 50, (BATCH, length)) for length in (3, 5, 6)]
    return Recommender(), (torch.randn(BATCH, 5), sparse), {}


class FourierMixer(nn.Module):
    """Token mixing in the frequency domain, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.filters = nn.ParameterList(
            nn.Parameter(torch.randn(6, 16, dtype=torch.cfloat) * 0.3) for _ in range(3)
        )
        self.mlps = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for weights, mlp in zip(self.filters, self.mlps, strict=True):
            spectrum = torch.fft.rfft(x, dim=1)
            x = x + torch.fft.irfft(spectrum * weights, n=x.shape[1], dim=1)
            x = x + F.gelu(mlp(x))
        return x


@entry(MODELS, "torch.nn")
def fourier_mixer() -> Example:
    return FourierMixer(), (torch.randn(BATCH, 10, 8),), {}


class RotaryEinsum(nn.Module):
    """Attention with einsum, and rotary positions as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.qkv = nn.ParameterList(nn.Parameter(torch.randn(3, 2, 16, 8) / 4) for _ in range(3))
        self.out = nn.ParameterList(nn.Parameter(torch.randn(2, 8, 16) / 4) for _ in range(3))
        angles = torch.outer(torch.arange(9), 1.0 / 100 ** (torch.arange(4) / 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = torch.einsum("bnd,chdk->cbhnk", x, qkv).unbind(0)
            weights = torch.einsum("bhik,bhjk->bhij", self.turn(q), self.turn(k)).softmax(-1)
            x = x + torch.einsum("bhij,bhjk,hkd->bid", weights, v, out)
        return x


@entry(MODELS, "torch.nn")
def rotary_einsum() -> Example:
    return RotaryEinsum(), (torch.randn(BATCH, 9, 8),), {}


class SoftExperts(nn.Module):
    """A mixture of experts that runs all experts and selects the best two with a dense mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 5)
        self.up = nn.Parameter(torch.randn(5, 8, 16) / 3)
        self.down = nn.Parameter(torch.randn(5, 16, 8) / 4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        values, chosen = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, values.softmax(-1))
        experts = torch.einsum("bd,edh->beh", x, self.up).relu()
        mixed = torch.einsum("be,beh,ehd->bd", gates, experts, self.down)
        balance = (gates.mean(0) * scores.softmax(-1).mean(0)).sum()
        return self.head(x + mixed), balance


@entry(MODELS, "torch.nn")
def soft_experts() -> Example:
    return SoftExperts(), (torch.randn(BATCH, 8),), {}


class SpatialTransformer(nn.Module):
    """A spatial transformer: a small network predicts an affine grid for sampling, then upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), nn.Tanh(), nn.Linear(16, 6))
        self.locate[-1].bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.conv = nn.Conv2d(3, 32, 3, padding=1, padding_mode="reflect")
        self.head = nn.Conv2d(8, 3, 3, padding="same", padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        x = self.conv(F.grid_sample(x, grid, align_corners=False))
        x = F.pixel_shuffle(x, 2)
        return self.head(F.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False))


@entry(MODELS, "torch.nn")
def spatial_transformer() -> Example:
    return SpatialTransformer(), (image(8),), {}


class WaveNet(nn.Module):
    """Gated dilated causal convolutions (WaveNet) whose skip connections are summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.dilated = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**depth) for depth in range(5))
        self.residual = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(5))
        self.skip = nn.ModuleList(nn.Conv1d(16, 8, 1) for _ in range(5))
        self.head = nn.Conv1d(8, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        skips = x.new_zeros(x.shape[0], 8, x.shape[2])
        for depth, dilated in enumerate(self.dilated):
            signal, gate = dilated(F.pad(x, (2**depth, 0))).chunk(2, dim=1)
            change = signal.tanh() * gate.sigmoid()
            skips = skips + self.skip[depth](change)
            x = x + self.residual[depth](change)
        return self.head(skips.relu())


@entry(MODELS, "torch.nn")
def wavenet() -> Example:
    return WaveNet(), (torch.randint(0, 32, (BATCH, 20)),), {}


class ConvLSTM(nn.Module):
    """A 3-d convolution, then a convolutional LSTM over the frames of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv3d(1, 4, 3, padding=1)
        self.gates = nn.Conv2d(4 + 8, 4 * 8, 3, padding=1)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, video: Tensor) -> Tensor:
        frames = self.front(video)
        hidden = cell = frames.new_zeros(frames.shape[0], 8, *frames.shape[3:])
        for step in range(frames.shape[2]):
            gates = self.gates(torch.cat([frames[:, :, step], hidden], dim=1))
            forget, enter, leave, fresh = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * fresh.tanh()
            hidden = leave.sigmoid() * cell.tanh()
        return self.head(hidden)


@entry(MODELS, "torch.nn")
def conv_lstm() -> Example:
    return ConvLSTM(), (torch.randn(BATCH, 1, 5, 6, 6),), {}


class UniversalTransformer(nn.Module):
    """One encoder layer applied repeatedly: all stages share its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.steps = nn.Parameter(torch.randn(4, 32) / 5)
        self.head = nn.Linear(32, 5)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for step in self.steps:
            x = self.layer(x + step)
        return self.head(x.amax(1))


@entry(MODELS, "torch.nn")
def universal_transformer() -> Example:
    return UniversalTransformer(), (tokens(9),), {}


class Siamese(nn.Module):
    """A siamese network for two inputs, compared by cosine and by a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.bilinear = nn.Bilinear(16, 16, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.tower(left), self.tower(right)
        return F.cosine_similarity(a, b) / self.temperature, self.bilinear(a, b)


@entry(MODELS, "torch.nn")
def siamese() -> Example:
    return Siamese(), (torch.randn(BATCH, 10), torch.randn(BATCH, 10)), {}


class HyperNetwork(nn.Module):
    """A hypernetwork that computes another network's weights for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8 * 5 + 5))
        self.enter = nn.Linear(10, 8)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        written = self.writer(context)
        weight, bias = written[:, :40].view(-1, 5, 8), written[:, 40:]
        return self.head(torch.baddbmm(bias.unsqueeze(2), weight, self.enter(x).unsqueeze(2))[..., 0])


@entry(MODELS, "torch.nn")
def hyper_network() -> Example:
    return HyperNetwork(), (torch.randn(BATCH, 10), torch.randn(BATCH, 6)), {}


class NeuralODE(nn.Module):
    """Runge-Kutta steps through one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 12)
        self.slope = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 2)

    def velocity(self, state: Tensor, time: float) -> Tensor:
        return self.slope(torch.cat([state, torch.full_like(state[:, :1], time)], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        state, step = self.enter(x), 0.25
        for index in range(4):
            time = index * step
            k1 = self.velocity(state, time)
            k2 = self.velocity(state + step / 2 * k1, time + step / 2)
            k3 = self.velocity(state + step / 2 * k2, time + step / 2)
            k4 = self.velocity(state + step * k3, time + step)
            state = state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(state)


@entry(MODELS, "torch.nn")
def neural_ode() -> Example:
    return NeuralODE(), (torch.randn(BATCH, 6),), {}


class Capsules(nn.Module):
    """Capsules with three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2)
        self.votes = nn.Parameter(torch.randn(1, 36, 3, 6, 4) / 3)
        self.decoder = nn.Linear(18, 49)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = x.pow(2).sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        primary = self.squash(self.conv(x).reshape(x.shape[0], 36, 4))
        votes = (self.votes @ primary[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            digit = self.squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * digit[:, None]).sum(-1)
        return digit.norm(dim=-1), self.decoder(digit.flatten(1))


@entry(MODELS, "torch.nn")
def capsules() -> Example:
    return Capsules(), (image(7, channels=1),), {}


class LinearAttention(nn.Module):
    """Causal attention by cumulative sums instead of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.head = nn.Linear(16, 99)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for layer, norm in zip(self.qkv, self.norms, strict=True):
            q, k, v = layer(norm(x)).chunk(3, dim=-1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
            scale = (q * k.cumsum(1)).sum(-1, keepdim=True)
            x = x + torch.einsum("bnd,bnde->bne", q, state) / scale
        return self.head(x)


@entry(MODELS, "torch.nn")
def linear_attention() -> Example:
    return LinearAttention(), (tokens(9),), {}


class ConditionalRandomField(nn.Module):
    """A tagger with a transition matrix (CRF); its loss is a recursion over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.emit = nn.Linear(16, 5)
        self.transition = nn.Parameter(torch.randn(5, 5))

    def forward(self, text: Tensor, tags: Tensor) -> Tensor:
        x = self.conv(self.embed(text).transpose(1, 2)).relu().transpose(1, 2)
        emissions = self.emit(x)
        alpha = emissions[:, 0]
        score = emissions.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        score = score + self.transition[tags[:, :-1], tags[:, 1:]].sum(1)
        for step in range(1, emissions.shape[1]):
            joint = alpha.unsqueeze(2) + self.transition + emissions[:, step].unsqueeze(1)
            alpha = joint.logsumexp(1)
        return (alpha.logsumexp(1) - score).mean()


@entry(MODELS, "torch.nn")
def conditional_random_field() -> Example:
    return ConditionalRandomField(), (tokens(6), torch.randint(0, 5, (BATCH, 6))), {}


class Diffusion(nn.Module):
    """A diffusion denoiser with sinusoidal time embeddings that modulate its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.shifts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(8, device=time.device) / 2)
        angles = time[:, None].float() * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.enter(noisy)
        for block, norm, shift in zip(self.blocks, self.norms, self.shifts, strict=True):
            scale, bias = shift(embedded)[..., None, None].chunk(2, dim=1)
            x = x + block(F.silu(norm(x) * (1 + scale) + bias))
        return self.head(x)


@entry(MODELS, "torch.nn")
def diffusion() -> Example:
    return Diffusion(), (image(8), torch.randint(0, 100, (BATCH,))), {}


class Ranker(nn.Module):
    """Ranking of items for a user: shared scorer, sorted scores, pairwise loss."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 8)
        self.item = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.pool = nn.Linear(8, 8)

    def forward(self, user: Tensor, items: Tensor) -> dict[str, Tensor]:
        owner = self.pool(self.user(user)).unsqueeze(1)
        scores = (self.item(items) * owner).sum(-1)
        order = scores.argsort(dim=1, descending=True)
        ranked = scores.gather(1, order)
        margin = F.relu(1 - (ranked[:, :-1] - ranked[:, 1:])).mean()
        return {"scores": scores, "order": order, "margin": margin}


@entry(MODELS, "torch.nn")
def ranker() -> Example:
    return Ranker(), (torch.randint(0, 20, (BATCH,)), torch.randn(BATCH, 7, 6)), {}
