"""Measure how time and memory grow with the size of the graph.

The graphs are chains of MatMul and hand-written layer norms.

    python benchmarks/linear.py [--python OTHER] [NODES ...]        default: 5000 20000 100000

Each tool runs alone in a separate process, one after the other: graphsurgeon's import and export (the yardstick),
``optimize``, and for comparison onnxslim, onnxsim, onnxscript's optimizer and onnxruntime's offline optimization
(extended), if ``OTHER`` (default: this interpreter) has them. Each may take two minutes. Seconds are processor time of
one thread, so that other load on the machine counts less; ``norms`` is the number of norms that end as one node. Writes
``benchmarks/results/linear.json`` and, if matplotlib is installed, ``linear.png``.

The requirements for 100,000 nodes: at most 3 times graphsurgeon's time or 20 s, whichever is more, and at most 4 times
graphsurgeon's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 120
NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization")
WIDTH = 32
# Number of nodes in a block: a MatMul, then a layer norm in the (x − u)² spelling
BLOCK = 11


def chain(nodes: int) -> onnx.ModelProto:
    """Build blocks of MatMul and hand-written layer norms at opset 18, with a dynamic batch.

    Returns:
        model of about ``nodes`` nodes.
    """
    rng = np.random.default_rng(0)

    def const(name: str, value: np.ndarray) -> onnx.TensorProto:
        """Make an initializer.

        Returns:
            the tensor.
        """
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


def surgeon(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Import and export with graphsurgeon.

    Returns:
        the model.
    """
    import onnx_graphsurgeon as gs

    return gs.export_onnx(gs.import_onnx(proto))


def normdeploy(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Optimize the norms.

    Returns:
        the model.
    """
    from normdeploy.rewriting.norm_optimizer import optimize_norms

    return optimize_norms(proto)[0]


def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnxslim.

    Returns:
        the model.
    """
    import onnxslim

    return onnxslim.slim(proto)


def simplified(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnxsim.

    Returns:
        the model.
    """
    import onnxsim

    return onnxsim.simplify(proto)[0]


def script(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnxscript's optimizer.

    Returns:
        the model.
    """
    import onnxscript.optimizer

    return onnxscript.optimizer.optimize(proto)


def offline(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnxruntime's offline optimization.

    Returns:
        the model.
    """
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.optimized_model_filepath = os.path.join(folder, "out.onnx")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


TOOLS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "graphsurgeon import + export": surgeon,
    "normdeploy": normdeploy,
    "onnxslim": slim,
    "onnxsim": simplified,
    "onnxscript.optimizer": script,
    "onnxruntime offline, extended": offline,
}
# Tools that this interpreter runs.
OWN = ("graphsurgeon import + export", "normdeploy")


def one(tool: str, nodes: int) -> dict[str, object]:
    """Measure one tool on one size, in this process.

    Returns:
        a row of the results.
    """
    warm = chain(22)
    try:
        # Run once first, so that imports are not counted.
        TOOLS[tool](warm)
    except ImportError:
        return {"said": "not installed"}
    proto = chain(nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    out = TOOLS[tool](proto)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu s": round(cpu, 2),
        "wall s": round(wall, 2),
        "peak MiB": peak // 1024,
        "added MiB": (peak - before) // 1024,
        "nodes after": len(out.graph.node),
        "norms": sum(n.op_type in NORMS for n in out.graph.node),
    }


def apart(python: str, tool: str, nodes: int) -> dict[str, object]:
    """Run ``one`` in a separate process.

    Returns:
        its row, or the reason for a failure.
    """
    command = [python, __file__, "--one", tool, str(nodes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"said": f"more than {LIMIT_S} s"}
    if done.returncode:
        return {"said": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:120]}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def plot(rows: list[dict[str, object]], target: Path) -> bool:
    """Plot processor time over nodes, both logarithmic.

    Returns:
        whether matplotlib is installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for tool in TOOLS:
        points = [(r["nodes"], r["cpu s"]) for r in rows if r["tool"] == tool and "cpu s" in r]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", linewidth=2.5 if tool == "normdeploy" else 1.2, label=tool
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="nodes",
        ylabel="processor time, s",
        title="One layer norm by hand in eleven nodes",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=120)
    return True


def main() -> None:
    """Measure all tools and sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--one", metavar="TOOL")
    parser.add_argument("nodes", nargs="*", type=int, default=[5000, 20000, 100000])
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.nodes[0])))
        return
    rows: list[dict[str, object]] = []
    for nodes in given.nodes:
        for tool in TOOLS:
            measured = apart(sys.executable if tool in OWN else given.python, tool, nodes)
            rows.append({"tool": tool, "nodes": nodes, "norms before": nodes // BLOCK, **measured})
            print(json.dumps(rows[-1]), flush=True)
    versions = {"python": platform.python_version(), "onnx": onnx.__version__, "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "linear.json").write_text(json.dumps({**versions, "rows": rows}, indent=2) + "\n")
    if not plot(rows, RESULTS / "linear.png"):
        print("matplotlib is not installed: no plot was made")


if __name__ == "__main__":
    main()
