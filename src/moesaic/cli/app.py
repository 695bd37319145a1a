"""The commands put together: one file a command, one place for errors and exit codes."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from moesaic._version import __version__
from moesaic.cli.common import BAD_INPUT, FAILED, INTERRUPTED
from moesaic.cli.interrupts import Interrupted
from moesaic.cli.main import COMMANDS

app = typer.Typer(
    name="moesaic",
    help="Mixture-of-Experts models as parts that combine. Every command takes --help, --json and --debug.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"moesaic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Mixture-of-Experts models as parts that combine."""


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as stop:
            raise Interrupted(*stop.args) from None

    return run_command


for _name, _target in COMMANDS.items():
    _module, _, _function = _target.partition(":")
    app.command(_name)(_interruptible(getattr(importlib.import_module(_module), _function)))


def run(argv: Sequence[str]) -> None:
    """Run a command and leave with its exit code; errors are one line on stderr.

    Args:
        argv: arguments without the program's name.
    """
    args = list(argv)
    debug = "--debug" in args or os.environ.get("MOESAIC_DEBUG") == "1"
    args = [arg for arg in args if arg != "--debug"]
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries; nobody watches
    logging.basicConfig(
        stream=sys.stderr, level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s %(message)s"
    )
    try:
        get_command(app)(args, prog_name="moesaic")
    except (KeyboardInterrupt, Interrupted) as stop:
        _leave(": ".join(["interrupted", *map(str, stop.args)]), INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        _leave(_one_line(error), exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    """Exit code for an error that reached the top: bad input or failure."""
    bad_input = (ValueError, TypeError, KeyError, ImportError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return BAD_INPUT if isinstance(error, bad_input) else FAILED


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (ValueError, OSError, ImportError, RuntimeError))
    return text if known else f"{type(error).__name__}: {text} (run with --debug for the traceback)"


def _leave(message: str, code: int) -> None:
    sys.stderr.write(f"moesaic: {message}\n")
    raise SystemExit(code)
