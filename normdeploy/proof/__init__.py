"""Exact proofs: two pieces of a graph are the same function, at every input and at every size
(docs/certificates.md)."""
