"""A process with one release of NVIDIA's bindings over the mock: reads what to do as JSON from stdin, writes one line
of JSON for each part (python -m tests.plugins.bindings.worker).

A release that crashes takes this process alone along; the last line says in which part.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import mock, probe


def main() -> None:
    told = json.load(sys.stdin)
    trt = mock.load(Path(told["libraries"]), Path(told["bindings"]))
    answer: Callable[[dict[str, Any]], None] = lambda said: print(json.dumps(said), flush=True)  # noqa: E731
    answer({"version": trt.__version__})
    if told.get("probe"):
        answer(probe.run(trt))
        return
    from normdeploy_plugins import qdp

    answer({"ops": list(qdp.register()), "faults": mock.faults()})
    kernels = Path(told["kernels"])
    for case in told.get("cases", ()):
        answer({"begun": case["op"]})
        _kernels(kernels, case["compiled"])
        plugin = mock.Plugin.create(case["op"], case["attributes"], case["numbers"])
        answer(_all([(case, plugin), *([(case, plugin.clone())] if case["cloned"] else [])]))
    if network := told.get("network"):
        answer({"begun": "network"})
        _kernels(kernels, False)
        made = [(case, mock.Plugin.create(case["op"], case["attributes"], case["numbers"])) for case in network]
        answer(_all([*made, *((case, plugin.clone()) for case, plugin in made)]))
    answer({"done": True})


def _kernels(folder: Path, real: bool) -> None:
    """Real kernels from now on, or placeholders, of which only Triton's part is missing: names, arguments and launches
    are those of the real ones."""
    from normdeploy_plugins import _aot

    os.environ["NORMDEPLOY_CACHE"] = str(folder / ("real" if real else "placeholders"))
    compiler = _COMPILE.setdefault("real", _aot._compile)
    _aot._compile = compiler if real else _placeholder


_COMPILE: dict[str, Any] = {}


def _placeholder(kernel: Any, signature: dict[str, str], constants: Any, warps: int, capability: Any) -> Any:
    from normdeploy_plugins import _aot

    arguments = tuple(name for name, kind in signature.items() if kind == "i32")
    text = f"// {signature} {constants} {warps} {capability}\n.entry {kernel.__name__}("
    return _aot.Compiled(*_aot.named(text, kernel.__name__), 0, warps, arguments)


def _all(plugins: list[tuple[dict[str, Any], mock.Plugin]]) -> dict[str, Any]:
    """As a builder does with the layers of a network: types and shapes of one after the other, then each step with all
    of them before the next."""
    found: list[dict[str, Any]] = [{"kinds": p.kinds, "name": p.identity()} for _, p in plugins]
    for (case, plugin), said in zip(plugins, found, strict=True):
        said["types"] = plugin.output_types(case["types"], [len(s) for s in case["shapes"]])
        plugin.output_shapes(case["shapes"])
        said["shapes"] = [plugin.output_dims(sizes) for sizes in case["sizes"]]
    for (case, plugin), said in zip(plugins, found, strict=True):
        combinations = said["combinations"] = plugin.combinations()
        asked = [i for i, c in enumerate(combinations) if [t for t, _ in c] == plugin.types]
        plugin.configure(next(i for i in asked if combinations[i][0][1] == case["format"]))
        said |= {"tactics": plugin.tactics(), "timing": plugin.timing_cache_id()}
    for (case, plugin), said in reversed(list(zip(plugins, found, strict=True))):
        said["launches"] = [_launch(case, plugin, t) for t in said["tactics"][: case.get("tactics")]]
        said["launches"] += [_launch(case, plugin, t) for t in case.get("strange", ())]
    return {"plugins": found, "faults": mock.faults()}


def _launch(case: dict[str, Any], plugin: mock.Plugin, tactic: int) -> dict[str, Any]:
    kernel, ptx = plugin.launch(tactic)
    return {"tactic": tactic, "kernel": kernel, "ptx": ptx, "at": [plugin.values(sizes) for sizes in case["sizes"]]}


if __name__ == "__main__":
    main()
