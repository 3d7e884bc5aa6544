"""Divide the half-precision nodes of a model into blocks, which can be moved to float32 as a whole.

A whole block needs two Casts per tensor at its border, but single nodes need Casts around each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ..errors import InputError
from ..findings.precision_report import Float32Region
from .precision_view import PrecisionView, module_path

# Ops that begin a new block where the file names no modules
_HEAVY = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN"})
# Word for a region of several ops in the reports
_BLOCK = "block"
# With fewer blocks, the modules inside them are used.
_FEWEST = 6
# Maximum number of blocks, because the model runs once for each block
_MOST = 32
# Maximum number of names that an error message lists
_LISTED = 8


@dataclass(frozen=True)
class HalfBlock:
    """Nodes that are moved to float32 together.

    Attributes:
        name: module path, or the result of the block's first node in parentheses.
        places: indices of the nodes.
    """

    name: str
    places: tuple[int, ...]


def find_half_blocks(view: PrecisionView, kept: Collection[int]) -> list[HalfBlock]:
    """Divide the nodes that become half precision into blocks by module.

    The blocks are the outermost modules of which there are several: usually the layers of the model. Nodes without a
    module path form blocks that begin at a matrix product or convolution.

    Args:
        kept: indices of the nodes that stay float32 anyway.

    Returns:
        the blocks in the graph's order.
    """
    places = [i for i in range(len(view.graph.node)) if view.has_floats(i) and i not in kept]
    paths = {i: module_path(view.graph.node[i]) for i in places}
    nameless = [i for i in places if not paths[i]]
    named = [i for i in places if paths[i]]
    segments = split_at_heavy_nodes(view, nameless)
    best: dict[str, list[int]] = {}
    for depth in range(1, max((path.count(".") + 1 for path in paths.values()), default=0) + 1):
        groups: dict[str, list[int]] = defaultdict(list)
        for i in named:
            groups[".".join(paths[i].split(".")[:depth])].append(i)
        if best and len(groups) > _MOST:
            break
        best = groups
        if len(best) >= _FEWEST:
            break
    blocks = [HalfBlock(name, tuple(members)) for name, members in best.items()]
    return sorted([*blocks, *segments], key=lambda block: block.places[0])


def split_at_heavy_nodes(view: PrecisionView, places: Sequence[int]) -> list[HalfBlock]:
    """Divide nodes into blocks that each begin at a matrix product or convolution.

    Args:
        places: indices of the nodes, in the graph's order.

    Returns:
        the blocks in the graph's order.
    """
    if not places:
        return []
    runs: list[list[int]] = [[]]
    for i in places:
        if view.graph.node[i].op_type in _HEAVY and runs[-1]:
            runs.append([])
        runs[-1].append(i)
    # Neighbors are joined, because the model runs once for each block.
    step = -(-len(runs) // _MOST)
    joined = [[i for run in runs[k : k + step] for i in run] for k in range(0, len(runs), step)]
    blocks: dict[str, HalfBlock] = {}
    for members in joined:
        first = view.graph.node[members[0]]
        name = module_path(first)
        if not name or name in blocks:
            name = f"{name} ({first.output[0]})".strip()
        blocks[name] = HalfBlock(name, tuple(members))
    return list(blocks.values())


def find_requested_nodes(view: PrecisionView, patterns: Sequence[str]) -> dict[int, Float32Region]:
    """Find the nodes that the user wants in float32.

    Args:
        patterns: names of modules or of results; `*` matches any characters, and `?` any single character. A module's
            name includes the modules inside it.

    Returns:
        index of a node -> its region.

    Raises:
        InputError: a pattern matches no floating-point node, or the patterns match all of them.
    """
    found: dict[int, Float32Region] = {}
    floating = [i for i in range(len(view.graph.node)) if view.has_floats(i)]
    names: dict[str, None] = {}
    regions: dict[tuple[str, str], Float32Region] = {}
    for i in floating:
        node = view.graph.node[i]
        path = module_path(node)
        names.update(dict.fromkeys(filter(None, (path, *node.output))))
        for pattern in patterns:
            match = next((m for m in (*_enclosing_modules(path), *node.output) if m and fnmatchcase(m, pattern)), None)
            if match is not None:
                reason = f"it was requested to stay float ({pattern})"
                region = Float32Region("requested", _BLOCK, match, node.output[0], reason)
                found.setdefault(i, regions.setdefault((pattern, match), region))
    for pattern in patterns:
        if all(used != pattern for used, _ in regions):
            told = ", ".join(map(repr, get_close_matches(pattern, names, _LISTED, 0.0)))
            raise InputError(
                f"no module or result of a floating-point node matches {pattern!r}, which should stay float; the"
                f" closest names are {told}"
            )
    if found and len(found) == len(floating):
        raise InputError(
            f"{', '.join(map(repr, patterns))} keeps all {len(found)} floating-point nodes in float32, so no node would"
            " be in half precision; name fewer modules, or omit --precision"
        )
    return found


def _enclosing_modules(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def block_regions(
    view: PrecisionView, blocks: Sequence[HalfBlock], errors: Mapping[str, float]
) -> dict[int, Float32Region]:
    """Write a region for each block that the metrics need in float32.

    Args:
        errors: name of a block -> relative error of the outputs with only this block in half precision.

    Returns:
        index of a node -> its region.
    """
    regions: dict[int, Float32Region] = {}
    for block in blocks:
        first = view.graph.node[block.places[0]].output[0]
        if block.name in errors:
            alone = f"; with this block alone in half precision, the relative error is {errors[block.name]:.1e}"
        else:
            alone = ""
        region = Float32Region("metric", _BLOCK, block.name, first, f"the metric needs it in float32{alone}")
        regions.update(dict.fromkeys(block.places, region))
    return regions
