"""Run another optimizer over files.

The worker is a separate process, because the optimizer may crash or hang. Its environment need not have normdeploy.

    python worker.py TOOL

First it prints "version <text>", or prints "not installed: <why>" and ends. Then, for each line "input<TAB>output" on
stdin, it writes the optimized file and prints "ok" or "error <text>".
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version

import onnx

Optimizer = Callable[[onnx.ModelProto], onnx.ModelProto]

_SCRATCH = os.path.join(tempfile.gettempdir(), f"corpus-{os.getpid()}.onnx")


def onnxsim() -> tuple[str, Optimizer]:
    """Load onnxsim.

    Returns:
        its version and function.
    """
    import onnxsim

    return f"onnxsim {version('onnxsim')}", lambda proto: onnxsim.simplify(proto)[0]


def onnxslim() -> tuple[str, Optimizer]:
    """Load onnxslim.

    Returns:
        its version and function.
    """
    import onnxslim

    return f"onnxslim {version('onnxslim')}", onnxslim.slim


def _onnxruntime(level: str) -> tuple[str, Optimizer]:
    import onnxruntime as ort

    def optimize(proto: onnx.ModelProto) -> onnx.ModelProto:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        options.optimized_model_filepath = _SCRATCH
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        optimized = onnx.load(options.optimized_model_filepath)
        os.unlink(options.optimized_model_filepath)
        return optimized

    return f"onnxruntime {ort.__version__} offline, {level}", optimize


def onnxscript() -> tuple[str, Optimizer]:
    """Load onnxscript's optimizer and norm rules.

    Returns:
        version and function.
    """
    import onnxscript.optimizer
    import onnxscript.rewriter
    from onnxscript.rewriter.rules.fusion import _layer_norm, _rms_normalization

    rules = [*_layer_norm.layer_normalization_rules, *_rms_normalization.rms_normalization_rules]

    def optimize(proto: onnx.ModelProto) -> onnx.ModelProto:
        return onnxscript.rewriter.rewrite(onnxscript.optimizer.optimize(proto), pattern_rewrite_rules=rules)

    return f"onnxscript {version('onnxscript')} with its norm rules", optimize


def transformers() -> tuple[str, Optimizer]:
    """Load onnxruntime's transformer optimizer.

    Returns:
        version and function.
    """
    import onnxruntime
    from onnxruntime.transformers.optimizer import optimize_model

    def optimize(proto: onnx.ModelProto) -> onnx.ModelProto:
        path = _SCRATCH
        onnx.save(proto, path)
        return optimize_model(path, model_type="bert", opt_level=0).model

    return f"onnxruntime.transformers {onnxruntime.__version__} (bert)", optimize


TOOLS: dict[str, Callable[[], tuple[str, Optimizer]]] = {
    "onnxsim": onnxsim,
    "onnxslim": onnxslim,
    "onnxruntime-basic": lambda: _onnxruntime("basic"),
    "onnxruntime-extended": lambda: _onnxruntime("extended"),
    "onnxruntime-all": lambda: _onnxruntime("all"),
    "onnxscript": onnxscript,
    "transformers": transformers,
}


def main(tool: str) -> None:
    """Load a tool and optimize the files named on stdin."""
    # Tools print to standard output.
    answers = sys.stdout
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        name, optimize = TOOLS[tool]()
    except ImportError as error:
        print(f"not installed: {error}", file=answers, flush=True)
        return
    print(f"version {name}", file=answers, flush=True)
    for line in sys.stdin:
        source, target = line.rstrip("\n").split("\t")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                onnx.save(optimize(onnx.load(source)), target)
            answer = "ok"
        # A tool may raise any exception.
        except Exception as error:
            answer = f"error {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
