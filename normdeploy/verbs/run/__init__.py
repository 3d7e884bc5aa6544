"""Runs files and engines once, or keeps them open for many runs."""
