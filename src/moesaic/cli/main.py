"""Where the command line starts. Nothing heavy is imported before Ctrl-C has its meaning.

Exit codes: 0 done, 1 failed (a full disk, a diverged run), 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moesaic._start import leave_on_ctrl_c

# Command -> module:function. Command modules import torch and transformers inside their function, so that
# `moesaic --version` and `--help` answer at once.
COMMANDS = {
    "detect": "moesaic.cli.detect:detect",
    "doctor": "moesaic.cli.doctor:doctor",
    "inspect": "moesaic.cli.inspect:inspect",
    "methods": "moesaic.cli.methods:methods",
    "quickstart": "moesaic.cli.quickstart:quickstart",
    "reproduce": "moesaic.cli.reproduce:reproduce",
    "train": "moesaic.cli.train:train",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    Args:
        argv: arguments without the program's name. By default those of the process, which then is the command line's
            own: Ctrl-C ends it with one line and exit code 130 at every moment.
    """
    if argv is not None:
        from moesaic.cli.app import run

        run(argv)
        return
    leave_on_ctrl_c()
    from moesaic.cli.app import run
    from moesaic.cli.interrupts import interrupt_carefully

    interrupt_carefully()
    try:
        run(sys.argv[1:])
    finally:
        leave_on_ctrl_c()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
