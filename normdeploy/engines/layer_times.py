"""Read the mean times of an engine's layers from the JSON that trtexec writes with ``--exportProfile=FILE``.

    [{"count": 2094},
     {"name": "conv1 + relu1", "timeMs": 47.8, "averageMs": 0.0228, "medianMs": 0.0225, "percentage": 1.6}, ...]

``averageMs`` is the mean time of the layer in one run. Constants have no record. The names are those of
``--exportLayerInfo``.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from ..types import PathLike
from .engine_json import EXPORT_TIMES, describe_document, is_layer_info, is_profile, read_json
from .layer_info import EngineLayer
from .layer_kinds import split_profile


@dataclass(frozen=True)
class LayerTime:
    """Mean time of one layer.

    Attributes:
        name: name of the layer, without the suffix of an optimization profile.
        profile: index of the optimization profile.
        ms: mean time of one run in milliseconds.
    """

    name: str
    profile: int
    ms: float


@dataclass(frozen=True)
class LayerTimes:
    """Times of an engine's layers.

    Attributes:
        runs: number of runs; None if the file does not state it.
    """

    records: tuple[LayerTime, ...]
    runs: int | None

    @property
    def total_ms(self) -> float:
        """Return the mean time of all layers in milliseconds."""
        return math.fsum(record.ms for record in self.records)


def read_layer_times(path: PathLike) -> LayerTimes:
    """Read a file that trtexec wrote with ``--exportProfile``.

    Returns:
        the times.

    Raises:
        InputError: the file can't be read, is not JSON, has another form, or contains a time that is not a number.
    """
    shown = os.fspath(path)
    document = read_json(path)
    if not is_profile(document):
        swapped = "; pass it as FILE" if is_layer_info(document) else f"; write it with `{EXPORT_TIMES}`"
        raise InputError(f"{shown!r} contains {describe_document(document)}, not the times of layers{swapped}")
    counts = [each["count"] for each in document if isinstance(each, Mapping) and isinstance(each.get("count"), int)]
    runs = counts[0] if counts else None
    named = [each for each in document if isinstance(each, Mapping) and isinstance(each.get("name"), str)]
    records = tuple(LayerTime(*split_profile(each["name"]), _mean_ms(each, runs, shown)) for each in named)
    return LayerTimes(records, runs)


def _mean_ms(record: Mapping[str, Any], runs: int | None, shown: str) -> float:
    """Return the mean time of a record.

    Raises:
        InputError: the record has no finite time that is at least 0.
    """
    if "averageMs" in record:
        ms, count = record["averageMs"], 1
    else:
        ms, count = record.get("timeMs"), runs or 1
    # A bool is an int in Python, but no time.
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms < 1e12:
        raise InputError(
            f"{shown!r}: the time of layer {record['name'][:200]!r} is {str(ms)[:40]!r}, not a number of milliseconds;"
            f" write the file with `{EXPORT_TIMES}`"
        )
    return ms / count


def choose_profile(layers: Sequence[EngineLayer], times: LayerTimes | None) -> int:
    """Choose the optimization profile that was timed.

    Returns:
        index of the profile with the most times that are not 0; 0 without times.
    """
    if times is None:
        return 0
    known = {layer.profile for layer in layers}
    timed = Counter(record.profile for record in times.records if record.ms and record.profile in known)
    return min(timed, key=lambda profile: (-timed[profile], profile), default=0)


def apply_times(layers: Sequence[EngineLayer], times: LayerTimes, profile: int) -> tuple[list[EngineLayer], float]:
    """Set the time of each layer.

    Layers of the same name are matched in their order. The time of a layer without a record stays None.

    Returns:
        the layers with their times, and the milliseconds of records that match no layer.
    """
    queues: defaultdict[str, deque[float]] = defaultdict(deque)
    for record in times.records:
        if record.profile == profile:
            queues[record.name].append(record.ms)
    timed = [replace(layer, ms=queues[layer.name].popleft()) if queues.get(layer.name) else layer for layer in layers]
    return timed, math.fsum(ms for queue in queues.values() for ms in queue)
