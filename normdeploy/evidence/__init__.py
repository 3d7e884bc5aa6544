"""Evidence for artifacts (author, sources, tools): signatures, provenance, bills of materials.

Everything works offline with a pair of keys in two PEM files. The formats are public: DSSE envelopes, in-toto
Statements with SLSA's predicate, CycloneDX.
"""
