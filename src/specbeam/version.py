"""The version of the package, which every module may import."""

__version__ = "0.1.0"
