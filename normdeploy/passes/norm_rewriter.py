"""Rewrite norms inside of ``onnxsim.simplify``.

onnxsim (since 0.7.1) calls its ``custom_rewriter`` between its own optimizations until nothing changes any more. The
result False tells onnxsim that the call changed nothing.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import onnx

from .norm_rewrite import NormRewrite, read_settings, rewrite_norms


class NormRewriter:
    """Function for ``onnxsim.simplify(model, custom_rewriter=NormRewriter(...))``.

    Args:
        options: runtime, provider, fuse, strict, strict_proof, compare_limit, inputs and dims, as for
            `normdeploy.optimize`.

    Attributes:
        rewrites: what each call of onnxsim did, in the order of the calls.

    Raises:
        InputError: an option has an unknown value.
    """

    __signature__ = inspect.signature(read_settings).replace(return_annotation=inspect.Signature.empty)

    def __init__(self, **options: Any) -> None:
        self.settings = read_settings(**options)
        self.rewrites: list[NormRewrite] = []

    def __call__(self, model: onnx.ModelProto) -> onnx.ModelProto | Literal[False]:
        """Fuse and fold the norms of a model.

        Args:
            model: the model with its weights; it is not changed.

        Returns:
            the rewritten model, or False if nothing was rewritten.

        Raises:
            NormdeployError: as for `normdeploy.optimize`.
        """
        rewritten = rewrite_norms(model, self.settings)
        self.rewrites.append(rewritten.rewrite)
        if not rewritten.rewrite.modified:
            return False
        return rewritten.proto
