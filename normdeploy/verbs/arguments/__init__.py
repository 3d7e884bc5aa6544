"""Validate the arguments of verbs before any work, open models of every format, and let results replace files."""
