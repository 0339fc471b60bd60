"""The version of this package, the one place it is written."""

VERSION = "0.1.0"
