"""Compare quantized files of normdeploy, of ModelOpt and of onnxruntime's quantize_static, judged with samples that
calibrated none of them.

``python -m benchmarks.quantization [--only MODEL …] [--contenders TEXT] [--rounds N]`` writes
``benchmarks/results/quantization.md``, ``.json`` and ``.png`` after each file; other rows stay. All contenders get the
same float32 file (``normdeploy.export``, for any runtime) and the same calibration samples, 128 sentences or 512 crops
("samples": rows with 128 crops are older). All files run in the same onnxruntime on the CPU with one thread. The
reference is the model in PyTorch in float64; float32 has its own row. "faster" is float32's processor time over the
file's, in turns in random order, with three sessions a file and a 95 % interval. A file's speed on a GPU is not
measured here.

Models: MiniLM and EfficientNet-Lite0 have the trained weights of packages. The MobileNetV2 and the decoder are trained
here, for minutes, on crops of scikit-image's photographs and on the prose of installed packages. ModelOpt runs in a
separate environment, which is made in the cache at the first run.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import subprocess
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import normdeploy

from . import environments, judge, tables
from .contenders import OURS, PEERS, Contender, linears
from .data import sentences
from .subjects import SUBJECTS, Subject

FLOAT = "float32"
# Forms that are timed. onnxruntime has CPU kernels for int8 only; it computes FP8 and INT4 in float32.
TIMED = ("symmetric", "asymmetric")


def prepared(subject: Subject) -> tuple[Path, Path, np.ndarray]:
    """Write the float32 file and the calibration samples, and run the model in float64.

    Returns:
        file, samples, and float64 outputs on the judged samples.
    """
    folder = environments.cache() / "files" / subject.name
    folder.mkdir(parents=True, exist_ok=True)
    source, samples = folder / "float32.onnx", folder / "samples.npz"
    given = tuple(torch.from_numpy(array[:2]) for array in subject.judged_inputs().values())
    normdeploy.export(subject.build(), given, output=source, dynamic_shapes=subject.dynamic_shapes())
    np.savez(samples, **subject.calibrate())
    return source, samples, subject.reference()


def row(subject: Subject, contender: Contender, source: Path, samples: Path, reference: np.ndarray) -> dict[str, Any]:
    """Write and judge one file.

    Returns:
        the row, with the writer's error if it wrote no file.
    """
    target = environments.written(subject.name, contender.name)
    told: dict[str, Any] = {"form": contender.form, "date": datetime.date.today().isoformat()}
    if contender in OURS:
        told["commit"] = commit()
    with np.load(samples) as arrays:
        told["samples"] = len(arrays[arrays.files[0]])
    target.unlink(missing_ok=True)
    start = time.process_time()
    wall = time.perf_counter()
    try:
        contender.write(source, samples, target)
        told |= {"seconds": round(time.perf_counter() - wall, 1), "linears": linears(target)}
        told |= {
            "bytes": target.stat().st_size,
            "measures": judge.measured(subject, target, reference),
            "loads": judge.loads(target),
        }
    # An error of a contender is a result.
    except Exception as error:
        told["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        logging.debug("%s %s", time.process_time() - start, traceback.format_exc())
    return told


def commit() -> str:
    """Return the commit of this checkout.

    Returns:
        short hash.
    """
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def timed(subject: Subject, rows: dict[str, Any], rounds: int) -> None:
    """Add "faster" to every row whose file exists."""
    wanted = [c for c in (*PEERS, *OURS) if subject.name in c.subjects and c.form in TIMED]
    names = [FLOAT, *(c.name for c in wanted if "measures" in rows.get(c.name, {}))]
    files = {n: path for n in names if (path := environments.written(subject.name, n)).exists()}
    for name, faster in judge.speeds(subject, files, rounds).items():
        rows[name]["faster"] = faster


def main() -> None:
    """Write, judge and race the files."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantization", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[s.name for s in SUBJECTS], choices=[s.name for s in SUBJECTS])
    parser.add_argument("--contenders", default="", help="those whose name holds this; the others' rows stay")
    parser.add_argument("--rounds", type=int, default=12, help="of the race; 0: files are judged and not timed")
    parser.add_argument("--peers", action="store_true", help="without normdeploy's files")
    parser.add_argument("--table", action="store_true", help="only write the table and the plot of what is there")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = tables.read()
    for subject in SUBJECTS if not given.table else ():
        if subject.name not in given.only:
            continue
        rows = results["models"].setdefault(subject.name, {})
        source, samples, reference = prepared(subject)
        measures = judge.measured(subject, source, reference)
        timed_before = {name: told for name, told in rows.get(FLOAT, {}).items() if name == "faster"}
        rows[FLOAT] = timed_before | {
            "form": "",
            "bytes": source.stat().st_size,
            "linears": linears(source),
            "measures": measures,
        }
        for contender in PEERS if given.peers else (*PEERS, *OURS):
            if given.contenders.lower() in contender.name.lower() and subject.name in contender.subjects:
                rows[contender.name] = row(subject, contender, source, samples, reference)
                print(subject.name, contender.name, rows[contender.name], flush=True)
                tables.write(results)
        if given.rounds:
            timed(subject, rows, given.rounds)
        results["versions"] = {name: version(name) for name in ("onnx", "torch")} | {
            "onnxruntime": judge.ort.__version__,
            "modelopt": environments.MODELOPT[0].partition("==")[2],
            "sentences": sentences().digest,
        }
        tables.write(results)
    if given.table:
        tables.write(results)
    short = tables.missed(results)
    print(*short, sep="\n")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
