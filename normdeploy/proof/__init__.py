"""Prove exactly that two regions of a graph compute the same function, at every input and size.

docs/explanation/certificates.md has the theorem. The modules of this package use these terms:

- sides: the functions before and after a rewrite. A proof compares their results.
- leaf: a tensor that both sides read as data.
- place: one position along an axis.
- atom: a set of places. An axis is a product of atoms, in row-major order.
- point: a sampled place of an atom. A few weighted points represent all places.
- field: the integers modulo a random prime. Each value is computed in the field and, in parallel, in floats.
- residue: an element of the field.
- draw: one random choice of all elements of the leaves. An evaluation computes several draws together.
- radicand: a value whose root is taken.
"""
