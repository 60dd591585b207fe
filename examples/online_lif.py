"""Trains a recurrent spiking network online, batched by hand and by vmap, beside back-propagation through time.

``python examples/online_lif.py`` takes about ten seconds on one CPU core.  The network, the data and the ten epochs
are those of BrainScale's tutorial "Batching Online Learning", whose printed losses are shown for comparison: other
random numbers, the same kind of curve.  With matplotlib installed the curves are drawn to ``online_lif.png``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.online import (
    ES_D_RTRL,
    LIF,
    Batching,
    LeakyRateReadout,
    OverTime,
    Vmap,
    accumulate_online,
    accumulate_through_time,
    init_all_states,
    traced,
    vmap_new_states,
)
from memopt_cli.online.neurons import kaiming_normal_

N_TIME, N_BATCH, N_IN, N_HIDDEN, N_OUT = 16, 128, 100, 200, 10
LISTING = {
    "tutorial, manual": (4.8891, 3.3748, 2.9881, 2.7006, 2.7921, 2.7267, 2.5467, 2.5019, 2.4054, 2.3258),
    "tutorial, automatic": (4.0168, 3.1031, 2.8214, 2.5791, 2.6134, 2.5754, 2.4770, 2.3772, 2.3254, 2.2870),
}
"""Losses that the tutorial prints, by epoch."""


class LIFNet(nn.Module):
    """Inputs and the last spikes -> one traced weight -> LIF neurons -> leaky readout; for one sample or a batch."""

    def __init__(self, n_in: int = N_IN, n_hidden: int = N_HIDDEN, n_out: int = N_OUT) -> None:
        super().__init__()
        self.neu = LIF(n_hidden)
        self.syn = traced(nn.Linear(n_in + n_hidden, n_hidden))
        self.out = LeakyRateReadout(n_hidden, n_out)
        with torch.no_grad():
            kaiming_normal_(self.syn.weight[:, :n_in])
            kaiming_normal_(self.syn.weight[:, n_in:])
            self.syn.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n_in]`` -> ``[B, n_out]``, or without the batch axis."""
        combined = torch.cat([x, self.neu.get_spike()], dim=-1)
        readout: Tensor = self.out(self.neu(self.syn(combined)))
        return readout


class Trainer:
    """Ten epochs of one batch; the loss is summed over time, gradients are clipped to norm 1, then Adam."""

    def __init__(self) -> None:
        self.model = LIFNet()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a batch ``[T, B, n_in]`` to ``.grad`` and return its mean loss."""
        raise NotImplementedError

    def train(self, inputs: Tensor, targets: Tensor) -> float:
        """One epoch; its mean loss."""
        loss = self.gradients(inputs, targets)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


class TrainerManualBatching(Trainer):
    """States are ``[B, ...]``, and the algorithm is told."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        init_all_states(self.model, batch_size=inputs.shape[1])
        model = ES_D_RTRL(self.model, decay_or_rank=0.9, mode=Batching())
        model.compile_graph(inputs[0])
        return accumulate_online(model, inputs, targets, F.cross_entropy)


class TrainerAutoBatching(Trainer):
    """Model and algorithm see one sample; ``vmap`` sees to the batch."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        model = ES_D_RTRL(self.model, decay_or_rank=0.9)

        @vmap_new_states(axis_size=inputs.shape[1], state_tag="new")
        def init() -> None:
            init_all_states(self.model)
            model.compile_graph(inputs[0, 0])

        init()
        return accumulate_online(Vmap(model, vmap_states="new"), inputs, targets, F.cross_entropy)


class TrainerThroughTime(Trainer):
    """Back-propagation through time, whose memory grows with every step."""

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        init_all_states(self.model, batch_size=inputs.shape[1])
        return accumulate_through_time(self.model, inputs, targets, F.cross_entropy)


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "manual": TrainerManualBatching,
    "automatic": TrainerAutoBatching,
    "through time": TrainerThroughTime,
}


def curves(seed: int, epochs: int) -> dict[str, list[float]]:
    """Name of a trainer -> its losses, all from the same weights on the same batch."""
    torch.manual_seed(seed)
    inputs, targets = torch.rand(N_TIME, N_BATCH, N_IN), torch.randint(0, N_OUT, (N_BATCH,))
    found = {}
    for name, make in TRAINERS.items():
        torch.manual_seed(seed)
        trainer = make()
        found[name] = [trainer.train(inputs, targets) for _ in range(epochs)]
    return found


def print_table(found: dict[str, list[float]]) -> None:
    """One line per epoch."""
    shown = {**found, **{name: list(losses) for name, losses in LISTING.items()}}
    print("epoch", *(f"{name:>19}" for name in shown))
    for epoch in range(max(map(len, found.values()))):
        cells = (f"{losses[epoch]:19.4f}" if epoch < len(losses) else " " * 19 for losses in shown.values())
        print(f"{epoch + 1:5d}", *cells)


def plot(found: dict[str, list[float]], path: Path) -> None:
    """Draw the curves; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = dict(zip(TRAINERS, ("-", ":", "-"), strict=True))
    for name, losses in found.items():
        axes.plot(
            range(1, len(losses) + 1), losses, styles[name], label=name, linewidth=3 if name == "automatic" else 1.5
        )
    for name, listed in LISTING.items():
        axes.plot(range(1, len(listed) + 1), listed, "--", label=name, linewidth=1)
    axes.set(xlabel="epoch", ylabel="mean cross-entropy", title="Online learning of a recurrent LIF network")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plot", type=Path, default=Path("online_lif.png"), help="where the curves are drawn")
    parser.add_argument("--save", type=Path, help="only save the untrained network over time, for memopt's commands")
    arguments = parser.parse_args()
    if arguments.save:
        torch.manual_seed(arguments.seed)
        torch.save(OverTime(LIFNet()), arguments.save)
        return
    found = curves(arguments.seed, arguments.epochs)
    print_table(found)
    if find_spec("matplotlib"):
        plot(found, arguments.plot)
        print(f"curves: {arguments.plot}")
    else:
        print("no curves drawn: install matplotlib for them")


if __name__ == "__main__":
    main()
