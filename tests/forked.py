"""The command line in processes that cost no imports: a server that has imported everything forks for each run.

Used where hundreds of runs are wanted (kills), or each within limits of its own (memory, size of files).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    """How one run ended. ``processor``: seconds of it and its children, to which nothing else on the machine adds.
    ``memory``: the most resident bytes above those of the server at the fork; of its own children nothing."""

    returncode: int  # negative: the signal
    stdout: str
    stderr: str
    seconds: float
    processor: float
    memory: int
    appeared: float | None  # seconds after which something new stood in the watched folder


class Server:
    """Forks ``normdeploy ARGS``; one run after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        *args: str | Path,
        cwd: Path,
        memory: int | None = None,
        file_size: int | None = None,
        kill_after: float | None = None,
        watch: Path | None = None,
        timeout: float = 300,
    ) -> Done:
        """Args:
        memory: bytes of address space beyond what the server has.
        file_size: bytes that a file may reach (RLIMIT_FSIZE, with SIGXFSZ ignored: a write fails with EFBIG).
        kill_after: seconds after which the run, and whatever it started, gets SIGKILL.
        watch: a folder; ``kill_after`` counts from the moment at which something new appears in it.
        timeout: seconds after which it gets SIGKILL too, as a failure.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name in ("out", "err", "resident"):  # a kill may come before the child makes them
                (Path(folder) / name).touch()
            request = {
                "args": [*map(str, args)],
                "cwd": str(cwd),
                "memory": memory,
                "file_size": file_size,
                "folder": folder,
            }
            request |= {"kill_after": kill_after, "timeout": timeout, "watch": None if watch is None else str(watch)}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
            out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("out", "err"))
        return Done(
            answer["returncode"], out, err, answer["seconds"], answer["processor"], answer["memory"], answer["appeared"]
        )


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server, ready to fork."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "tests.forked"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------ inside the server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to standard error
    os.dup2(2, 1)
    _warm()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line), answers)), file=answers, flush=True)


def _warm() -> None:
    """What a verb imports, and what torch's exporter and onnxruntime set up once."""
    import torch

    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model, file = Path(folder) / "model.pt", Path(folder) / "model.onnx"
        torch.export.save(torch.export.export(net, (torch.zeros(2, 4),)), model)
        for args in (
            ["export", model, "-o", file],
            ["verify", model, file],
            ["check", file],
            ["run", file, "-o", f"{file}.npz"],
        ):
            _main([*map(str, args), "-q"])


def _main(args: Sequence[str]) -> int:
    from normdeploy.cli.app import main

    sys.argv = ["normdeploy", *args]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _forked(request: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    start = time.monotonic()
    child = os.fork()
    if not child:
        code = 70
        try:
            answers.close()
            code = _child(request)
        finally:
            os._exit(code)
    watched, appeared = os.pidfd_open(child), None
    before = _listed(request)
    while not select.select([watched], [], [], 0.001 if request["watch"] else 0.005)[0]:
        now = time.monotonic() - start
        if appeared is None and _listed(request) - before:
            appeared = now
        origin = 0.0 if request["watch"] is None else appeared
        due = request["kill_after"] is not None and origin is not None and now - origin >= request["kill_after"]
        if due or now > request["timeout"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)  # it may have no group of its own yet
    os.close(watched)
    _, status, used = os.wait4(child, 0)
    told = Path(request["folder"]) / "resident"
    memory = used.ru_maxrss * 1024 - int(told.read_text() or 0)
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - start,
        "processor": used.ru_utime + used.ru_stime,
        "memory": memory,
        "appeared": appeared,
    }


def _listed(request: dict[str, Any]) -> set[str]:
    return set(os.listdir(request["watch"])) if request["watch"] else set()


def _child(request: dict[str, Any]) -> int:
    os.setsid()
    (Path(request["folder"]) / "resident").write_text(str(_pages()[1]))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    if request["memory"] is not None:
        limit = _pages()[0] + request["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if request["file_size"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
    code = _main(request["args"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _pages() -> list[int]:
    """Virtual and resident size of this process, bytes."""
    return [int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split()[:2]]


if __name__ == "__main__":
    _serve()
