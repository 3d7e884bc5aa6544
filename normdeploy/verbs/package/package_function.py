"""Write an evidence bundle: a model repository for Triton Inference Server, with evidence that its models are right.

<output>/
  manifest.json          content, versions, SHA-256 of every file, bounds and results
                         (``normdeploy.verbs.package.evidence_bundle``).
  README.md              the model card (``normdeploy.verbs.package.model_card``).
  report.json            the report, with the norms and the verdicts on the samples.
  report.html            the same report as a page.
  certificate.json       nodes before each rewrite, if export or optimize wrote it (--certificate).
  certificates/*.json    the proof of each rewrite, from the report of export or optimize.
  samples/*.npz          inputs and expected outputs (``normdeploy.verbs.package.samples``).
  engines/*.engine       TensorRT-RTX engines, which Triton can't serve, and the kernels compiled from each for this GPU
                         (*.runtime-cache).
  model_repository/
    <name>_onnx/config.pbtxt, 1/model.onnx and its weights, warmup/*
    <name>_trt/config.pbtxt, 1/*.plan, warmup/*
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import source_date_epoch
from ...evidence.signing_keys import Signer
from ...evidence.slsa_provenance import ProvenanceRecord
from ...findings.rendering import Renderable
from ...reports.report import Report, to_plain
from ...reports.report_page import render_page
from ...storage.file_hash import hash_file
from ...storage.folder_replacement import replace_folder_atomically
from ...storage.onnx_files import load_onnx
from ...types import Arrays
from ..arguments.argument_validation import take_fields_as_arguments
from ..inspect.norm_census import take_census
from . import bundle_text as words
from . import evidence_bundle, manifest, triton_config
from .bundle_signing import sign_bundle
from .certificate_search import Certificates, find_certificate_file, find_certificates
from .model_card import render_model_card
from .model_files import PackagedEngine, copy_engines, copy_onnx, parse_engines
from .package_job import (
    PackageJob,
    batch_range,
    check_target,
    make_job,
    make_samples,
    make_serving,
    require_loadable,
    require_serving,
)
from .package_options import PackageCall
from .package_tables import show_package
from .triton_config import ServingOptions, TritonPort, WarmupRequest

# torch takes seconds to import.
if TYPE_CHECKING:
    from rich.console import Console

    from .sample_judgement import Judgement
    from .samples import Samples

# File of ``--certificate`` in the bundle
CERTIFICATE_FILE = "certificate.json"
# Maximum number of samples in the warm-up of a model that Triton does not batch.
_WARMUPS = 3


@dataclass(frozen=True, repr=False)
class Package(Renderable):
    """Result of ``package``; true if the files of the bundle were run and pass with the options that Triton will use.

    Attributes:
        models: names of the models' folders in the repository.
        serving: options for Triton's batching.
        judgement: verdicts of the runtimes of this machine on the samples.
        optimize: True if Triton will run the ONNX file with onnxruntime's optimizer.
    """

    path: Path
    models: tuple[str, ...]
    serving: ServingOptions
    judgement: Judgement
    optimize: bool
    files: int
    bytes: int
    notes: tuple[str, ...]
    seconds: float

    def summarize(self) -> str:
        """Return the main facts in one line."""
        verdict = "every sample is as expected" if self else "NOT as expected"
        return f"{verdict}; {self.path}: {', '.join(self.models)}; {self.files} files, {self.bytes / 1e6:.1f} MB"

    def __bool__(self) -> bool:
        used = [r for r in self.judgement.results if self.optimize or "(optimizer on)" not in r.runtime]
        return bool(used) and all(used)

    def show(self, console: Console) -> None:
        show_package(console, self)


@take_fields_as_arguments(PackageCall, onnx="onnx_path")
def package(call: PackageCall) -> Package:
    """Write an evidence bundle.

    A bundle has a model repository for Triton, samples with expected outputs, a report, certificates, versions and
    hashes.

    The ONNX file and engines become hard links if the file system allows it. Weights outside the ONNX file are copied.
    The folder ``output`` appears, or is replaced, only when the bundle is complete.

    Args:
        onnx_path: the file, a model in memory, or a result of ``export``.
        source: file of the PyTorch model. The expected outputs are its outputs in float64. Without ``source``, they are
            the outputs of onnxruntime with its optimizer off.
        engines: TensorRT and TensorRT-RTX engines of the ONNX file. Several TensorRT engines need their compute
            capabilities, as in "8.6=a.plan".
        feeds: input samples, as .npz files or mappings name -> array. If it is empty, samples are generated.
        name: name of the models; None uses the ONNX file's name.
        max_batch: largest batch that Triton may form. None uses the largest size that the export recorded; 0 turns
            batching off.
        instances: number of instances of each model (on each GPU).
        provider: provider that Triton runs the ONNX file on: "cpu" or "cuda".
        report_from: the JSON report of ``export`` or ``optimize``, which holds the certificates; None takes a report
            in the file's folder that records the SHA-256 of the file.
        replace: an older bundle at ``output`` may be replaced.
        sign: PEM file of a private key. The bundle then also gets a bill of materials and a signed statement of its
            sources (docs/reference/evidence.md).
        find_report: function that finds the report for a file's SHA-256. It is called if no report next to the file
            records this hash.
        progress: called with (stage, done, total).
        model, model_args, key, trust, ...: loading options for ``source``, as for ``export``. Options that are not
            given come from the export record of the ONNX file, as for ``verify``.

    Returns:
        The bundle's path, models, verdicts and notes. The result is true if the files of the bundle pass.

    Raises:
        InputError: an argument does not fit the file, or ``output`` is not empty.
        GraphError: the file is broken, or onnxruntime refuses it.
        RuntimeUnavailable: no runtime can run the file, or a library for signing is missing.
        NormdeployError: the folder can't be written.
    """
    from .sample_judgement import explain_row_dependence, judge_samples

    start = time.perf_counter()
    started = datetime.now(UTC)
    signer = None if call.sign is None else Signer(call.sign)
    require_serving(call)
    target = check_target(call)
    job = make_job(call)
    brought = parse_engines(call.engines)
    certificates = find_certificates(call, job.path, job.proto)
    samples, batch, why = make_samples(job, call)
    commands = words.reproduction_commands(call, job.proto)
    with replace_folder_atomically(target) as folder:
        repository = folder / words.REPOSITORY
        onnx_file = copy_onnx(job.path, job.proto, repository / f"{job.name}_onnx" / "1")
        placed = copy_engines(brought, repository / f"{job.name}_trt" / "1", folder / "engines")
        paths = [folder / e.path for e in placed]
        judgement = judge_samples(onnx_file, paths, samples, runtime_cache=True, progress=call.progress)
        optimize = not judgement.optimizer_is_wrong
        require_loadable(judgement, call, optimize=optimize)
        serving = make_serving(
            batch, why or explain_row_dependence(onnx_file, samples), call, batch_range(job, batch, samples)
        )
        outputs = triton_config.runtime_outputs(onnx_file, job.outputs, optimize=optimize)
        configs = _write_configs(
            job, outputs, repository, placed, serving, samples, gpu=call.provider == "cuda", optimize=optimize
        )
        models = tuple(Path(config).parent.name for config in configs)
        notes = words.bundle_notes(
            job.notes,
            serving,
            placed,
            judgement,
            optimize=optimize,
            certificates=certificates,
        )
        summary = take_census(load_onnx(onnx_file), progress=call.progress)
        manifest.write_samples(folder, samples, manifest.npz_keys([*job.inputs, *job.outputs]))
        for index, certificate in enumerate(certificates.norms):
            manifest.write_json(folder / "certificates" / f"{index:03}.json", certificate)
        notes += _place_certificate_file(folder, onnx_file, call, job, certificates.digest)
        seconds = time.perf_counter() - start
        files = {"source": job.path.name, "output": target.name}
        made = words.package_command(commands)
        report = _write_report(
            folder,
            Report(
                "package",
                files,
                summary,
                {"parity": judgement.to_json()},
                notes=tuple(notes),
                command=made,
                seconds={"package": seconds},
            ),
        )
        content = manifest.manifest_head() | {
            "name": job.name,
            "source": {"file": job.path.name, "sha256": certificates.digest},
            "model": job.model,
            "onnx": onnx_file.relative_to(folder).as_posix(),
            "configs": configs,
            "engines": manifest.engines_to_json(placed),
            "max_batch": serving.max_batch,
            **manifest.evidence_section(folder, job.inputs, job.outputs, samples, judgement, summary),
            "commands": commands,
        }
        (folder / "README.md").write_bytes(_write_card(content, report, certificates))
        content["files"] = manifest.hash_files(folder, call.progress)
        manifest.write_json(folder / evidence_bundle.MANIFEST, content)
        if signer is not None:
            sign_bundle(folder, signer, _bundle_origin(content, call, brought, certificates, started))
    sizes = [told["bytes"] for told in content["files"].values()]
    count = len(sizes) + (1 if signer is None else len(evidence_bundle.BESIDE))
    return Package(target, models, serving, judgement, optimize, count, sum(sizes), tuple(notes), seconds)


def _bundle_origin(
    content: Mapping[str, Any],
    call: PackageCall,
    engines: Sequence[PackagedEngine],
    certificates: Certificates,
    started: datetime,
) -> ProvenanceRecord:
    """Record the sources of the bundle. Start and end times are recorded unless SOURCE_DATE_EPOCH is set."""
    files = [*(e.path for e in engines), *(i for i in call.sample_sources if isinstance(i, str | os.PathLike))]
    found = [(content["source"]["file"], content["source"]["sha256"]), *((Path(f).name, hash_file(f)) for f in files)]
    if certificates.report_source is not None:
        found.append(certificates.report_source)
    if content["model"] is not None and call.source is not None:
        found.append((Path(call.source).name, content["model"]["sha256"]))
    made_of = dict[str, str]()
    for index, (name, digest) in enumerate(found):
        made_of[f"{index}/{name}" if made_of.get(name, digest) != digest else name] = digest
    times = () if source_date_epoch() is not None else (f"{t:%Y-%m-%dT%H:%M:%SZ}" for t in (started, datetime.now(UTC)))
    return ProvenanceRecord({"commands": content["commands"]}, made_of, "", {}, *times)


# ------------------------------------------------------------------ output files


def _place_certificate_file(
    folder: Path, onnx_file: Path, call: PackageCall, job: PackageJob, digest: str
) -> list[str]:
    """Copy the certificate file of the packaged file into the bundle.

    Args:
        onnx_file: the file in the bundle.
        digest: SHA-256 of the packaged file.

    Returns:
        one note if there is a certificate file.
    """
    found = find_certificate_file(call, job.path, digest)
    if found is None:
        return []
    if hash_file(onnx_file) != digest:
        return [f"{found.name} was not packaged: the bundle's ONNX file has other bytes"]
    shutil.copyfile(found, folder / CERTIFICATE_FILE)
    return [f"{CERTIFICATE_FILE} holds the nodes before each rewrite, from {found.name}"]


def _write_configs(
    job: PackageJob,
    outputs: Sequence[TritonPort],
    repository: Path,
    placed: Sequence[PackagedEngine],
    serving: ServingOptions,
    samples: Samples,
    *,
    gpu: bool,
    optimize: bool,
) -> list[str]:
    """Write the configurations and warm-up data.

    Args:
        outputs: outputs of the ONNX file, with the dims that onnxruntime infers.

    Returns:
        Paths of the configurations in the bundle.
    """
    served = [e for e in placed if e.is_served]
    if served and served[0].capability:
        plans = {e.capability: Path(e.path).name for e in served}
    else:
        plans = None
    models = [(f"{job.name}_onnx", "onnxruntime")] + ([(f"{job.name}_trt", "tensorrt")] if served else [])
    paths = []
    for name, runtime in models:
        folder = repository / name
        warmups = _make_warmups(folder / "warmup", job, serving, samples)
        of_engines = runtime == "tensorrt"
        config = triton_config.Config(
            name=name,
            runtime=runtime,
            inputs=job.inputs,
            outputs=job.outputs if of_engines else outputs,
            serving=serving,
            gpu=gpu or of_engines,
            files=plans if of_engines else None,
            optimize=optimize or of_engines,
            warmups=warmups,
        )
        (folder / "config.pbtxt").write_text(config.config_text(), encoding="utf-8")
        paths.append(f"{words.REPOSITORY}/{name}/config.pbtxt")
    return paths


def _make_warmups(folder: Path, job: PackageJob, serving: ServingOptions, samples: Samples) -> list[WarmupRequest]:
    """Build warm-up requests from real samples.

    If Triton batches, each request repeats one row: there is one request for batch 1, each preferred batch size and the
    largest batch. Otherwise each request is a whole sample.
    """
    whole = [s for s in samples.cases if all(a.size for a in s.inputs.values())]
    real = [s for s in whole if s.kind in ("random", "given")] or whole
    if serving.max_batch and real:
        files, shapes = _write_raw_inputs(folder, 0, {n: a[0] for n, a in real[0].inputs.items()}, job)
        sizes = sorted({1, *serving.preferred, serving.max_batch})
        return [WarmupRequest(f"batch {size}", size, files, shapes) for size in sizes]
    return [
        WarmupRequest(f"sample {i}", 1, *_write_raw_inputs(folder, i, s.inputs, job))
        for i, s in enumerate(real[:_WARMUPS])
    ]


def _write_raw_inputs(
    folder: Path, number: int, arrays: Arrays, job: PackageJob
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    files = {}
    shapes = {}
    for index, port in enumerate(job.inputs):
        folder.mkdir(exist_ok=True)
        array = arrays[port.name]
        files[port.name], shapes[port.name] = f"{number}_{index}.bin", tuple(array.shape)
        (folder / files[port.name]).write_bytes((array if sys.byteorder == "little" else array.byteswap()).tobytes())
    return files, shapes


def _write_report(folder: Path, report: Report) -> dict[str, Any]:
    """Write the report as JSON and as a page.

    Returns:
        the document.
    """
    text = report.to_json()
    (folder / "report.json").write_bytes(text.encode(errors="replace"))
    document = json.loads(text)
    # The page needs jinja2 and matplotlib, which are optional dependencies.
    with suppress(ImportError):
        (folder / "report.html").write_bytes(render_page(document).encode(errors="replace"))
    return document


def _write_card(content: Mapping[str, Any], report: Mapping[str, Any], certificates: Certificates) -> bytes:
    """Write the model card from the documents as they are in the bundle."""
    card = render_model_card(to_plain(content), report, certificates.norms)
    return card.encode(errors="replace")
