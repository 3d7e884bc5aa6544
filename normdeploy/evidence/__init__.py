"""Who made something, of what, and with what: signatures, provenance, bills of materials.

Everything here works offline with a pair of keys in two PEM files, and follows formats that others read: envelopes by
DSSE, in-toto Statements with SLSA's predicate, CycloneDX.
"""
