"""Attacks on a feature party's columns, by receivers of its cuts or of predictions."""
