"""What one party keeps on its disk: its identity, what it was bound to and spent, what it sent.

`party_folder` is the part of a run folder that a party owns, with `checkpoint`s and `run_rows`. The
store outlives runs: `session_ledger` binds names of sessions, `spending` counts epsilon, `journal`
remembers what was sent, `witness` lets peers notice a store put back from a copy. `identity` is a
party's lasting key pair.
"""
