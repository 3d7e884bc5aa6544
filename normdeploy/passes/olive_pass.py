"""Rewrite norms in an Olive workflow: the pass ``NormdeployFuseNorms``.

Olive finds a pass by its package config, a JSON file with the module of each pass. `normdeploy.passes.olive_packages`
adds this pass to Olive's own package config.

This module imports Olive, so only Olive itself imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.onnx.common import get_external_data_config, model_proto_to_olive_model
from olive.passes.pass_config import BasePassConfig, PassConfigParam

from ..errors import NormdeployError
from ..reports.report import Report
from ..storage.file_replacement import write_bytes
from ..storage.onnx_files import load_onnx
from ..verb_options import iter_options
from .norm_rewrite import NormRewrite, RewriteSettings, read_settings, rewrite_norms

# Name of the report in the folder of the model that the pass writes.
REPORT = "normdeploy_report.json"
# Olive's key for files that belong to a model.
_FILES = "additional_files"

# Olive shows the messages of loggers below its own name.
_log = logging.getLogger("olive.normdeploy")


class NormdeployFuseNorms(Pass):
    """Fuse and fold every normalization of an ONNX model, each with a proof.

    The folder of the written model gets a report (`REPORT`). The report has a finding for each norm, with its
    certificate or with the reason why the norm stays.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        """Return the options of `RewriteSettings`, and Olive's own options for external data."""
        options = {
            name: PassConfigParam(
                type_=list[str] if default == () else type(default),
                default_value=[] if default == () else default,
                description=spelling.help,
            )
            for name, spelling, default in iter_options(RewriteSettings)
        }
        return {**options, **get_external_data_config()}

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        """Rewrite the norms of a model.

        Returns:
            the written model, with the report among its additional files. If nothing was rewritten, ``model``.

        Raises:
            ValueError: the reason of `normdeploy.optimize`. Olive logs all other errors of a pass, and ends with exit
                code 0 and without a model.
        """
        source = Path(model.model_path)
        try:
            settings = read_settings(**{name: getattr(config, name) for name, _, _ in iter_options(RewriteSettings)})
            rewritten = rewrite_norms(load_onnx(source), settings)
        except NormdeployError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from error
        _log.info("normdeploy: %s", rewritten.rewrite.summarize())
        if not rewritten.rewrite.modified:
            return model
        target = Path(resolve_onnx_path(output_model_path, source.name))
        written = model_proto_to_olive_model(rewritten.proto, target, config, force_model_dir=True)
        report = _write_report(target, source, rewritten.rewrite)
        written.model_attributes = _add_file(model.model_attributes or {}, report)
        return written


def _write_report(target: Path, source: Path, rewrite: NormRewrite) -> Path:
    """Write the report of ``normdeploy optimize`` beside the written model.

    Returns:
        path of the report.
    """
    path = target.with_name(REPORT)
    files = {"source": str(source), "output": str(target)}
    report = Report("optimize", files, rewrite.summary, notes=rewrite.notes, seconds=rewrite.summary.seconds)
    write_bytes(path, report.to_json().encode(errors="replace"))
    return path


def _add_file(attributes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Add a file to the additional files of a model, without an older report."""
    others = [file for file in attributes.get(_FILES) or () if Path(file).name != REPORT]
    return {**attributes, _FILES: sorted([*others, str(path)])}
