"""``python -m normdeploy`` is the command ``normdeploy``."""

from .cli import main

main()
