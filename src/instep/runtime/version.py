"""The version of instep, the same as in pyproject.toml."""

__version__ = "0.1.0"
