"""Ctrl-C while a command runs: a KeyboardInterrupt that is never lost in an import."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from moesaic import _start

_IMPORTS = "<frozen importlib._bootstrap>"
# What stands between a command and the import that it asked for.
_BETWEEN = ("importlib", "moesaic")


class Interrupted(Exception):
    """Ctrl-C ended a command; the arguments say what is kept. (A KeyboardInterrupt is caught by the parser.)"""


def interrupt_carefully() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, but not inside an import.

    There libraries catch it, print it from a callback and go on, or report it as a broken installation. While a command
    imports what it needs the process simply ends; an import further down, in the middle of work, is waited for.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_ctrl_c)


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    importer = _importer(frame)
    if importer is None:
        raise KeyboardInterrupt
    if importer.startswith("moesaic.cli"):
        _start.leave()
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _importer(frame: FrameType | None) -> str | None:
    """Name of the module whose code asked for the outermost import in progress; None when there is none."""
    found = None
    inside = False
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            inside = True
        elif inside and (name := frame.f_globals.get("__name__", "")) not in _BETWEEN:
            found, inside = name, False
        frame = frame.f_back
    return found
