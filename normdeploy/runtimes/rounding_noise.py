"""Run the float64 reference with random roundings of the size that the model's own dtype causes.

Such runs show how large the error of a correct evaluation may be, and in which outputs.

Every rounded result r becomes r + u·ξ·(|r| + a), where u is the unit roundoff of its type. ξ is uniform in [−1, 1] and
drawn for each element. For operators with several roundings inside (sums, matrix products, norms, transcendental
functions), each operand x also becomes x·(1 + u·ξ). Large parameters, such as weight matrices, are not changed, because
the disturbance of the other operand has the same effect. The term a is 0 except for functions whose common formulas
lose relative accuracy. A sigmoid near 0 has the absolute error of a result near 1 (a = 1), and a gelu of x has the
absolute error of x (a = |x|).

A float32 kernel adds up a row in a few running sums. If the elements of the row are nearly equal (a zero image after a
convolution with a bias), most roundings of the running sums go in the same direction. The error is n·u instead of √n·u
in the worst case (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). This error depends on the
data, so `float32_sum_error` computes it: it adds the row up as such a kernel does.

A Fourier transform is a sum of n products in each bin (`runtimes.fourier_error`). All bins of a frame have the same
rounding error, even bins in which the products cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..dtypes import UNIT_ROUNDOFF
from ..types import Arrays
from . import RunResult
from .data_independent import DataIndependent
from .dtype_widening import widen_tensor
from .fourier_error import INVERSE_SHORT_TIME, find_transformed_axes, frame_roundings
from .resize_error import resize_error_bound
from .torch_runners import Float64Runner, NarrowParameter, WideningInterpreter
from .underflow import round_underflow


def split_op_names(text: str) -> frozenset[str]:
    """Split a text into operator names.

    Returns:
        Set of names.
    """
    return frozenset(text.split())


# Operators that do not round: they move or select elements or change signs.
_EXACT = split_op_names("""
    view _unsafe_view reshape unsqueeze squeeze expand expand_as broadcast_to slice select narrow transpose permute
    movedim t mT numpy_T contiguous clone alias detach flatten unflatten repeat repeat_interleave to _to_copy type_as
    lift_fresh_copy lift_fresh flip roll split split_with_sizes chunk unbind view_as cat stack concat where
    masked_fill gather index index_select take_along_dim embedding scatter index_put index_copy pad constant_pad_nd
    neg abs relu maximum minimum clamp clamp_min clamp_max max min amax amin max_pool1d max_pool2d
    max_pool3d max_pool2d_with_indices hardtanh relu6 sign floor ceil round trunc dropout zeros ones full zeros_like
    ones_like full_like empty empty_like new_zeros new_ones new_full scalar_tensor tril triu diagonal unfold im2col
    view_as_real view_as_complex real imag conj _conj resolve_conj complex pixel_shuffle pixel_unshuffle
    upsample_nearest1d upsample_nearest2d upsample_nearest3d eye arange one_hot isnan eq
    ne lt le gt ge logical_not
    """)
_ONE_ROUNDING = split_op_names("add sub rsub mul div true_divide reciprocal sqrt square leaky_relu prelu threshold")
# Operators that IEEE 754 requires to be correctly rounded. If the result of such an operator fits in a dozen bits, it
# is taken as exact, because a rounded result rarely has so few bits.
_CORRECTLY_ROUNDED = split_op_names("add sub rsub mul div true_divide square")
# Operators whose absolute error is about u·1. The largest value of these functions is 1.
_AS_ONE = split_op_names("""
    sigmoid hardsigmoid softplus elu selu celu expm1 log1p log_sigmoid log_softmax _log_softmax sin cos erf erfc tanh
    atan lstm gru rnn lstm_cell gru_cell rnn_tanh rnn_relu
    """)
# Recurrent operators. Their gates have an absolute error of about u and multiply the state.
_RECURRENT = split_op_names("lstm gru lstm_cell gru_cell")
# Operators whose absolute error is about u·|operand|.
_AS_OPERAND = split_op_names("silu gelu mish hardswish softplus log_sigmoid sin cos")
# Operators that order values. Equal values may come in any order, so noise separates them.
_ORDERS = split_op_names("topk sort argsort argmax argmin kthvalue")
_ALIASES = {"special_expit": "sigmoid", "special_erf": "erf", "special_erfc": "erfc", "special_expm1": "expm1"}
_ALIASES |= {"special_log1p": "log1p", "special_log_softmax": "log_softmax", "special_softmax": "softmax"}
# Absolute noise that separates equal zeros. It is too small to change any other number.
_APART = 1e-300
# Operators that return numbers below the smallest normal number even for ordinary operands.
_UNDERFLOWING = split_op_names("exp exp2 softmax _softmax sigmoid mul div true_divide pow square prod silu gelu erfc")
_NORMS = split_op_names("layer_norm native_layer_norm group_norm native_group_norm instance_norm")
_RESIZES = split_op_names("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d")
_ANTIALIASED = split_op_names("_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa")
_SUMS = split_op_names("sum mean adaptive_avg_pool2d adaptive_avg_pool3d")
# Maximum number of elements of a parameter that is disturbed.
_SMALL = 2**16
FLOAT16 = UNIT_ROUNDOFF["float16"]
FLOAT32 = UNIT_ROUNDOFF["float32"]
_SHORT = {FLOAT32: torch.float16, FLOAT16: torch.bfloat16}
LANES = 8


class RoundingRunner(Float64Runner):
    """``Float64Runner`` that can also run with random roundings."""

    def run_rounded(self, feeds: Arrays, seed: int, half: torch.dtype | None = None) -> RunResult:
        """Run the model once with random roundings, different ones for each ``seed``.

        Args:
            half: for files in half precision, the dtype whose roundings replace those of float32. None uses the
                roundings of the model's own dtypes.

        Returns:
            Output name -> array; floating outputs are float64.

        Raises:
            InputError, NormdeployError: as for ``infer``.
        """
        plain = self._interpreter
        # In half precision, kernels differ in which intermediate results they round.
        if half is None:
            settled = self._settled
        else:
            settled = DataIndependent[torch.fx.Node]()
        self._interpreter = partial(_RoundingInterpreter, half=half, seed=seed, settled=settled)  # type: ignore[assignment]
        try:
            return self.infer(feeds)
        finally:
            self._interpreter = plain


class _RoundingInterpreter(WideningInterpreter):
    """Interpreter that disturbs operands and results of each operator by random roundings."""

    def __init__(
        self, module: torch.fx.GraphModule, half: torch.dtype | None, seed: int, settled: DataIndependent[torch.fx.Node]
    ) -> None:
        super().__init__(module, settled)
        self._half = half
        self._op = ""
        self._unit = 0.0
        # SFC64 is three times as fast as torch's generator.
        self._rng = np.random.Generator(np.random.SFC64(seed))

    def run_node(self, n: torch.fx.Node) -> Any:
        """Set operator and unit roundoff for the noise, then run the node.

        Returns:
            The node's value.
        """
        schema = getattr(n.target, "_schema", None)
        # An operator that writes to its operand has no separate result to disturb.
        if schema is None or schema.is_mutable:
            self._op = ""
        else:
            self._op = schema.name.partition("::")[2].removesuffix("_copy")
        self._op = _ALIASES.get(self._op, self._op)
        if self._op in _ORDERS and isinstance(n.args[0], torch.fx.Node):
            value = n.args[0].meta.get("val")
        else:
            value = n.meta.get("val")
        if self._op in _EXACT:
            self._unit = 0.0
        else:
            self._unit = self._coarsest_unit(value)
        return super().run_node(n)

    def _widen_parameter(self, value: Any) -> Any:
        if not self._op or not self._unit or self._op in _ONE_ROUNDING or self._op == "cumsum":
            return super()._widen_parameter(value)
        return self._add_operand_noise(value)

    def _add_operand_noise(self, value: Any) -> Any:
        if isinstance(value, NarrowParameter):
            value, small = widen_tensor(value.tensor), value.tensor.numel() <= _SMALL
            if small and value.is_floating_point():
                return self._rounding_noise(value).add_(value)
            return value
        if isinstance(value, list | tuple):
            return [self._add_operand_noise(each) for each in value]
        if isinstance(value, torch.Tensor) and value.is_complex():
            return value + self._complex_rounding_noise(value, value.abs())
        if not _is_floating_tensor(value):
            return value
        moved = self._rounding_noise(value).add_(value)
        if self._op in _ORDERS:
            return moved.add_(_APART * self._draw_uniform(value))
        return moved

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and add its roundings to the result.

        Returns:
            The disturbed result.
        """
        result = super().call_function(target, args, kwargs)
        if self._op in _ORDERS:
            return result
        if not self._op or not self._unit:
            return result
        # Each partial sum is rounded, and its error stays in all later sums.
        if self._op == "cumsum":
            return result + super().call_function(target, (self._rounding_noise(result), *args[1:]), kwargs)
        # The inverse transform is linear in its frames: it divides the sum of the overlapping frames by the sum of the
        # overlapping windows.
        if self._op == INVERSE_SHORT_TIME:
            noise = self._complex_rounding_noise(args[0], frame_roundings(args[0], args[0], [args[0].dim() - 2]))
            return result + super().call_function(target, (noise, *args[1:]), kwargs)
        if (bins := find_transformed_axes(self._op, args, kwargs, result)) is not None:
            level = result.abs() + frame_roundings(args[0], result, bins)
            return result + (
                self._complex_rounding_noise(result, level) if result.is_complex() else self._rounding_noise(level)
            )
        if isinstance(result, torch.Tensor) and result.is_complex():
            return result + self._complex_rounding_noise(result, result.abs())
        if self._op in _NORMS and args[0].is_floating_point():
            # The native forms of a norm also return the statistics.
            if isinstance(result, tuple):
                result = (result[0] + self._statistics_noise(args, result[0]), *result[1:])
            else:
                result = result + self._statistics_noise(args, result)
        elif self._op in _RESIZES | _ANTIALIASED and args[0].is_floating_point():
            result = result + self._coordinate_noise(args[0], result)
        elif self._op in _SUMS and _is_floating_tensor(result) and result.numel():
            result = result + self._rounding_noise(result.abs() * sum_roundings(args[0].numel() / result.numel()))
            # The digit in "…2d" is the number of spatial dims.
            pooled = list(range(-int(self._op[-2]), 0)) if "pool" in self._op else []
            if self._unit == FLOAT32 and _is_floating_tensor(args[0]) and all(result.shape[a] == 1 for a in pooled):
                axes = pooled or (args[1] if len(args) > 1 and args[1] is not None else ())
                lost = float32_sum_error_along(
                    args[0].detach().numpy(), [axes] if isinstance(axes, int) else list(axes), self._op != "sum"
                )
                result = result + torch.from_numpy(np.asarray(lost)).reshape(result.shape) * self._draw_uniform(result)
        if isinstance(result, tuple | list):
            return type(result)(self._add_result_noise(value, args) for value in result)
        return self._add_result_noise(result, args)

    def _add_result_noise(self, value: Any, args: Any) -> Any:
        """Add the roundings of the current operator, with arguments ``args``, to one of its results."""
        if not _is_floating_tensor(value):
            return value
        size = value
        if self._op in _AS_OPERAND | _AS_ONE:
            size = value.abs() + (args[0].abs() if self._op in _AS_OPERAND else 0.0)
            if self._op in _AS_ONE:
                size += 1.0
            if self._op in _RECURRENT:
                size += _largest_initial_state(self._op, args)
        elif self._op == "glu":
            # The sigmoid has an absolute error of about u and multiplies the other half of the operand.
            size = value.abs() + args[0].chunk(2, args[1] if len(args) > 1 else -1)[0].abs()
        moved = self._rounding_noise(size)
        # A factor such as 0.1 is itself rounded, so the result is not exact.
        exact = all(float(np.float32(a)) == a for a in args if isinstance(a, float))
        if self._op in _CORRECTLY_ROUNDED and self._unit in _SHORT and exact:
            moved.masked_fill_(value == value.to(_SHORT[self._unit]).to(value.dtype), 0.0)
        moved.add_(value)
        if self._op in _UNDERFLOWING:
            round_underflow(moved.detach().numpy(), self._unit, self._rng)
        return moved

    def _coordinate_noise(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Draw the error that rounding of the source coordinates causes in a resize. Kernels compute coordinates in
        float32 for any data type.
        """
        unit = min(self._unit, FLOAT32)
        antialias = self._op in _ANTIALIASED
        off = torch.from_numpy(resize_error_bound(x.detach().numpy(), list(result.shape), unit, antialias=antialias))
        return off * self._draw_uniform(off)

    def _statistics_noise(self, args: Any, result: torch.Tensor) -> torch.Tensor:
        """Draw the error that rounded statistics cause in a norm.

        The error is the same for the whole row, even if the row's elements differ little.

        Returns:
            Error, with the shape of ``result``.
        """
        x = args[0]
        second = args[1]
        if self._op in ("layer_norm", "native_layer_norm"):
            rows = x.reshape(*x.shape[: x.dim() - len(second)], -1)
            if len(args) > 2:
                weight = args[2]
            else:
                weight = None
        else:
            native = self._op == "native_group_norm"
            if self._op == "instance_norm":
                groups = x.shape[1]
            elif native:
                groups = args[6]
            else:
                groups = second
            rows = x.reshape(x.shape[0], groups, -1)
            scale = second if self._op == "instance_norm" or native else args[2] if len(args) > 2 else None
            weight = None if scale is None else scale.reshape(-1, *[1] * (x.dim() - 2))
        if not rows.numel():
            return torch.zeros_like(result)
        # instance_norm also has a momentum, whose argument precedes the epsilon.
        floats = [a for a in args[3:] if isinstance(a, float)]
        if floats:
            epsilon = floats[-1]
        else:
            epsilon = 1e-5
        off, scaled = (torch.from_numpy(v) for v in statistics_error(rows.detach().numpy(), epsilon, self._unit))
        centered = rows - rows.mean(-1, keepdim=True)
        away = (
            (off * self._draw_uniform(off) + centered * scaled * self._draw_uniform(scaled))
            .nan_to_num_(0.0, 0.0, 0.0)
            .reshape(result.shape)
        )
        if weight is None:
            return away
        return away * weight

    def _rounding_noise(self, value: torch.Tensor) -> torch.Tensor:
        """Return u·ξ·value, with ξ in [−1, 1] drawn for each element. Return 0 for values that are not finite, because
        rounding does not change them.
        """
        drawn = torch.from_numpy(np.asarray(self._rng.random(tuple(value.shape))))
        return drawn.sub_(0.5).mul_(2 * self._unit).mul_(value).nan_to_num_(0.0, 0.0, 0.0)

    def _complex_rounding_noise(self, value: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Draw as `_rounding_noise` does, but separately for real and imaginary part. A complex product rounds both
        parts in proportion to |value|.
        """
        parts = [self._rounding_noise(torch.where(torch.isfinite(value), level, 0.0)) for _ in range(2)]
        return torch.complex(*parts)

    def _draw_uniform(self, value: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self._rng.random(tuple(value.shape)))).mul_(2).sub_(1)

    def _coarsest_unit(self, values: Any) -> float:
        """Return the unit roundoff of the coarsest floating dtype among a node's results; 0 if no result is
        floating.
        """
        if isinstance(values, list | tuple):
            every = values
        else:
            every = [values]
        kinds = [
            v.dtype.to_real()
            for v in every
            if _is_floating_tensor(v) or (isinstance(v, torch.Tensor) and v.is_complex())
        ]
        wide = (torch.float32, torch.float64)
        return max(
            (torch.finfo(self._half if self._half is not None and k in wide else k).eps / 2 for k in kinds), default=0.0
        )


def sum_roundings(terms: float) -> float:
    """Estimate the rounding error of n terms of equal size that are added one after another.

    Returns:
        √n/3 (root mean square), at least 1, in units of u times the result.
    """
    return float(max(1.0, terms**0.5 / 3))


def float32_sum_error(rows: np.ndarray) -> np.ndarray:
    """Compute the error of float32 sums over the last axis.

    The sum is taken in `LANES` running sums, as kernels for vectors of 256 bits do. onnxruntime's InstanceNormalization
    loses just as much.

    Returns:
        Absolute errors in float64: shape (…, n) gives (…, 1). The error is 0 if a sum is not finite.
    """
    n = rows.shape[-1]
    if not n:
        return np.zeros((*rows.shape[:-1], 1))
    with np.errstate(all="ignore"):
        padded = np.zeros((*rows.shape[:-1], -(-n // LANES) * LANES), np.float32)
        padded[..., :n] = rows
        sums = np.add.accumulate(padded.reshape(*rows.shape[:-1], -1, LANES), axis=-2, dtype=np.float32)[..., -1, :]
        total = np.add.accumulate(sums, axis=-1, dtype=np.float32)[..., -1:].astype(np.float64)
        off = np.abs(total - padded.sum(-1, dtype=np.float64, keepdims=True))
    return np.where(np.isfinite(off), off, 0.0)


def float32_sum_error_along(x: np.ndarray, axes: Sequence[int], mean: bool) -> np.ndarray:
    """Compute `float32_sum_error` of a sum or mean over ``axes``; empty ``axes`` mean all axes.

    Returns:
        One number for each result, in the order of the other axes.
    """
    if x.ndim:
        over = sorted({a % x.ndim for a in axes} or range(x.ndim))
    else:
        over = []
    kept = [a for a in range(x.ndim) if a not in over]
    rows = x.transpose([*kept, *over]).reshape(*(x.shape[a] for a in kept), -1)
    return float32_sum_error(rows)[..., 0] / (max(rows.shape[-1], 1) if mean else 1)


def statistics_error(rows: np.ndarray, epsilon: float, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Bound the error of a row's normalized elements if the statistics are computed in a dtype of unit roundoff
    ``unit``.

    Args:
        rows: (…, n), normalized over the last axis.

    Returns:
        Two arrays (…, 1): an error that all elements share, and an error that is multiplied by x − mean.
    """
    n = rows.shape[-1]
    with np.errstate(all="ignore"):
        mean = rows.mean(-1, keepdims=True)
        variance = rows.var(-1, keepdims=True)
        spread = np.sqrt(variance + epsilon)
        away = unit * np.abs(mean) * sum_roundings(n)
        more = np.zeros_like(mean)
        if unit == FLOAT32:
            away = np.maximum(away, float32_sum_error(rows) / n)
            more = float32_sum_error(np.square(rows - mean)) / n / (2 * (variance + epsilon))
        return away / spread, more / spread


def _largest_initial_state(op: str, args: Any) -> float:
    """Return the largest finite magnitude in the initial states of a recurrent op.

    The states are the op's second operand: a tensor, or a list of two tensors. The LSTM of
    `normdeploy.loading.recurrent_ops` takes the two tensors as separate operands instead.
    """
    if op == "lstm" and isinstance(args[2], torch.Tensor):
        states = args[1:3]
    else:
        states = tree_leaves(args[1])
    finite = [torch.nan_to_num(s.abs(), 0.0, 0.0, 0.0) for s in states if _is_floating_tensor(s) and s.numel()]
    return max((float(s.max()) for s in finite), default=0.0)


def _is_floating_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
