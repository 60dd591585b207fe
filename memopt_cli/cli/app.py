"""Entry point of the command line: lists the commands, runs one, and turns any exception into a message and exit code.

This is the only place that does so: every other function raises, and nothing else prints an error.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Annotated, Any, Final, TextIO, cast

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from memopt_cli.cli.apply import apply
from memopt_cli.cli.baseline import baseline
from memopt_cli.cli.check import check
from memopt_cli.cli.compare import compare
from memopt_cli.cli.explain import explain
from memopt_cli.cli.formats import SHOWN, report_in
from memopt_cli.cli.help import GroupedCommand, RankCommand
from memopt_cli.cli.inspect import inspect
from memopt_cli.cli.measure import measure
from memopt_cli.cli.optimize import optimize
from memopt_cli.cli.options import is_verbose
from memopt_cli.cli.profile import profile
from memopt_cli.cli.ranks import await_turn_to_print
from memopt_cli.cli.recommend_batch import recommend_batch
from memopt_cli.cli.selftest import selftest
from memopt_cli.cli.verify import verify
from memopt_cli.errors import Interrupted, MemoptError, OutputExistsError, UnsafeFileError, UsageError
from memopt_cli.report.lines import guard
from memopt_cli.text.documents import abridge, printable
from memopt_cli.text.misnamed import builder_in
from memopt_cli.text.options import ReportFormat
from memopt_cli.text.spelling import on_command_line


class OutputError(MemoptError):
    """Stdout or stderr cannot be written: the disk or quota is full."""


class ClosedOutputError(OutputError):
    """Broken pipe: the reader of the output, such as ``head``, has closed it.  memopt then ends silently."""

    exit_code = 128 + 13  # a shell's exit code for a program ended by SIGPIPE


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system errors for a full disk, an exhausted quota and a file of the largest size."""
_IMPORTLIB: Final = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
"""Files of Python's own frames in the traceback of a failed import."""
_MAX_MESSAGE_LENGTH: Final = 20_000
"""Maximum number of characters of a message that are printed: it may quote a whole file."""


class JudgingCommand(GroupedCommand):
    """Command that reports its failures, wrong arguments included, in the format that ``--format`` names."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context for ``args``; if they are wrong, report the error in the chosen format, then raise it."""
        given = list(args)  # parsing empties args
        try:
            return super().make_context(info_name, args, parent, **extra)
        except (TyperException, MemoptError) as err:
            extra |= {"resilient_parsing": True, "ignore_unknown_options": True, "allow_extra_args": True}
            context = super().make_context(info_name, list(given), parent, **extra)
            typed, _, _ = self.make_parser(context).parse_args(given)
            self._report(err, context, typed)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; report an error in the chosen format before raising it."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as err:
            if SHOWN not in ctx.meta:
                self._report(err, ctx, ctx.params)
            raise

    def _report(self, err: BaseException, context: Any, typed: Mapping[str, Any]) -> None:
        """Write ``err`` in the format that ``context`` names; if that cannot be written, stderr still has it.

        ``typed``: the arguments; one of them names the model that is judged.
        """
        options, failure = context.params, _as_memopt_error(err)
        form: ReportFormat = "json" if options.get("json") else options.get("format") or "table"
        report = report_in(form, baseline=options.get("baseline") or "", command=context.info_name)
        model = typed.get("candidate") or typed.get("model") or "the model"
        if not isinstance(failure, OutputError):
            with suppress(OSError):
                report.refused(failure, str(model), sys.stdout)


app = typer.Typer(name="memopt", add_completion=False, rich_markup_mode=None)
app.command("inspect", cls=GroupedCommand)(inspect)
app.command("profile", cls=GroupedCommand)(profile)
app.command("optimize", cls=GroupedCommand)(optimize)
app.command("recommend-batch", cls=GroupedCommand)(recommend_batch)
app.command("measure", cls=RankCommand)(measure)
app.command("apply", cls=GroupedCommand)(apply)
app.command("explain", cls=GroupedCommand)(explain)
app.command("verify", cls=JudgingCommand)(verify)
app.command("baseline", cls=GroupedCommand)(baseline)
app.command("check", cls=JudgingCommand)(check)
app.command("compare", cls=GroupedCommand)(compare)
app.command("selftest", cls=GroupedCommand)(selftest)


def _show_version(wanted: bool) -> None:
    if wanted:
        from memopt_cli.version import __version__

        typer.echo(f"memopt {__version__}")
        raise typer.Exit


@app.callback()
def memopt(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train a saved PyTorch model in less memory: recompute, pack and chunk activations; every plan is verified."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``memopt`` with ``arguments`` (``sys.argv[1:]`` if ``None``) and return its exit code; raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a path or a terminal that is not UTF-8 must not end a report
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else arguments
    with _guarded_streams():
        try:
            return _run(given or ["--help"])
        except (Exception, KeyboardInterrupt, SystemExit) as err:
            failure = _as_memopt_error(err)
            again = isinstance(failure, UnsafeFileError) and failure.trusted_with
            failure.hint = "\n".join(filter(None, ["" if again else failure.hint, _suggest_retry(failure, given)]))
            if isinstance(failure, OutputError):
                with suppress(OSError, ValueError):  # Python flushes stdout once more at exit, and would fail again
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(failure, ClosedOutputError) and await_turn_to_print(failure, err):
                with suppress(OSError):
                    _print_failure(failure, err)
            return failure.exit_code


@contextmanager
def _guarded_streams() -> Iterator[None]:
    """Guard stdout and stderr in the ``with`` block: spell options, and escape lines that a CI system would obey.

    GitHub Actions runs a line that begins with ``::`` as a command, and a model file could hold such text.
    """
    with open(os.devnull, "w") as nowhere:  # sys.stdout is None if the caller closed it
        out, err = (cast(TextIO, guard(stream or nowhere, on_command_line)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            yield


def _run(arguments: Sequence[str]) -> int:
    try:
        with _command().make_context("memopt", list(arguments)) as context:
            context.command.invoke(context)
        code = 0
    except typer.Exit as stop:
        code = stop.exit_code
    sys.stdout.flush()
    return code


@functools.cache
def _command() -> TyperGroup:
    """Return all commands and their parameters, made once for all calls of :func:`main` in a process."""
    return cast(TyperGroup, get_command(app))


def _as_memopt_error(err: BaseException) -> MemoptError:
    match err:
        case MemoptError():
            return err
        case TyperException():
            return UsageError(err.format_message().replace("Value error, ", ""), hint=_usage_hint(err))
        case KeyboardInterrupt() | typer.Abort():
            return Interrupted(str(err) or "interrupted")
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # rich exits when it meets a broken pipe
            return ClosedOutputError("broken pipe (SIGPIPE)")
        case OSError(errno=number, filename=None) if number in _FULL:  # an error with a filename is not about stdout
            return OutputError(
                f"the output could not be written in full: {err.strerror}",
                hint="Free space on that disk, or redirect the output to another one.",
            )
        case ModuleNotFoundError(name=str(name)):
            return UsageError(
                f"{_place_of_import(err)} imports {name}, which is not installed",
                hint="If you trust that code, install the package that provides it, whose name may differ.",
            )
        case _:
            text = " ".join(str(err).split())
            return MemoptError(
                f"unexpected {type(err).__name__}{': ' if text else ''}{text}",
                hint="This is probably a bug in memopt: run it again with -v, and report the traceback.",
            )


def _place_of_import(err: ModuleNotFoundError) -> str:
    """Return the file and line of the import that raised ``err``; importlib's own lines come after it."""
    lines = traceback.extract_tb(err.__traceback__)
    place = next(line for line in reversed(lines) if line.filename not in _IMPORTLIB)
    return f"{place.filename}, line {place.lineno},"


def _suggest_retry(failure: MemoptError, given: Sequence[str]) -> str:
    """Return a sentence with the command ``given`` and the flag that avoids ``failure``; empty if no flag does."""
    command = shlex.join(["memopt", *given])
    match failure:
        case UnsafeFileError(trusted_with=str(flags)) if flags:
            return f"You trusted this file before, and it is unchanged. To do so again: {command} {flags}"
        case OutputExistsError():
            return f"To replace it: {command} `--force`"
    for place, word in enumerate(given):
        if builder := builder_in(failure.hint, word):
            filled = ["memopt", *given[:place], builder, "--weights", *given[place:]]
            return f"The whole command: {shlex.join(filled)}"
    return ""


def _usage_hint(err: TyperException) -> str:
    context, parameter = getattr(err, "ctx", None), getattr(err, "param", None)
    if context is None:
        return "See memopt --help."
    if taking := _commands_with(getattr(err, "option_name", "")):
        return f"{taking}. See {context.command_path} --help."
    is_in_file = parameter is not None and parameter.name in (context.default_map or {})
    return f"See {context.command_path} --help.{f' {context.obj.path} also sets it.' if is_in_file else ''}"


def _commands_with(flag: str) -> str:
    """Return a clause that names the commands with an option ``flag``; empty if no command has it."""
    commands = [
        f"memopt {name}"
        for name, command in _command().commands.items()
        if any(flag in parameter.opts for parameter in command.params)
    ]
    return f"{flag} is an option of {', '.join(commands)}" if commands else ""


def _print_failure(failure: MemoptError, err: BaseException) -> None:
    if is_verbose():
        for part in traceback.format_exception(err):
            print(*map(printable, part.rstrip("\n").split("\n")), sep="\n", file=sys.stderr)
    for kind, text in (("error", failure.message), ("hint", failure.hint)):
        first, *more = abridge(text, _MAX_MESSAGE_LENGTH).splitlines() or [""]
        if first:
            print(f"{kind}: {printable(first)}", file=sys.stderr)
        for line in more:
            print(f"  | {printable(line)}" if kind == "error" else f"      {printable(line)}", file=sys.stderr)
