"""stylize: paint one picture in the manner of another."""

__version__ = "0.1.0"
