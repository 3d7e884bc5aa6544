"""Write evidence bundles: a Triton model repository with a report, samples and hashes, which `recheck` verifies
again.
"""
