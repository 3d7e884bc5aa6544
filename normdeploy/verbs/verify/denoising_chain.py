"""Connect the parts of a diffusers pipeline as its first denoising step does.

The chain runs on random token ids and random latents:

    text encoders → embeddings → unet or transformer → noise → scheduler's step → latents → VAE decoder → image

The same chain runs in float64, in eager mode and in onnxruntime. The scheduler is traced like a part. So its step is
computed in float64 for the reference, and with random roundings like any other operator.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ExportError, InputError, LoadError
from ...loading import from_module
from ...loading.pipeline_folder import load_scheduler
from ...loading.pipeline_index import DECODER, PipelineIndex
from ...loading.pipeline_parts import count_time_ids, returns_hidden_states
from ...loading.torch_pickles import first_line
from ...model import InputSpec, LoadedModel
from ...types import Array, Arrays
from .random_draws import random_ops_of_program

Run = Callable[[str, Arrays], Arrays]
"""Function of a part's name and its inputs, which returns the part's outputs."""

SCALING, STEPPING = "scheduler.scale_model_input", "scheduler.step"
"""Names of the two traced methods of the scheduler."""
NOISE, LATENTS, IMAGE = "noise", "latents", "image"
_DENOISERS = ("unet", "transformer")
_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
# Number of steps of the schedule. The first step is compared.
_STEPS = 20
# Shift of schedules that depend on the size of the image.
_SHIFT = 1.0
_GUIDANCE = 3.5
_BATCH = 2
# Largest number of tokens and largest height and width of the latents, so that the step is small.
_MOST_TOKENS = 77
_MOST_SIZE = 64
_SCORE = 6.0
# Width and height of the pieces in which Flux packs the latents.
_PATCH = 2


@dataclass(frozen=True)
class DenoisingChain:
    """First denoising step of a pipeline.

    Attributes:
        denoiser: name of the part that denoises.
        models: part -> its model in PyTorch, with the scheduler's two methods.
        configs: component -> its config.
        start: start[name] is an array that does not depend on a part: token ids by the name of the text encoder, and
            the latents.
        timestep: the scheduler's first time step.
        packed: True if the latents are packed in pieces, as Flux does.
        notes: on what is left out.
    """

    index: PipelineIndex
    denoiser: str
    models: Mapping[str, LoadedModel]
    configs: Mapping[str, Mapping[str, Any]]
    start: Arrays
    timestep: float
    packed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def limits(self) -> tuple[str, ...]:
        """Return the limits of a verdict on the chain, as phrases after the word "verified"."""
        limits = list[str]()
        if not any(name in self.models for name in _TEXT_ENCODERS):
            limits.append("without a text encoder")
        if STEPPING not in self.models:
            limits.append("without the scheduler's step")
        if self.denoiser == "unet" and not float(self.timestep).is_integer():
            # The UNet's input is an integer.
            limits.append("at whole time steps only")
        if DECODER not in self.models:
            limits.append("without a VAE decoder")
        return tuple(limits)

    def run(self, run: Run) -> dict[str, Array]:
        """Run the chain.

        Args:
            run: runs one part. Floating outputs of a part may be float64 or the part's own type.

        Returns:
            the outputs of each text encoder that the denoiser reads, then noise, latents and image, by name.

        Raises:
            InputError: the outputs of a part do not fit the next part.
        """
        texts = {name: run(name, {"input_ids": self.start[name]}) for name in _TEXT_ENCODERS if name in self.models}
        latents = self.start[LATENTS]
        scaled = latents
        if SCALING in self.models:
            scaled = _only(run(SCALING, {LATENTS: latents}))
        try:
            conditions = self._condition(texts)
        except (KeyError, ValueError) as error:
            raise InputError(f"the outputs of the text encoders do not fit the {self.denoiser}: {error}") from error
        sample = "sample" if self.denoiser == "unet" else "hidden_states"
        feeds = {sample: scaled, **conditions}
        model = self.models[self.denoiser]
        # An input that no text encoder provides is random.
        rest = model.samples(0, {"batch_size": self.batch, "sequence_length": self.start_length})
        feeds = {spec.name: feeds.get(spec.name, rest[spec.name]) for spec in model.inputs}
        noise = _only(run(self.denoiser, feeds))
        if noise.shape != latents.shape:
            # The UNet of an inpainting pipeline also takes the masked image.
            raise InputError(
                f"the {self.denoiser} takes latents {list(latents.shape)}, but its noise is {list(noise.shape)}, so the"
                " chain does not have all of its inputs"
            )
        if STEPPING in self.models:
            latents = _only(run(STEPPING, {NOISE: noise, LATENTS: latents}))
        else:
            latents = latents - noise
        found = {f"{name}.{output}": value for name, made in texts.items() for output, value in made.items()}
        found |= {NOISE: noise, LATENTS: latents}
        if DECODER in self.models:
            found[IMAGE] = _only(run(DECODER, {"latent_sample": self._unscale(latents)}))
        return found

    @property
    def batch(self) -> int:
        """Return the number of images."""
        return int(self.start[LATENTS].shape[0])

    @property
    def start_length(self) -> int:
        """Return the number of tokens of the longest prompt."""
        return max((value.shape[1] for name, value in self.start.items() if name != LATENTS), default=_MOST_TOKENS)

    def _condition(self, texts: Mapping[str, Arrays]) -> dict[str, Array]:
        """Compute the denoiser's inputs from the outputs of the text encoders, as the pipeline does."""
        config = self.configs[self.denoiser]
        step = np.float64(self.timestep)
        if self.denoiser == "unet":
            feeds = {"timestep": np.asarray(step).astype(np.int64)}
            if returns_hidden_states(self.index):
                return feeds | self._condition_on_size(texts)
            if "text_encoder" in texts:
                feeds["encoder_hidden_states"] = texts["text_encoder"]["last_hidden_state"]
            return feeds
        if self.packed:
            return self._condition_flux(texts, step)
        feeds = {"timestep": np.full(self.batch, step)}
        clip = [texts[name] for name in _TEXT_ENCODERS[:2] if name in texts]
        if len(clip) == 2:
            states = np.concatenate([_penultimate(made) for made in clip], -1)
            wide = config["joint_attention_dim"] - states.shape[-1]
            states = np.pad(states, ((0, 0), (0, 0), (0, wide)))
            more = texts.get("text_encoder_3", {}).get("last_hidden_state")
            # Without the third encoder, the pipeline passes zeros.
            more = np.zeros_like(states) if more is None else more
            feeds["encoder_hidden_states"] = np.concatenate([states, more], 1)
            feeds["pooled_projections"] = np.concatenate([made["text_embeds"] for made in clip], -1)
        return feeds

    def _condition_on_size(self, texts: Mapping[str, Arrays]) -> dict[str, Array]:
        """Return the inputs of SDXL: the texts, and the size and position of the image in pixels."""
        height, width = (8.0 * size for size in self.start[LATENTS].shape[2:])
        count = count_time_ids(self.index)
        numbers = [height, width, 0.0, 0.0, *([height, width] if count > 5 else [_SCORE])]
        feeds = {"time_ids": np.tile(np.asarray(numbers), (self.batch, 1))}
        if texts:
            feeds["encoder_hidden_states"] = np.concatenate([_penultimate(made) for made in texts.values()], -1)
        if "text_embeds" in texts.get("text_encoder_2", {}):
            feeds["text_embeds"] = texts["text_encoder_2"]["text_embeds"]
        return feeds

    def _condition_flux(self, texts: Mapping[str, Arrays], step: float) -> dict[str, Array]:
        height, width = self._packed_size
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        places = np.stack([np.zeros(height * width), rows.ravel(), columns.ravel()], -1)
        feeds: dict[str, Array] = {
            # diffusers passes steps from 0 to 1.
            "timestep": np.full(self.batch, step / 1000),
            "guidance": np.full(self.batch, _GUIDANCE),
            "img_ids": places,
            "txt_ids": np.zeros((self.start_length, places.shape[1])),
        }
        if "text_encoder" in texts:
            feeds["pooled_projections"] = texts["text_encoder"]["pooler_output"]
        if "text_encoder_2" in texts:
            states = texts["text_encoder_2"]["last_hidden_state"]
            feeds["encoder_hidden_states"] = states
            feeds["txt_ids"] = np.zeros((states.shape[1], places.shape[1]))
        return feeds

    @property
    def _packed_size(self) -> tuple[int, int]:
        """Return the height and width of Flux's latents in pieces. The image is as near to a square as possible."""
        count = self.start[LATENTS].shape[1]
        height = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
        return height, count // height

    def _unscale(self, latents: Array) -> Array:
        """Convert the latents to the decoder's range, as the pipeline does."""
        config = self.configs["vae"]
        if self.packed:
            height, width = self._packed_size
            batch, _, channels = latents.shape
            parts = latents.reshape(batch, height, width, channels // _PATCH**2, _PATCH, _PATCH)
            latents = parts.transpose(0, 3, 1, 4, 2, 5).reshape(batch, -1, height * _PATCH, width * _PATCH)
        unscaled = latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)
        return np.asarray(unscaled).astype(latents.dtype)


def _only(made: Arrays) -> Array:
    """Return the only output of a part."""
    (value,) = made.values()
    return value


def _penultimate(made: Arrays) -> Array:
    """Return the hidden states that SDXL and SD3 read: those before the last layer."""
    count = sum(name.startswith("hidden_states.") for name in made)
    return made[f"hidden_states.{count - 2}"]


# ------------------------------------------------------------------ making a chain


def make_chain(index: PipelineIndex, models: Mapping[str, LoadedModel]) -> DenoisingChain | None:
    """Connect the loaded parts of a pipeline.

    Args:
        models: part -> model.

    Returns:
        the chain; None if no part denoises.
    """
    denoiser = next((name for name in _DENOISERS if name in models), None)
    if denoiser is None:
        return None
    configs = {component.name: index.read_config(component.name) for component in index.components}
    names = [name for name in (*_TEXT_ENCODERS, denoiser, DECODER) if name in models]
    packed = index.find_component(denoiser).class_name.startswith("Flux")
    start = _draw_start(models, names, models[denoiser])
    scheduler = _make_scheduler(index, start[LATENTS])
    used = {name: models[name] for name in names} | scheduler.models
    return DenoisingChain(
        index=index,
        denoiser=denoiser,
        models=used,
        configs=configs,
        start={**start, LATENTS: start[LATENTS] * np.float32(scheduler.scale)},
        timestep=scheduler.timestep,
        notes=scheduler.notes,
        packed=packed,
    )


def _draw_start(models: Mapping[str, LoadedModel], names: list[str], denoiser: LoadedModel) -> dict[str, Array]:
    """Draw token ids for each text encoder, and latents."""
    sizes = _small_sizes(denoiser, _BATCH)
    if (packed := denoiser.named_dims.get("packed_height_width")) is not None:
        # If the range allows it, the latents are square, with a whole number of pieces on each side.
        sizes["packed_height_width"] = packed.nearest_size(min(math.isqrt(packed.opt), _MOST_SIZE) ** 2)
    latents = denoiser.samples(1, sizes)[denoiser.inputs[0].name]
    start: dict[str, Array] = {}
    for name in names:
        if name in _TEXT_ENCODERS:
            start[name] = models[name].samples(0, _small_sizes(models[name], latents.shape[0]))["input_ids"]
    return {**start, LATENTS: latents}


def _small_sizes(model: LoadedModel, batch: int) -> dict[str, int]:
    """Choose the sizes of a part's dims.

    Returns:
        dim name -> allowed size that is nearest to a small size.
    """
    sizes = dict[str, int]()
    for name, dim in model.named_dims.items():
        if name == "batch_size":
            size = batch
        elif name == "sequence_length":
            size = min(dim.opt, _MOST_TOKENS)
        else:
            # A height may be the sum of several equal dims.
            terms = max(
                sum(term.name == name for term in whole.named_dims()) for spec in model.inputs for whole in spec.shape
            )
            size = min(dim.opt, max(_MOST_SIZE // terms, 1))
        sizes[name] = dim.nearest_size(size)
    return sizes


def require_fitting_feeds(name: str, model: LoadedModel, feeds: Arrays) -> dict[str, int]:
    """Check that a part accepts the shapes that the parts before it return.

    Args:
        name: the part.

    Returns:
        the sizes of the part's named dims.

    Raises:
        InputError: an input is missing, or a size is not allowed.
    """
    sizes = dict[str, int]()
    for spec in model.inputs:
        if spec.name not in feeds:
            raise InputError(f"the chain has no value for the input {spec.name!r} of {name}")
        shape = feeds[spec.name].shape
        fits = len(shape) == len(spec.shape)
        for dim, size in zip(spec.shape, shape, strict=False):
            named = dim.named_dims()
            if not named:
                fits &= dim.opt == size
            elif len({term.name for term in named}) == 1 and named[0].name is not None:
                # A sum may also have static terms.
                own = size - sum(term.opt for term in dim.terms if not term.is_dynamic)
                one = sizes.setdefault(named[0].name, own // len(named))
                fits &= one * len(named) == own and one in named[0].allowed_sizes()
        if not fits:
            raise InputError(f"{name} takes {spec.name} {_describe_shape(spec)}, but the chain passes {list(shape)}")
    return sizes


def _describe_shape(spec: InputSpec) -> str:
    parts = [f"{dim.min} to {dim.max}" if dim.is_dynamic or dim.terms else str(dim.opt) for dim in spec.shape]
    return f"[{', '.join(parts)}]"


@dataclass(frozen=True)
class _Scheduler:
    """Scheduler at its first step.

    Attributes:
        models: traced methods by name; {} if they can't be traced.
        timestep: the first time step.
        scale: standard deviation of the first latents.
    """

    models: dict[str, LoadedModel]
    timestep: float
    scale: float
    notes: tuple[str, ...] = ()


class _SchedulerMethod(nn.Module):
    """First call of a method of a scheduler as a module."""

    def __init__(self, scheduler: Any, timestep: float | int) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._timestep = timestep

    def fresh_scheduler(self) -> Any:
        """Return a copy of the scheduler, because a scheduler counts its steps and keeps results in lists.

        Its tensors are shared: a trace can't copy them, and a scheduler replaces tensors instead of writing to them.
        """
        fresh = copy.copy(self._scheduler)
        fresh.__dict__.update({name: [*value] for name, value in vars(fresh).items() if isinstance(value, list)})
        return fresh


class _Scaling(_SchedulerMethod):
    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.fresh_scheduler().scale_model_input(latents, self._timestep)  # type: ignore[no-any-return]


class _Stepping(_SchedulerMethod):
    def forward(self, noise: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        return self.fresh_scheduler().step(noise, self._timestep, latents, return_dict=False)[0]  # type: ignore[no-any-return]


def _make_scheduler(index: PipelineIndex, latents: Array) -> _Scheduler:
    """Load the scheduler, set its time steps, and trace its two methods.

    Returns:
        the scheduler. If a method can't be traced or draws random numbers, a note says so, and the step is replaced by
        subtracting the noise.

    Raises:
        LoadError: the scheduler can't be loaded, or it can't set its time steps.
        RuntimeUnavailable: a package that the scheduler needs is not installed.
    """
    scheduler = load_scheduler(index)
    if scheduler is None:
        return _Scheduler({}, float(_STEPS), 1.0, ("the pipeline has no scheduler, so the step subtracts the noise",))
    dynamic = getattr(scheduler.config, "use_dynamic_shifting", False)
    try:
        scheduler.set_timesteps(_STEPS, **({"mu": _SHIFT} if dynamic else {}))
    except Exception as error:
        # The errors of diffusers share no base class.
        raise LoadError(
            f"the scheduler {type(scheduler).__name__} can't set {_STEPS} steps: {type(error).__name__}:"
            f" {first_line(error, '')}"
        ) from error
    # A scheduler that knows its first step does not search for the time step.
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    first = scheduler.timesteps[0].item()
    scale = float(getattr(scheduler, "init_noise_sigma", 1.0))
    example = torch.from_numpy(latents)
    try:
        try:
            models = _trace_scheduler(scheduler, first, example)
        except (ExportError, InputError, LoadError):
            if not hasattr(scheduler, "sigmas"):
                raise
            # Some schedulers compare numbers of their schedule in Python, which a trace of tensors can't contain.
            scheduler.sigmas = scheduler.sigmas.tolist()
            models = _trace_scheduler(scheduler, first, example)
    except (ExportError, InputError, LoadError, AttributeError) as error:
        why = f"torch can't trace it ({error})"
        models = {}
    else:
        why = ""
        if any(random_ops_of_program(model.program) for model in models.values()):
            why = "it draws random numbers"
            models = {}
    notes: tuple[str, ...] = ()
    if why:
        notes = (f"the step of {type(scheduler).__name__} is replaced by subtracting the noise, because {why}",)
    return _Scheduler(models, float(first), scale, notes)


def _trace_scheduler(scheduler: Any, timestep: float | int, example: torch.Tensor) -> dict[str, LoadedModel]:
    models = {STEPPING: from_module(_Stepping(scheduler, timestep).eval(), (example, example))}
    if hasattr(scheduler, "scale_model_input"):
        models[SCALING] = from_module(_Scaling(scheduler, timestep).eval(), (example,))
    return models
