"""What the kernels are tried on: op, shape, data; and how far float32 arithmetic may be from the float64 reference,
with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # unit roundoff
LEAST = {"fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}  # the smallest number above 0
U = UNIT["fp32"]
GATED = ("GatedRMSNorm", "SigmoidGatedRMSNorm")


@dataclass(frozen=True)
class Case:
    """``data``: normal; offset (1e4 ± 1); constant (each row one value); outlier (one element of 1e3 in each row, the
    first)."""

    op: str
    shape: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    data: str = "normal"
    parameters: str = ""  # the type of gamma and beta, "" as x
    tile: tuple[int, ...] | None = None

    def __str__(self) -> str:
        parts = [
            self.op,
            "x".join(map(str, self.shape)),
            self.dtype + self.parameters,
            self.data,
            *map(str, self.attributes.values()),
        ]
        return "-".join(parts + (["tile" + "x".join(map(str, self.tile))] if self.tile else []))

    def dtypes(self) -> list[str]:
        kinds = {"T": self.dtype, "P": self.parameters or self.dtype, "F": "fp32"}
        return [kinds[kind] for kind in self._op.types[: len(self._op.inputs)]]

    @property
    def _op(self) -> Any:
        from normdeploy_plugins.ops import BY_NAME

        return BY_NAME[self.op]

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """The op's inputs in float64."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(self.shape)
        if self.data == "offset":
            x += 1e4
        elif self.data == "constant":
            x = np.broadcast_to(rng.uniform(-1e4, 1e4, self.shape[:1] + (1,) * (x.ndim - 1)), self.shape).copy()
        elif self.data == "outlier":
            x.reshape(self.shape[0], -1)[:, :1] = 1e3
        small = {"gamma": self._parameter_shape, "beta": self._parameter_shape}
        if self.op == "ModulatedLayerNorm":
            small = dict.fromkeys(("scale", "shift"), lambda: (self.shape[0], 1, self.shape[-1]))
        elif self.op.startswith("AdaGroupNorm"):
            small = dict.fromkeys(("scale", "shift"), self._data_shape)
        elif self.op == "ScaleShift":
            small = dict.fromkeys(("scale", "shift"), self._parameter_shape)
        arrays = {"x": x, "residual": rng.standard_normal(self.shape), "y_scale": np.array([0.02])}
        if "gate" in self._op.inputs:
            arrays["gate"] = 3 * rng.standard_normal(self.shape)
        arrays |= {name: rng.standard_normal(shape()) for name, shape in small.items()}
        if "statistics" in self._op.inputs:
            arrays["statistics"] = self._statistics(x)
        return [arrays[name] for name in self._op.inputs]

    def _statistics(self, x: np.ndarray) -> np.ndarray:
        from normdeploy_plugins.statistics import reference

        a = self.attributes
        stored = quantize(x, self.dtype)
        return reference(
            stored,
            axis=a.get("axis", 1),
            groups=a.get("num_groups", 1),
            splits=3,
            channels_last=a.get("channels_last", 0),
        )

    def unquantized(self) -> Case:
        """The norm alone of a case whose result is quantized."""
        op = self.op.removesuffix("Quantize").removesuffix("Dynamic")
        attributes = {"ddof": 0} if op == "LayerNorm" else {} if "Layer" in op else {"offset": 0.0}
        attributes |= {name: value for name, value in self.attributes.items() if name not in ("to", "least")}
        return Case(op, self.shape, attributes, self.dtype, self.data, self.parameters)

    def _data_shape(self) -> tuple[int, ...]:
        """The shape of an adaptive norm's scale and shift."""
        return self.shape if self.attributes["spatial"] else (*self.shape[:2], *(1,) * (len(self.shape) - 2))

    def _parameter_shape(self) -> tuple[int, ...]:
        if self.op.endswith("Quantize"):
            return self.unquantized()._parameter_shape()
        if self.op in ("LayerNorm", "LayerNormApply", "RMSNorm", "StdNorm"):
            return self.shape[self.attributes["axis"] :]
        if self.op == "ScaleShift":
            return (self.shape[self.attributes["axis"]],)
        last = self.op in ("AddLayerNorm", "AddRMSNorm", *GATED) or self.attributes.get("channels_last")
        return (self.shape[-1 if last else 1],)


# 1: one element; 7: below every vector; 1000: vectors but no power of 2; 1001: no vectors; 4096: a power of 2; the last
# two: looped
ROWS = (1, 7, 1000, 1001, 4096, 65_536, 200_000)
EPS = {"epsilon": 1e-5}
# every op over rows, with the dims that stand before the row and its attributes
ROW_OPS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "LayerNorm": ((2,), EPS | {"axis": -1, "ddof": 0}),
    "RMSNorm": ((2,), EPS | {"axis": -1, "offset": 1.0}),
    "AddLayerNorm": ((2,), EPS),
    "AddRMSNorm": ((2,), EPS | {"offset": 0.0}),
    "ModulatedLayerNorm": ((2, 1), EPS),
    "GatedRMSNorm": ((2,), EPS),
    "SigmoidGatedRMSNorm": ((2,), EPS),
    "StdNorm": ((2,), EPS | {"axis": -1, "ddof": 0}),
    "InstanceNorm": ((1, 2), EPS),
    "LayerNormApply": ((2,), EPS | {"axis": -1}),
    "LayerNormQuantize": ((2,), EPS | {"axis": -1, "to": "int8"}),
    "RMSNormQuantize": ((2,), EPS | {"axis": -1, "to": "fp8"}),
    "AddLayerNormQuantize": ((2,), EPS | {"to": "fp8"}),
    "AddRMSNormQuantize": ((2,), EPS | {"to": "int8"}),
    "LayerNormDynamicQuantize": ((2,), EPS | {"axis": -1, "least": 0.0, "to": "int8"}),
    "RMSNormDynamicQuantize": ((2,), EPS | {"axis": -1, "least": 1e-5, "to": "fp8"}),
    "AddLayerNormDynamicQuantize": ((2,), EPS | {"least": 0.0, "to": "fp8"}),
    "AddRMSNormDynamicQuantize": ((2,), EPS | {"least": 1e-5, "to": "int8"}),
}


def sweep(dtypes: int = 1) -> list[Case]:
    """Every op over rows at every length, in that many of the types: where it is one, each op meets each type at some
    length."""
    names = tuple(UNIT)
    return [
        Case(op, (*before, n), attributes, dtype := names[(i + j + k) % 3], "offset" if dtype == "fp32" else "normal")
        for i, (op, (before, attributes)) in enumerate(ROW_OPS.items())
        for j, n in enumerate(ROWS)
        for k in range(dtypes)
    ]


def quantize(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as ``dtype`` holds it, in float64."""
    import ml_dtypes

    return x.astype({"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]).astype(np.float64)


def by_rows(case: Case, x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """x as (rows, n), a row being what one mean is taken over, and the way back from (rows, 1) or (rows, n) to x's
    shape."""
    last = case.attributes.get("channels_last")
    if "GroupNorm" in case.op:
        first = np.moveaxis(x, -1, 1) if last else x
        rows = first.reshape(x.shape[0] * case.attributes["num_groups"], -1)
        back = lambda r: np.broadcast_to(r, rows.shape).reshape(first.shape)  # noqa: E731
        return rows, (lambda r: np.moveaxis(back(r), 1, -1)) if last else back
    if case.op == "ChannelLayerNorm":
        moved = np.moveaxis(x, 1, -1)
        return moved.reshape(-1, x.shape[1]), lambda r: np.moveaxis(
            np.broadcast_to(r, (moved.size // x.shape[1], x.shape[1])).reshape(moved.shape), -1, 1
        )
    axis = 2 if case.op == "InstanceNorm" else case.attributes.get("axis", -1)
    rows = x.reshape(int(np.prod(x.shape[:axis])), -1)
    return rows, lambda r: np.broadcast_to(r, rows.shape).reshape(x.shape)


def affine_of(case: Case, stored: dict[str, np.ndarray], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """|factor| and |shift| of the affine, as they meet x."""
    if case.op == "ModulatedLayerNorm":
        return np.abs(1 + stored["scale"]), np.abs(stored["shift"])
    if case.op.startswith("AdaGroupNorm"):
        return np.abs(stored["scale"]), np.abs(stored["shift"])
    gamma = stored.get("gamma", np.ones(1)) + case.attributes.get("offset", 0.0)
    beta = stored.get("beta", np.zeros(1))
    if case.op in ("LayerNorm", "LayerNormApply", "RMSNorm", "StdNorm"):
        gamma, beta = (p.reshape(shape[case.attributes["axis"] :]) if p.size > 1 else p for p in (gamma, beta))
    if case.op in ("InstanceNorm", "ChannelLayerNorm") or (
        "GroupNorm" in case.op and not case.attributes["channels_last"]
    ):
        per_channel = (-1,) + (1,) * (len(shape) - 2)
        gamma, beta = gamma.reshape(per_channel), beta.reshape(per_channel)
    if case.op in GATED:
        gamma = gamma / (1 + np.exp(-stored["gate"]))
    if case.op == "GatedRMSNorm":
        gamma = gamma * stored["gate"]
    return np.abs(gamma), np.abs(beta)


def allowed(case: Case, stored: list[np.ndarray], y: np.ndarray, out_dtype: str, store_ulps: float = 1.0) -> np.ndarray:
    """How far each element of an output may be from its float64 reference ``y``.

    A norm in float32, u = 2⁻²⁴. A sum of n terms in pairs adds a·u of their magnitudes, a = log₂ n; one after another
    (what numpy, and so the interpreter, does over the channels of NCHW) a = √n, as roundings are as often up as down
    (Higham, Mary 2019). The mean is a float32 number, so it is off by u·max|x|, as is each x − mean that is not exact,
    and by a·u·mean|x − first| from its sum: both over σ in units of x̂. Root, quotient and M2 (positive terms) are
    relative: (8 + a)·u·|x̂|. The affine rounds three times; SiLU's slope is below 1.1 and its exp adds 6u of a value. A
    gate's exp errs by 2u and by u of the gate itself.
    Storing rounds once more: ``store_ulps`` · u_out·|y| (Triton's interpreter truncates to bfloat16: 2), and the
    smallest number where y is that small.
    """
    names = dict(zip(case._op.inputs, stored, strict=True))
    x = names["x"] + names.get("residual", 0.0)
    rows, back = by_rows(case, x)
    n = rows.shape[1]
    additions = np.sqrt(n) if case.op == "ChannelLayerNorm" else np.log2(n)
    factor, shift = affine_of(case, names, x.shape)
    if "RMS" in case.op:
        sigma = np.sqrt((rows * rows).mean(1, keepdims=True) + case.attributes["epsilon"])
        xhat, spread = rows / sigma, 0.0 * sigma
    else:
        centered = rows - rows.mean(1, keepdims=True)
        m2 = (centered * centered).sum(1, keepdims=True)
        variance, epsilon = m2 / max(1, n - case.attributes.get("ddof", 0)), case.attributes["epsilon"]
        sigma = np.sqrt(variance) + epsilon if case.op == "StdNorm" else np.sqrt(variance + epsilon)
        off = 3 * np.abs(rows).max(1, keepdims=True) + additions * np.abs(rows - rows[:, :1]).mean(1, keepdims=True)
        # a constant row is exact: every x − first is 0
        xhat, spread = centered / sigma, np.where(np.ptp(rows, 1, keepdims=True) == 0, 0, off) / sigma
    product = back(np.abs(xhat)) * factor
    error = U * ((8 + additions) * product + back(spread) * factor + 3 * (product + shift))
    if "silu" in str(case.attributes.values()).lower() or case.op.endswith("SiLU"):
        error = 1.1 * error + 6 * U * (product + shift)
    if "gate" in names:
        error = error + (6 + np.abs(names["gate"])) * U * product
    return error + store_ulps * UNIT[out_dtype] * np.abs(y) + store_ulps * LEAST[out_dtype]


def judge_quantized(
    case: Case, stored: list[np.ndarray], outputs: list[np.ndarray], said: str = "", store_ulps: float = 1.0
) -> None:
    """Every number is one that a norm within its bound (`allowed`) is quantized to. A quotient in float32 is off by u;
    QuantizeLinear never goes down where its input goes up, so that the two ends of the bound enclose what is right.
    A scale of a row is one of the largest magnitude within the bound; the numbers are judged by the scale that was
    stored."""
    from normdeploy_plugins._quantize import LARGEST, quantized
    from normdeploy_plugins.ops import BY_NAME

    q = outputs[0]
    if not q.size:
        return
    norm, to, dynamic = case.unquantized(), case.attributes["to"], "Dynamic" in case.op
    *inputs, scale = [*stored, outputs[1]] if dynamic else stored
    with np.errstate(all="ignore"):
        y = BY_NAME[norm.op].reference(*inputs, **norm.attributes)
        y = cast(np.ndarray, y[0] if isinstance(y, tuple) else y)
        bound = np.nan_to_num(allowed(norm, inputs, y, case.dtype, store_ulps), nan=0.0) + U * np.abs(y)
        bound = np.where(np.isfinite(y), bound, 0.0)
        if dynamic:
            axes = tuple(range(case.attributes.get("axis", -1) % y.ndim, y.ndim))
            most, off = np.abs(y).max(axes, keepdims=True), bound.max(axes, keepdims=True)
            wanted = np.maximum(most, case.attributes["least"]) / LARGEST[to]
            close = np.abs(scale - wanted) <= off / LARGEST[to] + 2 * U * np.abs(wanted)
            assert (close | (scale == wanted) | (np.isnan(scale) & np.isnan(wanted))).all(), f"scales {said}"
        else:
            scale = scale.reshape(())
        low, high = (quantized(end, scale, to) for end in (y - bound, y + bound))
    wrong = ~((low <= q) & (q <= high)) & ~(np.isnan(q) & np.isnan(low))
    assert not wrong.any(), (
        f"{wrong.sum()} of {q.size}, {q[wrong][:4]} not {low[wrong][:4]} to {high[wrong][:4]} {said}"
    )


def judge(case: Case, stored: list[np.ndarray], outputs: list[np.ndarray], said: str = "") -> None:
    """Every element within its bound, a NaN or an infinity where the reference has one. ``said`` is added to what is
    wrong."""
    op = case._op
    if not outputs[0].size:
        return
    with np.errstate(all="ignore"):
        if "residual" in op.inputs:
            exact, total = stored[0] + stored[1], outputs[op.outputs.index("sum")]
            assert np.allclose(total, exact, rtol=UNIT[case.dtype], atol=0, equal_nan=True), f"sum {said}"
            stored = [total, np.zeros_like(exact), *stored[2:]]
        if "Q" in op.types:
            return judge_quantized(case, stored, outputs, said)
        expected = op.reference(*stored, **case.attributes)
        expected = expected[0] if isinstance(expected, tuple) else expected
        finite = np.isfinite(expected)
        assert np.array_equal(outputs[0][~finite], expected[~finite], equal_nan=True), f"what is not finite {said}"
        if case.op == "ScaleShift":
            magnitude = op.reference(*map(np.abs, stored), axis=case.attributes["axis"], activation="none")
            bound = (9 * U + UNIT[case.dtype]) * magnitude
        elif case.op == "NormStatistics":
            # of normal data: a mean is off by its sum's roundings, M2 by those of its terms
            bound = np.where(np.arange(2) == 0, 1e-6, 1e-5 * np.abs(expected))
        else:
            bound = allowed(case, stored, expected, case.dtype)
        # no bound: where an RMSNorm divides by infinity
        over = ~(np.abs(outputs[0] - expected) <= np.nan_to_num(bound, nan=0.0)) & finite
    assert not over.any(), f"{over.sum()} of {over.size}, by {np.abs(outputs[0] - expected)[over].max()} {said}"


# ops whose bounds are of their own, which `judge` knows
MORE = [
    *(
        Case("ScaleShift", s, {"axis": a, "activation": f}, "fp16")
        for s, a in (((3, 5, 9, 7), 1), ((5, 40), 1))
        for f in ("relu", "silu")
    ),
    Case("ScaleShift", (3, 16, 7, 7), {"axis": 1, "activation": "silu"}, "bf16"),  # whose rows are samples
    Case("ScaleShift", (2, 3, 5000), {"axis": 1, "activation": "none"}),
    Case("NormStatistics", (2, 9000), {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}),
    Case(
        "NormStatistics", (2, 1000), {"axis": -1, "groups": 1, "splits": 4, "channels_last": 0}
    ),  # three of the four parts are empty
    Case("NormStatistics", (2, 12, 33, 31), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 0}, "fp16"),
    Case("NormStatistics", (2, 33, 65, 12), {"axis": 1, "groups": 4, "splits": 2, "channels_last": 1}, "bf16"),
]

UNUSUAL = (*ROW_OPS, "GroupNorm", "ChannelLayerNorm")


def unusual(op: str, looped: bool, seed: int = 0) -> tuple[Case, list[np.ndarray]]:
    """Rows of NaN, of infinities, of large, tiny and negative zero elements beside usual ones, several of them in one
    program."""
    before, attributes = ROW_OPS.get(
        op, ((2,), EPS | ({"num_groups": 2, "channels_last": 0} if op == "GroupNorm" else {}))
    )
    shape = {"GroupNorm": (4, 2, 40), "ChannelLayerNorm": (1, 40, 8), "ModulatedLayerNorm": (2, 4, 40)}.get(
        op, (*before[:-1], 8, 40)
    )
    case = Case(op, shape, attributes, "fp16", tile=(4, 16, 1, True) if looped and op != "LayerNormApply" else None)
    arrays = case.arrays(seed)
    rows = arrays[0].swapaxes(1, 2)[0] if op == "ChannelLayerNorm" else arrays[0].reshape(8, 40)
    rows[1, 5], rows[2, 0], rows[3, 39], rows[4, 7] = np.nan, np.nan, np.inf, -np.inf
    rows[5], rows[6], rows[7] = 65504 * np.sign(rows[5]), 2.0**-24, -0.0
    arrays[1:] = [
        np.zeros(shape) if name == "residual" else a for name, a in zip(case._op.inputs[1:], arrays[1:], strict=True)
    ]
    if "statistics" in case._op.inputs:
        with np.errstate(all="ignore"):
            arrays[1] = case._statistics(arrays[0])
    return case, arrays
