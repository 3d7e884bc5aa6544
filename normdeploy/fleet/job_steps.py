"""The steps of one model in one variant: which verb, in a folder of which files, after which others, on which machine.

    export ─ verify ─┬─ build ─ verify the engine ─┬─ bench ─ package ─ recheck     for each target
    (or optimize)    └─────────────────────────────┘

A step sees its own files alone: the model, samples, the outputs of the steps before it. What is not among them it can't
read by a relative path, and so its key covers what it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .fleet_file import FleetJob, FleetTarget
from .fleet_schema import Values

ENGINES = ("tensorrt-rtx", "tensorrt")
REPORT = "out/report.json"
# folders of a step
_TAKEN = frozenset({"out", "files", "export", "build", "package"})
# what may run code of the folder of fleet.toml
CODE = ("model", "model_arg", "import", "trust")


@dataclass(frozen=True)
class StepNeeds:
    """What a machine must have to run a step.

    ``runtime`` "" needs none but Python; ``version`` is a pattern such as "1.7.*"; ``capability`` the compute
    capability of a GPU, "" where none is needed.
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

    ``argv`` is what follows ``normdeploy`` on a command line in the step's folder, in which every path of it is.
    ``files`` are path in the folder -> file or folder outside; ``after`` is folder in the folder -> the step whose
    outputs are put there; ``gates`` are steps that must not be wrong, and of which nothing is read.
    """

    # "minilm/int8/ada/build"
    name: str
    argv: tuple[str, ...]
    files: Mapping[str, Path] = field(default_factory=dict)
    # every Python file below it is put into the folder
    code: Path | None = None
    after: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    needs: StepNeeds = StepNeeds()
    # is there where the verb did its work, right or wrong
    evidence: str = REPORT
    # whether the reports of the steps before are read too
    reports: bool = False
    # the limit; 0: none
    seconds: float = 0.0
    # the limit of all its processes, in bytes; 0: none
    memory: int = 0

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def preceding_steps(self) -> tuple[str, ...]:
        """The steps that come first."""
        return (*self.after.values(), *self.gates)


def job_steps_of(job: FleetJob) -> tuple[JobStep, ...]:
    """All steps of the job, each behind those that it needs."""
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
        argv = ["build", "export/model.onnx", "-o", "out/model.engine", "--runtime", target.runtime]
        argv += ["--compute-capability", target.capability] if target.runtime == "tensorrt-rtx" else []
        builder = StepNeeds(target.runtime, target.version, target.capability if target.runtime == "tensorrt" else "")
        step = JobStep(build, tuple(argv), after=export, gates=gates, needs=builder)
        yield given.complete(step, options["build"], reads_source=False)
        after["build"], engines = build, ["build/model.engine"]
        if "verify" in job.steps:
            name = f"{common}/verify"
            step = JobStep(name, ("verify", model, *engines), after={"build": build}, gates=gates, needs=here)
            yield given.complete(step, {**runs, **options["verify"]})
            gates = (*gates, name)
    # The step of all targets runs whatever version there is.
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
        # Without the model the expected answers are onnxruntime's.
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
    """What all steps of a job share."""

    job: FleetJob
    code: Path | None

    @property
    def source_name(self) -> str:
        """What the source is called in a step's folder: by its own name, where nothing else is and no verb takes that
        for an option."""
        name = self.job.source.name
        if name in _TAKEN or name.startswith("-"):
            return f"source_{name}"
        return name

    @property
    def is_pytorch(self) -> bool:
        """Whether the source is a model of PyTorch, and no ONNX file."""
        return self.job.source.suffix != ".onnx"

    def complete(self, step: JobStep, options: Values, *, reads_source: bool = True) -> JobStep:
        """Return the step with the words of its options, the files that it reads and the limits of the job."""
        if reads_source:
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
    """An option that may be given once without a list; [] where it is not given."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def command_line_options(options: Values, files: dict[str, Path]) -> list[str]:
    """Options as they stand on a command line, by their names' order. Files that they name are added to ``files``, path
    in the step's folder -> where it is."""
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
    """Where a file is put, under its own name where no other has that."""
    number = 0
    while taken.get(place := f"files/{number}/{file.name}" if number else f"files/{file.name}", file) != file:
        number += 1
    return place


def _safe_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
