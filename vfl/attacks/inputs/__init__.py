"""Attacks on a feature party's columns, by whoever was sent its cuts or the predictions."""
