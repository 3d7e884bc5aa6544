"""A Cast between floating types does nothing to the function, as the rounding of its type is judged apart.

**Statement.** A region is the function that its ops say, without the rounding of their types; a Cast to a floating type
is the identity there. Recognition lets no Cast to a narrower type than the input's stand in the middle of a norm. A
Cast of a size to a floating type is the size as a number. A Cast of elements to whole numbers or to bool is refused.
`tests/proof/test_lemmas.py` casts to bool.
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
    """``x`` as a floating number or as a whole one of the type ``whole``."""
    if isinstance(x, Value | Magnitude | Logarithm):
        if floating:
            return x
        if isinstance(x, Value) and whole is not None and not x.data and x.size is not None and not any(x.axes):
            _require_fits(x.size, whole)
            return np.array(x.size if x.size.constant_value is None else x.size.constant_value, dtype=object).reshape(
                (1,) * len(x.axes)
            )
        raise NotProved(ProofFailure.OP, "a Cast to whole numbers or bool is no algebra", "Cast")
    if floating:
        array = np.asarray(x)
        if array.dtype == object and array.size != 1:
            return array
        return lift_input(m, array)
    if whole is None:
        raise NotProved(ProofFailure.OP, "a Cast to bool is no algebra", "Cast")
    for n in np.asarray(x).reshape(-1).tolist():
        _require_fits(Size.from_int(n), whole)
    return x


def _require_fits(n: Size, whole: np.dtype[Any]) -> None:
    """A size that is open fits into 32 bits with a sign; what is cut off by a shorter type changes from size to
    size."""
    limits = np.iinfo(whole)
    if n.constant_value is not None:
        fits = limits.min <= n.constant_value <= limits.max
    else:
        fits = limits.min < 0 and limits.bits >= 32
    if not fits:
        raise NotProved(ProofFailure.SIZE, f"a Cast of {n} to {whole.name}, which may not hold it", "Cast")


TABLE: dict[str, Op] = {"Cast": _cast}
