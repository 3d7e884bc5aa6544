"""Small graphs as text, for the tests of ``prove``."""

from __future__ import annotations

import numpy as np
import onnx

import normdeploy
from normdeploy.verbs.prove.proof_result import FileProof


def model(
    body: str, shape: str = "2, 3, 8", out: str = "2, 3, 8", opset: int = 18, **constants: object
) -> onnx.ModelProto:
    """Build a model that computes y from x; ``constants`` are initializers, floats as float32."""
    text = f'<ir_version: 9, opset_import: ["" : {opset}]> g (float[{shape}] x) => (float[{out}] y) {{ {body} }}'
    made = onnx.parser.parse_model(text)
    for name, value in constants.items():
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def prove(first: onnx.ModelProto, second: onnx.ModelProto) -> FileProof:
    """Prove with ``normdeploy.prove``."""
    return normdeploy.prove(first, second)
