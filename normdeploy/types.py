"""Types that are named everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 where it is not known."""

PathLike = str | os.PathLike[str]
