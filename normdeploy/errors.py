"""The errors that a user can cause. Each says what was wrong, with both values, and what to do.

The command line prints the message without a traceback and exits with 1. Anything else that escapes is a bug of ours
and keeps its traceback.
"""


class NormdeployError(Exception):
    """Base of every user error; ``str(error)`` is a complete message."""


class LoadError(NormdeployError):
    """The file is not what it should be: broken, of an unknown kind, or lacking what it must hold."""


class TrustError(LoadError):
    """Loading would run code that the file brings along; the message says which part."""


class TrainingModeError(NormdeployError):
    """Something in the model is in training mode; the message names it."""


class InputError(NormdeployError):
    """An input specification is wrong, missing or contradicts the model."""


class ExportError(NormdeployError):
    """torch could not export the model, or the exported file is not what was asked for."""


class GraphError(NormdeployError):
    """An ONNX file is broken, or uses something that can't be read."""


class CertificateError(NormdeployError):
    """With ``--strict``: a rewrite failed its certificate (it was undone)."""


class BuildError(NormdeployError):
    """No engine could be built from the file."""


class ExtensionError(NormdeployError):
    """What an installed package brings (`normdeploy.extensions`) is broken or breaks its contract; names the
    package."""


class StoreError(NormdeployError):
    """A store of steps can't be reached or written, or holds what is not what its name says."""


class EvidenceError(NormdeployError):
    """A signature is missing, by a key that is not trusted, or of something else than what is there."""


class PublishError(NormdeployError):
    """A registry can't be reached, or refuses what is published."""


class RuntimeUnavailable(NormdeployError):
    """A package or a device that a verb needs is not there; the message says which extra to install."""


def printable(text: str) -> str:
    """``text`` without control characters: names come from files, and a terminal would obey them."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
