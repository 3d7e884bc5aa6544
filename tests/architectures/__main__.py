"""Every architecture through everything; writes ``benchmarks/results/architectures.json`` and prints a table.

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
from .measure import Row, measured

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"


def line(row: Row) -> str:
    """One line of the table: nodes, norms, what is left, parity, engine."""
    told = []
    for name, result in (("from the module", row.ours), ("from the exporter's file", row.rewritten)):
        parity = "parity" if result.parity and all(p["ok"] for p in result.parity) else f"no parity {result.parity}"
        told.append(
            f"{name}: {result.nodes} nodes, {result.norms}, left {len(result.left)}, {result.failed or parity}"
            + (f", checker: {result.checked}" if result.checked else "")
        )
    return f"{row.name}: {row.norm_calls} norms; the exporter leaves {row.exporter_nodes} nodes; {'; '.join(told)}; engine {row.engine}"


def main() -> None:
    wanted = sys.argv[1:]
    rows: list[dict[str, object]] = []
    for architecture in ARCHITECTURES:
        if wanted and architecture.name not in wanted:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(architecture, Path(folder))
            rows.append(row.to_json())
            print(line(row), flush=True)
        except ImportError as error:
            rows.append({"name": architecture.name, "not run": f"{error.name or error} is not installed"})
            print(f"{architecture.name}: {error}", flush=True)
        except Exception as error:
            rows.append({"name": architecture.name, "not run": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            print(f"{architecture.name}: {traceback.format_exc(limit=-2)}", flush=True)
    if not wanted:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
