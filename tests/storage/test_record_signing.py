"""Who vouches for what a file says of its own making: the user's store, a team's key, and what an attacker puts beside
a file."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError, NormdeployError, TrustError
from normdeploy.loading.file_kinds import hash_model_files
from normdeploy.storage import record_signing
from normdeploy.storage.export_record import raw_record

FLAGS: dict[str, Any] = {"inputs": ["x:float32[batch,8]"], "dims": ["batch=1:4:16"]}
FACTORY: dict[str, Any] = {**FLAGS, "model": "factory:Net", "model_args": {"size": 8}}
CONTENT = {"schema": 2, "load": {"model": "pkg:build"}, "model": {"sha256": "12ab"}}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(record_signing.TEAM_KEY, raising=False)
    return tmp_path / "state"


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path / "team.key"
    key.write_text("5" * 64 + "\n")
    key.chmod(0o600)
    monkeypatch.setenv(record_signing.TEAM_KEY, str(key))
    return key


@pytest.fixture
def inside(project: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder as the working directory; ``factory`` is not imported yet."""
    monkeypatch.chdir(project)
    monkeypatch.delitem(sys.modules, "factory", raising=False)
    return project


def as_another_process(project: Path) -> None:
    sys.modules.pop("factory", None)
    (project / "imported").unlink(missing_ok=True)


def as_another_user(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_another_process(project)
    monkeypatch.setenv("XDG_STATE_HOME", str(project / "another user"))


def code_ran(project: Path) -> bool:
    return (project / "imported").exists()


# ------------------------------------------------------------------ the user's own key


def test_the_key_is_private_and_made_once(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: record_signing.user_key(create=True), range(32)))
    assert len(keys) == 1
    key = state / "normdeploy" / "key"
    assert {p.name for p in key.parent.iterdir()} == {"key"}
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    record_signing.sign_record(CONTENT, code={})
    assert record_signing.find_signed_modules(CONTENT, None) == ({}, "")
    key.chmod(0o644)  # others may have read it
    assert record_signing.find_signed_modules(CONTENT, None)[0] is None
    record_signing.sign_record(CONTENT, code={})
    assert record_signing.find_signed_modules(CONTENT, None) == ({}, "")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_without_a_place_for_the_key_nobody_vouches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    record_signing.sign_record(CONTENT, code={})
    assert record_signing.find_signed_modules(CONTENT, None)[0] is None


def test_an_export_that_runs_no_code_makes_no_key_and_no_signature(inside: Path, team: Path, state: Path) -> None:
    normdeploy.export("model.pt", output="model.onnx")
    assert not state.exists()
    assert not Path("model.onnx.sig").exists()


# ------------------------------------------------------------------ what is followed


def test_what_runs_no_code_is_followed_by_anyone_and_said(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    as_another_user(inside, monkeypatch)
    comparison = normdeploy.verify("weights.pt", "model.onnx", seeds=1, model="factory:Net", model_args={"size": 8})
    assert comparison
    assert comparison.notes[0] == "as model.onnx records: dims=['batch=1:4:16'], inputs=['x:float32[batch,8]']"
    with pytest.raises(InputError, match=r"model='factory:Net'.*ignored because .*another user, and no team signature"):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1)


def recorded_as(file: str, **load: Any) -> None:
    """``file`` as if it had been exported from another model, loaded so."""
    proto = onnx.load("model.onnx")
    content = raw_record(proto)
    content |= {"load": load, "model": content["model"] | {"sha256": "ab"}}
    next(p for p in proto.metadata_props if p.key == "normdeploy").value = json.dumps(content)
    onnx.save(proto, file)


def test_what_is_recorded_of_another_model_is_not_followed_where_it_means_nothing(inside: Path) -> None:
    """Nobody is told to leave out what they did not give."""
    normdeploy.export("model.pt", output="model.onnx")
    for load, said in (
        (
            {"task": "text-generation", "part": "decoder"},
            "records task='text-generation', part='decoder', which is ignored: model.pt is",
        ),
        ({"key": "ema"}, "records key='ema', which is ignored: model.pt is of the kind ExportedProgram"),
    ):
        recorded_as("other.onnx", **load)
        comparison = normdeploy.verify("model.pt", "other.onnx", seeds=1)
        assert comparison
        assert any(said in note for note in comparison.notes), comparison.notes
    recorded_as("other.onnx", dims=["seq=1:2:3"], inputs=["x[seq,8]"])
    comparison = normdeploy.verify("model.pt", "other.onnx", seeds=1, inputs="x[n,8]")
    assert any(
        "dims=['seq=1:2:3'], which is ignored: the inputs that you passed have" in note for note in comparison.notes
    )


@pytest.mark.parametrize("verb", ["verify", "bisect", "bench"])
def test_an_error_of_what_is_recorded_says_so(verb: str, inside: Path) -> None:
    normdeploy.export("model.pt", output="model.onnx")
    recorded_as("other.onnx", dims=["seq=1:2:3"])
    arguments = (["model.pt", "other.onnx"],) if verb == "bench" else ("model.pt", "other.onnx")
    with pytest.raises(
        InputError,
        match=r"'seq' is not in any input.*The ONNX file's export record contains dims=\['seq=1:2:3'\]: pass the value",
    ):
        getattr(normdeploy, verb)(*arguments)


def test_arguments_of_a_factory_are_a_strangers_too(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    as_another_user(inside, monkeypatch)
    with pytest.raises(InputError, match=r"model_args=.*ignored"):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1, model="factory:Net")
    assert not code_ran(inside)


def test_a_team_follows_what_its_key_signed(inside: Path, team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    before = Path("model.onnx").read_bytes()
    as_another_user(inside, monkeypatch)
    comparison = normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert comparison
    assert comparison.notes == ()
    monkeypatch.delenv(record_signing.TEAM_KEY)
    as_another_process(inside)
    with pytest.raises(
        InputError, match=r"'model.onnx.sig' next to it is signed by .* whose key is not in NORMDEPLOY_KEY"
    ):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert not code_ran(inside)
    normdeploy.export("weights.pt", output="unsigned.onnx", **FACTORY)
    assert Path("unsigned.onnx").read_bytes() == before  # the signature is not in the bytes


def test_a_teams_signature_counts_where_the_users_own_is_of_older_code(inside: Path, team: Path) -> None:
    """A colleague changed the module and exported again: the record is the same, my own signature is of the old
    module."""
    (inside / "factory.py").write_text("OLD = 1\n")
    record_signing.sign_record(CONTENT, inside / "x.onnx", {"factory.py": hash_model_files(inside / "factory.py")})
    (inside / "factory.py").write_text("NEW = 1\n")
    signature = record_signing.signature_document(
        record_signing.read_team_key() or b"", CONTENT, {"factory.py": hash_model_files(inside / "factory.py")}
    )
    record_signing.signature_path(inside / "x.onnx").write_bytes(signature)
    code, why = record_signing.find_signed_modules(CONTENT, inside / "x.onnx")
    assert (why, code and record_signing.find_changed_module(code)) == ("", "")


def test_trust_is_followed_where_it_is_signed(inside: Path, team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normdeploy.export("pickled.pt", output="model.onnx", trust=True, **FLAGS)
    as_another_user(inside, monkeypatch)
    assert normdeploy.verify("pickled.pt", "model.onnx", seeds=1)
    Path("model.onnx.sig").unlink()
    as_another_process(inside)
    with pytest.raises(TrustError, match="--trust-remote-code"):
        normdeploy.verify("pickled.pt", "model.onnx", seeds=1)
    assert not code_ran(inside)


def test_optimize_carries_a_signature_on(inside: Path, team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    as_another_process(inside)
    normdeploy.optimize("model.onnx", "half.onnx", precision="fp16")
    assert not code_ran(inside)
    as_another_user(inside, monkeypatch)
    assert normdeploy.verify("weights.pt", "half.onnx", seeds=1)
    Path("model.onnx.sig").unlink()
    normdeploy.optimize("model.onnx", "bare.onnx", precision="fp16")
    assert not Path("bare.onnx.sig").exists()


# ------------------------------------------------------------------ attacks


def other_flags(project: Path) -> None:
    """A file that names code of its own, under a signature of another record."""
    proto = onnx.load("model.onnx")
    entry = next(p for p in proto.metadata_props if p.key == "normdeploy")
    entry.value = entry.value.replace("factory:Net", "evil:Net")
    (project / "evil.py").write_text((project / "factory.py").read_text())
    onnx.save(proto, "model.onnx")


def other_key(project: Path) -> None:
    content = raw_record(onnx.load("model.onnx"))
    Path("model.onnx.sig").write_bytes(
        record_signing.signature_document(b"6" * 64, content, record_signing.imported_module_hashes(project))
    )


def no_key(project: Path) -> None:
    content = raw_record(onnx.load("model.onnx"))
    Path("model.onnx.sig").write_bytes(
        record_signing.signature_document(b"", content, record_signing.imported_module_hashes(project))
    )


def other_code_in_the_signature(project: Path) -> None:
    with (project / "factory.py").open("a") as file:
        file.write("\nprint('changed')\n")
    document = json.loads(Path("model.onnx.sig").read_text())
    document["code"] = {"factory.py": record_signing.hashlib.sha256((project / "factory.py").read_bytes()).hexdigest()}
    Path("model.onnx.sig").write_text(json.dumps(document))


def no_signature(project: Path) -> None:
    Path("model.onnx.sig").unlink()


def text(content: str) -> Callable[[Path], None]:
    def written(project: Path) -> None:
        Path("model.onnx.sig").write_text(content)

    return written


def pipe(project: Path) -> None:
    Path("model.onnx.sig").unlink()
    os.mkfifo("model.onnx.sig")  # who opens it would wait for ever


def other_model(project: Path) -> None:
    torch.save({**torch.load("weights.pt"), "gamma": torch.ones(8)}, "weights.pt")


def other_module(project: Path) -> None:
    with (project / "factory.py").open("a") as file:
        file.write("\nprint('changed')\n")


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (other_flags, "evil:Net.*belongs to another record, or is signed with another key"),
        (other_key, "belongs to another record, or is signed with another key"),
        (no_key, "belongs to another record, or is signed with another key"),
        (other_code_in_the_signature, "belongs to another record, or is signed with another key"),
        (no_signature, "no team signature is next to it"),
        (text(""), "belongs to another record"),
        (text("[]"), "belongs to another record"),
        (text('{"normdeploy_signature": 1, "code": 5, "hmac": "é"}'), "belongs to another record"),
        (text('{"normdeploy_signature": 1, "code": {}, "hmac": "\\ud800"}'), "belongs to another record"),
        (text("[" * 100_000), "belongs to another record"),
        (text("x" * (2 << 20)), "no team signature is next to it"),
        (pipe, "no team signature is next to it"),
        (other_model, "'weights.pt' is not the file that was exported"),
        (other_module, "the module 'factory.py' is not the one that was signed"),
    ],
)
def test_code_is_not_run_for_a_file_that_an_attacker_touched(
    inside: Path, team: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path], None], why: str
) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    as_another_user(inside, monkeypatch)
    attack(inside)
    with pytest.raises(InputError, match=f"ignored because .*{why}" if "evil" not in why else why):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert not code_ran(inside)


EVIL = "import pathlib\npathlib.Path('SENTINEL').touch()\nraise ImportError\n"


def test_modules_beside_those_that_were_signed_do_not_run(
    inside: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's folder with genuine signed files: a module in the place of a library, and a cached one in that of
    its source."""
    Path("factory.py").write_text(
        "try:\n    import einops_like\nexcept ImportError:\n    pass\nimport parts.layers\n"
        + Path("factory.py").read_text()
    )
    Path("parts").mkdir()
    Path("parts/layers.py").write_text("try:\n    import parts.extra\nexcept ImportError:\n    pass\n")
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    assert set(json.loads(Path("model.onnx.sig").read_text())["code"]) == {"factory.py", "parts/layers.py"}
    for name in ("parts.layers", "parts"):
        monkeypatch.delitem(sys.modules, name)
    as_another_user(inside, monkeypatch)
    Path("einops_like.py").write_text(EVIL)
    Path("parts/extra.py").write_text(EVIL)
    _cache_of("factory.py", EVIL)
    assert normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert code_ran(inside)  # the right one did
    assert not Path("SENTINEL").exists()
    sys.modules.pop("factory", None)
    monkeypatch.syspath_prepend(str(inside))
    with pytest.raises(ImportError):  # Python itself does take the cached one
        importlib.import_module("factory")
    assert Path("SENTINEL").exists()


def _cache_of(source: str, code: str) -> None:
    """An unchecked cache (PEP 552), which Python takes whatever the source holds."""
    from importlib import _bootstrap_external  # type: ignore[attr-defined]

    cached = Path(importlib.util.cache_from_source(source))
    cached.parent.mkdir(exist_ok=True)
    compiled = compile(code, source, "exec")
    encode: Any = vars(_bootstrap_external)["_code_to_hash_pyc"]
    cached.write_bytes(encode(compiled, importlib.util.source_hash(Path(source).read_bytes()), False))


def test_what_the_user_names_may_be_any_module(inside: Path, team: Path) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    as_another_process(inside)
    shutil.copy("factory.py", "mine.py")
    assert normdeploy.verify("weights.pt", "model.onnx", seeds=1, model="mine:Net")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda key: key.chmod(0o640), "can be read or changed by others .mode 640"),
        (lambda key: key.write_text("short"), "has 5 bytes, but needs at least 32"),
        (lambda key: key.unlink(), "can't be read: No such file"),
        (lambda key: (key.unlink(), key.mkdir()), "can't be read: Is a directory"),
    ],
)
def test_a_teams_key_that_can_t_be_used_is_an_error(
    inside: Path, team: Path, spoil: Callable[[Path], object], said: str
) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    shutil.rmtree(os.environ["XDG_STATE_HOME"])
    as_another_process(inside)
    spoil(team)
    with pytest.raises(InputError, match=said):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    with pytest.raises(InputError, match=said):
        normdeploy.export("weights.pt", output="again.onnx", **FACTORY)
    assert not Path("again.onnx").exists()
    assert not code_ran(inside)


def test_a_place_where_the_signature_can_t_be_written_is_found_before_any_work(inside: Path, team: Path) -> None:
    Path("model.onnx.sig").mkdir()
    with pytest.raises(NormdeployError, match=r"can't write '.*model.onnx.sig'"):
        normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    assert not code_ran(inside)


def test_the_hash_of_a_folder_is_that_of_the_model_not_of_its_copy(tmp_path: Path) -> None:
    for name, kept in (
        ("one", ".git/index"),
        ("two", ".cache/huggingface/download/config.json.metadata"),
        ("three", "code.py"),
    ):
        for file, text in (("config.json", "{}"), (kept, name)):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
    one, two, three = (hash_model_files(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three


# ------------------------------------------------------------------ files of older versions


def test_a_record_of_the_older_schema_is_read_and_its_code_is_not_followed(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    proto = onnx.load("model.onnx")
    entry = next(p for p in proto.metadata_props if p.key == "normdeploy")
    entry.value = json.dumps({"record": json.loads(entry.value) | {"schema": 1}, "hmac": "00" * 32})
    onnx.save(proto, "old.onnx")
    as_another_process(inside)
    with pytest.raises(InputError, match=r"model='factory:Net'.*ignored"):
        normdeploy.verify("weights.pt", "old.onnx", seeds=1)
    assert not code_ran(inside)
    comparison = normdeploy.verify("weights.pt", "old.onnx", seeds=1, model="factory:Net", model_args={"size": 8})
    assert comparison
    assert comparison.notes[0].startswith("as old.onnx records: dims=")
