"""Write and read Triton Inference Server's model configuration (``config.pbtxt``) as protobuf text.

The messages below are the part of Triton's ``model_config.proto`` that `package` writes, with the same names and field
numbers. Triton's rules (Triton's documentation, "Model Configuration") are:

- If ``max_batch_size`` > 0, the first dim of every tensor is the batch, and Triton joins requests along it. ``dims``
  does not include the batch.
- ``dims`` is never empty, and no dim is 0. A tensor without dims other than the batch is declared as [1]. If Triton
  batches, ``reshape`` removes this dim for the model. If Triton does not batch, it refuses such a ``reshape`` ("scalar
  tensors are not supported"), but its backend accepts [1] unchanged.
- The backend for onnxruntime compares the declared dims of outputs with the dims that onnxruntime infers. onnxruntime
  may infer a fixed size where the file has a name; the backend then refuses -1 (onnxruntime_backend,
  CompareDimsSupported).
- The backend for onnxruntime does not support bfloat16 (triton-inference-server/server, issue 8464).
- ``model_warmup`` repeats one row of data ``batch_size`` times. Its files are in the folder ``warmup`` of the model.
- ``optimization.graph.level`` for onnxruntime: unset means all optimizations, 2 means none (onnxruntime_backend's
  README).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format  # type: ignore[import-untyped]

from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.proto_queries import value_info_type
from ...graphs.shape_inference import infer_types
from ...runtimes.ort_runner import OrtRunner

Shape = tuple[int | str | None, ...]
TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
}
# Runtime -> backend and platform.
BACKENDS = {
    "onnxruntime": ("onnxruntime", "onnxruntime_onnx"),
    "tensorrt": ("tensorrt", "tensorrt_plan"),
}
DEFAULT_FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan"}
# Value of ``optimization.graph.level`` that turns onnxruntime's optimizer off.
UNOPTIMIZED = 2

_ENUMS = {
    "DataType": ("TYPE_INVALID", *list(TYPES.values())[:-1], "TYPE_STRING", "TYPE_BF16"),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
}
_MESSAGES = {
    "Reshape": "repeated int64 shape = 1",
    "Input": "string name = 1; DataType data_type = 2; repeated int64 dims = 4; Reshape reshape = 5",
    "Output": "string name = 1; DataType data_type = 2; repeated int64 dims = 3; Reshape reshape = 5",
    "Graph": "int32 level = 1",
    "Optimization": "Graph graph = 1",
    "Batching": "repeated int32 preferred_batch_size = 1; uint64 max_queue_delay_microseconds = 2",
    "Group": "string name = 1; int32 count = 2; repeated int32 gpus = 3; Kind kind = 4",
    "File": "string key = 1; string value = 2",
    "Data": (
        "DataType data_type = 1; repeated int64 dims = 2; bool zero_data = 3; bool random_data = 4; string"
        " input_data_file = 5"
    ),
    "Named": "string key = 1; Data value = 2",
    "Warmup": "string name = 1; uint32 batch_size = 2; repeated Named inputs = 3; uint32 count = 4",
    "ModelConfig": (
        "string name = 1; string platform = 2; int32 max_batch_size = 4; repeated Input input = 5; repeated Output"
        " output = 6; repeated Group instance_group = 7; string default_model_filename = 8; repeated File"
        " cc_model_filenames = 9; Batching dynamic_batching = 11; Optimization optimization = 12; repeated Warmup"
        " model_warmup = 16; string backend = 17"
    ),
}


def _model_config_class() -> Any:
    """Build the class of the message ModelConfig."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="normdeploy/triton.proto", package="normdeploy", syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for position, value in enumerate(values):
            enum.value.add(name=value, number=position)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split("; "):
            *repeated, kind, called, _, number = text.split()
            if repeated:
                label = field.LABEL_REPEATED
            else:
                label = field.LABEL_OPTIONAL
            added = message.field.add(name=called, number=int(number), label=label)
            if kind in _ENUMS or kind in _MESSAGES:
                if kind in _ENUMS:
                    added.type = field.TYPE_ENUM
                else:
                    added.type = field.TYPE_MESSAGE
                added.type_name = f".normdeploy.{kind}"
            else:
                added.type = getattr(field, f"TYPE_{kind.upper()}")
    return message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())["normdeploy.ModelConfig"]


ModelConfig = _model_config_class()


@dataclass(frozen=True)
class TritonPort:
    """Input or output of a model.

    Attributes:
        dtype: numpy's name, or "bfloat16".
        shape: for each dim, its size or its name; None if the file has neither.
    """

    name: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class WarmupRequest:
    """Request that Triton runs before the model is ready: the row in ``files``, ``batch_size`` times.

    Attributes:
        files: input -> file in the folder ``warmup``, with the elements in C order, little-endian.
        shapes: input -> shape of the row, without the batch.
    """

    name: str
    batch_size: int
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ServingOptions:
    """Options for serving the models of a bundle.

    Attributes:
        max_batch: largest batch; 0 if Triton must not batch.
        preferred: batch sizes that engines are optimized for.
        instances: number of instances of each model.
        reason: reason why Triton must not batch; "" if it may batch.
    """

    max_batch: int
    preferred: tuple[int, ...]
    instances: int
    reason: str = ""


def make_ports(values: Sequence[onnx.ValueInfoProto]) -> tuple[TritonPort, ...]:
    """Read inputs or outputs of a graph.

    Returns:
        A port for each value.

    Raises:
        GraphError: an input or output is not a tensor, or has no shape in the file.
        InputError: Triton does not support the type or the shape of an input or output.
    """
    return tuple(_make_port(value) for value in values)


def output_ports(proto: onnx.ModelProto) -> tuple[TritonPort, ...]:
    """Read the outputs of ``proto``, with dims named after input dims if shape inference finds them to be equal.

    tf2onnx and paddle2onnx give the batch of each tensor its own name, such as ``unk__7``. If no input has a dim of
    this name, the name is replaced by the name that shape inference derives from the inputs.

    Returns:
        A port for each output.

    Raises:
        GraphError, InputError: as for ``make_ports``.
    """
    stated = make_ports(proto.graph.output)
    known = infer_types(proto)
    named = {d for v in proto.graph.input for d in value_info_type(v)[1] or () if isinstance(d, str)}
    outputs = []
    for port in stated:
        derived = known.get(port.name, (None, None))[1]
        if derived is None or len(derived) != len(port.shape):
            outputs.append(port)
            continue
        pairs = zip(port.shape, derived, strict=True)
        shape = tuple(new if old not in named and new in named else old for old, new in pairs)
        outputs.append(replace(port, shape=shape))
    return tuple(outputs)


def _make_port(value: onnx.ValueInfoProto) -> TritonPort:
    if value.type.WhichOneof("value") != "tensor_type" or not value.type.tensor_type.HasField("shape"):
        raise GraphError(
            f"{value.name!r} is not a tensor with a stated shape, which Triton needs; run the file through"
            " `normdeploy optimize`"
        )
    kind = value.type.tensor_type.elem_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind).name
    except (KeyError, TypeError, ValueError):
        dtype = str(kind)
    if dtype not in TYPES:
        called = onnx.TensorProto.DataType.Name(kind).lower()
        raise InputError(
            f"{value.name!r} has the dtype {called}, which arrays in samples can't have; a bundle supports"
            f" {', '.join(TYPES)}"
        )
    dims = value.type.tensor_type.shape.dim
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)
    if any(isinstance(d, int) and d < 1 for d in shape):
        raise InputError(f"{value.name!r} has the shape {list(shape)}, but Triton does not support dims of size 0")
    return TritonPort(value.name, dtype, shape)


def runtime_outputs(file: Path, outputs: Sequence[TritonPort], *, optimize: bool) -> tuple[TritonPort, ...]:
    """Replace the dims of outputs by those that onnxruntime infers for the file.

    Args:
        optimize: run onnxruntime's optimizer.

    Returns:
        The outputs; unchanged if onnxruntime can't load the file.
    """
    try:
        with OrtRunner(file, optimize=optimize) as runner:
            shapes = runner.output_shapes
    except (GraphError, RuntimeUnavailable):
        return tuple(outputs)
    return tuple(replace(port, shape=shapes[port.name]) for port in outputs)


def find_batch_dim(inputs: Sequence[TritonPort], outputs: Sequence[TritonPort]) -> tuple[str, str]:
    """Find the batch dim: the dim that is the first one of every input and output.

    Returns:
        (name, "") if there is such a dim; otherwise ("", reason why Triton can't batch).
    """
    every = [*inputs, *outputs]
    first = {p.name: p.shape[0] if p.shape else None for p in every}
    names = set(first.values())
    if len(names) > 1 or not isinstance(next(iter(names), None), str):
        dims = ", ".join(map(str, every))
        return "", f"the inputs and outputs do not start with one dynamic dim of the same name ({dims})"
    name = str(names.pop())
    if again := [p.name for p in every if name in p.shape[1:]]:
        return "", f"the first dim {name!r} is also another dim of {again[0]!r}, so requests can't be joined along it"
    return name, ""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Triton's configuration of one model.

    Args:
        name: name of the model and of its folder.
        runtime: "onnxruntime" or "tensorrt".
        gpu: run the instances on GPUs.
        files: compute capability -> file in the version's folder. None means one file with the default name.
        optimize: run onnxruntime's optimizer.
    """

    name: str
    runtime: str
    inputs: Sequence[TritonPort]
    outputs: Sequence[TritonPort]
    serving: ServingOptions
    gpu: bool
    files: Mapping[str, str] | None = None
    optimize: bool = True
    warmups: Sequence[WarmupRequest] = ()

    def config_text(self) -> str:
        """Write the configuration.

        Returns:
            The text of ``config.pbtxt``.
        """
        backend, platform = BACKENDS[self.runtime]
        serving = self.serving
        batches = serving.max_batch > 0
        fields: dict[str, Any] = {
            "name": self.name,
            "platform": platform,
            "backend": backend,
            "max_batch_size": serving.max_batch,
            "input": [_port_fields(port, batches) for port in self.inputs],
            "output": [_port_fields(port, batches) for port in self.outputs],
            "instance_group": [{"count": serving.instances, "kind": "KIND_GPU" if self.gpu else "KIND_CPU"}],
            "default_model_filename": DEFAULT_FILES[self.runtime],
            "model_warmup": [_warmup_fields(w, {p.name: p for p in self.inputs}) for w in self.warmups],
        }
        if self.files:
            fields["default_model_filename"] = next(iter(self.files.values()))
            fields["cc_model_filenames"] = [{"key": key, "value": file} for key, file in self.files.items()]
        if serving.max_batch:
            fields["dynamic_batching"] = {"preferred_batch_size": serving.preferred}
        if not self.optimize:
            fields["optimization"] = {"graph": {"level": UNOPTIMIZED}}
        return str(text_format.MessageToString(ModelConfig(**fields)))


def parse_config(text: str) -> Any:
    """Parse a ``config.pbtxt``. Fields that `package` never writes are ignored.

    Returns:
        A message ModelConfig.

    Raises:
        GraphError: the text is not a valid configuration.
    """
    try:
        return text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise GraphError(f"can't read config.pbtxt: {error}") from error


def safe_model_name(text: str) -> str:
    """Make a name that is safe as a folder and in a URL.

    The name has letters, digits, "_", "." and "-". It begins with a letter or digit.

    Returns:
        At most 100 characters; "model" if nothing is left of ``text``.
    """
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9_.-]+", "_", text))[:100].rstrip("._-") or "model"


def _port_fields(port: TritonPort, batched: bool) -> dict[str, Any]:
    dims = [d if isinstance(d, int) else -1 for d in port.shape[batched:]]
    stated: dict[str, Any] = {"name": port.name, "data_type": TYPES[port.dtype], "dims": dims or [1]}
    if batched and not dims:
        return stated | {"reshape": {"shape": []}}
    return stated


def _warmup_fields(warmup: WarmupRequest, inputs: Mapping[str, TritonPort]) -> dict[str, Any]:
    data = {
        name: {"data_type": TYPES[inputs[name].dtype], "dims": warmup.shapes[name] or (1,), "input_data_file": file}
        for name, file in warmup.files.items()
    }
    named = [{"key": name, "value": value} for name, value in data.items()]
    return {"name": warmup.name, "batch_size": warmup.batch_size, "inputs": named, "count": 1}
