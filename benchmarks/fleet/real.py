"""Run a real fleet, and compare it with the verbs called one by one.

The fleet has at least twelve models in float32, float16 and int8, for three kinds of GPU.

    python -m benchmarks.fleet.real [--models N]

The models are the models of `models` that contain linear layers or convolutions, two models that consist of one norm,
and the demo's sentence encoder with trained weights. After the fleet, every verb is called by hand, in a separate
process and another folder, with the options of fleet.toml. It must write the same bytes, and its exit code must match
the cell. TensorRT-RTX 1.7 may write different engines for one file, which differ in the numbers of its inner tensors.
So if a build by hand differs, it is repeated, and the table says how often. Writes `benchmarks/results/fleet_real.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from models import demo
from models.registry import CASES, SPELLINGS, Case, export_args, samples
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.outcomes import CellOutcome, FleetRun

RESULTS = Path(__file__).parents[1] / "results" / "fleet_real.md"
_CAPABILITIES = ("8.6", "8.9", "12.0")
_HEAD = '[defaults]\nsteps = ["verify"]\n[variants.fp32]\n[variants.fp16]\nexport = { precision = "fp16" }\n'
_INT8 = '[variants.int8]\nexport = { quantize = "int8", runtime = "tensorrt-rtx" }\n'
_SAMPLES = 32
# The error budget of MiniLM in int8 is too large to decide anything: the quantization steps change the output by more
# than a quarter. So a metric decides.
_JUDGED = {("minilm", "int8"): ("--metric", "cosine:0.99", "--inputs", "minilm.npz")}
# Maximum number of builds by hand until one equals the engine of the fleet
_BUILDS = 10


def _chosen(count: int) -> list[Case]:
    """Return models with something to quantize, different rows first, and two without."""
    every = {case.name: case for case in (*CASES, *SPELLINGS)}.values()
    first, others, without, rows = list[Case](), list[Case](), list[Case](), set[str]()
    for case in every:
        if not any(isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d) for m in case.make().modules()):
            without.append(case)
        elif case.row in rows:
            others.append(case)
        else:
            rows.add(case.row)
            first.append(case)
    return [*[*first, *others][: count - 3], *without[:2]]


def _write(folder: Path, count: int) -> Path:
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    text = _HEAD + _INT8
    text += "".join(
        f'[targets.cc{cc.replace(".", "")}]\nruntime = "tensorrt-rtx"\ncompute_capability = "{cc}"\n'
        for cc in _CAPABILITIES
    )
    for number, case in enumerate(_chosen(count)):
        name = f"m{number:02}_{''.join(c if c.isalnum() else '_' for c in case.name)}"
        args, shapes = export_args(case, dynamic=case.dynamic)
        program = torch.export.export(case.make(), args, dynamic_shapes=shapes)
        torch.export.save(program, folder / f"{name}.pt2")
        rows = [samples(case, seed=seed) for seed in range(_SAMPLES)]
        inputs = program.graph_signature.user_inputs
        np.savez(
            folder / f"{name}.npz",
            **{n: np.concatenate([row[i].numpy() for row in rows]) for i, n in enumerate(map(str, inputs))},
        )
        text += f'[models.{name}]\nsource = "{name}.pt2"\n'
        text += f'variant.int8.export = {{ calibrate = "{name}.npz" }}\n'
    demo.save(folder / "minilm.pt2")
    ids, mask = demo.minilm.tokenize([f"{a} {b}" for a in demo.SENTENCES for b in demo.SENTENCES])
    np.savez(folder / "minilm.npz", input_ids=ids, attention_mask=mask)
    text += '[models.minilm]\nsource = "minilm.pt2"\nvariant.int8.export = { calibrate = "minilm.npz" }\n'
    text += 'variant.int8.verify = { metric = ["cosine:0.99"], inputs = "minilm.npz" }\n'
    (folder / "fleet.toml").write_text(text)
    return folder / "fleet.toml"


def _by_hand(folder: Path, model: str, variant: str, log: Path, engines: dict[str, str]) -> dict[str, tuple[str, int]]:
    """Call the verbs by hand.

    Args:
        engines: capability -> hash of the fleet's engine.

    Returns:
        capability -> status with the hash of the engine, and the number of builds.
    """
    options = {
        "fp32": (),
        "fp16": ("--precision", "fp16"),
        "int8": ("--calibrate", f"{model}.npz", "--quantize", "int8", "--runtime", "tensorrt-rtx"),
    }[variant]
    onnx = f"hand/{model}.{variant}.onnx"

    def call(*words: str) -> int:
        """Run a verb.

        Returns:
            exit code.
        """
        with open(log, "ab") as file:
            words = (sys.executable, "-P", "-m", "normdeploy", *words)
            return subprocess.run(words, cwd=folder, stdout=file, stderr=file, env=os.environ).returncode

    if call("export", f"{model}.pt2", "-o", onnx, *options, "-q"):
        return dict.fromkeys(_CAPABILITIES, ("failed", 0))
    if call("verify", f"{model}.pt2", onnx, *_JUDGED.get((model, variant), ()), "-q"):
        return dict.fromkeys(_CAPABILITIES, ("wrong", 0))
    told = {}
    for cc in _CAPABILITIES:
        engine = folder / "hand" / f"{model}.{variant}.{cc}.engine"
        digests = list[str]()
        while len(digests) < _BUILDS and (not digests or digests[-1] not in ("", engines.get(cc))):
            failed = call("build", onnx, "-o", str(engine), "--compute-capability", cc, "-q")
            digests.append("" if failed else hashlib.sha256(engine.read_bytes()).hexdigest())
        told[cc] = f"built {digests[-1]}" if digests[-1] else "failed", len(digests)
    return told


def _engines(file: Path) -> dict[str, str]:
    """Return the hash of each cell's engine in the store."""
    from normdeploy.fleet.run_history import find_last_run, iter_run_steps

    store = fleet_commands.open_fleet_store(fleet_commands.read_fleet_file(file), None)
    last = find_last_run(store, file.name)
    assert last is not None
    return {
        told["step"].removesuffix("/build"): told["outputs"]["model.engine"][0]
        for told in iter_run_steps(store, last["id"])
        if told["step"].endswith("/build") and told["outcome"] == "ok"
    }


def _capability(cell: CellOutcome) -> str:
    return next(c for c in _CAPABILITIES if cell.target == f"cc{c.replace('.', '')}")


def _word(cell: CellOutcome, engines: dict[str, str]) -> str:
    return f"built {engines[cell.name]}" if cell.status == "built" else cell.status


def _table(run: FleetRun, wrong: list[str], repeated: list[str], seconds: tuple[float, float, float]) -> str:
    from normdeploy.fleet.fleet_tables import run_to_markdown

    first, again, hand = seconds
    lines = [
        "# A real fleet beside the verbs called by hand",
        "",
        f"`python -m benchmarks.fleet.real`: {len(run.cells)} cells; {len(run.cells) - len(wrong)} are what the verbs"
        " say by hand, the engines to the byte.",
        f"The fleet took {first:.0f} s, and {again:.1f} s a second time; by hand it took {hand:.0f} s (one process for"
        " each call).",
        *(f"- {text}" for text in wrong),
        f"Built more than once by hand until the same engine came out: {', '.join(repeated) or 'none'}.",
        "",
        run_to_markdown(run),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the fleet and the verbs, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=13)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = _write(folder, given.models)
        start = time.monotonic()
        run = fleet_commands.run_fleet(file)
        first = time.monotonic() - start
        start = time.monotonic()
        again = fleet_commands.run_fleet(file)
        seconds = time.monotonic() - start
        assert again.ran == sum(c.status == "failed" for c in {(c.model, c.variant): c for c in run.cells}.values())
        engines = _engines(file)
        os.environ["SOURCE_DATE_EPOCH"] = "0"
        (folder / "hand").mkdir()
        start, wrong, repeated = time.monotonic(), list[str](), list[str]()
        for model, variant in dict.fromkeys((c.model, c.variant) for c in run.cells):
            cells = {_capability(c): c for c in run.cells if (c.model, c.variant) == (model, variant)}
            known = {cc: engines[cell.name] for cc, cell in cells.items() if cell.name in engines}
            said = _by_hand(folder, model, variant, folder / "hand.log", known)
            for cc, cell in cells.items():
                word, builds = said[cc]
                if _word(cell, engines) != word:
                    wrong.append(f"{cell.name} is {_word(cell, engines)}, and by hand {word}: {cell.reason}")
                elif builds > 1:
                    repeated.append(f"{cell.name} ({builds} builds)")
            print(model, variant, said["8.6"][0][:20], wrong[-1:] if wrong else "", flush=True)
        text = _table(run, wrong, repeated, (first, seconds, time.monotonic() - start))
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
