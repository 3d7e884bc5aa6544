"""Every architecture through everything; writes ``benchmarks/results/architectures.json`` and ``.md``, and prints a line for each.

    python -m tests.architectures [NAME ...]

It needs transformers, diffusers, timm and torchvision beside normdeploy (``pip install --no-deps``, so that torch stays what it is); an
architecture whose library is missing is said to be that.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path

from .catalogue import ARCHITECTURES
from .measure import Result, Row, measured

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"


HEAD = (
    "| architecture | norms run | from the module: fused, folded, kept | left | from the exporter's file | left | nodes: exporter "
    "| ours | its file rewritten | with own ops | parity | TensorRT-RTX | seconds: load, export | norms, simplify |"
)
ABOUT = """# Real architectures, random weights, every gamma, beta and statistic randomised

Norms run: calls of norm modules in one run of the model. Left: norm-like subgraphs that are no standard node; each is refused with its
reason. Parity: onnxruntime, optimizer off and on, against PyTorch in float64 at batches 1, 2 and 3, small inputs and zeros, by the rule of
`normdeploy/parity/compare.py`. With own ops: `--fuse portable`, parity and engine as well.
Exporter: `torch.onnx.export(dynamo=True, optimize=True)`, opset 21. Written by `python -m tests.architectures`.

"""


def line(row: Row) -> str:
    """The row of the table, under HEAD."""
    seconds = (row.seconds[f"ours: {stage}"] for stage in ("load", "export", "norms", "simplify"))
    load, export, norms, simplify = seconds
    cells = (
        row.name,
        f"{row.norm_calls}",
        *(cell for result in (row.ours, row.rewritten) for cell in (_told(result), f"{len(result.left)}")),
        f"{row.exporter_nodes}",
        f"{row.ours.nodes}",
        f"{row.rewritten.nodes}",
        ", ".join(f"{n} {op}" for op, n in row.portable.own.items()) + f" ({row.portable.nodes} nodes)" if row.portable.own else "none",
        _parity(row),
        row.engine if row.engine == row.portable_engine else f"{row.engine}; own ops: {row.portable_engine}",
        f"{load + export:.1f}",
        f"{norms + simplify:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _told(result: Result) -> str:
    return ", ".join(f"{n} {what}" for what, n in result.norms.items())


def _parity(row: Row) -> str:
    said = []
    for result in (row.ours, row.rewritten, row.portable):
        if result.failed or result.checked:
            return result.failed or result.checked
        if result.parity and not all(p["ok"] for p in result.parity):
            said.append(result.excused or "fails")
    return "; ".join(dict.fromkeys(said)) or "passes"


def main() -> None:
    wanted = sys.argv[1:]
    rows: list[dict[str, object]] = []
    lines = [HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |"]
    for architecture in ARCHITECTURES:
        if wanted and architecture.name not in wanted:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(architecture, Path(folder))
            rows.append(row.to_json())
            lines.append(line(row))
            print(lines[-1], flush=True)
        except ImportError as error:
            rows.append({"name": architecture.name, "not run": f"{error.name or error} is not installed"})
            print(f"{architecture.name}: {error}", flush=True)
        except Exception as error:
            rows.append({"name": architecture.name, "not run": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            print(f"{architecture.name}: {traceback.format_exc(limit=-2)}", flush=True)
    if not wanted:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(ABOUT + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
