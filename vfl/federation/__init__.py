"""Flower as vfl uses it: its guarded services and programs, projects, processes, the doctor."""
