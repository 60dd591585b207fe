"""The names by which outputs are compared."""

from __future__ import annotations

from torch import ones

from memopt_cli.verification.named import numbers_by_name, tensors_by_name


def test_no_two_keys_of_an_output_share_a_name() -> None:
    output = {1: ones(1), "1": ones(2), "a": {"b": ones(3)}, "a.b": ones(4), "n": [2]}
    named = tensors_by_name("output", output)
    assert list(named) == ["output[1]", "output['1']", "output.a.b", "output['a.b']"]
    assert [len(tensor) for tensor in named.values()] == [1, 2, 3, 4]
    assert list(numbers_by_name("output", output)) == ["output.n[0]"]
