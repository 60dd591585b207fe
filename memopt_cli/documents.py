"""Text of the files people read: YAML read strictly, YAML and JSON written in one style."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from memopt_cli.errors import UsageError

_MOST_DIGITS = 80
"""No whole number that fits 64 bits is longer, underscores and base included."""


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases: a few of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias at line {self.peek_event().start_mark.line + 1} is not accepted")  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError(f"a key of the mapping at line {node.start_mark.line + 1} is given twice")
        return mapping

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        too_large = yaml.YAMLError(f"the number at line {node.start_mark.line + 1} is too large")
        if len(node.value) > _MOST_DIGITS:
            raise too_large
        if ":" in node.value:  # YAML 1.1 takes 1:32 for 92, in base 60
            return str(node.value)
        value = self.construct_yaml_int(node)
        if abs(value) >= 2**63:
            raise too_large
        return int(value)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_whole_number)


class _ExactDumper(yaml.SafeDumper):
    """Safe YAML whose text reads back as it was: line breaks of any kind only in double quotes, as escapes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_ExactDumper.add_representer(str, _ExactDumper.represent_text)


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML file; raises :class:`UsageError` if it cannot be read or is no YAML."""
    try:
        return yaml.load(path.read_bytes(), _PlainLoader)
    except OSError as err:
        raise UsageError(f"cannot read {path}: {err.strerror}", hint="Check the path.") from err
    except (
        Exception
    ) as err:  # PyYAML's constructors raise whatever int(), datetime() and dict() raise; deep nesting too
        raise UsageError(f"{path} is not valid YAML: {_one_line(err)}") from err


def read_mapping(path: Path) -> dict[str, Any]:
    """The same for a file whose content is keys and values; an empty file has no keys."""
    data = read_yaml(path)
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path} must hold keys and values (key: value), not {_shortened(data)}")
    return data


def yaml_text(data: Any) -> str:
    """Plain values -> YAML: keys in the order given, lists of scalars on one line."""
    return yaml.dump(data, Dumper=_ExactDumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)


def json_text(data: Any) -> str:
    """Plain values -> indented JSON that any reader accepts: a number that is not finite becomes ``null``."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def printable(text: str) -> str:
    """The text with what a terminal would obey, such as escape sequences, spelled out."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {key: _finite(item) for key, item in data.items()}
    return [_finite(item) for item in data] if isinstance(data, list | tuple) else data


def _one_line(err: Exception) -> str:
    return " ".join(str(err).split()) or type(err).__name__


def _shortened(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
