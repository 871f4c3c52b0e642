"""Train models on nodes that together offer little more memory than one process needs.

M is the memory that a model needs in one process: the peak growth of its resident memory while it trains
the same batches with AdamW. Then k nodes of 1.25 M / k each are planned for, and each stage trains in a
process that is confined as a provider's worker is: it ends as soon as it holds more than it offers,
beyond an idle process and the 64 MB that libraries may take. **Planned** and **peak** are those of the
node with the largest share of its offer. GPT-2 small has its 124M parameters, batch 2 x 128. Run as a
script it prints its report; arguments select models by the beginning of their names, and node counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from workloads import free_addresses

from ravnest import Node, Trainer, clusterize, set_seed
from ravnest.errors import PlanError
from ravnest.plan.plan import Plan
from ravnest.provider.limits import BUFFERS, held_memory, limit_memory
from ravnest.provider.training import warm_up

UPDATES = 3
RUNS = 5
FACTOR = 1.25
SAMPLE_SECONDS = 0.005
DEADLINE_SECONDS = 600.0
NODE_DATA = "node_data"
EXCESS = "took more than it offered"

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """Model with its batch, and the numbers of nodes on which it is trained."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    nodes: tuple[int, ...]
    offers: tuple[tuple[int, float], ...] = ()
    """Further pools: nodes, and GB that each offers. Each is trained ``RUNS`` times."""


class Logits(nn.Module):
    """A transformers model as a function from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each position."""
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return logits


def gpt2(vocabulary: int, width: int, layers: int, heads: int) -> nn.Module:
    """Return GPT-2 with tied embeddings."""
    from subjects import torchvision_schemas  # noqa: PLC0415

    torchvision_schemas()
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=1024,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        use_cache=False,
    )
    return Logits(GPT2LMHeadModel(config))


def bert(width: int, layers: int) -> nn.Module:
    """Return BERT with the head of its language model."""
    from subjects import torchvision_schemas  # noqa: PLC0415

    torchvision_schemas()
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415

    config = BertConfig(
        vocab_size=4000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4 * width,
    )
    return Logits(BertForMaskedLM(config))


def mlp(width: int, layers: int) -> nn.Module:
    """Return linear layers of one width with ReLU."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def vit(layers: int) -> nn.Module:
    """Return a Vision Transformer of torchvision."""
    from zoo_models.vision import torchvision_models  # noqa: PLC0415

    model: nn.Module = torchvision_models().VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=layers,
        num_heads=8,
        hidden_dim=512,
        mlp_dim=2048,
        num_classes=100,
    )
    return model


def resnet50() -> nn.Module:
    """Return the ResNet-50 of torchvision, which has batch norm."""
    from zoo_models.vision import torchvision_models  # noqa: PLC0415

    model: nn.Module = torchvision_models().get_model("resnet50", weights=None)
    return model


def text(batch: int, length: int, vocabulary: int) -> Batch:
    """Return random tokens, with the next tokens as targets."""
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(batch: int, size: int, classes: int) -> Batch:
    """Return random images and classes."""
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def points(batch: int, width: int) -> Batch:
    """Return random points and classes."""
    return torch.randn(batch, width), torch.randint(0, 10, (batch,))


SUBJECTS = (
    Subject(
        "GPT-2 small, batch 2 x 128",
        lambda: gpt2(50257, 768, 12, 12),
        lambda: text(2, 128, 50257),
        (2, 4, 8),
        ((3, 1.1),),
    ),
    Subject(
        "GPT-2-like, 16 layers of 512, batch 8 x 128",
        lambda: gpt2(4000, 512, 16, 8),
        lambda: text(8, 128, 4000),
        (2, 4, 8),
    ),
    Subject(
        "BERT-like, 16 layers of 512, batch 8 x 128",
        lambda: bert(512, 16),
        lambda: text(8, 128, 4000),
        (2, 4, 8),
    ),
    Subject("MLP, 17 x 1536, batch 64", lambda: mlp(1536, 16), lambda: points(64, 1536), (2, 4, 8)),
    Subject(
        "ViT, 16 layers of 512, batch 16 at 64 px",
        lambda: vit(16),
        lambda: images(16, 64, 100),
        (2, 4, 8),
    ),
    Subject("ResNet-50, batch 16 at 96 px", resnet50, lambda: images(16, 96, 1000), (2, 4, 8)),
)


def loss_of(output: torch.Tensor, item: Any) -> torch.Tensor:
    """Return the cross entropy; ``item`` is the targets, or a batch that ends with them."""
    targets = item[-1] if isinstance(item, list | tuple) else item
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def loader(subject: Subject) -> list[Batch]:
    """Return the batches, the same in all processes."""
    torch.manual_seed(2)
    return [subject.batch() for _ in range(UPDATES)]


# Parent: plan, start the processes and watch their memory.


@dataclass(frozen=True)
class Outcome:
    """Memory of one node in bytes."""

    planned: float
    peak: int
    offered: float
    note: str = ""
    """Why it failed; empty if it trained to the end."""


class Watched:
    """A process whose memory is sampled, and which is ended if it holds too much."""

    def __init__(self, arguments: list[str], offered: float | None) -> None:
        self._offered = offered
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self._idle = int(self._process.stdout.readline() or 0)
        self._seen = psutil.Process(self._process.pid)
        self.peak = 0
        self.note = ""

    def sample(self) -> bool:
        """Take a sample; return whether the process runs."""
        self.peak = max(self.peak, held_memory(self._seen) - self._idle)
        if self._offered is not None and self.peak > self._offered + BUFFERS and not self.note:
            self.note = EXCESS
            self._process.kill()
        return self._process.poll() is None

    def end(self) -> None:
        """Wait for the end; note why it failed."""
        if self._process.wait(30) != 0 and not self.note:
            self._output.seek(0)
            lines = [line for line in self._output.read().splitlines() if line.strip()]
            self.note = lines[-1][:200] if lines else f"exit code {self._process.returncode}"
        self._output.close()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def watch(processes: list[Watched]) -> None:
    """Sample processes until all have ended; end all if one fails."""
    until = time.monotonic() + DEADLINE_SECONDS
    while sum(each.sample() for each in processes):
        time.sleep(SAMPLE_SECONDS)
        if time.monotonic() > until or any(each.note for each in processes):
            for each in processes:
                each.kill()
    for each in processes:
        each.end()


def needed(subject: Subject) -> int:
    """Return the bytes that the model needs in one process."""
    alone = Watched(["alone", subject.name], None)
    watch([alone])
    assert not alone.note, alone.note
    return alone.peak


def train(
    subject: Subject, count: int, offered: float, runs: int
) -> tuple[Plan | str, list[list[Outcome]]]:
    """Plan for ``count`` nodes and train; return the plan, or why there is none, and the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        plan = form(subject, Path(folder) / NODE_DATA, count, offered)
        if isinstance(plan, str):
            return plan, []
        return plan, [run(subject, plan, folder, offered) for _ in range(runs)]


def run(subject: Subject, plan: Plan, folder: str, offered: float) -> list[Outcome]:
    """Train once; return the outcome of each node."""
    stages = plan.clusters[0].stages
    arguments = [["node", subject.name, f"node_{s.node.id}", folder, str(offered)] for s in stages]
    processes = [Watched(each, offered) for each in arguments]
    watch(processes)
    return [
        Outcome(float(stage.memory.total), process.peak, offered, process.note)
        for stage, process in zip(stages, processes, strict=True)
    ]


def form(subject: Subject, node_data: Path, count: int, offered: float) -> Plan | str:
    """Split the model for equal nodes; return the plan, or why there is none."""
    node_data.mkdir()
    configs = {
        str(number): {"IP": address, "benchmarks": {"ram": offered / 1e9, "bandwidth": 1000}}
        for number, address in enumerate(free_addresses(count))
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs), encoding="utf-8")
    set_seed(1)
    model = subject.make()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return clusterize(model, (subject.batch()[0],), clusters=1, folder=node_data)
    except PlanError as error:
        return str(error)


# Child: one process, or one node.


def _announce(offered: float | None) -> None:
    warm_up(1)
    idle = held_memory(psutil.Process()) if offered is None else limit_memory(int(offered))
    sys.stdout.write(f"{idle}\n")
    sys.stdout.flush()


def _train_alone(subject: Subject) -> None:
    batches = loader(subject)
    _announce(None)
    set_seed(1)
    model = subject.make()
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), targets).backward()
        optimizer.step()


def _train_node(subject: Subject, name: str, folder: str, offered: float) -> None:
    batches = loader(subject)
    _announce(offered)
    os.chdir(folder)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with Node(
        name,
        optimizer=torch.optim.AdamW,
        criterion=loss_of,
        labels=batches,
        connect_timeout=120.0,
        progress=False,
    ) as node:
        Trainer(node, train_loader=batches, epochs=1).train()


def measure(selected: tuple[str, ...] = ()) -> str:
    """Return the report in Markdown; ``selected`` has beginnings of names, and numbers of nodes."""
    counts = {int(each) for each in selected if each.isdigit()}
    names = tuple(each for each in selected if not each.isdigit())
    lines = [
        "| model | M, MB | nodes | offered, MB | planned | peak | result |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for subject in SUBJECTS:
        if names and not subject.name.startswith(names):
            continue
        need = needed(subject)
        pools = [(k, FACTOR * need / k, 1) for k in subject.nodes]
        pools += [(k, 1e9 * gb, RUNS) for k, gb in subject.offers]
        for count, offered, runs in [pool for pool in pools if not counts or pool[0] in counts]:
            plan, found = train(subject, count, offered, runs)
            lines.append(
                f"| {subject.name} | {need / 1e6:.0f} | {count} | {offered / 1e6:.0f} | "
                + _result(plan, found)
            )
            print(lines[-1], file=sys.stderr, flush=True)
            for outcome in found:
                print(*outcome, sep="\n    ", file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def _result(plan: Plan | str, found: list[list[Outcome]]) -> str:
    if isinstance(plan, str):
        return f"| | not planned: {plan} |"
    notes = [max((each.note for each in run), key=lambda n: (n == EXCESS, n)) for run in found]
    planned = max(each.planned / each.offered for run in found for each in run)
    peak = max(each.peak / each.offered for run in found for each in run)
    (cluster,) = plan.clusters
    plural = "es" if cluster.microbatches > 1 else ""
    text = f"trains, schedule {plan.schedule}, {cluster.microbatches} micro-batch{plural}"
    if recomputing := sum(s.kept is not None and s is not cluster.stages[-1] for s in cluster.stages):
        text += f", {recomputing} nodes recompute"
    if at_once := sum(not stage.defers for stage in cluster.stages):
        text += f", {at_once} nodes defer no weight gradients"
    if blocks := max((cut.blocks for cut in plan.row_cuts), default=0):
        text += f", weights in up to {blocks} blocks of rows"
    if cluster.loss_chunks > 1:
        text += f", loss in {cluster.loss_chunks} chunks"
    if len(found) > 1:
        text += f"; {notes.count('')} of {len(found)} runs"
    return f"{planned:.0%} | {peak:.0%} | {max(notes) or text} |"


def main(arguments: list[str]) -> None:
    """Print the report, or run as one of its processes."""
    subjects = {subject.name: subject for subject in SUBJECTS}
    match arguments:
        case ["alone", name]:
            _train_alone(subjects[name])
        case ["node", name, node, folder, offered]:
            _train_node(subjects[name], node, folder, float(offered))
        case selected:
            print(measure(tuple(selected)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
