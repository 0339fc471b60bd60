"""Attacks on a feature party's columns; the attacker receives its cuts or predictions."""
