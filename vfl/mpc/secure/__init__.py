"""Secure modes of a session beside `none`, each loaded by name; the contract is `SecureMode`.

`sum` and `beaver` are members that sum cuts (`base`), `permuted` and `pea` have a network that
nobody holds (`ends`); `keys` and `shared_layer` are the cryptography and the arithmetic below. A
new member derives from `vfl.session.secure_mode.SecureMode` and is named in its registry, or by an
entry point.
"""
