"""Run the command line in a child process. If a library crashes, the run ends with a message and exit code 1.

onnxruntime, torch and onnx are written in C++, and a file can crash them. `normdeploy.ort_sessions.crash_risks`
predicts some nodes that crash. After any other crash, the run is repeated with each onnxruntime session in a separate
child process, so that the message can name the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from typing import NoReturn

from ..errors import escape_line
from ..ort_sessions.child_process import REHEARSE_ALL

# Signals that the operating system sends for forbidden operations and for too much memory.
_CRASHES = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSYS", "SIGTRAP"})
_PASSED_ON = ("SIGHUP", "SIGINT", "SIGTERM")
# Libraries that may have started threads. A fork does not copy threads, so the process is not forked after an import of
# these.
_LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch")
_PR_SET_PDEATHSIG = 1
# faulthandler writes the innermost call first.
_INNERMOST = re.compile(r'File "([^"]*)", line \d+ in (\S+)')


@dataclass(frozen=True)
class _ChildExit:
    """Exit of the child.

    Attributes:
        status: wait status, which `os.waitstatus_to_exitcode` accepts.
        trace: text that faulthandler wrote; "" without a crash.
    """

    status: int
    trace: str

    @property
    def crash_signal(self) -> str:
        """Return the signal's name, or "" if the child did not crash."""
        code = os.waitstatus_to_exitcode(self.status)
        if code < 0:
            name = signal.Signals(-code).name
        else:
            name = ""
        if name in _CRASHES:
            return name
        return ""


def supervise_in_child() -> None:
    """Fork, and return in the child, which does the work. The parent waits and exits as the child does.

    Do nothing if the process can't be forked safely: not on Linux, with threads, or after heavy imports.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or any(name in sys.modules for name in _LIBRARIES):
        return
    end = _fork_and_wait()
    if end is None:
        return
    # A process that was killed for its memory would need as much memory again, so the run is not repeated.
    if end.crash_signal and end.crash_signal != "SIGKILL" and REHEARSE_ALL not in os.environ:
        os.environ[REHEARSE_ALL] = "1"
        end = _fork_and_wait()
        if end is None:
            return
    _exit_like_child(end)


def _fork_and_wait() -> _ChildExit | None:
    """Fork, and wait for the child.

    Returns:
        the child's exit in the parent, None in the child.
    """
    trace = os.memfd_create("trace")
    numbers = {signal.Signals[name] for name in (*_PASSED_ON, "SIGCHLD")}
    # A process that ignores SIGCHLD is not notified of its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent ended before prctl took effect, so the child ends too.
            os._exit(1)
        faulthandler.enable(trace, all_threads=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while True:
        heard = signal.sigwaitinfo(numbers)
        if heard.si_signo != signal.SIGCHLD:
            # A terminal sends its signals to the child as well, so only signals of other processes are passed on.
            if heard.si_code <= 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, heard.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    written = os.pread(trace, 1 << 16, 0).decode(errors="replace")
    os.close(trace)
    return _ChildExit(status, written)


def _exit_like_child(end: _ChildExit) -> NoReturn:
    """Exit as the child did, or with a message and exit code 1 if it crashed."""
    code = os.waitstatus_to_exitcode(end.status)
    if end.crash_signal == "SIGKILL":
        _exit_with_message(
            "the system killed the run (SIGKILL), most likely because memory ran out; use smaller sizes or a"
            " larger machine"
        )
    if end.crash_signal:
        _exit_with_message(
            f"a library crashed ({end.crash_signal}){_crash_location(end.trace)}; nothing was written. Check"
            " the file with onnx.checker or the tool that made it, and remove the part that they report"
        )
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _crash_location(trace: str) -> str:
    """Name the library function that crashed, if faulthandler wrote it; else return ""."""
    innermost = _INNERMOST.search(trace)
    if innermost is None:
        return ""
    file, function = innermost.groups()
    return f" in {function} of {os.path.join(os.path.basename(os.path.dirname(file)), os.path.basename(file))}"


def _exit_with_message(message: str) -> NoReturn:
    sys.stderr.write(f"error: {escape_line(message)}\n")
    sys.stderr.flush()
    os._exit(1)
