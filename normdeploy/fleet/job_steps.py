"""List the steps of one model in one variant. Each step has its verb, files, preceding steps and required machine.

    export ─ verify ─┬─ build ─ verify the engine ─┬─ bench ─ package ─ recheck     for each target
    (or optimize)    └─────────────────────────────┘

A step's folder contains only the files that the step needs: the model, samples, and outputs of preceding steps. The
step can't read any other file by a relative path, so its key covers everything that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..zoo_sources import parse_zoo_source
from .fleet_file import FleetJob, FleetTarget
from .fleet_schema import Values

ENGINES = ("tensorrt-rtx", "tensorrt")
REPORT = "out/report.json"
# Names of files and folders that have a special meaning in a step's folder. A source can't have such a name.
_TAKEN = frozenset({"out", "files", "export", "build", "package"})
# Options that may run code from the folder that contains fleet.toml.
CODE = ("model", "model_arg", "import", "trust_remote_code")


@dataclass(frozen=True)
class StepNeeds:
    """Requirements of a step on its machine.

    Attributes:
        runtime: runtime that must be installed; "" if Python is enough.
        version: pattern of the runtime's version such as "1.7.*".
        capability: compute capability of a GPU; "" if none is needed.
    """

    runtime: str = ""
    version: str = ""
    capability: str = ""

    def __str__(self) -> str:
        if self.runtime:
            texts = [f"{self.runtime} {self.version}".strip()]
        else:
            texts = []
        return " and ".join([*texts, *([f"a GPU of compute capability {self.capability}"] if self.capability else [])])


@dataclass(frozen=True)
class JobStep:
    """One call of a verb.

    Attributes:
        name: name of the step, for example "minilm/int8/ada/build".
        argv: words after ``normdeploy`` on a command line in the step's folder; every path is inside that folder.
        files: path in the step's folder → file or folder outside of it.
        code: folder whose Python files are all copied; None if the step runs no such code.
        after: subfolder of the step's folder → step whose outputs are copied to this subfolder.
        gates: preceding steps that must have ended without being wrong or failed. The step does not read the outputs of
            its gates.
        evidence: file that exists if the verb finished its work, whether its result is right or wrong.
        reports: True to also read the reports of the preceding steps.
        seconds: time limit; 0 for none.
        memory: memory limit in bytes for all processes of the step together; 0 for none.
    """

    name: str
    argv: tuple[str, ...]
    files: Mapping[str, Path] = field(default_factory=dict)
    code: Path | None = None
    after: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    needs: StepNeeds = StepNeeds()
    evidence: str = REPORT
    reports: bool = False
    seconds: float = 0.0
    memory: int = 0

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def preceding_steps(self) -> tuple[str, ...]:
        """Return the names of the steps that must end before this step starts.

        Returns:
            the steps whose outputs this step reads, then its gates.
        """
        return (*self.after.values(), *self.gates)


def job_steps_of(job: FleetJob) -> tuple[JobStep, ...]:
    """List all steps of a job.

    Returns:
        the steps, each after its preceding steps.
    """
    return tuple(_iter_job_steps(job))


def _iter_job_steps(job: FleetJob) -> Iterator[JobStep]:
    common = job.name
    made = f"{common}/export"
    options = dict(job.options["export"])
    runs = {name: options[name] for name in CODE if options.get(name)}
    if runs:
        code = job.folder
    else:
        code = None
    given = _JobContext(job, code)
    # The package that makes the model is code that the key must cover.
    if given.is_zoo_model:
        given = replace(given, code=job.folder)
    model = given.source_name
    argv: tuple[str, ...] = ("export" if given.is_pytorch else "optimize", model, "-o", "out/model.onnx")
    yield given.complete(JobStep(made, argv), options)
    export = {"export": made}
    gates: tuple[str, ...] = ()
    if "verify" in job.steps:
        gates = (f"{common}/verify",)
        argv = ("verify", model, "export/model.onnx")
        step = JobStep(gates[0], argv, after=export, needs=StepNeeds("onnxruntime"))
        yield given.complete(step, {**runs, **job.options["verify"]})
    for target in job.targets:
        yield from _iter_target_steps(job, given, target, runs, export, gates)


def _iter_target_steps(
    job: FleetJob,
    given: _JobContext,
    target: FleetTarget,
    runs: Values,
    export: Mapping[str, str],
    gates: tuple[str, ...],
) -> Iterator[JobStep]:
    common = f"{job.name}/{target.name}"
    model = given.source_name
    options = target.merge_options(job.options)
    here = StepNeeds(target.runtime, target.version, target.capability if target.runtime in ENGINES else "")
    after = dict(export)
    engines = list[str]()
    if target.runtime in ENGINES:
        build = f"{common}/build"
        argv = ["build", "export/model.onnx", "-o", "out/model.engine", "--library", target.runtime]
        argv += ["--compute-capability", target.capability] if target.runtime == "tensorrt-rtx" else []
        builder = StepNeeds(target.runtime, target.version, target.capability if target.runtime == "tensorrt" else "")
        step = JobStep(build, tuple(argv), after=export, gates=gates, needs=builder)
        yield given.complete(step, options["build"], reads_source=False)
        after["build"], engines = build, ["build/model.engine"]
        if "verify" in job.steps:
            name = f"{common}/verify"
            step = JobStep(name, ("verify", model, *engines), after={"build": build}, gates=gates, needs=here)
            # Tokens are generated with ONNX files, whose verify step is a gate of this step.
            of_engines = {key: value for key, value in options["verify"].items() if key != "generate"}
            yield given.complete(step, {**runs, **of_engines})
            gates = (*gates, name)
    # A target with a version needs its own verify step, because the verify step of all targets accepts any version of
    # the runtime.
    elif target.version and "verify" in job.steps:
        name = f"{common}/verify"
        step = JobStep(name, ("verify", model, "export/model.onnx"), after=export, gates=gates, needs=here)
        yield given.complete(step, {**runs, **options["verify"]})
        gates = (*gates, name)
    if "bench" in job.steps:
        raced = engines or ["export/model.onnx"]
        read = {"build": after["build"]} if engines else export
        step = JobStep(f"{common}/bench", ("bench", *raced), after=read, gates=gates, needs=here)
        yield given.complete(step, options["bench"], reads_source=False)
    if "package" in job.steps and target.bundle:
        package = f"{common}/package"
        argv = ["package", "export/model.onnx", "-o", "out/bundle", "--name", _safe_name(job.model)]
        # With --source, the expected answers come from the PyTorch model. Without --source, they would come from
        # onnxruntime.
        argv += ["--source", model] if given.is_pytorch else []
        argv += ["--report-from", "export/report.json", *[word for engine in engines for word in ("--engine", engine)]]
        step = JobStep(
            package,
            tuple(argv),
            after=after,
            gates=gates,
            needs=StepNeeds("onnxruntime"),
            evidence="out/bundle/manifest.json",
            reports=True,
        )
        yield given.complete(step, {**runs, **options["package"]}, reads_source=given.is_pytorch)
        step = JobStep(
            f"{common}/recheck",
            ("recheck", "package/bundle"),
            after={"package": package},
            needs=StepNeeds("onnxruntime"),
        )
        yield given.complete(step, {}, reads_source=False)


@dataclass(frozen=True)
class _JobContext:
    """Values that all steps of a job share."""

    job: FleetJob
    code: Path | None

    @property
    def source_name(self) -> str:
        """Return the source's name in a step's folder: its file name, unless this name is taken or looks like an
        option.

        Returns:
            for example "model.onnx", or "source_out" for a folder called "out".
        """
        name = self.job.source.name
        if name in _TAKEN or name.startswith("-"):
            return f"source_{name}"
        return name

    @property
    def is_zoo_model(self) -> bool:
        """Return True if the source is the name of a package's model, such as timm:resnet50, not a file."""
        return not self.job.source.exists() and parse_zoo_source(self.job.source.name) is not None

    @property
    def is_pytorch(self) -> bool:
        """Return True if the source is a PyTorch model, not an ONNX file."""
        return self.job.source.suffix != ".onnx"

    def complete(self, step: JobStep, options: Values, *, reads_source: bool = True) -> JobStep:
        """Add options, files and limits to a step.

        Args:
            options: options by name, with "_" for "-".
            reads_source: True if the step reads the source of the job.

        Returns:
            the completed step.
        """
        if reads_source and not self.is_zoo_model:
            files = {self.source_name: self.job.source}
        else:
            files = {}
        words = [*step.argv, *command_line_options(options, files)]
        if step.evidence == REPORT:
            words += ["--report", REPORT]
        return replace(
            step,
            argv=tuple(words),
            files=files,
            code=self.code if reads_source else None,
            seconds=self.job.seconds,
            memory=self.job.memory,
        )


def as_list(value: Any) -> list[Any]:
    """Return an option's value as a list.

    Returns:
        [] for None, and a single value in a list.
    """
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def command_line_options(options: Values, files: dict[str, Path]) -> list[str]:
    """Write options as words of a command line, sorted by name.

    Args:
        files: path in the step's folder → file. Files that the options name are added.

    Returns:
        the words.
    """
    words = []
    for option, value in sorted(options.items()):
        flag = f"--{option.replace('_', '-')}"
        for one in as_list(value):
            if isinstance(one, Path):
                place = _path_in_folder(one, files)
                files[place] = one
                words += [flag, place]
            elif one is True:
                words.append(flag)
            elif one is not False:
                words += [flag, str(one)]
    return words


def _path_in_folder(file: Path, taken: Mapping[str, Path]) -> str:
    """Choose the path of a file in the step's folder: the file's own name, unless another file has this name."""
    number = 0
    while taken.get(place := f"files/{number}/{file.name}" if number else f"files/{file.name}", file) != file:
        number += 1
    return place


def _safe_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
