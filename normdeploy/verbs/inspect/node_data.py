"""Write the layer of each ONNX node as node data of Model Explorer (github.com/google-ai-edge/model-explorer).

Node data of one graph are a JSON object:

    results              id of a node, or name of one of its outputs -> {"value": number or text}
    gradient             colors of the smallest (stop 0) and of the largest number (stop 1)
    hideAggregatedStats  statistics that the viewer does not show for groups of nodes

Source: ``GraphNodeData`` in the package's ``node_data_builder.py``. The viewer's ONNX adapter uses the name of a node
as its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .engine_report import EngineBuild

_GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e8710a"})
_UNNAMED = "node_of_"


def make_node_data(build: EngineBuild, outputs: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Make node data with the mean time in milliseconds of the layer that computes each node.

    A node in two layers gets the sum. All nodes of a layer get its whole time, so sums over nodes have no meaning and
    are hidden. Without times, the value is the layer's kind.

    Args:
        outputs: name of each node of the ONNX file -> names of its outputs; empty without a file.

    Returns:
        the JSON object. The key of a node without a name is its first output.
    """
    times: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for layer in build.layers:
        for name in layer.nodes:
            if outputs and name not in outputs:
                continue
            kinds.setdefault(name, str(layer.kind))
            if layer.ms is not None:
                times[name] = times.get(name, 0.0) + layer.ms
    if build.total_ms is None:
        return {
            "name": "TensorRT layer",
            "results": {_key_of(name, outputs): {"value": kind} for name, kind in kinds.items()},
            "showExpandedSummaryOnGroupNode": True,
        }
    return {
        "name": "ms of the TensorRT layer",
        "results": {_key_of(name, outputs): {"value": ms} for name, ms in times.items()},
        "gradient": list(_GRADIENT),
        "hideAggregatedStats": ["sum"],
    }


def _key_of(name: str, outputs: Mapping[str, tuple[str, ...]]) -> str:
    """Return the viewer's key of a node. TensorRT made up the name of a node that has none in the file."""
    output = name.removeprefix(_UNNAMED)
    if output != name and (not outputs or outputs[name][:1] == (output,)):
        return output
    return name
