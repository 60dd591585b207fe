"""Plans by length: each input is run, and backward after it, by the plan of its range."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt_cli
from memopt_cli.errors import PlanError, UsageError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.loading import read_file
from memopt_cli.loading.description import describe_file
from memopt_cli.records import (
    InputDimension,
    InputSpec,
    Plan,
    PlanRange,
    SegmentPlan,
    TensorSpec,
)
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.runtime import LengthOf, is_recomputing
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan
from tests.zoo.models import Parts
from tests.zoo.records import a_header
from tests.zoo.watching import saved_bytes, silent

BY = InputDimension(dim="S", argument="ids", axis=1)
SHORT, MIDDLE, LONG = 4, 8, 16


def segments(*paths: str, **fields: Any) -> tuple[SegmentPlan, ...]:
    return tuple(SegmentPlan(path=path, **fields) for path in paths)


PLAN = Plan(
    by=BY,
    ranges=(
        PlanRange(up_to=SHORT),
        PlanRange(up_to=MIDDLE, segments=segments("blocks.0")),
        PlanRange(up_to=LONG, packed=True, segments=segments("blocks.0", "blocks.0.0", "blocks.1")),
    ),
)
RECOMPUTED = {SHORT: [], MIDDLE: ["blocks.0"], LONG: ["blocks.0", "blocks.1"]}
"""Blocks of which layers run again in backward."""


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(blocks))
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return (x * scale).square().mean()


class Checkpointing(Net):
    """With checkpoints of its own."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return (x * scale).square().mean()


def ids(length: int) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))


def gradients(model: nn.Module, *losses: Tensor) -> list[Tensor]:
    """Return the gradients of losses, the last of which goes backward first."""
    model.zero_grad()
    for loss in reversed(losses):
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@contextmanager
def recomputations(model: nn.Module) -> Iterator[list[str]]:
    """Paths of the blocks whose last layers run again, as they do."""
    found: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda *_: found.append(path) if is_recomputing() else None

    hooks = [block[1].register_forward_hook(note(f"blocks.{i}")) for i, block in enumerate(model.blocks)]
    yield found
    for hook in hooks:
        hook.remove()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("length", [1, SHORT, SHORT + 1, MIDDLE, MIDDLE + 1, LONG])
def test_each_range_has_its_plan(length: int) -> None:
    model, plain = apply_plan(Net(), PLAN), Net()
    torch.manual_seed(1)
    expected = gradients(plain, plain(ids(length)))
    torch.manual_seed(1)
    with recomputations(model) as found, silent():
        assert same(gradients(model, model(ids(length))), expected)
    bound = next(bound for bound in RECOMPUTED if length <= bound)
    assert sorted(set(found)) == RECOMPUTED[bound]


@pytest.mark.parametrize("part", PLAN.ranges, ids=lambda part: f"up to {part.up_to}")
def test_as_much_is_saved_as_by_the_plan_of_the_range(part: PlanRange) -> None:
    if part.packed:
        part = PlanRange(up_to=part.up_to, segments=part.segments)
    ranges = tuple(part if r.up_to == part.up_to else r for r in PLAN.ranges)
    model, alone = apply_plan(Net(), Plan(by=BY, ranges=ranges)), apply_plan(Net(), part.plan)
    assert saved_bytes(lambda: model(ids(part.up_to))) == saved_bytes(lambda: alone(ids(part.up_to)))


def test_backward_goes_by_its_own_forward() -> None:
    model, plain = apply_plan(Net().eval(), PLAN), Net().eval()
    lengths = (LONG, SHORT, MIDDLE, LONG, 1)
    expected = gradients(plain, *[plain(ids(length)) for length in lengths])
    with recomputations(model) as found:
        losses = [model(ids(length)) for length in lengths]
        assert same(gradients(model, *losses), expected)
    assert found == ["blocks.1", "blocks.0", "blocks.0", "blocks.1", "blocks.0"]


def test_threads_have_lengths_of_their_own() -> None:
    """Each is in forward while the other begins its own, and in backward while the other is in forward."""
    model, plain, lengths = apply_plan(Net(blocks=2).eval(), PLAN), Net(blocks=2).eval(), (LONG, SHORT)
    expected = {length: torch.autograd.grad(plain(ids(length)), list(plain.parameters())) for length in lengths}
    meeting, found, threads = threading.Barrier(2, timeout=60), {}, {}
    model.embedding.register_forward_hook(lambda *_: [meeting.wait(), None][1])
    again: list[int] = []
    model.blocks[0][1].register_forward_hook(
        lambda *_: again.append(threading.get_ident()) if is_recomputing() else None
    )

    def train(length: int) -> None:
        threads[length] = threading.get_ident()
        for _ in range(4):
            found[length] = torch.autograd.grad(model(ids(length)), list(model.parameters()))

    running = [threading.Thread(target=train, args=(length,)) for length in lengths]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(same(list(found[length]), list(expected[length])) for length in lengths)
    assert again == [threads[LONG]] * 4


class CheckpointingTwice(Net):
    """With checkpoints of its own within others."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            first = checkpoint(self.blocks[0], x, use_reentrant=False)
            return x + checkpoint(self.blocks[1], first.tanh(), use_reentrant=False)

        def outer(x: Tensor) -> Tensor:
            return checkpoint(inner, x.sin(), use_reentrant=False).cos()

        x = checkpoint(outer, self.embedding(ids), use_reentrant=False)
        return (self.blocks[2](x) * scale).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Checkpointing, CheckpointingTwice])
@pytest.mark.parametrize("length", [SHORT, MIDDLE, LONG])
def test_a_checkpoint_of_ones_own_recomputes_by_the_length_of_its_forward(length: int, kind: type[Net]) -> None:
    model, plain = apply_plan(kind(), PLAN), kind()
    losses = [model(ids(length)), model(ids(LONG)), model(ids(SHORT))]
    expected = gradients(plain, plain(ids(length)), plain(ids(LONG)), plain(ids(SHORT)))
    assert same(gradients(model, *losses), expected)


class Backwarding(Checkpointing):
    """Takes the gradients of another forward within its own."""

    def forward(self, ids: Tensor, scale: float = 1.0, other: Tensor | None = None) -> Tensor:
        if other is not None:
            other.backward()
        return super().forward(ids, scale)


@pytest.mark.parametrize("within", [SHORT, MIDDLE, LONG])
@pytest.mark.parametrize("length", [SHORT, MIDDLE, LONG])
def test_a_checkpoint_recomputes_within_a_forward_of_another_length(length: int, within: int) -> None:
    found = []
    for model in (Backwarding().eval(), apply_plan(Backwarding().eval(), PLAN)):
        other = model(ids(length))
        found.append(gradients(model, model(ids(within), other=other)))
    assert same(*found)


def test_a_part_that_is_called_by_itself_takes_as_little_as_it_can() -> None:
    model = apply_plan(Net(), PLAN)
    with recomputations(model) as found, silent():
        model.blocks[1](torch.randn(2, 1, 8)).sum().backward()
    assert found == ["blocks.1"]


def test_the_length_is_found_by_position_and_by_name() -> None:
    for by in (BY, InputDimension(dim="S", argument=0, axis=-1)):
        model = apply_plan(Net(), Plan(by=by, ranges=PLAN.ranges))
        for call in (lambda m, x: m(x), lambda m, x: m(ids=x), lambda m, x: m(x, scale=2.0)):
            with recomputations(model) as found, silent():
                call(model, ids(MIDDLE)).backward()
            assert found == ["blocks.0"]


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
def test_the_largest_of_several_axes_is_the_length(shape: tuple[int, int], tmp_path: Path) -> None:
    by = InputDimension(dim="S", argument="ids", axis=(0, 1))
    model = apply_plan(Net(), Plan(by=by, ranges=PLAN.ranges))
    torch.save(model, tmp_path / "model.pt")
    for either in (model, memopt_cli.load(tmp_path / "model.pt", trust=memopt_cli.Trust(packages=("tests",)))):
        assert plan_of(either).by == by
        with recomputations(either) as found:
            either(torch.zeros(shape, dtype=torch.long)).backward()
        assert found == ["blocks.0"]


@pytest.mark.parametrize(("source", "target", "found"), [(4, 8, ["blocks.0"]), (8, 4, ["blocks.0"]), (4, 4, [])])
def test_the_longest_of_several_arguments_is_the_length(
    source: int, target: int, found: list[str], tmp_path: Path
) -> None:
    by = InputDimension(dim="S", argument=("ids", "mask"), axis=(1, 1))
    model = apply_plan(Masked(), Plan(by=by, ranges=PLAN.ranges))
    torch.save(model, tmp_path / "model.pt")
    for either in (model, memopt_cli.load(tmp_path / "model.pt", trust=memopt_cli.Trust(packages=("tests",)))):
        assert plan_of(either).by == by
        with recomputations(either) as seen, silent():
            either(ids(source), mask=ids(target)).backward()
        assert seen == found
    with recomputations(model) as seen, silent():
        model(ids(8)).backward()  # without a mask, which is None then
    assert seen == ["blocks.0"]
    with pytest.warns(UserWarning, match="S is 17, beyond the 16"):
        model(ids(4), mask=ids(17)).backward()


def test_several_arguments_need_an_axis_each() -> None:
    with pytest.raises(UsageError, match="as many axes"):
        InputDimension(dim="S", argument=("ids", "mask"), axis=1)
    with pytest.raises(ValueError, match="2 arguments, and 1 axes"):
        LengthOf(name="S", argument=("ids", "mask"), axis=1)


def test_beyond_the_last_range_it_warns_once_and_goes_on_as_in_the_last() -> None:
    model = apply_plan(Net(), PLAN)
    with silent(), torch.no_grad():
        model(ids(LONG + 1))  # takes no memory worth a word
    with recomputations(model) as found, pytest.warns(UserWarning, match="S is 17, beyond the 16") as said:
        _ = [model(ids(length)).backward() for length in (LONG + 1, LONG + 2)]
    assert [warning.filename for warning in said] == [__file__]
    assert found == ["blocks.1", "blocks.0"] * 2


class Masked(Net):
    def forward(self, ids: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return super().forward(ids, scale)


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (
            InputDimension(dim="S", argument="mask", axis=1),
            "S is dimension 1 of the argument 'mask', which is of class NoneType",
        ),
        (InputDimension(dim="S", argument=0, axis=2), "which is a tensor of 2 dimensions"),
        (InputDimension(dim="S", argument="scale", axis=0), "which is of class float"),
    ],
)
def test_an_input_without_the_dimension_is_taken_for_long(by: InputDimension, reason: str) -> None:
    model = apply_plan(Masked(), Plan(by=by, ranges=PLAN.ranges))
    with recomputations(model) as found, pytest.warns(UserWarning, match=reason) as said:
        _ = [model(ids(SHORT), scale=1.0).backward() for _ in range(2)]
    assert len(said) == 1
    assert found == ["blocks.1", "blocks.0"] * 2


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_taken_for_long(layout: torch.layout) -> None:
    class Ragged(Parts, layer=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.cat([part.flatten() for part in self.layer(ids).unbind()]).sum()

    ranges = (PlanRange(up_to=4), PlanRange(up_to=9, segments=segments("layer")))
    model, parts = apply_plan(Ragged(), Plan(by=BY, ranges=ranges)), [torch.randn(3, 8), torch.randn(5, 8)]
    with pytest.warns(UserWarning, match="which is a nested tensor"):
        loss = model(torch.nested.nested_tensor(parts, layout=layout))
    found = gradients(model, loss)
    torch.testing.assert_close(found, gradients(model, sum(model.layer(part).sum() for part in parts)))


@pytest.mark.parametrize("argument", ["mask", 2])
def test_an_argument_that_forward_does_not_take_is_refused(argument: int | str) -> None:
    model = Net()
    with pytest.raises(PlanError, match=f"the argument {argument!r}, which forward of Net does not take"):
        apply_plan(model, Plan(by=InputDimension(dim="S", argument=argument, axis=1), ranges=PLAN.ranges))
    assert type(model) is Net


@pytest.mark.parametrize("argument", ["mask", 2])
def test_a_forward_that_takes_anything_takes_the_argument(argument: int | str) -> None:
    class Anything(Net):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args[:1])

    model = apply_plan(Anything(), Plan(by=InputDimension(dim="S", argument=argument, axis=1), ranges=PLAN.ranges))
    for call in (lambda: model(ids(MIDDLE), 0, ids(MIDDLE)), lambda: model(ids(MIDDLE), mask=ids(MIDDLE))):
        with recomputations(model) as found:
            call().backward()
        assert found in (["blocks.0"], ["blocks.1", "blocks.0"])  # given, or missing


def test_an_error_in_forward_leaves_no_length_behind() -> None:
    model = apply_plan(Net(), PLAN)
    with pytest.raises(IndexError):
        model(ids(SHORT) + 1000)
    with recomputations(model) as found:
        model.blocks[1](torch.randn(2, 1, 8)).sum().backward()
    assert found == ["blocks.1"]


def test_the_root_may_be_a_segment_in_one_range() -> None:
    ranges = (PlanRange(up_to=SHORT), PlanRange(up_to=LONG, segments=segments("", "blocks.0")))
    model, plain = apply_plan(Net().eval(), Plan(by=BY, ranges=ranges)), Net().eval()
    for length in (SHORT, LONG):
        assert same(gradients(model, model(ids(length))), gradients(plain, plain(ids(length))))
    assert plan_of(model).ranges == ranges


def test_chunks_and_heads_by_length() -> None:
    ranges = (
        PlanRange(up_to=SHORT, segments=segments("blocks.0", chunks=2, axis=1)),
        PlanRange(up_to=LONG, segments=segments("blocks.0", "blocks.1", chunks=4, axis=1)),
    )
    model, plain = apply_plan(Net().eval().double(), Plan(by=BY, ranges=ranges)), Net().eval().double()
    lengths = (LONG, SHORT)
    expected = gradients(plain, *[plain(ids(length)) for length in lengths])
    with recomputations(model) as found:
        torch.testing.assert_close(gradients(model, *[model(ids(length)) for length in lengths]), expected)
    assert found.count("blocks.0") > found.count("blocks.1") >= 4


def test_runs_of_layers_by_length() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    ranges = (PlanRange(up_to=4, segments=segments("0-2")), PlanRange(up_to=9, segments=segments("0-2", "3-5")))
    plan = Plan(by=InputDimension(dim="S", argument=0, axis=0), ranges=ranges)
    plain = copy.deepcopy(model)
    apply_plan(model, plan)
    for length in (3, 9):
        x = torch.randn(length, 4)
        assert same(gradients(model, model(x).sum()), gradients(plain, plain(x).sum()))
    assert plan_of(model) == plan
    assert type(remove_plan(model)) is nn.Sequential


# ---------------------------------------------------------------------------------------------- copies and files


def test_copies_files_and_removal(tmp_path: Path) -> None:
    model, keys = apply_plan(Net(), PLAN), list(Net().state_dict())
    assert list(model.state_dict()) == keys
    assert plan_of(copy.deepcopy(model)) == PLAN
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert plan_of(loaded) == PLAN
    with recomputations(loaded) as found:
        for length in (SHORT, LONG):
            loaded(ids(length)).backward()
    assert found == ["blocks.1", "blocks.0"]
    remove_plan(model)
    assert type(model) is Net
    assert plan_of(model) == Plan()
    assert not any(name.startswith("_memopt") for module in model.modules() for name in vars(module))


def test_a_saved_file_is_read_by_memopts_reader(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    by = InputDimension(dim="S", argument=0, axis=0)
    plan = Plan(by=by, ranges=(PlanRange(up_to=4), PlanRange(up_to=9, packed=True, segments=segments("0", "1"))))
    torch.save(apply_plan(model, plan), tmp_path / "net.pt")
    assert plan_of(memopt_cli.load(tmp_path / "net.pt")) == plan


def test_inspect_tells_segments_from_a_root_that_only_looks_at_its_input(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    by = InputDimension(dim="S", argument=0, axis=0)
    apply_plan(model, Plan(by=by, ranges=(PlanRange(up_to=4), PlanRange(up_to=9, segments=segments("0")))))
    torch.save(model, tmp_path / "net.pt")
    found = describe_file(read_file(str(tmp_path / "net.pt")))
    assert [module.path for module in found.modules if module.segment] == ["0"]


@pytest.mark.parametrize(
    "changed",
    [
        {"up_to": (9, 4)},
        {"up_to": (0, 4)},
        {"up_to": (4,)},
        {"configs": (None, {"compressor": print})},
        {"configs": (None, 3)},
        {"length": {"name": "S", "argument": print, "axis": 0}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_with_other_settings_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    from memopt_cli.runtime import container

    class Sent:
        def __reduce__(self) -> Any:
            length = {"name": "S", "argument": 0, "axis": 0}
            settings = {"up_to": (4, 9), "configs": (None, None), "length": length, "path": "", **changed}
            state = vars(nn.Linear(2, 2))
            return container.restore_by_length, (nn.Linear, settings), state

    torch.save(Sent(), tmp_path / "net.pt")
    with pytest.raises(memopt_cli.errors.MemoptError):
        memopt_cli.load(tmp_path / "net.pt")


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    spec = InputSpec(tensors=(TensorSpec(name="ids", shape=("B", "S"), dtype="int64", values="0..50"),), source="-i")
    header = a_header(spec=spec)
    path = tmp_path / "net.plan.yaml"
    path.write_bytes(plan_yaml(header, PLAN, 3))
    assert read_plan(path)[1] == PLAN
    model = Net()
    memopt_cli.apply_plan(model, path, verify=[(ids(SHORT),), (ids(LONG),)])
    assert plan_of(model) == PLAN


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"by": BY}, "the plan has 'by', but no ranges"),
        ({"ranges": PLAN.ranges}, "the plan has ranges, but no 'by'"),
        ({"by": BY, "ranges": PLAN.ranges[::-1]}, "must ascend from 1, not 16, 8, 4"),
        ({"by": BY, "ranges": (PlanRange(up_to=0),)}, "must ascend from 1, not 0"),
        ({"by": BY, "ranges": tuple(PlanRange(up_to=n) for n in range(1, 102))}, "has 101 ranges"),
        ({"by": BY, "ranges": PLAN.ranges, "packed": True}, "and in addition segments, packed or place"),
        (
            {"by": BY, "ranges": PLAN.ranges, "segments": segments("blocks.0")},
            "and in addition segments, packed or place",
        ),
    ],
)
def test_what_a_plan_may_say(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Plan(**fields)


def test_a_dimension_has_a_symbol() -> None:
    with pytest.raises(UsageError, match="the dimension has no symbol"):
        InputDimension(dim=" ", argument=0, axis=0)


def test_a_plan_tells_what_it_does_at_a_size() -> None:
    short, middle, long = (part.plan for part in PLAN.ranges)
    sizes = {SHORT: short, SHORT + 1: middle, MIDDLE: middle, LONG: long, LONG + 1: long}
    assert {size: PLAN.at({"B": 1, "S": size}) for size in sizes} == sizes
    assert PLAN.at({"B": 1}) == PLAN.longest == long
    assert middle.at({"S": 1}) == middle.longest == middle
    assert [segment.path for segment in PLAN.everywhere] == ["blocks.0", "blocks.0", "blocks.0.0", "blocks.1"]
    assert (PLAN.packs, middle.packs, PLAN.is_empty) == (True, False, False)
    assert Plan(by=BY, ranges=PLAN.ranges[:1]).is_empty


def test_all_or_nothing() -> None:
    model = Net()
    ranges = (*PLAN.ranges, PlanRange(up_to=32, segments=segments("blocks.0", "nowhere")))
    with pytest.raises(PlanError, match="names module 'nowhere'"):
        apply_plan(model, Plan(by=BY, ranges=ranges))
    ranges = (*PLAN.ranges, PlanRange(up_to=32, segments=segments("blocks.0", "blocks")))
    with pytest.raises(PlanError, match="module 'blocks' cannot be a segment: ModuleList has no forward"):
        apply_plan(model, Plan(by=BY, ranges=ranges))
    assert type(model) is Net
    assert plan_of(model) == Plan()


@pytest.mark.parametrize("is_first", [True, False])
def test_segments_of_every_length_beside_ranges_are_of_each_range(is_first: bool) -> None:
    model, plans = Net(), [Plan(segments=segments("blocks.2")), PLAN]
    for plan in plans if is_first else plans[::-1]:
        apply_plan(model, plan)
    found = plan_of(model)
    assert [{s.path for s in part.segments} for part in found.ranges] == [
        {s.path for s in (*part.segments, *segments("blocks.2"))} for part in PLAN.ranges
    ]
    again = apply_plan(remove_plan(model), found)
    assert plan_of(again) == found


def test_two_plans_by_length_do_not_meet() -> None:
    model = Net()
    apply_plan(model.blocks[0], Plan(by=InputDimension(dim="S", argument=0, axis=1), ranges=PLAN.ranges[:1]))
    with pytest.raises(PlanError, match="a part of the model has a plan by length already") as error:
        apply_plan(model, PLAN)
    assert "remove_plan" in error.value.hint
    assert type(model) is Net


def test_a_root_that_cannot_look_at_its_input_says_so() -> None:
    model = Net()
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"module '\(root\)' cannot be a segment: forward is set on the instance"):
        apply_plan(model, PLAN)


# ---------------------------------------------------------------------------------------------- other ways to run it


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_each_range_has_its_plan(dynamic: bool | None) -> None:
    """A graph that was made for one length is not taken for another, whose plan is another."""
    model, plain = apply_plan(Net().eval(), PLAN), Net().eval()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    again: list[str] = []
    for index, block in enumerate(model.blocks):
        block[0].register_forward_hook(lambda *_, index=index: again.append(index) if is_recomputing() else None)
    for length, expected in ((LONG, [1, 0]), (SHORT, []), (MIDDLE, [0]), (3, []), (12, [1, 0]), (MIDDLE - 1, [0])):
        again.clear()
        found = gradients(model, compiled(ids(length)))
        torch.testing.assert_close(found, gradients(plain, plain(ids(length))))
        assert [index for index in again if index is not None] == expected


@pytest.mark.slow
def test_exported_it_is_a_plain_module() -> None:
    model, plain = apply_plan(Net().eval(), PLAN), Net().eval()
    program = torch.export.export(model, (ids(LONG),)).module()
    assert torch.equal(program(ids(LONG)), plain(ids(LONG)))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_in_one_graph_it_runs_plainly_and_says_so() -> None:
    model, plain = apply_plan(Net().eval(), PLAN), Net().eval()
    with pytest.warns(UserWarning, match="runs without recomputation"):
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(ids(LONG))
    torch.testing.assert_close(gradients(model, loss), gradients(plain, plain(ids(LONG))))


@pytest.mark.usefixtures("process_group")
def test_within_a_wrapper_that_only_runs_it() -> None:
    wrapped, plain = nn.parallel.DistributedDataParallel(Net().eval()), Net().eval()
    apply_plan(wrapped, PLAN)
    assert plan_of(wrapped) == PLAN
    for length in (SHORT, LONG):
        with recomputations(wrapped.module) as found:
            assert same(gradients(wrapped, wrapped(ids(length))), gradients(plain, plain(ids(length))))
        assert sorted(found) == RECOMPUTED[length]
    remove_plan(wrapped)
    assert type(wrapped.module) is Net


def test_many_models_as_one_take_the_route_that_can() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    by = InputDimension(dim="S", argument=0, axis=0)
    apply_plan(model, Plan(by=by, ranges=(PlanRange(up_to=2), PlanRange(up_to=9, segments=segments("0")))))
    models = memopt_cli.model_batching.BatchModule(model, batch=2)
    x = torch.randn(2, 5, 4)
    expected = torch.stack([model(part) for part in x])
    torch.testing.assert_close(models(x), expected)
