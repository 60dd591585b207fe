"""Models that go wrong, each in one way; input ``2x3`` unless said otherwise."""

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memopt_cli


class ConvNet(nn.Sequential):
    """Takes images of one channel; nothing is wrong with it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), nn.ReLU(), nn.Flatten())


class _After(nn.Module):
    """A layer, and then the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fault(self.layer(x))

    def fault(self, y: Tensor) -> Any:
        raise NotImplementedError


class Fine(_After):
    def fault(self, y: Tensor) -> Tensor:
        return y


class Detached(_After):
    def fault(self, y: Tensor) -> Tensor:
        return y.argmax(-1)


class ReadsAParameter(_After):
    def __init__(self) -> None:
        super().__init__()
        self.norm = next(self.parameters()).norm().item()


class NotANumber(_After):
    def fault(self, y: Tensor) -> Tensor:
        return (y - y) / 0


class FailsInBackward(_After):
    def fault(self, y: Tensor) -> Tensor:
        sigmoid = y.sigmoid()
        product = sigmoid * sigmoid
        sigmoid.add_(1)
        return product


class Raises(_After):
    def fault(self, y: Tensor) -> Tensor:
        raise ValueError("the model's own complaint\nand more of it")


class Sleeps(_After):
    """Touches the file that ``ASLEEP`` names, then sleeps."""

    def fault(self, y: Tensor) -> Tensor:
        if "ASLEEP" in os.environ:
            Path(os.environ["ASLEEP"]).touch()
        time.sleep(600)
        return y


class SleepsOverMuch(Sleeps):
    """Only more than 100 rows with data make it sleep."""

    def fault(self, y: Tensor) -> Tensor:
        return super().fault(y) if len(y) > 100 and type(y) is Tensor else y


class Killed(_After):
    def fault(self, y: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return y


class Crashes(_After):
    def fault(self, y: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return y


class Exits(_After):
    def fault(self, y: Tensor) -> Tensor:
        os.write(1, b"the model's last words\n")
        os._exit(7)


class Chatters(_After):
    """Prints eight megabytes, then works."""

    def fault(self, y: Tensor) -> Tensor:
        os.write(1, b"chatter " * (1 << 20))
        return y


class ClosesItsPipe(_After):
    """Closes every file it has inherited, then lives on."""

    def fault(self, y: Tensor) -> Tensor:
        os.closerange(3, 100)
        time.sleep(600)
        return y


class Hungry(_After):
    """Wants 3 GiB, which no dry run foresees, and touches little of it."""

    def fault(self, y: Tensor) -> Tensor:
        y.sum().item()
        return y + torch.empty(3 << 28)[0]


class Forks(_After):
    """Leaves a process behind, and never returns."""

    def fault(self, y: Tensor) -> Tensor:
        os.fork()
        time.sleep(600)
        return y


class LeavesOneBehind(_After):
    """Ends, but for a process that it has started."""

    def fault(self, y: Tensor) -> Tensor:
        if os.fork():
            os._exit(7)
        time.sleep(600)
        return y


class Starves(_After):
    """Wants 24 GiB where there are 16, of which PyTorch's libraries for GPUs take some."""

    def fault(self, y: Tensor) -> Tensor:
        y.sum().item()  # no dry run foresees it
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return y + torch.empty(3 << 31)[0]


class CannotBeSaved(nn.Module):
    """Fine, but for a function of its own among its attributes; input ``8x32``, and segments pay with ``256x32``."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(3))
        self.layers = nn.Sequential(*blocks)
        self.scale = lambda y: y * 2

    def forward(self, x: Tensor) -> Any:
        return self.scale(self.layers(x))


class Remembers(_After):
    """Keeps its last output, graph and all; it was run once before it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self(torch.ones(2, 3))

    def fault(self, y: Tensor) -> Tensor:
        self.last = y
        return y


class Spare(_After):
    """Has a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)

    def fault(self, y: Tensor) -> Tensor:
        return y


class SeesBackward(nn.Module):
    """Computes something else where backward runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.widen(x).tanh()
        return self.narrow(hidden * 2 if torch._C._current_autograd_node() else hidden)


class SeesBackwardInEval(SeesBackward):
    """The same in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.widen(x).tanh()) if self.training else super().forward(x)


def one_sees_backward() -> nn.Module:
    """A model of which one layer cannot be a segment, and nothing tells before it has run."""
    return _with(SeesBackward())


def one_sees_backward_in_eval() -> nn.Module:
    """The same in eval mode alone."""
    return _with(SeesBackwardInEval())


def _with(odd: nn.Module) -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))

    return nn.Sequential(layer(), layer(), odd, layer())


def make_step() -> memopt_cli.Step:
    """A step of a ConvNet; nothing is wrong with it."""
    net = ConvNet()

    def run(x: Tensor) -> Tensor:
        loss: Tensor = net(x).sum()
        loss.backward()
        return loss

    return memopt_cli.Step(models={"net": net}, run=run)
