"""Reports for programs: one JSON document; sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from memopt_cli.documents import json_text
from memopt_cli.records import OptimizeResult, to_data


class JsonReport:
    """Every record as it is; a number that is not finite becomes ``null``."""

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        stream.write(json_text(to_data(result)))

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        stream.write(json_text({"files": list(files)}))
