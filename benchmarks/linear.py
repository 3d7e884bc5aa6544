"""Time of ``optimize`` over the size of the graph: chains of MatMul and hand-written layer norms.

    python benchmarks/linear.py [NODES ...]        default: 5000 20000 100000

Writes ``benchmarks/results/linear.json``: for each size the seconds of graphsurgeon's own import and export, of ``optimize`` by stage, and
how many norms became one node. The measure: 20,000 nodes in under 30 s, 100,000 in at most six times that.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from normdeploy.rewrite import optimize

WIDTH = 32
BLOCK = 11  # nodes in a block: MatMul, then a layer norm in the (x − u)² spelling


def chain(nodes: int) -> onnx.ModelProto:
    """Blocks of MatMul and layer norm by hand at opset 18, the batch dynamic."""
    rng = np.random.default_rng(0)

    def const(name: str, value: np.ndarray) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(value, name)

    weights = [const(f"w{i}", (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)) for i in range(4)]
    init = [*weights, const("axes", np.array([-1])), const("eps", np.float32(1e-12)), const("two", np.float32(2))]
    body, x = [], "x"
    for b in range(nodes // BLOCK):
        p = f"b{b}_"
        init += [const(p + name, rng.standard_normal(WIDTH).astype(np.float32)) for name in ("g", "s")]
        steps = [
            ("MatMul", [x, f"w{b % 4}"], "h"),
            ("ReduceMean", [p + "h", "axes"], "u"),
            ("Sub", [p + "h", p + "u"], "d"),
            ("Mul", [p + "d", p + "d"], "q"),
            ("ReduceMean", [p + "q", "axes"], "v"),
            ("Add", [p + "v", "eps"], "e"),
            ("Sqrt", [p + "e"], "r"),
            ("Div", [p + "d", p + "r"], "n"),
            ("Mul", [p + "n", p + "g"], "m"),
            ("Add", [p + "m", p + "s"], "y"),
            ("Relu", [p + "y"], "z"),
        ]
        body += [helper.make_node(op, inputs, [p + out], name=p + out) for op, inputs, out in steps]
        x = p + "z"
    shape = ["batch", WIDTH]
    graph = helper.make_graph(
        body,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, shape)],
        init,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def measure(nodes: int) -> dict[str, object]:
    proto = chain(nodes)
    start = time.perf_counter()
    gs.export_onnx(gs.import_onnx(proto))
    surgeon = time.perf_counter() - start
    start = time.perf_counter()
    out, summary = optimize(proto)
    seconds = time.perf_counter() - start
    fused = sum(f.status == "fused" for f in summary.findings)
    assert fused == nodes // BLOCK, f"{fused} of {nodes // BLOCK} norms fused"
    return {
        "nodes": len(proto.graph.node),
        "norms": fused,
        "nodes after": len(out.graph.node),
        "graphsurgeon import + export s": round(surgeon, 2),
        "optimize s": round(seconds, 2),
        "stages s": {k: round(v, 2) for k, v in summary.seconds.items()},
        "peak MiB so far": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    rows = []
    for nodes in [int(a) for a in sys.argv[1:]] or [5000, 20000, 100000]:
        rows.append(measure(nodes))
        print(json.dumps(rows[-1]), flush=True)
    target = Path(__file__).parent / "results" / "linear.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"python": platform.python_version(), "onnx": onnx.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
