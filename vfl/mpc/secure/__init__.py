"""Secure modes of a session other than `none`, each loaded by name; the contract is `SecureMode`.

`sum` and `beaver` are members that sum cuts (`base`); `permuted` and `pea` train a network whose
weights no party holds (`ends`). `keys` and `shared_layer` have the cryptography and the arithmetic.
A new member derives from `vfl.session.secure_mode.SecureMode`; register it there, or by an entry
point.
"""
