"""Collect one row for each pair from the reports of its process, and store the rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "verdicts.json"


@dataclass
class Row:
    """Result for one pair.

    Attributes:
        right: "pass", or the reason for a failure; "" if the pair could not be made.
        not_made: why it could not be made.
        broken: stage at which its process crashed or ran out of time.
        commit: date and hash of the code that judged it; "" if unknown.
    """

    name: str
    kind: str
    made_by: str
    right: str = ""
    seconds: float = 0.0
    not_made: str = ""
    broken: str = ""
    commit: str = ""
    stage: str = field(default="", repr=False)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, report: dict[str, Any]) -> None:
        """Add one report of the process."""
        if "stage" in report:
            self.stage = report["stage"]
        elif "fault" in report:
            self.faults[report["fault"]] = {k: v for k, v in report.items() if k != "fault"}
        elif "not_made" in report:
            self.not_made = report["not_made"]
        else:
            self.right, self.seconds = report["right"], report["seconds"]

    def has_run(self, faults: Iterable[str]) -> bool:
        """Check if the right file and all of ``faults`` were judged, or can't be.

        Returns:
            true if nothing is left to run.
        """
        return bool(self.not_made or self.broken) or bool(self.right and set(faults) <= set(self.faults))

    @property
    def wrong(self) -> list[str]:
        """Return the deviations from the expected results, one line each."""
        lines = [] if self.right in ("", "pass") else [f"FALSE ALARM {self.right}"]
        lines += [f"BROKEN at {self.broken}"] if self.broken else []
        for name, found in self.faults.items():
            if found["state"] in ("missed", "crash", "refused"):
                lines.append(f"{found['state'].upper()} {name} ({found['planted']}, {found['ratio']:g} times)")
                lines[-1] += "" if found["state"] == "missed" else f": {found['verdict']}"
            if found.get("named") is False and not found["bisect"].startswith("refused"):
                lines.append(f"UNNAMED {name} ({found['planted']}): bisect says {found['bisect']}")
        if refused := [name for name, found in self.faults.items() if found.get("bisect", "").startswith("refused")]:
            lines.append(f"UNNAMED {', '.join(refused)}: bisect {self.faults[refused[0]]['bisect']}")
        return lines


def current_commit() -> str:
    """Read the commit checked out here.

    Returns:
        date and short hash; "" outside a repository.
    """
    command = ["git", "log", "-1", "--format=%cs %h"]
    told = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return told.stdout.strip()


def read(path: Path) -> dict[str, Row]:
    """Read a file of JSON lines, or a JSON list.

    Returns:
        name -> row, the last of each pair.
    """
    if not path.is_file():
        return {}
    text = path.read_text()
    lines = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    return {line["name"]: Row(**line) for line in lines}


def append(path: Path, row: Row) -> None:
    """Append one row to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows as a JSON list."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
