"""The errors that a user can cause. Each says what was wrong, with both values, and what to do.

The command line prints the message without a traceback and exits with 1. Anything else that escapes is a bug of ours
and keeps its traceback.
"""

import re

# How the text begins that stands for a file of Git LFS.
LFS_POINTER = b"version https://git-lfs"


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


class RuntimeCrash(GraphError):
    """A runtime ends its process when it opens a file."""


# Exit code where nothing failed and something was not run: no GPU, or a package that is missing.
NOT_RUN = 3
# How the message begins then, whatever the verb.
NEITHER = "not run, so neither passed nor failed"


class RuntimeUnavailable(NormdeployError):
    """A package or a device that a verb needs is not there; the message says which extra to install."""


# What GitHub Actions, Azure Pipelines and TeamCity obey in the output of a step.
_ORDER = re.compile(
    r":(?=:(add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|notice|remove-matcher|save-state|set-env"
    r"|set-output|stop-commands|warning)\b)|#(?=#\w*\[)",
    re.IGNORECASE,
)
_REPLACED = "\N{REPLACEMENT CHARACTER}"


# Characters of a line. A name in it may have any number.
_LONGEST = 2000


def escape_line(text: str) -> str:
    """``text`` on one line, without control characters: names come from files, and a terminal would obey them.

    A line feed would begin a line that looks like one of ours, and a line ``::error::`` is an order to a CI server,
    which a table may also break a name before. What is longer than a screen is cut in its middle.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 4 :]}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _REPLACED for c in text)
    return _ORDER.sub(_REPLACED, text)


# A line of a message that has several is a point of a list, or the sentence at its end.
_OUR_LINE = re.compile(r"\n(?=  |If you trust |Check the factory|Nothing was built)")


def escape_lines(text: str) -> str:
    """A message as `escape_line` makes it, with the line feeds that are ours: a name in it may bring others."""
    return "\n".join(map(escape_line, _OUR_LINE.split(text)))
