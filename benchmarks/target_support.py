"""Write the table of the norm ops that runtimes support, from the op lists that the runtimes publish.

    python -m benchmarks.target_support --read NAME=PATH ...

writes ``normdeploy/runtimes/target_support.json``, which ``check --target`` and ``--for`` read
(`normdeploy.runtimes.target_support` describes it). Each NAME is a source of `SOURCES`. PATH is where it lies here: a
git checkout of the repository, an unpacked package, or a copy of the one file. The list of the installed onnxruntime is
always read. A source that is not named keeps its rows of the table, with the date at which they were read.

An op list says that a runtime knows an op, but not under which conditions. `CONDITIONS` repeats the conditions of the
runtime's source code, each with a text of the file that states it. If the file no longer contains this text, the script
fails, and the condition must be read again. A target of which no op list was read has no rows, and a text says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

TABLE = Path(__file__).resolve().parents[1] / "normdeploy" / "runtimes" / "target_support.json"
# Norm ops that the table has a row for, in each target. Ops of onnxruntime have the prefix of their domain, also if a
# file has them in the default domain.
NORMS = (
    "BatchNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "GroupNormalization",
    "RMSNormalization",
    "LpNormalization",
    "MeanVarianceNormalization",
    "com.microsoft.SimplifiedLayerNormalization",
    "com.microsoft.SkipLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
    "com.microsoft.GroupNorm",
)
# Ops that a norm in several nodes consists of.
PARTS = ("Add", "Sub", "Mul", "Div", "Sqrt", "ReduceMean", "ReduceL2", "Reshape")
TENSORRT = (*(f"10.{minor}" for minor in range(9, 17)), *(f"11.{minor}" for minor in range(6)))

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Place of published op lists.

    Attributes:
        name: repository or package, for people.
        version: release, if the copy does not tell it; "" to ask git.
    """

    name: str
    version: str = ""


SOURCES = {
    "onnxruntime": Source("Python package onnxruntime"),
    "onnxruntime-web": Source("npm package onnxruntime-web"),
    "onnxruntime-qnn": Source("repository onnxruntime/onnxruntime-qnn"),
    "onnx-tensorrt-10.1": Source("repository onnx/onnx-tensorrt", "10.1"),
    "onnx-tensorrt-10.15": Source("repository onnx/onnx-tensorrt", "10.15"),
    "onnx-tensorrt-11.1": Source("repository onnx/onnx-tensorrt", "11.1, commit 7c51a63a"),
    "tensorrt": Source("repository NVIDIA/TensorRT"),
    "tensorrt-releases": Source(
        "release notes of TensorRT 11.2 to 11.5 in repository NVIDIA/TensorRT", "11.5 of 2026-11-18"
    ),
    "onnx-tensorrt-11.5": Source("release notes of repository onnx/onnx-tensorrt", "11.5 of 2026-11-18"),
    "triton": Source("repository triton-inference-server/server"),
    "torch-tensorrt": Source("page 'Torch-TensorRT in JetPack' of Torch-TensorRT's documentation", "JetPack 6.2"),
}

# Pages, not files: a person read them on this day.
PAGES = ("tensorrt-releases", "onnx-tensorrt-11.5", "torch-tensorrt")
PAGES_READ = "2026-11-27"

_PROVIDERS = "onnxruntime/core/providers"
# target -> op -> (conditions, file of the source, text of this file that states them)
CONDITIONS: dict[str, dict[str, tuple[Row, str, str]]] = {
    "coreml": {
        "BatchNormalization": (
            {"ranks": [4, 4], "constant_parameters": True, "max_outputs": 1, "dtypes": ["float32", "float16"]},
            f"{_PROVIDERS}/coreml/builders/impl/batch_norm_op_builder.cc",
            "BN only support 4d shape for now",
        ),
        **{
            op: (
                {"constant_parameters": True, "max_outputs": 1, "dtypes": ["float32", "float16"]} | more,
                f"{_PROVIDERS}/coreml/builders/impl/normalization_op_builder.cc",
                "Scale must be a constant initializer",
            )
            for op, more in {
                "InstanceNormalization": {},
                "LayerNormalization": {"attributes": {"stash_type": [1]}},
                # The builder shapes scale and bias as one value per channel, which they are from opset 21 on.
                "GroupNormalization": {"attributes": {"stash_type": [1]}, "opsets": [21, None]},
            }.items()
        },
    },
    "qnn": {
        "BatchNormalization": (
            {"ranks": [1, 4], "constant_parameters": True, "max_outputs": 1},
            f"{_PROVIDERS}/qnn/builder/opbuilder/batchnormalization_op_builder.cc",
            "QNN BatchNorm only supports input ranks of size <= 4.",
        ),
        "InstanceNormalization": (
            {"ranks": [3, 4], "positive_epsilon": True},
            f"{_PROVIDERS}/qnn/builder/opbuilder/instancenormalization_op_builder.cc",
            "QNN InstanceNorm only supports input ranks of size 3 or 4.",
        ),
        "LayerNormalization": (
            {"last_axis": True, "max_outputs": 1},
            f"{_PROVIDERS}/qnn/builder/opbuilder/layernormalization_op_builder.cc",
            "QNN LayerNorm for HTP only support axis with last input dimension",
        ),
        "GroupNormalization": (
            {"ranks": [3, None], "positive_epsilon": True, "max_outputs": 1, "opsets": [21, None]},
            f"{_PROVIDERS}/qnn/builder/opbuilder/groupnormalization_op_builder.cc",
            "QNN GroupNorm input 1 (scale) must have 1D shape [channel].",
        ),
        **{
            op: (
                {"ranks": [1, 4], "last_axis": True, "max_outputs": 1},
                f"{_PROVIDERS}/qnn/builder/opbuilder/rmsnormalization_op_builder.cc",
                "QNN RMSNorm for NPU backend only supports axis with last input dimension",
            )
            for op in ("RMSNormalization", "com.microsoft.SimplifiedLayerNormalization")
        },
        "LpNormalization": (
            {"attributes": {"p": [2]}},
            f"{_PROVIDERS}/qnn/builder/opbuilder/simple_op_builder.cc",
            "QNN EP only supports LpNormalization with 'p' attribute equal to 2.",
        ),
    },
    "nnapi": {
        "BatchNormalization": (
            {"ranks": [1, 4], "constant_parameters": True, "max_outputs": 1},
            f"{_PROVIDERS}/nnapi/nnapi_builtin/builders/impl/batchnorm_op_builder.cc",
            "BN only support up to 4d shape",
        ),
    },
    "webgpu": {
        op: (
            {"dtypes": ["float32", "float16"]},
            f"{_PROVIDERS}/webgpu/webgpu_supported_types.h",
            "WebGpuSupportedFloatTypes",
        )
        for op in NORMS
    },
}


@dataclass
class Copy:
    """Copy of a source on this machine: a git checkout, a folder, or one file."""

    source: str
    path: Path

    def read(self, file: str) -> str:
        """Read one file of the source as text.

        Args:
            file: path inside the source.
        """
        if self.path.is_file():
            return self.path.read_text(encoding="utf-8")
        if (self.path / file).is_file():
            return (self.path / file).read_text(encoding="utf-8")
        return self._git("show", f"HEAD:{file}")

    def describe(self) -> Row:
        """Describe the source and its version for the table."""
        known = SOURCES[self.source]
        if known.version:
            version = known.version
        elif self.source == "onnxruntime":
            version = onnxruntime.__version__
        elif (self.path / "package.json").is_file():
            version = json.loads((self.path / "package.json").read_text())["version"]
        else:
            version = self._git("log", "-1", "--format=%h of %cs").strip()
        return {"name": known.name, "version": version, "read": datetime.date.today().isoformat()}

    def _git(self, *words: str) -> str:
        run = subprocess.run(["git", "-C", self.path, *words], capture_output=True, check=True, encoding="utf-8")
        return run.stdout


# ------------------------------------------------------------------ readers: text of a list -> op -> row


def read_builders(text: str) -> dict[str, Row]:
    """Read the ops of an op_builder_factory.cc of onnxruntime."""
    return _rows(re.findall(r'Create\w+OpBuilder\("(\w+)"', text))


def read_kernel_table(text: str) -> dict[str, Row]:
    """Read the kernels that an execution provider of onnxruntime registers one by one."""
    registered = text[text.index("RegisterKernels()") :]
    return _rows(re.findall(r"KERNEL_CREATE_INFO\w*\([\d, ]+(\w+)", registered))


def read_mobile_list(text: str) -> dict[str, Row]:
    """Read a supported_ops.md of onnxruntime's mobile helpers."""
    return _rows(re.findall(r"^\|ai\.onnx[:.](\w+)\|", text, re.MULTILINE))


def read_web_table(text: str) -> dict[str, Row]:
    """Read webgpu-operators.md of onnxruntime-web, with the opsets."""
    rows = {}
    for op, domain, opsets in re.findall(r"^\| (\w+) \| ([\w.]+)\(([^)]*)\)", text, re.MULTILINE):
        first = int(re.split(r"[-,+]", opsets)[0])
        rows[_key(op, domain)] = {"support": "yes", "opsets": [first, None]}
    return rows


def read_directml(text: str) -> dict[str, Row]:
    """Read the section on DirectML of onnxruntime's OperatorKernels.md, with opsets and element types of T."""
    section = text[text.index("Operators implemented by DmlExecutionProvider") :]
    rows: dict[str, Row] = {}
    domain = key = ""
    for line in section.splitlines():
        if found := re.match(r"\|\*\*Operator Domain:\*\* \*([\w.]+)\*", line):
            domain = found[1]
        elif found := re.match(r"\|(\w*)\|.*\|(\d+)\+\|.*?\*\*T1?\*\* = ([^<|]*)", line):
            if found[1]:
                key = _key(found[1], domain)
                rows[key] = {"support": "yes", "opsets": [int(found[2]), None], "dtypes": _dtypes(found[3])}
            else:
                rows[key]["opsets"][0] = min(rows[key]["opsets"][0], int(found[2]))
    return rows


def read_tensorrt_table(text: str) -> dict[str, Row]:
    """Read operators.md of onnx-tensorrt, with the element types."""
    names = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
    rows: dict[str, Row] = {}
    for op, supported, types in re.findall(r"^\| (\w+) +\| ([YN])\s*\|([^|\n]*)", text, re.MULTILINE):
        if supported == "Y":
            rows[op] = {"support": "yes", "dtypes": [n for word, n in names.items() if word in types]}
    return rows


def read_newest_opset(text: str) -> int:
    """Read the newest opset of operators.md of onnx-tensorrt."""
    found = re.search(r"inclusive range of opset \d+ to opset (\d+)", text)
    assert found is not None
    return int(found[1])


def _rows(ops: Iterable[str]) -> dict[str, Row]:
    return {_key(op): {"support": "yes"} for op in ops}


def _key(op: str, domain: str = "ai.onnx") -> str:
    # onnxruntime registers this op of its own in ONNX's domain.
    if domain == "com.microsoft" or op == "SimplifiedLayerNormalization":
        return f"com.microsoft.{op}"
    return op


def _dtypes(text: str) -> list[str]:
    return [
        {"float": "float32", "double": "float64"}.get(name, name)
        for name in re.findall(r"tensor\(([\w]*float\w*|double)\)", text)
    ]


# ------------------------------------------------------------------ targets


def _finish(target: str, listed: Mapping[str, Row], source: str, why: str, conditions: str = "") -> Row:
    """Add the norms that the list lacks, the conditions and the sources."""
    rows: dict[str, Row] = {}
    for op in (*NORMS, *PARTS):
        row = dict(listed.get(op, {"support": "no", "why": why}))
        if row["support"] == "yes" and op in CONDITIONS.get(conditions, {}):
            more, file, _ = CONDITIONS[conditions][op]
            row |= more | {"sources": [source, f"onnxruntime-qnn:{file}"]}
        rows[op] = {"sources": [source]} | row
    return rows


def _check_conditions(copy: Copy) -> None:
    for target, ops in CONDITIONS.items():
        for op, (_, file, text) in ops.items():
            if text not in copy.read(file):
                raise SystemExit(f"{file} no longer says {text!r}: read the conditions of {op} in {target} again")


def onnxruntime_targets(copies: Mapping[str, Copy]) -> dict[str, Row]:
    """Build the targets that are execution providers of onnxruntime."""
    targets: dict[str, Row] = {}
    fork = copies.get("onnxruntime-qnn")
    wheel = copies["onnxruntime"]
    if fork is not None:
        _check_conditions(fork)
        builders = f"{_PROVIDERS}/coreml/builders/op_builder_factory.cc"
        coreml = read_builders(fork.read(builders))
        listed = read_mobile_list(wheel.read("tools/mobile_helpers/coreml_supported_mlprogram_ops.md"))
        targets["coreml-mlprogram"] = {
            "title": "CoreML (ML Program) in onnxruntime",
            "kind": "onnxruntime",
            # The published list lacks BatchNormalization, which the builders have.
            "ops": _finish(
                "coreml",
                listed | {op: coreml[op] for op in NORMS if op in coreml},
                f"onnxruntime-qnn:{builders}",
                "CoreML's op list lacks it",
                "coreml",
            ),
        }
        listed = read_mobile_list(wheel.read("tools/mobile_helpers/coreml_supported_neuralnetwork_ops.md"))
        targets["coreml-neuralnetwork"] = {
            "title": "CoreML (NeuralNetwork) in onnxruntime",
            "kind": "onnxruntime",
            "ops": _finish(
                "coreml",
                listed,
                "onnxruntime:tools/mobile_helpers/coreml_supported_neuralnetwork_ops.md",
                "CoreML's op list for NeuralNetwork lacks it",
                "coreml",
            ),
        }
        targets["coreml-neuralnetwork"]["ops"]["BatchNormalization"]["dtypes"] = ["float32"]
        listed = read_mobile_list(wheel.read("tools/mobile_helpers/nnapi_supported_ops.md"))
        targets["nnapi"] = {
            "title": "NNAPI in onnxruntime",
            "kind": "onnxruntime",
            "ops": _finish(
                "nnapi",
                listed,
                "onnxruntime:tools/mobile_helpers/nnapi_supported_ops.md",
                "NNAPI's op list lacks it",
                "nnapi",
            ),
        }
        builders = f"{_PROVIDERS}/qnn/builder/op_builder_factory.cc"
        targets["qnn"] = {
            "title": "QNN (Qualcomm) in onnxruntime",
            "kind": "onnxruntime",
            "ops": _finish(
                "qnn",
                read_builders(fork.read(builders)),
                f"onnxruntime-qnn:{builders}",
                "QNN's op builders lack it",
                "qnn",
            ),
        }
        kernels = f"{_PROVIDERS}/xnnpack/xnnpack_execution_provider.cc"
        targets["xnnpack"] = {
            "title": "XNNPACK in onnxruntime",
            "kind": "onnxruntime",
            "ops": _finish(
                "xnnpack",
                read_kernel_table(fork.read(kernels)),
                f"onnxruntime-qnn:{kernels}",
                "XNNPACK has no kernel for a norm",
            ),
        }
        kernels = "docs/OperatorKernels.md"
        rows = _finish(
            "directml",
            read_directml(fork.read(kernels)),
            f"onnxruntime-qnn:{kernels}",
            "DirectML's kernel list lacks it",
        )
        registered = f"{_PROVIDERS}/dml/DmlExecutionProvider/src/Operators/OperatorRegistration.cpp"
        if "GroupNormalization" not in fork.read(registered):
            rows["GroupNormalization"] = {
                "support": "no",
                "why": "DirectML registers a kernel named GroupNorm, not GroupNormalization",
                "sources": [f"onnxruntime-qnn:{kernels}", f"onnxruntime-qnn:{registered}"],
            }
        targets["directml"] = {"title": "DirectML in onnxruntime", "kind": "onnxruntime", "ops": rows}
    web = copies.get("onnxruntime-web")
    if web is not None:
        targets["webgpu"] = {
            "title": "WebGPU in onnxruntime-web",
            "kind": "onnxruntime",
            "ops": _finish(
                "webgpu",
                read_web_table(web.read("docs/webgpu-operators.md")),
                "onnxruntime-web:docs/webgpu-operators.md",
                "WebGPU's op list lacks it",
                "webgpu",
            ),
        }
    return targets


def tensorrt_targets(copies: Mapping[str, Copy]) -> dict[str, Row]:
    """Build a target for each release of TensorRT, and for the JetPack of each release.

    onnx-tensorrt's tables of 10.1, 10.15 and 11.1 were read. A release between two tables supports what both list. For
    an op that only the later table lists, the changelog names the first release. The release notes of 11.2 to 11.5
    name no norm, and no op list newer than 11.1's was found. Only the newest opset of 11.5 is stated elsewhere.
    """
    names = ("10.1", "10.15", "11.1")
    if not all(f"onnx-tensorrt-{name}" in copies for name in names) or "tensorrt" not in copies:
        return {}
    texts = {name: copies[f"onnx-tensorrt-{name}"].read("docs/operators.md") for name in names}
    tables = {name: read_tensorrt_table(text) for name, text in texts.items()}
    newest = {name: read_newest_opset(text) for name, text in texts.items()}
    changes = _read_changes(copies["tensorrt"].read("CHANGELOG.md"))
    targets = {}
    for release in ("10.3", *TENSORRT):
        version = _version(release)
        below = max((n for n in names if _version(n) <= version), key=_version)
        above = next((n for n in names if _version(n) >= version), below)
        rows: dict[str, Row] = {}
        for op in (*NORMS, *PARTS):
            row: Row = dict(tables[below].get(op) or {})
            sources = [f"onnx-tensorrt-{n}:docs/operators.md" for n in dict.fromkeys((below, above))]
            if not row and op in tables[above]:
                first = changes["RMSNormalization"] if op == "RMSNormalization" else ""
                if first and version >= _version(first):
                    row = dict(tables[above][op])
                elif first:
                    row = {"support": "no", "why": f"TensorRT's parser reads it from {first} on"}
                else:
                    row = {"support": "unknown", "why": f"TensorRT {above} lists it, but {below} does not"}
                sources.append("tensorrt:CHANGELOG.md")
            if not row:
                row = {"support": "no", "why": "TensorRT's op list lacks it"}
            if row["support"] == "yes" and op == "GroupNormalization" and version < _version(changes["GroupNorm"]):
                row["opsets"] = [18, 20]
                sources.append("tensorrt:CHANGELOG.md")
            if row["support"] == "yes" and op == "LayerNormalization":
                row["max_outputs"] = 1
            if version > _version("11.1"):
                sources.append("tensorrt-releases")
            rows[op] = row | {"sources": sources}
        opset = newest[below] if newest[below] == newest[above] else None
        opset_sources = [f"onnx-tensorrt-{n}:docs/operators.md" for n in dict.fromkeys((below, above))]
        if release == "11.5":
            # "Added support for ONNX opset 25". NVIDIA's opset guide gives 25 for all of 11, which contradicts
            # the list of 11.1, so the older releases keep what that list says.
            opset = 25
            opset_sources = ["onnx-tensorrt-11.5", "tensorrt-releases"]
        elif version > _version("11.1"):
            opset_sources.append("tensorrt-releases")
        targets[f"tensorrt-{release}"] = {
            "title": f"TensorRT {release}",
            "kind": "tensorrt",
            "opsets": [9, opset],
            "sources": opset_sources,
            "ops": rows,
        }
    jetpack = targets.pop("tensorrt-10.3")
    targets["jetpack-6"] = jetpack | {
        "title": "TensorRT 10.3 of JetPack 6.1 and 6.2",
        "note": "other releases of JetPack 6 have other TensorRT releases: `dpkg -l | grep nvinfer` shows the release",
        "sources": ["torch-tensorrt", *jetpack["sources"]],
    }
    unknown = "no source was read that says which TensorRT release JetPack 7 has"
    targets["jetpack-7"] = {
        "title": "TensorRT of JetPack 7",
        "kind": "tensorrt",
        "note": f"{unknown}: `dpkg -l | grep nvinfer` on the device shows it; then pass tensorrt-RELEASE",
        "opsets": [9, None],
        "unknown": unknown,
        "ops": {},
    }
    return targets


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _read_changes(text: str) -> dict[str, str]:
    """Find the releases of NVIDIA's changelog that added RMSNormalization and GroupNormalization of opset 21."""
    releases: dict[str, str] = {}
    release = ""
    for line in text.splitlines():
        if found := re.match(r"## (\d+\.\d+)", line):
            release = found[1]
        if "Added support for" in line and "`RMSNormalization`" in line:
            releases["RMSNormalization"] = release
        if "Added support for opset 21 GroupNorm" in line:
            releases["GroupNorm"] = release
    return releases


def triton_targets(copies: Mapping[str, Copy]) -> dict[str, Row]:
    """Build a target for each release of Triton, whose onnxruntime runs the file."""
    if "triton" not in copies:
        return {}
    text = copies["triton"].read("docs/introduction/compatibility.md")
    versions = dict(re.findall(r"^\| (\d\d\.\d\d) \| ([\d.]+)\S* \|$", text, re.MULTILINE))
    engines = dict(re.findall(r"^\| (\d\d\.\d\d) \| \S+-trtllm-\S+ \|[^|]*\|[^|]*\| ([\d.]+)", text, re.MULTILINE))
    targets = {}
    for release, version in sorted(versions.items()):
        targets[f"triton-{release}"] = {
            "title": f"onnxruntime {version} of Triton {release}",
            "kind": "onnxruntime",
            "note": (
                f"Triton's page lists TensorRT {engines.get(release, 'of no release')} for the image"
                f" {release}-trtllm-python-py3, and none for the other images; for an engine, pass tensorrt-RELEASE"
            ),
            "sources": ["triton:docs/introduction/compatibility.md"],
            "unknown": f"no op list of onnxruntime {version} was read",
            "ops": {},
        }
    return targets


BUILDERS: tuple[Callable[[Mapping[str, Copy]], dict[str, Row]], ...] = (
    onnxruntime_targets,
    tensorrt_targets,
    triton_targets,
)


def main() -> None:
    """Read the sources, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", action="append", default=[], metavar="NAME=PATH", help="source, and its copy here")
    copies = {"onnxruntime": Copy("onnxruntime", Path(onnxruntime.__file__).parent)}
    for text in parser.parse_args().read:
        name, _, path = text.partition("=")
        if name not in SOURCES:
            parser.error(f"unknown source {name!r}; choose from {', '.join(SOURCES)}")
        copies[name] = Copy(name, Path(path))
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {"sources": {}, "targets": {}}
    sources = old["sources"] | {name: copy.describe() for name, copy in copies.items()}
    for name in PAGES:
        sources[name] = {"name": SOURCES[name].name, "version": SOURCES[name].version, "read": PAGES_READ}
    targets = old["targets"]
    for build in BUILDERS:
        targets |= build(copies)
    TABLE.write_text(_format_table({"sources": sources, "targets": targets}))


def _format_table(table: Mapping[str, Any]) -> str:
    """Format the table as JSON with one line for each op, so that a change of one op changes one line."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    sources = ",\n".join(f"  {line(name)}: {line(value)}" for name, value in sorted(table["sources"].items()))
    targets = []
    for name, target in table["targets"].items():
        head = "".join(f"   {line(key)}: {line(value)},\n" for key, value in target.items() if key != "ops")
        ops = ",".join(f"\n    {line(op)}: {line(row)}" for op, row in target["ops"].items())
        targets.append(f'  {line(name)}: {{\n{head}   "ops": {{{ops}}}\n  }}')
    joined = ",\n".join(targets)
    return f'{{\n "sources": {{\n{sources}\n }},\n "targets": {{\n{joined}\n }}\n}}\n'


if __name__ == "__main__":
    main()
