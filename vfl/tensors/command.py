"""``vfl worker``: a separate process that holds tensors and computes for a leader."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import argument, option, say

if TYPE_CHECKING:
    from vfl.tensors import Worker


def worker(
    ticket: Annotated[Path, argument("File that Pool.write_tickets made.", "TICKET")],
    load: Annotated[
        list[str] | None,
        option(
            "File with a table of numbers (.npy or .csv), and a name under which leaders find it.",
            "NAME=FILE",
        ),
    ] = None,
    epsilon: Annotated[
        float,
        option("Epsilon that trainings with noise may spend on each table; 0 allows no training."),
    ] = 0.0,
    delta: Annotated[float, option("Delta of this budget.")] = 1e-5,
    key: Annotated[
        Path | None,
        option("File with this worker's permanent key; it is created if missing.", "FILE"),
    ] = None,
    store: Annotated[
        Path | None,
        option("Folder in which the worker saves how much of --epsilon is spent.", "FOLDER"),
    ] = None,
    restored: Annotated[
        bool,
        option(
            "The folder of --store was restored from an old copy: grant no further epsilon.",
            "--restored",
        ),
    ] = False,
    peer: Annotated[
        list[str] | None,
        option(
            "Name of another worker, and fingerprint of the only key that is accepted for it.",
            "NAME=FINGERPRINT",
        ),
    ] = None,
) -> None:
    """Run a worker of vfl.tensors; it holds tensors, and keeps the tables of `--load` secret.

    The leader (the process that sends requests to workers) makes a ticket for each worker; tickets
    must stay secret. The worker connects to the leader, executes requests of a fixed list, and ends
    when the leader ends. In the leader's program, `tensors.find(worker, NAME)` returns a pointer to
    a loaded table; no other process can read the table or values computed from it. With
    `--epsilon`, a training may compute noisy gradients from a table until this budget of the table
    is spent. With `--store`, the worker saves on disk how much of each table's budget is spent;
    otherwise this record is lost when the worker ends.

    The leader forwards the public keys with which workers encrypt messages for each other. With
    `--key`, a worker prints the fingerprint of its own key. With `--peer` for each other worker,
    the worker detects false keys that a leader sends in the name of these workers.
    """
    from vfl.core.address import Address
    from vfl.core.seeds import use_one_thread
    from vfl.tensors import Ticket, Worker, serve
    from vfl.tensors.budgets import BudgetLedger
    from vfl.tensors.keys import WorkerKeys, signing_key

    use_one_thread()
    paper = Ticket.read(ticket)
    known = dict(_named(each, "--peer takes NAME=FINGERPRINT") for each in peer or [])
    keys = WorkerKeys(paper.name, signing_key(key) if key else None, known)
    if keys.fingerprint:
        say(f"fingerprint of {paper.name}: {keys.fingerprint}")
    with ExitStack() as held:
        ledger = BudgetLedger(store, paper.name) if store else None
        if ledger is not None:
            held.enter_context(ledger.alone())
            if restored:
                ledger.restored()
        elif epsilon:
            say(
                "when this worker ends, it forgets how much of --epsilon is spent: --store saves it"
            )
        here = Worker(paper.name, keys, ledger)
        _load(here, load or [], epsilon, delta)
        say(f"worker {paper.name} connects to {Address(paper.host, paper.port)}")
        serve(here, paper)
    say("done")


def _load(here: Worker, load: list[str], epsilon: float, delta: float) -> None:
    """Load tables, and grant the privacy budget of each table."""
    import numpy as np
    import torch

    from vfl.core.errors import UserError

    for each in load:
        name, file = _named(each, "--load takes NAME=FILE")
        try:
            if file.endswith(".npy"):
                table = np.load(file, allow_pickle=False)
            else:
                table = np.loadtxt(file, delimiter=",", ndmin=2)
        except (OSError, ValueError):
            raise UserError(
                "this file cannot be loaded", where=file, want="numbers alone"
            ) from None
        here.load(torch.from_numpy(table).float(), tag=name)
        if epsilon:
            here.grant(name, epsilon=epsilon, delta=delta)


def _named(text: str, form: str) -> tuple[str, str]:
    """Split an option's text NAME=VALUE at the equals sign."""
    name, equals, rest = text.partition("=")
    if not equals:
        raise typer.BadParameter(form)
    return name, rest
