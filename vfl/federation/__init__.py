"""Flower's services as vfl runs them: what they let in, and which programs they may start."""
