"""The arguments and results of the public functions."""
