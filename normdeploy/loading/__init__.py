"""Load a model from a file, a folder or a live module. The result is an exported program in eval mode with described
inputs.

The kind of a file is detected from its bytes. Code in the file runs only if the user trusts it (``trust``). Code that
the user names with ``imports`` and ``model`` always runs.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, LoadError, NormdeployError, TrustError
from ..model import LoadedModel
from ..zoo_sources import parse_zoo_source
from .example_call import require_fitting_inputs
from .file_kinds import PIPELINE_INDEX, FileKind, detect_kind, hash_model_files
from .foreign_folders import MERGE_FIRST, is_adapter
from .gradient_regions import has_gradient_regions, inline_gradient_regions
from .hub import resolve_model_path
from .huggingface_folder import PreparedFolder, load_folder_model, prepare_folder, require_complete_weights
from .huggingface_tasks import ALL_PARTS, PART_FILES, PARTS
from .in_place_writes import find_written_buffers
from .input_request import InputRequest, dynamic_dim_names, parse_input_request, refuse_constants
from .input_specs import build_input_specs
from .live_module import from_module, trace_module, unwrap_module
from .model_zoos import MadeModel, make_named_model, make_zoo_model_with_inputs, note_random_weights
from .module_parts import parse_module_part, require_chosen_part, select_part
from .operator_allowlist import import_operators
from .pipeline_folder import open_pipeline, prepare_pipeline_part
from .pipeline_index import PipelineIndex, read_pipeline_index
from .program_file import find_live_guards, load_program
from .program_signature import find_placeholders, find_used_parameters, match_requested_inputs, name_outputs
from .python_file import import_from_folder, make_from_file, parse_python_source
from .shape_expressions import SizeGuard
from .signed_code import import_only_signed
from .state_dicts import State, fill_module, find_state_dict, read_safetensors
from .torch_pickles import join_names, unpickle_data, unpickle_fully
from .torchscript_weights import ScriptWeights, read_torchscript
from .traceable_models import TraceableModel, request_inputs
from .train_mode_checks import require_eval_graph

__all__ = ["find_part_files", "from_module", "from_program", "load", "load_parts"]
# Advice that is appended to the error if the model could not be made. In this case the parameters of forward, and thus
# the required inputs, are unknown.
_INPUTS_TOO = ". Also describe its inputs with --input, for example --input 'x:float32[batch,3,224,224]'"


def load(
    path: str | Path,
    *,
    model: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    key: str | None = None,
    trust: bool = False,
    imports: Sequence[str] = (),
    inputs: Sequence[str] = (),
    dims: Sequence[str] = (),
    eval: bool = False,
    code: Mapping[str, str] | None = None,
    task: str | None = None,
    part: str | None = None,
) -> LoadedModel:
    """Load a model from a file or folder.

    Args:
        path: a file, folder, Hub name or the name of a package's model. Files are an ExportedProgram, a module or
            weights saved by torch.save, safetensors, a TorchScript archive (only its weights), or a Python file that
            defines the model (``my_model.py:Net``). A folder must be a Hugging Face model or a diffusers pipeline. A
            Hub name ``org/name`` is looked up in huggingface_hub's cache or downloaded. ``timm:NAME`` and
            ``torchvision:NAME`` make a model of that package, with random weights unless ``model_args`` says otherwise.
        model: ``package.module:factory``, which makes the model for a file of weights. Modules in the working directory
            can be imported. ``timm:NAME`` and ``torchvision:NAME`` make a model of that package. For such a model, the
            inputs follow from the package's preprocessing if ``inputs`` is empty.
        model_args: keyword arguments of the factory.
        key: the entry of a checkpoint that contains the weights.
        trust: True to run code from the file: a pickled module, guards, and expressions that contain code.
        imports: modules to import first, because they register operators or output classes.
        inputs: the inputs, for example ``ids:int64[batch,seq]{0:30522}``. For an ExportedProgram they only set names
            and ranges.
        dims: ranges of named dims, ``batch=1:8:64`` (min:opt:max) or ``height=64:512:1024:32`` (min:opt:max:step, where
            all sizes are multiples of the step).
        eval: True switches parts in training mode to eval mode.
        code: file -> SHA-256 of its source, for the only modules of the working directory that may be imported
            (`storage.record_signing`). None allows all modules.
        task: task of a Hugging Face folder, for example "text-generation-with-past" (`huggingface_tasks`). It
            determines class, inputs and outputs. None takes the class in the config.
        part: part of a Hugging Face encoder-decoder: "encoder", "decoder" or "decoder-with-past". None takes the whole
            model. For a diffusers pipeline, it is the name of a part, for example "unet" or "vae_decoder". For any
            other model, it names modules, for example "backbone..head" (`module_parts`).

    Returns:
        The model. Its ``recorded`` contains the options that load the same model again, except ``trust``.

    Raises:
        LoadError: the file is broken or of an unknown kind, or its weights do not fit the model.
        TrustError: loading would run code from the file; the message names the part.
        TrainingModeError: a part of the model is in training mode.
        InputError: the inputs do not fit the model, or a factory or import can't be used.
        ExportError: torch.export can't trace the model.
        RuntimeUnavailable: transformers or diffusers is not installed for a folder that needs it.
    """
    source = parse_python_source(path)
    path = resolve_model_path(path)
    kind = FileKind.PYTHON if source is not None else detect_kind(path)
    wishes = parse_input_request(inputs, dims)
    _require_fitting_flags(path, kind, model, model_args, key)
    of_folder = kind is FileKind.HUGGINGFACE or (kind is FileKind.PIPELINE and not task)
    if not of_folder and task:
        raise InputError(f"{path} is not a Hugging Face model folder, so --task does not apply: omit it")
    if kind is FileKind.PROGRAM and part:
        raise InputError(f"{path} is an ExportedProgram, which can't be divided, so --part does not apply: omit it")
    # Weights are read before anything is imported, so that the user's factory is not called for a broken file.
    weights = _read_weights_as_data(path, kind, key, trust)
    with _import_from_cwd(bool(model or imports or trust)) if code is None else import_only_signed(code):
        operators = import_operators(imports)
        if source is not None:
            with _mention_missing_inputs(wishes):
                made = MadeModel(make_from_file(source, model_args or {}))
            loaded = _trace_made_model(made, inputs, dims, eval, part, kind)
        elif kind is FileKind.ZOO:
            loaded = _model_from_zoo(path, model_args or {}, inputs, dims, eval, part)
        elif kind is FileKind.PROGRAM:
            loaded = _model_from_program(*load_program(path, trust, operators), wishes, eval)
        elif kind is FileKind.HUGGINGFACE:
            loaded = _model_from_folder(path, prepare_folder(path, trust, task, part), inputs, dims, eval)
        elif kind is FileKind.PIPELINE:
            index = read_pipeline_index(path, trust=trust)
            prepared = prepare_pipeline_part(index, _require_pipeline_part(index, part), trust)
            loaded = _model_from_folder(path, prepared, inputs, dims, eval, kind)
        else:
            state = find_state_dict(unpickle_fully(path), key, path) if weights is None else weights
            make = partial(make_named_model, model, model_args or {}) if model else None
            loaded = _model_from_weights(path, kind, state, make, inputs, dims, eval, part)
    flags = {
        "model": model,
        "model_args": dict(model_args or {}),
        "key": key,
        "imports": list(imports),
        "inputs": list(inputs),
        "dims": list(dims),
        "eval": eval,
        "task": task,
        "part": part,
    }
    # ``trust`` is not recorded. The user must pass it each time, because a record in a file must not make code run.
    return replace(
        loaded, sha256=hash_model_files(path), recorded={name: value for name, value in flags.items() if value}
    )


def load_parts(
    path: str | Path,
    *,
    trust: bool = False,
    imports: Sequence[str] = (),
    dims: Sequence[str] = (),
    task: str | None = None,
) -> Iterator[tuple[str, LoadedModel]]:
    """Load the parts of a Hugging Face encoder-decoder, or of a diffusers pipeline, one after the other.

    The weights of an encoder-decoder are read once, and the parts share them.

    Args:
        dims: ranges of named dims. Each part takes the ranges of its own dims.
        path, trust, imports, task: as for ``load``.

    Yields:
        (part name, model), in the order of `find_part_files`.

    Raises:
        NormdeployError: as for ``load``; also InputError if the model has no parts, or no part has one of ``dims``.
    """
    path = resolve_model_path(path)
    if detect_kind(path) is FileKind.PIPELINE:
        yield from _load_pipeline_parts(path, trust, imports, dims, task)
        return
    if (kind := detect_kind(path)) is not FileKind.HUGGINGFACE:
        raise InputError(f"{path} is a {kind}, not a Hugging Face folder, so it has no parts: omit --part")
    with _import_from_cwd(bool(imports or trust)):
        import_operators(imports)
        folder = load_folder_model(path, trust, task)
    known = {
        part: set(dynamic_dim_names(parse_input_request(folder.prepare_part(part).prepared.inputs, ()).inputs))
        for part in PARTS
    }
    names = {text: text.partition("=")[0].strip() for text in dims}
    every = sorted(set().union(*known.values()))
    if foreign := [name for name in names.values() if name not in every]:
        raise InputError(f"the dim {foreign[0]!r} is not in any part; the parts have the dims {', '.join(every)}")
    digest = hash_model_files(path)
    for part in PARTS:
        own = [text for text, name in names.items() if name in known[part]]
        with _import_from_cwd(bool(imports or trust)):
            model = _model_from_folder(path, folder.prepare_part(part), (), own, False)
        flags = {"imports": list(imports), "dims": own, "task": task, "part": part}
        yield part, replace(model, sha256=digest, recorded={name: value for name, value in flags.items() if value})


def find_part_files(path: str | Path, *, trust: bool = False) -> dict[str, str]:
    """List the parts of an encoder-decoder or of a diffusers pipeline, from the folder's files alone.

    Returns:
        Part -> path of its ONNX file in the folder that ``export_parts`` writes, with "/" between folders.

    Raises:
        NormdeployError: the pipeline can't be exported as a whole.
    """
    path = resolve_model_path(path)
    if (path / PIPELINE_INDEX).is_file():
        return open_pipeline(path, trust).part_files
    return dict(PART_FILES)


def find_part_dims(path: str | Path, *, trust: bool = False, imports: Sequence[str] = ()) -> dict[str, set[str]]:
    """List the dynamic dims of each part of a diffusers pipeline. The weights are read.

    Returns:
        Part -> names of its dims.

    Raises:
        NormdeployError: as for ``load_parts``.
    """
    path = resolve_model_path(path)
    index = open_pipeline(path, trust)
    found = dict[str, set[str]]()
    for part in index.part_files:
        with _name_failing_part(part), _import_from_cwd(bool(imports or trust)):
            import_operators(imports)
            inputs = prepare_pipeline_part(index, part, trust).prepared.inputs
            found[part] = set(dynamic_dim_names(parse_input_request(inputs, ()).inputs))
    return found


def _load_pipeline_parts(
    path: Path, trust: bool, imports: Sequence[str], dims: Sequence[str], task: str | None
) -> Iterator[tuple[str, LoadedModel]]:
    if task:
        raise InputError(f"{path} is a diffusers pipeline, so --task does not apply: omit it")
    index = open_pipeline(path, trust)
    names = {text: text.partition("=")[0].strip() for text in dims}
    digest = hash_model_files(path)
    unused = set(names.values())
    known = set[str]()
    for part in index.part_files:
        with _name_failing_part(part), _import_from_cwd(bool(imports or trust)):
            import_operators(imports)
            prepared = prepare_pipeline_part(index, part, trust)
            own = set(dynamic_dim_names(parse_input_request(prepared.prepared.inputs, ()).inputs))
            known |= own
            unused -= own
            taken = [text for text, name in names.items() if name in own]
            model = _model_from_folder(path, prepared, (), taken, False, FileKind.PIPELINE)
        flags = {"imports": list(imports), "dims": taken, "part": part}
        yield part, replace(model, sha256=digest, recorded={name: value for name, value in flags.items() if value})
    if unused:
        raise InputError(
            f"the dim {min(unused)!r} is not in any part; the parts have the dims {', '.join(sorted(known))}"
        )


def _require_pipeline_part(index: PipelineIndex, part: str | None) -> str:
    """Return the name of the part that the user chose.

    Raises:
        InputError: the user chose no part, or all parts.
    """
    if part is None or part == ALL_PARTS:
        raise InputError(
            f"{index.path} is a diffusers pipeline with the parts {', '.join(index.part_files)}, but one model is"
            " expected here: choose one with --part. `normdeploy export PIPELINE -o FOLDER` (from Python export_parts)"
            " writes them all"
        )
    return part


@contextlib.contextmanager
def _name_failing_part(part: str) -> Iterator[None]:
    """Name the part of a pipeline in the error that it raises."""
    try:
        yield
    except NormdeployError as error:
        raise type(error)(f"the part {part!r} can't be exported: {error}") from error


def _import_from_cwd(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Make modules in the working directory importable if ``wanted``. Otherwise prevent their import, so that no module
    there can shadow a library.
    """
    return import_from_folder(Path.cwd() if wanted else None)


def _require_fitting_flags(
    path: Path, kind: FileKind, model: str | None, model_args: Mapping[str, Any] | None, key: str | None
) -> None:
    if kind is FileKind.TORCHSCRIPT and not model:
        raise LoadError(
            f"{path} is a TorchScript archive, which contains its own code and which torch.export does not accept: "
            "pass the model that its weights belong to with --model package.module:factory, or create the model in "
            "Python again and save it with torch.export.save(torch.export.export(model.eval(), example_inputs), "
            "'model.pt2')"
        )
    if kind is FileKind.ZOO and (model or key):
        raise InputError(
            f"{path} names a model of a package, not a file: omit {'--model' if model else '--key'}, or pass a file "
            f"of weights with --model {path}"
        )
    if kind in (FileKind.PROGRAM, FileKind.HUGGINGFACE, FileKind.PIPELINE, FileKind.PYTHON) and (model or key):
        raise InputError(
            f"{path} is {'an' if kind is FileKind.PROGRAM else 'a'} {kind}, which already contains its model: omit "
            f"{'--model' if model else '--key'}, or pass a file with only weights"
        )
    if kind in (FileKind.SAFETENSORS, FileKind.TORCHSCRIPT) and key:
        raise InputError(f"{path} is a {kind} file, which contains one set of weights: omit --key")
    if model_args and not model and kind not in (FileKind.PYTHON, FileKind.ZOO):
        raise InputError("factory arguments were passed without a factory: add --model package.module:factory")


def _read_weights_as_data(
    path: Path, kind: FileKind, key: str | None, trust: bool
) -> State | ScriptWeights | nn.Module | None:
    """Read a file of weights as data. Return None for other kinds of files, and for a file that can only be unpickled
    in full.
    """
    if kind is FileKind.SAFETENSORS:
        return read_safetensors(path)
    if kind is FileKind.TORCHSCRIPT:
        return read_torchscript(path)
    if kind not in (FileKind.PICKLE, FileKind.LEGACY_PICKLE):
        return None
    try:
        return find_state_dict(unpickle_data(path, kind), key, path)
    except TrustError:
        if not trust:
            raise
        return None


def from_program(
    program: torch.export.ExportedProgram, *, inputs: Sequence[str] = (), dims: Sequence[str] = (), eval: bool = False
) -> LoadedModel:
    """Wrap an exported program in memory as a model. The program is not changed.

    Args:
        inputs, dims: names and ranges, as for ``load``.
        eval: True switches parts in training mode to eval mode.

    Returns:
        The model. With ``eval``, or if a region of the program switches gradients off, it contains a copy of the
            program.

    Raises:
        InputError: the inputs do not fit the program, or its parameters are not on the CPU.
        TrainingModeError: the program was exported in training mode.
    """
    away = next((f"{n!r} is on {t.device}" for n, t in program.state_dict.items() if t.device.type != "cpu"), "")
    if away:
        raise InputError(
            f"the program's {away}; export the module on the CPU, or use torch.export.passes.move_to_device_pass"
        )
    own = program
    # ``eval`` and inlined regions change the graph in place, so the program is copied. torch can copy a program only by
    # saving and loading it.
    if eval or has_gradient_regions(program):
        stored = io.BytesIO()
        torch.export.save(program, stored)
        stored.seek(0)
        own = torch.export.load(stored)
    return _model_from_program(own, find_live_guards(program), parse_input_request(inputs, dims), eval)


def _model_from_program(
    program: torch.export.ExportedProgram, guards: Sequence[SizeGuard], wishes: InputRequest, eval_mode: bool
) -> LoadedModel:
    require_eval_graph(program, eval_mode)
    inline_gradient_regions(program)
    refuse_constants(wishes, "an ExportedProgram")
    names = [tensor.name for tensor in find_placeholders(program)[0]]
    if wishes.inputs:
        matched = match_requested_inputs(names, wishes.inputs, "the program's inputs")
    else:
        matched = [None] * len(names)
    specs, taken = build_input_specs(program, guards, matched, wishes, fresh=False)
    outputs = name_outputs(program, [spec.name for spec in specs])
    return LoadedModel(
        program=program,
        inputs=specs,
        outputs=outputs,
        kind=FileKind.PROGRAM,
        taken=taken,
        written=find_written_buffers(program),
    )


def _model_from_folder(
    path: Path,
    folder: PreparedFolder,
    inputs: Sequence[str],
    dims: Sequence[str],
    eval_mode: bool,
    kind: FileKind = FileKind.HUGGINGFACE,
) -> LoadedModel:
    ready = folder.prepared
    request = request_inputs(ready, inputs, dims)
    loaded = trace_module(ready.module, (), {}, request, eval_mode=eval_mode, kind=kind)
    require_complete_weights(path, folder.missing, find_used_parameters(loaded.program))
    return loaded


def _model_from_zoo(
    path: Path,
    arguments: Mapping[str, Any],
    inputs: Sequence[str],
    dims: Sequence[str],
    eval_mode: bool,
    part: str | None,
) -> LoadedModel:
    zoo = parse_zoo_source(path)
    assert zoo is not None
    made = make_zoo_model_with_inputs(zoo, arguments)
    loaded = _trace_made_model(made, inputs, dims, eval_mode, part, FileKind.ZOO)
    return replace(loaded, notes=(*loaded.notes, *note_random_weights(zoo, arguments)))


def _trace_made_model(
    made: MadeModel, inputs: Sequence[str], dims: Sequence[str], eval_mode: bool, part: str | None, kind: str
) -> LoadedModel:
    """Trace a model, or a part of it, with the inputs that the user states or that are known."""
    if part is None:
        if not inputs:
            require_chosen_part(made.module)
        traceable = TraceableModel(made.module, list(made.inputs))
    else:
        chosen = parse_module_part(part, made.module)
        traceable = select_part(made.module, chosen, made.make_example, made.inputs)
    wishes = request_inputs(traceable, inputs, dims)
    return trace_module(traceable.module, (), {}, wishes, eval_mode=eval_mode, kind=kind)


def _model_from_weights(
    path: Path,
    kind: FileKind,
    weights: State | ScriptWeights | nn.Module,
    make: Callable[[], MadeModel] | None,
    inputs: Sequence[str],
    dims: Sequence[str],
    eval_mode: bool,
    part: str | None,
) -> LoadedModel:
    wishes = parse_input_request(inputs, dims)
    if isinstance(weights, nn.Module):
        if make is None:
            made = MadeModel(unwrap_module(weights))
            return _trace_made_model(made, inputs, dims, eval_mode, part, "pickled module")
        weights = weights.state_dict()
    if make is None and is_adapter(weights.parameters if isinstance(weights, ScriptWeights) else weights):
        raise LoadError(f"{path} contains the weights of a LoRA adapter alone: {MERGE_FIRST}")
    if make is None:
        state = weights.parameters if isinstance(weights, ScriptWeights) else weights
        raise LoadError(
            f"{path} contains only weights ({len(state)} tensors: {join_names(list(state), 3)}): pass the model that "
            f"they belong to with --model package.module:factory{'' if wishes.inputs else _INPUTS_TOO}"
        )
    with _mention_missing_inputs(wishes):
        made = make()
    if isinstance(weights, ScriptWeights):
        state = weights.weights_for(made.module)
        form: str = kind
    else:
        state = weights
        form = kind if kind is FileKind.SAFETENSORS else "state_dict"
    try:
        notes = fill_module(made.module, state, path)
    except LoadError as error:
        # One run should report all errors, so the inputs are checked here too.
        try:
            require_fitting_inputs(
                made.module, request_inputs(TraceableModel(made.module, list(made.inputs)), inputs, dims)
            )
        except InputError as other:
            raise LoadError(f"{error}. Also, {other}") from error
        raise
    if all(module.training for module in made.module.modules()):
        # Training mode is only the default of modules: neither the file nor the factory has set a mode.
        made.module.eval()
    loaded = _trace_made_model(made, inputs, dims, eval_mode, part, form)
    return replace(loaded, notes=(*notes, *loaded.notes))


@contextlib.contextmanager
def _mention_missing_inputs(wishes: InputRequest) -> Iterator[None]:
    """Add a note about missing inputs to an error that is raised while the model is made.

    Without the note, the user would get the error about missing inputs only in the next run.
    """
    try:
        yield
    except InputError as error:
        if wishes.inputs:
            raise
        raise InputError(f"{error}{_INPUTS_TOO}") from error
