"""Admit Cast: a Cast between floating types does not change the function.

**Statement.** A proof treats a region as the function that its ops define on real numbers, without rounding. In this
function a Cast to a floating type is the identity. The rounding is checked elsewhere: recognition allows no Cast inside
a norm to a type narrower than the input's type. A Cast of a size to a floating type gives the size as a number. A Cast
of elements to integers or bool is refused. `tests/proof/test_lemmas.py` has a Cast to bool as the counterexample.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...graphs.symbolic_sizes import Size
from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import Logarithm, Magnitude, Value

_FLOATS = frozenset({1, 10, 11, 16, "FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"})
_WHOLE = {2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 12: np.uint32, 13: np.uint64}


def _cast(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    to = attrs["to"]
    if isinstance(to, bytes):
        to = to.decode()
    return cast_value(m, inputs[0], to in _FLOATS, np.dtype(_WHOLE[to]) if to in _WHOLE else None)


def cast_value(m: ProofInterpreter, x: Any, floating: bool, whole: np.dtype[Any] | None) -> Any:
    """Cast ``x`` to a floating type or to the integer type ``whole``.

    Args:
        floating: the target is a floating type.
        whole: integer type of the target; None for floating types and bool.

    Returns:
        the value, or an array for integers.

    Raises:
        NotProved: elements are cast to integers or bool, or a size may not fit.
    """
    if isinstance(x, Value | Magnitude | Logarithm):
        if floating:
            return x
        if isinstance(x, Value) and whole is not None and not x.data and x.size is not None and not any(x.axes):
            _require_fits(x.size, whole)
            return np.array(x.size if x.size.constant_value is None else x.size.constant_value, dtype=object).reshape(
                (1,) * len(x.axes)
            )
        raise NotProved(ProofFailure.OP, "a Cast to integers or bool is not algebraic", "Cast")
    if floating:
        array = np.asarray(x)
        if array.dtype == object and array.size != 1:
            return array
        return lift_input(m, array)
    if whole is None:
        raise NotProved(ProofFailure.OP, "a Cast to bool is not algebraic", "Cast")
    for n in np.asarray(x).reshape(-1).tolist():
        _require_fits(Size.from_int(n), whole)
    return x


def _require_fits(n: Size, whole: np.dtype[Any]) -> None:
    """Require that the integer type can represent a size.

    An open size is assumed to fit a signed type of 32 bits or more; a narrower type may truncate it.
    """
    limits = np.iinfo(whole)
    if n.constant_value is not None:
        fits = limits.min <= n.constant_value <= limits.max
    else:
        fits = limits.min < 0 and limits.bits >= 32
    if not fits:
        raise NotProved(ProofFailure.SIZE, f"a Cast of {n} to {whole.name}, which may be too small for it", "Cast")


TABLE: dict[str, Op] = {"Cast": _cast}
