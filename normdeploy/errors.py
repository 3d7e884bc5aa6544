"""Errors that a user can cause. Each message says what is wrong, shows the wrong and the expected value, and says how
to fix it.

The command line prints the message without a traceback and exits with 1. Any other exception is a bug of ours and keeps
its traceback.
"""

import re

# First bytes of the text file that Git LFS stores in place of a large file.
LFS_POINTER = b"version https://git-lfs"


class NormdeployError(Exception):
    """Base of every user error; ``str(error)`` is a complete message."""


class LoadError(NormdeployError):
    """File is broken, of an unknown kind, or incomplete."""


class TrustError(LoadError):
    """Loading would run code from the file; the message names the part."""


class TrainingModeError(NormdeployError):
    """Part of the model is in training mode; the message names it."""


class InputError(NormdeployError):
    """Option or input that the user gave is wrong, is missing, or contradicts the model."""


class ExportError(NormdeployError):
    """torch could not export the model, or the exported file differs from the request."""


class GraphError(NormdeployError):
    """ONNX file is broken or uses an unsupported feature."""


class CertificateError(NormdeployError):
    """With ``--strict``: a rewrite failed its certificate and was undone."""


class BuildError(NormdeployError):
    """No engine could be built from the file."""


class ExtensionError(NormdeployError):
    """Extension of an installed package (`normdeploy.extensions`) is broken or violates its contract; the message names
    the package.
    """


class StoreError(NormdeployError):
    """Store of earlier results can't be reached or written, or an object in it does not match the hash in its name."""


class EvidenceError(NormdeployError):
    """Signature is missing, was made with an untrusted key, or belongs to other content."""


class PublishError(NormdeployError):
    """Registry can't be reached, or refuses the upload."""


class RuntimeCrash(GraphError):
    """Runtime crashes when it opens a file."""


# Exit code if no check failed, but some checks were not run because a GPU or a package is missing.
NOT_RUN = 3
# Start of the message that a verb prints when it ends with the exit code `NOT_RUN`.
NEITHER = "not run, so neither passed nor failed"


class RuntimeUnavailable(NormdeployError):
    """Package or device that a verb needs is missing; the message names the extra to install."""


# Commands that GitHub Actions, Azure Pipelines and TeamCity execute when a step prints them.
_ORDER = re.compile(
    r":(?=:(add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|notice|remove-matcher|save-state|set-env"
    r"|set-output|stop-commands|warning)\b)|#(?=#\w*\[)",
    re.IGNORECASE,
)
_REPLACED = "\N{REPLACEMENT CHARACTER}"


# Maximum number of characters of a text on one line. Names that come from files may be longer.
_LONGEST = 2000


def escape_line(text: str) -> str:
    """Put a text on one line without control characters. Names in the text come from files, and a terminal would
    execute control characters in these names.

    A line feed in a name could fake a line of our output. A CI server executes ``::error::`` as a command. This may
    even happen with ``::error::`` in the middle of a text, if a table wraps the text there. A text longer than a screen
    loses its middle.

    Returns:
        the safe text.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 4 :]}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _REPLACED for c in text)
    return _ORDER.sub(_REPLACED, text)


# Matches the line feeds in the text of our own messages. The next line there is a list item, or begins with one of
# these words.
_OUR_LINE = re.compile(r"\n(?=  |If you trust |Check the factory|Nothing was built)")


def escape_lines(text: str) -> str:
    """Escape a message like `escape_line`, but keep the message's own line feeds. Line feeds inside names are replaced.

    Returns:
        the safe message.
    """
    return "\n".join(map(escape_line, _OUR_LINE.split(text)))
