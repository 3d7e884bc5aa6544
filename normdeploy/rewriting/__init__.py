"""Rewrite norms in their best form: the driver, the transforms (fuse, fold, join) and the certificates."""
