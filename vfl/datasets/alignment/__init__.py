"""Alignment: brings the rows of several parties into one order by their ids.

`join` aligns tables that are all in one process. If the ids must stay with their owners, `ids`
normalises them, and a protocol in `protocols` finds the common ids. The protocols use points of the
group in `ristretto`, or a helper party. Then each party stores the positions of its own rows in the
common order (`positions`).
"""
