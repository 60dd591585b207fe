"""Folders of ``save_pretrained`` (``config.json`` and weights), built by transformers, with adapters of PEFT on them.

Memopt itself reads the settings and tensors of such a folder.  The settings name a class of transformers; nothing is
looked up on a hub, and no code in the folder runs.  The libraries trust the settings, and some settings are dangerous:
the name of code to import, too many layers for the memory, a regular expression with an endless match.  These are
refused before a library sees them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UnsafeFileError, UsageError, first_line, shorten
from memopt_cli.inputs.spec_text import ADAPTER_SETTINGS, MODEL_SETTINGS, base_of, is_pretrained
from memopt_cli.loading.bounds import bound_memory, bound_weights
from memopt_cli.loading.interface import Loaded
from memopt_cli.loading.module_pickle import load_tensors
from memopt_cli.loading.regex_cost import MAX_NAME_LENGTH, ListCost, matching_steps
from memopt_cli.loading.safetensors_file import read_safetensors
from memopt_cli.loading.watch import watch_code
from memopt_cli.text.documents import MAX_BYTES, read_bytes, read_json
from memopt_cli.text.misnamed import folder_refusal, suggest_weights, weights_files_in

_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_REFUSED_SETTINGS: Final = {
    "auto_map": "names code of its own",
    **dict.fromkeys(("use_kernels", "_use_kernels", "kernel_config"), "asks for kernels of a hub"),
    "attribute_map": "renames attributes, so a setting could reach one that memopt has not checked",
    "custom_pipelines": "names code of its own",
    **dict.fromkeys(
        ("model_args", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone"),
        "names files or models on a hub, which another library would read",
    ),
    "megatron_config": "names a module to import",
    "layer_replication": "copies layers any number of times",
    "quantization_config": "belongs to a quantized model, whose kernels memopt does not know",
}
"""Setting -> the reason why it is refused: it makes a library import code, or makes a model that cannot be trained."""
_IMPLEMENTATIONS: Final = {
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", None),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm", None),
}
"""Implementations of attention and of experts that are transformers' own: any other name is a kernel on a hub."""
_MAX_LISTED: Final = 3
"""Maximum number of names of weights in an error."""

_OFFLINE: Final = "HF_HUB_OFFLINE"
"""Environment variable that keeps libraries from looking names up on a hub."""

_BUILD_IN_CODE_HINT: Final = "Build it in your own code: package.module:callable."
_SAVE_AGAIN_HINT: Final = "Save it again with model.save_pretrained(folder)."
_COUNT_NAME: Final = re.compile(
    r"(\w*_)?(num|n)_\w+|depth|depths|layers|ngram|context_size|prediction_length|max_text_length"
    r"|\w*_(layers|labels|heads|experts|blocks|depth|depths|types|indices|flows|cycles|repeats|num|number)"
)
"""Names of settings that count things: ``num_hidden_layers``, ``depths``."""
_MAX_COUNT: Final = 10_000  # a setting may ask for this number even if there are few weights
_FREE_NUMBERS: Final = frozenset(
    "lora_alpha alpha alpha_pattern scaling tinit tfinal deltaT total_step projection_prng_key random_loc_seed".split()
)
"""Settings of adapters whose numbers make nothing large: factors, seeds, and steps of a training."""
_ROUNDS: Final = re.compile(r"_niter_(\d{1,18})")
_ROUND: Final = 40
"""Size that one round of PiSSA's initialization counts for: 250 rounds reach the limit of 10,000."""
_ADAPTERS: Final = (
    *("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "HRA", "FOURIERFT", "LN_TUNING", "VBLORA"),
    "RANDLORA",
)
_PLAIN_TEXTS: Final = frozenset(
    """peft_type task_type base_model_name_or_path peft_version revision bias auto_mapping megatron_core
    init_lora_weights init_weights trainable_token_indices""".split()
)
_PATTERNS: Final = frozenset(
    """target_modules exclude_modules feedforward_modules modules_to_save layers_pattern target_parameters rank_pattern
    alpha_pattern n_frequency_pattern""".split()
)
"""Settings that name modules; PEFT takes a single text for a regular expression, and a list for names."""
_EXPRESSIONS: Final = _PATTERNS - {"target_modules", "exclude_modules", "feedforward_modules", "target_parameters"}
"""Settings in which also the items of a list are regular expressions."""
_MAX_STEPS: Final = 4 * 10**6
"""Maximum number of steps of the regular expression engine to match all expressions of an adapter with one name."""
_MAX_LIST_STEPS: Final = 10**10
"""Maximum number of steps, of some 10 ns each, for all lists of an adapter."""
_MAX_FILE_NAME_LENGTH: Final = 255  # characters of a file's name, as file systems allow


def load_pretrained(location: str) -> tuple[Loaded, str]:
    """Load the model in the folder ``location``, in training mode on the CPU, with a hash of its files.

    Raises :class:`UsageError` for a folder without a model, :class:`UnsafeFileError` for settings that name code, and
    :class:`FileFormatError` if the folder is damaged, or if the library is missing or refuses it.
    """
    folder = Path(location)
    if not is_pretrained(location):
        reason, hint = folder_refusal(location)
        raise UsageError(f"{location} {reason}", hint=hint)
    digest = hashlib.sha256()
    tempfile.gettempdir()  # writes a file when it is first called, which the watch would refuse a library
    with _offline(), watch_code(location, _BUILD_IN_CODE_HINT):
        is_adapter = (folder / ADAPTER_SETTINGS).is_file()
        model, notes = _with_adapter(folder, digest) if is_adapter else (_model(folder, digest), ())
    return Loaded(module=model.train(), notes=notes), digest.hexdigest()


@contextmanager
def _offline() -> Iterator[None]:
    before = os.environ.get(_OFFLINE)
    os.environ[_OFFLINE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OFFLINE]
        else:
            os.environ[_OFFLINE] = before


def _model(folder: Path, digest: Any) -> nn.Module:
    settings = _settings(folder / MODEL_SETTINGS, digest)
    if "_diffusers_version" in settings:
        raise FileFormatError(
            f"{folder} is a folder of diffusers, which memopt does not read",
            hint="Save the model with torch.save(model, path), or build it by package.module:callable.",
        )
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_NAME_LENGTH:
        weights_files = weights_files_in(str(folder))
        own = [f" If the class is your own, name what builds it: {suggest_weights(path)}" for path in weights_files[:1]]
        raise FileFormatError(
            f"{folder / MODEL_SETTINGS} names no class of a model (architectures: {shorten(names)})",
            hint="".join([_SAVE_AGAIN_HINT, *own]),
        )
    transformers = _library("transformers", folder)
    kind: Any = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise FileFormatError(
            f"{folder} is of the class {name}, which transformers {transformers.__version__} does not have",
            hint="Install the version that saved it: transformers_version in its config.json.",
        )
    weights = _weights(folder, digest)
    _refuse_counts(folder, settings, weights)
    with _building(folder, "transformers", weights), _silence(transformers.logging):
        config = kind.config_class.from_dict(settings)
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            ignore_mismatched_sizes=True,  # :func:`_require_complete` reports them
            output_loading_info=True,
            trust_remote_code=False,
        )
    _require_complete(folder, name, info)
    return model  # type: ignore[no-any-return]


def _refuse_counts(folder: Path, settings: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse numbers in ``settings`` far beyond the weights: libraries make lists of such lengths before any module."""
    largest = max((size for tensor in weights.values() for size in tensor.shape), default=0)
    max_count = max(_MAX_COUNT, len(weights), largest)
    for key, value in _all_settings(settings):
        counted = sum(_whole_numbers(value)) if _COUNT_NAME.fullmatch(key) else 0
        if counted > max_count:
            raise FileFormatError(
                f"{folder} was not loaded: its {key[:MAX_NAME_LENGTH]}, {counted} in all, is far beyond what its "
                "weights allow",
                hint=_SAVE_AGAIN_HINT,
            )


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        yield from (number for item in value for number in _whole_numbers(item))
    elif isinstance(value, int):
        yield max(value, 0)


@contextmanager
def _building(folder: Path, library: str, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Bound the memory and time of ``library`` while it builds a model from settings, and report its errors."""
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    try:
        with bound_memory(nbytes), bound_weights(len(weights), nbytes):
            yield
    except (UnsafeFileError, FileFormatError):
        raise
    except ImportError as err:
        raise FileFormatError(
            f"{folder} cannot be built by {library}: {first_line(err)}", hint="Install the library that it needs."
        ) from err
    except Exception as err:  # the library's code may raise anything
        raise FileFormatError(
            f"{folder} cannot be built by {library}: {first_line(err)}", hint=_SAVE_AGAIN_HINT
        ) from err


@contextmanager
def _silence(logging: Any) -> Iterator[None]:
    """Silence a library that prints names in the file unescaped: they may be commands to a terminal or a CI system."""
    before, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shows_progress:
            logging.enable_progress_bar()


def _require_complete(folder: Path, name: str, info: Mapping[str, Any]) -> None:
    for kind, what in (
        ("missing_keys", "lacks weights of"),
        ("mismatched_keys", "has weights whose shapes do not fit"),
    ):
        keys = sorted((key if isinstance(key, str) else str(key[0]))[:MAX_NAME_LENGTH] for key in info.get(kind) or ())
        if keys:
            more = ", …" if len(keys) > _MAX_LISTED else ""
            raise FileFormatError(
                f"{folder} {what} {name}: {', '.join(keys[:_MAX_LISTED])}{more}", hint=_SAVE_AGAIN_HINT
            )


def _with_adapter(folder: Path, digest: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Load an adapter and its base model, which may be in any folder of this machine: a note names the folder."""
    settings = _settings(folder / ADAPTER_SETTINGS, digest)
    base_name = settings.get("base_model_name_or_path")
    base_folder = base_of(str(folder), base_name)
    if base_folder is None:
        raise FileFormatError(
            f"{folder} is an adapter of {shorten(base_name)}, which is not a folder on this machine",
            hint="Save the base with save_pretrained, and put its folder into "
            f"{ADAPTER_SETTINGS}: base_model_name_or_path.",
        )
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise FileFormatError(f"{folder} has no {_ADAPTER_WEIGHTS}", hint=_SAVE_AGAIN_HINT)
    _refuse_adapter(folder, settings)
    base = Path(base_folder)
    adapter = read_safetensors(_read(folder / _ADAPTER_WEIGHTS, digest), str(folder / _ADAPTER_WEIGHTS))
    model = _model(base, digest)
    _refuse_slow_names(folder, settings, sum(1 for _ in model.modules()) + sum(1 for _ in model.parameters()))
    weights = {**dict(model.named_parameters()), **adapter}
    _refuse_ranks(folder, settings, weights)
    peft = _library("peft", folder)
    with _building(folder, "peft", weights):
        return _apply_adapter(peft, model, settings, adapter), (
            f"The adapter is applied to the base in {base.resolve()}.",
        )


def _apply_adapter(peft: Any, model: nn.Module, settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Put the adapter on ``model`` as ``PeftModel.from_pretrained`` does, but by checked settings, not the folder's."""
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]]
    settings_of_kind = {key: value for key, value in settings.items() if key != "runtime_config"}  # as PEFT itself does
    config = kind.from_peft_type(**kind.check_kwargs(**settings_of_kind))
    config.inference_mode = False
    wrapper = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
    adapted: nn.Module = wrapper(model, config)
    peft.set_peft_model_state_dict(adapted, weights)
    return adapted


def _refuse_adapter(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse adapters whose kind or settings memopt does not know: PEFT might read other models and files."""
    kind = settings.get("peft_type")
    if kind not in _ADAPTERS:
        raise UnsafeFileError(
            f"{folder} was not loaded: its peft_type is {shorten(kind)}, whose adapters may read other files",
            hint=f"memopt loads {', '.join(_ADAPTERS)}. Build other adapters in code: package.module:callable.",
        )
    steps = 0.0
    for key, value in settings.items():
        texts, shown = [value] if isinstance(value, str) else list(_texts(value)), key[:MAX_NAME_LENGTH]
        if texts and key not in _PLAIN_TEXTS and key not in _PATTERNS:
            raise UnsafeFileError(
                f"{folder} was not loaded: memopt does not know its {shown}, which may name a file: "
                f"{shorten(texts[0])}",
                hint=f"Remove {shown} from {ADAPTER_SETTINGS}, or build the model in code: package.module:callable.",
            )
        for text in texts if key in _PATTERNS else ():
            steps += matching_steps(text)
            if steps > _MAX_STEPS:
                raise FileFormatError(
                    f"{folder / ADAPTER_SETTINGS} has regular expressions that may take forever, such as "
                    f"{text[:MAX_NAME_LENGTH]!r}",
                    hint="List the names of the modules instead.",
                )


def _refuse_slow_names(folder: Path, settings: dict[str, Any], places: int) -> None:
    """Refuse lists of names that PEFT would take forever to compare with the ``places`` module names of the base.

    PEFT takes some names for regular expressions.
    """
    lists = {key: list(_texts(settings.get(key))) for key in _PATTERNS}
    listed = sum(map(len, lists.values()))
    cost = ListCost(places=places, listed=listed, recompiles=settings["peft_type"] != "ADALORA")
    steps = 0.0
    for key, texts in lists.items():
        for text in texts:
            steps += cost.steps_for(text, is_expression=key in _EXPRESSIONS)
            if steps > _MAX_LIST_STEPS:
                raise FileFormatError(
                    f"{folder / ADAPTER_SETTINGS} has {len(texts)} names in its {key}, which take far too long to be "
                    f"found among the {places} of its base",
                    hint="List fewer names.",
                )


def _refuse_ranks(folder: Path, settings: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse ranks, and rounds of initialization, far beyond the weights: PEFT makes tensors of these sizes."""
    largest = max((size for tensor in weights.values() for size in tensor.shape), default=0)
    rounds = _ROUNDS.search(str(settings.get("init_lora_weights")))
    numbers = {key: _numbers(value) for key, value in settings.items() if key not in _FREE_NUMBERS}
    numbers["init_lora_weights"] = [int(rounds[1]) * _ROUND] if rounds else []
    for key, sizes in numbers.items():
        if any(not number <= max(_MAX_COUNT, largest) for number in sizes):
            what = f"its {key[:MAX_NAME_LENGTH]}, {max(sizes):.15g}"
            raise FileFormatError(
                f"{folder} was not loaded: {what}, is far beyond what its weights have", hint=_SAVE_AGAIN_HINT
            )


def _numbers(value: Any) -> list[float]:
    """List the numbers in the setting ``value``, nested lists and mappings included."""
    nested = ((*inner.values(),) if isinstance(inner, dict) else inner for inner in _containers(value))
    return [item for items in ([value], *nested) for item in items if isinstance(item, int | float)]


def _settings(path: Path, digest: Any) -> dict[str, Any]:
    try:
        data = read_bytes(path, MAX_BYTES)
        settings = _decode_numbers(read_json(data, infinite=True))
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else err
        raise FileFormatError(f"{path} cannot be read: {reason}", hint=_SAVE_AGAIN_HINT) from err
    if not isinstance(settings, dict):
        raise FileFormatError(f"{path} holds no settings", hint=_SAVE_AGAIN_HINT)
    _refuse_code(path, settings)
    digest.update(data)
    return settings


def _decode_numbers(settings: Any) -> Any:
    """Return ``settings`` with the numbers that transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(settings, list):
        return [_decode_numbers(value) for value in settings]
    if not isinstance(settings, dict):
        return settings
    if settings.keys() == {"__float__"} and settings["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(settings["__float__"])
    return {key: _decode_numbers(value) for key, value in settings.items()}


def _refuse_code(path: Path, settings: dict[str, Any]) -> None:
    for key, value in _all_settings(settings):
        if key in _REFUSED_SETTINGS and value:
            raise UnsafeFileError(
                f"{path.parent} was not loaded: its {key} {_REFUSED_SETTINGS[key]}", hint=_BUILD_IN_CODE_HINT
            )
        if any(setting in key and value not in own for setting, own in _IMPLEMENTATIONS.items()):
            raise UnsafeFileError(
                f"{path.parent} was not loaded: its {key[:MAX_NAME_LENGTH]} names a kernel of a hub, {shorten(value)}",
                hint=f"Remove {key[:MAX_NAME_LENGTH]} from {path.name}.",
            )


def _all_settings(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every setting in ``settings``, nested ones included."""
    for value in _containers(settings):
        if isinstance(value, dict):
            yield from ((str(key), item) for key, item in value.items())


def _texts(settings: Any) -> Iterator[str]:
    """Yield every text in ``settings``, the names of nested settings included."""
    for value in _containers(settings):
        yield from (text for text in value if isinstance(text, str))
        if isinstance(value, dict):
            yield from (text for text in value.values() if isinstance(text, str))


def _containers(settings: Any) -> Iterator[dict[str, Any] | list[Any]]:
    pending = [settings]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            yield value
            pending.extend(value.values() if isinstance(value, dict) else value)


def files_of_weights(folder: Path) -> list[str]:
    """Return the names of the files in ``folder`` that hold the weights of its adapter, or else of its model.

    Raises :class:`FileFormatError` if there are none.
    """
    is_adapter = (folder / ADAPTER_SETTINGS).is_file()
    return _files_of_weights(folder, (_ADAPTER_WEIGHTS,) if is_adapter else _WEIGHTS)


def _files_of_weights(folder: Path, names: Sequence[str]) -> list[str]:
    first = next((name for name in names if (folder / name).is_file()), None)
    if first is None:
        raise FileFormatError(f"{folder} has no weights: no {names[0]}", hint=_SAVE_AGAIN_HINT)
    return _shards(folder / first) if first.endswith(".json") else [first]


def _weights(folder: Path, digest: Any) -> dict[str, Tensor]:
    names = _files_of_weights(folder, _WEIGHTS)
    weights: dict[str, Tensor] = {}
    for name in names:
        data = _read(folder / name, digest)
        read = read_safetensors if name.endswith(".safetensors") else load_tensors
        part = read(data, str(folder / name))
        if not isinstance(part, Mapping) or not all(isinstance(tensor, Tensor) for tensor in part.values()):
            raise FileFormatError(f"{folder / name} holds no state dict", hint=_SAVE_AGAIN_HINT)
        weights |= part
    return weights


def _read(path: Path, digest: Any) -> bytes:
    try:
        data = read_bytes(path)
    except OSError as err:
        raise FileFormatError(
            f"{path} cannot be read: {err.strerror}", hint="Check the permissions of the file."
        ) from err
    digest.update(data)
    return data


def _shards(index: Path) -> list[str]:
    """Return the names of the files that ``index`` splits the weights into; all must lie next to it."""
    try:
        names = dict.fromkeys(read_json(read_bytes(index, MAX_BYTES))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise FileFormatError(f"{index} is not an index of weights", hint=_SAVE_AGAIN_HINT) from err
    for name in names:
        if (
            not isinstance(name, str)
            or name != Path(name).name
            or not name.isprintable()
            or len(name) > _MAX_FILE_NAME_LENGTH
        ):
            raise FileFormatError(
                f"{index} names a file that does not lie next to it: {shorten(name)}", hint=_SAVE_AGAIN_HINT
            )
    return list(names)


def _library(name: str, folder: Path) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as err:  # importing runs the package's code, which may raise anything
        hint = f"In plain Python, import {name} raises the same error."
        if isinstance(err, ModuleNotFoundError) and err.name == name:
            hint = f"Install it: pip install {name}"
        raise FileFormatError(f"{folder} needs {name}, which cannot be imported: {first_line(err)}", hint=hint) from err
