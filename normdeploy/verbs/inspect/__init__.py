"""Predicts how the norms of a model are rewritten and how runtimes run them."""
