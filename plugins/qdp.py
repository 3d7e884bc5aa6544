"""The ops as TensorRT's quickly deployable plugins (``tensorrt.plugin``), compiled ahead of time: the engine holds the
kernel alone.

TensorRT reads the signature of each function that it is given; they are the same for all ops but for the names, so they
are written once and carry the signature that the op's description asks for.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable
from typing import Any, Union

from ._aot import AotError, compile_launch
from ._launch import Op, Tensor, constant
from .ops import OPS

NAMESPACE = "normdeploy"
# TensorRT's names of types; the data's type, and those that parameters may have beside it
TYPES = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16"}
MIXED = "FP16|BF16"


def register() -> tuple[str, ...]:
    """Register every op with TensorRT, once for a process; gives their names, all in the namespace ``normdeploy``.

    Raises ImportError where tensorrt (10.9 or newer) or triton is missing.
    """
    import tensorrt.plugin as trtp

    for op in OPS:
        if not hasattr(getattr(trtp.op, NAMESPACE, None), op.name):
            _register(op, trtp)
    return tuple(op.name for op in OPS)


def compute_capability() -> tuple[int, int]:
    """What kernels are compiled for: NORMDEPLOY_COMPUTE_CAPABILITY ("8.9"), else the GPU in use. Raises AotError where
    there is neither."""
    named = os.environ.get("NORMDEPLOY_COMPUTE_CAPABILITY")
    if named:
        major, _, minor = named.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise AotError(f"NORMDEPLOY_COMPUTE_CAPABILITY is {named!r}; say it as 8.9")
        return int(major), int(minor)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise AotError(
            "no CUDA driver here to ask for the compute capability; set NORMDEPLOY_COMPUTE_CAPABILITY, say to 8.9"
        ) from None
    device, value, found = ctypes.c_int(), ctypes.c_int(), []
    failed = driver.cuInit(0)
    if driver.cuCtxGetDevice(ctypes.byref(device)):  # no context yet: the first device
        failed = failed or driver.cuDeviceGet(ctypes.byref(device), 0)
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value)
    if failed:
        raise AotError(
            f"CUDA error {failed} when asked for the compute capability; set NORMDEPLOY_COMPUTE_CAPABILITY, say to 8.9"
        )
    return found[0], found[1]


def _register(op: Op, trtp: Any) -> None:
    count = len(op.inputs)
    desc, attributes = trtp.TensorDesc, [_parameter(name, kind) for name, kind in op.attributes.items()]
    inputs = [_parameter(name, desc) for name in op.inputs]
    outputs = _parameter("outputs", tuple[desc])

    def described(*tensors: Any, **given: Any) -> Any:
        """The outputs' shapes and types."""
        given = _read(given)
        _check(op, given)
        shaped = op.shapes(_tensors(tensors), given) if op.shapes else None
        # like() keeps the type of the input, which is what every output but statistics has
        descs = (
            [trtp.from_shape_expr(shape, _float32()) for shape in shaped]
            if shaped
            else [tensors[0].like() for _ in op.outputs]
        )
        return descs[0] if len(descs) == 1 else tuple(descs)

    def autotune(*values: Any) -> Any:
        """Types and tactics: one type for everything, or parameters in fp32 beside half precision; statistics in
        fp32."""
        tiles = op.tiles(_tensors(values[:count]), _read(dict(zip(op.attributes, values[count:-1], strict=True))))
        same = {"T": "|".join(TYPES.values()), "P": "|".join(TYPES.values()), "F": "FP32"}
        found = []
        for kinds in [same, *([{"T": MIXED, "P": "FP32", "F": "FP32"}] if "P" in op.types else [])]:
            combination = trtp.AutoTuneCombination()
            for position, kind in enumerate(op.types):
                combination.pos([position], kinds[kind])
            combination.tactics(list(range(1, len(tiles) + 1)))
            found.append(combination)
        return found

    def aot_impl(*values: Any) -> Any:
        """The kernel of one tactic, its launch parameters and int32 arguments."""
        given = _read(dict(zip(op.attributes, values[count:-2], strict=True)))
        tensors, results, tactic = _tensors(values[:count]), _tensors(values[-2]), values[-1]
        launch = op.launch(tensors, given, op.tiles(tensors, given)[max(tactic, 1) - 1])
        kernel = compile_launch(op, launch, tensors, results, compute_capability())
        arguments = trtp.SymIntExprs(len(kernel.arguments))
        for i, name in enumerate(kernel.arguments):
            arguments[i] = trtp.SymInt32(launch.scalars[name])
        params = trtp.KernelLaunchParams(grid_x=launch.grid, block_x=kernel.warps * 32, shared_mem=kernel.shared)
        return kernel.name, kernel.ptx, params, arguments

    text = Union[str, bytes]  # noqa: UP007 (TensorRT 10 knows no other spelling)
    several = tuple[(desc,) * len(op.outputs)]
    plugin = f"{NAMESPACE}::{op.name}"
    trtp.register(plugin)(_signed(described, [*inputs, *attributes], desc if len(op.outputs) == 1 else several))
    trtp.autotune(plugin)(_signed(autotune, [*inputs, *attributes, outputs], list[trtp.AutoTuneCombination]))
    result = tuple[text, text, trtp.KernelLaunchParams, trtp.SymExprs]
    trtp.aot_impl(plugin)(_signed(aot_impl, [*inputs, *attributes, outputs, _parameter("tactic", int)], result))


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _signed(function: Callable[..., Any], parameters: list[inspect.Parameter], returns: Any) -> Callable[..., Any]:
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _read(attributes: dict[str, Any]) -> dict[str, Any]:
    """Texts without the zero byte with which TensorRT's ONNX parser ends them."""
    return {name: value.rstrip("\0") if isinstance(value, str) else value for name, value in attributes.items()}


def _check(op: Op, attributes: dict[str, Any]) -> None:
    for name, allowed in op.required.items():
        if attributes[name] not in allowed:
            raise ValueError(
                f"{op.name}: {name} is {attributes[name]!r}; it has to be one of {', '.join(map(repr, allowed))}"
            )


def _tensors(descs: Any) -> list[Tensor]:
    """TensorRT's descriptions as ours: constant sizes as ints, the rest symbolic."""
    import tensorrt as trt

    names = {trt.DataType.FLOAT: "fp32", trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
    return [Tensor(tuple(_size(e) for e in d.shape_expr), names.get(d.dtype, str(d.dtype))) for d in descs]


def _size(expression: Any) -> Any:
    value = constant(expression)
    return expression if value is None else value


def _float32() -> Any:
    import tensorrt as trt

    return trt.DataType.FLOAT
