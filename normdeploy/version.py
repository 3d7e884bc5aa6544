"""Version of the package. It has its own file because reports need it and must not import the package, which
imports them.
"""

__version__ = "0.1.0"
