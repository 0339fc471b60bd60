"""Flower as vfl uses it: guarded services and programs, projects, processes, and `vfl doctor`."""
