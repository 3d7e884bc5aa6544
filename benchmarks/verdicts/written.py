"""Files with If, Loop, Scan and functions, hand-written like those of other frameworks' converters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper, parser

_HEAD = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>'


def _file(text: str, functions: str = "", **weights: tuple[int, ...]) -> Callable[[], onnx.ModelProto]:
    """Return a function that builds the graph in ``text`` with random weights of these shapes."""

    def make() -> onnx.ModelProto:
        """Build the file.

        Returns:
            the model.
        """
        proto = parser.parse_model(f"{_HEAD}\n{text}\n{functions}")
        rng = np.random.default_rng(0)
        for name, shape in weights.items():
            value = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(value, name))
        return proto

    return make


IF = _file(
    """
    net (float[n, 8] x) => (float[n, 8] y) {
      m = ReduceMean <keepdims: int = 0> (x)
      zero = Constant <value: tensor = float {0.0}> ()
      positive = Greater (m, zero)
      h = Gemm (x, w, b)
      z = If (positive) <
        then_branch: graph = yes () => (float[n, 8] a) {
          a0 = MatMul (h, u)
          a = Relu (a0)
        },
        else_branch: graph = no () => (float[n, 8] c) {
          half = Constant <value: tensor = float {0.5}> ()
          c0 = Mul (h, half)
          c = Tanh (c0)
        }
      >
      y = Add (z, x)
    }
    """,
    w=(8, 8),
    b=(8,),
    u=(8, 8),
)

LOOP = _file(
    """
    net (float[n, 8] x) => (float[n, 8] y) {
      trips = Constant <value: tensor = int64 {4}> ()
      go = Constant <value: tensor = bool {1}> ()
      h = MatMul (x, w)
      last = Loop (trips, go, h) <
        body: graph = step (int64 i, bool going, float[n, 8] state) => (bool on, float[n, 8] next) {
          on = Identity (going)
          s0 = MatMul (state, u)
          s1 = Tanh (s0)
          s2 = Add (s1, b)
          next = Add (s2, x)
        }
      >
      y = Softmax <axis: int = -1> (last)
    }
    """,
    w=(8, 8),
    u=(8, 8),
    b=(8,),
)

SCAN = _file(
    """
    net (float[t, 3, 8] x) => (float[t, 3, 4] y, float[3, 6] last) {
      zeros = Constant <value: tensor = float {0.0}> ()
      shape = Constant <value: tensor = int64[2] {3, 6}> ()
      start = Expand (zeros, shape)
      last, states = Scan <num_scan_inputs: int = 1,
        body: graph = step (float[3, 6] before, float[3, 8] row) => (float[3, 6] after, float[3, 6] kept) {
          fromrow = MatMul (row, w)
          fromstate = MatMul (before, u)
          both = Add (fromrow, fromstate)
          after = Tanh (both)
          kept = Identity (after)
        }
      > (start, x)
      y = MatMul (states, head)
    }
    """,
    w=(8, 6),
    u=(6, 6),
    head=(6, 4),
)

FUNCTION = _file(
    """
    net (float[n, 5, 8] x) => (float[n, 5, 8] y) {
      a = local.norm (x, gamma, beta)
      h = MatMul (a, w)
      c = Relu (h)
      d = local.norm (c, gamma2, beta2)
      y = Add (d, x)
    }
    """,
    """
    <domain: "local", opset_import: ["" : 17]>
    norm (v, g, s) => (out) {
      m = ReduceMean <axes: ints = [-1]> (v)
      d = Sub (v, m)
      dd = Mul (d, d)
      var = ReduceMean <axes: ints = [-1]> (dd)
      eps = Constant <value: tensor = float {0.00001}> ()
      vare = Add (var, eps)
      std = Sqrt (vare)
      n = Div (d, std)
      ng = Mul (n, g)
      out = Add (ng, s)
    }
    """,
    gamma=(8,),
    beta=(8,),
    w=(8, 8),
    gamma2=(8,),
    beta2=(8,),
)

NESTED = _file(
    """
    net (float[n, 6] x) => (float[n, 6] y) {
      trips = Constant <value: tensor = int64 {3}> ()
      go = Constant <value: tensor = bool {1}> ()
      last = Loop (trips, go, x) <
        body: graph = step (int64 i, bool going, float[n, 6] state) => (bool on, float[n, 6] next) {
          on = Identity (going)
          one = Constant <value: tensor = int64 {1}> ()
          early = Less (i, one)
          next = If (early) <
            then_branch: graph = first () => (float[n, 6] p) { p = MatMul (state, w) },
            else_branch: graph = later () => (float[n, 6] q) {
              q0 = MatMul (state, u)
              q = Sigmoid (q0)
            }
          >
        }
      >
      y = LayerNormalization <axis: int = -1, epsilon: float = 0.00001> (last, gamma, beta)
    }
    """,
    w=(6, 6),
    u=(6, 6),
    gamma=(6,),
    beta=(6,),
)

WRITTEN = (
    ("If with two layers", IF, ((2, 8),), ((5, 8),)),
    ("Loop over a state", LOOP, ((2, 8),), ((5, 8),)),
    ("Scan over rows", SCAN, ((5, 3, 8),), ((7, 3, 8),)),
    ("functions", FUNCTION, ((2, 5, 8),), ((4, 5, 8),)),
    ("If inside a Loop", NESTED, ((2, 6),), ((4, 6),)),
)
