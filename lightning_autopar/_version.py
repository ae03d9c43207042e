"""The package's version, which caches read without importing the package's front door."""

__version__ = "0.1.0"
