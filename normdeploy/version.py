"""The version of the package: a file of its own, because reports name it and must not import the package itself, which
finds them."""

__version__ = "0.1.0"
