"""The command line as a user runs it: in a process of its own where what it imports or prints at its start counts, else
in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
import typer.main
import typer.testing
from onnx import TensorProto, helper

from normdeploy.cli import app as cli
from normdeploy.cli.verbose import add_common_options
from normdeploy.errors import InputError
from normdeploy.verb_options import LoadingOptions, parse_factory_arguments
from normdeploy.verbs.export.export_options import EveryPartOptions

HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnx_graphsurgeon",
    "polygraphy",
    "numpy",
    "tensorrt_rtx",
    "normdeploy.verbs.export.export_function",
    "normdeploy.verbs.optimize.optimize_function",
    "normdeploy.verbs.arguments.model_source",
)


def run(*args: str | Path, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """``normdeploy ARGS``; standard input closed, no terminal."""
    command = [sys.executable, "-m", "normdeploy", *map(str, args)]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=cwd, timeout=timeout, env=env
    )


Called = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Called:
    """As `run`, in this process, which has imported what a verb takes seconds to import."""

    def call(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["normdeploy", *map(str, args)])
        if cwd is not None:
            monkeypatch.chdir(cwd)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.main())  # type: ignore[func-returns-value]
        return subprocess.CompletedProcess(args, int(ended.value.code or 0), *capfd.readouterr())

    return call


def layer_norm_by_hand(path: Path, epsilon: float = 1e-12) -> Path:
    """An ONNX file of one hand-written layer norm on (batch, 8)."""
    constants = {
        "gamma": np.linspace(0.5, 2, 8),
        "beta": np.linspace(-1, 1, 8),
        "eps": np.array(epsilon),
        "two": np.array(2.0),
    }
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"]),
        helper.make_node("Sub", ["x", "mean"], ["d"]),
        helper.make_node("Pow", ["d", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["var"]),
        helper.make_node("Add", ["var", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["std"]),
        helper.make_node("Div", ["d", "std"], ["unit"]),
        helper.make_node("Mul", ["unit", "gamma"], ["scaled"]),
        helper.make_node("Add", ["scaled", "beta"], ["y"]),
    ]
    initializers = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    initializers.append(onnx.numpy_helper.from_array(np.array([-1]), "axes"))
    shape = ["batch", 8]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["export", "--help"], ["verify", "--help"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['normdeploy', *{args}]\n"
        "from normdeploy.cli.app import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert "normdeploy" in done.stdout


@pytest.mark.parametrize("verb", ["inspect", "check", "optimize", "build", "run"])
def test_verbs_on_onnx_files_import_neither_torch_nor_sympy(verb: str, tmp_path: Path) -> None:
    """torch takes 1.4 s to import, sympy 0.4 s: longer than all that such a verb does with a small file.

    onnx_ir, by which ``optimize`` cleans up, imports sympy.
    """
    heavy = ("torch",) if verb == "optimize" else ("torch", "sympy")
    np.savez(tmp_path / "x.npz", x=np.ones((2, 8), np.float32))
    output = ["-o", str(tmp_path / "out")]
    options = {
        "optimize": output,
        "build": [*output, "--profile", "batch=1:2:4"],
        "run": [*output, "--inputs", str(tmp_path / "x.npz")],
    }
    args = [verb, str(layer_norm_by_hand(tmp_path / "in.onnx")), *options.get(verb, [])]
    code = (
        f"import atexit, sys\natexit.register(lambda: print([m for m in {heavy} if m in sys.modules], 'onnx' in"
        f" sys.modules, file=sys.stderr))\nsys.argv = ['normdeploy', *{args}]\nfrom normdeploy.cli.app import main;"
        " main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == (1 if verb == "check" else 0), done.stderr
    assert done.stderr.strip() == "[] True"


def test_run_without_an_output_file_summarizes_the_outputs_and_writes_nothing(tmp_path: Path, called: Called) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => (float[3] y) { y = Sub(x, x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    done = called("run", str(tmp_path / "m.onnx"))
    assert done.returncode == 0
    assert "output  y  float32[3]  min 0, max 0, mean 0" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_every_verb_is_listed(called: Called) -> None:
    text = called("--help").stdout
    for verb in ("export", "build", "verify", "inspect", "optimize"):
        assert f" {verb} " in text


@pytest.mark.parametrize(
    "args",
    [["no-such-verb"], ["optimize"], ["optimize", "a.onnx"], ["optimize", "a.onnx", "-o", "b", "--runtime", "x"]],
)
def test_wrong_usage_exits_with_2(args: list[str], called: Called) -> None:
    done = called(*args)
    assert done.returncode == 2
    assert "Usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_optimize_fuses_and_reports(tmp_path: Path) -> None:
    source, out, report = layer_norm_by_hand(tmp_path / "in.onnx"), tmp_path / "out.onnx", tmp_path / "report.json"
    before = source.read_bytes()
    done = run("optimize", source, "-o", out, "--report", report)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bar and no library's talk where there is no terminal"
    assert "fused into LayerNormalization(axis=-1, epsilon=1e-12)" in " ".join(done.stdout.split())
    assert [n.op_type for n in onnx.load(out).graph.node] == ["LayerNormalization"]
    assert source.read_bytes() == before
    document = json.loads(report.read_text())
    assert (document["schema"], document["verb"]) == ("normdeploy/report/1", "optimize")
    assert [(n["kind"], n["status"]) for n in document["norms"]] == [("LayerNorm", "fused")]
    assert document["files"] == {"source": str(source), "output": str(out)}


def test_quiet_says_nothing(tmp_path: Path, called: Called) -> None:
    done = called("optimize", layer_norm_by_hand(tmp_path / "in.onnx"), "-o", tmp_path / "out.onnx", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "out.onnx").exists()


def test_users_errors_are_one_message(tmp_path: Path, called: Called) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"\x00junk" * 10)
    source = layer_norm_by_hand(tmp_path / "in.onnx")
    for args, said in (
        (["optimize", "missing.onnx", "-o", "out.onnx"], "missing.onnx"),
        (["optimize", "junk.onnx", "-o", "out.onnx"], "junk.onnx"),
        (["optimize", source, "-o", "no/such/folder/out.onnx"], "folder"),
        (["optimize", source, "-o", "out.onnx", "--report", "no/such/folder/report.json"], "folder"),
        (["optimize", source, "-o", "in.onnx"], "would overwrite the input"),
    ):
        done = called(*args, cwd=tmp_path)
        assert done.returncode == 1, args
        assert done.stderr.startswith("error: "), done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out.onnx").exists()
        assert done.stdout == ""


def test_unfitting_weights_and_missing_inputs_are_printed_in_one_message(tmp_path: Path, called: Called) -> None:
    """The lines are those of the list; what the inputs lack ends the last of them."""
    import torch

    torch.save({"weight": torch.ones(4, 3), "scale": torch.ones(1)}, tmp_path / "w.pt")
    arguments = ("--model-arg", "in_features=3", "--model-arg", "out_features=4")
    done = called("export", "w.pt", "-o", "net.onnx", "--model", "torch.nn:Linear", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: the weights of w.pt do not fit Linear:",
        "  1 missing from the file:",
        "    bias",
        "  1 not in the model:",
        "    scale",
        "Check the factory's arguments, or choose other weights with --key. Also, Linear needs example inputs: "
        "describe them with --input, for example --input 'input:float32[batch,3,224,224]'; its forward is "
        "Linear(input)",
    ]


def test_output_through_a_link_to_the_input_is_refused(tmp_path: Path, called: Called) -> None:
    source = layer_norm_by_hand(tmp_path / "in.onnx")
    before = source.read_bytes()
    (tmp_path / "link.onnx").symlink_to(source)
    done = called("optimize", source, "-o", tmp_path / "link.onnx")
    assert done.returncode == 1
    assert source.read_bytes() == before


def test_inspect_changes_nothing(tmp_path: Path, called: Called) -> None:
    source = layer_norm_by_hand(tmp_path / "in.onnx")
    before = source.read_bytes()
    done = called("inspect", source)
    assert done.returncode == 0, done.stderr
    assert "LayerNorm written as ReduceMean Sub Pow" in " ".join(done.stdout.split())
    assert [p.name for p in tmp_path.iterdir()] == ["in.onnx"]
    assert source.read_bytes() == before


def test_build_takes_several_compute_capabilities_after_one_option(tmp_path: Path, called: Called) -> None:
    source, out, report = layer_norm_by_hand(tmp_path / "in.onnx"), tmp_path / "m.engine", tmp_path / "report.json"
    given = ["--compute-capability", "8.6", "8.9", "--profile", "batch=1:4:16", "--compute-capability", "12.0"]
    done = called("build", source, "-o", out, *given, "--report", report)
    assert done.returncode == 0, done.stderr
    assert "built; not run" in done.stdout
    engine = json.loads(report.read_text())["engine"]
    assert engine["compute_capabilities"] == ["8.6", "8.9", "12.0"]
    assert engine["profile"] == {"x": [[1, 8], [4, 8], [16, 8]]}
    assert engine["layers"] > 0
    assert engine["bytes"] == out.stat().st_size


def test_build_of_a_dynamic_file_without_ranges_says_what_is_missing(tmp_path: Path, called: Called) -> None:
    done = called("build", layer_norm_by_hand(tmp_path / "in.onnx"), "-o", tmp_path / "m.engine")
    assert done.returncode == 1
    assert "batch" in done.stderr
    assert "batch=1:8:64" in done.stderr


@pytest.mark.slow
def test_export_build_verify(project: Path, called: Called) -> None:
    done = run("export", "model.pt", "-o", "model.onnx", "--report", "export.json", cwd=project)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads((project / "export.json").read_text())
    assert [(n["kind"], n["status"], n["proved"]) for n in document["norms"]] == [
        ("LayerNorm", "fused", ["identity", "onnxruntime run"])
    ]
    assert document["nodes"]["after"] < document["nodes"]["before"]
    assert list(document["seconds"]) == [
        "load",
        "export",
        "reference",
        "norms",
        "simplify",
        "compare",
        "check",
        "write",
    ]

    done = called("build", "model.onnx", "-o", "model.engine", "--compute-capability", "8.6", cwd=project)
    assert done.returncode == 0, done.stderr

    done = called(
        "verify", "model.pt", "model.onnx", "model.engine", "--seeds", "2", "--report", "verify.json", cwd=project
    )
    # 3 without a GPU, on which the engine is run.
    assert done.returncode in (0, 3), done.stderr
    parity = json.loads((project / "verify.json").read_text())["parity"]
    ran = {r["runtime"] for r in parity["results"]}
    assert {"eager", "onnxruntime (optimizer off)", "onnxruntime (optimizer on)"} <= ran
    engine = "TensorRT-RTX (model.engine)"
    assert engine in ran or engine in {missed["runtime"] for missed in parity["not_run"]}
    for result in parity["results"]:
        assert result["verdict"] == "pass"
        assert 0 < result["allowed"] < 1e-4
    assert "verified on" in done.stdout or "verified, except for model.engine, which was not run, on" in done.stdout
    assert "NOT" not in done.stdout
    assert not (project / "imported").exists(), "an ExportedProgram needs no code of the user"

    proto = onnx.load(project / "model.onnx")
    (norm,) = (node for node in proto.graph.node if node.op_type == "LayerNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 1e-3
    onnx.save(proto, project / "model.onnx")
    done = called("verify", "model.pt", "model.onnx", "--seeds", "1", "--report", "verify.json", cwd=project)
    assert done.returncode == 1, "another epsilon"
    assert "NOT verified" in done.stdout
    parity = json.loads((project / "verify.json").read_text())["parity"]
    assert parity["ok"] is False
    verdicts = {r["runtime"]: r["verdict"] for r in parity["results"]}
    assert verdicts["eager"] == "pass"
    assert verdicts["onnxruntime (optimizer off)"] == "fail"


@pytest.mark.parametrize("group", [LoadingOptions, EveryPartOptions])
def test_every_loading_option_reaches_the_python_function(group: type[LoadingOptions]) -> None:
    words = ["--model", "m:net", "--model-arg", "width=8", "--key", "state", "--trust-remote-code", "--import", "extra"]
    words += ["--input", "x=1x4", "--dim", "n=1..8", "--eval", "--task", "text-generation", "--part", "decoder"]
    given: list[LoadingOptions] = []

    def verb(load: Any) -> None:
        given.append(load)

    verb.__annotations__["load"] = group
    loaded = typer.Typer()
    loaded.command()(add_common_options(verb))
    assert typer.testing.CliRunner().invoke(loaded, words).exit_code == 0
    assert given[0].load_keywords == {
        "model": "m:net",
        "model_args": {"width": 8},
        "key": "state",
        "trust": True,
        "imports": ["extra"],
        "inputs": ["x=1x4"],
        "dims": ["n=1..8"],
        "eval": True,
        "task": "text-generation",
        "part": "decoder",
    }


def test_factory_arguments_are_literals_or_text(called: Called) -> None:
    given = ("layers=12", "name=tiny", "sizes=[1, 2]", "flag=True", "path=a=b", "empty=")
    assert parse_factory_arguments(given) == {
        "layers": 12,
        "name": "tiny",
        "sizes": [1, 2],
        "flag": True,
        "path": "a=b",
        "empty": "",
    }
    assert called("export", "m.pt", "-o", "m.onnx", "--model-arg", "12").returncode == 2
    for text in ("layers", "12=3", "=3"):
        with pytest.raises(InputError, match="NAME=VALUE"):
            parse_factory_arguments([text])


def on_a_terminal(*args: str | Path) -> str:
    """What ``normdeploy ARGS`` writes to a terminal."""
    import pty

    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "normdeploy", *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    return seen.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_progress_is_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    source = layer_norm_by_hand(tmp_path / "in.onnx")
    text = on_a_terminal("optimize", source, "-o", tmp_path / "out.onnx")
    assert "━" in text
    assert "1 fused" in text
    assert on_a_terminal("optimize", source, "-o", tmp_path / "out.onnx", "--quiet") == ""


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        ("inspect in", "in"),
        ("run in -o out", "in"),
        ("run in -o out", "out"),
        ("run in -o out --inputs x", "x"),
        ("verify model in --inputs x", "x"),
        ("bisect model in --inputs x", "x"),
        ("bisect model in -o out", "out"),
        ("bench model in --inputs x", "x"),
        ("recheck folder", "folder/x"),
        ("recheck folder --onnx in", "in"),
    ],
)
def test_a_report_never_replaces_what_the_verb_reads(
    command: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("in", "x", "model", "folder/x"):
        Path(name).write_text(name)
    monkeypatch.setattr(sys, "argv", ["normdeploy", *command.split(), "--report", lost])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert f"the report '{lost}' would replace '{lost}'" in capsys.readouterr().err
    assert {name: Path(name).read_text() for name in ("in", "x", "model", "folder/x")} == {
        n: n for n in ("in", "x", "model", "folder/x")
    }
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "command",
    ["inspect {0}", "optimize {0} -o y", "optimize in -o {0}", "inspect in --report {0}", "bisect in in -o {0}"],
)
def test_a_name_that_is_too_long(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(layer_norm_by_hand(tmp_path / "in").parent)
    monkeypatch.setattr(sys, "argv", ["normdeploy", *command.format("n" * 300).split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "too long" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_behind_standard_output_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normdeploy", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "error: can't write to standard output: No space left on device; free some space\n"


def test_memory_that_is_not_there_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", lambda: np.zeros(2**58, np.float32))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "out of memory: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb",
    [[], *([command.name or getattr(command.callback, "__name__", "")] for command in cli.app.registered_commands)],
)
def test_help_fits_80_columns_and_shows_flags_as_flags(verb: list[str]) -> None:
    """An example that is cut can't be copied, and <bool> behind a flag says that it takes a value."""
    done = typer.testing.CliRunner().invoke(
        cli.app, [*verb, "-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}, terminal_width=80
    )
    assert done.exit_code == 0
    assert "bool" not in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    if verb:
        assert "--verbose" in done.stdout


@pytest.mark.parametrize(
    "verb", [[command.name or getattr(command.callback, "__name__", "")] for command in cli.app.registered_commands]
)
def test_help_of_verb_shows_no_backslash_and_no_broken_sentence(verb: list[str]) -> None:
    done = typer.testing.CliRunner().invoke(
        cli.app, [*verb, "-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}, terminal_width=80
    )
    assert "\\" not in done.stdout
    lines = done.stdout.split("Arguments")[0].splitlines()
    check_lines_are_full([line[1:].rstrip() for line in lines if "Usage" not in line], 78)


def test_list_of_verbs_breaks_no_sentence() -> None:
    done = typer.testing.CliRunner().invoke(
        cli.app, ["-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}, terminal_width=80
    )
    cells = [line.strip("│")[11:].rstrip() for line in done.stdout.split("Commands")[1].splitlines()[1:-2]]
    check_lines_are_full(cells, 66)


def test_help_joins_the_lines_of_a_paragraph() -> None:
    """The docstring of ``verify`` begins a line with the second sentence; terminals wrap the paragraph."""
    done = typer.testing.CliRunner().invoke(cli.app, ["verify", "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert "need not repeat them. Recorded options that run code" in done.stdout


def check_lines_are_full(lines: list[str], width: int) -> None:
    """A line that does not end a sentence has no room for the next word."""
    for line, after in pairwise(lines):
        if line and after and not line.endswith("."):
            assert len(line) + 1 + len(after.split()[0]) > width, (line, after)


def test_profiles_sizes_and_dims_mean_one_thing_in_all_verbs() -> None:
    """--profile was a range for one verb, a size for another and a number for a third."""
    metavars: dict[str, set[str | None]] = {}
    for command in typer.main.get_command(cli.app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            metavars.setdefault(option.opts[0], set()).add(option.metavar)
    assert metavars["--profile"] == metavars["--dim"] == {"NAME=MIN:OPT:MAX"}
    assert metavars["--size"] == {"NAME=SIZE"}
    assert len(metavars["--profile-index"]) == len(metavars["--precision"]) == len(metavars["--input"]) == 1


def test_verbose_logs_stages_norms_and_files(tmp_path: Path, called: Called) -> None:
    source, out = layer_norm_by_hand(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    done = called("optimize", source, "-o", out, "-q", "-v")
    assert (done.returncode, done.stdout) == (0, "")
    for said in (
        "norms took",
        "LayerNorm y fused LayerNormalization(axis=-1, epsilon=1e-12) (exact, error 2^-",
        f"wrote {out}",
    ):
        assert said in done.stderr, said
    assert "tried from" not in done.stderr
    again = called("optimize", source, "-o", tmp_path / "again.onnx", "-q")
    assert (again.returncode, again.stderr) == (0, ""), "what -v asked for ends with its call"


def test_completion_is_offered() -> None:
    env = {**os.environ, "_NORMDEPLOY_COMPLETE": "complete_bash", "COMP_WORDS": "normdeploy opt", "COMP_CWORD": "1"}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'normdeploy'; from normdeploy.cli.app import main; main()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split() == ["optimize"]


@pytest.mark.parametrize("name", ["fp16", "f16", "half", "float16", "FLOAT16"])
def test_a_precision_may_be_spelled_as_anybody_does(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    app = typer.testing.CliRunner()
    done = app.invoke(
        cli.app, ["optimize", str(layer_norm_by_hand(tmp_path / "in.onnx")), "-o", str(out), "--precision", name, "-q"]
    )
    assert done.exit_code == 0, done.output
    assert onnx.load(out).graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    again = app.invoke(cli.app, ["optimize", str(tmp_path / "in.onnx"), "-o", str(out), "--precision", "fp32", "-q"])
    assert again.exit_code == 0, again.output
    assert onnx.load(out).graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    wrong = app.invoke(cli.app, ["optimize", str(tmp_path / "in.onnx"), "-o", str(out), "--precision", "int8", "-q"])
    assert wrong.exit_code == 2
    assert "unknown precision 'int8'" in " ".join(wrong.output.split())
