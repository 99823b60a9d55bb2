"""Every error and warning that posattn raises on purpose.

An error tells the user what was wrong, which layer or file it concerns, and what to do about it.
The command line prints `PosattnError`s as one line and exits with 2; anything else is a fault of ours (exit 1).
"""


class PosattnError(Exception):
    """Base of everything that the caller can mend."""


class InputError(PosattnError, ValueError):
    """An argument is out of range, of the wrong shape, or contradicts another one."""


class DataError(PosattnError, ValueError):
    """The text, token or document source holds nothing that can be measured."""


class UnsupportedModelError(PosattnError):
    """The model cannot be loaded, or cannot be seen the way the analysis needs."""


class SelfCheckError(PosattnError):
    """What the hooks recorded is not what the model computed: the message names layer, figure and remedy."""


class HookError(PosattnError):
    """A hook point is missing, never fired, or gave a tensor of an unexpected shape."""


class CheckpointError(PosattnError):
    """A saved result or checkpoint cannot be read, is truncated, or belongs to another run."""


class NothingMeasuredError(PosattnError):
    """A session or run ended without a single measured document."""


class PosattnWarning(UserWarning):
    """Something that changes how a number should be read; reports repeat it in words."""
