"""What of a fleet is published, and what real servers then hold: `make test-publish` starts them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import EvidenceError, InputError, PublishError, StoreError
from normdeploy.evidence.signing_keys import load_public_keys
from normdeploy.fleet import publishing
from normdeploy.fleet.outcomes import CellOutcome
from normdeploy.fleet.published_bundle import PublishedBundle, cell_tag
from normdeploy.fleet.signed_store import open_signed_store
from normdeploy.fleet.store_backends import FolderBackend
from normdeploy.verbs.package.bundle_signing import require_signed
from tests.fleet.toys import run_toys, toy_fleet
from tests.keys import key_pair

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Shelf:
    """A destination in memory."""

    held: dict[str, str] = field(default_factory=dict)

    def push_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        new = self.held.get(bundle.cell.name) != bundle.digest
        self.held[bundle.cell.name] = bundle.digest
        assert hashlib.sha256((bundle.folder / "manifest.json").read_bytes()).hexdigest() == bundle.manifest
        return cell_tag(bundle.cell), new


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf()
    monkeypatch.setattr(publishing, "open_destination", lambda to: made)
    return made


def items(done: publishing.PublishResult) -> dict[str, tuple[str, str]]:
    return {item.cell: (item.outcome, item.reason) for item in done.items}


def test_only_what_is_verified_is_published_and_the_rest_is_refused_by_name(tmp_path: Path, shelf: Shelf) -> None:
    file = toy_fleet(tmp_path, a="one", b="wrong", c="fails")
    run_toys(file)
    done = publishing.publish_bundles(file, "x")
    assert not done
    told = items(done)
    assert told["all.a/fp32/cpu"] == ("published", "")
    assert told["all.a/fp32/ada"][1].startswith("it is built: ")
    assert told["all.a/fp32/ada"][1].endswith("--built publishes it")
    assert told["all.b/fp32/cpu"][1].startswith("it is wrong: toy: output 'y' differs by 2")
    assert told["all.c/fp32/cpu"][1].startswith("it is failed: the toy can't export this")
    assert set(shelf.held) == {"all.a/fp32/cpu", "all.a/fp16/cpu"}
    again = publishing.publish_bundles(file, "x", only=["all.a/fp32"], built=True)
    assert {c: o for c, (o, _) in items(again).items()} == {"all.a/fp32/cpu": "there", "all.a/fp32/ada": "published"}
    assert again


def test_a_model_that_changed_since_is_stale_and_refused(tmp_path: Path, shelf: Shelf) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    (tmp_path / "a.pt2").write_text("two")
    done = publishing.publish_bundles(file, "x")
    assert {reason.partition(":")[0] for _, reason in items(done).values()} == {"it is stale"}
    assert not shelf.held


def test_a_cell_without_a_bundle_is_refused(tmp_path: Path, shelf: Shelf) -> None:
    file = toy_fleet(tmp_path, '[models.a]\nsource = "a.pt2"\n', a="one")
    run_toys(file)
    assert items(publishing.publish_bundles(file, "x"))["a/default/onnxruntime"][1].startswith("it has no bundle")


def test_with_trust_nothing_unsigned_is_published(tmp_path: Path, shelf: Shelf) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    private, public = key_pair(tmp_path)
    assert {o for o, _ in items(publishing.publish_bundles(file, "x", trust=[public])).values()} == {"refused"}
    run_toys(file, store=open_signed_store(FolderBackend(tmp_path / "store"), private))
    assert items(publishing.publish_bundles(file, "x", trust=[public]))["all.a/fp32/cpu"] == ("published", "")
    _, other = key_pair(tmp_path, "other")
    assert {o for o, _ in items(publishing.publish_bundles(file, "x", trust=[other])).values()} == {"refused"}


def test_a_bundle_that_was_changed_in_the_store_is_not_published(tmp_path: Path, shelf: Shelf) -> None:
    file = toy_fleet(tmp_path, a="one")
    store = open_signed_store(FolderBackend(tmp_path / "store"))
    run_toys(file, store=store)
    (path,) = [p for p in (tmp_path / "store/objects").rglob("*") if p.is_file() and p.read_bytes() == b"{}"]
    path.unlink()
    path.write_bytes(b"[]")  # of the manifest's size
    with pytest.raises(StoreError, match="is damaged"):
        publishing.publish_bundles(file, "x")
    assert not shelf.held


def test_tags_are_valid_and_of_one_cell_each() -> None:
    parts = ("a", "a_", "_a", "a__a", "a-b", ".a", "-a", "A", "x" * 60, "x" * 61)
    cells = [CellOutcome(m, v, t, "verified") for m in parts for v in parts for t in parts]
    tags = [cell_tag(cell) for cell in cells]
    assert len(set(tags)) == len(cells)
    for text in tags:
        assert len(text) <= 128
        assert text[0] not in ".-"
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@pytest.mark.parametrize("to", ["", "oci://", "host/repo", "s3://bucket", "oci+https://host/repo", "mlflow"])
def test_a_place_that_is_not_known_is_refused(tmp_path: Path, to: str) -> None:
    file = toy_fleet(tmp_path, a="one")
    with pytest.raises(InputError, match="expected oci://HOST/REPOSITORY or mlflow://HOST/EXPERIMENT"):
        publishing.publish_bundles(file, to)


# ------------------------------------------------------------------ real servers


def binary() -> str:
    """The reference implementation of a registry."""
    for name in (ROOT / ".venv-publish/registry/usr/bin/docker-registry", "docker-registry", "registry"):
        if found := shutil.which(str(name)):
            return found
    pytest.fail("no docker-registry: make test-publish fetches Debian's package, or put one into PATH")


def answers(url: str) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"{url} does not answer")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    port = 50_000 + hash(str(folder)) % 10_000
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([binary(), "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    answers(f"http://127.0.0.1:{port}/v2/")
    yield f"127.0.0.1:{port}"
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = 40_000 + hash(str(folder)) % 10_000
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{folder}/m.db", "--artifacts-destination", str(folder / "files")]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "mlflow", "server", *words], stdout=log, stderr=log)
    answers(f"http://127.0.0.1:{port}/health")
    yield f"127.0.0.1:{port}"
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fleet that was signed."""
    folder = tmp_path_factory.mktemp("signed")
    private, _ = key_pair(folder)
    run_toys(toy_fleet(folder, a="one", b="wrong"), store=open_signed_store(FolderBackend(folder / "store"), private))
    return folder


def fetched(url: str, kind: str) -> Any:
    return json.loads(urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": kind})).read())


@pytest.mark.publish
def test_a_registry_holds_the_bundle_its_signature_and_its_bill_of_materials(
    signed: Path, registry: str, tmp_path: Path
) -> None:
    from oras.provider import Registry

    to, keys = f"oci+http://{registry}/team/models", [signed / "key.pub.pem"]
    done = publishing.publish_bundles(signed / "fleet.toml", to, trust=keys, only=["*/fp32"])
    outcomes = {item.cell: item.outcome for item in done.items}
    assert outcomes == {n: "published" if n == "all.a/fp32/cpu" else "refused" for n in outcomes}
    (where,) = [item.where for item in done.items if item.where]
    assert {
        i.outcome for i in publishing.publish_bundles(signed / "fleet.toml", to, trust=keys).items if i.where == where
    } == {"there"}
    # what oras pulls by the tag is the bundle, and verifies
    name, digest = where.split("@")
    Registry(registry, insecure=True).pull(target=name, outdir=str(tmp_path / "pulled"))
    require_signed(tmp_path / "pulled", load_public_keys(keys))
    _, other = key_pair(tmp_path, "other")
    with pytest.raises(EvidenceError):
        require_signed(tmp_path / "pulled", load_public_keys([other]))
    # this registry keeps no list of referrers, so there is the specification's index in its place
    base = f"http://{registry}/v2/team/models"
    index = fetched(f"{base}/manifests/{digest.replace(':', '-')}", INDEX)
    kinds = {m["artifactType"]: m["digest"] for m in index["manifests"]}
    assert set(kinds) == {"application/vnd.in-toto+json", "application/vnd.cyclonedx+json"}
    for kind, referrer in kinds.items():
        told = fetched(f"{base}/manifests/{referrer}", MANIFEST)
        assert (told["artifactType"], told["subject"]["digest"]) == (kind, digest)
        file = told["layers"][0]["annotations"]["org.opencontainers.image.title"]
        data = urllib.request.urlopen(f"{base}/blobs/{told['layers'][0]['digest']}").read()
        assert data == (tmp_path / "pulled" / file).read_bytes()
    annotations = fetched(f"{base}/manifests/{digest}", MANIFEST)["annotations"]
    assert (annotations["normdeploy.cell"], annotations["normdeploy.status"]) == ("all.a/fp32/cpu", "verified")


@pytest.mark.publish
def test_files_go_in_parts_and_empty_ones_too(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oras.provider import Registry

    from normdeploy.fleet import oci_destination

    monkeypatch.setattr(oci_destination, "_CHUNKED", 1000)
    folder = tmp_path / "bundle"
    (folder / "a").mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "a/long").write_bytes(bytes(range(256)) * 20)
    (folder / "a/empty").touch()
    bundle = publishing.describe_bundle(folder, CellOutcome("m", "v", "t", "verified"))
    assert oci_destination.OciDestination(registry, "parts", secure=False).push_bundle(bundle)[1]
    Registry(registry, insecure=True).pull(target=f"{registry}/parts:m__v__t", outdir=str(tmp_path / "pulled"))
    for path in bundle.files:
        assert (tmp_path / "pulled" / path).read_bytes() == (folder / path).read_bytes()


@pytest.mark.publish
def test_mlflow_holds_the_bundle_and_a_version_of_a_model(signed: Path, mlflow: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    to, keys = f"mlflow+http://{mlflow}/night", [signed / "key.pub.pem"]
    done = publishing.publish_bundles(signed / "fleet.toml", to, trust=keys, only=["all.a/fp32"], built=True)
    assert {item.outcome for item in done.items} == {"published"}
    again = publishing.publish_bundles(signed / "fleet.toml", to, trust=keys, only=["all.a/fp32"], built=True)
    assert [(i.outcome, i.where) for i in again.items] == [("there", i.where) for i in done.items]
    client = MlflowClient(f"http://{mlflow}", f"http://{mlflow}")
    (version,) = client.search_model_versions("name = 'all.a__fp32__cpu'")
    assert version.tags["normdeploy.cell"] == "all.a/fp32/cpu"
    run = client.get_run(version.run_id)
    client.download_artifacts(run.info.run_id, "bundle", str(tmp_path))
    require_signed(tmp_path / "bundle", load_public_keys(keys))
    manifest = hashlib.sha256((tmp_path / "bundle/manifest.json").read_bytes()).hexdigest()
    assert run.data.tags["normdeploy.manifest"] == version.tags["normdeploy.manifest"] == f"sha256:{manifest}"


def normdeploy(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "normdeploy", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a signed fleet of a real model, whose bundle holds an engine."""
    import torch

    folder = tmp_path_factory.mktemp("real")
    key_pair(folder)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    torch.export.save(torch.export.export(net, (torch.randn(4, 6),), dynamic_shapes=shapes), folder / "net.pt2")
    (folder / "fleet.toml").write_text(
        '[defaults]\nsteps = ["verify", "package"]\n[targets.ada]\nruntime = "tensorrt-rtx"\n'
        'compute_capability = "8.9"\n[models.net]\nsource = "net.pt2"\n'
    )
    normdeploy(folder, "fleet", "run", "fleet.toml", "--sign", "key.pem")
    return folder


def pull_oci(address: str, target: Path) -> None:
    """As `oras pull` does."""
    from oras.provider import Registry

    Registry(address, insecure=True).pull(target=f"{address}/team/models:net__default__ada", outdir=str(target))


def pull_mlflow(address: str, target: Path) -> None:
    words = ["artifacts", "download", "--artifact-uri", "models:/net__default__ada/1", "-d", str(target)]
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"http://{address}", "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run([sys.executable, "-m", "mlflow", *words], check=True, env=environment, capture_output=True)


@pytest.mark.publish
@pytest.mark.parametrize(
    ("server", "to", "pull"),
    [("registry", "oci+http://{}/team/models", pull_oci), ("mlflow", "mlflow+http://{}/night", pull_mlflow)],
    ids=["oci", "mlflow"],
)
def test_a_bundle_that_is_pulled_is_rechecked_as_a_whole(
    real: Path,
    server: str,
    to: str,
    pull: Callable[[str, Path], None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    address = request.getfixturevalue(server)
    words = ("--to", to.format(address), "--trust-key", "key.pub.pem", "--built")
    assert "1 published" in normdeploy(real, "fleet", "publish", "fleet.toml", *words)
    bundle = tmp_path / "bundle"
    pull(address, bundle)
    told = normdeploy(tmp_path, "recheck", "bundle")
    assert "nothing got worse" in told
    assert "the bundle names" in told  # somebody has signed it, whom nobody has named
    told = normdeploy(tmp_path, "recheck", "bundle", "--trust-key", str(real / "key.pub.pem"))
    assert "nothing got worse" in told
    assert "a trusted key signed every file, and none changed since" in told
    assert re.search(r"onnxruntime \(optimizer on\) .* pass ", told)
    assert "not run: TensorRT-RTX (0_model.engine)" in told or re.search(r"TensorRT-RTX .* pass ", told)
    key_pair(tmp_path, "other")
    assert "error: " in normdeploy(tmp_path, "recheck", "bundle", "--trust-key", "other.pub.pem", code=1)
    engine = bundle / "engines/0_model.engine"
    engine.write_bytes(engine.read_bytes()[:-1] + b"x")
    told = normdeploy(tmp_path, "recheck", "bundle", "--trust-key", str(real / "key.pub.pem"), code=1)
    assert "changed after it was signed: engines/0_model.engine" in told
    assert "engines/0_model.engine" in normdeploy(tmp_path, "recheck", "bundle", code=1)


@pytest.mark.publish
@pytest.mark.parametrize("to", ["oci+http://127.0.0.1:9/team/models", "mlflow+http://127.0.0.1:9/night"])
def test_a_server_that_does_not_answer_is_an_error_in_a_minute(tmp_path: Path, to: str) -> None:
    file, start = toy_fleet(tmp_path, a="one"), time.monotonic()
    with pytest.raises(PublishError, match=r"127\.0\.0\.1:9"):
        publishing.publish_bundles(file, to)
    assert time.monotonic() - start < 60
