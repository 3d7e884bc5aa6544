"""The version of the package: a file of its own, so that reports can name it without importing the package's front door."""

__version__ = "0.1.0"
