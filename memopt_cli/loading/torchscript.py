"""TorchScript archives (``torch.jit.save``): code, therefore checked before it is loaded."""

from __future__ import annotations

import io

import torch
from torch import nn

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading.interface import Ask, ModelFile
from memopt_cli.records import Trust
from memopt_cli.runtime.script import UnsafeScript, check_script, plain_module


class TorchScript:
    """The format of ``torch.jit.save``; see :class:`memopt_cli.loading.interface.Format`."""

    name = "torchscript"

    def recognizes(self, file: ModelFile) -> bool:
        if not file.data.startswith(b"PK"):
            return False
        try:
            return "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(file.data)).get_all_records()
        except (RuntimeError, UnicodeDecodeError):
            return False

    def load(self, file: ModelFile, trust: Trust, ask: Ask | None) -> nn.Module:
        if not trust.pickle:
            _check(file)
        try:
            script = torch.jit.load(io.BytesIO(file.data), map_location="cpu")  # type: ignore[no-untyped-call]
        except Exception as err:  # a damaged archive can make the compiler raise anything
            first = str(err).strip().partition("\n")[0]
            raise FileFormatError(
                f"{file.path} is a damaged TorchScript archive: {type(err).__name__}: {first}"
            ) from err
        return plain_module(script)


def _check(file: ModelFile) -> None:
    try:
        check_script(file.data)
    except UnsafeScript as err:
        raise UnsafeFileError(
            f"{file.path} was not loaded: its TorchScript code uses {err}, which is not known to be harmless",
            hint="If you trust where it came from, add --trust-pickle.",
        ) from err
    except (RuntimeError, UnicodeDecodeError) as err:
        first = str(err).partition("\n")[0]
        raise FileFormatError(f"{file.path} is a damaged TorchScript archive: {first}") from err
