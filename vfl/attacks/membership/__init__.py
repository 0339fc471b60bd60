"""Membership inference: whether a row was trained on."""
