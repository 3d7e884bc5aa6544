"""Write evidence bundles: a Triton model repository with report, samples and hashes; `recheck` verifies them again."""
