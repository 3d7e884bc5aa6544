"""Predict how the norms of a model would be rewritten and how runtimes run them."""
