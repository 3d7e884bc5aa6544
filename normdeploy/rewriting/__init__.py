"""Norms written in their best form: the driver, its steps (fuse, fold, join) and the certificate of each."""
