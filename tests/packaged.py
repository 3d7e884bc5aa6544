"""Files to be packaged, and a bundle's manifest to be spoiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.support import parsed


def written(folder: Path, text: str, name: str = "model.onnx") -> Path:
    onnx.save(parsed(text), folder / name)
    return folder / name


ADD = "g (float[n, 3] x) => (float[n, 3] y) <float[3] c = {1.5, 2.5, -3.5}> { y = Add(x, c) }"


def given(n: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)}


def edited(bundle: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads((bundle / "manifest.json").read_text())
    change(document)
    (bundle / "manifest.json").write_text(json.dumps(document))
