"""The evidence bundle: a Triton model repository with report, samples and hashes, and asking it again after an
update."""
