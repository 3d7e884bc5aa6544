"""Run each step in a fork of a process that has the libraries in memory.

Importing torch, onnxruntime and their dependencies takes seconds; a fork takes milliseconds. If a step changes memory
or crashes, only its own fork is affected. The server only imports modules, so no other Python thread runs when it
forks. numpy's BLAS may run threads, but it supports forks.

``python -m normdeploy.fleet.fork_server MODULE ...`` imports the modules. The server reads lines of JSON from standard
input: {"id", "module", "argv", "folder", "log", "seconds", "memory"} runs a module in a folder, {"end": id} ends a
call. For each ended call, it writes a line {"id", "code", "why", "seconds", "peak"}. When the input ends, because the
parent process ended, all running calls are killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

# Seconds between two checks of the limits.
_TICK = 0.1
# Value of PR_SET_PDEATHSIG for prctl: send a signal when the parent process ends.
_PDEATHSIG = 1
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass
class _RunningCall:
    pid: int
    started: float
    seconds: float
    memory: int
    why: str = ""
    peak: int = 0


def main(preloaded: list[str]) -> None:
    """Serve until standard input ends."""
    for name in preloaded:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    # After this call, the garbage collector does not touch the imported objects, so their memory pages stay shared
    # between the forks.
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_blocking(0, False)
    running: dict[str, _RunningCall] = {}
    buffer = b""
    ended = False
    _write_answer(answers, {"ready": os.getpid()})
    while not ended:
        ready, _, _ = select.select([0], [], [], _TICK if running else None)
        if ready:
            data = os.read(0, 1 << 16)
            ended = not data
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "end" in request:
                    if (job := running.get(request["end"])) is not None:
                        _kill_call(job, "ended")
                else:
                    running[request["id"]] = _start_call(request)
        _collect_finished(running, answers)
    for job in running.values():
        _kill_call(job, "ended")


def _start_call(request: dict[str, Any]) -> _RunningCall:
    pid = os.fork()
    if pid == 0:
        _run_in_fork(request)
    with suppress(OSError):
        os.setpgid(pid, pid)
    return _RunningCall(pid, time.monotonic(), request["seconds"], request["memory"])


def _run_in_fork(request: dict[str, Any]) -> NoReturn:
    """Run the requested module. This function is called in the fork, ends the fork, and never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["folder"])
        sys.argv = [request["module"], *request["argv"]]
        os.environ.setdefault("COLUMNS", "160")
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        else:
            code = int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _collect_finished(running: dict[str, _RunningCall], answers: Any) -> None:
    """Write an answer for each ended call, and kill calls that exceed their limits."""
    for name, job in list(running.items()):
        pid, status, usage = os.wait4(job.pid, os.WNOHANG)
        seconds = time.monotonic() - job.started
        if pid == 0:
            if job.memory:
                job.peak = max(job.peak, held := _group_memory(job.pid))
            else:
                job.peak = 0
            if job.memory and held > job.memory:
                _kill_call(job, "memory")
            elif job.seconds and seconds > job.seconds:
                _kill_call(job, "seconds")
            continue
        del running[name]
        with suppress(OSError):
            # Kill child processes that the call started and did not end.
            os.killpg(job.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        peak = max(job.peak, usage.ru_maxrss * 1024)
        _write_answer(answers, {"id": name, "code": code, "why": job.why, "seconds": seconds, "peak": peak})


def _kill_call(job: _RunningCall, why: str) -> None:
    job.why = job.why or why
    with suppress(OSError):
        os.killpg(job.pid, signal.SIGKILL)


def _group_memory(group: int) -> int:
    """Return the memory of a process group in bytes; a memory page that several processes share counts once for each of
    them.
    """
    total = 0
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    total += int(fields[21]) * _PAGE
    return total


def _write_answer(answers: Any, value: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):
        answers.write(json.dumps(value) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
