"""The plugins through the real ``tensorrt.plugin``, over a stand-in for TensorRT's compiled half: signatures, types,
tactics, launches."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from normdeploy_plugins import qdp
from normdeploy_plugins._aot import AotError
from normdeploy_plugins._launch import Tensor
from normdeploy_plugins.ops import BY_NAME, OPS

from . import standin
from .emulated import Unknown
from .usual import EPS, GROUPS, LN, USUAL, tensors

FOLDER = standin.plugin_folder()
pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(
        FOLDER is None, reason="tensorrt.plugin is not here (pip install --no-deps tensorrt-cu13-bindings)"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def trtp() -> Iterator[Any]:
    """``tensorrt.plugin`` with all our plugins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", "8.9")
        real = {name: held for name, held in sys.modules.items() if name.partition(".")[0] == "tensorrt"}
        assert FOLDER is not None
        plugin = standin.install(FOLDER)
        try:
            assert qdp.register() == tuple(op.name for op in OPS)
            yield plugin
        finally:
            for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt"]:
                del sys.modules[name]
            sys.modules.update(real)


def build(name: str, dtype: str, batch: int | str) -> standin.Build:
    """The op at its usual size, with that batch size: a number, or the name of a dynamic one."""
    shape, attributes = USUAL[name]
    inputs = tensors(BY_NAME[name], shape, attributes, dtype)
    samples = {"x", "residual", "gate"} | (
        {"scale", "shift"} if name == "ModulatedLayerNorm" or name.startswith("Ada") else set()
    )
    shapes = [
        (batch, *t.shape[1:]) if given in samples else t.shape
        for given, t in zip(BY_NAME[name].inputs, inputs, strict=True)
    ]
    return standin.Build(name, shapes, [t.dtype for t in inputs], BY_NAME[name].encoded(attributes))


def test_registering_twice_is_once() -> None:
    assert qdp.register() == qdp.register()


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_tactic(name: str, dynamic: bool) -> None:
    """What TensorRT would launch, for several batch sizes: the same as the op says for those sizes as plain numbers."""
    op, (shape, attributes) = BY_NAME[name], USUAL[name]
    for batch in (1, 5, 300, 0) if dynamic else (shape[0],):
        plugin = build(name, "fp16", "b" if dynamic else batch)
        inputs = tensors(op, (batch, *shape[1:]), attributes, "fp16")
        results = op.output_tensors(inputs, attributes)
        assert plugin.output_shapes({"b": batch}) == [t.shape for t in results]
        assert plugin.tactics == list(range(1, len(op.tiles(inputs, attributes)) + 1))
        for tactic in plugin.tactics:
            kernel, ptx, params, extra = plugin.launch(tactic, {"b": batch})
            expected = op.launch(inputs, attributes, op.tiles(inputs, attributes)[tactic - 1])
            assert params["grid_x"] == max(1, expected.grid)
            assert [params[k] for k in ("grid_y", "grid_z", "block_y", "block_z")] == [1, 1, 1, 1]
            text = ptx.decode()
            assert f".entry {kernel}(" in text
            assert f".reqntid {params['block_x']}\n" in text
            assert extra == [expected.scalars["rows"]]
            parameters = re.findall(r"\.param \.(\w+)", text[: text.index("{")])
            assert parameters == ["u64"] * len(op.inputs) + ["u32"] + ["u64"] * len(op.outputs)


def test_no_tactic_is_the_first() -> None:
    """0 is TensorRT's default, which no plugin lists (IPluginV3OneBuild::getValidTactics)."""
    plugin = build("LayerNorm", "fp16", 300)
    assert len(plugin.tactics) > 1
    assert plugin.launch(0, {}) == plugin.launch(1, {}) != plugin.launch(plugin.tactics[-1], {})


@pytest.mark.parametrize(
    "name", ["LayerNorm", "GroupNormSiLU", "NormStatistics", "ScaleShift", "ChannelLayerNorm", "InstanceNorm"]
)
def test_dynamic_sizes(name: str) -> None:
    """All sizes but the channels of images dynamic: one kernel for all of them, which takes them as arguments."""
    op, (_, attributes) = BY_NAME[name], USUAL[name]
    attributes = attributes | ({"channels_last": 0} if "channels_last" in attributes else {})
    shape: tuple[Any, ...] = ("b", "c") if name in ("LayerNorm", "NormStatistics") else ("b", 320, "h", "w")
    parameters = [shape[1:2]] * (len(op.inputs) - 1)
    plugin = standin.Build(name, [shape, *parameters], ["fp16"] * len(op.inputs), op.encoded(attributes))
    fixed = {"LayerNorm": set(), "ChannelLayerNorm": {"n"}}.get(name, {"channels"})
    tiles = op.tiles([Tensor(tuple(Unknown() if isinstance(d, str) else d for d in shape), "fp16")], attributes)
    kernels = set()
    for sizes in ({"b": 2, "c": 1000, "h": 7, "w": 9}, {"b": 3, "c": 200_000, "h": 64, "w": 64}):
        x = Tensor(tuple(sizes.get(d, d) for d in shape), "fp16")
        for tactic in plugin.tactics:
            _, ptx, params, extra = plugin.launch(tactic, sizes)
            expected = op.launch([x], attributes, tiles[tactic - 1])
            assert params["grid_x"] == expected.grid
            assert extra == [value for scalar, value in expected.scalars.items() if scalar not in fixed]
            kernels.add((tactic, ptx))
    assert len(kernels) == len(plugin.tactics)


def test_types() -> None:
    """One type for all, or parameters in fp32 beside half precision."""
    kinds = standin.DataType
    halves = (kinds.HALF, kinds.BF16)
    assert set(build("AddLayerNorm", "fp16", 4).combinations) == {
        *((k,) * 6 for k in (kinds.FLOAT, *halves)),
        *((k, k, kinds.FLOAT, kinds.FLOAT, k, k) for k in halves),
    }
    assert set(build("LayerNormApply", "fp16", 2).combinations) == {
        *((k, kinds.FLOAT, k, k, k) for k in (kinds.FLOAT, *halves)),
        *((k, kinds.FLOAT, kinds.FLOAT, kinds.FLOAT, k) for k in halves),
    }
    assert set(build("ModulatedLayerNorm", "bf16", 4).combinations) == {(k,) * 4 for k in (kinds.FLOAT, *halves)}


def test_bad_attributes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ScaleShift: activation is 7; expected one of 'none', 'relu', 'silu'"):
        standin.Build("ScaleShift", [(2, 8), (8,), (8,)], ["fp16"] * 3, {"axis": 1, "activation": 7})
    with pytest.raises(ValueError, match="ScaleShift: activation has 5 numbers; expected one"):
        standin.Build("ScaleShift", [(2, 8), (8,), (8,)], ["fp16"] * 3, {"axis": 1, "activation": "silu"})
    with pytest.raises(ValueError, match="LayerNorm: the node lacks epsilon, ddof; plugins have no defaults"):
        standin.Build("LayerNorm", [(2, 8), (8,), (8,)], ["fp16"] * 3, {"axis": 1})
    with pytest.raises(ValueError, match="320 channels are not divisible into 33 groups"):
        standin.Build("GroupNorm", [(2, 320, 8, 8), (320,), (320,)], ["fp16"] * 3, GROUPS | {"num_groups": 33}).launch(
            1, {}
        )


def test_attributes_are_arrays_of_one_number(trtp: Any) -> None:
    """NVIDIA's bindings up to 11.1 make no number of an array of one with NumPy 2.4; those up to 10.15 read texts
    wrongly."""
    for op in OPS:
        creator = trtp.register.__globals__["QDP_CREATORS"][f"normdeploy::{op.name}"]
        expected = {name: "FLOAT32" if kind is float else "INT32" for name, kind in op.attributes.items()}
        assert {f.name: f.type.name for f in creator.field_names} == expected


def test_no_expression_builder_of_an_earlier_call_is_used(trtp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings up to 10.14 leave it behind when they have asked for shapes, and free it."""
    (holder,) = (c for c in trtp.SymInt32.__mro__ if "_exprBuilder" in vars(c))
    for op in OPS:
        monkeypatch.setattr(holder, "_exprBuilder", "freed")
        assert build(op.name, "fp16", "b").tactics


def test_a_release_that_lacks_what_is_changed_is_refused(trtp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = trtp.register.__globals__["_TemplateAOTPlugin"]
    monkeypatch.delattr(trtp, "aot_impl")
    monkeypatch.delattr(template, "get_timing_cache_id")
    said = r"lacks aot_impl, _TemplateAOTPlugin\.get_timing_cache_id; .*pip install 'tensorrt>=10\.9,<11\.5'"
    with pytest.raises(ImportError, match=said):
        qdp.register()


def test_other_peoples_plugins_keep_their_timing_cache_id(trtp: Any) -> None:
    plugin = trtp.register.__globals__["_TemplateAOTPlugin"]("Theirs", "theirs", 1)
    assert plugin.get_timing_cache_id() == ""


def test_the_validators_are_real(trtp: Any) -> None:
    def wrong(x: Any = 1) -> Any:
        return x

    wrong.__annotations__ = {"x": trtp.TensorDesc, "return": trtp.TensorDesc}
    with pytest.raises(ValueError, match="default value"):
        trtp.register("normdeploy::Wrong")(wrong)
    with pytest.raises(AssertionError, match="Unexpected attribute"):
        standin.Build("RMSNorm", [(2, 8), (8,)], ["fp16"] * 2, EPS | {"axis": -1, "offset": 0.0, "other": 1})


def test_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert qdp.compute_capability() == (8, 9)
    for said in ("eight", "8.x", "x.9", "8"):
        monkeypatch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", said)
        with pytest.raises(AotError, match=f"'{said}'; expected"):
            qdp.compute_capability()


def test_the_architecture_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", "12.0")
    _, ptx, _, _ = standin.Build("LayerNorm", [(4, 64), (64,), (64,)], ["fp16"] * 3, LN).launch(1, {})
    assert b".target sm_120\n" in ptx
