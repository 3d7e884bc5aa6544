"""Write and check evidence for artifacts: signatures, provenance and bills of materials.

Everything works offline, with a private and a public key in two PEM files. The formats are public: DSSE envelopes,
in-toto Statements with SLSA's predicate, and CycloneDX.
"""
