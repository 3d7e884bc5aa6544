"""Prove exactly that two regions of a graph compute the same function, at every input and size
(docs/explanation/certificates.md)."""
