"""Restore torch's process-wide state, because a forward that fails or changes settings would affect later models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Held while code replaces functions of torch, streams or warning filters for the whole process and restores them at its
# end. Two threads at the same time would restore each other's replacements.
PROCESS_STATE = threading.RLock()
_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore torch's state at the end of the context: gradients, default dtype and device, autocast, and the levels of
    ``torch.func``.

    ``vmap``, ``grad`` and ``jvp`` enter a level and leave it at their end. If an operator between these two points
    fails in a graph, the level is never left. Every later operator of the process would then run inside this level.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    gradients = torch.is_grad_enabled()
    # Another thread may have changed the default dtype for a while, which is global to the process.
    with PROCESS_STATE:
        dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    casts = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _AUTOCAST_DEVICES}
    try:
        yield
    finally:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch.set_grad_enabled(gradients)
        with PROCESS_STATE:
            torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        for name, (enabled, kind) in casts.items():
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, kind)


@contextmanager
def silence_logger(name: str) -> Iterator[None]:
    """Discard a library's log within the context. Errors are still raised as exceptions."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def seed_torch() -> Iterator[None]:
    """Set torch's seed to 0 within the context, because a model's code may draw its weights at random."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)
