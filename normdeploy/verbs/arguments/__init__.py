"""Validate the arguments of verbs, open models of every format, and accept results in place of files."""
