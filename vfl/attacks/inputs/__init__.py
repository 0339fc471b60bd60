"""Attacks that reconstruct a feature party's columns from cuts or predictions."""
