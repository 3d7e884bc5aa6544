"""Parse models with TensorRT's parser in a separate process, which ``normdeploy.runtimes.kernel_support`` starts.

Run as ``python -m normdeploy.runtimes.parser_process``. The process reads {"runtime": ..., "models": [base64, ...]} as
JSON from standard input. It writes one JSON object per line to standard output: {"version": ...}, then for each model
{"layers": [...]} or {"refused": reason}. If the parser ends the process, earlier answers are already written. Nothing
is built, so the process needs no GPU.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
from typing import Any

from .trt_runner import PACKAGES


def list_layer_types(network: Any) -> list[str]:
    """List the types of the layers that depend on data. Layers that only prepare constants are left out.

    Returns:
        TensorRT layer types, in the network's order.
    """
    fixed: set[str] = set()
    seen: list[str] = []
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        inputs = [t.name for t in (layer.get_input(k) for k in range(layer.num_inputs)) if t is not None]
        if layer.type.name == "SHAPE" or fixed.issuperset(inputs):
            fixed.update(layer.get_output(k).name for k in range(layer.num_outputs))
        else:
            seen.append(layer.type.name)
    return seen


def main() -> None:
    """Parse the models of the request on standard input and write an answer for each."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    # The libraries print to stdout too. Redirect this output to stderr, so that only answers reach stdout.
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    trt = importlib.import_module(PACKAGES[request["runtime"]])
    channel.write(json.dumps({"version": trt.__version__}) + "\n")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    for model in request["models"]:
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        if parser.parse(base64.b64decode(model)) and not parser.num_errors:
            answer: dict[str, Any] = {"layers": list_layer_types(network)}
        else:
            messages = "; ".join(dict.fromkeys(parser.get_error(i).desc() for i in range(parser.num_errors)))
            answer = {"refused": messages or "its parser gives no reason"}
        channel.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
