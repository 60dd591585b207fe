"""Segments: modules whose forward is recomputed in backward (gradient checkpointing).

A segment is installed *on* a module, not above it: the module's class becomes a subclass of :class:`GCContainer` and
of its own class.  Its name in the model, its parameters' names, its attributes, its hooks and ``isinstance`` stay as
they were, and :func:`remove_segment` undoes it.  The module's own hooks run once a step; the hooks of its children run
again when the children are recomputed (:func:`is_recomputing` is true then).

``segment_config.py`` has the settings of a segment, and ``refusals.py`` the reasons why a module cannot be one.
``segment_call.py`` keeps the inputs of a call, packed, and the state that it starts from (``state.py``);
``segment_run.py`` runs it, and recomputes it when backward asks for a saved tensor.  ``chunked.py``
runs segments in chunks, and ``running.py`` knows which segment, chunk or recomputation a thread is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from memopt_cli.runtime.chunked import run_chunks
from memopt_cli.runtime.compiled import Run, run_compiled, run_plainly_or, uncompiled
from memopt_cli.runtime.compressor import COMPRESSORS, declared_compressor
from memopt_cli.runtime.deferred import Deferring
from memopt_cli.runtime.learned import SegmentKnowledge, ensure_learned
from memopt_cli.runtime.lengths import ConfigsByLength, LengthOf, config_of, length_refusal, segment_of, with_length_of
from memopt_cli.runtime.lifted.module import LiftedModule
from memopt_cli.runtime.module_state import LEARNED_KEY, SEGMENT_KEY, label_of
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.packing import PackedSaves
from memopt_cli.runtime.places.interface import DEVICE
from memopt_cli.runtime.places.schedule import ParcelSeries, parcel_to
from memopt_cli.runtime.private_torch import between_graphs, forbids_hooks, is_transforming, not_compiled
from memopt_cli.runtime.refusals import refusal, settings_refusal, why_misplaced, wrong_settings
from memopt_cli.runtime.running import is_checkpointed, is_in_segment, is_transformed
from memopt_cli.runtime.runs import Chain
from memopt_cli.runtime.segment_call import PackedInputs, call_checkpointed, choose_compressor
from memopt_cli.runtime.segment_config import Installed, SegmentConfig
from memopt_cli.runtime.tree import tensors_of

_CONSTRUCTED = "_memopt_constructed"
"""Attribute of a new segment between Python's calls of ``__new__`` and ``__init__``."""
_MADE = "_memopt_made"
"""Attribute of the class of a segment that is complete."""


class PackingContainer(Installed):
    """Mixin of a module that recomputes nothing; the tensors saved in its forward are packed, or sent to a place."""


class GCContainer(Installed):
    """Mixin of a module that is a segment.

    As in SpikingJelly, ``GCContainer(x_compressor, *modules)`` makes a :class:`~memopt_cli.runtime.runs.Chain` of the
    modules, which is a segment.  ``x_compressor``: the compressor of its input, or the name of the compressor's class;
    ``None`` stores the input raw.
    """

    def __new__(cls, x_compressor: Any, *modules: nn.Module) -> Any:
        """Make a segment of ``modules``.

        Raises :class:`TypeError` if one is not a module, :class:`ValueError` if they cannot be a segment.
        """
        return _construct(cls, x_compressor, modules, SegmentConfig())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # After ``GCContainer(...)``, Python calls this with the arguments of ``__new__``, which has done everything.
        # Any other call is a call of the module's own ``__init__``.
        if not vars(self).pop(_CONSTRUCTED, False):
            super().__init__(*args, **kwargs)


class TCGCContainer(GCContainer):
    """Mixin of a segment that runs in chunks along an axis, each chunk checkpointed on its own.

    ``TCGCContainer(x_compressor, *modules, n_chunk=4)`` makes a :class:`~memopt_cli.runtime.runs.Chain` of the modules,
    which runs in chunks along axis 0: ``n_seq_inputs`` leading arguments are cut, and ``n_outputs`` leading outputs are
    joined.
    """

    def __new__(
        cls, x_compressor: Any, *modules: nn.Module, n_chunk: int = 1, n_seq_inputs: int = 1, n_outputs: int = 1
    ) -> Any:
        """Make a segment of ``modules`` that runs in ``n_chunk`` chunks.

        Raises :class:`TypeError` if one is not a module, :class:`ValueError` if they cannot run in chunks.
        """
        norms = n_chunk != 1 and any(batch_norms(module) for module in modules)
        config = SegmentConfig(chunks=n_chunk, seq_inputs=n_seq_inputs, seq_outputs=n_outputs, batch_statistics=norms)
        return _construct(cls, x_compressor, modules, config)


def _construct(
    cls: type[GCContainer], x_compressor: Any, modules: Sequence[nn.Module], config: SegmentConfig
) -> nn.Module:
    chain = Chain(*modules)
    if x_compressor is not None:
        vars(chain)["x_compressor"] = x_compressor
    install_segment(chain, replace(config, compressor=declared_compressor(chain) or "null"))
    if isinstance(chain, cls):  # otherwise (one chunk of a TCGCContainer), Python does not call ``__init__``
        vars(chain)[_CONSTRUCTED] = True
    return chain


class LossContainer(Installed):
    """Mixin of a linear layer that runs in chunks together with the cross-entropy of its output."""


class ByLengthContainer(Installed):
    """Mixin of a module with settings by the length of the model's input, and of the root, which knows the length."""


Settings = SegmentConfig | ConfigsByLength
"""The settings of a segment: the same for all inputs, or by the length of the model's input."""


def install_segment(module: nn.Module, config: Settings) -> None:
    """Make ``module`` a segment in place by replacing its class.  Raises :class:`ValueError` if it cannot be one."""
    if reason := refusal(module) or _first_reason(functools.partial(settings_refusal, module), config):
        raise ValueError(reason)
    vars(module)[SEGMENT_KEY] = config
    module.__class__ = _segment_class(type(module), _mixin_for(config))


def check_installed(module: nn.Module) -> None:
    """Raise :class:`ValueError` with the reason if ``module``, read from a file, has settings that do not fit it."""
    config = settings_of(module)
    if config is not None and (reason := _first_reason(functools.partial(why_misplaced, module), config)):
        raise ValueError(reason)
    if isinstance(config, ConfigsByLength) and (reason := length_refusal(module, config)):
        raise ValueError(reason)


def _first_reason(reason_of: Callable[[SegmentConfig], str], config: Settings) -> str:
    """Return the first reason that ``reason_of`` gives against ``config``, or against one of its ranges."""
    configs = config.configs if isinstance(config, ConfigsByLength) else (config,)
    return next(filter(None, map(reason_of, filter(None, configs))), "")


def _mixin_for(config: Settings) -> type[Installed]:
    if isinstance(config, ConfigsByLength):
        return ByLengthContainer
    if not config.recompute:
        return PackingContainer
    if config.through_loss:
        return LossContainer
    return TCGCContainer if config.chunks > 1 else GCContainer


def remove_segment(module: nn.Module) -> None:
    """Make the segment ``module`` a plain module again; mixins that others have put on its class since stay."""
    del vars(module)[SEGMENT_KEY]
    vars(module).pop(LEARNED_KEY, None)
    module.__class__ = _without_segment(type(module))


def settings_of(module: nn.Module) -> Settings | None:
    """Return the settings of the segment ``module``, or ``None`` for a plain module."""
    settings: Settings | None = vars(module).get(SEGMENT_KEY)
    return settings


def restore_segment(original: type[nn.Module] | LiftedModule, config: dict[str, Any]) -> nn.Module:
    """Return an empty segment of class ``original``, which an unpickler fills, or the lifted module made a segment.

    Saved models name this function: do not rename it.  Raises :class:`ValueError` for settings no segment has.
    """
    return _restore(original, SegmentConfig(**config))


def restore_by_length(original: type[nn.Module] | LiftedModule, config: dict[str, Any]) -> nn.Module:
    """Return an empty segment by length, as :func:`restore_segment` does for other segments; do not rename it."""
    configs = tuple(None if entry is None else SegmentConfig(**entry) for entry in config["configs"])
    length = None if config["length"] is None else LengthOf(**config["length"])
    return _restore(original, ConfigsByLength(**{**config, "configs": configs, "length": length}))


def _restore(original: type[nn.Module] | LiftedModule, settings: Settings) -> nn.Module:
    if reason := _first_reason(wrong_settings, settings):
        raise ValueError(reason)
    if isinstance(original, LiftedModule):
        install_segment(original, settings)
        return original
    kind = _segment_class(original, _mixin_for(settings))
    module = nn.Module.__new__(kind)
    vars(module)[SEGMENT_KEY] = settings
    return module


# ---------------------------------------------------------------------------------------------- the class


class _SegmentClass(type):
    """Metaclass of segment classes: attributes set on one are set on the module's own class, as without a plan.

    So ``type(self).calls += 1`` in a forward, or ``type(layer).rate = 0.1`` in a schedule, is seen by all modules of
    that class, segments or not.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if _belongs_to_segment(cls, name):
            super().__setattr__(name, value)
        else:
            setattr(vars(cls)["_original"], name, value)

    def __delattr__(cls, name: str) -> None:
        if _belongs_to_segment(cls, name):
            super().__delattr__(name)
        else:
            delattr(vars(cls)["_original"], name)


def _belongs_to_segment(cls: type, name: str) -> bool:
    """Return whether the attribute ``name`` of ``cls`` is its own, not one of the class of the module.

    It is while ``cls`` is being made (``__init_subclass__``), and in a class that others derive from a segment's.
    """
    return _MADE not in vars(cls) or name in vars(cls) or (name.startswith("__") and name.endswith("__"))


def _segment_class(original: type[nn.Module], mixin: type[Installed]) -> type[nn.Module]:
    """Return the class of segments on modules of class ``original``; make it the first time.

    Python holds the subclasses of ``original`` weakly, and a cache here would keep them alive.
    """
    kinds = (kind for kind in original.__subclasses__() if vars(kind).get("_original") is original)
    return next((kind for kind in kinds if kind.__bases__[0] is mixin), None) or _make_segment_class(original, mixin)


def _make_segment_class(original: type[nn.Module], mixin: type[Installed]) -> type[nn.Module]:
    run, recomputes = _RUNS[mixin], issubclass(mixin, GCContainer)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original.forward, self)
        if not recomputes or not torch.is_grad_enabled():
            return run(self, call, args, kwargs)
        if torch.compiler.is_compiling():
            return run_compiled(run, self, call, args, kwargs)
        return uncompiled(run, self, call, args, kwargs)

    def construct(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # ``type(module)(...)``, which slicing a Sequential calls, makes a plain module, not a second segment.
        return original(*args, **kwargs)

    def represent(self: nn.Module) -> str:
        return f"{_label(mixin, vars(self)[SEGMENT_KEY])} {original.__repr__(self)}"

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        restore = restore_by_length if mixin is ByLengthContainer else restore_segment
        if issubclass(original, LiftedModule):  # a class made at run time, which pickle cannot find by name
            twin = nn.Module.__new__(original)
            vars(twin).update({k: v for k, v in vars(self).items() if k not in (SEGMENT_KEY, LEARNED_KEY)})
            return restore, (twin, asdict(vars(self)[SEGMENT_KEY]))
        reduced = object.__reduce_ex__(self, max(2, protocol))
        assert isinstance(reduced, tuple)
        state = {key: value for key, value in reduced[2].items() if key not in (SEGMENT_KEY, LEARNED_KEY)}
        return restore, (original, asdict(vars(self)[SEGMENT_KEY])), state

    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,  # libraries look classes up by their text, as Transformers does
        "__doc__": original.__doc__,
        "__new__": construct,
        "__reduce_ex__": reduce,
        "__repr__": represent,
        "_original": original,
        "forward": forward,
    }
    meta = type(original)
    own_meta = _SegmentClass if meta is type else type(f"{meta.__name__}OfSegment", (_SegmentClass, meta), {})
    kind: Any = own_meta(original.__name__, (mixin, original), body)
    setattr(kind, _MADE, True)
    return kind  # type: ignore[no-any-return]


def _label(mixin: type[Installed], config: Settings) -> str:
    """Return the text that precedes the module in its ``repr``: the mixin, and the settings that are not defaults."""
    if isinstance(config, ConfigsByLength):
        labels = ("plain" if entry is None else _label(_mixin_for(entry), entry) for entry in config.configs)
        return f"{mixin.__name__}({', '.join(f'{n}: {text}' for n, text in zip(config.up_to, labels, strict=True))})"
    chosen = [f for f in fields(config) if f.compare and getattr(config, f.name) != f.default]
    return f"{mixin.__name__}({', '.join(f'{f.name}={getattr(config, f.name)!r}' for f in chosen)})"


def _without_segment(cls: type) -> type:
    if "_original" in vars(cls):
        original: type = vars(cls)["_original"]
        return original
    if not issubclass(cls, Installed):
        return cls
    bases = tuple(_without_segment(base) for base in cls.__bases__)
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    make: Any = type if isinstance(cls, _SegmentClass) else type(cls)
    return make(cls.__name__, bases, body)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- running it


def _run_by_length(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.compiler.is_compiling():
        path = getattr(module, SEGMENT_KEY).path  # PyTorch 2.8 does not trace ``vars``
        return run_plainly_or(_run_between_graphs, path, module, forward, args, kwargs)
    with with_length_of(module, args, kwargs):
        run = _run_at_length(module)
        return forward(*args, **kwargs) if run is None else run(module, forward, args, kwargs)


@between_graphs
def _run_between_graphs(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``module`` by length in a compiled model: ``forward`` is compiled, and the choice of its settings is not."""
    with _with_length_uncompiled(module, args, kwargs):
        run = _run_at_length_uncompiled(module)
        return forward(*args, **kwargs) if run is None else run(module, forward, args, kwargs)


def _run_at_length(module: nn.Module) -> Run | None:
    """Return the function that runs ``module`` at the current length; ``None`` if it runs as without a plan.

    Segments run uncompiled: a graph made for one length would also be used for other lengths.
    """
    config = segment_of(module)
    # The user's own checkpoint would run the module again in backward, where the length is unknown.
    if config is None or is_checkpointed():
        return None
    mixin = _mixin_for(config)
    recomputes = issubclass(mixin, GCContainer) and torch.is_grad_enabled()
    return functools.partial(uncompiled, _RUNS[mixin]) if recomputes else _RUNS[mixin]


_with_length_uncompiled, _run_at_length_uncompiled = not_compiled(with_length_of), not_compiled(_run_at_length)


def _run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config = config_of(module)
    compressor = choose_compressor(module, config)
    if not config.spatial_split:
        parcel = parcel_to(config.place)
        output = call_checkpointed(module, forward, args, kwargs, PackedInputs(compressor, (), parcel), config.keep)
        if parcel is not None:
            parcel.complete()
        return output
    output = args
    learned = ensure_learned(module).stages
    for index, stage in enumerate(_check_stages(module)):
        arguments = output if isinstance(output, tuple) else (output,)
        if index not in learned or not learned[index].belongs_to(stage):
            learned[index] = SegmentKnowledge(stage)
        parcel = parcel_to(config.place)
        inputs = PackedInputs(compressor, (), parcel)
        output = call_checkpointed(stage, stage, arguments, kwargs, inputs, config.keep, learned=learned[index])
        if parcel is not None:
            parcel.complete()
        # Keywords and compressor are only for the input of the first stage.
        kwargs = {}
        compressor = COMPRESSORS["null"]
    return output


def _run_packing(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # ``is_compiling`` comes first, since a compiler cannot trace the others.  A segment around, or a checkpoint of the
    # user's own, drops what autograd saves; hooks in here would keep it.
    is_dropped = torch.compiler.is_compiling() or is_in_segment() or is_checkpointed()
    if is_dropped or not torch.is_grad_enabled() or is_transformed():
        return forward(*args, **kwargs)
    try:
        with _packed_saves(module, args, kwargs).hooks():
            return forward(*args, **kwargs)
    except RuntimeError as error:
        if forbids_hooks(error):
            raise RuntimeError(
                f"{label_of(module)} computes gradients with torch.func in its forward, which PyTorch cannot do while "
                "what is saved there is packed; set packed to false in the plan"
            ) from error
        raise


def _packed_saves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedSaves:
    config = config_of(module)
    state = (*module.parameters(), *module.buffers())
    if config.place == DEVICE:
        return PackedSaves(state)
    return PackedSaves((*state, *tensors_of((args, kwargs))), ParcelSeries(config.place), packs=config.packs)


def _run_through_loss(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    is_eager = not torch.compiler.is_compiling() and not is_transforming()
    if not (module.training and is_eager and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    with Deferring(config_of(module).chunks, label_of(module)):
        return forward(*args, **kwargs)


def _check_stages(module: nn.Module) -> Sequence[nn.Module]:
    stages = module.__spatial_split__()  # type: ignore[operator]
    if not isinstance(stages, list | tuple) or not stages or not all(isinstance(s, nn.Module) for s in stages):
        raise TypeError(
            f"__spatial_split__ of {label_of(module)} must return a list or tuple of modules, not {stages!r}"
        )
    return stages


_RUNS: dict[type[Installed], Run] = {
    GCContainer: _run,
    TCGCContainer: run_chunks,
    PackingContainer: _run_packing,
    LossContainer: _run_through_loss,
    ByLengthContainer: _run_by_length,
}
"""Mixin -> the function that runs the forward of a module with it."""
