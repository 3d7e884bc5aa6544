"""Record outputs and messages of normdeploy before a refactoring, and compare them afterwards.

    python -m benchmarks.frozen write FOLDER
    python -m benchmarks.frozen compare FOLDER [--only TEXT]        exits with 1 and a list if anything differs

For each model in ``models/`` (every fifth spelling) it records: the file that ``export`` writes; the result of
``optimize`` on torch's bare file for each runtime, with ``--fuse portable`` and in half precision; the findings of
each; and the output of ``inspect``. For the command line it records the help of each verb and the answers to wrong
usage. Durations, versions and folders of the machine are left out. A refactoring must change nothing of the record. If
a fix changes the record, its commit names the change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import torch

import normdeploy
from models.case import Case
from models.registry import CASES, LOOKALIKES, SMALL, SPELLINGS, export_args, samples
from normdeploy.errors import NormdeployError

EVERY = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "any": {},
    "onnxruntime": {"runtime": "onnxruntime"},
    "onnxruntime-accurate": {"runtime": "onnxruntime-accurate"},
    "tensorrt": {"runtime": "tensorrt"},
    "portable": {"fuse": "portable"},
    "fp16": {"precision": "fp16"},
}
VERBS = ("export", "optimize", "inspect", "verify", "bench", "bisect", "build", "run", "package", "recheck", "check")
WRONG = (
    (),
    ("--version",),
    ("norm",),
    *((verb,) for verb in VERBS),
    *((verb, "absent.onnx") for verb in VERBS),
    *((verb, "text.onnx") for verb in VERBS),
    *((verb, "good.onnx", "--no-such-option") for verb in VERBS),
    ("export", "good.onnx", "-o", "out.onnx"),
    ("optimize", "good.onnx"),
    ("optimize", "good.onnx", "-o", "good.onnx"),
    ("optimize", "good.onnx", "-o", "absent/out.onnx"),
    ("optimize", "good.onnx", "-o", "out.onnx", "--runtime", "tpu"),
    ("optimize", "good.onnx", "-o", "out.onnx", "--dim", "batch=3:2:1"),
    ("optimize", "good.onnx", "-o", "out.onnx", "--precision", "int3"),
    ("inspect", "good.onnx"),
    ("verify", "good.onnx"),
    ("verify", "good.onnx", "good.onnx", "--tolerance", "much"),
    ("run", "good.onnx", "--input", "y=absent.npy"),
    ("check", "good.onnx"),
)
GOOD = """<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x) => (float[batch, 8] y)
<int64[1] axes = {-1}, float epsilon = {1e-6}>
{ m = ReduceMean(x, axes) d = Sub(x, m) s = Mul(d, d) v = ReduceMean(s, axes) e = Add(v, epsilon) r = Sqrt(e)
    y = Div(d, r) }"""


def cases() -> list[Case]:
    """List the models.

    Returns:
        cases.
    """
    return [*SMALL, *CASES, *LOOKALIKES, *SPELLINGS[::EVERY]]


def of_models(only: str) -> Iterator[tuple[str, str]]:
    """Yield (name, record) for each model whose name contains ``only``, and each way to run it.

    Yields:
        name, and text that must not change.
    """
    for case in (c for c in cases() if only in c.name):
        args, shapes = export_args(case, dynamic=bool(case.dynamic))
        yield (
            f"export {case.name}",
            _told(
                lambda case=case, shapes=shapes: normdeploy.export(case.make(), samples(case), dynamic_shapes=shapes)
            ),
        )
        program = torch.onnx.export(
            case.make(), args, dynamic_shapes=shapes, dynamo=True, optimize=False, verbose=False
        )
        assert program is not None
        bare = program.model_proto
        yield f"inspect {case.name}", _told(lambda bare=bare: normdeploy.inspect(bare))
        for name, options in OPTIONS.items():
            yield (
                f"optimize {case.name} {name}",
                _told(lambda bare=bare, options=options: normdeploy.optimize(bare, **options)),
            )


def _told(make: Callable[[], Any]) -> str:
    """Describe a result as text: a digest of the file and all findings; for an error its name and message."""
    try:
        made = make()
    except NormdeployError as error:
        return f"{type(error).__name__}: {error}"
    summary = getattr(made, "summary", made)
    proto = getattr(made, "proto", None)
    digest = "" if proto is None else hashlib.sha256(_bare(proto)).hexdigest()
    held = json.dumps(_plain(dataclasses.replace(summary, seconds={})), indent=1, sort_keys=True, default=repr)
    return "\n".join([digest, *getattr(made, "notes", ()), held])


def _bare(proto: onnx.ModelProto) -> bytes:
    """Return the file without metadata on versions, and on the folder that torch was called from (in its traces)."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for holder in (copy, copy.graph, *copy.graph.node, *(n for f in copy.functions for n in f.node)):
        del holder.metadata_props[:]
    return copy.SerializeToString(deterministic=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def of_the_command_line() -> Iterator[tuple[str, str]]:
    """Yield (command, output) for help and wrong usage.

    Yields:
        command, and its exit code and output.
    """
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(onnx.parser.parse_model(GOOD), f"{folder}/good.onnx")
        Path(folder, "text.onnx").write_text("no model")

        def said(arguments: tuple[str, ...]) -> str:
            """Run a command in the temporary folder.

            Returns:
                exit code and output.
            """
            done = subprocess.run(
                [sys.executable, "-m", "normdeploy", *arguments],
                capture_output=True,
                text=True,
                cwd=folder,
                stdin=subprocess.DEVNULL,
            )
            text = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}".replace(folder, "FOLDER")
            return re.sub(r"\d+(\.\d+)? s\b", "N s", text)

        lines = [*WRONG, *((verb, "--help") for verb in VERBS)]
        with ThreadPoolExecutor(2) as pool:
            for arguments, text in zip(lines, pool.map(said, lines), strict=True):
                yield f"normdeploy {' '.join(arguments)}", text


def main() -> None:
    """Write or compare the record."""
    parser = argparse.ArgumentParser(prog="benchmarks.frozen")
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="of the models, those whose name holds this")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path = given.folder / "frozen.json"
    known: dict[str, str] = json.loads(path.read_text()) if given.what == "compare" else {}
    found: dict[str, str] = {}
    different = 0
    for name, text in (*of_the_command_line(), *of_models(given.only)):
        found[name] = text
        if given.what == "compare" and known.get(name) != text:
            different += 1
            old, new = (known.get(name) or "").splitlines(), text.splitlines()
            first = next(
                ((a, b) for a, b in zip(old, new, strict=False) if a != b), (f"{len(old)} lines", f"{len(new)} lines")
            )
            print(f"{name}: {first[0]!r} is {first[1]!r} now", flush=True)
    if given.what == "write":
        given.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    gone = [] if given.only else sorted(known.keys() - found.keys())
    print(*(f"{name}: gone" for name in gone), f"{len(found)} taken down, {different + len(gone)} different", sep="\n")
    sys.exit(bool(different or gone))


if __name__ == "__main__":
    main()
