"""``python -m normdeploy`` is the command ``normdeploy``."""

from .cli.app import main

main()
