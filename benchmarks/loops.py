"""Train real loops of well-known libraries twice, without a plan and with memopt's, and compare all losses.

    python benchmarks/loops.py [--only TEXT] [--level N]

It writes its section of RESULTS.md, unless ``--only`` chooses some loops.  ``memopt optimize --plan-only`` makes a plan
for each model from one batch; then the same loop runs three epochs twice from the same seeds, the second time with that
plan.  Without chunks, all losses must be equal to the bit; chunks add gradients in another order, so that a small
difference is allowed.

A loop whose library is not installed is left out, and its row names the library.  To install all of them:

    pip install accelerate diffusers lightning monai peft snntorch torch_geometric transformers
    pip install --no-deps spikingjelly
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module as library
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt_cli
from benchmarks.results import table, this_command, write_section
from memopt_cli.records import Plan, from_data

EPOCHS = 3
CHUNKED = 1e-4
"""Largest relative difference of a loss allowed to a plan with chunks, which sums in another order."""


@dataclass(frozen=True)
class Loop:
    """Model, and the loop that trains it."""

    model: Callable[[], nn.Module]
    """Function that builds the model."""
    inputs: Callable[[], Any]
    """Function that returns one batch as arguments of the model's forward: a tuple, or a dict by name."""
    train: Callable[[nn.Module], list[float]]
    """Function that trains the model for three epochs and returns every loss."""


# ---------------------------------------------------------------------------------------------- language models


def gpt2() -> nn.Module:
    """Build a small GPT-2 with dropout and its default cache of keys and values."""
    hf = library("transformers")
    model: nn.Module = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=512, n_positions=64))
    return model


def llama() -> nn.Module:
    """Build a small Llama."""
    hf = library("transformers")
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def lora() -> nn.Module:
    """Build GPT-2 with LoRA adapters, which alone are trained."""
    peft = library("peft")
    model: nn.Module = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def sentences() -> list[list[int]]:
    """Return the token ids of 24 random sentences of 5 to 47 tokens."""
    made = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 48, (24,), generator=made).tolist()
    return [torch.randint(1, 512, (n,), generator=made).tolist() for n in lengths]


def padded(batch: list[list[int]]) -> dict[str, Tensor]:
    """Return ``batch`` padded on the right, with an attention mask and labels that ignore the padding."""
    longest = max(map(len, batch))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train_padded(model: nn.Module) -> list[float]:
    """Train by a plain loop with AdamW and gradient clipping, on batches of different lengths."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)
    rows, losses = sentences(), []
    for _ in range(EPOCHS):
        for first in range(0, len(rows), 8):
            loss = model(**padded(rows[first : first + 8])).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train_by_trainer(model: nn.Module) -> list[float]:
    """Train by Hugging Face's Trainer, with two micro-batches a step and an evaluation after each epoch."""
    hf, rows = library("transformers"), sentences()
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
            disable_tqdm=True,
        )
        data = [{"input_ids": row} for row in rows]
        trainer = hf.Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:8],
            data_collator=lambda batch: padded([row["input_ids"] for row in batch]),
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


# ---------------------------------------------------------------------------------------------- images


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers that depend on ``seed`` alone, and leave the global generator as it was."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train_pairs(model: nn.Module, pairs: list[tuple[Any, Tensor]], loss_of: Callable[..., Tensor]) -> list[float]:
    """Train three epochs over ``pairs`` of arguments and target, with Adam."""
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(EPOCHS):
        for given, target in pairs:
            optimizer.zero_grad()
            loss = loss_of(model(*given), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def monai_unet() -> nn.Module:
    """Build MONAI's UNet with residual units and instance norms."""
    net = library("monai.networks.nets")
    model: nn.Module = net.UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=2,
        dropout=0.1,
    )
    return model


def train_segmentation(model: nn.Module) -> list[float]:
    """Train by MONAI's Dice and cross-entropy loss; the last batch is smaller than the others."""
    loss = library("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
    sizes = (4, 4, 2)
    pairs = [((numbers(n, 1, 32, 32, seed=n),), (numbers(n, 1, 32, 32, seed=n) > 0).float()) for n in sizes]
    return train_pairs(model, pairs, loss)


def diffusion_unet() -> nn.Module:
    """Build a small UNet of diffusers with attention."""
    model: nn.Module = library("diffusers").UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model


def train_diffusion(model: nn.Module) -> list[float]:
    """Train the model to predict noise at random time steps, and keep a moving average of its weights."""
    scheduler = library("diffusers").DDPMScheduler(num_train_timesteps=100)
    average = library("diffusers.training_utils").EMAModel(model.parameters())
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(EPOCHS):
        for batch in range(3):
            clean = numbers(4, 3, 16, 16, seed=batch)
            noise, steps = torch.randn_like(clean), torch.randint(0, 100, (4,))
            found = model(scheduler.add_noise(clean, noise, steps), steps).sample
            loss = F.mse_loss(found, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            losses.append(loss.item())
    return losses


class Classifier(nn.Module):
    """Image classifier of convolutions with batch norms and dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout2d(0.1))
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of the images ``x``."""
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


def train_by_lightning(model: nn.Module) -> list[float]:
    """Train by Lightning's Trainer, with gradient clipping, accumulation and a validation loop."""
    lightning, losses = library("lightning.pytorch"), []

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            losses.append(F.cross_entropy(self.net(batch[0]), batch[1]).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    images, labels = numbers(20, 3, 16, 16), torch.arange(20) % 10
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Module(), data, torch.utils.data.DataLoader(data.dataset, batch_size=5))
    return losses


# ---------------------------------------------------------------------------------------------- graphs


class GraphNet(nn.Module):
    """Classifier of graphs by PyTorch Geometric: attention over neighbours, then a mean for each graph."""

    def __init__(self) -> None:
        super().__init__()
        geometric = library("torch_geometric.nn")
        attention = (geometric.GATConv(width, 16, heads=2, dropout=0.2) for width in (8, 32, 32, 32))
        self.layers = nn.ModuleList([*attention, geometric.GCNConv(32, 32)])
        self.norm, self.head = geometric.GraphNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Return the class scores of each graph."""
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        scores: Tensor = self.head(library("torch_geometric.nn").global_mean_pool(self.norm(x, batch), batch))
        return scores


def graphs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch of four random graphs: features, edges, and the number of each node's graph."""
    made = torch.Generator().manual_seed(seed)
    nodes = 400 + 40 * seed
    edges = torch.randint(0, nodes, (2, 5 * nodes), generator=made)
    return torch.randn(nodes, 8, generator=made), edges, torch.arange(nodes) % 4


def train_graphs(model: nn.Module) -> list[float]:
    """Train on batches of graphs of different sizes."""
    pairs = [(graphs(seed), torch.tensor([0, 1, 2, seed % 3])) for seed in range(4)]
    return train_pairs(model, pairs, F.cross_entropy)


# ---------------------------------------------------------------------------------------------- spikes


class Leaky(nn.Module):
    """Network of snnTorch's neurons over time, whose membrane voltages forward passes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        snn = library("snntorch")
        self.first, self.second = nn.Linear(20, 128), nn.Linear(128, 5)
        self.hidden, self.out = snn.Leaky(0.9, learn_beta=True), snn.Leaky(0.8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each class: spikes and a tenth of the voltage, summed over steps.

        ``x`` is (steps, batch, features).
        """
        hidden, out = self.hidden.init_leaky(), self.out.init_leaky()
        spikes = []
        for step in x:
            spike, hidden = self.hidden(self.first(step), hidden)
            spike, out = self.out(self.second(spike), out)
            spikes.append(spike + 0.1 * out)
        return torch.stack(spikes).sum(0)


def train_leaky(model: nn.Module) -> list[float]:
    """Train on sequences of different lengths."""
    pairs = [((numbers(steps, 64, 20, seed=steps) + 0.5,), torch.arange(64) % 5) for steps in (30, 30, 21)]
    return train_pairs(model, pairs, F.cross_entropy)


def jelly() -> nn.Module:
    """Build a network of SpikingJelly's layers in multi-step mode, with batch norms."""
    layer, neuron = library("spikingjelly.activation_based.layer"), library("spikingjelly.activation_based.neuron")
    functional = library("spikingjelly.activation_based.functional")
    net = nn.Sequential(
        layer.Conv2d(2, 8, 3, padding=1),
        layer.BatchNorm2d(8),
        neuron.LIFNode(),
        layer.MaxPool2d(2),
        layer.Conv2d(8, 16, 3, padding=1),
        layer.BatchNorm2d(16),
        neuron.IFNode(),
        layer.Flatten(),
        layer.Dropout(0.2),
        layer.Linear(16 * 8 * 8, 5),
        neuron.LIFNode(),
    )
    functional.set_step_mode(net, "m")
    return net


def train_jelly(model: nn.Module) -> list[float]:
    """Train with Adam, and reset the neurons after every step as SpikingJelly requires."""
    reset = library("spikingjelly.activation_based.functional").reset_net
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(EPOCHS):
        for batch in range(3):
            rates = model(numbers(6, 4, 2, 16, 16, seed=batch) + 0.5).mean(0)
            loss = F.mse_loss(rates, F.one_hot(torch.arange(4), 5).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reset(model)
            losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------- losses of several kinds


class Adversaries(nn.Module):
    """Generator and discriminator of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()),
            nn.Linear(256, 32),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(32, 256), nn.LeakyReLU(0.2), nn.Dropout(0.2)),
            *(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.2)),
            nn.Linear(256, 1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return the discriminator's scores of the samples generated from ``noise``."""
        judged: Tensor = self.discriminator(self.generator(noise))
        return judged


def train_adversaries(model: nn.Module) -> list[float]:
    """Train in turns the discriminator, with a gradient penalty, and the generator against the frozen discriminator."""
    generator, discriminator = model.generator, model.discriminator
    assert isinstance(generator, nn.Module)
    assert isinstance(discriminator, nn.Module)
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (generator, discriminator)]
    losses = []
    for _ in range(EPOCHS):
        for batch in range(3):
            real = numbers(512, 32, seed=batch)
            discriminator.requires_grad_(True)
            fake = generator(torch.randn(512, 16)).detach()
            mixed = ((real + fake) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(discriminator(mixed).sum(), mixed, create_graph=True)
            judged = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
            loss = judged + (slope.norm(dim=1) - 1).square().mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            discriminator.requires_grad_(False)
            fooled = F.softplus(-model(torch.randn(512, 16))).mean()
            optimizers[0].zero_grad()
            fooled.backward()
            optimizers[0].step()
            losses += [loss.item(), fooled.item()]
    return losses


class Experts(nn.Module):
    """Mixture of experts: two of four for each token; forward appends a loss to a list and counts in a buffer."""

    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.register_buffer("used", torch.zeros(4))

    def forward(self, x: Tensor, auxiliary: list[Tensor]) -> Tensor:
        """Return the mixed outputs for ``x`` (tokens, features), and append the balance loss to ``auxiliary``."""
        shares = self.gate(x).softmax(-1)
        best, chosen = shares.topk(2, dim=-1)
        self.used += torch.bincount(chosen.flatten(), minlength=4)
        auxiliary.append(shares.mean(0).square().sum() * 4)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * best[rows, slots, None])
        return out


class Mixture(nn.Module):
    """Model of three :class:`Experts` layers, which returns scores and the sum of their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of ``tokens`` (batch, length), and the auxiliary loss."""
        x, auxiliary = self.embed(tokens).flatten(0, 1), list[Tensor]()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), auxiliary)
        return self.head(x), torch.stack(auxiliary).sum()


def tokens(seed: int, batch: int = 6) -> Tensor:
    """Return ``batch`` rows of twelve random tokens."""
    return torch.randint(0, 100, (batch, 12), generator=torch.Generator().manual_seed(seed))


def train_mixture(model: nn.Module) -> list[float]:
    """Train by cross-entropy plus a hundredth of the auxiliary loss."""
    pairs = [((tokens(seed, batch),), tokens(seed + 9, batch).flatten()) for seed, batch in ((1, 6), (2, 6), (3, 4))]
    return train_pairs(model, pairs, lambda out, target: F.cross_entropy(out[0], target) + 0.01 * out[1])


LOOPS: dict[str, Loop] = {
    "Hugging Face Trainer, GPT-2": Loop(gpt2, lambda: padded(sentences()[:4]), train_by_trainer),
    "Padded batches by hand, Llama": Loop(llama, lambda: padded(sentences()[:8]), train_padded),
    "LoRA by peft, GPT-2": Loop(lora, lambda: padded(sentences()[:8]), train_padded),
    "MONAI UNet": Loop(monai_unet, lambda: (numbers(4, 1, 32, 32),), train_segmentation),
    "diffusers UNet": Loop(diffusion_unet, lambda: (numbers(4, 3, 16, 16), torch.arange(4)), train_diffusion),
    "PyTorch Geometric": Loop(GraphNet, lambda: graphs(0), train_graphs),
    "Lightning": Loop(Classifier, lambda: (numbers(8, 3, 16, 16),), train_by_lightning),
    "snnTorch": Loop(Leaky, lambda: (numbers(30, 64, 20) + 0.5,), train_leaky),
    "SpikingJelly": Loop(jelly, lambda: (numbers(6, 4, 2, 16, 16) + 0.5,), train_jelly),
    "GAN with a gradient penalty": Loop(Adversaries, lambda: (numbers(512, 16),), train_adversaries),
    "Mixture of experts": Loop(Mixture, lambda: (tokens(0),), train_mixture),
}


# ---------------------------------------------------------------------------------------------- running them


def planned(name: str, level: int) -> tuple[Plan, str]:
    """Return the plan that ``memopt optimize`` makes for the model of loop ``name``, and its segments in words."""
    loop = LOOPS[name]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(loop.inputs(), Path(folder, "inputs.pt"))
        asked = [f"loops:{loop.model.__name__}", "--code-path", str(Path(__file__).parent), "--level", str(level)]
        asked += ["--input-data", f"{folder}/inputs.pt", "--plan-only", "--no-recommend-batch", "-o", f"{folder}/m.pt"]
        asked += ["--max-slowdown", "none", "--search-time", "20"]  # a busy machine's clock rules out no plan
        run = subprocess.run(
            [sys.executable, "-m", "memopt_cli", "optimize", *asked], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"memopt optimize {' '.join(asked)}: {run.stderr.strip()}")
        plan = from_data(Plan, json.loads(Path(folder, "m.summary.json").read_text())["summary"]["plan"])
    found = [str(len(plan.segments)), *(["and packing"] if plan.packed else [])]
    return plan, " ".join(found)


def trained(loop: Loop, plan: Plan | None) -> list[float]:
    """Return all losses of ``loop`` under ``plan``, or without one if ``None``; always from the same seeds."""
    torch.manual_seed(0)
    model = loop.model()
    if plan is not None:
        memopt_cli.apply_plan(model, plan)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loop.train(model.train())


def run(name: str, level: int) -> list[str]:
    """Train loop ``name`` with and without a plan, and return its row of the table."""
    loop = LOOPS[name]
    try:
        plan, segments = planned(name, level)
        plain, with_plan = trained(loop, None), trained(loop, plan)
    except ModuleNotFoundError as missing:
        return [name, "", "", f"{missing.name} is not installed"]
    worst = max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain, with_plan, strict=True)), default=0.0)
    is_chunked = any(s.chunks > 1 for s in plan.segments)
    fits = "equal" if not worst else f"within {worst:.1g}"
    if worst > (CHUNKED if is_chunked else 0):
        fits = f"**DIFFERENT**, by {worst:.1g}"
    return [name, f"{segments}{', in chunks' if is_chunked else ''}", str(len(plain)), fits]


def rows_of(names: list[str], level: int) -> Iterator[list[str]]:
    """Yield the row of each loop, and print it at once."""
    for name in names:
        row = run(name, level)
        print(" | ".join(row), flush=True)
        yield row


def main() -> None:
    """Run the loops and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="loops whose name contains this")
    parser.add_argument("--level", type=int, default=3, help="of the plans")
    chosen = parser.parse_args()
    names = [name for name in LOOPS if chosen.only.lower() in name.lower()]
    rows = list(rows_of(names, chosen.level))
    if not chosen.only:
        markdown = table(["loop", "segments of its plan", "losses", "with the plan"], rows)
        write_section("Ten real loops", this_command(), markdown)
    if any("DIFFERENT" in row[-1] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
