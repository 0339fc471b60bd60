"""Measurements of vfl on this machine: each runs as ``python -m benchmarks.NAME [--json]``."""
