"""What is known of the calls of modules while a model runs."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, ones

from memopt_cli.training.module_calls import watched_modules
from tests.zoo.models import Parts


class Tries(Parts, layer=lambda: nn.Linear(3, 3)):
    """Catches what its layer raises."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.layer(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return x


class Raises(Parts, within=Tries):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError(self.within(x).shape)


def test_an_exception_that_was_caught_is_not_where_the_next_comes_from() -> None:
    model = nn.Sequential(Raises())
    with watched_modules(model) as stack, pytest.raises(LookupError):
        model(ones(2, 4))
    assert [call.path for call in stack] == ["", "0"]
