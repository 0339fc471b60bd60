"""Secure modes of a session other than `none`; each is loaded by its name.

The modes `sum` and `beaver` sum the parties' cut-layer activations (`base`); the modes `permuted`
and `pea` train a network whose weights no party has in plaintext during the training (`ends`).
`keys` contains the key agreement, and `shared_layer` the arithmetic of a shared layer. A new mode
is a subclass of `vfl.session.secure_mode.SecureMode`; it is registered in that module, or by an
entry point.
"""
