"""Rewrite norms in their best form: the driver, its transforms (fuse, fold, join) and the certificate of each
rewrite."""
