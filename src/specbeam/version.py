"""The version of the package, which every module may import."""

__version__ = "0.2.0"
