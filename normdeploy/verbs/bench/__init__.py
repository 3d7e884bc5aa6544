"""How long runtimes take, in turns: whole models, and each norm in all its forms."""
