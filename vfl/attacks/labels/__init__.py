"""Attacks on labels, by a feature party that holds cuts, gradients or its own trained bottom."""
