"""Flower as vfl runs it: its guarded services and programs, projects, processes, the doctor."""
