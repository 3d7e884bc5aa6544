"""Write the notes of ``verify``, which add explanations to its verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from onnx import TensorProto

from ...inputs.input_cases import NONFINITE
from ...runtimes.ort_runner import NAMES
from ...storage.export_record import read_record
from ...storage.onnx_files import load_onnx
from .output_results import OutputResult
from .precision_trial import PrecisionTrial
from .reference_models import OWN, runtime_label
from .runtime_candidates import FLOATS, STEPWISE, ComparedFile, RuntimeCandidate
from .weight_origin import AuditedWeight, WeightOrigin
from .wording import list_some

# Types of integer weights, and the minimum number of elements of such a weight.
_CODES = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4})
_MANY = 64
# Number of weights or tensors that a note names.
_NAMED = 3


def note_computed_weights(weights: Sequence[AuditedWeight]) -> list[str]:
    """Write a note on the constants of each file that are not tensors of the model.

    Single numbers, such as an epsilon, are not mentioned.

    Returns:
        one note for each file with such constants.
    """
    notes = []
    for file in dict.fromkeys(w.file for w in weights):
        folded = [w for w in weights if w.file == file and w.origin is WeightOrigin.FOLDED]
        computed = [w for w in weights if w.file == file and w.origin is WeightOrigin.COMPUTED and w.elements > 1]
        if folded:
            parts = [f"{len(folded)} folded ({_list_weights(folded)})"]
        else:
            parts = []
        if computed:
            verb = "matches" if len(computed) == 1 else "match"
            parts += [f"{len(computed)} that {verb} no parameter ({_list_weights(computed)})"]
            reason = ". An exporter computes such constants; this alone is not an error"
        else:
            reason = ""
        if parts:
            notes.append(f"{file}: weights not copied from a parameter: {'; '.join(parts)}{reason}")
    return notes


def _list_weights(weights: Sequence[AuditedWeight]) -> str:
    return ", ".join(f"{w.name} in {w.module}" if w.module else w.name for w in weights[:_NAMED]) + _ellipsis_if_more(
        weights
    )


def _quote_names(tensors: Sequence[str]) -> str:
    """Return the first few names, quoted."""
    return ", ".join(map(repr, tensors[:_NAMED])) + _ellipsis_if_more(tensors)


def _ellipsis_if_more(every: Sequence[object]) -> str:
    if len(every) > _NAMED:
        return ", …"
    return ""


def collect_notes(
    trials: Mapping[str, PrecisionTrial], candidates: Sequence[RuntimeCandidate], results: Sequence[OutputResult]
) -> list[str]:
    """Collect the notes on half precision, skipped cases, optimizers to disable, and files that did not run.

    Args:
        trials: precision -> its trial.

    Returns:
        the notes.
    """
    notes = []
    for precision, trial in trials.items():
        if precision and trial.candidates:
            files = ", ".join(dict.fromkeys(map(_half_title, trial.candidates)))
            notes.append(
                f"{files} computes in half precision, so {trial.eager.name} also ran in {FLOATS[precision]}, on inputs"
                f" rounded to {FLOATS[precision]}"
            )
        notes += trial.notes
        for candidate in trial.candidates:
            if candidate.skipped and candidate.ran:
                of = f"{candidate.skipped} of {len(trial.answers)} cases"
                notes.append(f"{candidate.name}: {of} are outside the engine's profile and were not run")
    notes += [
        f"{runtime_label(r.runtime)} itself exceeds the range of {r.dtype}, {r.case}: {r.output} is"
        f" {r.default_reason or r.reason}; a file's outputs are not judged at these non-finite elements"
        for r in results
        if r.runtime in OWN and r.by_default == "fail" and (r.default_reason or r.reason)
    ]
    for names in dict.fromkeys(c.culprit for c in candidates if c.culprit):
        setting = f'add_session_config_entry("optimization.disable_specified_optimizers", "{";".join(names)}")'
        notes.append(f"to run it in onnxruntime without {', '.join(names)}: SessionOptions.{setting}")
    notes += [c.without for c in candidates if c.without]
    guarded = dict.fromkeys(c.name for t in trials.values() for c in t.candidates if c.finite_only and c.ran)
    if guarded and any(answer.case.kind in NONFINITE for t in trials.values() for answer in t.answers):
        notes.append(f"{', '.join(guarded)} was not compared on NaN and infinities, for which it guarantees nothing")
    notes += note_choices(candidates)
    made = {r.file for r in results if r.runtime not in OWN}
    for file in dict.fromkeys(c.file_label for c in candidates if c.file_label not in made):
        notes.append(f"no runtime could run {file}: nothing is known about it")
    return notes


def _half_title(candidate: RuntimeCandidate) -> str:
    """Name the file, or the file in a runtime that itself lowers the precision."""
    if candidate.lowered:
        return f"{candidate.file_label} in {candidate.name}"
    return candidate.file_label


def note_choices(candidates: Sequence[RuntimeCandidate]) -> list[str]:
    """Describe where files order nearly equal scores in another way than the reference, and wrong choices.

    Returns:
        up to two notes for each runtime.
    """
    notes = []
    for candidate in candidates:
        title = f"{candidate.file_label} in {candidate.name}"
        if candidate.followed:
            picks = sum(each.differing for each in candidate.followed.values())
            ratio = max(each.ratio for each in candidate.followed.values())
            verb = "is" if picks == 1 else "are"
            notes.append(
                f"{title}: {picks} {'pick' if picks == 1 else 'picks'} of nearly equal scores {verb} in another order"
                f" than in float64, at {list_some([*candidate.followed])}; the gaps are at most {ratio:.2g} times what"
                " rounding explains, so there the file was compared with float64 in the file's order"
            )
        if candidate.wrong_choice:
            notes.append(f"{title}: {candidate.wrong_choice}")
    return notes


def note_half_nodes(subjects: Sequence[ComparedFile], results: Sequence[OutputResult]) -> list[str]:
    """Name the nodes that compute in half precision in a failed file whose other nodes compute in a wider type.

    Returns:
        one note for each file that fails in stepwise half precision and has such nodes.
    """
    failed = {r.file for r in results if r.runtime == STEPWISE and not r}
    return [
        f"{s.label} computes {_quote_names(s.computing.lowered)} in half precision, and the rest in wider"
        " types. onnxruntime's CPU provider runs such nodes in float32, but other runtimes do not: take these"
        " nodes out of half precision"
        for s in subjects
        if s.label in failed and s.computing.lowered
    ]


def note_unbudgeted_weights(subjects: Sequence[ComparedFile], results: Sequence[OutputResult]) -> list[str]:
    """Write a note on failed files with integer weights that a Cast reads. Such files have no error budget.

    Returns:
        one note for each such file.
    """
    failed = {r.file for r in results if not r}
    notes = []
    for subject in subjects:
        if subject.label not in failed or subject.runtime or subject.steps is not None:
            continue
        graph = load_onnx(subject.path, external_data=False).graph
        codes = {t.name for t in graph.initializer if t.data_type in _CODES and prod(t.dims) >= _MANY}
        read = [node.input[0] for node in graph.node if node.op_type == "Cast" and node.input[0] in codes]
        if read:
            notes.append(
                f"{subject.label} has integer weights that a Cast reads ({_quote_names(read)}). It was judged"
                " as if it were not quantized. With DequantizeLinear instead, it is judged by the steps of its"
                " scales; or pass a metric, such as --metric 'cosine>=0.99'"
            )
    return notes


def note_other_forms(subjects: Sequence[ComparedFile], results: Sequence[OutputResult]) -> list[str]:
    """Suggest the most accurate forms for files that failed in onnxruntime and have the fastest forms of their norms.

    Returns:
        one note for each such file.
    """
    failed = {r.file for r in results if r.runtime in NAMES and not r}
    return [
        f"{s.label} has the fastest forms of its norms (--runtime onnxruntime); --runtime onnxruntime-accurate"
        " writes the most accurate forms"
        for s in subjects
        if s.label in failed
        and read_record(load_onnx(s.path, external_data=False)).get("export", {}).get("runtime") == "onnxruntime"
    ]
