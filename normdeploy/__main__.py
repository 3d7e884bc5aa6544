"""Run the command line as ``python -m normdeploy``."""

from .cli.app import main

main()
