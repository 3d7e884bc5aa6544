"""Measure changes of the opset: files of the corpus down to 17 and 13, up to the newest opset, and back.

    python -m benchmarks.corpus write MODELS
    python -m benchmarks.opset_changes run MODELS RESULT.json [--every 1] [--part 0/1] [--seconds 600]
    python -m benchmarks.opset_changes table RESULT.json...

``run`` optimizes each file to each opset and back to the file's own opset, as ``normdeploy optimize --opset`` does. It
asks ``prove`` whether each result computes the same as the file, and ``normdeploy_check.py`` for each certificate.
``table`` writes ``benchmarks/results/opset_changes.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx
import onnxruntime as ort

import normdeploy
from normdeploy.errors import NormdeployError
from normdeploy.storage.onnx_domains import default_domain_opset

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "opset_changes.md"
# Newest opset that onnxruntime 1.31 loads
TARGETS = (13, 17, 26)
PROVED = ("equal", "equal up to rounding")


@dataclass(frozen=True)
class Row:
    """Result for one file and one opset.

    Attributes:
        way: "down", "up" or "back": back to the file's own opset.
        verdict: verdict of ``prove``, or "refused".
        reason: reason of a refusal, or of a verdict other than proved.
        plain: verdict for the file that ``normdeploy optimize`` writes without ``--opset``; "" if it was not asked for.
        accepted: first word of ``normdeploy_check.py`` for the certificate; "" without one.
    """

    name: str
    opset: int
    target: int
    way: str
    verdict: str
    reason: str = ""
    accepted: str = ""
    plain: str = ""


def change(path: Path, original: Path, target: int, way: str, output: Path) -> Row:
    """Change the opset of one file and ask for verdicts.

    Args:
        original: file to compare with.

    Returns:
        the row.
    """
    opset = default_domain_opset(onnx.load(path, load_external_data=False))
    certificate = output.with_suffix(".json")
    try:
        normdeploy.optimize(path, output, opset=target, certificate=certificate)
    except NormdeployError as error:
        return Row(original.stem, opset, target, way, "refused", str(error)[:300])
    proof = normdeploy.prove(original, output)
    checked = subprocess.run(
        [sys.executable, REPOSITORY / "normdeploy_check.py", certificate, output],
        capture_output=True,
        text=True,
        check=False,
    )
    accepted = f"{checked.stdout}{checked.stderr}".split(":")[0].strip()
    return Row(original.stem, opset, target, way, str(proof.verdict), proof.reason[:300], accepted)


def run(path: Path, folder: Path) -> Iterator[Row]:
    """Yield the rows of one file."""
    opset = default_domain_opset(onnx.load(path))
    for target in TARGETS:
        if target == opset:
            continue
        output = folder / f"{target}.onnx"
        row = change(path, path, target, "down" if target < opset else "up", output)
        yield row
        if row.verdict != "refused" and opset >= min(TARGETS):
            yield change(output, path, opset, "back", folder / "back.onnx")


def with_plain_verdict(row: Row, path: Path, folder: Path) -> Row:
    """Add the verdict without a change of the opset, if the change was not proved."""
    if row.verdict in (*PROVED, "refused"):
        return row
    normdeploy.optimize(path, folder / "plain.onnx")
    return replace(row, plain=str(normdeploy.prove(path, folder / "plain.onnx").verdict))


def write_table(rows: list[Row], seconds: float) -> None:
    """Write the page."""
    files = len({row.name for row in rows})
    lines = [
        "# Changes of the opset",
        "",
        f"`python -m benchmarks.opset_changes`: {files:,} files of the corpus (`--every 11`). They hold norms of",
        "torch's exporters of several releases, of onnxruntime's optimizer, and of tf2onnx, jax2onnx and Paddle, in",
        "opsets 11 to 25. Each file goes through `normdeploy optimize --opset N --certificate`. `prove` compares",
        "each result with the original file, and `normdeploy_check.py` reads each certificate. *Back*: the result is",
        "brought to the opset of the original file again, and compared with that file. *Proved*: equal, or equal up",
        "to the rounding of stored constants. If `prove` does not know the result without `--opset` either, the",
        "opset is not the cause.",
        "",
        "| opset | files | refused | converted | proved | not known | of these, also without `--opset` | differ |"
        " certificates accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = [(way, target) for way in ("down", "up") for target in TARGETS] + [("back", 0)]
    converted = proved = 0
    for way, target in groups:
        of = [r for r in rows if r.way == way and target in (0, r.target)]
        if not of:
            continue
        verdicts = Counter(r.verdict for r in of)
        made = [r for r in of if r.verdict != "refused"]
        right = sum(verdicts[verdict] for verdict in PROVED)
        unknown = verdicts["not known"]
        converted += len(made)
        proved += right
        title = f"{way} to {target}" if target else "back"
        accepted = sum(r.accepted == "accepted" for r in made)
        lines.append(
            f"| {title} | {len(of):,} | {verdicts['refused']} | {len(made):,} | {right:,} ({right / len(made):.1%}) |"
            f" {unknown} | {sum(r.plain == 'not known' for r in of)} | {len(made) - right - unknown} |"
            f" {accepted:,} of {len(made):,} |"
        )
    lines += ["", f"All converted files: {proved / converted:.1%} proved.", ""]
    for title, verdict in (("Refused", "refused"), ("Not known", "not known")):
        reasons = Counter(_general(r.reason) for r in rows if r.verdict == verdict)
        lines += [f"{title}:", "", "| reason | files |", "|---|---|"]
        lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()] + [""]
    version = f"onnx {onnx.__version__}, onnxruntime {ort.__version__}"
    lines += [f"{version}, one process, {seconds / 60:.0f} minutes.", ""]
    RESULTS.write_text("\n".join(lines))


def _general(reason: str) -> str:
    """Replace names and numbers in a reason, so that equal reasons are counted together."""
    reason = re.sub(r"'[^' ]*'", "…", " ".join(reason.split()))
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", reason).replace("|", "/")[:200]


def main() -> None:
    """Run one stage."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opset_changes")
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("run")
    stage.add_argument("models", type=Path)
    stage.add_argument("result", type=Path)
    stage.add_argument("--every", type=int, default=1)
    stage.add_argument("--seconds", type=float, default=float("inf"), help="start no file after this time")
    stage.add_argument("--part", default="0/1", help="k/n: the k-th of n parts of the files")
    stage = stages.add_parser("table")
    stage.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    if args.stage == "table":
        parts = [json.loads(path.read_text()) for path in args.results]
        rows = [Row(**row) for part in parts for row in part["rows"]]
        write_table(rows, sum(part["seconds"] for part in parts))
        return
    began = time.perf_counter()
    index, count = map(int, args.part.split("/"))
    models = sorted(args.models.glob("*.onnx"))[:: args.every][index::count]
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for path in models:
            if time.perf_counter() - began > args.seconds:
                break
            for plain in run(path, Path(scratch)):
                row = with_plain_verdict(plain, path, Path(scratch))
                rows.append(row)
                if row.verdict not in PROVED or row.accepted != "accepted":
                    print(*asdict(row).values(), sep=" | ", flush=True)
    args.result.write_text(json.dumps({"seconds": time.perf_counter() - began, "rows": [asdict(r) for r in rows]}))
    print(Counter((r.way, r.verdict) for r in rows))


if __name__ == "__main__":
    main()
