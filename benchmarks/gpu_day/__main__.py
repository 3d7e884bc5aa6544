"""Run everything that needs a GPU, with one command in under 25 minutes, and write one page of results.

    python -m benchmarks.gpu_day [PART …] [--again] [--out FOLDER]

Each part is a separate command with a time limit; its output is kept as a log. An interrupted run can be resumed: parts
that passed with this commit, GPU and driver are not run again (--again runs them). Without a GPU, each part runs up to
its first call of CUDA and does not count as passed. The page says so. Exits with 1 unless every part passed. Writes
``gpu_day.md``, ``gpu_day.json`` and the logs into ``benchmarks/results``, or FOLDER.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from normdeploy.environment import describe_environment
from normdeploy.runtimes.trt_runner import explain_missing_gpu

from .engines import MISSING
from .parts import PARTS, Part

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_CHANGED = ("normdeploy", "plugins", "tests", "benchmarks", "models")


@dataclass(frozen=True)
class Outcome:
    """Result of a part.

    Attributes:
        key: identifies the code and the machine of the run.
        rows: result rows that the part wrote.
    """

    part: str
    status: str
    seconds: float
    detail: str
    key: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def key_of(facts: dict[str, str]) -> str:
    """Identify code and machine.

    Returns:
        the commit, with a mark if files differ from it, the driver and the GPUs.
    """

    def git(*arguments: str) -> str:
        """Run git.

        Returns:
            its output.
        """
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *_CHANGED, ":!benchmarks/results")
    machine = [value for name, value in facts.items() if name == "driver" or name.startswith("gpu ")]
    return ", ".join([git("rev-parse", "--short", "HEAD") + ("+" if changed else ""), *machine])


def command_of(part: Part, gpu: bool, results: Path) -> list[str]:
    """Build the part's command line.

    Returns:
        words.

    Raises:
        FileNotFoundError: the program that runs it is not installed.
    """
    if part.program and shutil.which(part.program[0]) is None:
        raise FileNotFoundError(f"{part.program[0]} is not installed")
    own = [str(results) if word == "{results}" else word for word in part.command]
    return [*part.program, sys.executable, *own, *([f"--junitxml={results}"] if part.tests else []), *(
        [] if gpu else part.alone
    )]  # fmt: skip


def run(part: Part, gpu: bool, key: str, folder: Path) -> Outcome:
    """Run one part to its end or its time limit; its log and results are in ``folder``.

    Returns:
        the outcome.
    """
    results, log = folder / f"gpu_day.{part.name}.results", folder / f"gpu_day.{part.name}.log"
    results.unlink(missing_ok=True)
    start = time.monotonic()

    def ended(status: str, detail: str, rows: Sequence[dict[str, Any]] = ()) -> Outcome:
        """Make the outcome.

        Returns:
            the outcome.
        """
        results.unlink(missing_ok=True)
        return Outcome(part.name, status, round(time.monotonic() - start, 1), detail, key, list(rows))

    try:
        command = command_of(part, gpu, results)
    except FileNotFoundError as reason:
        return ended(NOT_RUN, str(reason))
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **part.environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.seconds)
        # A time limit or Ctrl-C; no process of the part may go on.
        except BaseException as stopped:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            return ended(FAILED, f"not done after {part.seconds} s; see {log.name}", _rows(part, results))
    rows = _rows(part, results)
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    if code == MISSING or (part.tests and code in (0, 5) and not any(r["status"] == PASSED for r in rows)):
        missing = next((r["detail"] for r in rows if r["status"] == NOT_RUN), last)
        return ended(NOT_RUN, missing, rows)
    if code:
        wrong = next((f"{r['name']}: {r['detail']}" for r in rows if r["status"] == FAILED), last)
        return ended(FAILED, f"{wrong}; see {log.name}", rows)
    return ended(PASSED if gpu else NOT_RUN, _counted(rows) if gpu else "no GPU: what needs none went well", rows)


def _rows(part: Part, results: Path) -> list[dict[str, Any]]:
    if not results.is_file():
        return []
    return [*_of_tests(results)] if part.tests else json.loads(results.read_text())


def _of_tests(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of pytest's report."""
    for case in ElementTree.parse(file).iter("testcase"):
        skipped, wrong = case.find("skipped"), [*case.findall("failure"), *case.findall("error")]
        told = wrong[0] if wrong else skipped
        detail = "" if told is None else told.get("message") or ""
        # Of a whole file; the reason comes after its place.
        if detail == "collection skipped":
            detail = str(ast.literal_eval(told.text or "()")[-1]).removeprefix("Skipped: ")
        detail = next(iter(detail.splitlines()), "")[:300]
        status = FAILED if wrong else NOT_RUN if skipped is not None else PASSED
        yield {"name": case.get("name"), "status": status, "seconds": float(case.get("time", 0)), "detail": detail}


def _counted(rows: Sequence[dict[str, Any]]) -> str:
    counts = {status: sum(row["status"] == status for row in rows) for status in (PASSED, FAILED, NOT_RUN)}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def page(outcomes: Sequence[Outcome], facts: dict[str, str], key: str) -> str:
    """Write the page: the machine, the parts, and each row that did not simply pass.

    Returns:
        Markdown.
    """
    missing = [part.name for part in PARTS if part.name not in {o.part for o in outcomes}]
    lines = [
        *("# The GPU day", "", "`make test-gpu`: what no machine without a GPU has shown.", ""),
        *(f"At {key}.", "", ", ".join(f"{name} {version}" for name, version in facts.items()), ""),
        *("| part | shows that | outcome | s | |", "|---|---|---|---|---|"),
    ]
    shows = {part.name: part.shows for part in PARTS}
    for o in outcomes:
        lines.append(f"| {o.part} | {shows[o.part]} | {o.status} | {o.seconds:.0f} | {_cell(o.detail)} |")
    lines += [f"| {name} | {shows[name]} | {NOT_RUN} | | not asked for |" for name in missing]
    for o in outcomes:
        told = [row for row in o.rows if row["status"] != PASSED or (row["detail"] and len(o.rows) < 100)]
        if told:
            lines += ["", f"## {o.part}", "", "| step | outcome | s | |", "|---|---|---|---|"]
            lines += [
                f"| {_cell(row['name'])} | {row['status']} | {row['seconds']:.1f} | {_cell(row['detail'])} |"
                for row in told
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the page.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--again", action="store_true", help="run what passed already, too")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in {part.name for part in PARTS}]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(part.name for part in PARTS)}")
    facts, reason = describe_environment(), explain_missing_gpu()
    key = key_of(facts)
    if reason:
        print(f"{reason}: each part runs up to its first call of CUDA, and none counts as passed", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / "gpu_day.json"
    before = {o["part"]: Outcome(**o) for o in json.loads(state.read_text())} if state.is_file() else {}
    outcomes = {name: o for name, o in before.items() if o.key == key}
    for part in PARTS:
        if options.parts and part.name not in options.parts:
            continue
        done = outcomes.get(part.name)
        if done is not None and done.status == PASSED and not options.again:
            print(f"{part.name}: passed already, {done.detail}", flush=True)
            continue
        print(f"{part.name}: at most {part.seconds} s ...", flush=True)
        outcomes[part.name] = run(part, not reason, key, options.out)
        ordered = [outcomes[p.name] for p in PARTS if p.name in outcomes]
        state.write_text(json.dumps([asdict(o) for o in ordered], indent=1) + "\n")
        (options.out / "gpu_day.md").write_text(page(ordered, facts, key))
        print(f"{part.name}: {outcomes[part.name].status}, {outcomes[part.name].detail}", flush=True)
    asked = [outcomes.get(p.name) for p in PARTS if not options.parts or p.name in options.parts]
    return 0 if all(o is not None and o.status == PASSED for o in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
