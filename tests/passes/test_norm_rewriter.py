"""The callable for onnxsim, without onnxsim (`test_hosts` calls it from onnxsim itself)."""

from __future__ import annotations

import inspect

import onnx
import pytest

from normdeploy.errors import InputError
from normdeploy.passes import NormRewriter
from tests.passes.graphs import model_with_norm, model_without_norm, ops


def test_norm_is_rewritten_and_recorded() -> None:
    rewriter = NormRewriter(runtime="onnxruntime")
    given = model_with_norm()
    before = given.SerializeToString(deterministic=True)
    made = rewriter(given)
    assert isinstance(made, onnx.ModelProto)
    assert ops(made) == ["MatMul", "LayerNormalization", "MatMul", "Twice"]
    assert given.SerializeToString(deterministic=True) == before
    (rewrite,) = rewriter.rewrites
    assert rewrite.modified
    (finding,) = rewrite.summary.findings
    assert finding.status == "fused"
    assert finding.certificate
    assert "fused into LayerNormalization" in str(rewrite)


def test_second_call_changes_nothing() -> None:
    rewriter = NormRewriter()
    made = rewriter(model_with_norm())
    assert rewriter(made) is False
    assert [rewrite.modified for rewrite in rewriter.rewrites] == [True, False]


def test_model_without_norm_is_not_changed() -> None:
    rewriter = NormRewriter(runtime="onnxruntime", fuse="portable")
    assert rewriter(model_without_norm()) is False
    assert not rewriter.rewrites[0].summary.findings


def test_unknown_option_is_refused_when_the_rewriter_is_made() -> None:
    with pytest.raises(InputError, match="unknown runtime 'ort'"):
        NormRewriter(runtime="ort")
    with pytest.raises(TypeError, match="simplify"):
        NormRewriter(simplify=True)
    assert "runtime" in inspect.signature(NormRewriter).parameters
