"""Secure modes of a session beside `none`, each loaded by name; the contract is `SecureMode`.

`base` is what the members share, `sum` and `beaver` are the members, `keys` and `shared_layer` the
cryptography and the arithmetic they stand on. A new member derives from
`vfl.session.secure.SecureMode` and is named in its registry, or by an entry point.
"""
