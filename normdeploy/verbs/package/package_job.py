"""Read and validate the content of a bundle before anything is written."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from ...errors import InputError
from ...inputs.input_cases import read_inputs
from ...inputs.input_ranges import name_dynamic_dims
from ...storage.export_record import read_record
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import required_inputs
from ..run.run_function import PROVIDERS
from ..stage_progress import describe_loading
from ..verify.reference_loading import load_judged_model
from ..verify.runtime_candidates import OFF, ON
from . import evidence_bundle, triton_config
from .package_options import PackageCall, PackageOptions
from .triton_config import ServingOptions, TritonPort

# torch takes seconds to import.
if TYPE_CHECKING:
    from ..verify.comparison_result import Comparison
    from .samples import Samples

_INSTANCES = 1024
# Largest value of the int32 fields in Triton's configuration.
_LARGEST = 2**31 - 1


def require_serving(options: PackageOptions) -> None:
    """Check the serving options.

    Raises:
        InputError: Triton can't serve with these options.
    """
    if options.provider not in PROVIDERS:
        raise InputError(f"unknown provider {options.provider!r}; choose one of {', '.join(PROVIDERS)}")
    if not 1 <= options.instances <= _INSTANCES or (options.max_batch or 0) < 0:
        sizes = f"instances is {options.instances} and the largest batch {options.max_batch}"
        raise InputError(f"{sizes}; pass 1 to {_INSTANCES} instances and a batch of 0 or more")


@dataclass
class PackageJob:
    """Model to package.

    Attributes:
        proto: the ONNX file without its weights.
        name: name of the models in the repository.
        model: kind and SHA-256 of the PyTorch model file.
    """

    path: Path
    proto: onnx.ModelProto
    name: str
    inputs: tuple[TritonPort, ...]
    outputs: tuple[TritonPort, ...]
    model: dict[str, str] | None = None
    notes: list[str] = field(default_factory=list)


def make_job(call: PackageCall) -> PackageJob:
    """Read the ONNX file, its inputs and outputs.

    Returns:
        The job, without the PyTorch model.

    Raises:
        GraphError, InputError: the file is broken, it has inputs or outputs that Triton can't serve, or the given name
            is not valid for Triton.
    """
    path = Path(os.path.realpath(call.model_path))
    proto = load_onnx(path, external_data=False)
    # Shape inference then also writes these names into the shapes of the outputs.
    name_dynamic_dims(proto)
    inputs = triton_config.make_ports(required_inputs(proto.graph))
    job = PackageJob(
        path, proto, choose_name(Path(call.model_path).stem, call.name), inputs, triton_config.output_ports(proto)
    )
    if half := [port.name for port in (*inputs, *job.outputs) if port.dtype == "bfloat16"]:
        job.notes.append(
            f"Triton's backend for onnxruntime does not support bfloat16 ({', '.join(half)}) and can't load"
            f" {job.name}_onnx; `normdeploy export --precision bf16 --keep-io` writes a file with float32"
            " inputs and outputs"
        )
    return job


def check_target(call: PackageCall) -> Path:
    """Check that the bundle can be written without losing other files.

    Returns:
        The real path of the bundle's folder.

    Raises:
        InputError: the folder can't be created; it contains files that are not a bundle; or it contains a bundle and
            ``replace`` is not set.
    """
    target = Path(os.path.realpath(call.output))
    path = repr(os.fspath(call.output))
    if not target.parent.is_dir():
        raise InputError(f"can't write {path}: folder not found: {target.parent.name!r}; create it first")
    if not target.exists():
        return target
    if not target.is_dir():
        raise InputError(f"can't write {path}: it is a file; pass the name of a folder")
    if not any(target.iterdir()):
        return target
    try:
        old = evidence_bundle.open_bundle(target)
        known = old.read_part("files", evidence_bundle.parse_files)
    except InputError as error:
        raise InputError(f"{path} exists and is not a normdeploy bundle ({error}); choose another folder") from error
    files, others = evidence_bundle.scan_folder(target)
    if strange := sorted({*files, *others} - known.keys() - evidence_bundle.BESIDE):
        raise InputError(
            f"the bundle {path} contains files that are not part of it and would be lost: {strange[:5]}; move them away"
        )
    if not call.replace:
        raise InputError(f"{path} already contains a bundle; replace it with --replace, or choose another folder")
    return target


def choose_name(stem: str, given: str | None) -> str:
    """Choose the name of the models: ``given``, or the stem of the file with unsafe characters replaced.

    Returns:
        A name that is valid for Triton.

    Raises:
        InputError: ``given`` is not valid for Triton.
    """
    safe = triton_config.safe_model_name(stem if given is None else given)
    if given is not None and safe != given:
        raise InputError(
            f"the name {given!r} is not valid for Triton (letters, digits, '_', '.', '-', at most 100); use"
            f" {safe!r}, for example"
        )
    return safe


def make_samples(job: PackageJob, call: PackageCall) -> tuple[Samples, str, str]:
    """Make the samples from generated inputs or from the user's inputs.

    Returns:
        The samples; the name of the batch dim, or ""; and the reason why there is no batch dim.

    Raises:
        InputError: batching was requested and Triton can't batch the file; or the inputs or outputs of the PyTorch
            model and of the file differ.
    """
    from .samples import make_samples_from_file, make_samples_from_model

    batch, why = triton_config.find_batch_dim(job.inputs, job.outputs)
    if call.max_batch and not batch:
        raise InputError(f"--max-batch is {call.max_batch}, but Triton can't batch this file: {why}; omit it")
    given = read_inputs(call.sample_sources) if call.sample_sources else []
    if call.source is None:
        made = make_samples_from_file(
            job.path,
            job.proto,
            job.inputs,
            batch=batch,
            largest=call.max_batch or 0,
            inputs=given,
            progress=call.progress,
        )
        return made, batch, why
    if call.progress is not None:
        call.progress(f"load {describe_loading(call.source)}".rstrip(), 0, 0)
    model, notes = load_judged_model(call.source, [job.path], (), None, call.load_keywords)
    job.notes += notes
    if model.word:
        job.notes.append(f"sizes and values of the samples come from {model.word}; the model itself states none")
    job.model = {"kind": model.kind, "sha256": model.sha256}
    theirs = {spec.name for spec in model.inputs}
    ours = {p.name for p in job.inputs}
    if theirs != ours or not {p.name for p in job.outputs} <= set(model.outputs):
        raise InputError(
            f"{job.path.name} has the inputs {sorted(ours)}, but the model has {sorted(theirs)}; was the file"
            " exported from this model?"
        )
    return (
        make_samples_from_model(model, job.path, job.proto, batch=batch, inputs=given, progress=call.progress),
        batch,
        why,
    )


def batch_range(job: PackageJob, batch: str, samples: Samples) -> tuple[int, int, int]:
    """Find the range of the batch dim.

    Returns:
        (min, usual, max) as recorded by ``export``. Without a record, the sizes come from the samples.
    """
    for spec in read_record(job.proto).get("inputs", ()):
        for dim in spec.shape:
            if batch and dim.name == batch:
                return dim.min, dim.opt, min(dim.max, _LARGEST)
    sizes = [len(a) for s in samples.cases for a in s.inputs.values() if a.ndim]
    most = max([1, *sizes])
    return 1, most, most


def require_loadable(judgement: Comparison, call: PackageCall, *, optimize: bool) -> None:
    """Check that onnxruntime has the kernels to load the ONNX file on the provider that Triton uses.

    Raises:
        InputError: a kernel is missing, so Triton would refuse to load the file.
    """
    missed = {m.runtime: m.reason for m in judgement.not_run}
    if call.provider == "cpu" and (reason := missed.get(ON if optimize else OFF)):
        raise InputError(f"Triton can't load {Path(call.model_path).name} on the CPU: {reason}; pass --provider cuda")


def make_serving(batch: str, why: str | None, call: PackageCall, sizes: tuple[int, int, int]) -> ServingOptions:
    """Choose the options for Triton's batching.

    Args:
        batch: name of the batch dim; "" if there is none.
        why: reason why the file can't be batched, or None.
        sizes: (min, usual, max) of the batch dim.

    Returns:
        The serving options, with a reason if Triton must not batch.

    Raises:
        InputError: the model does not accept batches of the requested size.
    """
    low, usual, high = sizes
    if not why and low > 1:
        why = f"the dim {batch!r} is at least {low}, but Triton also sends single rows"
    if call.max_batch == 0:
        why = "--max-batch is 0"
    if why:
        if call.max_batch:
            raise InputError(f"--max-batch is {call.max_batch}, but Triton must not batch this file: {why}; omit it")
        return ServingOptions(0, (), call.instances, why)
    if call.max_batch is not None and call.max_batch > high:
        raise InputError(
            f"--max-batch is {call.max_batch}, but the dim {batch!r} ranges from {low} to {high}; pass a size"
            " in that range"
        )
    largest = call.max_batch or high
    return ServingOptions(largest, tuple(sorted({n for n in (usual, largest) if 1 < n <= largest})), call.instances)
