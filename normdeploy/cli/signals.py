"""End the process on Ctrl-C and SIGTERM even if a library never returns, as with an endless Loop node.

Python handles signals only between its own instructions. So a thread also receives them (``signal.set_wakeup_fd``): it
gives the verb `GRACE` seconds to unwind, then ends the process with a shell's exit code, 128 + the signal.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from ..storage.file_replacement import remove_unfinished

# In seconds; a second Ctrl-C ends it.
GRACE = 2.0
_ENDS = (signal.SIGINT, signal.SIGTERM)


def watch_signals() -> None:
    """Start to watch signals; call it in the main thread of the command line's process."""
    # On Windows, the wakeup needs a socket, and select does not accept a pipe.
    if sys.platform == "win32":
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_exit_on_signal, args=(heard,), daemon=True).start()


def restore_default_sigint() -> None:
    """Let Ctrl-C end the process at once after the run; Python, still waiting for threads, would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _exit_on_signal(heard: int) -> None:
    while (number := os.read(heard, 1)[0]) not in _ENDS:
        pass
    select.select([heard], [], [], GRACE)
    remove_unfinished()
    if sys.stderr.isatty():
        # A progress bar hides the cursor: show it again.
        os.write(2, b"\r\x1b[K\x1b[?25h")
    os._exit(128 + number)
