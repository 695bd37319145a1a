"""What Ctrl-C means before the command line runs: one line and exit code 130.

The package imports this first of all, and it imports next to nothing, so that the moment without it is as short as
Python allows. It does something only in a process that is the command line, never in one that imports the library.
"""

from __future__ import annotations

# The C module below `signal`, whose enums alone would take longer to import than all the rest here.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

INTERRUPTED = 130
_ENTRIES = ("moesaic", "moesaic.cli.main")


def leave(message: str = "interrupted") -> None:
    """End the process now, whatever it is doing. Files are written to a temporary name, so none is left half."""
    os.write(2, f"moesaic: {message}\n".encode())
    os._exit(INTERRUPTED)


def leave_on_ctrl_c() -> None:
    """From here on Ctrl-C calls :func:`leave`; nothing changes where the process was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: leave())


def is_command_line() -> bool:
    """Whether this process is ``moesaic ...`` or ``python -m moesaic ...``, and no worker of one."""
    if "multiprocessing.spawn" in sys.modules:
        return False
    if sys.argv[:1] == ["-m"]:  # Python is looking for the module that it is to run
        words = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] in [[name] for name in _ENTRIES]
    return os.path.basename(sys.argv[0] if sys.argv else "") in ("moesaic", "moesaic.exe", "moesaic-script.py")  # noqa: PTH119


if is_command_line():
    leave_on_ctrl_c()
