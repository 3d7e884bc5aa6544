"""List normdeploy's own ops (domain ``normdeploy``), a row per op, with function bodies in standard ops.

Own ops express norms that no single standard node can express. They are written on request (``--fuse portable``). The
file contains the function body, so every runtime that reads functions can run the op. A runtime with a fused kernel for
the op uses the kernel instead. Own ops compute in the dtype ``stash_type`` (1: float32, 11: float64), and only the
result is rounded to the dtype of X. The float64 evaluation and the prover use the body too, so there is no second
definition that could differ.

The first group are norms over ``axes``, with a scale, and often a bias, that broadcasts to X. An op with a kernel needs
the trailing axes, and an op without a kernel takes any axes:

- RMSNorm: X / sqrt(mean(X²) + epsilon) · scale; ONNX has it from opset 23 on.
- LayerNorm: (X − mean) / sqrt(Σ(X − mean)²/(n − ddof) + epsilon) · scale + bias; with ddof 1 the variance is the
  variance of torch.var, for a dynamic n.
- StdNorm: (X − mean) / (sqrt(Σ(X − mean)²/(n − ddof)) + epsilon) · scale + bias; see Rush, "The Annotated Transformer",
  2018: a·(x − mean)/(std + eps) + b.
- SimpleNorm: X / sqrt(Σ(X − mean)²/(n − ddof) + epsilon) · scale, the SimpleNorm of timm; X keeps its mean.
- L2Norm: X / max(‖X‖₂, epsilon) · scale; it is torch.nn.functional.normalize.
- OuterRMSNorm: X / (sqrt(mean(X²)) + epsilon) · scale; see Zhang, Sennrich, "Root Mean Square Layer Normalization",
  2019, whose code adds epsilon outside the root.
- ClampedRMSNorm: X / max(sqrt(mean(X²)), epsilon) · scale.
- ChannelLayerNorm: LayerNormalization over axis 1 of (N, C, …), with scale and bias of shape (C,); see ConvNeXt, Liu et
  al. 2022.
- GroupNorm: GroupNormalization of (N, C, …), with scale and bias of shape (C,); see Wu, He 2018. The body is the form
  that onnxruntime runs fastest without losing digits (`normdeploy.forms.group_norm`). onnxruntime expands the standard
  node to E[x²] − E[x]² instead.

The second group are joined ops: a norm and its neighboring ops. Their bodies contain standard nodes, which runtimes may
fuse themselves:

- AddLayerNorm, AddRMSNorm: the outputs are sum = X + residual, both of one shape, and Y, the norm of the sum over its
  last axis.
- ModulatedLayerNorm: X̂ · (1 + scale) + shift over the last axis, with scale and shift of shape (B, 1, D); see DiT,
  Peebles, Xie 2022.
- GroupNormSiLU: y · sigmoid(y) of y = GroupNorm(X).
- AdaGroupNorm: X̂ · scale + shift, with X̂ the GroupNormalization of X without scale and bias. Scale and shift are data
  of shape (N, C, 1, …), or of the shape of X. See Dhariwal, Nichol, "Diffusion Models Beat GANs", 2021, and diffusers'
  AdaGroupNorm; with as many groups as channels, AdaIN (Huang, Belongie 2017) and SPADE (Park et al. 2019).
- AdaGroupNormSiLU: y · sigmoid(y) of y = AdaGroupNorm(X).
- GatedRMSNorm: RMSNorm(X) · gate · sigmoid(gate) over the last axis; the gate has the shape of X. Mamba-2 (Dao and Gu
  2024) has such a norm; in this order it is Qwen3-Next's.
- SigmoidGatedRMSNorm: RMSNorm(X) · sigmoid(gate); see Kimi Linear, 2025.
- LayerNormQuantize, RMSNormQuantize, AddLayerNormQuantize, AddRMSNormQuantize: the norm, or the residual add and the
  norm, then QuantizeLinear. Y has the type of y_zero_point, int8 or float8e4m3fn; the output ``sum`` is not quantized.
- LayerNormDynamicQuantize, RMSNormDynamicQuantize, AddLayerNormDynamicQuantize, AddRMSNormDynamicQuantize: the same ops
  over the last axis, with one scale per row, y_scale = max(max|norm|, least) / largest, in float32. ``largest`` is 127
  for int8 and 448 for float8e4m3fn.

The ops on groups of channels always compute in float32, because onnxruntime has no other kernel for
InstanceNormalization.

No own op has the name of a standard op. TensorRT's parser looks only at the name, so it would read such a node as the
standard op.
"""

from __future__ import annotations

from typing import Any

from .norm_op import DOMAIN, NormOp, OpOwner, make_row


def _own_row(op: str, *words: str, since: int = 17, plugin: str | None = None, **more: Any) -> NormOp:
    """Build the row of one of normdeploy's own ops.

    Bodies are written for opset 17 and newer. A kernel has the name of its op. TensorRT's parser reads functions from
    9.0 on.
    """
    if plugin is None:
        kernel = op
    else:
        kernel = plugin
    return make_row(OpOwner.OURS, op, *words, since=since, domains=(DOMAIN,), plugin=kernel, tensorrt=(9, 0), **more)


_AFFINE = "X scale bias"
_GROUPS = "epsilon num_groups"

# {mean} and similar fields stand for reductions over the axes. Their nodes depend on the opset
# (`normdeploy.norms.function_bodies`).
_EPSILON = "given = Constant <value_float: float = @epsilon> () small = Cast <to: int = @stash_type> (given)"
_SCALED = "wide = Cast <to: int = @stash_type> (scale) scaled = Mul (normal, wide)"
_SHIFTED = (
    f"{_SCALED} shift = Cast <to: int = @stash_type> (bias) shifted = Add (scaled, shift) Y = CastLike (shifted, X)"
)
_CENTERED = f"""
    x = Cast <to: int = @stash_type> (X)
    {{mean}} d = Sub (x, mean) q = Mul (d, d)
    {{biased}}
    counted = Shape (X) over = Constant <value_ints: ints = @axes> () each = Gather (counted, over)
    n = ReduceProd <keepdims: int = 0> (each) ddof = Constant <value_int: int = @ddof> () less = Sub (n, ddof)
    many = Cast <to: int = @stash_type> (n) fewer = Cast <to: int = @stash_type> (less) factor = Div (many, fewer)
    variance = Mul (biased, factor) {_EPSILON}"""

_SQUARED = (
    "x = Cast <to: int = @stash_type> (X) of = Constant <value_float: float = 2.0> () two = Cast <to: int ="
    " @stash_type> (of) q = Pow (x, two) {biased} root = Sqrt (biased)"
)

# onnxruntime fuses these nodes to one kernel. With Mul (x, x) instead of Pow, it would not.
_SCALED_RMS = (
    "x = Cast <to: int = @stash_type> ({of}) of = Constant <value_float: float = 2.0> () two = Cast <to: int ="
    f" @stash_type> (of) q = Pow (x, two) {{biased}} {_EPSILON} e = Add (biased, small) r = Sqrt (e) normal = Div (x,"
    f" r) {_SCALED}"
)
_RMS = f"{_SCALED_RMS} Y = CastLike (scaled, X)"
_ON_THE_LAST = "LayerNormalization <axis: int = -1, epsilon: float = @epsilon, stash_type: int = @stash_type>"
# onnxruntime fuses an Add and a LayerNormalization of rank 3 to SkipLayerNormalization, which takes five times as long
# and computes E[x²] − E[x]². It does not fuse them if views stand between them. No view follows the norm, because
# onnxruntime moves a QuantizeLinear before it and has no kernel for views of FP8. The Casts are for half precision:
# onnxruntime would insert more of them around the views.
_SUMMED = (
    "sum = Add (X, residual) wide = Cast <to: int = @stash_type> (sum) front = Constant <value_ints: ints = [0]> ()"
    " longer = Unsqueeze (wide, front) view = Squeeze (longer, front) scaling = Cast <to: int = @stash_type> (scale)"
    f" shift = Cast <to: int = @stash_type> (bias) normal = {_ON_THE_LAST} (view, scaling, shift)"
    " Y = CastLike (normal, X)"
)
# Groups are instances of a view.
_BY_GROUP = (
    "x = Cast <to: int = 1> (X) whole = Shape (X) {view} one = Constant <value_float: float = 1.0> () ones = Expand"
    " (one, groups) zero = Constant <value_float: float = 0.0> () zeros = Expand (zero, groups) instances ="
    " InstanceNormalization <epsilon: float = @epsilon> (rows, ones, zeros) normal = Reshape <allowzero: int = 1>"
    " (instances, whole)"
)
_NUMBER_OF_GROUPS = (
    "number = Constant <value_int: int = @num_groups> () first = Constant <value_ints: ints = [0]> ()"
    " groups = Unsqueeze (number, first)"
)
# The sizes are computed, because a −1 in a Reshape is ambiguous for an empty batch.
_COMPUTED_VIEW = (
    f"samples = Shape <start: int = 0, end: int = 1> (X) rest = Shape <start: int = 1> (X) size = ReduceProd <keepdims:"
    f" int = 1> (rest) {_NUMBER_OF_GROUPS} length = Div (size, groups) view = Concat <axis: int = 0> (samples, groups,"
    " length) rows = Reshape <allowzero: int = 1> (x, view)"
)
# The view is a constant after onnxruntime's constant folding. A computed view takes 2 µs more for each norm, but also
# takes an empty batch, which neither torch's export nor GroupNormalization takes in onnxruntime.
_CONSTANT_VIEW = (
    f"{_NUMBER_OF_GROUPS} rest = Constant <value_ints: ints = [-1]> () view = Concat <axis: int = 0> (first, groups,"
    " rest) rows = Reshape (x, view)"
)
_ADAPTED = (
    _BY_GROUP.replace("{view}", _COMPUTED_VIEW) + " wide = Cast <to: int = 1> (scale) scaled = Mul (normal, wide)"
    " moved = Cast <to: int = 1> (shift) shifted = Add (scaled, moved)"
)
# BatchNormalization of mean 0 and variance 1 scales and shifts channels in one pass, at any rank.
_GROUPED = (
    _BY_GROUP.replace("{view}", _CONSTANT_VIEW) + " wide = Cast <to: int = 1> (scale) moved = Cast <to: int = 1> (bias)"
    " channels = Shape (scale) mean = Expand (zero, channels) variance = Expand (one, channels) shifted ="
    " BatchNormalization <epsilon: float = 0.0> (normal, wide, moved, mean, variance)"
)
_GATED = (
    _SCALED_RMS.replace("{of}", "X").replace("{biased}", "{last}")
    + " gated = Cast <to: int = @stash_type> (gate) opened = Sigmoid (gated)"
)
_QUANTIZED = "Y = QuantizeLinear (result, y_scale, y_zero_point)"


_BY_ROW = (
    "plain = Cast <to: int = 1> (result) magnitude = Abs (plain) {largest}"
    " floor = Constant <value_float: float = @least> () held = Max (top, floor)"
    " limit = Constant <value_float: float = @largest> () y_scale = Div (held, limit)"
    " quotient = Div (plain, y_scale) one = Constant <value_float: float = 1.0> ()"
    " Y = QuantizeLinear (quotient, one, y_zero_point)"
)


def _quantizing_row(norm: str, op: str, inputs: str, attributes: str, outputs: str, body: str) -> NormOp:
    """Build the row of a norm, or of a residual add and a norm, followed by QuantizeLinear.

    Args:
        body: nodes that compute ``result``, the norm. The quantization scale is an input; if it is listed as an output,
            it is computed from each row.
    """
    by_row = "y_scale" in outputs
    return _own_row(
        op,
        "LayerNorm" if "bias" in inputs else "RMSNorm",
        f"{inputs} y_zero_point" if by_row else f"{inputs} y_scale y_zero_point",
        attributes,
        outputs,
        joined=True,
        centered="bias" in inputs,
        typed_by="y_zero_point",
        quantizes=norm,
        body=f"{body} {_BY_ROW if by_row else _QUANTIZED}",
    )


ROWS: tuple[NormOp, ...] = (
    _own_row(
        "RMSNorm",
        "RMSNorm",
        "X scale",
        "axes epsilon stash_type",
        centered=False,
        body=_RMS.replace("{of}", "X"),
    ),
    _own_row(
        "LayerNorm",
        "LayerNorm",
        _AFFINE,
        "axes epsilon ddof stash_type",
        body=f"{_CENTERED} e = Add (variance, small) r = Sqrt (e) normal = Div (d, r) {_SHIFTED}",
    ),
    _own_row(
        "StdNorm",
        "StdNorm",
        _AFFINE,
        "axes epsilon ddof stash_type",
        body=f"{_CENTERED} s = Sqrt (variance) r = Add (s, small) normal = Div (d, r) {_SHIFTED}",
    ),
    _own_row(
        "SimpleNorm",
        "SimpleNorm",
        "X scale",
        "axes epsilon ddof stash_type",
        # Its result changes with an offset of X.
        centered=False,
        # No kernel is needed: TensorRT runs the body.
        plugin="",
        body=f"{_CENTERED} e = Add (variance, small) r = Sqrt (e) normal = Div (x, r) {_SCALED}"
        " Y = CastLike (scaled, X)",
    ),
    _own_row(
        "OuterRMSNorm",
        "RMSNorm",
        "X scale",
        "axes epsilon stash_type",
        centered=False,
        # No kernel is needed: TensorRT runs the body.
        plugin="",
        body=f"{_SQUARED} {_EPSILON} r = Add (root, small) normal = Div (x, r) {_SCALED} Y = CastLike (scaled, X)",
    ),
    _own_row(
        "ClampedRMSNorm",
        "RMSNorm",
        "X scale",
        "axes epsilon stash_type",
        centered=False,
        # No kernel is needed: TensorRT runs the body.
        plugin="",
        body=f"{_SQUARED} {_EPSILON} r = Clip (root, small) normal = Div (x, r) {_SCALED} Y = CastLike (scaled, X)",
    ),
    _own_row(
        "L2Norm",
        "L2Norm",
        "X scale",
        "axes epsilon stash_type",
        centered=False,
        # No kernel is needed: TensorRT runs the body.
        plugin="",
        body=f"x = Cast <to: int = @stash_type> (X) {{length}} {_EPSILON} r = Clip (length, small) normal = Div (x, r)"
        f" {_SCALED} Y = CastLike (scaled, X)",
    ),
    _own_row(
        "ChannelLayerNorm",
        "LayerNorm",
        _AFFINE,
        "epsilon stash_type",
        # Reshape to (N, number of positions, C) and back. The sizes are computed, because a −1 in a Reshape is
        # ambiguous for an empty batch.
        body="whole = Shape (X) head = Shape <start: int = 0, end: int = 2> (X) tail = Shape <start: int = 2> (X)"
        " places = ReduceProd <keepdims: int = 1> (tail) flat = Concat <axis: int = 0> (head, places)"
        " rows = Reshape <allowzero: int = 1> (X, flat) last = Transpose <perm: ints = [0, 2, 1]> (rows)"
        f" normal = {_ON_THE_LAST} (last, scale, bias) first = Transpose <perm: ints = [0, 2, 1]> (normal)"
        " Y = Reshape <allowzero: int = 1> (first, whole)",
    ),
    _own_row(
        "GroupNorm",
        "GroupNorm",
        _AFFINE,
        _GROUPS,
        tuned=True,
        body=f"{_GROUPED} Y = CastLike (shifted, X)",
    ),
    _own_row(
        "AddLayerNorm",
        "LayerNorm",
        "X residual scale bias",
        "epsilon stash_type",
        "Y sum",
        joined=True,
        tuned=True,
        body=_SUMMED,
    ),
    _own_row(
        "AddRMSNorm",
        "RMSNorm",
        "X residual scale",
        "epsilon stash_type",
        "Y sum",
        joined=True,
        centered=False,
        body=f"sum = Add (X, residual) {_RMS.replace('{of}', 'sum').replace('{biased}', '{last}')}",
    ),
    _own_row(
        "ModulatedLayerNorm",
        "LayerNorm",
        "X scale shift",
        "epsilon stash_type",
        joined=True,
        body="one = Constant <value_float: float = 1.0> () unit = CastLike (one, scale) gain = Add (scale, unit)"
        f" Y = {_ON_THE_LAST} (X, gain, shift)",
    ),
    _own_row(
        "GroupNormSiLU",
        "GroupNorm",
        _AFFINE,
        _GROUPS,
        joined=True,
        tuned=True,
        # A standard norm in half precision has a result in half precision, so SiLU comes after CastLike.
        body=f"{_GROUPED} result = CastLike (shifted, X) gate = Sigmoid (result) Y = Mul (result, gate)",
    ),
    _own_row(
        "AdaGroupNorm",
        "GroupNorm",
        "X scale shift",
        _GROUPS,
        joined=True,
        body=f"{_ADAPTED} Y = CastLike (shifted, X)",
    ),
    _own_row(
        "AdaGroupNormSiLU",
        "GroupNorm",
        "X scale shift",
        _GROUPS,
        joined=True,
        body=f"{_ADAPTED} gate = Sigmoid (shifted) product = Mul (shifted, gate) Y = CastLike (product, X)",
    ),
    _own_row(
        "GatedRMSNorm",
        "RMSNorm",
        "X scale gate",
        "epsilon stash_type",
        joined=True,
        centered=False,
        body=f"{_GATED} silu = Mul (gated, opened) product = Mul (scaled, silu) Y = CastLike (product, X)",
    ),
    _own_row(
        "SigmoidGatedRMSNorm",
        "RMSNorm",
        "X scale gate",
        "epsilon stash_type",
        joined=True,
        centered=False,
        body=f"{_GATED} product = Mul (scaled, opened) Y = CastLike (product, X)",
    ),
    _quantizing_row(
        "LayerNormalization",
        "LayerNormQuantize",
        _AFFINE,
        "axis epsilon stash_type",
        "Y",
        f"result = {_ON_THE_LAST.replace('-1', '@axis')} (X, scale, bias)",
    ),
    _quantizing_row(
        f"{DOMAIN}.RMSNorm",
        "RMSNormQuantize",
        "X scale",
        "axes epsilon stash_type",
        "Y",
        _RMS.replace("{of}", "X").replace("Y =", "result ="),
    ),
    _quantizing_row(
        f"{DOMAIN}.AddLayerNorm",
        "AddLayerNormQuantize",
        "X residual scale bias",
        "epsilon stash_type",
        "Y sum",
        _SUMMED.replace("Y =", "result ="),
    ),
    _quantizing_row(
        f"{DOMAIN}.AddRMSNorm",
        "AddRMSNormQuantize",
        "X residual scale",
        "epsilon stash_type",
        "Y sum",
        "sum = Add (X, residual) "
        + _RMS.replace("{of}", "sum").replace("{biased}", "{last}").replace("Y =", "result ="),
    ),
    _quantizing_row(
        "LayerNormalization",
        "LayerNormDynamicQuantize",
        _AFFINE,
        "epsilon stash_type least largest",
        "Y y_scale",
        f"result = {_ON_THE_LAST} (X, scale, bias)",
    ),
    _quantizing_row(
        f"{DOMAIN}.RMSNorm",
        "RMSNormDynamicQuantize",
        "X scale",
        "epsilon stash_type least largest",
        "Y y_scale",
        _RMS.replace("{of}", "X").replace("{biased}", "{last}").replace("Y =", "result ="),
    ),
    _quantizing_row(
        f"{DOMAIN}.AddLayerNorm",
        "AddLayerNormDynamicQuantize",
        "X residual scale bias",
        "epsilon stash_type least largest",
        "Y y_scale sum",
        _SUMMED.replace("Y =", "result ="),
    ),
    _quantizing_row(
        f"{DOMAIN}.AddRMSNorm",
        "AddRMSNormDynamicQuantize",
        "X residual scale",
        "epsilon stash_type least largest",
        "Y y_scale sum",
        "sum = Add (X, residual) "
        + _RMS.replace("{of}", "sum").replace("{biased}", "{last}").replace("Y =", "result ="),
    ),
)
