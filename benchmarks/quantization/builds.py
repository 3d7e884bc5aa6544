"""Check that the quantized files build, each in under a minute, for the GPUs that have the types, and that other GPUs
are refused by name.

``python -m benchmarks.quantization.builds [--only MODEL …] [--contenders TEXT]`` takes the files that ``python -m
benchmarks.quantization`` left in the cache, including those of other tools. It builds each with TensorRT-RTX for each
compute capability separately, and writes ``benchmarks/results/quantization_builds.md`` and ``.json``; rows that are not
requested, or not in the cache, stay. Normdeploy's int8 and int4 files must build for 8.6, 8.9 and 12.0, fp8 files for
8.9 and 12.0. For 8.6, fp8 must be refused with a message that names the type or the capability. The script exits with 1
otherwise. Without a GPU nothing is run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import normdeploy
from normdeploy.errors import NormdeployError

from . import environments
from .contenders import OURS, PEERS, Contender
from .forms import reason
from .subjects import SUBJECTS

RESULTS = Path(__file__).parents[1] / "results"
KEPT = RESULTS / "quantization_builds.json"
CAPABILITIES = ("8.6", "8.9", "12.0")
MOST_S = 60
PROFILES = {
    "minilm": ["batch=1:8:16", "length=2:32:128"],
    "mobilenet": ["batch=1:8:16"],
    "efficientnet": ["batch=1:8:16"],
    "decoder": ["batch=1:8:16"],
}
# Forms intended for TensorRT.
BUILDABLE = ("symmetric", "fp8", "int4")


class Row(TypedDict):
    """Builds of one file.

    Attributes:
        answers: by compute capability.
        built: release and date.
    """

    answers: dict[str, str]
    built: str


def built(path: Path, capability: str, profiles: list[str]) -> str:
    """Build a file.

    Returns:
        "3.1 s", or the message of the refusal.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "file.engine")
        try:
            engine = normdeploy.build(path, target, compute_capabilities=[capability], profiles=profiles, timeout=600)
        except NormdeployError as error:
            return reason(" ".join(str(error).split()))
        return f"{engine.seconds:.1f} s"


def short_of(contender: Contender, answers: dict[str, str]) -> list[str]:
    """List the requirements that a file of ours misses.

    Returns:
        a text for each.
    """
    short = []
    for capability, answer in answers.items():
        seconds = float(answer[:-2]) if answer.endswith(" s") else None
        if contender.form == "fp8" and capability == "8.6":
            named = any(word in answer.lower() for word in ("fp8", "float8", "8.6"))
            if seconds is not None or not named:
                short.append(f"{contender.name} for {capability}: {answer}; a refusal by name was wanted")
        elif seconds is None or seconds > MOST_S:
            short.append(f"{contender.name} for {capability}: {answer}; a build in under {MOST_S} s was wanted")
    return short


def main() -> None:
    """Build the files and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantization.builds", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[s.name for s in SUBJECTS])
    parser.add_argument("--contenders", default="", help="those whose name holds this; the others' rows stay")
    given = parser.parse_args()
    told: dict[str, dict[str, Row]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for subject in SUBJECTS:
        for contender in (*PEERS, *OURS):
            path = environments.written(subject.name, contender.name)
            wanted = subject.name in given.only and given.contenders.lower() in contender.name.lower()
            wanted &= subject.name in contender.subjects and contender.form in BUILDABLE
            if not wanted or not path.exists():
                continue
            answers = {c: built(path, c, PROFILES[subject.name]) for c in CAPABILITIES}
            when = f"{version('tensorrt_rtx')}, {datetime.date.today().isoformat()}"
            told.setdefault(subject.name, {})[contender.name] = {"answers": answers, "built": when}
            print(subject.name, contender.name, answers, flush=True)
            KEPT.write_text(json.dumps(told, indent=1) + "\n")
    text, short = page(told)
    (RESULTS / "quantization_builds.md").write_text(text)
    sys.exit(bool(short))


def page(told: Mapping[str, Mapping[str, Row]]) -> tuple[str, list[str]]:
    """Write the page of all rows (model -> contender -> row).

    Returns:
        the page, and the requirements that our files miss.
    """
    rows, short, any_of_ours = list[str](), list[str](), False
    for subject in SUBJECTS:
        for contender in (*PEERS, *OURS):
            row = told.get(subject.name, {}).get(contender.name)
            if row is None or subject.name not in contender.subjects:
                continue
            answers = row["answers"]
            if contender in OURS:
                any_of_ours = True
                short += [f"{subject.name}, {line}" for line in short_of(contender, answers)]
            cells = [subject.name, contender.name, *(answers[c][:250] for c in CAPABILITIES), row["built"]]
            rows.append(f"| {' | '.join(cells)} |")
    head = f"| model | file | {' | '.join(CAPABILITIES)} | TensorRT-RTX |\n|---|---|{'---|' * (len(CAPABILITIES) + 1)}"
    verdict = "\n".join(f"- {line}" for line in short) or "Every one of normdeploy's files builds as asked."
    if not any_of_ours:
        verdict = "No file of normdeploy's was there."
    parts = ["# Builds of quantized files", (__doc__ or "").strip(), "\n".join([head, *rows]), verdict]
    return "\n\n".join(parts) + "\n", short


if __name__ == "__main__":
    main()
