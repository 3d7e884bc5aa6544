"""Our plugins through NVIDIA's own compiled bindings, over a mock of the libraries behind them: no GPU, no TensorRT, no
kernel that runs (docs/reference/tensorrt-releases.md).

The release that is installed is tried by ``make test``; ``make test-tensorrt`` fetches every release of the registry.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from normdeploy_plugins.ops import BY_NAME, OPS

from .bindings import wheels
from .bindings.cases import LAYOUTS, Case, cases, one_type
from .bindings.mock import PARAMETERS
from .bindings.releases import COMPILER, Release, complaints, names_twice

MISSING = "NVIDIA's bindings are not installed (pip install --no-deps tensorrt-cu13-bindings)"
_HERE = wheels.installed()
INSTALLED = Release(*_HERE) if _HERE else None
ONE = [pytest.param(INSTALLED, marks=pytest.mark.skipif(INSTALLED is None, reason=MISSING), id="installed")]
RELEASES = ONE + [
    pytest.param(Release(*item), marks=pytest.mark.tensorrt, id=item[0]) for item in wheels.fetched().items()
]
pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(COMPILER is None, reason="g++, which compiles the mock of TensorRT's libraries, is not here"),
]


@pytest.fixture
def folder(kernels: Path, release: Release) -> Path:
    """What is compiled is kept from run to run where all releases are tried."""
    return kernels if release is INSTALLED else wheels.FOLDER / "compiled"


@pytest.fixture(autouse=True, scope="module")
def _gpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", "8.9")
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        yield


def test_every_op_is_tried() -> None:
    assert {op for op, *_ in LAYOUTS} == {op.name for op in OPS}
    with_layouts = {op.name for op in OPS if "channels_last" in op.attributes}
    assert all({a["channels_last"] for o, _, _, a in LAYOUTS if o == op} == {0, 1} for op in with_layouts)


# ------------------------------------------------------------------ the mock fits the bindings


def described(first: int, rank: int, kind: int, form: int) -> list[Any]:
    """A tensor's description after `mock_mark`: dims, min, max, opt, type, format, scale."""
    dims = [list(range(first + i * rank, first + (i + 1) * rank)) for i in range(4)]
    return [*dims, kind, form, first + 4 * rank + 0.5]


@pytest.mark.parametrize("release", RELEASES)
def test_the_layout_is_the_bindings_own(release: Release, folder: Path) -> None:
    """Every function of each interface is called by its slot, and is the one that was meant."""
    found = release.run(folder, probe=True)
    assert found, found.end
    assert found.answers[0] == {"version": release.version}
    said = found.answers[1]
    one, two, three = (100, 2, 1), (108, 8, 7), (140, 2, 8)  # first number, rank, type
    bare, formed = ([described(*t, 0) for t in (one, two, three)], [described(*one, 2), described(*two, 5)])
    formed.append(described(*three, 0))
    heard = [
        ["create", "Probe", "probe", [["a", 5, [7]], ["b", 1, [0.5]]]],
        ["asked", 0, 4],
        *(capability := [["capability", 0], ["capability", 1]]),
        ["output types", [1], [2]],
        ["input sizes", False, True, 5],
        ["shape inputs", 0],
        ["size tensor", 30405, False],
        *[["formats", 1, bare]] * 2,
        ["configure", formed[:1], formed[1:]],
        ["aliased", 1],
        ["tactic", 9],
        ["launch", 1, 1, formed],
        ["extra", 2],
        ["kernel", [108.5], [140.5, 148.5]],
        ["clone"],
        *capability,
    ]
    assert said.pop("heard") == heard
    called = said.pop("registry")
    if not release.version.startswith("10.9."):  # whose bindings do not have it
        called.remove("Recursive:getAllCreators")
    assert called == [
        *("registerCreator", "setParentSearchEnabled", "isParentSearchEnabled", "getCreator", "getAllCreators"),
        *("getErrorRecorder", "loadLibrary:path", "releasePluginResource:key"),
        *("getCreator",) * 3,
        *("deregisterCreator", "getCreator"),
    ]
    assert said == {
        "answers": [False, True, True, None, 5],
        "loaded": True,
        "fields": ["a", "b"],
        "kinds": "PLUGIN|PLUGIN_V3QUICK_CORE|PLUGIN_V3QUICKAOT_BUILD",
        "name": ["core name", "core version", "core space"],
        "types": ["bf16", "8"],
        "shapes": [[18, 65, 13, 5, 8, 0, 0, 2], [3, 7]],  # 13 and 5 under + * max min − = < // and, rounded up, /
        "combinations": [[["fp16", 2], ["bf16", 5], ["8", 0]]],
        "tactics": [3, 9, 4],
        "timing": "timing",
        "metadata": "metadata",
        "aliased": 41,
        "kernel": ["kernel name", "kernel text"],
        "values": [
            {n: 101 + i for i, n in enumerate(PARAMETERS)},
            [21, 202],
            [1] * 9,  # int16
        ],
        "gone": True,
        "faults": [],
    }


@pytest.mark.parametrize("release", ONE)
def test_another_releases_layout_is_found(release: Release, folder: Path) -> None:
    assert not release.run(folder, layout=21 - release.major, probe=True)


# ------------------------------------------------------------------ our plugins


def _sort(case: Case) -> tuple[Any, ...]:
    """Of each of these one kernel is compiled."""
    return case.op, case.attributes.get("to"), case.format


@pytest.mark.parametrize("release", RELEASES)
def test_every_op(release: Release, folder: Path) -> None:
    """From creator to launch, and the same of a clone: every op, layout, type and tactic, static and dynamic.

    ``make test`` compiles one kernel of each op and format, of the default tactic in float16 at dynamic sizes, and
    takes placeholders for the others.
    """
    everything = release is not INSTALLED
    compiled = {_sort(c): c for c in cases(["fp16"]) if c.dynamic and one_type(c)}
    tried = [(case, everything or case == compiled[_sort(case)]) for case in cases()]
    told = [
        case.request(compiled=real, cloned=True, tactics=None if everything or not real else 1, strange=[0, 99])
        for case, real in tried
    ]
    found = release.run(folder, cases=told)
    assert found, found.end
    assert found.answers[1] == {"ops": [op.name for op in OPS], "faults": []}
    wrong = []
    for (case, real), said in zip(tried, found.plugins, strict=True):
        first, second = said["plugins"]
        wrong += [f"{case}: {what}" for what in [*complaints(case, first, real), *said["faults"]]]
        wrong += [f"{case}: its clone says something else"] * (first != second)
    assert not wrong, "\n".join(wrong[:20])
    assert not names_twice([plugin for said in found.plugins for plugin in said["plugins"]])


@pytest.mark.parametrize("release", RELEASES)
def test_several_plugins_in_one_network(release: Release, folder: Path) -> None:
    """Layer by layer, with clones of all behind them, then step by step: none meets what another left behind."""
    network = [case for case in cases(["bf16"]) if case.dynamic]
    found = release.run(folder, network=[case.request() for case in network])
    assert found, found.end
    (said,) = found.plugins
    wrong = list(said["faults"])
    for case, plugin in zip([*network, *network], said["plugins"], strict=True):
        wrong += [f"{case}: {what}" for what in complaints(case, plugin, False)]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("release", RELEASES)
def test_timings_are_kept_by_attributes(release: Release, folder: Path) -> None:
    """GroupNorm of 32 and of 320 groups have other tactics at equal shapes; TensorRT's timing cache is told the
    difference."""
    given = next(case for case in cases(["fp16"]) if (case.op, case.layout) == ("GroupNorm", "NCHW"))
    changes: list[dict[str, Any]] = [{}, {"num_groups": 320}, {"epsilon": 1e-5}, {}]
    tried = [replace(given, attributes=given.attributes | change) for change in changes]
    told = [case.request(compiled=False, cloned=True) for case in tried]
    found = release.run(folder, cases=told)
    assert found, found.end
    ids = [[plugin["timing"] for plugin in said["plugins"]] for said in found.plugins]
    assert [own == clone for own, clone in ids] == [True] * 4
    assert len({own for own, _ in ids}) == 3
    assert ids[0] == ids[3]


BAD = [
    (Case("ScaleShift", "", ((2, 8), (8,), (8,)), ("fp16",) * 3, {"axis": 1, "activation": "none"}), {"activation": 7}),
    (
        Case("LayerNorm", "", ((2, 8), (8,), (8,)), ("fp16",) * 3, {"epsilon": 0.1, "axis": -1, "ddof": 0}),
        {"ddof": None},
    ),
]
SAID = [
    "ScaleShift: activation is 7; expected one of 'none', 'relu', 'silu'",
    "LayerNorm: the node lacks ddof; plugins have no defaults",
]


@pytest.mark.parametrize(("bad", "words"), list(zip(BAD, SAID, strict=True)), ids=["value", "missing"])
@pytest.mark.parametrize("release", ONE)
def test_bad_attributes_are_refused_by_name(
    release: Release, folder: Path, bad: tuple[Case, dict[str, Any]], words: str
) -> None:
    case, change = bad
    told = case.request(compiled=False, cloned=False)
    told["attributes"] = {k: v for k, v in (told["attributes"] | change).items() if v is not None}
    found = release.run(folder, cases=[told])
    assert not found
    assert words in found.stderr
    assert "Refused: getOutputDataTypes failed" in found.stderr
    assert BY_NAME[case.op]
