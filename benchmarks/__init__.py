"""Benchmarks of vfl on this machine: run each as ``python -m benchmarks.NAME [--json]``."""
