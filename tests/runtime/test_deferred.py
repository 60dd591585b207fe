"""A linear head whose cross-entropy is formed chunk by chunk does what the same head does whole."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memopt_cli
from memopt_cli import trace
from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime import LossContainer, SegmentConfig, install_segment, remove_segment
from memopt_cli.runtime.deferred import DeferredLinear, _LinearCrossEntropy
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.effects import difference, effects
from memopt_cli.verification.recorded_step import verify_step
from tests.zoo.watching import silent

CLASSES, WIDTH = 11, 6
THROUGH_LOSS = SegmentConfig(chunks=4, through_loss=True)
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with silent():
        yield


def targets() -> Tensor:
    found = torch.randint(CLASSES, (3, 5), generator=torch.Generator().manual_seed(7))
    found[0, :2] = -100
    return found


def results(layer: nn.Linear, loss: Loss, x: Tensor) -> dict[str, Tensor]:
    """Return the loss and every gradient."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    value = loss(layer(x))
    value.backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"loss": value.detach(), "x": x.grad, **grads}


def compare(loss: Loss, config: SegmentConfig = THROUGH_LOSS, *, bias: bool = True) -> None:
    """Whole and in chunks, in float64."""
    layer = nn.Linear(WIDTH, CLASSES, bias=bias).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    whole = results(layer, loss, x)
    install_segment(layer, config)
    chunked = results(layer, loss, x)
    assert whole.keys() == chunked.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(chunked[name], expected, rtol=1e-12, atol=1e-14, equal_nan=True, msg=name)


def flat(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), targets().view(-1), **options)


def transposed(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets(), **options)


def shifted(logits: Tensor, **options: Any) -> Tensor:
    """Return the loss of shifted logits, as older and newer models of Hugging Face compute it."""
    before = logits.double()[..., :-1, :].contiguous()
    return F.cross_entropy(before.view(-1, CLASSES), targets()[..., 1:].reshape(-1), **options)


def as_module(logits: Tensor, **options: Any) -> Tensor:
    return nn.CrossEntropyLoss(**options)(logits.flatten(0, 1), targets().flatten())


@pytest.mark.parametrize("loss", [flat, transposed, shifted, as_module])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_option_of_cross_entropy(loss: Callable[..., Tensor], reduction: str) -> None:
    weights = (None, torch.rand(CLASSES, dtype=torch.float64))
    for weight, smoothing, ignored in itertools.product(weights, (0.0, 0.3), (-100, 2)):
        found = targets().clamp(min=0) if ignored >= 0 else targets()
        if ignored >= 0 and loss is not flat:
            continue
        options = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing}
        if loss is flat:
            compare(
                lambda y, t=found, i=ignored, o=options: F.cross_entropy(
                    y.view(-1, CLASSES), t.view(-1), ignore_index=i, **o
                )
            )
        else:
            compare(lambda y, o=options: loss(y, **o))


@pytest.mark.parametrize("chunks", [2, 3, 15, 40])
def test_any_number_of_chunks(chunks: int) -> None:
    compare(flat, SegmentConfig(chunks=chunks, through_loss=True), bias=False)


def test_nothing_but_ignored_targets() -> None:
    compare(lambda y: F.cross_entropy(y.flatten(0, 1), torch.full((15,), -100)))


def test_a_scaled_loss_and_two_backwards() -> None:
    layer = nn.Linear(WIDTH, CLASSES).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    whole = results(layer, lambda y: flat(y) * 6, x)
    install_segment(layer, THROUGH_LOSS)
    layer.zero_grad()
    loss = flat(layer(x))
    (loss * 4).backward(retain_graph=True)
    (loss * 2).backward()
    torch.testing.assert_close(layer.weight.grad, whole["weight"], rtol=1e-12, atol=0)


READERS: dict[str, Loss] = {
    "another term": lambda y: flat(y) + y.logsumexp(-1).square().mean(),
    "no reduction": lambda y: flat(y, reduction="none").square().sum(),
    "probabilities": lambda y: F.cross_entropy(y.flatten(0, 1), torch.full((15, CLASSES), 1 / CLASSES).double()),
    "a mask": lambda y: F.cross_entropy(y[targets() >= 0], targets()[targets() >= 0]),
    "some classes": lambda y: y[..., :4].square().sum(),
    "two functions": lambda y: F.nll_loss(F.log_softmax(y, -1).flatten(0, 1), targets().flatten()),
    "other rows": lambda y: F.cross_entropy(y[1], targets()[1]) + y[2, 1:3].square().sum(),
    "one row": lambda y: F.cross_entropy(y[1, 2], targets()[1, 2]),
    "transposed": lambda y: (y.transpose(1, 2) ** 3).sum(),
    "a lower precision": lambda y: flat(y.float().double()) + flat(y.bfloat16()).double(),
    "a function of the user's": lambda y: _Square.apply(y).sum(),
    "a tensor it is assigned to": lambda y: _assigned(y),
    "its type": lambda y: (y.type() == "torch.DoubleTensor") * y.square().sum(),
    "targets of another integer type": lambda y: F.cross_entropy(y.flatten(0, 1), targets().flatten().abs().byte() % 9),
    "a checkpoint": lambda y: checkpoint(flat, y, use_reentrant=False),
}


def _assigned(y: Tensor) -> Tensor:
    buffer = torch.ones(4, 5, CLASSES, dtype=torch.float64)
    buffer[:3] = y
    return buffer.square().sum()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_it_gets_its_values_and_gradient(reader: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(READERS[reader])


def deferred() -> tuple[nn.Linear, Tensor]:
    layer = nn.Linear(WIDTH, CLASSES)
    install_segment(layer, THROUGH_LOSS)
    return layer, layer(torch.randn(3, 5, WIDTH))


def test_reading_it_before_its_loss_is_told() -> None:
    _, logits = deferred()
    with pytest.warns(UserWarning, match="read by something other than cross_entropy") as warned:
        logits.argmax(-1)
    assert warned[0].filename == __file__  # not a line of PyTorch's, in which nothing can be mended


def test_its_shape_is_known_without_its_values() -> None:
    layer, logits = deferred()
    assert isinstance(logits, DeferredLinear)
    assert (logits.shape, logits.dtype, len(logits), logits.size(-1)) == ((3, 5, CLASSES), torch.float32, 3, CLASSES)
    assert logits.requires_grad
    assert not logits.is_computed
    flat(logits).backward()
    assert not logits.is_computed
    with pytest.warns(UserWarning, match=r"after its loss, so it is computed again \(0\.0 MiB\): .*\[:, -1\]"):
        torch.testing.assert_close(logits.detach(), F.linear(logits._head.x, layer.weight, layer.bias))


@pytest.mark.parametrize("change", ["optimizer", "fused optimizer", "input"])
def test_values_that_can_no_longer_be_had(change: str) -> None:
    layer, logits = deferred()
    flat(logits).backward()
    if change == "input":
        logits._head.x.add_(1)  # type: ignore[union-attr]
    else:
        torch.optim.AdamW(layer.parameters(), fused=change.startswith("fused")).step()
    with pytest.raises(RuntimeError, match=r"Read it before optimizer\.step\(\)"):
        logits.argmax(-1)


def test_what_would_be_wrong_is_refused() -> None:
    _, logits = deferred()
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(flat(logits), logits._head.weight, create_graph=True)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="retain_grad"):
        logits.retain_grad()
    with pytest.warns(UserWarning, match="is not called for a loss"):
        logits.register_hook(lambda g: None)
    with pytest.raises(RuntimeError, match="modifies the output"):
        logits[..., 0] = 0
    with pytest.raises(RuntimeError, match="modifies the output"), pytest.warns(UserWarning, match="after its loss"):
        logits.mul_(2)


def test_a_gradient_that_is_asked_for_first_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, logits = deferred()
        logits.retain_grad()
        flat(logits).backward()
    assert logits.grad.shape == logits.shape


def test_only_training_is_in_chunks() -> None:
    layer, _ = deferred()
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        assert type(layer(x)) is Tensor
    assert type(layer(x[0, 0])) is Tensor
    assert type(layer.eval()(x)) is Tensor
    frozen = layer.train().requires_grad_(False)
    assert type(frozen(x)) is Tensor
    assert isinstance(frozen(x.requires_grad_()), DeferredLinear)


def test_of_what_is_frozen_no_gradient_is_formed() -> None:
    layer = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
    install_segment(layer, THROUGH_LOSS)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    flat(layer(x)).backward()
    assert layer.weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_half_precision(stored: torch.dtype) -> None:
    layer = nn.Linear(WIDTH, CLASSES).to(stored)
    x = torch.randn(3, 5, WIDTH, dtype=stored)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stored is torch.float32):
        whole = results(layer, flat, x)
        install_segment(layer, THROUGH_LOSS)
        chunked = results(layer, flat, x)
        assert layer(x).dtype == torch.bfloat16
    for name, expected in whole.items():
        assert chunked[name].dtype == expected.dtype, name
        torch.testing.assert_close(chunked[name], expected, rtol=0.05, atol=0.01, msg=name)


@pytest.mark.parametrize("chunks", [2, 16])
@pytest.mark.parametrize(
    ("stored", "autocast", "factor", "largest", "tolerance"),
    [
        (torch.float16, None, 2**16, 1 / 8, 2e-3),
        (torch.float16, None, 2**8, 64, 2e-3),
        (torch.float32, torch.float16, 2**16, 64, 2e-3),
        (torch.bfloat16, None, 2**16, 64, 2e-2),
    ],
)
def test_a_mean_over_many_rows_in_half_precision(
    stored: torch.dtype, autocast: torch.dtype | None, factor: int, largest: float, tolerance: float, chunks: int
) -> None:
    """1 / 8192 of a probability is nothing in float16 before a scaler's factor, and the sum over all rows too much."""
    layer, x = nn.Linear(WIDTH, CLASSES), largest * torch.rand(8192, WIDTH).to(stored)
    nn.init.normal_(layer.weight, std=1 / 64)
    layer.to(stored)
    target = torch.arange(8192) % 64 == 0  # class 1 of each 64th row, class 0 of all others

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target.where(torch.arange(8192) > 9, -100).long()) * factor

    whole = results(copy.deepcopy(layer).float(), loss, x.float())
    install_segment(layer, SegmentConfig(chunks=chunks, through_loss=True))
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        chunked = results(layer, loss, x)
    for name, expected in whole.items():
        error = (chunked[name].float() - expected).abs().max() / expected.abs().max()
        assert error < tolerance, name
        bias = (chunked[name].float() - expected).mul(expected).sum() / expected.square().sum()
        assert bias.abs() < tolerance / 2, name
    assert not chunked["x"][:10].any()


def test_what_comes_from_above_is_not_rounded_to_the_weights_precision() -> None:
    """All gradients of bfloat16 would be wrong by one factor."""
    layer = nn.Linear(WIDTH, CLASSES).bfloat16()
    install_segment(layer, THROUGH_LOSS)
    x = torch.randn(3, 5, WIDTH, dtype=torch.bfloat16)
    once = results(layer, lambda y: flat(y.float()), x)["weight"].double()
    scaled = results(layer, lambda y: flat(y.float()) * 1.00390625, x)["weight"].double()  # halfway to the next
    assert ((scaled * once).sum() / once.square().sum() - 1.00390625).abs() < 5e-4


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results of each operator by its name and their shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen[func.overloadpacket.__name__, tuple(result.shape)] += 1
        return result


def test_autocast_casts_the_weight_once() -> None:
    layer, x = nn.Linear(WIDTH, CLASSES), torch.randn(3, 5, WIDTH)
    install_segment(layer, THROUGH_LOSS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with _Operators() as calling:
            logits = layer(x)
        with _Operators() as losing:
            flat(logits)
    assert calling.seen["_to_copy", (CLASSES, WIDTH)] == 0
    assert losing.seen["_to_copy", (CLASSES, WIDTH)] == 1
    assert losing.seen["mm", (CLASSES, WIDTH)] == THROUGH_LOSS.chunks


@pytest.mark.parametrize("trained", ["input", "weight"])
def test_backward_of_what_reads_it_forms_only_gradients_that_are_wanted(trained: str) -> None:
    layer, x = nn.Linear(WIDTH, CLASSES), torch.randn(15, WIDTH)
    x.requires_grad_(trained == "input")
    layer.weight.requires_grad_(trained == "weight")
    install_segment(layer, THROUGH_LOSS)
    with pytest.warns(UserWarning, match="computed whole"):
        loss = layer(x).square().sum()
    with _Operators() as counted:
        loss.backward()
    of_x, of_weight = counted.seen["mm", (15, WIDTH)], counted.seen["mm", (CLASSES, WIDTH)]
    assert (of_x, of_weight) == ((1, 0) if trained == "input" else (0, 1))


def test_a_cast_to_float64_is_heeded() -> None:
    layer, x = nn.Linear(WIDTH, CLASSES, bias=False), torch.randint(-8, 8, (3, 5, WIDTH)).float()
    layer.weight.data.mul_(8).round_().div_(8)  # the logits are exact, in whatever order they are summed
    expected = flat(layer(x).double()).detach()
    install_segment(layer, THROUGH_LOSS)
    assert (flat(layer(x).double()) - expected).abs() < 1e-14


# ---------------------------------------------------------------------------------------------- in a model


class LanguageModel(nn.Module):
    """Head tied to the embedding; loss and logits by functions in its own forward, as Hugging Face's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 512, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.tokens(ids)))
        loss = F.cross_entropy(logits.float()[:, :-1].reshape(-1, 512), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class Scriptable(LanguageModel):
    """A language model without logits in its output, whose shape a traced dictionary would not tell."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = self.head(self.body(self.tokens(ids)))
        return F.cross_entropy(logits.float()[:, :-1].reshape(-1, 512), labels[:, 1:].reshape(-1))


PLAN = Plan(segments=(SegmentPlan(path="head", chunks=8, through_loss=True),))


def step_of(model: nn.Module) -> TrainingStep:
    ids = torch.randint(512, (4, 16))
    return TrainingStep(model=model, args=(ids, ids), kwargs={}, settings=StepSettings())


def test_a_plan_with_a_head_through_its_loss_is_verified() -> None:
    model = LanguageModel()
    names = list(model.state_dict())
    found = verify_step(
        step_of(model),
        PLAN,
        lambda m: apply_plan(m, PLAN),
        lambda m: remove_segment(m.head),
        batch=4,
        full_size=True,
    )
    assert found.passed, found
    assert found.precision == "fp64"
    apply_plan(model, PLAN)
    assert list(model.state_dict()) == names
    assert isinstance(model.head, LossContainer)
    assert isinstance(model.head, nn.Linear)
    assert plan_of(model).segments == PLAN.segments


class Headed(nn.Sequential):
    """Gives logits, of which the training script forms the loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 64))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_loss_outside_the_model_is_verified_in_chunks(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(segments=(SegmentPlan(path="2", chunks=8, through_loss=True),))
    target = torch.randint(64, (8,))
    step = TrainingStep(
        model=Headed(),
        args=(torch.randn(8, 16),),
        kwargs={},
        settings=StepSettings(),
        loss=lambda logits: F.cross_entropy(logits, target),
    )
    right = _LinearCrossEntropy.backward
    if is_wrong:
        doubled = lambda ctx, g: right(ctx, g * 2)  # noqa: E731
        monkeypatch.setattr(_LinearCrossEntropy, "backward", staticmethod(doubled))
    found = verify_step(step, plan, lambda m: apply_plan(m, plan), remove_plan, batch=8, full_size=True)
    assert found.passed is not is_wrong, found
    if is_wrong:
        assert found.worst_name.startswith("gradient")


def test_a_step_that_looks_for_nan_reads_no_logits() -> None:
    inside = step_of(apply_plan(LanguageModel(), PLAN)).run_checked()["logits"]
    target = torch.randint(64, (8,))
    model = apply_plan(Headed(), replace(PLAN, segments=(replace(PLAN.segments[0], path="2"),)))
    x, loss = torch.randn(8, 16), lambda logits: F.cross_entropy(logits, target)
    outside = TrainingStep(model=model, args=(x,), kwargs={}, settings=StepSettings(), loss=loss).run_checked()
    assert not inside.is_computed
    assert not outside.is_computed


@pytest.mark.slow
def test_neither_logits_nor_their_gradient_exist() -> None:
    model = LanguageModel()
    logits_bytes = 4 * 16 * 512 * 4
    whole = trace.count_step(step_of(model))
    apply_plan(model, PLAN)
    chunked = trace.count_step(step_of(model))
    assert trace.FakeStep(step_of(model)).count().tensor_peak_bytes == chunked.tensor_peak_bytes
    assert whole.tensor_peak_bytes - chunked.tensor_peak_bytes > 2 * logits_bytes
    assert chunked.tensor_peak_bytes - sum(p.nbytes for p in model.parameters()) < logits_bytes


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["scripted", "traced", "exported"])
def test_a_head_that_was_stored_as_a_program(stored: str, tmp_path: Path) -> None:
    model = Scriptable()
    ids = torch.randint(512, (4, 16))
    warnings.filterwarnings("ignore", "`torch.jit")
    path = tmp_path / ("model.pt2" if stored == "exported" else "model.ts")
    if stored == "exported":
        torch.export.save(torch.export.export(model, (ids, ids)), path)
    else:
        made = torch.jit.script(model) if stored == "scripted" else torch.jit.trace(model, (ids, ids))
        torch.jit.save(made, path)
    step = step_of(memopt_cli.load(path).train())
    whole, expected = trace.count_step(step), effects(step)
    apply_plan(step.model, PLAN)
    chunked, found = trace.count_step(step), effects(step)
    assert whole.tensor_peak_bytes - chunked.tensor_peak_bytes > 2 * 4 * 16 * 512 * 4
    assert difference(expected, found).relative < 1e-5


def test_saved_and_loaded_and_copied() -> None:
    model = apply_plan(LanguageModel(), PLAN)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    ids = torch.randint(512, (4, 16))
    for other in (loaded, copy.deepcopy(model)):
        assert isinstance(other(ids, ids)["logits"], DeferredLinear)
        assert torch.equal(other(ids, ids)["loss"], model(ids, ids)["loss"])


@pytest.mark.slow
def test_under_compile_it_is_whole_and_right() -> None:
    model = LanguageModel()
    ids = torch.randint(512, (4, 16))
    expected = model(ids, ids)["loss"]
    compiled = torch.compile(apply_plan(model, PLAN), backend="eager")
    found = compiled(ids, ids)
    assert type(found["logits"]) is Tensor
    torch.testing.assert_close(found["loss"], expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"path": "body.2"}, "only a linear layer"),
        ({"chunks": 1}, "needs two chunks or more"),
        ({"compressor": "bit"}, "only the number of chunks"),
        ({"axis": 1}, "only the number of chunks"),
    ],
)
def test_an_entry_that_does_not_fit(change: dict[str, Any], reason: str) -> None:
    entry = SegmentPlan(**{"path": "head", "chunks": 8, "through_loss": True, **change})
    with pytest.raises(PlanError, match=reason):
        apply_plan(LanguageModel(), Plan(segments=(entry,)))


# ---------------------------------------------------------------------------------------------- other people's models

SIZES = {"vocab_size": 300, "max_position_embeddings": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "path"),
    [
        ("GPT2Config", "GPT2LMHeadModel", "lm_head"),
        ("LlamaConfig", "LlamaForCausalLM", "lm_head"),
        ("BertConfig", "BertForMaskedLM", "cls.predictions.decoder"),
    ],
)
def test_hugging_face(config: str, kind: str, path: str) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = getattr(transformers, config)(**SIZES, hidden_size=16, intermediate_size=32)
        model = getattr(transformers, kind)(settings)
    plan = Plan(segments=(SegmentPlan(path=path, chunks=4, through_loss=True),))
    ids = torch.randint(300, (4, 16))
    step = TrainingStep(model=model.train(), args=(), kwargs={"input_ids": ids, "labels": ids}, settings=StepSettings())
    whole = trace.count_step(step)
    found = verify_step(step, plan, lambda m: apply_plan(m, plan), remove_plan, batch=4, full_size=True)
    assert found.passed, found
    apply_plan(model.float(), plan)
    assert whole.tensor_peak_bytes - trace.count_step(step).tensor_peak_bytes > 4 * 16 * 300 * 4
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert not output.logits.is_computed
    with pytest.warns(UserWarning, match="read after its loss"):
        assert output.logits.argmax(-1).shape == (4, 16)
