"""Membership inference: whether a row was among the training rows."""
