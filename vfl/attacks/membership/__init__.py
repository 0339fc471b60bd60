"""Membership inference: attacks that decide whether a row was among the training rows."""
