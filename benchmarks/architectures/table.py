"""Write the page with the rows, and define the requirements for a row."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .catalogue import ARCHITECTURES, AUTOMATIC, LEFT_OUT

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

Automatic rows are shrunk and given inputs by rules (`benchmarks/architectures/shrinking.py`). They have one export by
each exporter (two if the ratio is above 1.3)
and a short `verify` (one seed, 6 s), but no `optimize` and no engine ("not built"). If both exporters
refuse the dynamic dims, the row is measured with fixed sizes. If only ours refuses a dim, both are measured with the
sizes that our error proposes, and the plain file of the first try runs at the refused sizes. If both
refuse a whole detector, the row is measured for
its part before the suppression of boxes ("a part").

Each row keeps the result of the version that measured it. The hand-made rows are of 2026-11-23, except for those that
failed then: BEiT, Swin, Wav2Vec2 Conformer, MaxViT, EnCodec, ViLT, Twins, Hiera, Nyströmformer, Mixtral, Mamba,
Falcon Mamba, BiT and VQ-VAE are of 2026-11-27.

"""
COLUMNS_AUTOMATIC = (
    *("architecture", "class", "sizes", "plain", "ours", "norms run", "fused, folded, kept, left"),
    *("decomposed, without a reason", "verify", "nodes: plain, ours", "seconds: plain, ours", "ratio"),
)

Json = dict[str, Any]


def wrong(row: Json) -> list[str]:
    """List the violated requirements. A failure that the plain exporter has too does not count.

    Returns:
        one text per violation; empty if the row is right.
    """
    if (row["plain"] and row["export"]) or row.get("unmade"):
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
    for dim, sizes in _narrowed(row).items():
        if "is right at" in sizes:
            found.append(f"sizes: {dim}={sizes}")
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


def automatic_line(row: Json) -> str:
    """Format an automatic row.

    Returns:
        line of the Markdown table.
    """
    if row["unmade"]:
        return f"| {row['name']} | not made |{' |' * (len(COLUMNS_AUTOMATIC) - 2)}"
    norms = ", ".join(f"{n} {what}" for what, n in row["norms"].items()) or "none"
    runs = row["runs"]
    ended = bool(row["failed"])
    done = {"plain": bool(runs.get("plain")), "export": bool(runs.get("ours"))}
    cells = (
        row["name"],
        row["model"],
        _describe_sizes(row),
        *("exports" if done[side] else "fails" if row[side] or ended else "" for side in ("plain", "export")),
        str(sum(row["modules"].values())),
        norms if done["export"] else "",
        f"{row['left']}, {len(row['unexplained'])}" if done["export"] else "",
        _verify(row) if done["export"] else "",
        f"{row['nodes'].get('plain', '')}, {row['nodes'].get('ours', '')}",
        ", ".join(f"{min(runs[side]):.1f}" if runs.get(side) else "none" for side in ("plain", "ours")),
        f"{row['ratio']:.2f}" if row["ratio"] else "",
    )
    return f"| {' | '.join(cells)} |"


def _describe_sizes(row: Json) -> str:
    sizes = ["fixed" if row["fixed"] else "dynamic"]
    sizes += [f"{dim}={text.partition(' ')[0]}" for dim, text in _narrowed(row).items()]
    if row.get("whole"):
        sizes.append("a part")
    return ", ".join(sizes)


def _narrowed(row: Json) -> dict[str, str]:
    """Return the dims that only our export refused; rows of older versions have none."""
    return row.get("narrowed") or {}


def any_line(row: Json) -> str:
    """Format a row of either kind.

    Returns:
        line of the Markdown table of its kind.
    """
    return automatic_line(row) if row.get("automatic") else line(row)


def summary(rows: Sequence[Json]) -> str:
    """Summarize all rows, then the hand-made rows and the automatic rows alone.

    Returns:
        Markdown.
    """
    automatic = [r for r in rows if r.get("automatic")]
    hand = [r for r in rows if not r.get("automatic")]
    every = len(ARCHITECTURES) + len(AUTOMATIC)
    made = [r for r in rows if not r.get("unmade")]
    left_out = sum(not reason.startswith("the entry ") for reason in LEFT_OUT.values())
    lines = [
        f"**{len(made)} of {every} architectures were measured.** For {len(rows) - len(made)} no model or no inputs",
        f"were made, {every - len(rows)} were not measured yet, and {left_out} more names are left out with a reason.",
        "",
        _counts("all measured", made),
        _counts("automatic", [r for r in automatic if not r["unmade"]]),
        "",
        "The hand-made entries alone:",
        "",
        _hand_made_summary(hand),
    ]
    return "\n".join(lines)


def _counts(title: str, rows: Sequence[Json]) -> str:
    libraries = ", ".join(f"{n} of {library}" for library, n in Counter(r["library"] for r in rows).items())
    ratios = sorted(r["ratio"] for r in rows if r["ratio"])
    time = f"median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}" if ratios else "none"
    ours = [r for r in rows if r["runs"].get("ours")]
    plain = [r for r in rows if r["runs"].get("plain")]
    both = sum(bool(r["runs"].get("ours") and r["runs"].get("plain")) for r in rows)
    unexplained = sum(len(r["unexplained"]) for r in ours)
    failed = [r for r in ours if r["verify"] not in ("passes", "")]
    return "\n".join(
        [
            f"- {title}: {len(rows)} ({libraries or 'none'})",
            f"  - the plain exporter exports {len(plain)}, ours {len(ours)}, both {both}",
            (
                f"  - verify of our file: {sum(r['verify'] == 'passes' for r in ours)} of {len(ours)} pass,"
                f" {sum(named(r) for r in failed)} fail as the plain file does,"
                f" {sum(not named(r) for r in failed)} fail alone or without a plain file"
            ),
            f"  - norms left decomposed: {sum(r['left'] for r in ours)}, {unexplained} of them without a reason",
            f"  - time of export over the plain one's: {time}; fixed sizes: {sum(bool(r.get('fixed')) for r in rows)},"
            f" a dim that only ours refuses: {sum(bool(_narrowed(r)) for r in rows)}",
        ]
    )


def _hand_made_summary(rows: Sequence[Json]) -> str:
    """Summarize the hand-made rows, which have all verbs.

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
        f"- measured: {len(rows)} of {len(ARCHITECTURES)}: {libraries}",
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


# Groups of errors: part of the text -> cause. The first part that is in the text holds.
CAUSES = (
    ("non-maximum suppression", "torch.export: non-maximum suppression (pytorch/pytorch#146152)"),
    ("vmap", "torch.export: vmap of a mask is in the traced program"),
    ("data-dependent", "torch.export: control flow or a size depends on data"),
    ("is required but", "the model needs a library that is not installed"),
    ("library but it was not found", "the model needs a library that is not installed"),
    ("parameters; the most are", "shrinking: too many parameters after every plan"),
    ("FixedDimError", "the model fixes a dim that was requested as dynamic"),
    ("Cannot view a tensor", "torch: a view behind scaled_dot_product_attention (pytorch/pytorch#136543)"),
    ("can't be run: operator aten.view", "verify: the float64 reference can't run a view"),
    (
        "grouped_mm_fallback",
        "torch.onnx: no ONNX function for transformers' grouped product of experts (as microsoft/onnxscript#2795)",
    ),
    ("Pad_Fusion", "onnxruntime: Pad_Fusion, of microsoft/onnxruntime#18136 (as onnxsim/onnxsim#290)"),
    ("only 4D query", "torch.onnx: attention of tensors that do not have four dims"),
    ("and its trace differ", "the model's code differs from its trace"),
    ("Could not guard", "torch.export: control flow or a size depends on data"),
    ("Eq(u", "torch.export: control flow or a size depends on data"),
    ("onstraints violated", "torch.export: the model fixes a dim that should be dynamic"),
    ("No decompositions registered", "torch.onnx: no ONNX function for a complex operator"),
    ("No ONNX function", "torch.onnx: no ONNX function for an operator"),
    ("DispatchError", "torch.onnx: no ONNX function for an operator"),
    ("the plain file is right at", "the plain file takes sizes that ours refuses"),
    ("no end after", "time limit"),
    ("its process ended", "crash of the process"),
)


def cause(error: str) -> str:
    """Name the group of an error.

    Returns:
        the cause; without a rule, the error's type.
    """
    return next((name for part, name in CAUSES if part in error), error.partition(":")[0])


def _grouped(faults: Sequence[tuple[str, str]]) -> str:
    """Group (name of the row, error) by cause.

    Returns:
        Markdown list, the largest group first; "Nothing." without faults.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, error in faults:
        groups.setdefault(cause(error), []).append((name, error))
    lines = []
    for title, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {len(members)}: {title}")
        lines += [f"  - {name}: {error[:300]}" for name, error in members]
    return "\n".join(lines) or "Nothing."


def page(rows: Sequence[Json]) -> str:
    """Write the page.

    Returns:
        Markdown.
    """
    hand = [r for r in rows if not r.get("automatic")]
    automatic = [r for r in rows if r.get("automatic")]
    faults = [(r["name"], fault) for r in rows for fault in wrong(r)]
    both = [(r["name"], r["plain"]) for r in rows if r["plain"] and r["export"]]
    both += [(r["name"], r["whole"]) for r in rows if r.get("whole")]
    alone = [(r["name"], r["plain"]) for r in rows if r["plain"] and not r["export"]]
    checked = [
        (r["name"], f"verify: {r['verify']}. The plain file: {r['plain_verify']}")
        for r in rows
        if r["verify"] not in ("passes", "") and named(r)
    ]
    narrowed = [f"- {r['name']}: {dim}={text}" for r in automatic for dim, text in _narrowed(r).items()]
    unmade = [(r["name"], r["unmade"]) for r in automatic if r["unmade"]]
    reasons: Counter[str] = Counter()
    for r in rows:
        for reason, times in r["reasons"].items():
            reasons[_without_names(reason)] += times
    told = [f"- {n}: {reason}" for reason, n in reasons.most_common()]
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "diffusers", "timm", "torchvision", "onnxruntime-gpu")
    )
    measured = {r["name"] for r in rows}
    every = [*(a.name for a in ARCHITECTURES), *(a.name for a in AUTOMATIC)]
    waiting = [name for name in every if name not in measured]
    left_out = [f"- {name}: {reason}" for name, reason in LEFT_OUT.items() if not reason.startswith("the entry ")]
    parts = [
        ABOUT + summary(rows) + f"\n\n{versions}.\n",
        "## What is wrong\n\n" + _grouped(faults) + "\n",
        "## What neither exporter exports\n\n" + _grouped(both) + "\n",
        "## What only ours exports\n\n" + _grouped(alone) + "\n",
        "## Dims that only our export refuses\n\n" + ("\n".join(narrowed) or "None.") + "\n",
        "## What fails verify in the plain file too\n\n" + _grouped(checked) + "\n",
        "## Why norms were refused, undone or kept, and how often\n\n" + ("\n".join(told) or "None were.") + "\n",
        "## Hand-made entries\n\n" + _table(COLUMNS, [line(r) for r in hand]),
        "## Automatic entries\n\n" + _table(COLUMNS_AUTOMATIC, [automatic_line(r) for r in automatic]),
        "## No model or no inputs\n\n" + _grouped(unmade) + "\n",
        f"## Not measured yet\n\n{len(waiting)}: {', '.join(waiting) or 'none'}.\n",
        "## Left out\n\n" + ("\n".join(left_out) or "Nothing.") + "\n",
    ]
    return "\n".join(parts)


def _without_names(reason: str) -> str:
    """Replace the names of nodes and tensors, so that equal reasons are counted together."""
    return re.sub(r"'[^']*'", "'…'", reason)


def _table(columns: Sequence[str], lines: Sequence[str]) -> str:
    head = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return "\n".join([*head, *lines]) + "\n"
