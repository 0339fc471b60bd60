"""Attacks on a feature party's columns by an attacker that receives cuts or predictions."""
