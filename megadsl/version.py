"""The version, in the one place that packaging, the cache path and the command line read."""

__version__ = "0.1.0"
