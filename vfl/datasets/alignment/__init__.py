"""Rows of several parties brought into one order by their ids.

`join` does it where one process has all tables. Where the ids must stay with their owners, they
are written alike (`ids`), a protocol finds the common ones (`protocols`, over `ristretto` or with a
helper), and each party keeps the positions of its own rows (`positions`).
"""
