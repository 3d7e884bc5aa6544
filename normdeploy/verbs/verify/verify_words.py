"""Words that users try with ``verify`` and ``bisect``."""

from __future__ import annotations

from ...other_words import CommandWord

SAMPLE_WORDS = (CommandWord(flags=("--samples",), means=("--dataset",), takes_value=True),)
"""Words for the samples of metrics."""
