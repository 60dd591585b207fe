"""Trains 16 seeds of a small network on scikit-learn's digits at once, then each alone, and compares them.

``python examples/many_seeds.py`` takes about half a minute on one CPU core, most of it for the separate trainings.
Every seed has weights and an order of the data of its own.  Training is in float64, in which the two ways differ by
rounding only; so the accuracies are the same, seed by seed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from memopt_cli.model_batching import BatchModule, batch_accuracy, batch_loss

TRAIN = 1500
BATCH = 50


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (n, 1, 8, 8) in float64 and labels (n,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training gave."""

    accuracies: list[float]
    """On the test images, seed by seed."""
    seconds: float
    states: list[dict[str, Tensor]]


def digits() -> tuple[Digits, Digits]:
    """What to train on, and what to test on."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64)[:, None] / 16
    labels = torch.tensor(data.target)
    return Digits(images[:TRAIN], labels[:TRAIN]), Digits(images[TRAIN:], labels[TRAIN:])


def network(seed: int) -> nn.Module:
    """A convolutional network of about ten thousand parameters."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(72, 100), nn.ReLU(), nn.Linear(100, 10)).double()


def orders(seeds: int, epochs: int) -> Tensor:
    """Indices of the training images, (steps, seeds, images of a step)."""
    shuffled = [
        torch.cat([torch.randperm(TRAIN, generator=generator) for _ in range(epochs)])
        for generator in (torch.Generator().manual_seed(seed) for seed in range(seeds))
    ]
    return torch.stack(shuffled).view(seeds, -1, BATCH).transpose(0, 1)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One that does not couple the models."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


def train_together(train: Digits, test: Digits, seeds: int, epochs: int) -> Outcome:
    """All seeds as one model."""
    models = BatchModule(network(0), seeds)
    models.load_state_dicts([network(seed).state_dict() for seed in range(seeds)])
    optimizer = optimizer_of(list(models.parameters()))
    start = time.perf_counter()
    for indices in orders(seeds, epochs):
        optimizer.zero_grad()
        scores = models(train.images[indices])
        batch_loss(scores, train.labels[indices], seeds, F.cross_entropy).sum().backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    models.eval()
    with torch.no_grad():
        scores = models(test.images.expand(seeds, *test.images.shape))
    (accuracies,) = batch_accuracy(scores, test.labels.expand(seeds, -1), seeds).tolist()
    return Outcome(accuracies, seconds, models.state_dicts())


def train_apart(train: Digits, test: Digits, seeds: int, epochs: int) -> Outcome:
    """One seed after the other, as without memopt."""
    accuracies, states, start = [], [], time.perf_counter()
    for seed, steps in enumerate(orders(seeds, epochs).transpose(0, 1)):
        model = network(seed)
        optimizer = optimizer_of(list(model.parameters()))
        for indices in steps:
            optimizer.zero_grad()
            F.cross_entropy(model(train.images[indices]), train.labels[indices]).backward()
            optimizer.step()
        with torch.no_grad():
            hits = model.eval()(test.images).argmax(dim=1) == test.labels
        accuracies.append(hits.float().mean().item())
        states.append(model.state_dict())
    return Outcome(accuracies, time.perf_counter() - start, states)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Between any two parameters or statistics of the same seed."""
    pairs = zip(one.states, other.states, strict=True)
    return max((a[k] - b[k]).abs().max().item() for a, b in pairs for k in a)


def main() -> None:
    """Train both ways and print one line per seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    train, test = digits()
    together = train_together(train, test, options.seeds, options.epochs)
    apart = train_apart(train, test, options.seeds, options.epochs)
    print("seed  together   apart")
    for seed, (one, other) in enumerate(zip(together.accuracies, apart.accuracies, strict=True)):
        print(f"{seed:4}  {one:8.4f}  {other:6.4f}")
    print(f"equal accuracy for every seed: {together.accuracies == apart.accuracies}")
    print(f"largest difference of any weight: {largest_difference(together, apart):.1e}")
    print(f"{together.seconds:.1f} s together, {apart.seconds:.1f} s apart")


if __name__ == "__main__":
    main()
