"""Draw inputs that distinguish lookalikes, at sizes of every dynamic dim from 1 to 129."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .builder import Case, Input

SIZES = (1, 2, 3, 5, 7, 9, 33, 64, 100, 129)
SMALL = (1, 2, 3, 5)
# Maximum number of elements of one input
MOST = 4000
KINDS = (
    "normal",
    "negative",
    "positive",
    "constant",
    "zero",
    "tiny",
    "small",
    "large",
    "huge",
    "offset",
    "outlier",
    "integers",
    "rows",
    "onehot",
    "numbers",
    "numbers",
    "range",
    "nan",
    "inf",
)
NONFINITE = ("nan", "inf")
# Kinds of inputs for which accuracy in the model's type is judged
FINITE_AT_ONE = ("normal", "stats")


def sizes(case: Case, rng: np.random.Generator) -> dict[str, int]:
    """Draw a size for every dynamic dim; at most one is large.

    Returns:
        name -> size.
    """
    names = sorted({d for i in case.inputs for d in i.dims if isinstance(d, str)})
    chosen = {n: int(rng.choice(SMALL)) for n in names}
    if names:
        big = str(rng.choice(names))
        chosen[big] = int(rng.choice(case.sizes[big] if big in case.sizes and rng.random() < 0.7 else SIZES))
    for name, own in case.sizes.items():
        if name in chosen and rng.random() < 0.6:
            chosen[name] = int(rng.choice(own))
    for first, other in case.broadcast:
        how = rng.integers(4)
        chosen[other] = chosen[first] if how < 2 else 1 if how == 2 else max(chosen[other], 2)
        chosen[first] = 1 if how == 3 else chosen[first]
    return chosen


def values(kind: str, case: Case, given: Input, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw one tensor of one kind.

    Returns:
        array of the input's own type.
    """
    x = rng.normal(size=shape)
    half = given.dtype == np.float16
    if kind == "negative":
        x = -np.abs(x) - 0.1
    elif kind == "positive":
        x = np.abs(x) + 0.1
    elif kind == "constant":
        x = np.full(shape, rng.choice([1.0, -3.5, 7.25, 100.0, rng.normal()]))
    elif kind == "zero":
        x = np.zeros(shape)
    elif kind in ("tiny", "small", "large", "huge"):
        low, high = {"tiny": (-12, -7), "small": (-6, -2), "large": (1, 4), "huge": (6, 18)}[kind]
        x = x * 10.0 ** (rng.uniform(low, high) if not half else {"tiny": -6, "small": -2, "large": 2, "huge": 4}[kind])
    elif kind == "offset":
        x = x + rng.choice([-1, 1]) * 10.0 ** rng.uniform(1, 3 if half else 5)
    elif kind == "outlier" and x.size:
        x.flat[rng.integers(x.size)] = rng.choice([-1, 1]) * 10.0 ** rng.uniform(1, 4 if half else 7)
    elif kind == "integers":
        x = rng.integers(-130, 130, shape).astype(float)
    elif kind == "rows" and x.ndim > 1:
        x = x * 10.0 ** rng.uniform(-4, 4, (*shape[:-1], 1)) * rng.choice([-1, 1], (*shape[:-1], 1))
    elif kind == "onehot" and x.size:
        x = np.zeros(shape)
        x.flat[rng.integers(x.size)] = 10.0 ** rng.uniform(-1, 3)
    elif kind in ("numbers", "range") and case.numbers:
        number = case.numbers[int(rng.integers(len(case.numbers)))]
        if kind == "range":
            x = x * abs(number) * rng.choice([0.5, 1, 3])
        else:
            with np.errstate(over="ignore"):
                step = np.abs(np.spacing(np.asarray(number, given.dtype))).astype(float)
            near = np.array(
                [
                    number,
                    -number,
                    number + step,
                    number - step,
                    number * 1.01,
                    number * 0.99,
                    -number * 1.01,
                    2 * number,
                    -2 * number,
                ]
            )
            x = np.where(rng.random(shape) < rng.choice([0.1, 0.5]), rng.choice(near, shape), x)
    elif kind == "stats" and given.mean is not None and given.std is not None:
        x = given.mean + x * given.std
    elif kind in NONFINITE and x.size:
        x.flat[rng.integers(x.size)] = np.nan if kind == "nan" else rng.choice([np.inf, -np.inf])
    with np.errstate(over="ignore"):
        return np.asarray(x, given.dtype)


def feeds(case: Case, rng: np.random.Generator, count: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield ``count`` feeds; the first ones have the kinds that every graph gets.

    Yields:
        (kind, feed).
    """
    first = ["normal", "nan", "inf"] + (["numbers", "numbers", "range"] if case.numbers else [])
    if any(i.mean is not None for i in case.inputs):
        first += ["stats", "stats"]
    for turn in range(count):
        kind = first[turn] if turn < len(first) else str(rng.choice(KINDS))
        size = sizes(case, rng)
        # Only one input contains the NaN.
        spoiled = int(rng.integers(len(case.inputs)))
        feed = {}
        for place, given in enumerate(case.inputs):
            shape = tuple(size[d] if isinstance(d, str) else d for d in given.dims)
            if given.dtype.kind != "f":
                feed[given.name] = (
                    rng.integers(0, 2, shape).astype(given.dtype) if given.dtype == bool else _whole(given, shape, rng)
                )
                continue
            own = kind if kind not in NONFINITE or place == spoiled else "normal"
            feed[given.name] = values(own, case, given, shape, rng)
        if sum(a.size for a in feed.values()) <= 4 * MOST:
            yield kind, feed
            if kind in NONFINITE and rng.random() < 0.5:
                yield (
                    "cleaned",
                    {
                        k: np.where(np.isfinite(v), v, v.dtype.type(0.5)) if v.dtype.kind == "f" else v
                        for k, v in feed.items()
                    },
                )


def _whole(given: Input, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 6, shape).astype(given.dtype)
