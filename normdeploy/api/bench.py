"""The race of a model, files and engines, or of the forms of norms."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from ..arguments import Loading, Onnx, prepared
from ..errors import InputError
from ..results import several
from ..runtimes.trt import is_engine
from ..storage.archive import read_npz
from ..types import PathLike, Progress
from ..verbs.bench.bench import Race
from ..verbs.bench.bench import bench as raced
from ..verbs.bench.norms import race_norms
from ..verbs.bench.peers import check_peers, written
from ..verbs.run import sizes_of
from ..verbs.sources import is_onnx, loaded_as_recorded, remembered
from .common import Stages

if TYPE_CHECKING:
    from ..arguments import Example
    from ..verbs.sources import Source


@prepared(onnx="sources")
def bench(
    sources: Source | Onnx | Sequence[Source | Onnx],
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    feeds: PathLike | Mapping[str, Any] | None = None,
    sizes: Sequence[str] | Mapping[str, int] = (),
    threads: int = 1,
    rounds: int = 100,
    seed: int = 0,
    norm_impl: str | Sequence[str] = (),
    norms: str | None = None,
    against: str | Sequence[str] = (),
    runners: Sequence[str] = (),
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Race:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns (``normdeploy.verbs.bench.bench``), or
    the forms of norms.

    Args:
        sources: ONNX files, engines and at most one model: a file or folder, or a live module.
        args, kwargs: example arguments of a live module.
        feeds: the inputs, an .npz file or name -> array; None generates them.
        sizes: of dynamic dims of generated inputs: {"batch": 8}, or texts such as "batch=8"; the usual ones of the
        others.
        threads: of torch and of onnxruntime on the CPU.
        rounds: in each every contestant has its turn.
        seed: of generated inputs, and of the order in each round.
        norm_impl: race the norms of the one ONNX file given, each in these forms (``normdeploy.verbs.bench.norms``);
        ["all"]: in all.
        norms: race usual norms of this kind, or "all"; no file is needed then.
        against: what others write of the same model, raced too: "plain", "onnxslim", "onnxsim", "ort-transformers"
        (``verbs.bench.peers``).
        runners: runtimes that installed packages bring (`normdeploy.runtimes.guests`), by name, in which ONNX files are
            run too.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer is no error but a result that is false.
    """
    peers = several(against)
    check_peers(peers)
    if norm_impl or norms is not None:
        if peers:
            raise InputError(
                "norms are raced by themselves, and others' files are of whole models; leave --against out"
            )
        if runners:
            raise InputError("norms are raced by themselves, in onnxruntime; leave --runner out")
        if feeds is not None:
            raise InputError("norms are raced on inputs of their own, and inputs were given; leave one of them out")
        _no_model(loading)
        own = cast("Sequence[PathLike]", sources)
        return race_norms(
            own,
            several(norm_impl),
            norms,
            sizes_of(sizes),
            threads=threads,
            rounds=rounds,
            seed=seed,
            progress=progress,
        )
    contestants = cast("Sequence[Source]", sources)
    paths = [s for s in contestants if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in contestants if s not in files]
    if len(models) > 1:
        raise InputError(
            f"{len(models)} of {len(contestants)} sources are models; give one, and the others as ONNX files"
        )
    model, notes = None, list[str]()
    if models:
        with Stages(progress)("load"):
            followed = loading
            for file in [f for f in files if is_onnx(f)][:1]:
                followed, notes = remembered(models[0], file, loading)
            model = loaded_as_recorded(models[0], args, kwargs, followed, loading)
    else:
        _no_model(loading)
    given = read_npz(feeds) if isinstance(feeds, str | os.PathLike) else feeds
    with tempfile.TemporaryDirectory() as folder:
        theirs, failed = written(peers, model, [f for f in files if is_onnx(f)], Path(folder)) if peers else ([], [])
        race = raced(
            model,
            [*files, *theirs],
            inputs=given,
            sizes=sizes_of(sizes),
            threads=threads,
            rounds=rounds,
            seed=seed,
            runners=runners,
            progress=progress,
        )
    return replace(race, not_run=(*failed, *race.not_run), notes=(*notes, *race.notes))


def _no_model(loading: Loading) -> None:
    """What says how a model is loaded is nothing to ignore where there is none."""
    if flags := sorted(name for name, value in loading.items() if value):
        raise InputError(f"{', '.join(flags)}: for the model, and none was given; leave it out, or give the model too")
