"""Flower as vfl runs it: what its services let in and start, projects, processes, the doctor."""
