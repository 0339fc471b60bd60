"""Version of this package, defined only here."""

VERSION = "0.2.0"
