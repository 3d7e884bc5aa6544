"""Write the page with the rows, and define the requirements for a row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .catalogue import ARCHITECTURES

# Maximum time of our export, as a multiple of the time of the plain export, for each architecture
MOST = 1.3
MEDIAN = 1.15

COLUMNS = (
    *("architecture", "library", "norms run", "fused, folded, kept, left", "decomposed, without a reason", "verify"),
    *("plain file optimized", "TensorRT-RTX", "nodes: plain, ours", "seconds: plain, ours", "ratio"),
)
ABOUT = """# Real architectures, random weights, default options

Each goes through `normdeploy.export` → `verify` → `build`, and the file of `torch.onnx.export(dynamo=True)` (below:
plain) through
`optimize`, and `verify` of the result against that file. Small configurations, every gamma, beta and running statistic
randomised. Norms
run: calls of norm modules in one run of the model. Decomposed: roots of a mean or a sum in our file, found without this
project's
recognition, and how many of them no finding explains. Seconds: processor time; how it is compared is said in
`benchmarks/architectures/measure.py`. Written by `python -m benchmarks.architectures`.

"""

Json = dict[str, Any]


def wrong(row: Json) -> list[str]:
    """List the violated requirements. A failure that the plain exporter has too does not count.

    Returns:
        one text per violation; empty if the row is right.
    """
    if row["plain"] and row["export"]:
        return []
    found = [f"{stage}: {row[stage]}" for stage in ("failed", "export") if row[stage]]
    if row["verify"] not in ("passes", "") and not named(row):
        found.append(f"verify: {row['verify']}")
    # If the plain file fails, the optimized plain file fails too.
    if row["optimize"] not in ("passes", "") and not named(row):
        found.append(f"optimize: {row['optimize']}")
    if row["build"] and not row["build"].endswith("layers"):
        found.append(f"build: {row['build']}")
    if row["unexplained"] or row["optimized_unexplained"]:
        found.append(f"no reason: {', '.join(row['unexplained'] + row['optimized_unexplained'])}")
    if row["ratio"] and row["ratio"] > MOST:
        found.append(f"time: {row['ratio']:.2f} times the plain export")
    return found


def named(row: Json) -> bool:
    """Check if the plain file fails `verify` too.

    Then the exporter or the runtime caused the failure, not normdeploy.

    Returns:
        true if both fail.
    """
    return row["verify"] != "passes" and row["plain_verify"] not in ("", "passes")


def line(row: Json) -> str:
    """Format a row.

    Returns:
        line of the Markdown table.
    """
    norms = ", ".join(f"{n} {what}" for what, n in row["norms"].items()) or "none"
    runs = row["runs"]
    seconds = ", ".join(f"{min(runs[side]):.1f}" if runs.get(side) else "none" for side in ("plain", "ours"))
    cells = (
        row["name"],
        row["library"],
        str(sum(row["modules"].values())),
        "" if row["export"] else norms,
        f"{row['left']}, {len(row['unexplained'])}",
        _verify(row),
        "" if row["plain"] else "passes" if row["optimize"] == "passes" else "fails" if row["optimize"] else "not run",
        row["build"] if row["build"].endswith("layers") else "fails" if row["build"] else "not run",
        f"{row['nodes'].get('plain', '')}, {row['nodes'].get('ours', '')}",
        seconds,
        f"{row['ratio']:.2f}" if row["ratio"] else "",
    )
    return f"| {' | '.join(cells)} |"


def _verify(row: Json) -> str:
    if row["export"]:
        return "the plain exporter fails too" if row["plain"] else "export fails"
    if row["verify"] in ("passes", ""):
        return row["verify"] or "not run"
    return "the plain file fails too" if named(row) else "fails"


def summary(rows: Sequence[Json]) -> str:
    """Summarize the rows.

    Returns:
        counts as Markdown.
    """
    exported = [r for r in rows if not r["export"] and not (r["failed"] and not r["norms"] and not r["verify"])]
    ratios = sorted(r["ratio"] for r in rows if r["ratio"])
    time = (
        f"median {statistics.median(ratios):.2f} (at most {MEDIAN}), largest {ratios[-1]:.2f} (at most {MOST})"
        if ratios
        else "none"
    )
    plain = [r for r in rows if not r["plain"]]
    reasons = sum(r["left"] - len(r["unexplained"]) for r in rows)
    libraries = ", ".join(f"{n} of {library}" for library, n in Counter(r["library"] for r in rows).items())
    lines = [
        f"{len(rows)} of the catalogue's {len(ARCHITECTURES)} architectures: {libraries}.",
        (
            f"- export: {len(exported)}; {sum(bool(r['plain'] and r['export']) for r in rows)} that the plain exporter"
            " can't export either"
        ),
        (
            f"- verify: {sum(r['verify'] == 'passes' for r in rows)} pass, {sum(named(r) for r in rows)} fail as the"
            " plain file does"
        ),
        f"- optimize of the plain file: {sum(r['optimize'] == 'passes' for r in plain)} of {len(plain)} pass",
        f"- engines: {sum(r['build'].endswith('layers') for r in rows)} of {len(exported)}",
        f"- norms left decomposed: {sum(r['left'] for r in rows)}, {reasons} of them with a reason",
        f"- time of export over the plain one's: {time}; {sum(r > MOST for r in ratios)} above {MOST}",
        f"- rows with something wrong: {sum(bool(wrong(r)) for r in rows)}",
    ]
    return "\n".join(lines)


def page(rows: Sequence[Json]) -> str:
    """Write the page.

    Returns:
        Markdown.
    """
    faults = [f"- {r['name']}: {fault}" for r in rows for fault in wrong(r)]
    theirs = [f"- {r['name']}: {r['plain']}" for r in rows if r["plain"]]
    theirs += [f"- {r['name']}, verify: {r['verify']}. The plain file: {r['plain_verify']}" for r in rows if named(r)]
    reasons = Counter({reason: 0 for r in rows for reason in r["reasons"]})
    for r in rows:
        reasons.update(r["reasons"])
    told = [f"- {n}: {reason}" for reason, n in reasons.most_common()]
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "diffusers", "timm", "torchvision", "onnxruntime-gpu")
    )
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    parts = [
        ABOUT + summary(rows) + f"\n\n{versions}.\n",
        "\n".join([*head, *(line(r) for r in rows)]) + "\n",
        "## What is wrong\n\n" + ("\n".join(faults) or "Nothing.") + "\n",
        "## What the plain exporter has too\n\n" + ("\n".join(theirs) or "Nothing.") + "\n",
        "## Why norms were refused, undone or kept, and how often\n\n" + ("\n".join(told) or "None were.") + "\n",
    ]
    return "\n".join(parts)
