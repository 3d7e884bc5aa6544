"""Write the model card of a bundle: ``README.md``, with front matter as on Hugging Face.

The card is written only from the documents of the bundle: the manifest, the report and the certificates. So the same
documents give the same card, and each number on the card can be found in a document. Texts from the documents are
escaped, because names of tensors come from a model file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...findings.records import STATUS_WORDS
from ...reports.markdown_text import escape_markdown, markdown_code, markdown_list, markdown_table
from .bundle_text import REPOSITORY

# A license is not among the documents, so the front matter names none.
_FRONT_MATTER = """---
library_name: onnx
tags:
- onnx
- onnxruntime
- normalization
- normdeploy
---
"""
_RECHECK = """
After an update of a driver, a runtime or the model, run `normdeploy recheck .` in this folder. It compares every file
with its hash, runs every sample in every installed runtime, and reports the changes. Exit code 1 means that a result
got worse. `manifest.json` has the hashes, versions, bounds and commands. `report.json` has the results. The hashes
detect damage; they do not show who made the bundle.
"""
_UNRECORDED = (
    "Only the listed samples were run. Other inputs and sizes were not.",
    "Accuracy on a task, training data, license and intended use are not recorded in this bundle.",
)


def render_model_card(
    manifest: Mapping[str, Any], report: Mapping[str, Any], certificates: Sequence[Mapping[str, Any]]
) -> str:
    """Write the model card.

    Args:
        manifest: content of ``manifest.json``; "files" is not read, because it has the hash of the card.
        report: content of ``report.json``.
        certificates: contents of ``certificates/*.json``.

    Returns:
        Markdown text.
    """
    return (
        "\n".join(
            [
                _FRONT_MATTER,
                f"# {escape_markdown(manifest['name'])}\n",
                f"An ONNX model in a normdeploy evidence bundle. {_describe_verdict(report['parity'])}\n",
                "## Model\n",
                markdown_table(("", ""), _model_rows(manifest, report)),
                *_render_ports("Inputs", manifest["inputs"]),
                *_render_ports("Outputs", manifest["outputs"]),
                "## Norms\n",
                *_render_rewrites(certificates),
                *_render_norms(report["norms"]),
                "## Verification\n",
                *_render_verification(manifest, report["parity"]),
                "## Not verified\n",
                markdown_list(_unverified(manifest, report["parity"])),
                *_render_notes(report["notes"]),
                "## Serve\n",
                *_render_serving(manifest),
                "## Versions\n",
                markdown_table(("library or machine", "version"), manifest["versions"].items()),
                "## Reproduce\n",
                markdown_code(manifest["commands"]),
            ]
        )
        + _RECHECK
    )


def _describe_verdict(parity: Mapping[str, Any]) -> str:
    if not parity["results"]:
        return "**No runtime ran the samples.**"
    if parity["ok"]:
        return "**Every sample gives the expected outputs.**"
    return "**Some outputs are NOT as expected.**"


def _model_rows(manifest: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    source = manifest["source"]
    yield "file", manifest["onnx"]
    yield "packaged from", source["file"]
    yield "SHA-256", source["sha256"]
    yield "opset", str(report["opset"])
    yield "nodes", f"{report['nodes']['after']}: {_count_words(report['ops']['after'])}"
    if manifest["model"] is None:
        yield "PyTorch model", "not given"
    else:
        yield "PyTorch model", f"{manifest['model']['kind']}, SHA-256 {manifest['model']['sha256']}"
    for engine in manifest["engines"]:
        yield "engine", f"{engine['path']} ({engine['runtime']})"


def _count_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in counts.items())


def _render_ports(title: str, ports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"### {title}\n"
    rows = [(port["name"], port["dtype"], _describe_shape(port["shape"])) for port in ports]
    yield markdown_table(("name", "type", "dims"), rows)


def _describe_shape(shape: Sequence[int | str | None]) -> str:
    if not shape:
        return "none (a single number)"
    return " × ".join("?" if dim is None else str(dim) for dim in shape)


def _render_rewrites(certificates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Group equal rewrites. The certificates have the details of each."""
    if not certificates:
        yield "The bundle has no certificates of rewrites.\n"
        return
    yield "Rewrites, each with its proof in `certificates/`:\n"
    alike = Counter((c["kind"], c["spelling"], _describe_result(c), _describe_proof(c)) for c in certificates)
    rows = [(str(count), *words) for words, count in alike.items()]
    yield markdown_table(("number", "norm", "written as", "result", "proof"), rows)


def _describe_result(certificate: Mapping[str, Any]) -> str:
    """Name the form of a fused norm. A folded norm names its neighbor, which differs for each norm."""
    word = STATUS_WORDS[certificate["status"]]
    if certificate["status"] == "fused":
        return f"{word} into {certificate['became']}"
    return word


def _describe_proof(finding: Mapping[str, Any]) -> str:
    certificate = finding["certificate"]
    if not certificate["identity"]:
        return "NOT proved"
    checked = {True: ", checked in onnxruntime", False: ", inaccurate in onnxruntime", None: ""}
    return f"{certificate['method']}{checked[certificate['rounding_ok']]}"


def _render_norms(norms: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Group equal norms of the file. The report has the details of each."""
    if not norms:
        yield "The file has no norms.\n"
        return
    yield "Norms in the file, as each runtime runs them:\n"
    alike = Counter((n["kind"], n["spelling"], _describe_runtimes(n)) for n in norms)
    rows = [(str(count), *words) for words, count in alike.items()]
    yield markdown_table(("number", "norm", "nodes", "runtimes"), rows)


def _describe_runtimes(norm: Mapping[str, Any]) -> str:
    return "; ".join(f"{r['runtime']}: {r['verdict']}" for r in norm["runtimes"] if r["form"] == "now")


def _render_verification(manifest: Mapping[str, Any], parity: Mapping[str, Any]) -> Iterator[str]:
    count = len(manifest["samples"])
    yield (
        f"{count} samples were run. Their expected outputs are in `samples/` and were computed by"
        f" {escape_markdown(manifest['reference'])}. Arrays of bfloat16 are two-byte voids.\n"
    )
    results = parity["results"]
    if results:
        titles = ("output", "runtime", "max abs error", "allowed", "verdict", "worst sample")
        yield markdown_table(titles, [_result_row(result) for result in results])
    reasons = dict.fromkeys(f"{r['verdict']}: {r['runtime']}: {r['reason']}" for r in results if r["reason"])
    if reasons:
        yield markdown_list(reasons)
    yield f"Samples: {escape_markdown('; '.join(sample['name'] for sample in manifest['samples']))}\n"


def _result_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (_format_number(result["max_abs_error"]), _format_number(result["allowed"]))
    return (result["output"], result["runtime"], *numbers, result["verdict"], result["case"])


def _format_number(number: float | str) -> str:
    """Format a number of a report, in which a number that is not finite is a text."""
    if isinstance(number, str):
        return number
    return f"{number:.2e}"


def _unverified(manifest: Mapping[str, Any], parity: Mapping[str, Any]) -> Iterator[str]:
    for missed in parity["not_run"]:
        yield ": ".join(filter(None, (missed["runtime"], missed["file"], missed["reason"])))
    if manifest["model"] is None:
        yield "The file was not compared with the PyTorch model. The samples can't show that the file itself is right."
    yield from _UNRECORDED


def _render_notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield "## Notes\n"
        yield markdown_list(notes)


def _render_serving(manifest: Mapping[str, Any]) -> Iterator[str]:
    models = [config.split("/")[-2] for config in manifest["configs"]]
    if manifest["max_batch"]:
        batch = f"batches of up to {manifest['max_batch']}, formed dynamically"
    else:
        batch = "one request at a time"
    names = " and ".join(escape_markdown(model) for model in models)
    yield f"`{REPOSITORY}/` is a model repository for Triton Inference Server with {names}; each accepts {batch}.\n"
    yield markdown_code([f"tritonserver --model-repository={REPOSITORY}"])
