"""Small models of one norm each, as nodes that files hold: what ``build --norm-impl`` has to deal with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from normdeploy.rewriting import norm_optimizer

DTYPES: dict[str, Any] = {
    "float": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "double": np.float64,
}
SIZES = {"b": 2, "s": 7, "h": 5, "w": 6}  # of the dynamic dims, where a test runs a model


@dataclass(frozen=True)
class Model:
    """``inputs`` and ``outputs``: name -> dims, such as "b,s,64"; ``constants``: name -> shape; T in ``body`` is the
    type."""

    body: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    constants: dict[str, tuple[int, ...]]
    plugins: tuple[str, ...]  # op types of the plugin nodes that shall stand there, in order
    opset: int = 17
    left: tuple[str, ...] = ()  # other op types that are left
    dims: dict[str, int] = field(default_factory=dict)

    def proto(self, dtype: str = "float", *, static: bool = False, parameters: str = "") -> onnx.ModelProto:
        def values(given: dict[str, str]) -> str:
            return ", ".join(f"{dtype}[{','.join(map(size, dims.split(',')))}] {name}" for name, dims in given.items())

        def size(dim: str) -> str:
            return str((SIZES | self.dims).get(dim, dim)) if static else dim

        imports = f'["": {self.opset}, "normdeploy": 1]'
        text = f"g ({values(self.inputs)}) => ({values(self.outputs)}) {{ {self.body} }}"
        proto = onnx.parser.parse_model(f"<ir_version: 10, opset_import: {imports}> {text}")
        rng = np.random.default_rng(0)
        for name, shape in self.constants.items():
            value = rng.uniform(0.5, 1.5, shape) * (-1 if name == "beta" else 1)
            proto.graph.initializer.append(numpy_helper.from_array(value.astype(DTYPES[parameters or dtype]), name))
        for i, node in enumerate(proto.graph.node):
            node.name = f"node{i}"
            node.metadata_props.add(key="normdeploy.module", value=f"layers.{i}")
        return proto

    def portable(self, dtype: str = "float", *, static: bool = False) -> onnx.ModelProto:
        return norm_optimizer.optimize_norms(self.proto(dtype, static=static), runtime="tensorrt", fuse="portable")[0]


def feeds(proto: onnx.ModelProto, seed: int = 0, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or (SIZES | (sizes or {}))[d.dim_param] for d in kind.shape.dim]
        found[value.name] = (3 + rng.standard_normal(shape)).astype(
            onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        )
    return found


def _rows(body: str, plugins: tuple[str, ...] = ("LayerNorm",), opset: int = 17, **constants: tuple[int, ...]) -> Model:
    return Model(body, {"x": "b,s,64"}, {"y": "b,s,64"}, constants, plugins, opset)


def _image(body: str, plugins: tuple[str, ...], opset: int = 21, **constants: tuple[int, ...]) -> Model:
    return Model(body, {"x": "b,32,h,w"}, {"y": "b,32,h,w"}, constants, plugins, opset)


_N, _C, _C11 = (64,), (32,), (32, 1, 1)
_SUM = {"inputs": {"x": "b,s,64", "r": "b,s,64"}, "outputs": {"y": "b,s,64", "t": "b,s,64"}}
MODELS: dict[str, Model] = {
    "LayerNormalization": _rows("y = LayerNormalization<epsilon=1e-3>(x, gamma, beta)", gamma=_N, beta=_N),
    "LayerNormalization, one scale": _rows("y = LayerNormalization(x, gamma)", gamma=(1,)),
    "LayerNormalization over two dims": Model(
        "y = LayerNormalization<axis=1>(x, gamma, beta)",
        {"x": "b,6,64"},
        {"y": "b,6,64"},
        {"gamma": (6, 64), "beta": _N},
        ("LayerNorm",),
    ),
    "LayerNormalization of one group": _image(
        "y = LayerNormalization<axis=1>(x, gamma, beta)", ("GroupNorm",), gamma=_C11, beta=_C11
    ),
    "RMSNormalization": _rows("y = RMSNormalization<epsilon=1e-6>(x, gamma)", ("RMSNorm",), 23, gamma=_N),
    "RMSNorm in primitives": _rows(
        "q = Mul(x, x) m = ReduceMean<axes=[-1]>(q) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, gamma)",
        ("RMSNorm",),
        eps=(1,),
        gamma=_N,
    ),
    "GroupNormalization": _image(
        "y = GroupNormalization<num_groups=8>(x, gamma, beta)", ("GroupNorm",), gamma=_C, beta=_C
    ),
    "GroupNormalization of one group": _image(
        "y = GroupNormalization<num_groups=1>(x, gamma, beta)", ("GroupNorm",), gamma=_C, beta=_C
    ),
    "GroupNormalization, SiLU": _image(
        "n = GroupNormalization<num_groups=8>(x, gamma, beta) s = Sigmoid(n) y = Mul(n, s)",
        ("GroupNormSiLU",),
        gamma=_C,
        beta=_C,
    ),
    "GroupNormalization, SiLU, NHWC": Model(
        "t = Transpose<perm=[0,3,1,2]>(x) n = GroupNormalization<num_groups=8>(t, gamma, beta) s = Sigmoid(n) m ="
        " Mul(n, s) y = Transpose<perm=[0,2,3,1]>(m)",
        {"x": "b,h,w,32"},
        {"y": "b,h,w,32"},
        {"gamma": _C, "beta": _C},
        ("GroupNormSiLU",),
        21,
    ),
    "InstanceNormalization": _image("y = InstanceNormalization(x, gamma, beta)", ("InstanceNorm",), gamma=_C, beta=_C),
    "BatchNormalization, Relu": _image(
        "n = BatchNormalization(x, gamma, beta, mean, var) y = Relu(n)",
        ("ScaleShift",),
        gamma=_C,
        beta=_C,
        mean=_C,
        var=_C,
    ),
    "Mul and Add, SiLU": Model(
        "p = Abs(x) n = Mul(gamma, p) a = Add(n, beta) s = Sigmoid(a) y = Mul(s, a)",
        {"x": "b,32,h,w"},
        {"y": "b,32,h,w"},
        {"gamma": _C11, "beta": _C11},
        ("ScaleShift",),
        left=("Abs",),
    ),
    "Add, LayerNormalization": Model(
        "t = Add(x, r) y = LayerNormalization(t, gamma, beta)",
        constants={"gamma": _N, "beta": _N},
        plugins=("AddLayerNorm",),
        **_SUM,
    ),
    "Add, RMSNormalization": Model(
        "t = Add(x, r) y = RMSNormalization(t, gamma)",
        constants={"gamma": _N},
        plugins=("AddRMSNorm",),
        opset=23,
        **_SUM,
    ),
    "LayerNormalization, modulated": Model(
        "i = Constant<value_floats=[1.0]>() u = CastLike(i, c) n = LayerNormalization(x, u) e = Add(u, c) f = Mul(n, e)"
        " y = Add(f, d)",
        {"x": "b,s,64", "c": "b,1,64", "d": "b,1,64"},
        {"y": "b,s,64"},
        {},
        ("ModulatedLayerNorm",),
    ),
    "RMSNormalization, SiLU of a gate": Model(
        "n = RMSNormalization(x, gamma) s = Sigmoid(r) g = Mul(r, s) y = Mul(n, g)",
        {"x": "b,s,64", "r": "b,s,64"},
        {"y": "b,s,64"},
        {"gamma": _N},
        ("GatedRMSNorm",),
        23,
    ),
    "RMSNormalization, sigmoid of a gate": Model(
        "n = RMSNormalization(x, gamma) s = Sigmoid(r) y = Mul(n, s)",
        {"x": "b,s,64", "r": "b,s,64"},
        {"y": "b,s,64"},
        {"gamma": _N},
        ("SigmoidGatedRMSNorm",),
        23,
    ),
    "GroupNormalization, adaptive, SiLU": Model(
        "n = GroupNormalization<num_groups=8>(x, gamma, beta) m = Mul(n, c) a = Add(m, d) s = Sigmoid(a) y = Mul(a, s)",
        {"x": "b,32,h,w", "c": "b,32,1,1", "d": "b,32,1,1"},
        {"y": "b,32,h,w"},
        {"gamma": _C, "beta": _C},
        ("AdaGroupNormSiLU",),
        21,
        left=("Mul", "Mul", "Add"),
    ),
    "InstanceNormalization, spatially adaptive": Model(
        "n = Constant<value_ints=[32]>() i = Constant<value_floats=[1.0]>() j = CastLike(i, x) e = Expand(j, n) o ="
        " Constant<value_floats=[0.0]>() p = CastLike(o, x) z = Expand(p, n) u = InstanceNormalization(x, e, z) m ="
        " Mul(u, c) y = Add(m, d)",
        {"x": "b,32,h,w", "c": "b,32,h,w", "d": "b,32,h,w"},
        {"y": "b,32,h,w"},
        {},
        ("AdaGroupNorm",),
        21,
    ),
    "LayerNorm over channels": _image(
        "t = Transpose<perm=[0,2,3,1]>(x) n = LayerNormalization(t, gamma, beta) y = Transpose<perm=[0,3,1,2]>(n)",
        ("ChannelLayerNorm",),
        gamma=_C,
        beta=_C,
    ),
    "std + eps": _rows(
        "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) f = Mul(v, factor) r ="
        " Sqrt(f) e = Add(r, eps) n = Div(d, e) g = Mul(n, gamma) y = Add(g, beta)",
        ("StdNorm",),
        eps=(1,),
        factor=(1,),
        gamma=_N,
        beta=_N,
    ),
    "LayerNorm of ours, unbiased": _rows(
        "y = normdeploy.LayerNorm<axes=[-1], epsilon=1e-5, ddof=1, stash_type=1>(x, gamma, beta)",
        ("LayerNorm",),
        gamma=_N,
        beta=_N,
    ),
}
