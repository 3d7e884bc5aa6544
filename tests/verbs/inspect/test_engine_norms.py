"""The layers of each norm, their form, types, reformats and time are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from normdeploy.engines.layer_info import parse_layer_info
from normdeploy.verbs.inspect.engine_norms import EngineNorm, NormForm, NormPlacer
from normdeploy.verbs.inspect.norm_nodes import NormNodes, guess_norms, norm_path, sounds_like_norm_kernel
from tests.engine_files import layer, metadata, tensor

HALF = "Row major linear FP16 format"
REFORMAT = layer(
    "Reformatting CopyNode for Input Tensor 0 to n",
    "Reformat",
    [tensor("a", "Row major linear FP32")],
    [tensor("half_a", HALF)],
)


@dataclass
class Case:
    """Layers of an engine, and nodes of a norm."""

    layers: list[dict[str, Any]]
    nodes: tuple[str, ...] = ("n",)
    tensor: str = "n_y"
    ops: tuple[tuple[str, str], ...] = (("n", "LayerNormalization"), ("m", "MatMul"), ("c", "Cast"))

    def place(self) -> EngineNorm:
        read = parse_layer_info({"Layers": self.layers, "Bindings": ["x", "y"]}, "f")
        norm = NormNodes(
            kind="LayerNorm", module="net.norm", tensor=self.tensor, nodes=self.nodes, outputs=(self.tensor,)
        )
        return NormPlacer(read.layers, read.io_tensors, dict(self.ops), None).place_norms([norm])[0]


@pytest.mark.parametrize(
    ("layer_type", "form"),
    [
        ("PluginV3", NormForm.PLUGIN),
        ("kgen", NormForm.KERNEL),
        ("Normalization", NormForm.NATIVE),
        ("PointWiseV2", NormForm.POINTWISE),
        ("CaskConvolution", NormForm.CONVOLUTION),
        ("gemm", NormForm.MATMUL),
        ("Reduce", NormForm.REDUCTION),
        ("TopK", NormForm.OTHER),
    ],
)
def test_one_layer_gives_its_form(layer_type: str, form: NormForm) -> None:
    placed = Case([layer("l", layer_type, [tensor("x")], [tensor("y")], Metadata=metadata("n"))]).place()
    assert (placed.form, placed.layers, placed.layer_types) == (form, (0,), (layer_type,))


def test_norm_in_two_layers_is_several_layers() -> None:
    layers = [
        layer("a", "Reduce", [tensor("x")], [tensor("t")], Metadata=metadata("n1")),
        layer("b", "PointWiseV2", [tensor("t", HALF)], [tensor("y", HALF)], Metadata=metadata("n2")),
    ]
    placed = Case(layers, nodes=("n1", "n2", "n3")).place()
    assert (placed.form, placed.layer_types) == (NormForm.SEVERAL, ("Reduce", "PointWiseV2"))
    assert placed.missing == ("n3",)
    # t is between the norm's own layers, so it is neither an input nor an output.
    assert (placed.inputs, placed.outputs) == (("float32",), ("float16",))


def test_other_ops_of_the_layer_are_listed() -> None:
    placed = Case([layer("k", "kgen", [tensor("x")], [tensor("y")], Metadata=metadata("m", "n", "c"))]).place()
    assert placed.fused_with == ("MatMul", "Cast")


def test_weights_in_the_name_of_a_layer_are_no_ops() -> None:
    placed = Case([layer("w.weight + m + n", "CaskGemm", [tensor("x")], [tensor("y")])]).place()
    assert (placed.form, placed.fused_with) == (NormForm.MATMUL, ("MatMul",))


def test_constants_do_not_count_as_inputs() -> None:
    inputs = [tensor("x", "Half"), tensor("gamma_constant", "Float")]
    placed = Case([layer("k", "kgen", inputs, [tensor("y", "Half")], Metadata=metadata("n"))]).place()
    assert placed.inputs == ("float16",)


def test_reformats_before_and_after_are_found() -> None:
    after = layer("copy", "Reformat", [tensor("n_out", HALF)], [tensor("y")])
    far = layer("far", "Reformat", [tensor("y")], [tensor("z")])
    plugin = layer("n", "PluginV3", [tensor("half_a", HALF)], [tensor("n_out", HALF)], PluginType="RMSNorm")
    placed = Case([REFORMAT, plugin, after, far]).place()
    assert placed.reformats == (0, 2)
    assert (placed.layer_types, placed.layouts) == (("RMSNorm",), ("Row major linear",))


def test_call_of_a_function_is_found_by_the_caller() -> None:
    text = "[ONNX Layer: node_of_s | n (Norm)]\x1f[ONNX Layer: node_of_o | n (Norm)]"
    placed = Case([layer("k", "kgen", [tensor("x")], [tensor("y")], Metadata=text)]).place()
    assert (placed.form, placed.fused_with, placed.missing) == (NormForm.KERNEL, (), ())


def test_norm_that_was_rewritten_is_found_by_its_result() -> None:
    """`build --norm-impl plugin` names its node by the output."""
    plugin = layer("p", "PluginV3", [tensor("x")], [tensor("y")], Metadata=metadata("n_y_LayerNorm"))
    assert Case([plugin]).place().form is NormForm.PLUGIN
    unnamed = layer("p", "PluginV3", [tensor("x")], [tensor("n_y")], Metadata=metadata("other"))
    assert Case([unnamed]).place().form is NormForm.PLUGIN


def test_reformat_of_the_norms_name_is_no_layer_of_it() -> None:
    assert Case([REFORMAT, layer("Constant n", "Constant", [], [tensor("n_y")])]).place().form is NormForm.ABSENT


def test_region_is_shared_by_all_norms_in_it() -> None:
    region = layer("{ForeignNode[a...b]}", "Myelin", [tensor("x")], [tensor("y")], Metadata=metadata("n", "o"))
    read = parse_layer_info({"Layers": [region]}, "f")
    norms = [NormNodes(kind="RMSNorm", module=name, tensor=f"{name}_y", nodes=(name,)) for name in ("n", "o")]
    placed = NormPlacer(read.layers, (), {}, None).place_norms(norms)
    assert [norm.form for norm in placed] == [NormForm.REGION] * 2
    assert [norm.shared_with for norm in placed] == [("o",), ("n",)]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/encoder/layer.0/norm1/ReduceMean", "/encoder/layer.0/norm1"),
        ("/model/input_layernorm/Sqrt", "/model/input_layernorm"),
        ("/h.0/ln_2/LayerNormalization", "/h.0/ln_2/LayerNormalization"),
        ("/h.0/ln_2/Sqrt", "/h.0/ln_2"),
        ("/bn1/BatchNormalization", "/bn1/BatchNormalization"),
        ("node_layer_norm_3", "node_layer_norm_3"),
        ("/RandomNormal", ""),
        ("/normal/Add", ""),
        ("/lnx/Add", ""),
        ("node_mean", ""),
        ("x" * 2000 + "norm", ""),
    ],
)
def test_path_of_a_norm_is_read_from_names(name: str, path: str) -> None:
    assert norm_path(name) == path


def test_norms_are_guessed_from_names_and_kernels() -> None:
    layers = [
        layer("k1", "kgen", [], [], Metadata=metadata("/norm1/ReduceMean", "/norm1/Sub")),
        layer("k2", "kgen", [], [], Metadata=metadata("/norm1/Div", "/attn/MatMul")),
        layer("__myl_MeanSubMulMeanAddSqrtDiv_myl0_3", "kgen", [], [], Metadata=metadata("node_mean", "node_div")),
        layer("p", "PluginV3", [], [], PluginType="AddRMSNorm", Metadata=metadata("p")),
        layer("__myl_FcAdd", "fusion", [], [], Metadata=metadata("fc")),
        layer("/norm1/c", "Constant", [], []),
    ]
    read = parse_layer_info({"Layers": layers}, "f")
    guessed = guess_norms(read.layers)
    placed = NormPlacer(read.layers, (), {}, None).place_norms(guessed)
    assert [(norm.module, norm.layers) for norm in placed] == [
        ("/norm1", (0, 1)),
        ("__myl_MeanSubMulMeanAddSqrtDiv_myl0_3", (2,)),
        ("p", (3,)),
    ]
    assert placed[0].fused_with == ("/attn/MatMul",)


def test_kernel_of_a_norm_has_a_mean_and_then_a_root() -> None:
    assert sounds_like_norm_kernel("__myl_MulMeanAddSqrtDivMul_myl0_1")
    assert not sounds_like_norm_kernel("__myl_SqrtMulMean_myl0_1")
    assert not sounds_like_norm_kernel("__myl_FcAdd")
