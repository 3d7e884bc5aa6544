"""Race whole models in onnxruntime on the CPU: torch's plain export, its optimized forms by peers, and normdeploy's
files.

``python -m benchmarks.whole_models [--rounds N] [--only TEXT]`` writes ``benchmarks/results/whole_models.md`` and
``.json`` after each model; with ``--only`` the rows of the other models stay. It needs onnxslim and onnxsim, and for
most of the models transformers, timm and torchvision (``make whole-models`` installs all).

The batch is a dynamic dim. Each file is loaded into three sessions, because two sessions of one file differ by up to 4
% as long as they live. All sessions of a model run in turns in random order at batch 1 and 8, with one thread and
onnxruntime's optimizer on; times are processor time. A session's ratio is the median over the rounds of its time over
the mean of the plain export's sessions in the same round. A file's ratio is the mean of its sessions', with a 95 %
interval from their differences (Student's t for two groups); below 1 is faster. Errors are the largest differences from
the model in float64, over the largest output, for inputs around 0 and around 1e3 (token ids: 0 alone), as the mean of
four inputs; ``--errors`` measures only them again.

The requirements for ratios to the plain export: at most 1.02 for the default file, at most 1 for ``--fuse portable``,
and at most 1.01 for ``--runtime onnxruntime``, which must also take at most 1.01 of the best peer's time. Each file
must be at least as accurate as the plain export, and have no more nodes than onnxslim or onnxsim leave of it. The
script exits with 1 if a requirement is missed by more than its interval.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

import normdeploy
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.peer_optimizers import optimize_with_onnxsim, optimize_with_onnxslim
from normdeploy.verbs.bench.timing import Timing, race_calls

from .peers import PEERS, versions
from .subjects import BATCHES, LIBRARIES, SUBJECTS, Subject

RESULTS = Path(__file__).parents[1] / "results"
PLAIN, DEFAULT, ORT, PORTABLE = "plain export", "default", "--runtime onnxruntime", "--fuse portable"
BOUNDS = {DEFAULT: 1.02, ORT: 1.01, PORTABLE: 1.0}
OFFSETS = (0.0, 1e3)
# Number of inputs for measuring errors
INPUTS = 4
# Number of sessions per file
SESSIONS = 3
# 97.5 % of Student's t for 2 * SESSIONS - 2 degrees of freedom.
STUDENT = 2.776
# Maximum error as a multiple of the error of the plain export. Two evaluations of equal accuracy may differ by this
# factor.
WORSE = 1.5


class _Fixed(Exception):
    """torch can't export the model with a dynamic batch; it is exported at batch 1."""


def written(subject: Subject, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Write the files with each tool.

    Returns:
        name -> file, and the errors of tools that wrote none.
    """
    net, args = subject.build(), subject.args(2 if subject.open else 1)
    batch = torch.export.Dim("batch", min=1, max=64)
    dims = tuple({0: batch} for _ in args) if subject.open else None
    files, said = {name: folder / f"{i}.onnx" for i, name in enumerate((PLAIN, *BOUNDS))}, {}
    try:
        # Otherwise T5's views are not decomposed (torch 2.13).
        with torch.no_grad():
            program = torch.onnx.export(net, args, dynamo=True, verbose=False, dynamic_shapes=dims)
    except torch.onnx.errors.OnnxExporterError:
        if not subject.open:
            raise
        raise _Fixed from None
    assert program is not None
    program.save(files[PLAIN])
    normdeploy.export(net, args, output=files[DEFAULT], dynamic_shapes=dims)
    normdeploy.export(net, args, output=files[ORT], dynamic_shapes=dims, runtime="onnxruntime")
    normdeploy.export(net, args, output=files[PORTABLE], dynamic_shapes=dims, fuse="portable")
    for name, tool in PEERS.items():
        path = folder / f"{name}.onnx"
        try:
            tool(files[PLAIN], path, subject)
            session(path)
            files[name] = path
        except LookupError as e:
            said[name] = str(e)
        # An error of a peer is a result.
        except Exception as e:
            said[name] = f"fails: {type(e).__name__}: {' '.join(str(e).split())[:100]}"
    return files, said


def session(path: Path) -> ort.InferenceSession:
    """Open a session with one thread.

    Returns:
        the session.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def fed(made: ort.InferenceSession, args: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    """Pair inputs with their names.

    Returns:
        name -> array.
    """
    return {i.name: a.numpy() for i, a in zip(made.get_inputs(), args, strict=True)}


def measured(subject: Subject, rounds: int) -> dict[str, Any]:
    """Write and measure the files of a model.

    Returns:
        a row of the results.
    """
    with tempfile.TemporaryDirectory() as folder:
        files, said = written(subject, Path(folder))
        sessions = {name: [session(path) for _ in range(SESSIONS)] for name, path in files.items()}
        nodes = {name: len(onnx.load(path, load_external_data=False).graph.node) for name, path in files.items()}
        left = {name: least_left(files[name]) for name in BOUNDS}
        errors = errors_of(subject, {name: own[0] for name, own in sessions.items()})
        timed = timings(subject, sessions, rounds) if rounds else {}
    return {"model": subject.name, **timed, "errors": errors, "nodes": nodes, "left": left, "said": said}


def least_left(path: Path) -> int:
    """Count the nodes that the better of onnxslim and onnxsim leaves of a file.

    Returns:
        number of nodes.
    """
    proto = onnx.load(path)
    found = [len(proto.graph.node)]
    for tool in (optimize_with_onnxslim, optimize_with_onnxsim):
        # Errors of the tools have their own row, for the plain export.
        with contextlib.suppress(Exception):
            found.append(len(tool(proto).graph.node))
    return min(found)


def timings(subject: Subject, sessions: Mapping[str, list[ort.InferenceSession]], rounds: int) -> dict[str, Any]:
    """Race the sessions at each batch.

    Returns:
        ratios and milliseconds.
    """
    ratios: dict[str, dict[int, tuple[float, float, float]]] = {name: {} for name in sessions}
    milliseconds = {}
    for batch in BATCHES if subject.open else (1,):
        args = subject.args(batch)
        runs = [partial(made.run, None, fed(made, args)) for own in sessions.values() for made in own]
        small = batch == 1
        timing = race_calls(
            runs,
            rounds=rounds if small else max(4, rounds // 4),
            clock=time.process_time,
            most_warmup=12 if small else 1,
        )
        milliseconds[batch] = 1e3 * timing.percentile(0, 50)
        for i, name in enumerate(sessions):
            ratios[name][batch] = ratio(timing, i)
    return {"milliseconds": milliseconds, "ratios": ratios}


def ratio(timing: Timing, file: int) -> tuple[float, float, float]:
    """Compute a file's time over that of the plain export, which is the first.

    Returns:
        the ratio and its 95 % interval.
    """
    turns = np.array(timing.turns).reshape(-1, SESSIONS, len(timing.turns[0]))
    of_sessions = np.median(turns / turns[0].mean(0), axis=2)
    own, plain = of_sessions[[file, 0]] / of_sessions[0].mean()
    middle, error = own.mean(), math.sqrt((own.var(ddof=1) + plain.var(ddof=1)) / SESSIONS)
    return float(middle), float(middle - STUDENT * error), float(middle + STUDENT * error)


def errors_of(subject: Subject, sessions: Mapping[str, ort.InferenceSession]) -> dict[str, list[float]]:
    """Measure the errors of each file.

    Returns:
        file -> error for each offset.
    """
    exact = copy.deepcopy(subject.build()).double()
    errors: dict[str, list[float]] = {name: [] for name in sessions}
    for offset in OFFSETS if subject.images else OFFSETS[:1]:
        each: dict[str, list[float]] = {name: [] for name in sessions}
        for seed in range(INPUTS):
            torch.manual_seed(seed)
            given = tuple(a + offset if a.is_floating_point() else a for a in subject.args(1))
            with torch.no_grad():
                want = exact(*(a.double() if a.is_floating_point() else a for a in given)).numpy()
            for name, made in sessions.items():
                each[name].append(float(np.abs(made.run(None, fed(made, given))[0] - want).max() / np.abs(want).max()))
        for name, found in each.items():
            errors[name].append(float(np.mean(found)))
    return errors


def missed(row: Mapping[str, Any]) -> list[str]:
    """List the measures that a row misses.

    Returns:
        a text for each.
    """
    found = []
    for name, bound in BOUNDS.items():
        # The portable file was added later, and some rows were not measured again.
        if name not in row["ratios"]:
            continue
        for batch, (ratio, low, high) in row["ratios"][name].items():
            if low > bound:
                found.append(
                    f"{row['model']}, {name}, batch {batch}: {ratio:.3f} of plain export's time, at most {bound} wanted"
                )
            for peer in PEERS if name == ORT else ():
                theirs = row["ratios"].get(peer, {}).get(batch)
                if theirs is not None and low > bound * theirs[2]:
                    found.append(
                        f"{row['model']}, {name}, batch {batch}: {ratio:.3f} ({low:.3f} to {high:.3f}) of plain"
                        f" export's time, {peer} {theirs[0]:.3f} ({theirs[1]:.3f} to {theirs[2]:.3f})"
                    )
        if row["nodes"][name] > (left := row.get("left", {}).get(name, row["nodes"][name])):
            found.append(
                f"{row['model']}, {name}: {row['nodes'][name]} nodes, of which another optimizer leaves {left}"
            )
        for own, plain in zip(row["errors"][name], row["errors"][PLAIN], strict=True):
            if not own <= WORSE * plain:
                found.append(f"{row['model']}, {name}: error {own:.2g}, plain export {plain:.2g}")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows.

    Returns:
        Markdown.
    """
    lines = [
        "| model | plain, ms | file | nodes | time of plain's, batch 1 | batch 8 | error at 0 | error at 1e3 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, ratios in row["ratios"].items():
            errors = [f"{e:.1e}" for e in row["errors"][name]] + [""] * (len(OFFSETS) - len(row["errors"][name]))
            ms = ", ".join(f"{m:.0f}" for m in row["milliseconds"].values()) if name == PLAIN else ""
            told = [
                "1" if name == PLAIN else "{:.3f} ({:.3f} to {:.3f})".format(*ratios[b]) if b in ratios else ""
                for b in BATCHES
            ]
            shown = [row["model"] if name == PLAIN else "", ms, name, str(row["nodes"][name]), *told, *errors]
            lines.append(f"| {' | '.join(shown)} |")
        lines += [f"| | | {name} | {said} | | | | |" for name, said in row["said"].items()]
    for name in (*BOUNDS, *PEERS):
        known = [r for row in rows for r in row["ratios"].get(name, {}).values()]
        if known:
            lines.append(
                f"| geometric mean | | {name} | | {float(np.exp(np.mean([np.log(r[0]) for r in known]))):.3f} | | | |"
            )
    return "\n".join(lines)


def save(rows: list[dict[str, Any]], on: Any) -> list[str]:
    """Write the results and the page.

    Returns:
        the missed measures.
    """
    faults = [fault for row in rows for fault in missed(row)]
    held = {"machine": asdict(on), "rows": rows, "missed": faults}
    (RESULTS / "whole_models.json").write_text(json.dumps(held, indent=1) + "\n")
    told = sorted({f"{row['measured']}; {on}; {versions()}" for row in rows})
    said = "\n".join(f"- {fault}" for fault in faults) or "Every measure is reached."
    (RESULTS / "whole_models.md").write_text(
        "# Whole models\n\n" + "\n\n".join([__doc__.strip(), *told, table(rows), said]) + "\n"
    )
    return faults


def known() -> dict[str, dict[str, Any]]:
    """Read the rows of the last race.

    Returns:
        model -> row.
    """
    path = RESULTS / "whole_models.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for row in rows:
        row["ratios"] = {
            name: {int(batch): tuple(r) for batch, r in ratios.items()} for name, ratios in row["ratios"].items()
        }
    return {row["model"]: row for row in rows}


def main() -> None:
    """Race the models."""
    parser = argparse.ArgumentParser(prog="benchmarks.whole_models")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="models whose name holds this; the rows of the others stay")
    parser.add_argument("--errors", action="store_true", help="take the errors anew, and leave the times as they were")
    given = parser.parse_args()
    rounds = 0 if given.errors else given.rounds
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    on, rows, faults = describe_machine(), known() if given.only or given.errors else {}, []
    subjects = (*SUBJECTS, *LIBRARIES)
    for subject in subjects:
        if given.only.lower() not in subject.name.lower():
            continue
        try:
            row = measured(subject, rounds)
        except _Fixed:
            row = measured(replace(subject, open=False), rounds)
        when = {} if given.errors else {"measured": f"{datetime.date.today().isoformat()}, {rounds} rounds"}
        row = rows[subject.name] = rows.get(subject.name, {}) | row | when
        shown = {name: [round(r[0], 3) for r in ratios.values()] for name, ratios in row["ratios"].items()}
        print(subject.name, shown, row["nodes"], row["said"], flush=True)
        faults = save([rows[s.name] for s in subjects if s.name in rows], on)
    print(*faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
