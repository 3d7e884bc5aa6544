"""One thread for each pytest worker (threads of several workers get in each other's way), and what property tests share."""

from __future__ import annotations

import os

import hypothesis
import pytest

# a time limit for each example would fail on a busy machine; derandomized in CI, so that a red run can be repeated
hypothesis.settings.register_profile("normdeploy", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("normdeploy")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
