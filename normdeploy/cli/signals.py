"""Handle Ctrl-C and SIGTERM while a library computes. Python handles a signal only when the library returns, and an
endless Loop never does.

The operating system therefore also notifies a thread (``signal.set_wakeup_fd``). The thread waits for a moment, in
which the verb may end and clean up as usual. If the verb does not end, the thread ends the process with the exit code
128 + the signal's number, as shells do.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from ..storage.file_replacement import remove_unfinished

# Seconds that a verb has to end after a signal. A second Ctrl-C ends the wait.
GRACE = 2.0
_ENDS = (signal.SIGINT, signal.SIGTERM)


def watch_signals() -> None:
    """Start to watch for signals. Call this in the main thread of the command line's process."""
    # On Windows, ``set_wakeup_fd`` needs a socket, and ``select`` does not accept a pipe.
    if sys.platform == "win32":
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_exit_on_signal, args=(heard,), daemon=True).start()


def restore_default_sigint() -> None:
    """Let Ctrl-C end the process at once after the run. Otherwise Python, which may still wait for threads, would print
    a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _exit_on_signal(heard: int) -> None:
    while (number := os.read(heard, 1)[0]) not in _ENDS:
        pass
    select.select([heard], [], [], GRACE)
    remove_unfinished()
    if sys.stderr.isatty():
        # Clear the progress bar and show the cursor that it hid.
        os.write(2, b"\r\x1b[K\x1b[?25h")
    os._exit(128 + number)
