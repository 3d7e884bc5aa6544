"""Build small models that compute one norm in every form that a file can hold, and the norm's float64 result.

    standard    the op itself, between transposes if the normalized axis is not the last
    decomposed  the nodes that exporters write: mean, difference, square, mean, root, quotient, scale, shift
    instance    GroupNorm: Reshape to (N, groups, rest), InstanceNormalization with scale 1 and shift 0, Reshape back,
                and scale and shift as one BatchNormalization of mean 0 and variance 1
                LayerNorm: Reshape to (N, rows, rest), InstanceNormalization, Reshape back, scale and shift
    layer       GroupNorm and InstanceNorm: Reshape to (N, groups, rest), LayerNormalization over the last axis with a
                scale that is a single 1, Reshape back, scale and shift
    narrow      LayerNorm and RMSNorm: the op with a scale that is a single 1, then Mul and Add
    sum         ResidualLayerNorm (LayerNorm of x + r): the sum is written as Sum, because onnxruntime would fuse an Add
                with the norm

Sources: GroupNorm is Wu and He, arXiv 1803.08494. InstanceNorm is Ulyanov et al., arXiv 1607.08022. GroupNorm and
InstanceNorm are layer norms (Ba et al., arXiv 1607.06450) of the reshaped tensor. RMSNorm is Zhang and Sennrich, arXiv
1910.07467.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnx.parser

from ...dtypes import UNIT_ROUNDOFF
from ...evaluate import evaluator
from ...types import Array

FORMS = ("standard", "decomposed", "instance", "layer", "narrow", "sum")
KINDS = ("LayerNorm", "RMSNorm", "ChannelLayerNorm", "BatchLayerNorm", "GroupNorm", "InstanceNorm", "ResidualLayerNorm")
_TYPES = {"float32": "float", "float16": "float16", "float64": "double"}
_OF_ROWS = ("LayerNorm", "RMSNorm", "ResidualLayerNorm")
_ACROSS = {"ChannelLayerNorm": 1, "BatchLayerNorm": 0}
_RMS_OPSET = 23
_OPSET = 21


@dataclass(frozen=True)
class NormCase:
    """Norm and the shape of its input.

    Attributes:
        axis: first normalized axis of LayerNorm, ResidualLayerNorm and RMSNorm. The other kinds ignore it: for example,
            ChannelLayerNorm always normalizes axis 1 and BatchLayerNorm axis 0.
        groups: number of groups of GroupNorm.
        epsilon: a number that float32 holds exactly, because ONNX attributes are float32.
        dtype: "float32", "float16" or "float64".
    """

    kind: str
    shape: tuple[int, ...]
    axis: int = -1
    groups: int = 1
    epsilon: float = 2.0**-17
    dtype: str = "float32"

    def __str__(self) -> str:
        by = {"GroupNorm": f", {self.groups} groups", **dict.fromkeys(_OF_ROWS, f", axis {self.axis}")}.get(
            self.kind, ""
        )
        return (
            f"{self.kind} of {'×'.join(map(str, self.shape))}{by}{'' if self.dtype == 'float32' else f', {self.dtype}'}"
        )

    @property
    def distinct_forms(self) -> tuple[str, ...]:
        """Return the names of the forms of this kind of norm, without forms whose models would be equal."""
        more = {
            "LayerNorm": ("instance", "narrow"),
            "RMSNorm": ("narrow",),
            "GroupNorm": ("instance", "layer"),
            "InstanceNorm": ("layer",),
            "ResidualLayerNorm": ("sum",),
        }
        return ("standard", "decomposed", *more.get(self.kind, ()))

    def scale_and_shift(self) -> tuple[Array, Array]:
        """Draw random values for scale and shift.

        Returns:
            Two float64 arrays of numbers that ``dtype`` holds exactly. Their shape is the normalized shape, or (C, 1,
            ...) for norms with one number per channel.
        """
        rank = len(self.shape)
        if self.kind in _OF_ROWS:
            shape = self.shape[self.axis % rank :]
        else:
            shape = (self.shape[1], *(1,) * (rank - 2))
        rng = np.random.default_rng(0)
        gamma = rng.uniform(0.5, 1.5, shape)
        if self.kind == "RMSNorm":
            beta = np.zeros(shape)
        else:
            beta = rng.standard_normal(shape)
        return gamma.astype(self.dtype).astype(np.float64), beta.astype(self.dtype).astype(np.float64)

    def feeds(self, offset: float = 0.0, seed: int = 1) -> dict[str, Array]:
        """Draw an input of standard normal numbers plus ``offset``.

        Returns:
            {"x": array of ``shape`` in ``dtype``}.
        """
        values = np.random.default_rng(seed).standard_normal(self.shape, np.float32) + np.float32(offset)
        return {"x": values.astype(self.dtype)}

    def evaluate_float64(self, x: Array) -> Array:
        """Evaluate the norm of ``x`` (ResidualLayerNorm: of 2·x) by its formula.

        Returns:
            A float64 array of the shape of ``x``.
        """
        gamma, beta = self.scale_and_shift()
        if self.kind == "RMSNorm":
            op = "RMSNormalization"
        else:
            op = "LayerNormalization"
        rows = self._normalized_rows(x)
        (normal,) = evaluator.evaluate_node(op, [rows, np.ones(1)], {"epsilon": self.epsilon}, opset=_RMS_OPSET)
        assert normal is not None
        if self.kind in _ACROSS:
            normal = normal.reshape([x.shape[a] for a in self._permutation_to_last]).transpose(
                np.argsort(self._permutation_to_last)
            )
        return normal.reshape(x.shape) * gamma + beta

    def allowed_error(self, x: Array) -> float:
        """Bound the error of a correct implementation on ``x``.

        The error of the statistics is at most a few roundoff units of the largest element, and the result is rounded
        once more (`normdeploy.compare.rewrite_errors`).

        Returns:
            The absolute error that is allowed.
        """
        rows = self._normalized_rows(x)
        spread = np.square(rows if self.kind == "RMSNorm" else rows - rows.mean(axis=1, keepdims=True)).mean(axis=1)
        steep = float((1 + np.abs(rows).max(axis=1) / np.sqrt(spread + self.epsilon)).max())
        unit = UNIT_ROUNDOFF[self.dtype]
        return 8 * unit * steep * float(np.abs(self.scale_and_shift()[0]).max()) + unit * float(
            np.abs(self.evaluate_float64(x)).max()
        )

    def _normalized_rows(self, x: Array) -> Array:
        """Return the input in float64 as a matrix whose rows are normalized separately."""
        x = np.asarray(x, np.float64) * (2 if self.kind == "ResidualLayerNorm" else 1)
        if self.kind in _ACROSS:
            return x.transpose(self._permutation_to_last).reshape(-1, x.shape[_ACROSS[self.kind]])
        if self.kind in _OF_ROWS:
            lead = x.shape[: self.axis % x.ndim]
        else:
            lead = (x.shape[0], self._rows_per_sample)
        return x.reshape(math.prod(lead), -1)

    @property
    def _permutation_to_last(self) -> list[int]:
        """Return the permutation that moves the normalized axis of ChannelLayerNorm or BatchLayerNorm to the end."""
        own = _ACROSS[self.kind]
        return [*(a for a in range(len(self.shape)) if a != own), own]

    @property
    def _rows_per_sample(self) -> int:
        """Return the number of rows that are normalized separately in each sample."""
        if self.kind == "LayerNorm":
            return math.prod(self.shape[1 : self.axis % len(self.shape)])
        if self.kind == "InstanceNorm":
            return self.shape[1]
        return self.groups

    def make_model(self, form: str) -> onnx.ModelProto:
        """Build a model that computes the norm in ``form``.

        Returns:
            A model with input ``x`` and output ``y``.

        Raises:
            ValueError: the norm has no such form.
        """
        if form not in self.distinct_forms:
            raise ValueError(f"{self.kind} has no form {form!r}; it has {', '.join(self.distinct_forms)}")
        body = {
            "standard": self._standard_body,
            "decomposed": self._primitives_body,
            "narrow": self._unit_scale_body,
            "sum": self._residual_sum_body,
        }.get(form, partial(self._regrouped_body, form))()
        if self.kind == "RMSNorm":
            opset = _RMS_OPSET
        else:
            opset = _OPSET
        tensor = f"{_TYPES[self.dtype]}[{','.join(map(str, self.shape))}]"
        proto = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": {opset}]> norm ({tensor} x) => ({tensor} y) {{ {body} }}'
        )
        read = {name for node in proto.graph.node for name in node.input}
        constants = {name: value for name, value in self._model_constants().items() if name in read}
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
        return proto

    def _model_constants(self) -> dict[str, Array]:
        gamma, beta = (p.astype(self.dtype) for p in self.scale_and_shift())
        kind = np.dtype(self.dtype)
        rank = len(self.shape)
        regrouped = self.kind in ("GroupNorm", "InstanceNorm")
        if self.kind in _ACROSS:
            axes = [_ACROSS[self.kind]]
        elif regrouped:
            axes = [-1]
        else:
            axes = [*range(self.axis % rank - rank, 0)]
        return {
            "gamma": gamma,
            "beta": beta,
            "scale": gamma.reshape(-1),
            "shift": beta.reshape(-1),
            "one": np.ones(1, kind),
            "ones": np.ones(self.shape[_ACROSS[self.kind]] if self.kind in _ACROSS else self._rows_per_sample, kind),
            "zeros": np.zeros(self._rows_per_sample, kind),
            "eps": np.array(self.epsilon, kind),
            "axes": np.array(axes, np.int64),
            "rows": np.array([0, self._rows_per_sample, -1], np.int64),
            "whole": np.array(self.shape, np.int64),
            "mean": np.zeros_like(gamma.reshape(-1)),
            "variance": np.ones_like(gamma.reshape(-1)),
        }

    def _standard_body(self) -> str:
        eps = f"epsilon = {self.epsilon}"
        if self.kind == "ResidualLayerNorm":
            return f"{self._residual_body('Add')} y = LayerNormalization <axis = {self.axis}, {eps}> (t, gamma, beta)"
        if self.kind == "LayerNorm":
            return f"y = LayerNormalization <axis = {self.axis}, {eps}> (x, gamma, beta)"
        if self.kind == "RMSNorm":
            return f"y = RMSNormalization <axis = {self.axis}, {eps}> (x, gamma)"
        if self.kind in _ACROSS:
            there = self._permutation_to_last
            back = [int(a) for a in np.argsort(self._permutation_to_last)]
            if self.kind == "ChannelLayerNorm":
                return (
                    f"t = Transpose <perm = {there}> (x) n = LayerNormalization <axis = -1, {eps}> (t, scale, shift)"
                    f" y = Transpose <perm = {back}> (n)"
                )
            return (
                f"t = Transpose <perm = {there}> (x) n = LayerNormalization <axis = -1, {eps}> (t, ones)"
                f" w = Transpose <perm = {back}> (n) s = Mul(w, gamma) y = Add(s, beta)"
            )
        if self.kind == "GroupNorm":
            return f"y = GroupNormalization <num_groups = {self.groups}, {eps}> (x, scale, shift)"
        return f"y = InstanceNormalization <{eps}> (x, scale, shift)"

    @staticmethod
    def _residual_body(op: str) -> str:
        """Write x + x for the residual sum.

        onnxruntime's fused kernel needs two different tensors. Therefore the second x goes through a Reshape, which
        onnxruntime does not remove.
        """
        return f"again = Reshape(x, whole) t = {op}(x, again)"

    def _residual_sum_body(self) -> str:
        return (
            f"{self._residual_body('Sum')} y = LayerNormalization <axis = {self.axis}, epsilon = "
            f"{self.epsilon}> (t, gamma,"
            " beta)"
        )

    def _unit_scale_body(self) -> str:
        if self.kind == "RMSNorm":
            core = "RMSNormalization"
        else:
            core = "LayerNormalization"
        if self.kind == "RMSNorm":
            shift = "Identity(s)"
        else:
            shift = "Add(s, beta)"
        return f"n = {core} <axis = {self.axis}, epsilon = {self.epsilon}> (x, one) s = Mul(n, gamma) y = {shift}"

    def _primitives_body(self) -> str:
        if self.kind == "RMSNorm":
            return "q = Mul(x, x) v = ReduceMean(q, axes) e = Add(v, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, gamma)"
        body = (
            "u = ReduceMean({of}, axes) d = Sub({of}, u) q = Mul(d, d) v = ReduceMean(q, axes) e = Add(v, eps) r ="
            " Sqrt(e) n = Div(d, r)"
        )
        if self.kind in ("GroupNorm", "InstanceNorm"):
            body = f"g = Reshape(x, rows) {body.format(of='g')} w = Reshape(n, whole) s = Mul(w, gamma)"
        elif self.kind == "ResidualLayerNorm":
            body = f"{self._residual_body('Add')} {body.format(of='t')} s = Mul(n, gamma)"
        else:
            body = f"{body.format(of='x')} s = Mul(n, gamma)"
        return f"{body} y = Add(s, beta)"

    def _regrouped_body(self, form: str) -> str:
        core = {
            "instance": f"InstanceNormalization <epsilon = {self.epsilon}> (g, ones, zeros)",
            "layer": f"LayerNormalization <axis = -1, epsilon = {self.epsilon}> (g, one)",
        }[form]
        affine = "s = Mul(w, gamma) y = Add(s, beta)"
        # `forms.group_norm` also writes scale and shift as a BatchNormalization.
        if form == "instance" and self.kind == "GroupNorm" and self.dtype != "float64":
            affine = "y = BatchNormalization <epsilon = 0.0> (w, scale, shift, mean, variance)"
        return f"g = Reshape(x, rows) n = {core} w = Reshape(n, whole) {affine}"
