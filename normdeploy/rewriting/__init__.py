"""Rewrite norms in their best form: the main loop, the transforms (fuse, fold, join) and the certificates."""
