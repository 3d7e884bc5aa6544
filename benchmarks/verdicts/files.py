"""Files of other tools as references: real ones from packages, the corpus's of other frameworks, scikit-learn's, and
files with loops, branches and functions.

Real files are read from the folders of their packages (``pip install --no-deps --target FOLDER silero-vad magika
rapidocr rapidocr-onnxruntime skl2onnx scikit-learn scipy joblib threadpoolctl cloudpickle``, with FOLDER in
PYTHONPATH). Files of missing packages are left out, and the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx

from ..corpus.entry import foreign
from .tools import Feeds
from .written import WRITTEN

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Source:
    """File with the sizes of its inputs.

    Attributes:
        other_shapes: second set of sizes; empty if all are fixed.
        below: bound of integer inputs.
        constants: inputs with a single value.
        specs: specifications that a user passes as ``--input``.
        tools: empty for one in turn.
    """

    name: str
    load: Callable[[], onnx.ModelProto]
    shapes: Shapes
    other_shapes: Shapes = ()
    below: int = 2
    constants: tuple[tuple[str, int], ...] = ()
    specs: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def feeds(self, proto: onnx.ModelProto) -> tuple[list[Feeds], list[Feeds]]:
        """Draw inputs.

        Returns:
            eight feeds at the first sizes, four at the others.
        """
        first = [self._drawn(proto, self.shapes, seed) for seed in range(8)]
        return first, [
            self._drawn(proto, self.other_shapes, seed) for seed in range(8, 12)
        ] if self.other_shapes else []

    def _drawn(self, proto: onnx.ModelProto, shapes: Shapes, seed: int) -> Feeds:
        rng, feeds, constants = np.random.default_rng(seed), {}, dict(self.constants)
        weights = {t.name for t in proto.graph.initializer}
        inputs = [i for i in proto.graph.input if i.name not in weights]
        for info, shape in zip(inputs, shapes, strict=True):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            if info.name in constants:
                feeds[info.name] = np.full(shape, constants[info.name], dtype)
            elif dtype.kind == "f":
                feeds[info.name] = rng.standard_normal(shape).astype(dtype)
            else:
                feeds[info.name] = rng.integers(0, self.below, shape).astype(dtype)
        return feeds


def sources() -> Iterator[Source]:
    """Yield all sources.

    Yields:
        sources.
    """
    yield from _frameworks()
    yield from _written()
    yield from _learners()
    yield from _real()
    yield from _trees()


def _frameworks() -> Iterator[Source]:
    """Yield every eighth float32 file of the corpus from TensorFlow's, JAX's and PaddlePaddle's exporters."""
    found = [(entry, proto) for entry, proto in foreign() if entry.dtype == "float32"]
    for entry, proto in found[::8]:
        other = entry.shapes[1] if len(entry.shapes) > 1 else ()
        yield Source(entry.name, lambda proto=proto: proto, entry.shapes[0], other)  # type: ignore[misc]


def _written() -> Iterator[Source]:
    for name, make, shapes, other in WRITTEN:
        for tool in ("onnxslim", "onnxsim", "onnxruntime basic"):
            yield Source(name, make, shapes, other, tools=(tool,))


# ------------------------------------------------------------------ scikit-learn


def _learners() -> Iterator[Source]:
    if find_spec("skl2onnx") is None:
        return
    for name in ("scaler and MLP", "PCA and logistic regression", "Gaussian process", "ridge regression"):
        yield Source(f"scikit-learn: {name}", lambda name=name: _learned(name), ((4, 6),), ((7, 6),))  # type: ignore[misc]


def _learned(name: str) -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from sklearn.decomposition import PCA
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 6)).astype(np.float32)
    value = np.sin(x).sum(1)
    if name == "scaler and MLP":
        model = make_pipeline(
            StandardScaler(), MLPRegressor(hidden_layer_sizes=(8,), max_iter=100, random_state=0)
        ).fit(x, value)
    elif name == "PCA and logistic regression":
        model = make_pipeline(StandardScaler(), PCA(4), LogisticRegression()).fit(x, value > 0)
        made: onnx.ModelProto = to_onnx(model, x[:1], options={"zipmap": False})
        return made
    elif name == "Gaussian process":
        model = GaussianProcessRegressor(random_state=0, alpha=0.1).fit(x[:20], value[:20])
    else:
        model = make_pipeline(StandardScaler(), Ridge()).fit(x, value)
    made = to_onnx(model, x[:1])
    return made


def _trees() -> Iterator[Source]:
    """Yield gradient-boosted trees, as onnxmltools writes them."""
    if find_spec("onnxmltools") is None:
        return
    for name, tool in (
        ("lightgbm: regression", "onnxslim"),
        ("lightgbm: classes", "onnxruntime basic"),
        ("xgboost: regression", "onnxruntime extended"),
        ("xgboost: classes", "onnxruntime basic"),
    ):
        load = partial(_boosted, *name.split(": "))
        yield Source(name, load, ((4, 6),), ((7, 6),), tools=(tool,))


def _boosted(library: str, task: str) -> onnx.ModelProto:
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    kind = "Regressor" if task == "regression" else "Classifier"
    learner = getattr(import_module(library), f"{'LGBM' if library == 'lightgbm' else 'XGB'}{kind}")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 6)).astype(np.float32)
    value = np.sin(x).sum(1)
    model = learner(n_estimators=8, max_depth=3, n_jobs=1).fit(
        x, value if kind == "Regressor" else (value > 0).astype(int)
    )
    options = {} if library == "xgboost" or kind == "Regressor" else {"zipmap": False}
    convert = getattr(onnxmltools, f"convert_{library}")
    made: onnx.ModelProto = convert(model, initial_types=[("x", FloatTensorType([None, 6]))], **options)
    return made


# ------------------------------------------------------------------ out of packages


def _real() -> Iterator[Source]:
    rate = (("sr", 16000),)
    voice: tuple[tuple[str, Shapes, Shapes], ...] = (
        ("silero_vad", ((2, 576), (2, 2, 128), ()), ((1, 576), (2, 1, 128), ())),
        ("silero_vad_op18_ifless", ((2, 576), (), (2, 2, 128)), ((1, 576), (), (2, 1, 128))),
        ("silero_vad_16k_op15", ((2, 576), (2, 2, 128), ()), ((1, 576), (2, 1, 128), ())),
        ("silero_vad_half", ((2, 576), (2, 2, 128)), ((1, 576), (2, 1, 128))),
        ("silero_vad_openvino_16k", ((1, 576), (2, 1, 128)), ()),
        ("silero_vad_16k_sequence", ((3, 576), (1, 1, 128), (1, 1, 128)), ((5, 576), (1, 1, 128), (1, 1, 128))),
    )
    for name, shapes, other in voice:
        path = _packaged("silero_vad", f"data/{name}.onnx")
        if path is None:
            continue
        given = rate if () in shapes else ()
        specs = _voice_specs(name)
        for tool in ("onnxslim", "onnxsim"):
            yield Source(f"package: {name}", _loader(path), shapes, other, constants=given, specs=specs, tools=(tool,))
    images: tuple[tuple[str, str, Shapes, Shapes, tuple[str, ...]], ...] = (
        (
            "rapidocr",
            "models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
            ((1, 3, 48, 64),),
            ((2, 3, 48, 64),),
            ("x:float32[batch=1:1:4,3,48,64]",),
        ),
    )
    for package, name, shapes, other, specs in images:
        path = _packaged(package, name)
        if path is not None:
            for tool in ("onnxsim", "onnxruntime basic"):
                yield Source(f"package: {Path(name).stem}", _loader(path), shapes, other, specs=specs, tools=(tool,))
    path = _packaged("magika", "models/standard_v3_3/model.onnx")
    if path is not None:
        for tool in ("onnxslim", "onnxruntime extended"):
            yield Source(
                "package: magika",
                _loader(path),
                ((2, 2048),),
                ((3, 2048),),
                below=257,
                specs=("bytes:int32[batch=1:2:4,2048]{0:257}",),
                tools=(tool,),
            )


def _voice_specs(name: str) -> tuple[str, ...]:
    """Return the facts that a user of the package knows: chunks of 512 samples after 64 of the past, at 16 kHz."""
    if name in ("silero_vad_openvino_16k", "silero_vad_16k_sequence"):
        return ()
    specs = ("input:float32[batch=1:2:4,576]", "state:float32[2,batch,128]")
    return (*specs, "sr:int64[]{16000:16001}") if name != "silero_vad_half" else specs


def _packaged(package: str, name: str) -> Path | None:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / name
    return path if path.is_file() else None


def _loader(path: Path) -> Callable[[], onnx.ModelProto]:
    return lambda: onnx.load(path)
