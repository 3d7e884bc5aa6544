"""The evidence bundle: a Triton model repository with report, samples and hashes. ``package`` writes it, ``recheck``
verifies it again after an update."""
