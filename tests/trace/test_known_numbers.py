"""Numbers that a model reads while it is built without data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt_cli import Step
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.records import InputSpec, StepSettings
from memopt_cli.runtime.private_torch import UNKNOWN_WITHOUT_DATA
from memopt_cli.trace import count_step
from memopt_cli.trace.fake import FakeStep, built_without_data, fake_mode
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.user_step import StepModels
from tests.trace.test_trace import step_of as step_of_model
from tests.zoo.models import GIVEN, Parts


@pytest.fixture
def _without_data() -> Iterator[None]:
    with built_without_data(fake_mode()):
        yield


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize(
    ("read", "numbers"),
    [
        (lambda: [x.item() for x in torch.linspace(0, 0.5, 6)], [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (lambda: torch.linspace(0, 0.5, 6).tolist(), [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (lambda: [float(x) for part in torch.linspace(1, 0, 5).split([2, 3]) for x in part], [1, 0.75, 0.5, 0.25, 0]),
        (lambda: (2 ** torch.arange(4)).tolist(), [1, 2, 4, 8]),
        (lambda: [int(torch.arange(6).view(2, 3).t()[2, 1])], [5]),
        (lambda: [int(torch.tensor([3, 4, 5]).cumsum(0)[-1])], [12]),
        (lambda: [bool((torch.ones(3) > 0).all())], [True]),
        (lambda: [torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))], [True]),
        (lambda: [bool((torch.ones(4, 6, dtype=torch.bool).tril()[:, -1] == 0).all())], [True]),
    ],
)
def test_what_follows_from_the_code_can_be_read(read: Callable[[], list[Any]], numbers: list[Any]) -> None:
    assert read() == pytest.approx(numbers)


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: x.isnan().any(), False),
        (lambda x: torch.isinf(x.t()).any() or (x != x).any(), False),
        (lambda x: (x[0] == x[0]).all(), None),
        (lambda x: (x == 1.0).any(), None),
        (lambda x: (torch.arange(3.0) / 0 == math.inf).all(), False),  # 0 / 0 is not a number
    ],
)
def test_numbers_are_taken_for_finite(ask: Callable[[Tensor], Tensor], answer: bool | None) -> None:
    if answer is None:
        with pytest.raises(UNKNOWN_WITHOUT_DATA):
            bool(ask(torch.randn(3, 4)))
    else:
        assert bool(ask(torch.randn(3, 4))) is answer


def _written() -> float:
    x = torch.linspace(0, 1, 5)
    part = x[1:]
    x.uniform_()
    return part[0].item()


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize(
    "read",
    [
        _written,
        lambda: nn.Linear(3, 3).weight.sum().item(),
        lambda: torch.randperm(5)[0].item(),
        lambda: torch.rand(3).add(torch.ones(3))[0].item(),
        lambda: torch.empty(3)[0].item(),
        lambda: torch.empty_like(torch.ones(3))[0].item(),
        lambda: torch.equal(torch.ones(3), torch.rand(3)),
        lambda: torch.zeros(1 << 25).sum().item(),
    ],
    ids=["written", "a parameter", "drawn", "of what is drawn", "no value yet", "like others", "compared", "large"],
)
def test_other_numbers_are_not_known(read: Callable[[], float]) -> None:
    with pytest.raises(UNKNOWN_WITHOUT_DATA):
        read()


@pytest.mark.usefixtures("_without_data")
def test_a_tensor_that_has_no_storage_of_its_own_is_left_alone() -> None:
    places = torch.arange(4)
    graph = torch.sparse_coo_tensor(torch.stack([places, places]), torch.ones(4), (4, 4), check_invariants=False)
    assert graph.shape == torch.ones(4, 4).to_sparse().shape == (4, 4)
    assert graph.neg_().shape == (4, 4)


class Depth(nn.Module):
    """Layers that a rate leaves out in training; none where it is 0."""

    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.Dropout(r) if r else nn.Identity()) for r in rates]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step_of(build: Callable[[], nn.Module]) -> Step:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Step(models={"net": model}, optimizers=[optimizer], run=run)


def own(build: Callable[[], nn.Module]) -> OwnStep:
    models = StepModels(step_of(build), lambda: step_of(build))
    return OwnStep(model=models, args=(torch.randn(4, 8),), kwargs={}, settings=StepSettings())


def test_a_step_whose_layers_depend_on_numbers_has_a_dry_run() -> None:
    fake = FakeStep(own(Depth))
    assert [type(m).__name__ for m in fake.step.model.modules()].count("Dropout") == 2
    assert fake.count().tensor_peak_bytes > 0


def test_a_step_that_reads_its_parameters_as_it_is_made_has_none() -> None:
    def told() -> nn.Module:
        net = nn.Linear(8, 8)
        assert net.weight.sum().item() != 100
        return net

    with pytest.raises(UNKNOWN_WITHOUT_DATA):
        FakeStep(own(told))


class Padded(Parts, cell=lambda: nn.Linear(8, 8), writes=GIVEN):
    """Takes as many steps as the longest of some sequences, and may write to what says their lengths."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(int(lengths.max())):
            x = torch.tanh(self.cell(x))
        if self.writes:
            lengths.zero_()
        return x


def padded(lengths: Tensor, writes: bool = False) -> Step:
    torch.manual_seed(0)
    return step_of_model(Padded(writes), (torch.randn(4, 8), lengths))


@pytest.mark.parametrize("lengths", [torch.tensor([2, 5, 3, 1]), torch.tensor([[9, 2, 5, 3, 1]])[:, 1:]])
def test_numbers_of_inputs_can_be_read(lengths: Tensor) -> None:
    assert FakeStep(padded(lengths)).count() == count_step(padded(lengths))


def test_a_dry_run_knows_the_same_every_time_though_the_model_writes_to_its_inputs() -> None:
    fake = FakeStep(padded(torch.tensor([2, 5, 3, 1]), writes=True))
    assert fake.count() == fake.count()


def test_numbers_of_floating_inputs_are_not_read() -> None:
    with pytest.raises(UNKNOWN_WITHOUT_DATA):
        FakeStep(padded(torch.tensor([2.0, 5.0, 3.0, 1.0]))).count()


@pytest.mark.slow
@pytest.mark.parametrize(
    "take",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x[:, mask[0]],
        lambda x, mask: x[mask.nonzero(as_tuple=True)],
        lambda x, mask: x.masked_select(mask[..., None]),
        lambda x, mask: x[torch.where(mask[:, 0])[0]],
        lambda x, mask: x[mask[:, 0].long().unique()],
        lambda x, mask: torch.repeat_interleave(x, mask.sum(1), dim=0),
        lambda x, mask: x[:, : int(mask.sum(1).max())],
    ],
    ids="mask column places selected where unique repeated cut".split(),
)
def test_how_many_a_mask_takes_is_known(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Taking(Parts, first=lambda: nn.Linear(8, 8), last=lambda: nn.Linear(1, 16)):
        """Works on what a mask takes."""

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(take(self.first(x), mask).flatten()[:, None]).exp()

    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    step = step_of_model(Taking(), (torch.randn(3, 5, 8), mask))
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes


_GLOBAL = torch.tensor([1, 2, 3, 4])


def _of_a_written_global(x: Tensor) -> Tensor:
    _GLOBAL[:2].add_(5)
    return _GLOBAL.sum()


@pytest.mark.parametrize(
    "read",
    [
        _of_a_written_global,
        lambda x: torch._neg_view(x).sum() + 20,
        lambda x: torch.full((3,), 1 + 2j).conj().imag.sum() + 20,
        lambda x: x.view(2, 2).masked_select(torch.ones(2, 1, 1, dtype=torch.bool)).numel(),
    ],
    ids=["a written global", "negated", "conjugated", "selected by a larger mask"],
)
def test_a_number_is_that_of_data_or_not_known(read: Callable[[Tensor], Any]) -> None:
    class Rows(Parts, linear=lambda: nn.Linear(8, 8)):
        """Makes as many rows as a number says."""

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.ones(8 * int(read(x)) + 1, 8))

    step = step_of_model(Rows(), (torch.tensor([1, 2, 3, 4]),))
    _GLOBAL.copy_(torch.tensor([1, 2, 3, 4]))
    real = count_step(step).tensor_peak_bytes
    _GLOBAL.copy_(torch.tensor([1, 2, 3, 4]))
    with contextlib.suppress(*UNKNOWN_WITHOUT_DATA):
        assert FakeStep(step).count().tensor_peak_bytes == real


@pytest.mark.parametrize("shared", [True, False])
def test_inputs_that_share_memory_are_not_read(shared: bool) -> None:
    class Written(Parts, linear=lambda: nn.Linear(8, 8)):
        """Writes to one input, and reads the other."""

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(4)
            return self.linear(torch.ones(8 * int(y.sum()) + 1, 8))

    numbers = np.array([1, 2, 3])
    inputs = torch.from_numpy(numbers), torch.from_numpy(numbers if shared else numbers.copy())
    fake = FakeStep(step_of_model(Written(), inputs))
    if shared:
        with pytest.raises(UNKNOWN_WITHOUT_DATA):
            fake.count()
    else:
        assert fake.count() == fake.count()


def test_inputs_made_for_inference_have_a_dry_run() -> None:
    with torch.inference_mode():
        lengths = torch.tensor([2, 5, 3, 1])
    assert FakeStep(padded(lengths)).count() == count_step(padded(lengths.clone()))


def test_what_is_noted_keeps_no_tensor() -> None:
    class Positions(nn.Module):
        """Makes a table of numbers over and over, none of which lasts."""

        def forward(self, x: Tensor) -> Tensor:
            for n in range(5):
                x = x * (torch.arange(1000.0) + n).mean()
            return x

    step = step_of_model(Positions(), (torch.randn(3, requires_grad=True),), "none")
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Of models of transformers."""


def padded_mask(shape: str) -> Tensor:
    """The mask that an input with ``padded`` values is given in a dry run."""
    described = InputSpec(tensors=(parse_tensor(f"{shape}@int64=padded"),), source="here")
    with fake_mode():
        (mask,), _ = make_inputs(described, seed=0, device="cpu", dtype=None)
    assert isinstance(mask, Tensor)
    return mask


class Skipping(nn.Module):
    """As attention of transformers does, makes a large mask of its own only if there is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if attention_mask.all():
            return y
        return y + attention_mask.float().unsqueeze(-1).expand(-1, -1, 400).cumsum(-1)[..., :4]


@pytest.mark.parametrize("shape", ["3x16", "1x16"])
def test_a_dry_run_reads_that_a_padded_mask_has_zeros(shape: str) -> None:
    rows, length = map(int, shape.split("x"))
    mask, x = padded_mask(shape), torch.randn(rows, length, 4)
    padded, ones = (step_of_model(Skipping(), (x,), attention_mask=m) for m in (mask, torch.ones_like(mask)))
    assert FakeStep(padded).count().tensor_peak_bytes == count_step(padded).tensor_peak_bytes
    assert FakeStep(padded).count().tensor_peak_bytes > FakeStep(ones).count().tensor_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no mask", "a mask of ones", "padded"])
def test_attention_of_transformers_makes_the_masks_that_it_makes_of_data(kind: str) -> None:
    llama = pytest.importorskip("transformers").LlamaForCausalLM
    config = llama.config_class(**SIZES)
    masks = {"no mask": None, "a mask of ones": torch.ones(2, 48).long(), "padded": padded_mask("2x48")}
    ids = {"input_ids": torch.randint(0, 64, (2, 48)), "attention_mask": masks[kind]}
    step = step_of_model(llama(config), (), **ids)
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes


@pytest.mark.slow
def test_experts_of_transformers_have_a_dry_run() -> None:
    mixtral = pytest.importorskip("transformers").MixtralForCausalLM
    config = mixtral.config_class(**SIZES, num_local_experts=4)
    step = step_of_model(mixtral(config), (), input_ids=torch.randint(0, 64, (2, 48)))
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes
