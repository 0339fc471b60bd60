"""Adapters of other systems for ``vfl bench mpc``; they run in those systems' own environments.

Nothing of vfl is imported there, nor are they imported here: a process is started with the peer's
interpreter, and speaks the messages of `vfl.bench.mpc_messages` as plain JSON.
"""
