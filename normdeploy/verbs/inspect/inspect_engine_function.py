"""Report how a TensorRT engine computes each norm, from the JSON that TensorRT's tools write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from ...engines.engine_json import EXPORT_LAYERS
from ...engines.layer_info import EngineLayer, LayerInfo, read_layer_info, select_profile
from ...engines.layer_times import LayerTimes, apply_times, choose_profile, read_layer_times
from ...errors import InputError
from ...storage.file_replacement import write_bytes
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import as_sequence
from .engine_comparison import compare_builds
from .engine_norms import EngineNorm, NormForm, NormPlacer, sum_times
from .engine_report import EngineBuild, EngineReport
from .inspect_engine_options import InspectEngineCall
from .node_data import make_node_data
from .norm_nodes import OnnxNorms, guess_norms, read_onnx_norms

# Share of the time that may belong to unknown layers before a note says so
_UNMATCHED = 0.01


@take_fields_as_arguments(InspectEngineCall)
def inspect_engine(call: InspectEngineCall) -> EngineReport:
    """Report how a TensorRT or TensorRT-RTX engine computes each norm of a model, and compare two engines.

    Nothing is run, and neither TensorRT nor a GPU is needed. The files are JSON that trtexec or TensorRT's engine
    inspector wrote.

    Args:
        layer_info: layers of the engine, from ``trtexec --exportLayerInfo=FILE`` or from
            ``EngineInspector.get_engine_information``. The engine must be built with detailed verbosity: ``build`` does
            so, and trtexec with ``--profilingVerbosity=detailed``.
        other: layers of a second engine to compare with.
        onnx_files: the ONNX file that the engine was built from; two files for two engines that were built from
            different files. Without it, norms are guessed from the names of nodes and kernels.
        profile_json: times of the layers, from ``trtexec --exportProfile=FILE``; one file per engine.
        node_data: file to write with node data for Model Explorer.
        progress: called with (stage, done, total).

    Returns:
        for each engine its layers and norms, with form, types, formats, reformats and time; for two engines also the
        norms that changed.

    Raises:
        InputError: a file is missing, is not JSON or has another form; the times are of another engine; or the number
            of files does not fit.
        GraphError: the ONNX file is missing or broken.
    """
    start = time.perf_counter()
    infos = [call.layer_info] if call.other is None else [call.layer_info, call.other]
    profiles = _as_files(call.profile_json)
    onnx_files = _as_files(call.onnx_files)
    _check_counts(len(infos), profiles, onnx_files, call.node_data)
    known = {path: read_onnx_norms(path, call.progress) for path in dict.fromkeys(onnx_files)}
    if len(onnx_files) == 1:
        onnx_files *= len(infos)
    builds = tuple(
        _read_build(
            path,
            profiles[index] if profiles else None,
            onnx_files[index] if onnx_files else None,
            known[onnx_files[index]] if onnx_files else None,
        )
        for index, path in enumerate(infos)
    )
    if call.node_data is not None:
        outputs = known[onnx_files[0]].outputs if onnx_files else {}
        text = json.dumps(make_node_data(builds[0], outputs), indent=1, allow_nan=False)
        write_bytes(call.node_data, (text + "\n").encode())
    return EngineReport(
        builds=builds,
        changes=compare_builds(*builds) if len(builds) > 1 else (),
        seconds=time.perf_counter() - start,
    )


def _as_files(value: PathLike | Sequence[PathLike]) -> list[str]:
    return [os.fspath(each) for each in as_sequence(value)]


def _check_counts(engines: int, profiles: Sequence[str], onnx_files: Sequence[str], node_data: PathLike | None) -> None:
    """Check that the number of files fits the number of engines.

    Raises:
        InputError: it does not.
    """
    if profiles and len(profiles) != engines:
        raise InputError(
            f"--profile-json was given {len(profiles)} times for {engines} "
            f"{'engine' if engines == 1 else 'engines'}; pass one file per engine, in the same order"
        )
    if len(onnx_files) > engines:
        raise InputError(f"--onnx was given {len(onnx_files)} times for {engines} engine(s); pass one file per engine")
    if node_data is not None and engines > 1:
        raise InputError("--node-data shows one engine; pass one file of layers")


def _read_build(
    path: PathLike, profile: PathLike | None, onnx: PathLike | None, known: OnnxNorms | None
) -> EngineBuild:
    """Read the files of one engine and find its norms."""
    info = read_layer_info(path)
    times = None if profile is None else read_layer_times(profile)
    selected = choose_profile(info.layers, times)
    notes = _describe_limits(os.fspath(path), info, selected)
    layers: Sequence[EngineLayer] = select_profile(info.layers, selected)
    if times is not None:
        layers, unmatched = apply_times(layers, times, selected)
        notes += _check_times(os.fspath(path), os.fspath(profile or ""), layers, times, unmatched)
    total = None if times is None else times.total_ms
    placer = NormPlacer(layers, info.io_tensors, {} if known is None else known.ops, total)
    norms = placer.place_norms(guess_norms(layers) if known is None else known.norms)
    if known is not None:
        notes += _describe_absent(os.fspath(path), os.fspath(onnx or ""), norms)
    return EngineBuild(
        path=os.fspath(path),
        onnx=os.fspath(onnx or ""),
        profile=os.fspath(profile or ""),
        layers=tuple(layers),
        norms=norms,
        runs=None if times is None else times.runs,
        total_ms=total,
        norm_ms=sum_times(layers[index] for index in sorted({i for norm in norms for i in norm.layers})),
        reformat_ms=sum_times(layers[index] for index in sorted({i for norm in norms for i in norm.reformats})),
        notes=tuple(notes),
    )


def _describe_limits(shown: str, info: LayerInfo, selected: int) -> list[str]:
    """Describe what a file of layers does not state."""
    notes: list[str] = []
    if not info.detailed:
        notes.append(
            f"{shown} has only the names of layers, without types and most names of ONNX nodes: build the engine with"
            f" trtexec --profilingVerbosity=detailed or with normdeploy build, then run `{EXPORT_LAYERS}`"
        )
    if info.cut:
        notes.append(
            f"{shown}: TensorRT cut the list of ONNX nodes of {info.cut} {'layer' if info.cut == 1 else 'layers'}, so"
            " a norm may be in more layers than shown"
        )
    others = {layer.profile for layer in info.layers} - {selected}
    if others:
        notes.append(
            f"{shown}: only the layers of optimization profile {selected} are shown, not those of"
            f" {', '.join(map(str, sorted(others)[:8]))}"
        )
    return notes


def _check_times(
    shown: str, profile: str, layers: Sequence[EngineLayer], times: LayerTimes, unmatched: float
) -> list[str]:
    """Check that times belong to these layers.

    Returns:
        a note if a part of the time belongs to other layers.

    Raises:
        InputError: no layer has a time.
    """
    if all(layer.ms is None for layer in layers):
        raise InputError(
            f"no layer of {profile!r} is in {shown!r}: they are of different engines; write both files in one run, "
            "with trtexec --exportLayerInfo=FILE --exportProfile=FILE"
        )
    if unmatched > _UNMATCHED * times.total_ms:
        share = 100 * unmatched / times.total_ms
        return [f"{share:.0f} % of the time in {profile} belongs to layers that are not in {shown}"]
    return []


def _describe_absent(shown: str, onnx: str, norms: Sequence[EngineNorm]) -> list[str]:
    """Say that norms of the ONNX file were found in no layer."""
    absent = [norm for norm in norms if norm.form is NormForm.ABSENT]
    if not absent:
        return []
    if len(absent) == len(norms):
        return [
            f"no norm of {onnx} is in a layer of {shown}: the engine may be built from another file, or its layers do"
            " not name their ONNX nodes (TensorRT before 8.6, or no detailed verbosity)"
        ]
    return [
        f"{len(absent)} of {len(norms)} norms are in no layer: TensorRT folded them into constants or neighbors, or the"
        " layers do not name their nodes"
    ]
