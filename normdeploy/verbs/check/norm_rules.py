"""Define the rules of ``check``, and find the problems of a file and its norms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx

from ...findings.records import STATUS_WORDS, Finding
from ...findings.rendering import ShortRepr
from ...graphs.proto_queries import module_path
from ...norms.function_bodies import calls_by_function, functions_to_rename
from ...option_values import ACCURATE, TENSORRT, USUAL
from ...runtimes.kernel_support import query_tensorrt
from ...runtimes.trt_runner import TITLES, describe_missing_runtime
from ...storage.onnx_domains import is_standard
from ...storage.onnx_files import fill_shared_weights, iter_tensors
from ...storage.proto_traversal import iter_bodies, nodes_with_opsets
from ...storage.shared_weights import tensor_array
from ...storage.weight_serialization import tensor_nbytes
from ...types import Array

# Largest float32. Exporters write it where they mean "no bound". In float16 it becomes Inf, which also means "no
# bound", so it does not count as an overflow.
_UNBOUNDED = float(np.finfo(np.float32).max)
# Maximum bytes of weights (512 MiB) of a file that is passed to a runtime's parser.
_MOST = 2**29
# Maximum number of characters of a parser's reason in a message.
_LONGEST = 400
_LARGEST_HALF = float(np.finfo(np.float16).max)

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Rule:
    """Rule of ``check``.

    Attributes:
        short: one sentence that describes the problem.
        help: why the problem matters, and how to fix it.
        level: level of the rule's problems unless the rule fails the check; then the level is "error".
    """

    id: str
    short: str
    help: str
    level: Level = "warning"


RULES = (
    Rule(
        "decomposed",
        "A normalization is written as several nodes although one would do.",
        "`normdeploy optimize` proves that one node is equivalent and writes it: fewer passes over memory, and"
        " the epsilon can't be lost.",
    ),
    Rule(
        "unfolded",
        "A BatchNorm could be folded into a neighboring op.",
        "`normdeploy optimize` folds its scale and shift into the weights of the linear op next to it, so it"
        " costs nothing.",
    ),
    Rule(
        "train-mode",
        "A node is in training mode.",
        "Its result depends on the rest of the batch, or is random. Call `.eval()` on the model before the export.",
    ),
    Rule(
        "eps-lost",
        "An epsilon rounds to zero in the dtype in which its norm computes.",
        "Rows without variance become NaN or Inf. Keep the statistics in float32, as `normdeploy optimize"
        " --precision` does, or choose an epsilon that the dtype can represent (float16: 6e-8 or more).",
    ),
    Rule(
        "fp16-overflow",
        "A constant exceeds the float16 range (65504).",
        "It becomes Inf in float16. `normdeploy optimize --precision fp16` keeps such constants in float32 between"
        " Casts.",
    ),
    Rule(
        "wrong-form",
        "A norm is one node, but a runtime computes it wrong or does not know it.",
        "Examples are ops of a single tool, GroupNormalization with one group (TensorRT runs it as"
        " InstanceNormalization), or a form slower than the best one for `--runtime`. `normdeploy optimize`"
        " writes the better form.",
    ),
    Rule(
        "missing-kernel",
        "A runtime rejects a norm, or has no kernel for it.",
        "The installed runtimes were tested. `normdeploy optimize --runtime ...` chooses a form that the"
        " runtime supports.",
    ),
    Rule(
        "refused",
        "Nodes resemble a norm, but no single standard node can replace them.",
        "`normdeploy inspect --explain NAME` shows the reason.",
        level="note",
    ),
    Rule(
        "asymmetric",
        "An activation is quantized with a zero point, or in an unsigned dtype.",
        "TensorRT and TensorRT-RTX reject zero points other than 0, and have int8 and FP8 kernels only."
        " Quantize symmetrically for them: int8 or FP8 with zero point 0. Checked only with `--runtime"
        " tensorrt` or `tensorrt-rtx`.",
    ),
    Rule(
        "int32",
        "A DequantizeLinear reads int32.",
        "TensorRT and TensorRT-RTX reject it; onnxruntime's quantizer stores biases this way. `normdeploy"
        " optimize --runtime tensorrt-rtx` stores the same float32 numbers, bit for bit. Checked only with"
        " `--runtime tensorrt` or `tensorrt-rtx`.",
    ),
    Rule(
        "per-tensor",
        "A quantized weight has one scale for all of its channels.",
        "The largest channel then sets the step of all others. One scale per channel costs nothing in any"
        " runtime: quantize the weight per channel.",
    ),
    Rule(
        "blocked-fusion",
        "A QuantizeLinear and DequantizeLinear pair separates nodes that could be one kernel.",
        "Between a linear op and the BatchNormalization or activation that follows, the pair forces two"
        " kernels and a rounding: quantize after both. A tensor quantized separately for each reader needs one"
        " pair for all.",
    ),
    Rule(
        "fp8",
        "The file contains FP8, but a target GPU does not support it.",
        "FP8 needs compute capability 8.9 or newer; quantize to int8 for older GPUs. Checked only with"
        " `--compute-capability`.",
    ),
    Rule(
        "weight-zero-point",
        "A signed integer weight has zero points other than 0.",
        "TensorRT rejects it, and onnxruntime's integer products become slower. Quantize weights symmetrically.",
    ),
    Rule(
        "unpaired",
        "A tensor is quantized and never dequantized.",
        "Its readers compute with the integer codes instead of the values. Add a DequantizeLinear with the"
        " same scale and zero point after it, or remove the QuantizeLinear.",
    ),
    Rule(
        "misbound",
        "An argument of a function call has the name of another input of the function.",
        "TensorRT-RTX's parser renames the arguments one by one and looks each up by the new names, so the"
        " function silently gets a wrong tensor. `normdeploy build` renames the inputs; for other builders,"
        " `normdeploy optimize` rewrites normdeploy's own functions. Checked only with `--runtime tensorrt` or"
        " `tensorrt-rtx`.",
    ),
    Rule(
        "unparsed",
        "The runtime's parser rejects the file.",
        "The installed TensorRT or TensorRT-RTX parsed the whole file; the message is its own. Checked only"
        " with `--runtime tensorrt` or `tensorrt-rtx`, for files up to 512 MB.",
    ),
    Rule(
        "runtime-fault",
        "A runtime has a known fault at a node.",
        "It computes wrong numbers, or its optimizer writes a node that fails. The message names the issue, and where"
        " the fault was tried. `normdeploy verify` compares the outputs with the optimizer on and off.",
    ),
    Rule(
        "unsupported",
        "The target does not run a norm as it is written.",
        "onnxruntime then runs the norm on the CPU, and TensorRT rejects the file. The answer comes from the op lists"
        " that the runtime publishes; nothing was run. `normdeploy optimize --for ...` writes a form that the target"
        " runs. Checked only with `--target`.",
    ),
    Rule(
        "unsupported-opset",
        "The file's opset is newer than those that the target reads.",
        "Lower the file with `optimize --opset` or `optimize --for`. Checked only with `--target`.",
    ),
    Rule(
        "unknown-support",
        "No source was read that says whether the target runs a norm.",
        "Try the file on the target. Checked only with `--target`.",
        level="note",
    ),
)
# TensorRT's parser refuses a file with a problem of these rules. Such a file is not passed to the parser, which would
# only report the same problem again.
REFUSED_BY_TENSORRT = frozenset({"asymmetric", "int32", "weight-zero-point", "train-mode"})
IDS = tuple(rule.id for rule in RULES)


@dataclass(frozen=True, repr=False)
class Problem(ShortRepr):
    """Violation of one rule; ``normdeploy.verbs.check.check_function`` describes the fields."""

    rule: str
    message: str
    kind: str = ""
    module: str = ""
    place: str = ""
    node: str = ""
    tensor: str = ""
    level: Level = "warning"
    fingerprint: str = ""
    known: bool = False

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.level}, {self.rule}{f' at {self.location}' if self.location else ''}: {self.message}"

    @property
    def location(self) -> str:
        """Name the module. Without a module path, name the node; without both, the tensor.

        Returns:
            for example "module 'encoder.norm'"; "" if the problem has none of the three.
        """
        if self.module:
            return f"module {self.module!r}"
        if self.node:
            return f"node {self.node!r}"
        return f"tensor {self.tensor!r}" if self.tensor else ""


# ------------------------------------------------------------------ problems


def find_norm_problems(f: Finding, deployed: bool, runtime: str, precision: str | None) -> Iterator[Problem]:
    """Find the problems of one norm of the census.

    Args:
        deployed: True if the file is final. False if it will still be exported, which fixes the form of the norm.
        runtime: the runtime whose kernels count, or "any".
        precision: "fp16" or "bf16": judge the epsilon as if the file computed in this type.

    Yields:
        Problems, without fingerprints.
    """
    at = Problem("", "", f.kind, f.module, f.place, tensor=f.tensor)
    ops = [word for word in f.spelling.split() if not word.startswith("(")]
    if deployed and f.status == "fused" and _between_casts(ops, f.became):
        # A half-precision file keeps a norm in float32 by a Cast before and after it (docs/reference/precision.md).
        pass
    elif deployed and f.status == "fused" and len(ops) > 1:
        yield replace(at, rule="decomposed", message=f"{f.kind} in {len(ops)} nodes ({f.spelling}) can be {f.became}")
    elif deployed and f.status == "fused":
        yield replace(at, rule="wrong-form", message=f"{f.kind} as {f.spelling} should be {f.became}")
    elif deployed and f.status == "folded" and "folded into" in f.became:
        yield replace(at, rule="unfolded", message=f"{f.kind} can be {f.became}")
    elif f.status in ("refused", "undone"):
        yield replace(at, rule="refused", message=f"{f.kind} is {STATUS_WORDS[f.status]}: {f.reason}")
    if message := _describe_lost_epsilon(f, precision):
        yield replace(at, rule="eps-lost", message=f"{f.kind}: {message}")
    for half in f.half:
        if half.dtype == "float16" and half.overflow:
            yield replace(
                at, rule="fp16-overflow", message=f"{f.kind}: constants overflow in float16: {', '.join(half.overflow)}"
            )
    yield from find_missing_kernels(f, at, deployed, runtime)


def _between_casts(ops: Sequence[str], became: str) -> bool:
    """Check that the norm is already the node that a rewrite would write, plus Casts."""
    node = became.partition("(")[0]
    return len(ops) > 1 and [op for op in ops if op != "Cast"] == [node]


def _describe_lost_epsilon(f: Finding, precision: str | None) -> str:
    """Describe how the epsilon of a norm is lost; return "" if it is not lost.

    A BatchNorm in eval mode can't lose its epsilon, because the root of its variance plus epsilon is a constant.
    """
    epsilon = f.epsilon_as_written if f.epsilon_as_written is not None else f.epsilon
    if epsilon is None or f.statistics in ("", "constant"):
        return ""
    if epsilon == 0:
        return "its epsilon is 0"
    kinds = {*f.statistics.split(" and "), {"fp16": "float16", "bf16": "bfloat16"}.get(precision or "", "")}
    lost = [half.dtype for half in f.half if half.dtype in kinds and half.vanishes == "zero"]
    if lost:
        return f"its epsilon {epsilon:.7g} is 0 in {' and '.join(lost)}"
    return ""


def find_missing_kernels(f: Finding, at: Problem, deployed: bool, runtime: str) -> Iterator[Problem]:
    """Find the runtimes that refuse a norm.

    If ``runtime`` is "any", a runtime that has no kernel but runs the function body instead is not reported.

    Args:
        at: a problem with the location of the norm.
        deployed: True if the file is final; False if it will still be exported.

    Yields:
        A problem for each runtime.
    """
    bad = ("missing",) if runtime == "any" else ("missing", "function")
    form = "now" if deployed or not f.written else "optimized"
    runtime = USUAL if runtime == ACCURATE else runtime
    title = TITLES.get(runtime, runtime)
    for s in f.runtimes:
        asked = runtime == "any" or s.runtime.split()[0] == title
        if asked and s.form == form and s.verdict in bad:
            yield replace(
                at,
                rule="missing-kernel",
                message=f"{f.kind} ({' '.join(s.nodes)}) in {s.runtime}: {s.reason or s.verdict}",
            )


def find_training_nodes(proto: onnx.ModelProto) -> Iterator[Problem]:
    """Find nodes in training mode, also in bodies and functions.

    The nodes are BatchNormalization (ONNX versions 1, 7, 9 and 14) and Dropout (1, 7 and 12).

    Yields:
        A problem for each node.
    """
    known = _collect_constants(proto)
    for node, opset in nodes_with_opsets(proto):
        if not is_standard(node) or node.op_type not in ("BatchNormalization", "Dropout"):
            continue
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "BatchNormalization":
            by_outputs = sum(map(bool, node.output)) > 1
            active = by_outputs
            if opset >= 14:
                active = bool(attributes.get("training_mode", 0))
            why = "it uses the statistics of the batch"
        else:
            ratio, flag = (known.get(node.input[k]) if opset >= 12 and len(node.input) > k else None for k in (1, 2))
            active = (
                flag is not None
                and bool(_constant_values(flag).any())
                and (ratio is None or bool(_constant_values(ratio).any()))
            )
            why = "its output is random"
        if active if opset >= 7 else not attributes.get("is_test", 0):
            if node.op_type == "BatchNormalization":
                kind = "BatchNorm"
            else:
                kind = ""
            message = f"{node.op_type} in training mode: {why}"
            yield Problem(
                "train-mode", message, kind, module_path(node), node=node.name, tensor=next(iter(node.output), "")
            )


def _collect_constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto | onnx.AttributeProto]:
    """Collect the initializers and the outputs of Constant nodes, also of bodies and functions, by name."""
    known: dict[str, onnx.TensorProto | onnx.AttributeProto] = {
        t.name: t for b in iter_bodies(proto) if isinstance(b, onnx.GraphProto) for t in b.initializer
    }
    return known | dict(_iter_constant_nodes(proto))


def _iter_constant_nodes(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.AttributeProto]]:
    """Yield the output of each Constant node with its value."""
    for body in iter_bodies(proto):
        for node in body.node:
            if node.op_type == "Constant" and node.output:
                yield from ((node.output[0], attribute) for attribute in node.attribute)


def _constant_values(constant: onnx.TensorProto | onnx.AttributeProto) -> Array:
    if isinstance(constant, onnx.AttributeProto) and constant.name != "value":
        return np.asarray(onnx.helper.get_attribute_value(constant))
    return tensor_array(constant.t if isinstance(constant, onnx.AttributeProto) else constant)


def find_misbound_calls(proto: onnx.ModelProto, runtime: str) -> Iterator[Problem]:
    """Find calls of functions whose inputs TensorRT's parser would bind to the wrong tensors.

    Yields:
        A problem for each call; none if ``runtime`` is not TensorRT or TensorRT-RTX.
    """
    of_function = calls_by_function(proto)
    for function in functions_to_rename(proto) if runtime in TENSORRT else ():
        inputs = set(function.input)
        for node in of_function[function.domain, function.name]:
            if clashing := sorted(inputs & set(node.input)):
                message = (
                    f"{node.op_type} is called with {clashing[0]!r}, which is also the name of an input of its"
                    f" function {function.domain}.{function.name}({', '.join(function.input)})"
                )
                yield Problem("misbound", message, module=module_path(node), node=node.name, tensor=node.output[0])


def find_parser_refusals(proto: onnx.ModelProto, runtime: str) -> Iterator[Problem]:
    """Find the reason why the runtime's parser refuses a file whose weights are references.

    Yields:
        A problem with the parser's message. There is none if the runtime is not installed or the weights exceed 512
        MiB.
    """
    if sum(map(tensor_nbytes, iter_tensors(proto))) > _MOST:
        return
    if describe_missing_runtime(runtime, gpu=runtime == "tensorrt") is not None:
        return
    asked = query_tensorrt([fill_shared_weights(proto)], runtime)
    for answer in asked.answers:
        if answer.verdict == "missing":
            # The rest of the message names locations in NVIDIA's source code, which don't help the user.
            reason = re.split(r"\. In \w+ at /| \[checkMacros", answer.reason)[0][:_LONGEST]
            yield Problem("unparsed", f"{asked.runtime} rejects the file: {reason}")


def find_overflowing_constants(proto: onnx.ModelProto, told: Collection[str]) -> Iterator[Problem]:
    """Find constants outside of norms that float16 can't hold.

    Args:
        told: names of constants that were already reported as constants of a norm.

    Yields:
        A problem for each constant.
    """
    names = dict[str, str]()
    for name, attribute in _iter_constant_nodes(proto):
        names[attribute.t.name or name] = name
        if attribute.floats and name not in told:
            yield from _overflow_problems(name, _constant_values(attribute))
    for tensor in iter_tensors(proto):
        name = names.get(tensor.name, tensor.name)
        if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE) or name in told or not tensor.dims:
            continue
        yield from _overflow_problems(name, tensor_array(tensor))


def _overflow_problems(name: str, values: Array) -> Iterator[Problem]:
    largest = _largest_finite(values)
    if largest > _LARGEST_HALF:
        yield Problem("fp16-overflow", f"a constant of up to {largest:.7g} overflows in float16", tensor=name)


def _largest_finite(values: Array) -> float:
    """Return the largest magnitude below `_UNBOUNDED`, which means "no bound"."""
    if not values.size:
        return 0.0
    ends = float(values.min()), float(values.max())
    if all(abs(v) < _UNBOUNDED for v in ends):
        return max(map(abs, ends))
    magnitudes = np.abs(values)
    return float(magnitudes[magnitudes < _UNBOUNDED].max(initial=0.0))
