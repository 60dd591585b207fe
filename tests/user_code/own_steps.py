"""Steps of one's own: one that is right, and others that each go wrong in one way; input ``4x8``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli import Step


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(3)))


def two_rounds() -> Step:
    """A model and its judge, each with an optimizer; backward is called twice."""
    maker, judge = _layers(), nn.Sequential(_layers(), nn.Linear(8, 1))
    of_maker, of_judge = torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.SGD(judge.parameters(), lr=0.1)

    def run(x: Tensor) -> dict[str, Tensor]:
        made = maker(x)
        of_judge.zero_grad()
        judged = judge(x).square().mean() + judge(made.detach()).mean()
        judged.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = -judge(made).mean()
        fooled.backward()
        of_maker.step()
        return {"judge": judged.detach(), "maker": fooled.detach()}

    return Step(models={"maker": maker, "judge": judge}, optimizers=[of_maker, of_judge], run=run)


def penalized() -> Step:
    """The gradient by the input is part of the loss, which is differentiated again; numbers of it are read."""
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def run(x: Tensor) -> tuple[Tensor, float]:
        x = x.detach().requires_grad_()
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        loss = slope.square().mean() + y.square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), loss.item()

    return Step(models={"net": model}, optimizers=[optimizer], run=run)


def mean_teacher() -> Step:
    """A teacher in eval mode that follows the model, and a schedule of its rate."""
    model, teacher = _layers(), _layers().eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        return loss.detach()

    return Step(models={"net": model, "teacher": teacher}, optimizers=[optimizer], run=run)


def scaled() -> Step:
    """Under autocast to float16, with a scaler that skips the first updates: their gradients overflow."""
    model = _layers()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Step(models={"net": model}, optimizers=[optimizer], run=run)


def always_skipped() -> Step:
    """The loss is finite, and its gradient is not."""
    model = _layers()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (0 * model(x).sum()).abs().sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Step(models={"net": model}, optimizers=[optimizer], run=run)


def _plain(take: Callable[[nn.Module, Tensor], Any], **listed: Any) -> Step:
    model = _layers()
    return Step(models={"net": model}, run=lambda x: take(model, x), **listed)


def nothing() -> Step:
    return _plain(lambda model, x: model(x).sum().backward())


def something_else() -> Any:
    return 3


def draws_data() -> Step:
    generator = torch.Generator()

    def take(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(torch.randn(4, 8, generator=generator)).mean()
        loss.backward()
        return loss.detach()

    return _plain(take)


def closure() -> Step:
    model = _layers()
    return Step(models={"net": model}, optimizers=[torch.optim.LBFGS(model.parameters())], run=model)


def closure_of_another() -> Step:
    model = _layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: Tensor) -> Tensor:
        def loss() -> Tensor:
            loss = model(x).mean()
            loss.backward()
            return loss

        return optimizer.step(loss)  # type: ignore[no-any-return]

    return Step(models={"net": model}, optimizers=[optimizer], run=run)


def nan_loss() -> Step:
    def take(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).mean() * float("nan")
        loss.backward()
        return loss.detach()

    return _plain(take)


def nan_gradient() -> Step:
    """What it returns is finite."""

    def take(model: nn.Module, x: Tensor) -> Tensor:
        (model(x).mean() * float("nan")).backward()
        return x.detach()

    return _plain(take)


def sparse() -> Step:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), _layers())

    def run(x: Tensor) -> Tensor:
        loss = model(x.argmax(1)).mean()
        loss.backward()
        return loss.detach()

    return Step(models={"net": model}, run=run)


def strange_parameters() -> Step:
    return _plain(lambda model, x: model(x), optimizers=[torch.optim.SGD([nn.Parameter(torch.ones(3))])])


def unlisted() -> Step:
    def take(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward()
        torch.optim.SGD(model.parameters()).step()
        return loss.detach()

    return _plain(take)


def no_backward() -> Step:
    return _plain(lambda model, x: model(x).mean())


def rejects() -> Step:
    def take(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x[:, 1:]).mean()
        loss.backward()
        return loss.detach()

    return _plain(take)


def fails() -> Step:
    def take(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("labels")

    return _plain(take)
