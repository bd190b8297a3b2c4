"""The shared words of meshnet: what every other package speaks in. Imports no torch and no sibling package."""

__version__ = "0.1.0"
