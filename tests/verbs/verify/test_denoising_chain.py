"""The denoising step takes sizes that every part allows. Small classes stand for those of diffusers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from normdeploy.errors import InputError
from normdeploy.loading import load_parts
from normdeploy.loading.pipeline_index import DECODER, PipelineIndex, read_pipeline_index
from normdeploy.model import Dim, InputSpec
from normdeploy.verbs.verify.denoising_chain import IMAGE, LATENTS, DenoisingChain, make_chain, require_fitting_feeds

from ...pipeline_stand_ins import CONFIGS, install_stand_ins, write_pipeline


def _make_chain(folder: Path, dims: list[str]) -> DenoisingChain:
    write_pipeline(folder)
    chain = make_chain(read_pipeline_index(folder), dict(load_parts(folder, dims=dims)))
    assert chain is not None
    return chain


def test_every_part_has_the_batch_of_the_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_ins(monkeypatch)
    chain = _make_chain(tmp_path / "model", ["batch_size=1:1:1"])
    assert chain.start[LATENTS].shape == (1, 4, 8, 8)
    assert chain.start["text_encoder"].shape == (1, 6)


@pytest.mark.parametrize(("dims", "height"), [([], 64), (["height_by_2=40:40:80"], 80)])
def test_latents_are_small_within_the_range_of_the_dims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: list[str], height: int
) -> None:
    """A height is the sum of two equal dims."""
    install_stand_ins(monkeypatch)
    monkeypatch.setitem(CONFIGS["unet"], "sample_size", 512)
    chain = _make_chain(tmp_path / "model", dims)
    assert chain.start[LATENTS].shape == (2, 4, height, 64)


def test_packed_latents_need_not_be_square() -> None:
    spec = SimpleNamespace(name="hidden_states")
    model: Any = SimpleNamespace(samples=lambda *_: {"hidden_states": None}, inputs=[spec])
    latents = np.zeros((1, 6, 16), np.float32)
    index = PipelineIndex(Path("model"), "FluxPipeline", ())
    chain = DenoisingChain(
        index=index,
        denoiser="transformer",
        models={"transformer": model, DECODER: model},
        configs={"transformer": {}, "vae": {}},
        start={LATENTS: latents},
        timestep=1000.0,
        packed=True,
    )
    made = chain.run(lambda name, feeds: {"made": next(iter(feeds.values()))})
    assert made[IMAGE].shape == (1, 4, 4, 6)


def test_shapes_that_a_part_does_not_take_are_named() -> None:
    size = Dim("height_by_2", 1, 4, 8)
    spec = InputSpec("sample", "float32", (Dim.from_size(4), Dim.sum_of((size, size))))
    model: Any = SimpleNamespace(inputs=(spec,))
    assert require_fitting_feeds("unet", model, {"sample": np.zeros((4, 6))}) == {"height_by_2": 3}
    for shape in ((9, 6), (4, 7), (4, 18), (4,)):
        with pytest.raises(InputError, match=r"^unet takes sample \[4, 2 to 16\], but the chain passes \["):
            require_fitting_feeds("unet", model, {"sample": np.zeros(shape)})
    with pytest.raises(InputError, match="has no value for the input 'sample'"):
        require_fitting_feeds("unet", model, {})
