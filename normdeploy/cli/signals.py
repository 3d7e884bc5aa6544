"""Ctrl-C and SIGTERM while a library computes: Python hears of them when that returns, which a Loop without end never
does.

The operating system is asked to tell a thread as well (``signal.set_wakeup_fd``). It leaves the verb a moment to unwind
as usual, and ends the process where that does not happen, with the exit code of a shell: 128 + the signal.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from ..storage.file_replacement import remove_unfinished

# seconds; a second Ctrl-C shortens them
GRACE = 2.0
_ENDS = (signal.SIGINT, signal.SIGTERM)


def watch_signals() -> None:
    """From now on, in the main thread of a process that is the command line's own."""
    # there the wakeup needs a socket, and select takes no pipe
    if sys.platform == "win32":
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_exit_on_signal, args=(heard,), daemon=True).start()


def restore_default_sigint() -> None:
    """The run is over: Ctrl-C ends the process now. Python, which may wait for threads yet, would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _exit_on_signal(heard: int) -> None:
    while (number := os.read(heard, 1)[0]) not in _ENDS:
        pass
    select.select([heard], [], [], GRACE)
    remove_unfinished()
    if sys.stderr.isatty():
        # a progress bar hides the cursor
        os.write(2, b"\r\x1b[K\x1b[?25h")
    os._exit(128 + number)
