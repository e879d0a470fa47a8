"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("maskbridge")
except PackageNotFoundError:  # a source tree on the path that is not installed
    __version__ = "0+unknown"
