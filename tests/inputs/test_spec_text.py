"""The grammar of input specs: what it accepts, and that text and record are inverses."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import (
    INPUT_DTYPES,
    check_inputs,
    check_spec,
    format_tensor,
    parse_dims,
    parse_factory,
    parse_limit,
    parse_tensor,
)
from memopt_cli.records import InputSpec, Limit, TensorSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("4x10x2x48x48", TensorSpec(shape=(4, 10, 2, 48, 48))),
        ("x:1x3x224x224", TensorSpec(name="x", shape=(1, 3, 224, 224))),
        ("1,3,224,224", TensorSpec(shape=(1, 3, 224, 224))),
        ("[1, 3, 224, 224]", TensorSpec(shape=(1, 3, 224, 224))),
        ("7", TensorSpec(shape=(7,))),
        ("[]", TensorSpec(shape=())),
        ("[MaxLen]", TensorSpec(shape=("MaxLen",))),
        (
            "input_ids:BxS@int64=0..32000",
            TensorSpec(name="input_ids", shape=("B", "S"), dtype="int64", values="0..32000"),
        ),
        ("x:TxBx2x48x48=spikes:0.2", TensorSpec(name="x", shape=("T", "B", 2, 48, 48), values="spikes:0.2")),
        ("4@bool", TensorSpec(shape=(4,), dtype="bool", values="0..2")),
        ("4@float16", TensorSpec(shape=(4,), dtype="float16", values="normal")),
        ("4@int8=-128..128", TensorSpec(shape=(4,), dtype="int8", values="-128..128")),
        ("4=-1..1", TensorSpec(shape=(4,), values="-1..1")),
        ("2x3@int64=padded", TensorSpec(shape=(2, 3), dtype="int64", values="padded")),
    ],
)
def test_accepted(text: str, spec: TensorSpec) -> None:
    assert parse_tensor(text) == spec


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "''"),
        ("4x", "''"),
        ("4x0", "'0'"),
        ("4x-1", "'-1'"),
        ("4xq", "'q'"),
        ("4x3.5", "'3.5'"),
        ("[4x3", "'[4'"),
        ("1x2,3", "'1x2'"),
        ("4 x 99999999999999999999", "'99999999999999999999'"),
        (":4", "''"),
        ("a.b:4", "'a.b'"),
        ("4@float31", "'float31'"),
        ("4@", "''"),
        ("4=", "''"),
        ("4=gaussian", "'gaussian'"),
        ("4=spikes:2", "above 1"),
        ("4=spikes:-1", "'spikes:-1'"),
        ("4=5..5", "5..5 is empty"),
        ("4=0..1.5", "'0..1.5'"),
        ("4@uint8=0..257", "uint8 cannot hold 0..257"),
        ("4@bool=0..3", "bool cannot hold 0..3"),
        ("4@int64=normal", "int64 cannot hold 'normal'"),
    ],
)
def test_refused_with_the_wrong_piece(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tensor(text)
    assert caught.value.message.startswith(f"input '{text}': ")
    assert wrong in caught.value.message
    assert caught.value.hint


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dtype = draw(st.sampled_from(INPUT_DTYPES))
    names = st.none() | st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
    sizes = st.integers(1, 10**17) | st.from_regex(r"[A-Z][A-Za-z0-9_]{0,4}", fullmatch=True)
    values = ["zeros", "ones", "padded", "0..2", "0..1", "spikes:0.25", "spikes:1"]
    if dtype.startswith(("float", "bfloat", "complex")):
        values += ["normal", "uniform", "-7..12"]
    return TensorSpec(
        name=draw(names),
        shape=tuple(draw(st.lists(sizes, max_size=5))),
        dtype=dtype,
        values=draw(st.sampled_from(values)),
    )


@pytest.mark.slow
@given(specs())
def test_format_then_parse_is_the_identity(spec: TensorSpec) -> None:
    assert parse_tensor(format_tensor(spec)) == spec


@given(st.text(st.sampled_from("4x,[]:@=.BSspikes0-int6 "), max_size=20) | st.text(max_size=20))
def test_any_text_is_a_spec_or_a_usage_error(text: str) -> None:
    try:
        spec = parse_tensor(text)
    except UsageError:
        return
    assert parse_tensor(format_tensor(spec)) == spec


@given(st.lists(st.text(st.sampled_from("BS=x0129 -_é²"), max_size=8) | st.text(max_size=8), max_size=3))
def test_any_dimensions_are_sizes_or_a_usage_error(texts: list[str]) -> None:
    try:
        dims = parse_dims(texts)
    except UsageError:
        return
    assert all(size > 0 for size in dims.values())
    assert parse_dims(f"{name}={size}" for name, size in dims.items()) == dims


@pytest.mark.slow
@given(st.text(max_size=20) | st.from_regex(r"[a-z.]{0,5}:[a-z.]{0,5}"))
def test_any_text_names_a_factory_or_none(text: str) -> None:
    found = parse_factory(text)
    assert found is None or ":".join(found) == text


def test_dims() -> None:
    assert parse_dims(["B=8", "S = 128", "batch=2", "B=8"]) == {"B": 8, "S": 128, "batch": 2}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        *(([text], "NAME=SIZE") for text in ["B", "=8", "B=", "B=-1", "B=x", "2=3", "B=1:2", "B=1.5", "B=٣"]),
        *(([text], "dimension B has size 0") for text in ["B=0", "B=00"]),
        (["B=8", "B=9"], "8 and 9"),
    ],
)
def test_bad_dims(texts: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_dims(texts)


@pytest.mark.parametrize("text", ["S=16-48", "S=16..48"])
def test_a_range_in_other_words_is_told_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=SIZE") as caught:
        parse_dims([text])
    assert caught.value.hint == "A range is written `--dim S=16:48`."


@pytest.mark.parametrize(
    "check", [lambda all: check_inputs(all, {}), lambda all: check_spec(InputSpec(tensors=all, source="-i"))]
)
def test_no_forward_takes_thousands_of_inputs(check: Callable[[tuple[TensorSpec, ...]], None]) -> None:
    check((parse_tensor("3"),) * 1000)
    with pytest.raises(UsageError, match="there are 1001 inputs; memopt accepts at most 1000"):
        check((parse_tensor("3"),) * 1001)


@pytest.mark.parametrize(
    ("text", "metric", "amount", "relative"),
    [
        ("peak:0", "peak", 0, False),
        ("peak:5%", "peak", 5, True),
        ("allocated: 64 MiB", "allocated", 64 * 2**20, False),
        ("activations:0.5%", "activations", 0.5, True),
        ("step:20%", "step", 20, True),
        ("step:1.5s", "step", 1.5, False),
        ("step:250ms", "step", 0.25, False),
    ],
)
def test_limits(text: str, metric: str, amount: float, relative: bool) -> None:
    limit = parse_limit(text)
    assert (limit.text, limit.metric, limit.amount, limit.relative) == (text, metric, amount, relative)
    assert isinstance(limit, Limit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "peak",
        "peak:",
        "peak:-1",
        "peak:5 %%",
        "peak:50ms",
        "peaks:0",
        "step:1MiB",
        "5%",
        "peak:x",
        "peak:64",
    ],
)
def test_no_limits(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_limit(text)
    assert caught.value.hint
    assert caught.value.message.startswith(f"'{text}': ")


@pytest.mark.parametrize("metric", ["peak", "step"])
def test_a_limit_of_zero_needs_no_unit(metric: str) -> None:
    assert parse_limit(f"{metric}:0").amount == 0
