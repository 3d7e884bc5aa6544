"""Merge the findings of the two passes of rewrites over a quantized file: before and after quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...findings.records import Finding, combine_certificates


def merge_findings(first: Sequence[Finding], second: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge the findings of two passes into one finding for each norm.

    If the second pass fused a norm, its finding replaces the finding of the first pass, and the two proofs are
    combined. Otherwise the finding of the first pass stays, with the notes of both passes.

    Returns:
        the findings of the first pass in their order, followed by the findings of norms that only the second pass
        found.
    """
    merged = list(first)
    taken = set[int]()
    for finding in second:
        place = _find_same_norm(finding, [(i, f) for i, f in enumerate(first) if i not in taken])
        if place is None:
            merged.append(finding)
            continue
        taken.add(place)
        before = first[place]
        if finding.status == "fused":
            certificate = combine_certificates(before.certificate, finding.certificate)
            proved = (*before.proved, *finding.proved)
            merged[place] = replace(finding, certificate=certificate, proved=tuple(dict.fromkeys(proved)))
        else:
            merged[place] = replace(before, notes=tuple(dict.fromkeys((*before.notes, *finding.notes))))
    return tuple(merged)


def _find_same_norm(finding: Finding, before: Sequence[tuple[int, Finding]]) -> int | None:
    """Find the earlier finding of the same norm.

    Findings match if their kind and place are equal and one of these conditions holds. They are tried in this order:

    1. The tensors have the same name.
    2. The module has exactly one earlier finding.
    3. The name of the tensor is the earlier name with a suffix. Splitting or quantizing a norm adds such a suffix.

    Returns:
        index of the earlier finding, or None.
    """
    alike = [(i, f) for i, f in before if (f.kind, f.place) == (finding.kind, finding.place)]
    named = [i for i, f in alike if f.tensor == finding.tensor]
    of_module = [i for i, f in alike if f.module and f.module == finding.module]
    made = [(len(f.tensor), i) for i, f in alike if finding.tensor.startswith(f"{f.tensor}_")]
    if named or len(of_module) == 1:
        return (named or of_module)[0]
    if made:
        return max(made)[1]
    return None
