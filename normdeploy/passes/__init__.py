"""Run normdeploy's rewrites of norms as a pass of another tool's pipeline.

    FuseNorms           onnx_ir: a pass for ``onnx_ir.passes.Sequential`` and ``PassManager``
    NormRewriter        onnxsim: an argument for ``onnxsim.simplify(custom_rewriter=...)``
    olive_pass          Olive: the pass ``NormdeployFuseNorms``, and the package config that names it (`olive_packages`)

Each of them calls `normdeploy.optimize` without its cleanup, so that each rewrite is proved and the whole model is
compared. The tool keeps the cleanup. The module of Olive's pass imports Olive, so this package does not import that
module.
"""

from .fuse_norms import FuseNorms
from .norm_rewrite import NormRewrite
from .norm_rewriter import NormRewriter

__all__ = ["FuseNorms", "NormRewrite", "NormRewriter"]
