"""Custom operators: their ONNX form is given from Python, or by an installed package and by nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op

import normdeploy
from normdeploy import extensions
from normdeploy.errors import ExportError, ExtensionError, InputError


@torch.library.custom_op("normdeploy_tests::center", mutates_args=())
def center(x: torch.Tensor) -> torch.Tensor:
    """x less its mean over the last dim."""
    return x - x.mean(-1, keepdim=True)


@center.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def center_in_onnx(x: Any) -> Any:
    return op.Sub(x, op.ReduceMean(x, [-1], keepdims=1))


TABLE = {torch.ops.normdeploy_tests.center.default: center_in_onnx}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = torch.ops.normdeploy_tests.center(self.linear(x))
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "key", [*TABLE, torch.ops.normdeploy_tests.center, "normdeploy_tests::center", "normdeploy_tests::center.default"]
)
def test_a_table_from_python(key: Any) -> None:
    result = normdeploy.export(Net().eval(), X, custom_translation_table={key: center_in_onnx})
    assert [f.status for f in result.summary.findings] == ["fused"]
    assert normdeploy.verify(result, seeds=1)


def test_without_it_the_error_says_what_to_do() -> None:
    with pytest.raises(ExportError, match=r"normdeploy_tests\.center") as caught:
        normdeploy.export(Net().eval(), X)
    said = str(caught.value)
    assert "normdeploy.export(model, ..., custom_translation_table={'normdeploy_tests::center': FUNCTION})" in said
    assert "for the command line, in an installed package with the entry point normdeploy.translations" in said


def right_for_one_row_in_onnx(x: Any) -> Any:
    return op.Mul(center_in_onnx(x), op.Cast(op.Shape(x, start=0, end=1), to=1))


def half_in_onnx(x: Any) -> Any:
    return op.Mul(center_in_onnx(x), op.CastLike(op.Constant(value_float=0.999), x))


class Centered(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.normdeploy_tests.center(x)


_WRONG = (
    r"nothing was written. Run in onnxruntime and in PyTorch on random inputs at batch=1, 8 of 8 elements of output"
    r" '\w+' differ by more than rounding explains, most at \[0, \d\]: \S+ in onnxruntime,"
    r" \S+ in PyTorch; the error is 0\.\d+, allowed"
    r" \S+\. Either .*--no-check.*`normdeploy bisect MODEL FILE` names the node"
)


def test_a_wrong_translation_is_an_error_that_names_the_output_and_both_values(tmp_path: Path) -> None:
    table = {"normdeploy_tests::center": half_in_onnx}
    with pytest.raises(ExportError, match=_WRONG):
        normdeploy.export(
            Centered().eval(), X, inputs=["x[batch,8]"], output=tmp_path / "m.onnx", custom_translation_table=table
        )
    assert not (tmp_path / "m.onnx").exists()


def test_a_translation_that_is_right_at_the_smallest_size_alone_is_an_error() -> None:
    table = {"normdeploy_tests::center": right_for_one_row_in_onnx}
    with pytest.raises(ExportError, match=r"nothing was written. Run in onnxruntime and in PyTorch .* at batch=3, "):
        normdeploy.export(Centered().eval(), X, inputs=["x[batch,8]"], custom_translation_table=table)


def test_without_the_check_a_wrong_translation_is_written(tmp_path: Path) -> None:
    table = {"normdeploy_tests::center": half_in_onnx}
    normdeploy.export(Centered().eval(), X, output=tmp_path / "m.onnx", custom_translation_table=table, check=False)
    assert (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"normdeploy_tests::centre": center_in_onnx}, "'normdeploy_tests::centre', which is not registered"),
        ({"center": center_in_onnx}, "write namespace::name"),
        ({3: center_in_onnx}, "has the key 3"),
        ({"normdeploy_tests::center": "ReduceMean"}, "pass an onnxscript function"),
        ([center_in_onnx], "is a list"),
    ],
)
def test_tables_that_can_not_be_read(table: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        normdeploy.export(Net().eval(), X, custom_translation_table=table)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    """A package of that name's table, as pip leaves it: a module, and the metadata that names it."""
    module = f"translations_of_{name}"
    (folder / f"{module}.py").write_text(code)
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{extensions.TRANSLATIONS}]\n{name} = {module}:table\n")
    monkeypatch.syspath_prepend(str(folder))


def test_an_installed_package_is_asked_for_its_own_operators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from tests.exporting.test_custom_translations import TABLE\n\n\ndef table():\n    return TABLE\n"
    install(tmp_path, monkeypatch, "normdeploy_tests", code)
    install(tmp_path, monkeypatch, "other", "raise AssertionError('imported')\n")
    assert "translations_of_normdeploy_tests" not in sys.modules
    normdeploy.export(torch.nn.Linear(8, 8).eval(), X)
    assert "translations_of_normdeploy_tests" not in sys.modules, "the model holds no operator of it"
    assert normdeploy.verify(normdeploy.export(Net().eval(), X), seeds=1)
    assert "translations_of_other" not in sys.modules


@pytest.mark.parametrize(
    ("code", "said"), [("table = 1 / 0\n", "ZeroDivisionError"), ("table = 3\n", "is a int, not a mapping")]
)
def test_a_package_that_is_broken_is_named(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "normdeploy_tests", code)
    monkeypatch.delitem(sys.modules, "translations_of_normdeploy_tests", raising=False)
    with pytest.raises(ExtensionError, match=f"'translations_of_normdeploy_tests' .*{said}"):
        normdeploy.export(Net().eval(), X)
    with extensions.disabled(), pytest.raises(ExportError, match=r"normdeploy_tests.center"):
        normdeploy.export(Net().eval(), X)
