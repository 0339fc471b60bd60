"""Secure modes of a session other than `none`, each loaded by name.

`sum` and `beaver` are modes that sum cuts (`base`); `permuted` and `pea` train a network whose
weights no party holds in plaintext (`ends`). `keys` and `shared_layer` contain the cryptography and
the arithmetic. A new mode derives from `vfl.session.secure_mode.SecureMode`; it is registered
there, or by an entry point.
"""
