"""A party's files on disk: identity, names of its runs, privacy spending, sent messages.

The module `party_folder` reads and writes a party's part of a run's folder, including a
`checkpoint` and `run_rows` (a record of the training's rows). The store is older than a run and
remains after it: `session_ledger` binds names of sessions, `spending` adds up epsilon, `journal`
records sent messages, `witness` lets peers notice that a store was restored from an old copy. The
module `identity` reads and writes a party's permanent key pair.
"""
