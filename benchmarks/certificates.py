"""Check certificates of many files with ``normdeploy_check``, which knows only the page of the format.

    python -m benchmarks.certificates run FOLDER MODELS [--seconds 120]
    python -m benchmarks.certificates table FOLDER MODELS

``run`` optimizes each .onnx file in MODELS (``python -m benchmarks.corpus write MODELS`` makes some) with
``--certificate``, and checks the certificate in a process of its own. Files that already have a row in FOLDER are
skipped. ``table`` writes ``benchmarks/results/certificates.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import normdeploy
from normdeploy.errors import NormdeployError

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "certificates.md"
ROWS = "certificates.json"
_VERDICTS = {0: "accepted", 1: "rejected", 2: "refused"}


@dataclass(frozen=True)
class Row:
    """Result for one file.

    Attributes:
        verdict: "accepted", "rejected" (a claim fails), "refused" (unreadable, or over a limit), or "not optimized".
        text: first line of the checker, or the error of normdeploy.
        modes: number of rewrites by mode.
        covered: nodes of the model that the checker found equal to nodes of the source.
        seconds: duration of the check in seconds.
        size: bytes of the certificate.
        model: bytes of the model.
    """

    name: str
    verdict: str
    text: str
    modes: dict[str, int]
    covered: int
    seconds: float
    size: int
    model: int


def check_file(source: Path, seconds: int) -> Row:
    """Optimize a file, and check its certificate."""
    with tempfile.TemporaryDirectory() as folder:
        model, certificate = Path(folder, "out.onnx"), Path(folder, "c.json")
        try:
            normdeploy.optimize(source, model, certificate=certificate)
        except NormdeployError as error:
            return Row(source.stem, "not optimized", str(error).splitlines()[0], {}, 0, 0.0, 0, 0)
        rewrites = json.loads(certificate.read_text())["rewrites"]
        start = time.perf_counter()
        command = [sys.executable, "-m", "normdeploy_check", certificate, model, "--seconds", str(seconds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return Row(
            source.stem,
            _VERDICTS.get(done.returncode, f"exit code {done.returncode}"),
            (done.stdout or done.stderr).partition("\n")[0],
            dict(Counter(r["mode"] for r in rewrites)),
            int(found[1]) if (found := re.search(r"nodes covered: (\d+)", done.stdout)) else 0,
            time.perf_counter() - start,
            certificate.stat().st_size,
            model.stat().st_size,
        )


def run(folder: Path, models: Path, seconds: int) -> None:
    """Check the files of a folder, and store the rows after each file."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / ROWS
    rows = json.loads(stored.read_text()) if stored.exists() else []
    known = {row["name"] for row in rows}
    for source in sorted(models.glob("*.onnx")):
        if source.stem in known:
            continue
        row = check_file(source, seconds)
        rows.append(asdict(row))
        stored.write_text(json.dumps(rows, indent=1))
        print(row.name, row.verdict, f"{row.seconds:.1f} s", "" if row.verdict == "accepted" else row.text, flush=True)


def write_table(folder: Path, models: Path) -> None:
    """Write the page from the stored rows."""
    rows = [Row(**row) for row in json.loads((folder / ROWS).read_text())]
    checked = [row for row in rows if row.verdict != "not optimized"]
    verdicts = Counter(row.verdict for row in rows)
    modes: Counter[str] = Counter()
    for row in checked:
        modes.update(row.modes)
    seconds = sorted(row.seconds for row in checked)
    numbered = [
        ("files of the corpus", len(list(models.glob("*.onnx")))),
        ("files that were run, in alphabetical order", len(rows)),
        *((name, count) for name, count in sorted(verdicts.items())),
        ("files without a rewrite", sum(not row.modes for row in checked)),
        *((f"rewrites of mode {name}", modes[name]) for name in ("exact", "affine", "numeric", "none")),
        ("nodes of the files that are covered", sum(row.covered for row in checked)),
    ]
    lines = [
        "# Certificates, checked by an independent program",
        "",
        "Files of [the corpus](corpus.md) are optimized with `--certificate`, and",
        "[normdeploy_check](../../docs/how-to/check-a-certificate.md) checks each. The program imports nothing",
        "of normdeploy. It implements [the page of the format](../../docs/reference/certificate-format.md).",
        "*Rejected* means that a claim fails. *Refused* means that a limit of time or size is reached. Written by",
        "`python -m benchmarks.certificates`.",
        "",
        "| | number |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in numbered),
        "",
        f"A check takes {seconds[len(seconds) // 2]:.1f} s (median) and at most {seconds[-1]:.1f} s, on one core.",
    ]
    others = [row for row in rows if row.verdict != "accepted"]
    if others:
        lines += ["", "| file | verdict | first line |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.verdict} | {_cell(row.text)} |" for row in others]
    RESULTS.write_text("\n".join(lines) + "\n")
    print(f"{len(rows)} files: {dict(verdicts)}")


def _cell(text: str) -> str:
    return re.sub(r"[|`\n]", " ", text)[:200]


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.certificates")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("run", "table"):
        stage = stages.add_parser(name)
        stage.add_argument("folder", type=Path)
        stage.add_argument("models", type=Path)
        if name == "run":
            stage.add_argument("--seconds", type=int, default=120, help="time limit of one check")
    args = parser.parse_args()
    if args.stage == "run":
        run(args.folder, args.models, args.seconds)
    else:
        write_table(args.folder, args.models)


if __name__ == "__main__":
    main()
