"""Store, show and plot the results, and list the missed requirements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from normdeploy.verbs.bench.machine_info import describe_machine

from .subjects import SUBJECTS

RESULTS = Path(__file__).parents[1] / "results"
FILE = RESULTS / "quantization.json"
FASTER, LOSS, LEFT = "faster", "loss, % more", "linears in float"
AT_MOST = (LOSS, LEFT)
# Requirements: the model, the start of a row's name, and the values that one such row must reach
ASKED: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("minilm", "normdeploy int8, tensorrt-rtx", {"nearest kept": 0.97, "worst cosine": 0.995, LEFT: 12}),
    ("minilm", "normdeploy int8, tensorrt-rtx", {"nearest kept": 0.95, "worst cosine": 0.995, LEFT: 0}),
    ("minilm", "normdeploy int8, onnxruntime", {"worst cosine": 0.995, FASTER: 1.4}),
    ("mobilenet", "normdeploy int8, tensorrt-rtx", {"top-1 agreement": 0.99}),
    ("mobilenet", "normdeploy int8, onnxruntime", {"top-1 agreement": 0.99}),
    ("efficientnet", "normdeploy int8, tensorrt-rtx", {"top-1 agreement": 0.99}),
    ("efficientnet", "normdeploy int8, onnxruntime", {"top-1 agreement": 0.99}),
    ("decoder", "normdeploy int8, tensorrt-rtx", {LOSS: 1.0}),
    ("decoder", "normdeploy int8, onnxruntime", {LOSS: 1.0}),
)


def read() -> dict[str, Any]:
    """Read the results.

    Returns:
        the document.
    """
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"models": {}}
    return results


def write(results: dict[str, Any]) -> None:
    """Write the results, the page and the plot."""
    results["machine"] = str(describe_machine())
    FILE.write_text(json.dumps(results, indent=1) + "\n")
    about = (RESULTS.parent / "quantization" / "__main__.py").read_text().split('"""')[1]
    parts = [f"# Quantized files\n\n{about.strip()}", f"{results['machine']}; {results.get('versions', {})}"]
    for subject in SUBJECTS:
        if rows := results["models"].get(subject.name):
            parts.append(f"## {subject.title}\n\n{table(rows)}")
    short = missed(results)
    parts.append("\n".join(f"- {line}" for line in short) if short else "Every measure is reached.")
    (RESULTS / "quantization.md").write_text("\n\n".join(parts) + "\n")
    plot(results)


def table(rows: dict[str, Any]) -> str:
    """Format the rows of a model.

    Returns:
        Markdown.
    """
    measures = list(next(iter(rows.values()))["measures"])
    head = [
        "file",
        "form",
        "samples",
        "linears",
        *measures,
        "faster, batch 1",
        "batch 8",
        "MB",
        "written in, s",
        "commit",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, told in rows.items():
        if "measures" not in told:
            cells = [name, told["form"], str(told.get("samples", "")), told["failed"]]
            lines.append(f"| {' | '.join(cells)} |" + " |" * (len(head) - len(cells)))
            continue
        faster = {int(batch): value for batch, value in told.get("faster", {}).items()}
        cells = [
            name
            if told.get("loads", True)
            else f"{name} (onnxruntime's optimizer off: it makes an invalid graph of it)",
            told["form"],
            str(told.get("samples", "")),
            "{} of {}".format(*told["linears"]),
            *(f"{told['measures'][m]:.4f}" for m in measures),
            *("{:.2f} ({:.2f} to {:.2f})".format(*faster[b]) if b in faster else "" for b in (1, 8)),
            f"{told['bytes'] / 1e6:.1f}",
            str(told.get("seconds", "")),
            told.get("commit", ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def missed(results: dict[str, Any]) -> list[str]:
    """List the requirements that normdeploy's files miss. A requirement is met if one file meets all of it; a missing
    file meets none.

    Returns:
        a text for each.
    """
    short = []
    for model, start, asked in ASKED:
        rows = {n: told for n, told in results["models"].get(model, {}).items() if n.startswith(start)}
        if any(_reaches(told, asked) for told in rows.values()):
            continue
        wanted = ", ".join(
            f"{measure} {'<=' if measure in AT_MOST else '>='} {bound:g}" for measure, bound in asked.items()
        )
        values = {n: ", ".join(f"{v:.4f}" for m in asked for v in _values(told, m)) for n, told in rows.items()}
        have = "; ".join(f"{n}: {v or 'no file'}" for n, v in values.items()) or "not measured"
        short.append(f"{model}, {wanted} wanted: {have}")
    return short


def _reaches(told: dict[str, Any], asked: dict[str, float]) -> bool:
    each = [(measure, bound, _values(told, measure)) for measure, bound in asked.items()]
    return all(values and all(v <= b if m in AT_MOST else v >= b for v in values) for m, b, values in each)


def _values(told: dict[str, Any], measure: str) -> list[float]:
    if measure == FASTER:
        return [v[0] for v in told.get("faster", {}).values()]
    if measure == LEFT:
        return [float(told["linears"][1] - told["linears"][0])] if "linears" in told else []
    return [told["measures"][measure]] if "measures" in told else []


def plot(results: dict[str, Any]) -> None:
    """Plot each model's first measure over the speed at batch 8, one point per file."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [s for s in SUBJECTS if results["models"].get(s.name)]
    figure, every = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4), layout="constrained", squeeze=False)
    for axes, subject in zip(every[0], shown, strict=True):
        rows = results["models"][subject.name]
        measure = LOSS if subject.name == "decoder" else next(iter(rows["float32"]["measures"]))
        for name, told in rows.items():
            if "faster" in told:
                x, y = {int(b): v[0] for b, v in told["faster"].items()}[8], told["measures"][measure]
                axes.plot(x, y, "o", color="tab:blue" if name.startswith("normdeploy") else "tab:grey")
                axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.set(title=subject.title, xlabel="times as fast as float32 (batch 8, CPU)", ylabel=measure)
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "quantization.png", dpi=110)
    plt.close(figure)
