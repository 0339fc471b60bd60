"""Attacks on labels by a feature party that has cuts, gradients or its trained bottom."""
