"""Register the ops as TensorRT's quickly deployable plugins (``tensorrt.plugin``), compiled ahead of time, so that the
engine contains only the kernel.

TensorRT reads the signature of each registered function. The functions of different ops differ only in the names of
their parameters. So each function is written once, and its signature for an op is made from the op's description.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np

from ._aot import FP8_SINCE, AotError, compile_launch, sources
from ._launch import QUANTIZED, Op, Tensor, Unknown, constant, in_channels_last
from .ops import OPS

NAMESPACE = "normdeploy"
# Triton's name → TensorRT's name of a type of the data.
TYPES = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16"}
# TensorRT's names of the data types with which gamma and beta may have another type, FP32.
MIXED = "FP16|BF16"
QUANTIZED_TYPES = {"int8": "INT8", "fp8": "FP8"}


class _Float32:
    """Annotation of an attribute that is an array of float32. ``numpy.typing.NDArray[...]`` means the same, but the
    bindings of TensorRT 10.9 to 11.1 pass it to ``issubclass``, which Python 3.13 refuses. All versions recognize an
    array by the two names in this class.
    """

    __origin__ = np.ndarray
    __args__ = (Any, np.dtype[np.float32])


class _Int32:
    """Annotation like `_Float32`, for int32."""

    __origin__ = np.ndarray
    __args__ = (Any, np.dtype[np.int32])


# Python type of an attribute → annotation. Attributes are arrays of one element, in the types that the ONNX parser
# reads. The bindings of TensorRT 10.9 to 11.1 don't convert them to float or int under NumPy 2.4. A text is passed as
# its position in `_launch.TEXTS`.
_ARRAYS = {float: _Float32, int: _Int32, str: _Int32}


def register() -> tuple[str, ...]:
    """Register every op with TensorRT in the namespace ``normdeploy``, once per process.

    Returns:
        names of the ops.

    Raises:
        ImportError: tensorrt or triton is missing, or tensorrt's internals have changed (10.9 to 11.4 were tried).
    """
    import tensorrt.plugin as trtp

    if wrong := _unknown(trtp):
        raise ImportError(wrong)
    _name_timings(trtp)
    for op in OPS:
        if not hasattr(getattr(trtp.op, NAMESPACE, None), op.name):
            _register(op, trtp)
    return tuple(op.name for op in OPS)


def compute_capability() -> tuple[int, int]:
    """Return the compute capability for which kernels are compiled: NORMDEPLOY_COMPUTE_CAPABILITY (such as "8.9"), else
    the compute capability of the GPU in use.

    Returns:
        (major, minor).

    Raises:
        AotError: the variable is not set and there is no GPU.
    """
    named = os.environ.get("NORMDEPLOY_COMPUTE_CAPABILITY")
    if named:
        major, _, minor = named.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise AotError(f"NORMDEPLOY_COMPUTE_CAPABILITY is {named!r}; expected a value such as 8.9")
        return int(major), int(minor)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise AotError(
            "can't query the compute capability without a CUDA driver; set NORMDEPLOY_COMPUTE_CAPABILITY, for "
            "example to 8.9"
        ) from None
    device, value, numbers = ctypes.c_int(), ctypes.c_int(), []
    failed = driver.cuInit(0)
    # Without a context, use the first device.
    if driver.cuCtxGetDevice(ctypes.byref(device)):
        failed = failed or driver.cuDeviceGet(ctypes.byref(device), 0)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    for attribute in (75, 76):
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    if failed:
        raise AotError(
            f"querying the compute capability failed with CUDA error {failed}; set NORMDEPLOY_COMPUTE_CAPABILITY, "
            "for example to 8.9"
        )
    return numbers[0], numbers[1]


def without_fp8() -> str:
    """Explain that the GPU lacks FP8.

    Returns:
        message; "" if the GPU has FP8, or if the GPU is unknown (the compilation of a kernel reports this).
    """
    try:
        capability = compute_capability()
    except AotError:
        return ""
    least, asked = (".".join(map(str, c)) for c in (FP8_SINCE, capability))
    return "" if capability >= FP8_SINCE else f"FP8 needs a GPU of compute capability {least} or newer, not {asked}"


def _register(op: Op, trtp: Any) -> None:
    count = len(op.inputs)
    desc, attributes = trtp.TensorDesc, [_parameter(name, _ARRAYS[kind]) for name, kind in op.attributes.items()]
    inputs = [_parameter(name, desc) for name in op.inputs]
    outputs = _parameter("outputs", tuple[desc])

    def read(values: Sequence[Any]) -> dict[str, Any]:
        """Decode the attributes that TensorRT passes.

        Returns:
            attributes by name.
        """
        return op.decoded(dict(zip(op.attributes, values, strict=True)))

    def described(*tensors: Any, **given: Any) -> Any:
        """Describe the outputs for TensorRT.

        Returns:
            descriptor or descriptors with shape and type.
        """
        attributes = op.decoded(given)
        if tensors[0].shape_expr[0].is_fake:
            _leave_shapes(trtp)
        shaped = op.shapes(_tensors(tensors), attributes) if op.shapes else [()] * len(op.outputs)
        # like() copies the input's type and shape, which are correct for every output except statistics and scales.
        descs = [
            trtp.from_shape_expr(shape, _float32()) if kind == "F" else tensors[0].like()
            for shape, kind in zip(shaped, op.types[count:], strict=True)
        ]
        for desc, kind in zip(descs, op.types[count:], strict=True):
            if kind == "Q":
                desc.dtype = _quantized(attributes["to"])
        return descs[0] if len(descs) == 1 else tuple(descs)

    def autotune(*values: Any) -> Any:
        """List types, formats and tactics.

        All types are equal, or the data is half precision and the parameters are fp32. Statistics and scales are fp32.
        Half-precision data may also have the channels last, as in convolutions.

        Returns:
            combinations.
        """
        tensors, attributes = [Tensor(_numbers(d.shape), _dtype(d)) for d in values[:count]], read(values[count:-1])
        last = in_channels_last(op, tensors, attributes)
        fixed = {"F": "FP32", "Q": QUANTIZED_TYPES.get(attributes.get("to", ""), "")}
        same = fixed | {"T": "|".join(TYPES.values()), "P": "|".join(TYPES.values())}
        mixed = [fixed | {"T": MIXED, "P": "FP32"}] if "P" in op.types else []
        offered = [(kinds, "LINEAR", op.tiles(tensors, attributes)) for kinds in [same, *mixed]]
        if last is not None:
            offered += [(k, "HWC8", last[0].tiles(*last[1:])) for k in [fixed | {"T": MIXED, "P": MIXED}, *mixed]]
        combinations = []
        for kinds, layout, tiles in offered:
            combination = trtp.AutoTuneCombination()
            for position, kind in enumerate(op.types):
                combination.pos([position], kinds[kind], layout if kind == "T" else "LINEAR")
            combination.tactics(list(range(1, len(tiles) + 1)))
            combinations.append(combination)
        return combinations

    def aot_impl(*values: Any) -> Any:
        """Compile the kernel of one tactic.

        Returns:
            name, PTX, launch parameters and int32 arguments.
        """
        attributes, tensors = read(values[count:-2]), _tensors(values[:count])
        # Only the types of the outputs are known here, so their shapes are left empty.
        results = [Tensor((), _dtype(d)) for d in values[-2]]
        used, tactic = op, values[-1]
        if _in_channels_last(values[0]):
            used, tensors, attributes = in_channels_last(op, tensors, attributes) or (op, tensors, attributes)
        tiles = used.tiles(tensors, attributes)
        # Tactic 0 is TensorRT's default. A timing cache may name a tactic that does not exist. In this case another
        # tile is used, because all tiles give the same results.
        launch = used.launch(tensors, attributes, tiles[tactic - 1 if 0 < tactic <= len(tiles) else 0])
        kernel = compile_launch(used, launch, tensors, results, compute_capability())
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


def _unknown(trtp: Any) -> str:
    """List the internals of ``tensorrt.plugin`` that this module needs but that are missing; "" if none is missing."""
    import tensorrt as trt

    lacking = [] if hasattr(trtp, "aot_impl") else ["aot_impl"]
    if not hasattr(trtp.register.__globals__.get("_TemplateAOTPlugin"), "get_timing_cache_id"):
        lacking.append("_TemplateAOTPlugin.get_timing_cache_id")
    if not any("_exprBuilder" in vars(c) for c in trtp.SymInt32.__mro__):
        lacking.append("SymInt32._exprBuilder")
    if not lacking:
        return ""
    return (
        f"tensorrt.plugin of TensorRT {getattr(trt, '__version__', '(of unknown version)')} lacks "
        f"{', '.join(lacking)}; the kernels were tested with TensorRT 10.9 to 11.4: pip install "
        "'tensorrt>=10.9,<11.5'"
    )


def _leave_shapes(trtp: Any) -> None:
    """Forget the expression builder of the previous call. The bindings of TensorRT 10.9 to 10.14 would use it to make
    placeholder sizes, although TensorRT has freed it.
    """
    holder = next(c for c in trtp.SymInt32.__mro__ if "_exprBuilder" in vars(c))
    holder._exprBuilder = None


def _name_timings(trtp: Any) -> None:
    """Add our plugins' attributes to the key of TensorRT's timing cache. ``tensorrt.plugin`` adds no attributes, so
    plugins with equal shapes but different attributes would share tactics.
    """
    template = trtp.register.__globals__["_TemplateAOTPlugin"]
    given = template.get_timing_cache_id
    if getattr(given, "by", None) == NAMESPACE:
        return

    def get_timing_cache_id(self: Any) -> str:
        """Return the key of a plugin in the timing cache.

        Returns:
            attributes and a digest of the kernels; for plugins of other namespaces, TensorRT's key.
        """
        if self.plugin_namespace != NAMESPACE:
            return str(given(self))
        attributes = [f"{name}={value.item()}" for name, value in self.attrs.items()]
        return ",".join([*attributes, f"kernels={sources()[:16]}"])

    get_timing_cache_id.by = NAMESPACE  # type: ignore[attr-defined]
    template.get_timing_cache_id = get_timing_cache_id


def _in_channels_last(desc: Any) -> bool:
    import tensorrt as trt

    return bool(desc.format == trt.TensorFormat.HWC8)


def _dtype(desc: Any) -> str:
    import tensorrt as trt

    names = {trt.DataType.FLOAT: "fp32", trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
    names |= {_quantized(to): name for to, name in QUANTIZED.items()}
    return names.get(desc.dtype, str(desc.dtype))


def _quantized(to: str) -> Any:
    import tensorrt as trt

    return getattr(trt.DataType, QUANTIZED_TYPES[to])


def _numbers(shape: Any) -> tuple[Any, ...]:
    """Convert a shape to numbers. A dynamic size becomes -1."""
    return tuple(int(n) if n >= 0 else Unknown() for n in shape)


def _tensors(descs: Any) -> list[Tensor]:
    """Convert TensorRT's descriptors: constant sizes become ints, other sizes stay symbolic. Call this only during
    TensorRT's calls for shapes and launch parameters, because symbolic sizes exist only then.
    """
    return [Tensor(tuple(_size(e) for e in d.shape_expr), _dtype(d)) for d in descs]


def _size(expression: Any) -> Any:
    value = constant(expression)
    return expression if value is None else value


def _float32() -> Any:
    import tensorrt as trt

    return trt.DataType.FLOAT
