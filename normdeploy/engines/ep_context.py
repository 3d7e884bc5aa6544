"""Embed an engine in an ONNX file for onnxruntime's TensorRT-RTX provider: one EPContext node replaces the graph.

The provider reads and writes these attributes (microsoft/onnxruntime,
core/providers/nv_tensorrt_rtx/onnx_ctx_model_helper.cc; NVIDIA/TensorRT-RTX-EP-ABI, src/onnx_ctx_model_helper.cc, the
source of the wheel):

    embed_mode             1: ep_cache_context contains the engine; 0: ep_cache_context is the relative path of the
                           engine's file, which must be in the folder of the ONNX file
    partition_name         name of the provider's runtime cache: a plain file name
    onnx_model_filename    read only to refit an engine without weights; our engines contain their weights
    main_context           0: each node has its own engine
    hardware_architecture  compute capabilities without dots, as the provider writes that of its GPU ("86")
    ep_sdk_version         version of TensorRT-RTX
    source                 name of the provider; onnxruntime uses it to report a missing provider

The model's metadata holds the first bytes of the engine under ``ep_compatibility_info.<provider>``. Before onnxruntime
loads the engine, it passes these bytes to the provider to find out if the engine can run (getEngineValidity).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from ..errors import BuildError
from ..storage import onnx_files
from ..storage.compiled_models import DOMAIN, OP, PROVIDER
from ..storage.file_replacement import lock_folder, matching_siblings
from ..storage.onnx_files import write_bytes
from ..storage.proto_traversal import required_inputs

COMPATIBILITY = f"ep_compatibility_info.{PROVIDER}"
# Number of bytes at the start of an engine that the provider compares (kTensorRTEngineHeaderSize).
HEADER = 64


@dataclass(frozen=True)
class EpContext:
    """Description of the ONNX file that was written.

    Attributes:
        mode: "embed" or "file".
        file: name of the engine's file, in the folder of the ONNX file; "" if the engine is embedded.
        partition: name of the runtime cache.
        architecture: compute capabilities without dots, joined by commas.
        sdk_version: version of TensorRT-RTX.
    """

    mode: str
    file: str
    partition: str
    architecture: str
    sdk_version: str


def write_ep_context(
    written: Path, target: Path, proto: onnx.ModelProto, source: str, mode: str, targets: Sequence[str], version: str
) -> EpContext:
    """Replace the engine in ``written`` by an ONNX file that embeds it or refers to it.

    Args:
        written: path of the engine. The ONNX file replaces the file at this path.
        target: final path of the ONNX file. In mode "file" the engine is written to the same folder.
        proto: model from which the engine was built. The ONNX file gets the same inputs and outputs.
        source: name of the model's file.
        mode: "embed" or "file".
        targets: compute capabilities of the engine ("8.6").
        version: version of TensorRT-RTX.

    Returns:
        description of the file.

    Raises:
        BuildError: the engine is too large to embed.
    """
    engine = written.read_bytes()
    digest = hashlib.sha256(engine).hexdigest()[:16]
    if mode == "file":
        file = f"{target.name}.{digest}.engine"
    else:
        file = ""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source).stem)[:100]
    context = EpContext(
        mode, file, f"{PROVIDER}_{stem}_{digest}", ",".join(c.replace(".", "") for c in targets), version
    )
    model = _make_ep_context_model(proto, context, engine, source)
    if model.ByteSize() > onnx_files.PROTOBUF_LIMIT:
        raise BuildError(
            f"the engine has {len(engine)} bytes, but an ONNX file has at most {onnx_files.PROTOBUF_LIMIT}; write it "
            "next to the file with --ep-context file"
        )
    if file:
        write_bytes(target.with_name(file), engine)
    written.write_bytes(model.SerializeToString())
    return context


def remove_stale_engines(target: Path, keep: str) -> None:
    """Remove the engines of earlier builds, because the ONNX file at ``target`` no longer refers to them.

    Args:
        keep: name of the engine to keep.
    """
    with lock_folder(target.parent):
        for old in matching_siblings(target, rf"{re.escape(target.name)}\.[0-9a-f]{{16}}\.engine"):
            if old.name != keep:
                old.unlink(missing_ok=True)


def _make_ep_context_model(proto: onnx.ModelProto, context: EpContext, engine: bytes, source: str) -> onnx.ModelProto:
    inputs = required_inputs(proto.graph)
    node = helper.make_node(
        OP,
        [v.name for v in inputs],
        [v.name for v in proto.graph.output],
        name=context.partition,
        domain=DOMAIN,
        main_context=0,
        embed_mode=int(context.mode == "embed"),
        ep_cache_context=context.file or engine,
        hardware_architecture=context.architecture,
        ep_sdk_version=context.sdk_version,
        partition_name=context.partition,
        onnx_model_filename=source,
        source=PROVIDER,
    )
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    model = helper.make_model(
        helper.make_graph([node], proto.graph.name or "engine", inputs, list(proto.graph.output)),
        ir_version=proto.ir_version,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        producer_name="normdeploy",
    )
    model.metadata_props.add(key=COMPATIBILITY, value=engine[:HEADER].hex())
    return model
