"""Change one line after the other in a scratch clone and run the tests of its subject; write
``benchmarks/results/mutants.md``, or ``mutants_NAME.md`` for another list.

    python -m benchmarks.mutants [--list NAME] [--only WORD] [--resume]

``mutants.toml``, or ``NAME.toml`` next to it, lists the mutants. Each has ``file``, ``old`` (text that occurs there
exactly once), ``new``, ``breaks`` (the effect for a user) and ``tests`` (of pytest, run until one fails). If no test
can notice, ``equivalent`` gives the reason; if the line was unnecessary and was deleted, ``redundant`` does. The clone
includes uncommitted changes. A mutant is killed if a test fails with it that passes without it, and "killed since" if
it survived its first run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USUAL = "mutants"
RESULTS = ROOT / "benchmarks" / "results"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
# Time limit for the tests of one mutant in seconds. A mutant whose tests never end counts as killed.
_WITHIN = 600.0


@dataclass(frozen=True)
class Mutant:
    """One changed line."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    equivalent: str = ""
    redundant: str = ""

    @property
    def key(self) -> str:
        """Return the text that identifies the mutant."""
        return f"{self.file}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Outcome:
    """Result for a mutant.

    Attributes:
        verdict: killed, survived, equivalent, redundant or stale.
        by: test that noticed, or the reason why none can.
        first: verdict of its first run.
    """

    verdict: str
    by: str
    seconds: float
    first: str = ""

    def __bool__(self) -> bool:
        return self.verdict in ("killed", "equivalent", "redundant")

    @property
    def since(self) -> bool:
        """Return whether a test that was written after its first run kills it."""
        return self.verdict == "killed" and self.first not in ("", "killed")


def listed(name: str = USUAL) -> list[Mutant]:
    """Read a list.

    Returns:
        mutants.
    """
    text = Path(__file__).with_name(f"{name}.toml").read_text()
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in tomllib.loads(text)["mutant"]]


def occurrences(root: Path, mutant: Mutant) -> int:
    """Count the occurrences of a mutant's old text in its file; if it is not one, the mutant is stale.

    Returns:
        number.
    """
    source = root / mutant.file
    if not source.is_file():
        return 0
    return source.read_text().count(mutant.old)


def run_again(last: Outcome | None, now: Outcome) -> Outcome:
    """Add the verdict of the first run to ``now``; a stale mutant was not run.

    Returns:
        the outcome.
    """
    known = "" if last is None else last.first or last.verdict
    return replace(now, first=known if known not in ("", "stale") else now.verdict)


class Clone:
    """Clone of this repository in ``folder``, with uncommitted changes."""

    def __init__(self, folder: Path) -> None:
        self.root, path = folder / "clone", folder / "path"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(self.root)], check=True)
        for name in [*_git("diff", "--name-only", "HEAD"), *_git("ls-files", "--others", "--exclude-standard")]:
            source, target = ROOT / name, self.root / name
            if source.is_file() and not source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
            elif not source.exists():
                target.unlink(missing_ok=True)
        path.mkdir()
        (path / "normdeploy_plugins").symlink_to(self.root / "plugins")
        self._env = os.environ | {"PYTHONPATH": f"{self.root}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"}
        self._sound: dict[str, bool] = {}

    def judge(self, mutant: Mutant, last: Outcome | None = None) -> Outcome:
        """Run a mutant's tests.

        Args:
            last: earlier outcome; the test that noticed then runs first.

        Returns:
            the outcome.
        """
        if mutant.redundant:
            return Outcome("redundant", mutant.redundant, 0.0)
        source, began = self.root / mutant.file, time.perf_counter()
        if (count := occurrences(self.root, mutant)) != 1:
            return Outcome("stale", f"its old text stands there {count} times", 0.0)
        text = source.read_text()
        try:
            self._write(source, text.replace(mutant.old, mutant.new))
            failed = self._noticed(mutant, last)
        except ValueError as error:
            return Outcome("stale", str(error), 0.0)
        finally:
            self._write(source, text)
        seconds = round(time.perf_counter() - began, 1)
        if failed and not self._passes(failed):
            return Outcome("stale", f"{failed} fails without it too", seconds)
        if failed:
            return Outcome("killed", failed, seconds)
        return (
            Outcome("equivalent", mutant.equivalent, seconds) if mutant.equivalent else Outcome("survived", "", seconds)
        )

    @staticmethod
    def _write(source: Path, text: str) -> None:
        source.write_text(text)
        # Python's cached bytecode may have the same size and second.
        Path(importlib.util.cache_from_source(str(source))).unlink(missing_ok=True)

    def _noticed(self, mutant: Mutant, last: Outcome | None) -> str:
        if last is not None and "::" in last.by:
            # The test may no longer exist.
            with suppress(ValueError):
                if failed := self._first_failure([last.by]):
                    return failed
        return self._first_failure(mutant.tests)

    def _passes(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = not Path(self.root / test.partition("::")[0]).is_file() or not self._first_failure(
                [test]
            )
        return self._sound[test]

    def _first_failure(self, tests: Sequence[str]) -> str:
        """Run tests until one fails.

        Returns:
            id of that test, pytest's message if it names none, or "".

        Raises:
            ValueError: the tests do not exist.
        """
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self._env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said, _ = process.communicate(timeout=_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"they run past {_WITHIN:.0f} s"
        if process.returncode not in (0, 1, 2):
            raise ValueError(said.strip().splitlines()[-1])
        if process.returncode == 0:
            return ""
        named = _FAILED.search(said)
        return named[1] if named else said.strip().splitlines()[-1]


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def page(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome], name: str = USUAL) -> str:
    """Write the table of the mutants that were run.

    Returns:
        Markdown.
    """
    run = [(m, outcomes[m.key]) for m in mutants if m.key in outcomes]
    rows = [
        f"| `{m.file}` | {m.breaks} | {_told(o)} | {f'`{o.by}`' if o.verdict == 'killed' else o.by} |" for m, o in run
    ]
    counts = ", ".join(
        f"{n} {v}"
        for v in ("killed", "equivalent", "redundant", "survived", "stale")
        if (n := sum(o.verdict == v for _, o in run))
    )
    since = sum(o.since for _, o in run)
    first = (
        f" Of those killed {since} survived at first: a test written since, or not named then, notices."
        if since
        else ""
    )
    rest = len(mutants) - len(run)
    not_run = f" {rest} more in the list were not run yet." if rest else ""
    return f"""# Mutants

`python -m benchmarks.mutants{"" if name == USUAL else f" --list {name}"}`: one line of `benchmarks/mutants/{name}.toml`
at a time is changed in a clone, and the tests of its subject run until one fails that passes without the change.
{len(run)} mutants: {counts}.{first}{not_run}

| file | what the mutant breaks | outcome | test that noticed, or why none can |
|---|---|---|---|
{chr(10).join(rows)}
"""


def _told(outcome: Outcome) -> str:
    return "killed since" if outcome.since else outcome.verdict


def main() -> int:
    """Run the mutants.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", default=USUAL, metavar="NAME", help="the list NAME.toml, not the usual one")
    parser.add_argument(
        "--only", default="", help="mutants whose file or description has this word; the others keep their last outcome"
    )
    parser.add_argument("--resume", action="store_true", help="not those that are killed or explained")
    given = parser.parse_args()
    mutants = listed(given.list)
    file = RESULTS / f"{USUAL if given.list == USUAL else f'{USUAL}_{given.list}'}.json"
    held = json.loads(file.read_text()) if file.is_file() else {}
    outcomes = {m.key: Outcome(**held[m.key]) for m in mutants if m.key in held}
    chosen = [
        m
        for m in mutants
        if (given.only in m.file or given.only in m.breaks) and not (given.resume and outcomes.get(m.key))
    ]
    with tempfile.TemporaryDirectory() as folder:
        clone = Clone(Path(folder))
        # Mutants that were never run come first.
        for mutant in sorted(chosen, key=lambda m: m.key in outcomes):
            last = outcomes.get(mutant.key)
            outcomes[mutant.key] = outcome = run_again(last, clone.judge(mutant, last))
            print(f"{outcome.verdict} {mutant.file}: {mutant.breaks} [{outcome.by}] {outcome.seconds} s", flush=True)
            file.write_text(
                json.dumps({m.key: asdict(outcomes[m.key]) for m in mutants if m.key in outcomes}, indent=1) + "\n"
            )
            file.with_suffix(".md").write_text(page(mutants, outcomes, given.list))
    return 0 if all(outcomes[m.key] for m in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
