"""The guard for CI: each rule fires where it should and nowhere else, and what it writes can be read by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.findings.records import Finding, RuntimeSupport
from normdeploy.verbs.check import norm_rules as guard_rules
from normdeploy.verbs.check.check_function import Check
from normdeploy.verbs.check.norm_rules import IDS, RULES, Problem
from normdeploy.verbs.check.sarif import to_sarif
from tests.verbs.inspect.test_norm_census import BIASED, model

BY_HAND = f"{BIASED} e = Add(v, eps) r = Sqrt(e) y = Div(c, r)"
CLAMPED = f"{BIASED} e = Max(v, eps) r = Sqrt(e) y = Div(c, r)"
TRAINED = "BatchNormalization<training_mode = 1>(x, w, b, b, w)"
BIG = ", float[8] big = {1e5, 1, 1, 1, 1, 1, 1, 1}"


def saved(folder: Path, body: str, name: str = "m.onnx", **given: Any) -> Path:
    onnx.save(model(body, **{"opset": 21, "x": "4,8,6" if "w, b" in body else "b,8"} | given), folder / name)
    return folder / name


def found(path: Path, **options: Any) -> list[Problem]:
    (file,) = normdeploy.check([path], **options).files
    assert not file.error
    return list(file.findings)


def rules(path: Path, **options: Any) -> set[str]:
    return {p.rule for p in found(path, **options)}


def conv(after: str) -> str:
    return f"k = Conv<pads = [1, 1]>(x, kernel) {after}"


KERNEL = ", float[8,8,3] kernel = {" + ", ".join(["0.5"] * 192) + "}"

# ------------------------------------------------------------------ the rules


@pytest.mark.parametrize(
    ("body", "given", "expected"),
    [
        (BY_HAND, {}, {"decomposed"}),
        ("y = LayerNormalization<axis = -1>(x, w)", {}, set()),
        ("y = LayerNormalization<axis = -1, epsilon = 0.000000000001>(x, w)", {}, set()),  # float32 holds it
        (conv("y = BatchNormalization(k, w, b, b, w)"), {"held": KERNEL}, {"unfolded"}),
        ("y = BatchNormalization(x, w, b, b, w)", {}, set()),  # nothing to fold it into
        (f"y, rm, rv = {TRAINED}", {}, {"train-mode"}),
        ("y, rm, rv, sm, sv = BatchNormalization(x, w, b, b, w)", {"opset": 13}, {"train-mode"}),
        ("y = BatchNormalization(x, w, b, b, w)", {"opset": 13}, set()),
        ("y = Dropout(x)", {"opset": 6}, {"train-mode"}),  # it trains unless it says is_test
        ("y = Dropout<is_test = 1>(x)", {"opset": 6}, set()),
        ("y = Dropout(x, less, yes)", {"held": ", bool yes = {1}"}, {"train-mode"}),
        ("y = Dropout(x, less, yes)", {"held": ", bool yes = {0}"}, set()),
        ("y = Dropout(x, less)", {}, set()),
        ("t = Constant<value = bool {1}>() y = Dropout(x, less, t)", {}, {"train-mode"}),
        ("t = Constant<value = bool {0}>() y = Dropout(x, less, t)", {}, set()),
        ("y = Dropout(x, none, yes)", {"held": ", float none = {0}, bool yes = {1}"}, set()),  # drops nothing
        ("n = Constant<value_float = 0.0>() y = Dropout(x, n, yes)", {"held": ", bool yes = {1}"}, set()),
        ("c = Constant<value_floats = [100000.0, 1, 1, 1, 1, 1, 1, 1]>() y = Mul(x, c)", {}, {"fp16-overflow"}),
        ("c = Constant<value_floats = [65504.0, 1, 1, 1, 1, 1, 1, 1]>() y = Mul(x, c)", {}, set()),
        (f"{BIASED} r = Sqrt(v) y = Div(c, r)", {}, {"decomposed", "eps-lost"}),
        (
            "y = LayerNormalization<epsilon = 0.000000001>(x, w)",
            {"kind": "float16"},
            set(),
        ),  # its statistics run in float32
        ("y = LayerNormalization<epsilon = 0.000000001, stash_type = 10>(x, w)", {"kind": "float16"}, {"eps-lost"}),
        ("y = LayerNormalization(x, big)", {"held": BIG}, {"fp16-overflow"}),
        ("y = Mul(x, big)", {"held": BIG}, {"fp16-overflow"}),
        ("y = Max(x, low)", {"held": ", float[1] low = {-3.4028235e38}"}, set()),  # no bound, no number
        ("y = GroupNormalization<num_groups = 1>(x, w, b)", {}, {"wrong-form"}),
        ("y = GroupNormalization<num_groups = 2>(x, w, b)", {}, {"wrong-form"}),  # onnxruntime loses its digits
        ("y = SimplifiedLayerNormalization(x, w)", {}, {"wrong-form"}),
        (CLAMPED, {}, {"refused"}),
    ],
)
def test_rules(tmp_path: Path, body: str, given: dict[str, Any], expected: set[str]) -> None:
    assert rules(saved(tmp_path, body, **given)) == expected


def test_training_mode_inside_a_body_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, "s = ReduceSum<keepdims = 0>(x) t = Cast<to = 9>(s) y = Identity(x)")
    proto = onnx.load(path)
    branches = {
        side: onnx.parser.parse_graph(f"g () => (float[4,8] o) {{ o, m1, v1 = {TRAINED} }}")
        for side in ("then_branch", "else_branch")
    }
    proto.graph.node[2].CopyFrom(onnx.helper.make_node("If", ["t"], ["y"], "gate", **branches))
    onnx.save(proto, path)
    assert rules(path) == {"train-mode"}


def test_epsilons_are_judged_in_the_precision_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, "y = LayerNormalization<epsilon = 0.000000000001>(x, w)")
    assert rules(path, precision="fp16") == {"eps-lost"}
    assert rules(path, precision="bf16") == set()  # it has the exponents of float32


def test_a_folded_epsilon_is_not_lost(tmp_path: Path) -> None:
    """The root of an eval BatchNorm is of constants: it is computed before anything is float16."""
    path = saved(tmp_path, "y = BatchNormalization<epsilon = 0.000000000001>(x, w, b, b, w)")
    assert rules(path, precision="fp16") == set()


def test_training_mode_is_an_attribute_and_no_matter_of_outputs(tmp_path: Path) -> None:
    path = saved(tmp_path, f"y, rm, rv = {TRAINED}")
    proto = onnx.load(path)
    proto.graph.node[-1].output[1:] = ["", ""]
    onnx.save(proto, path)
    assert rules(path) == {"train-mode"}


def test_runtimes_are_asked(tmp_path: Path) -> None:
    groups = saved(tmp_path, "y = GroupNormalization<num_groups = 2>(x, w, b)")
    (problem,) = (p for p in found(groups, runtime="onnxruntime") if p.rule == "missing-kernel")
    assert problem.message.startswith(
        "GroupNorm (GroupNormalization) in onnxruntime "
    )  # runs as a body of primitives there
    assert rules(groups, runtime="onnxruntime-accurate") == rules(groups, runtime="onnxruntime")
    contrib = saved(tmp_path, "y = com.microsoft.SkipLayerNormalization(x, x, w, b)", x="4,6,8")
    assert rules(contrib) == {"wrong-form", "missing-kernel"}  # TensorRT-RTX refuses it
    assert rules(contrib, runtime="onnxruntime") == {"wrong-form"}


def test_an_optimized_file_is_clean(tmp_path: Path) -> None:
    path = saved(tmp_path, BY_HAND)
    normdeploy.optimize(path, tmp_path / "out.onnx")
    assert found(tmp_path / "out.onnx") == []


def test_a_model_that_export_would_mend_is_clean(project: Path) -> None:
    assert rules(project / "model.pt") == set()
    (problem,) = found(project / "model.pt", precision="fp16")
    assert (problem.rule, problem.kind) == ("eps-lost", "LayerNorm")


# ------------------------------------------------------------------ fingerprints and the baseline


def two_norms(path: Path, first: str = "n", extra: str = "") -> Path:
    """A layer norm by hand whose tensors are called ``first`` and a number, another behind it, and nodes before
    them."""
    body = f"{extra} {BIASED} e = Add(v, eps) r = Sqrt(e) {first}3 = Div(c, r)"
    body += (
        f" t = Tanh({first}3) m2 = ReduceMean(t, ax) c2 = Sub(t, m2) s2 = Mul(c2, c2) v2 = ReduceMean(s2, ax) e2 ="
        " Add(v2, eps)"
    )
    onnx.save(model(f"{body} r2 = Sqrt(e2) y = Div(c2, r2)", opset=21), path)
    return path


def prints(path: Path) -> list[str]:
    return [p.fingerprint for p in found(path)]


def test_fingerprints_outlive_renumbered_tensors_and_folders(tmp_path: Path) -> None:
    path = two_norms(tmp_path / "m.onnx", "div_1")
    before = prints(path)
    assert len(set(before)) == 2
    (tmp_path / "sub").mkdir()
    assert prints(two_norms(tmp_path / "sub" / "m.onnx", "div_17", "u = Relu(x)")) == before
    assert not set(prints(two_norms(tmp_path / "other.onnx"))) & set(before)


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_a_baseline_lets_new_findings_fail_alone(tmp_path: Path, form: str) -> None:
    path, old = saved(tmp_path, BY_HAND), tmp_path / "old"
    first = normdeploy.check([path])
    assert not first
    old.write_text(first.json() if form == "json" else to_sarif(first))
    again = normdeploy.check([path], baseline=old)
    assert again
    assert [p.known for p in again.files[0].findings] == [True]
    two_norms(path)
    worse = normdeploy.check([path], baseline=old)
    assert not worse
    assert sorted(p.known for p in worse.files[0].findings) == [False, True]
    states = [r["baselineState"] for r in json.loads(to_sarif(worse))["runs"][0]["results"]]
    assert sorted(states) == ["new", "unchanged"]


def test_a_baseline_counts_files_of_one_name(tmp_path: Path) -> None:
    """A fingerprint knows the file's name and not its folder, so that a clone elsewhere has the same; each lets one
    finding pass."""
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(saved(tmp_path / name, CLAMPED))
    (tmp_path / "old.json").write_text(normdeploy.check(paths[:1]).json())
    both = normdeploy.check(paths, baseline=tmp_path / "old.json")
    assert [[p.known for p in f.findings] for f in both.files] == [[True], [False]]


def test_a_baseline_without_end(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file, or has more than"):
        normdeploy.check([saved(tmp_path, BY_HAND)], baseline="/dev/zero")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b'{"runs": [{"results": [{}]}]}', b"[" * 100_000, b'{"files": 3}', None]
)
def test_a_baseline_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    old = tmp_path / "old.json"
    if content is not None:
        old.write_bytes(content)
    with pytest.raises(InputError, match="baseline"):
        normdeploy.check([saved(tmp_path, BY_HAND)], baseline=old)


# ------------------------------------------------------------------ SARIF


def validated(text: str) -> dict[str, Any]:
    """The document; pydantic_sarif's classes were generated from the official schema and allow no key that it does not
    know."""
    Sarif.model_validate_json(text, strict=True)
    (run,) = json.loads(text)["runs"]
    return dict(run)


def everything(folder: Path) -> Check:
    """Findings of most rules, an odd name, and a file that is none."""
    odd = model(BY_HAND.replace("y = Div", "lost = Div") + " y = Mul(lost, big)", held=BIG, opset=21)
    for node in odd.graph.node:
        node.name = f"/head {node.op_type}\n\x1b[31m<ü>"
        node.metadata_props.add(key="normdeploy.module", value="head.norm")
    onnx.save(odd, folder / "a b%20ü.onnx")
    (folder / "broken.onnx").write_bytes(b"\x08")
    clamped = saved(folder, CLAMPED, "clamped.onnx")
    return normdeploy.check([folder / "a b%20ü.onnx", folder / "broken.onnx", clamped])


def test_sarif_is_valid_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = everything(tmp_path)
    run = validated(to_sarif(checked))
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(IDS)
    decomposed = next(r for r in run["results"] if r["ruleId"] == "decomposed")
    assert decomposed["level"] == "error"
    assert run["tool"]["driver"]["rules"][decomposed["ruleIndex"]]["id"] == "decomposed"
    (at,) = decomposed["locations"]
    assert at["physicalLocation"]["artifactLocation"] == {"uri": "a%20b%2520%C3%BC.onnx", "uriBaseId": "%SRCROOT%"}
    assert {p["kind"]: p["name"] for p in at["logicalLocations"]} == {
        "module": "head.norm",
        "node": "/head Mul\n\x1b[31m<ü>",
        "tensor": "y",
    }
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 1)
    assert "broken.onnx" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert {r["level"] for r in run["results"]} == {"error", "warning", "note"}


def test_the_validation_can_fail() -> None:
    text = to_sarif(Check((), ()))
    validated(text)
    for wrong in (
        text.replace("shortDescription", "short"),
        text.replace('"2.1.0"', '"2.1"'),
        text.replace('"exitCode": 0', '"exitCode": "0"'),
    ):
        assert wrong != text
        with pytest.raises(ValueError, match="validation error"):
            validated(wrong)


# ------------------------------------------------------------------ the command line


def run(*args: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_exit_codes(tmp_path: Path) -> None:
    hand, clean = saved(tmp_path, BY_HAND, "hand.onnx"), saved(tmp_path, "y = LayerNormalization(x, w)", "clean.onnx")
    assert run(clean)[0] == 0
    assert run(hand)[0] == 1
    assert run(clean, hand)[0] == 1
    assert run(hand, "--fail-on", "none")[0] == 0
    assert run(hand, "--fail-on", "train-mode,refused")[0] == 0
    assert run(hand, "--fail-on", "all")[0] == 1
    code, _, err = run(hand, "--fail-on", "decompose")
    assert code == 2
    assert "error: unknown rule 'decompose'; choose from decomposed" in err


def test_exit_code_2_says_that_nothing_was_judged_and_1_that_something_was_found(tmp_path: Path) -> None:
    hand, clean = saved(tmp_path, BY_HAND, "hand.onnx"), saved(tmp_path, "y = LayerNormalization(x, w)", "clean.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    assert run(broken)[0] == 2
    assert run(broken, clean)[0] == 2
    # A finding is certain, whatever the other file holds.
    assert run(broken, hand)[0] == 1
    assert run(tmp_path / "missing.onnx")[0] == 2
    assert run(clean, "--baseline", broken)[0] == 2
    assert run(clean, "--compute-capability", "new")[0] == 2


def test_rules_are_named(tmp_path: Path) -> None:
    hand = saved(tmp_path, BY_HAND)
    assert run(hand, "--fail-on", " decomposed, refused ")[0] == 1
    for nothing in ("", ","):  # an empty variable of a workflow would turn the guard off
        code, _, err = run(hand, "--fail-on", nothing)
        assert code == 2
        assert "unknown rule ''" in err


def test_a_name_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = "\udcff.onnx"  # the byte 0xff
    saved(tmp_path, BY_HAND, "m.onnx").rename(odd)
    for form in ("sarif", "json", "text"):
        code, _, err = run(odd, "--format", form, "-o", "out")
        assert code == 2
        assert "not UTF-8" in err
    run(odd, "--format", "sarif", "-o", "out")
    (artifact,) = validated(Path("out").read_text())["artifacts"]
    assert artifact["location"]["uri"] == "%FF.onnx"


def test_a_broken_file_fails_and_the_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    code, out, err = run(tmp_path / "broken.onnx", saved(tmp_path, BY_HAND), "--fail-on", "none")
    assert code == 2
    assert "broken.onnx: could not be checked" in out
    assert "warning decomposed" in out
    assert err.startswith("error: broken.onnx (8 bytes) is not an ONNX file")


def test_forms_and_files(tmp_path: Path) -> None:
    path, out = saved(tmp_path, BY_HAND), tmp_path / "out.sarif"
    code, printed, _ = run(path, "--format", "sarif")
    assert (code, validated(printed)["results"][0]["ruleId"]) == (1, "decomposed")
    code, printed, _ = run(path, "--format", "json")
    assert json.loads(printed)["files"][0]["findings"][0]["rule"] == "decomposed"
    assert (json.loads(printed)["ok"], code) == (False, 1)
    code, printed, _ = run(path, "--format", "sarif", "-o", out)
    assert "error   decomposed" in printed  # the log of a CI run shows them too
    assert validated(out.read_text())["invocations"][0]["exitCode"] == 1
    assert run(path, "-q", "--format", "json", "-o", out)[1] == ""
    code, _, err = run(path, "-o", path)
    assert code == 2
    assert "would overwrite the input" in err


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    everything(tmp_path)
    odd = onnx.load(tmp_path / "a b%20ü.onnx")
    for node in odd.graph.node:
        del node.metadata_props[:]
    onnx.save(odd, "odd.onnx")
    _, out, _ = run("odd.onnx")
    assert "\x1b" not in out
    assert "decomposed" in out


def test_what_overflows_in_both_halves_is_told_once(tmp_path: Path) -> None:
    """3.4e38 ends beyond bfloat16 too, which rounds to 3.39e38 at most."""
    path = saved(tmp_path, "y = LayerNormalization(x, big)", held=", float[8] big = {3.4e38, 1, 1, 1, 1, 1, 1, 1}")
    assert [p.rule for p in found(path)] == ["fp16-overflow"]


def test_large_constants_are_seen_past_infinities(tmp_path: Path) -> None:
    proto = model("y = Mul(x, big)", held=BIG, opset=21)
    tensor = next(t for t in proto.graph.initializer if t.name == "big")
    tensor.CopyFrom(
        onnx.numpy_helper.from_array(np.array([np.inf, -np.inf, np.nan, 7e4, 1, 1, 1, 1], np.float32), "big")
    )
    onnx.save(proto, tmp_path / "m.onnx")
    (problem,) = found(tmp_path / "m.onnx")
    assert problem.message == "a constant of up to 70000 overflows in float16"


def test_folders_are_searched_for_onnx_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    whole, broken = saved(tmp_path / "a", BY_HAND, "b.onnx"), saved(tmp_path / "a" / "deep", BY_HAND, "a.onnx")
    saved(tmp_path / ".git", BY_HAND)
    (tmp_path / "config.json").write_text("{}")  # as Hugging Face repositories have it, whose model is ONNX
    (tmp_path / "a" / "around").symlink_to(tmp_path, target_is_directory=True)
    broken.write_bytes(b"")
    result = normdeploy.check(tmp_path)
    assert [file.file for file in result.files] == [str(whole), str(broken)]
    assert [bool(file.error) for file in result.files] == [False, True]
    done = CliRunner().invoke(app, ["check", str(tmp_path / "a" / "deep"), "-o", str(broken)])
    assert done.exit_code == 2
    assert "would overwrite the input" in done.stderr
    (tmp_path / "empty").mkdir()
    assert "folder without a config.json" in normdeploy.check(tmp_path / "empty").files[0].error


def test_one_text_may_hold_several_rules_and_models_may_be_in_memory(tmp_path: Path) -> None:
    file = saved(tmp_path, BY_HAND)
    assert normdeploy.check(str(file), fail_on="unfolded, wrong-form").fail_on == ("unfolded", "wrong-form")
    assert not normdeploy.check(onnx.load(file), fail_on="decomposed")
    assert str(normdeploy.check(file)).splitlines()[0] == f"{file}:"


def test_kernels_of_another_form_do_not_count() -> None:
    """What `optimize` would write has no kernel, and the file's own nodes have one: a file that is deployed as it is
    has no problem."""
    runs = RuntimeSupport("onnxruntime 1.31.1 CPU", "now", ("ReduceMean",), "kernel")
    lacks = RuntimeSupport("onnxruntime 1.31.1 CPU", "optimized", ("RMSNormalization",), "missing")
    finding = Finding("RMSNorm", "fused", "y", written=("y",), runtimes=(runs, lacks))
    found = {
        deployed: list(guard_rules.find_missing_kernels(finding, Problem("", ""), deployed, "onnxruntime"))
        for deployed in (True, False)
    }
    assert found[True] == []
    assert [p.rule for p in found[False]] == ["missing-kernel"]


def test_sarif_calls_the_rules_that_fail_errors() -> None:
    run = json.loads(to_sarif(Check((), ("unfolded", "refused"))))["runs"][0]
    levels = {rule["id"]: rule["defaultConfiguration"]["level"] for rule in run["tool"]["driver"]["rules"]}
    assert levels == {rule.id: rule.level for rule in RULES} | {"unfolded": "error", "refused": "error"}
    run = json.loads(to_sarif(Check((), ())))["runs"][0]
    levels = {rule["id"]: rule["defaultConfiguration"]["level"] for rule in run["tool"]["driver"]["rules"]}
    assert levels == dict.fromkeys(IDS, "warning") | {"refused": "note", "unknown-support": "note"}
