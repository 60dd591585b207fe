"""The route by fused kernels: every layer of every model in one call.

One model's structure is traced by ``torch.fx``, and each node of the graph is replaced by one that computes it for all
models: by a kernel if there is one, otherwise by the node's own function under ``vmap``.  For example,
``net[1](x.flatten(1))``, where ``net[1]`` is linear, becomes::

    flatten = vmap(flatten)(x)                          # x is (models, images, …)
    output = linear(flatten, net[1].weight, net[1].bias)   # one batched product; weight is (models, out, in)

A module whose own code cannot be traced stays one node, and a segment becomes a segment of fused kernels.  Tensors that
do not depend on the inputs or on stacked weights, such as a position table, are computed once and shared: for each
value, the rewriting knows whether it is *batched*, that is, has the dimension of models.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from memopt_cli.model_batching.extension import AbstractBatchModule
from memopt_cli.model_batching.kernels.attention import TRACEABLE
from memopt_cli.model_batching.kernels.functions import GraphCall, choose_operation, shape_query
from memopt_cli.model_batching.kernels.modules import KERNELS, find_kernel, mapped, run_custom
from memopt_cli.model_batching.mapping import refuse_segments
from memopt_cli.model_batching.routes.interface import Route, RouteRefusedError
from memopt_cli.model_batching.stacked import list_slots
from memopt_cli.runtime import (
    ConfigsByLength,
    SegmentConfig,
    find_part,
    install_segment,
    named_parts,
    remove_segment,
    settings_of,
)
from memopt_cli.runtime.private_torch import has_hooks, tree_flatten, tree_leaves
from memopt_cli.runtime.tree import join_tensors, split_tensors
from memopt_cli.text.paths import quote_module
from memopt_cli.verification.effects import bit_equal, generator_state, generators_kept

_RANDOM_FUNCTIONS = frozenset(("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"))


class FusedRoute(Route):
    """A route that runs the fused graph of a stacked model."""

    def __init__(self, tree: nn.Module, models: int) -> None:
        for path, module in named_parts(tree):
            if has_hooks(module):
                raise RouteRefusedError(f"module {quote_module(path)} has hooks, which a graph would not run")
        self._module = FusedModule(tree, models)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._module(*args, **kwargs)


class FusedModule(nn.Module):
    """A stacked module that runs its fused graph; the graph is traced once for each structure of arguments."""

    def __init__(self, source: nn.Module, models: int) -> None:
        super().__init__()
        self.source = source
        self._models = models
        self._graphs: dict[Any, Callable[[list[Tensor]], Any]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors, skeleton = split_tensors((args, kwargs))
        key = _skeleton_key(skeleton)
        if key not in self._graphs:
            graph, entry = _trace(self.source, skeleton, len(tensors))
            fused = _GraphFusion(self.source, entry, self._models).rewrite(graph)
            self._graphs[key] = fx.GraphModule(nn.Module(), fused).forward
        return self._graphs[key](tensors)

    def __spatial_split__(self) -> list[FusedModule]:
        """Return the stages of a segment that is split, each fused on its own."""
        stages: list[nn.Module] = self.source.__spatial_split__()  # type: ignore[operator]
        return [FusedModule(stage, self._models) for stage in stages]


def _skeleton_key(skeleton: Any) -> Any:
    leaves, structure = tree_flatten(skeleton)
    try:
        hash(key := (structure, *((type(leaf), leaf) for leaf in leaves)))
    except TypeError as error:
        raise RouteRefusedError(f"an argument that is not a tensor cannot be part of a graph: {error}") from error
    return key


class _Entry(nn.Module):
    """A module that calls the model on a list of the tensors in its arguments: the root of the trace."""

    def __init__(self, model: nn.Module, skeleton: Any, count: int) -> None:
        super().__init__()
        self.model = model
        self._skeleton = skeleton
        self._count = count

    def forward(self, tensors: Any) -> Any:
        args, kwargs = join_tensors([tensors[i] for i in range(self._count)], self._skeleton)
        return self.model(*args, **kwargs)


class _Tracer(fx.Tracer):
    """Traces a model, and keeps as one node each module that has a kernel, is a segment, or cannot be traced."""

    proxy_buffer_attributes = True

    @functools.cached_property
    def _paths(self) -> dict[nn.Module, str]:
        return {module: path for path, module in named_parts(self.root)}

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path of ``mod``, which may be a run of layers."""
        if mod not in self._paths:
            raise NameError("module is not installed as a submodule")
        return self._paths[mod]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, AbstractBatchModule) or settings_of(m) is not None:
            return True
        return type(m) not in TRACEABLE and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        substitute = TRACEABLE.get(type(m))
        last_node = _last_node(self.graph)
        stack = self.module_stack.copy()
        try:
            return substitute(m, *args, **kwargs) if substitute else super().call_module(m, forward, args, kwargs)
        except Exception:
            if path == "model":
                raise
            # Erase the nodes that tracing made before it failed, and make the whole module one node.
            self.module_stack = stack
            while (node := _last_node(self.graph)) is not last_node and node is not None:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", path, args, kwargs)


def _last_node(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)  # ``iter``, since in PyTorch 2.8 ``reversed`` returns no iterator


def _trace(source: nn.Module, skeleton: Any, count: int) -> tuple[fx.Graph, nn.Module]:
    """Return the graph of ``source`` and the module that was traced.

    The traced module is a copy with the same tensors, since tracing runs the model's code, which may set attributes.
    """
    shared: dict[int, Any] = {id(slot.tensor): slot.tensor for slot in list_slots(source)}
    entry = _Entry(copy.deepcopy(source, shared), skeleton, count)
    before = _attributes(entry.model)
    with generators_kept():
        generators = generator_state()
        try:
            graph = _Tracer().trace(entry)
        except Exception as error:
            raise RouteRefusedError(f"{type(source).__name__} cannot be traced: {error}") from error
        if not bit_equal(generators, generator_state()):
            raise RouteRefusedError(
                f"{type(source).__name__} uses random numbers in its own code, which a graph would not repeat"
            )
    changed = [path for path, attributes in _attributes(entry.model).items() if attributes != before.get(path)]
    if changed:
        raise RouteRefusedError(
            f"module {quote_module(changed[0])} keeps state in attributes, which a graph would not update"
        )
    return graph, entry


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of each module in ``model`` by path: numbers and texts, and the ``id`` of other objects."""
    return {
        path: {
            key: value if isinstance(value, bool | int | float | str) else id(value)
            for key, value in vars(module).items()
        }
        for path, module in model.named_modules()
    }


class _GraphFusion:
    """The rewriting of one graph, node by node.

    Each method ``_rewrite_<op>`` returns, for a node of that kind, whether its value is batched, and the new node.
    """

    def __init__(self, source: nn.Module, entry: nn.Module, models: int) -> None:
        self._source = source
        self._entry = entry
        self._models = models
        self._graph = fx.Graph()
        self._new_nodes: dict[fx.Node, fx.Node] = {}
        self._is_batched: dict[fx.Node, bool] = {}
        self._stacked_ids = {id(slot.tensor) for slot in list_slots(source)}

    def rewrite(self, graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            self._is_batched[node], self._new_nodes[node] = getattr(self, f"_rewrite_{node.op}")(node)
        return self._graph

    def _rewrite_placeholder(self, node: fx.Node) -> tuple[bool, fx.Node]:
        return True, self._graph.placeholder(node.name)

    def _rewrite_output(self, node: fx.Node) -> tuple[bool, fx.Node]:
        (value,) = self._flags(node.args)
        spread = functools.partial(_expand_unbatched, self._models)
        batched = self._emit(node, spread, (self._map_nodes(node.args[0]), value), {})
        return True, self._graph.output(batched)

    def _rewrite_get_attr(self, node: fx.Node) -> tuple[bool, fx.Node]:
        path = str(node.target)
        owner, _, name = path.rpartition(".")
        inner = owner.removeprefix("model").removeprefix(".")
        try:
            read = functools.partial(getattr, self._source.get_submodule(inner), name)
            tensor = read()
        except AttributeError:  # a constant, which the model's code made while it was traced
            tensor = functools.reduce(getattr, path.split("."), self._entry)
            return id(tensor) in self._stacked_ids, self._emit(node, lambda: tensor, (), {})
        return id(tensor) in self._stacked_ids, self._emit(node, read, (), {})

    def _rewrite_call_module(self, node: fx.Node) -> tuple[bool, fx.Node]:
        path = str(node.target).removeprefix("model").removeprefix(".")
        module = find_part(self._source, path)
        flags = self._flags(node.args), self._flags(node.kwargs)
        run = self._module_operation(module, path)
        if False in tree_leaves(flags):
            run = functools.partial(_run_batched, run, self._models, flags)
        return True, self._emit(node, run, self._map_nodes(node.args), self._map_nodes(node.kwargs))

    def _rewrite_call_function(self, node: fx.Node) -> tuple[bool, fx.Node]:
        assert callable(node.target)
        return self._rewrite_call(node, getattr(node.target, "__name__", str(node.target)), node.target)

    def _rewrite_call_method(self, node: fx.Node) -> tuple[bool, fx.Node]:
        return self._rewrite_call(node, str(node.target), functools.partial(_call_method, str(node.target)))

    def _rewrite_call(self, node: fx.Node, name: str, function: Callable[..., Any]) -> tuple[bool, fx.Node]:
        call = GraphCall(name, function, self._flags(node.args), self._flags(node.kwargs))
        args, kwargs = self._map_nodes(node.args), self._map_nodes(node.kwargs)
        if True not in tree_leaves((call.args, call.kwargs)):
            if name in _RANDOM_FUNCTIONS:
                raise RouteRefusedError(
                    f"{name} makes numbers whose shape depends on no input, so that they would be equal in all models"
                )
            return False, self._emit(node, function, args, kwargs)
        if name == "getattr" and (query := shape_query(str(node.args[1]))):
            return False, self._emit(node, query, args[:1], {})
        if query := shape_query(name):
            return False, self._emit(node, query, args, kwargs)
        return True, self._emit(node, choose_operation(call), args, kwargs)

    def _module_operation(self, module: nn.Module, path: str) -> Callable[..., Any]:
        config = settings_of(module)
        if isinstance(config, ConfigsByLength):
            raise RouteRefusedError(
                f"module {quote_module(path)} has a plan by length, which depends on the model's input"
            )
        if config is not None and not config.through_loss:
            return _fused_segment(module, self._models)
        if isinstance(module, AbstractBatchModule):
            return functools.partial(run_custom, module)
        # A linear layer in chunks through its loss runs whole: here the loss is computed for all models, later.
        kernel = KERNELS[nn.Linear] if config is not None else find_kernel(module)
        if kernel is None:
            refuse_segments(module, path)
            return mapped(module)
        return functools.partial(kernel, module)

    def _flags(self, value: Any) -> Any:
        """Return ``value`` with each node replaced by whether it is batched.  ``None`` replaces a constant."""
        if isinstance(value, fx.Node):
            return self._is_batched[value]
        if isinstance(value, dict):
            return {key: self._flags(v) for key, v in value.items()}
        if isinstance(value, tuple | list):
            return (tuple if isinstance(value, tuple) else list)(map(self._flags, value))
        if isinstance(value, slice):
            return any(tree_leaves(self._flags((value.start, value.stop, value.step)))) or None
        return None

    def _map_nodes(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: self._new_nodes[node])

    def _emit(self, node: fx.Node, run: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        operation = functools.partial(run)  # a new object for each node, since generated code finds it by its name
        operation.__name__ = operation.__qualname__ = f"_{node.name}"  # type: ignore[attr-defined]
        return self._graph.create_node("call_function", operation, tuple(args), dict(kwargs), node.name)


def _fused_segment(module: nn.Module, models: int) -> nn.Module:
    """Return the segment ``module`` with fused kernels; the axis of its chunks moves by one, after the models."""
    config = settings_of(module)
    assert isinstance(config, SegmentConfig)
    plain = copy.copy(module)
    remove_segment(plain)
    fused = FusedModule(plain, models)
    axis = config.axis + 1 if config.axis >= 0 else config.axis
    install_segment(fused, replace(config, axis=axis))
    return fused


def _run_batched(run: Callable[..., Any], models: int, flags: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _expand_unbatched(models, (args, kwargs), flags)
    return run(*args, **kwargs)


def _expand_unbatched(models: int, value: Any, flags: Any) -> Any:
    """Return ``value`` with each tensor whose flag says that it is not batched expanded to ``models`` models."""
    if isinstance(value, Tensor):
        return value if flags else value.expand(models, *value.shape)
    if isinstance(flags, dict):
        return {key: _expand_unbatched(models, v, flags[key]) for key, v in value.items()}
    if isinstance(flags, tuple | list):
        return type(value)(_expand_unbatched(models, v, f) for v, f in zip(value, flags, strict=True))
    return value


def _call_method(name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)
