"""``BatchModule``: many copies of a model, trained as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError, type_in_words
from memopt_cli.model_batching.comparison import RouteTrial
from memopt_cli.model_batching.layout import DataOrder, check_models, check_order, in_order, models_first
from memopt_cli.model_batching.routes.interface import Route, RouteName
from memopt_cli.model_batching.selection import choose_route
from memopt_cli.model_batching.stacked import StateDict, load_stacked, share_first, stack_model, unstack
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.tree import map_leaves
from memopt_cli.text.paths import quote_module

_Mode = tuple[Any, ...]


class BatchModule(nn.Module):
    """Copies of a model, independent of one another, trained as one model.

    There are ``batch`` copies of ``model``.  Every parameter and buffer is (batch, …); ``models`` holds them under the
    model's own names.  The copies start with the weights of ``model``; :meth:`load_state_dicts` gives each its own.
    ``model`` does not change.  With ``inplace`` it shares the tensors of the first copy, and takes no memory of its
    own.  Inputs and outputs are (models, images, …), or have the order ``data_order``.

    Three routes can run the copies: ``fused`` kernels over a traced graph, ``vmap``, and the per-model ``loop``.  The
    fastest route is used that gives the loop's outputs, gradients and buffers.  Routes are compared and timed on few
    models and samples: with ``example_inputs`` (models, images, …) at construction, or else with the first inputs, and
    again for each new combination of training modes.  :attr:`trials` has the results.  ``route`` names a route to use
    without timing; it is still compared with the loop.  With ``check=False`` nothing is compared or timed: the first
    call uses the first of the three routes that runs.

    A BatchModule does not couple its models, but other code may.  The sum of their losses does not couple them, since a
    model's loss has no gradient in the others; SGD, Adam, AdamW and RMSprop do not either.  Adafactor and clipping by
    the global norm couple them (see :func:`~memopt_cli.model_batching.clipping.clip_grad_norm_per_model`).  A step of
    an optimizer with momentum or weight decay changes every model, even without a gradient, like a single
    model.

    Segments of a plan that is applied to ``model`` (or to ``models``) work: the loop and the fused kernels recompute
    them, vmap is refused.

    Raises :class:`~memopt_cli.errors.UsageError`, with the name of a module that cannot be batched.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int = 1,
        inplace: bool = False,
        *,
        route: Literal["auto", "fused", "vmap", "loop"] = "auto",
        example_inputs: tuple[Any, ...] | None = None,
        check: bool = True,
    ) -> None:
        super().__init__()
        check_models(batch)
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is {type_in_words(model)}", hint="Pass a torch.nn.Module.")
        if route not in ("auto", *get_args(RouteName)):
            raise UsageError(f"unknown route '{route}'", hint=f"Known: auto, {', '.join(get_args(RouteName))}.")
        self.batch = batch
        self.models = stack_model(model, batch)
        if inplace:
            share_first(self.models, model)
        self._route_name = route
        self._check = check
        self._routes: dict[_Mode, Route] = {}
        self._trials: list[RouteTrial] = []
        self.train(model.training)
        for path, module in model.named_modules():
            self.models.get_submodule(path).training = module.training
        if example_inputs is not None:
            self._select(example_inputs, {})

    @property
    def trials(self) -> tuple[RouteTrial, ...]:
        """The latest trial of each route.  Before the first trial: empty."""
        return tuple(self._trials)

    def forward(
        self,
        *args: Any,
        data_order: DataOrder = "g b",
        output_order: DataOrder | None = None,
        merge: bool = True,
        split: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs of all models.

        Tensors are in ``data_order``; outputs are in ``output_order``, by default the same.  An argument that is no
        tensor is passed to every model.  An output with one value per model has the shape (models,).  As in torchmb,
        ``merge=False`` is for tensors that are merged already, in the order ``(b g)``, and ``split=False`` returns
        tensors in that order.
        """
        output_order = output_order or data_order if split else "(b g)"
        data_order = data_order if merge else "(b g)"
        check_order(output_order)
        args, kwargs = map_leaves(
            lambda leaf: models_first(leaf, self.batch, data_order) if isinstance(leaf, Tensor) else leaf,
            (args, kwargs),
        )
        route = self._routes.get(self._mode()) or self._select(args, kwargs)
        output = route(args, kwargs)
        return map_leaves(lambda leaf: in_order(leaf, output_order) if isinstance(leaf, Tensor) else leaf, output)

    def choose_again(self) -> None:
        """Choose a route again with the next inputs.

        Call this after attributes of modules have changed, such as the rate of a dropout.
        """
        self._routes.clear()

    def reset(self) -> None:
        """Reset the state that the models keep in attributes, such as membranes of spiking neurons; buffers stay.

        SpikingJelly's ``functional.reset_net`` calls it.
        """
        for route in self._routes.values():
            route.reset()

    def load_state_dicts(
        self, state_dicts: StateDict | Sequence[StateDict], batch_strict: bool = True, strict: bool = True
    ) -> None:
        """Load one state dictionary into all models, or one into each.

        ``batch_strict=False`` allows fewer dictionaries than models; the tensors of the other models become zero.
        ``strict``: as in ``load_state_dict``.  Raises :class:`~memopt_cli.errors.UsageError` if the dictionaries do not
        fit together.
        """
        state = load_stacked(self.models, state_dicts, self.batch, pad=not batch_strict)
        self.models.load_state_dict(state, strict=strict)

    def state_dicts(self, device: torch.device | str | None = None) -> list[dict[str, Tensor]]:
        """Return a state dictionary for each model, with the model's own keys and copies of its tensors."""
        return unstack(self.models, self.batch, device)

    def _mode(self) -> _Mode:
        # Classes are part of the mode, since installing or removing a segment replaces a module's class.
        return tuple((m.training, type(m)) for _, m in named_parts(self.models))

    def _select(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Route:
        route, self._trials = choose_route(
            self.models, self.batch, self._route_name, args, dict(kwargs), check=self._check
        )
        self._routes[self._mode()] = route
        return route

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_routes": {}, "_trials": []}  # a loaded module chooses its route again

    def extra_repr(self) -> str:
        return f"batch={self.batch}, route={self._route_name}"


def refuse_batched(model: nn.Module) -> None:
    """Raise :class:`UsageError` if ``model`` is or has a :class:`BatchModule`: its step cannot be recorded."""
    for path, module in model.named_modules():
        if isinstance(module, BatchModule):
            raise UsageError(
                f"module {quote_module(path)} is a BatchModule, which chooses how to run its copies when it is called: "
                "a recorded step does not describe the next one",
                hint="Optimize the model that it batches, and batch the result: segments work inside a BatchModule.",
            )
