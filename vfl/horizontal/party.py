"""A party as a client of a horizontal training: its rows, its consent and its spent epsilon."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from vfl.config import PartyFile
from vfl.core.errors import (
    ConsentError,
    DisagreementError,
    VFLError,
    redacted_output,
    redacted_traceback,
)
from vfl.core.seeds import Secret
from vfl.horizontal import ClientTrainer, NoisePlan, most_rounds, plan_noise
from vfl.horizontal.client import build_model, flat, layers_of
from vfl.horizontal.flower import ACTION, NoiseMod, Terms, answer
from vfl.horizontal.ledger import Rounds, rounds_of
from vfl.horizontal.settings import HorizontalSettings
from vfl.horizontal.simulation import own_rows
from vfl.session import for_others, unexpected
from vfl.session.ranges import out_of_products_range
from vfl.session.store.party_folder import own_ledger

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def add_rounds(app: ClientApp, own_file: Callable[[Context], PartyFile]) -> None:
    """Let a party's ClientApp take part in horizontal trainings.

    The app then handles the message that begins a round.

    Args:
        app: ClientApp of the party.
        own_file: function that returns the content of the party's own file.
    """

    @app.train(ACTION, mods=[NoiseMod(lambda terms: Secret.fresh())])
    def play(message: Message, context: Context) -> Message:
        # Flower's simulation pickles `play`, so its work is in a function of this module.
        return take_round(message, context, own_file)


def take_round(
    message: Message, context: Context, own_file: Callable[[Context], PartyFile]
) -> Message:
    """Run one round at a party; reply with its update, or with the reason for its refusal."""
    torch.set_num_threads(1)
    name = f"of node {context.node_id}"
    with redacted_output():
        try:
            terms, party = Terms(message.content), own_file(context)
            name = party.party
            inputs, labels = own_rows(party, terms.settings)
            plan = check_terms(party, terms, inputs)
            trainer = ClientTrainer(
                terms.settings, plan, inputs, labels, len(terms.settings.classes or ())
            )
            count = spend(party, terms, plan)
            return answer(message, context, terms, trainer, Secret.fresh(), count)
        except VFLError as error:
            print(error, flush=True)
            failure = for_others(error, name)
        except Exception as bug:
            print(redacted_traceback(bug), flush=True)
            failure = unexpected(bug, name)
    told = ConfigRecord({"what": str(failure)})
    return Message(RecordDict({"failure": told}), reply_to=message)


def check_terms(party: PartyFile, terms: Terms, inputs: Tensor) -> NoisePlan:
    """Return the noise plan for this party's number of rows, if the party consents to the training.

    Raises:
        ConsentError: the party does not consent; the error shows the requested values and the
            limits of the party's own file.
        DisagreementError: the server's network does not fit the columns of this party's table.
    """
    settings, consent = terms.settings, party.consent
    refused: list[tuple[str, str]] = []
    if "horizontal" not in consent.modes:
        refused.append(("mode horizontal", f"one of {', '.join(consent.modes)}"))
    if settings.classes is None:
        refused.append(("no classes", "the classes by name, in [horizontal]"))
    specs = {"bottom": [settings.model]}
    refused += out_of_products_range(settings, "horizontal", consent, specs)
    if settings.batch_size > consent.max_batch_size:
        refused.append((f"batch_size {settings.batch_size}", f"<= {consent.max_batch_size}"))
    _refuse(terms, refused)  # check these numbers before any computation uses them
    passes = most_rounds(settings) * settings.local_steps * settings.batch_size / len(inputs)
    if passes > consent.max_epochs:
        refused.append((f"{passes:.4g} passes over the rows", f"epochs <= {consent.max_epochs}"))
    numbers = sum(len(one) for one in terms.layers.values())
    if numbers > consent.max_parameters:
        refused.append((f"{numbers} parameters", f"parameters <= {consent.max_parameters}"))
    if not refused:
        with torch.device("meta"):
            model = build_model(settings, tuple(inputs.shape[1:]), len(settings.classes or ()))
        sizes = {number: len(flat(one)) for number, one in enumerate(layers_of(model))}
        if sizes != {number: len(one) for number, one in terms.layers.items()}:
            raise DisagreementError(
                "the server's network does not fit this party's columns",
                where="horizontal.model",
                fix="use the same number columns at every party, and the same version of vfl",
            )
    plan = plan_noise(settings, len(inputs))
    limit = consent.max_epsilon
    if limit is not None and _counted(plan) is None:
        refused.append(("a record has no epsilon", f"epsilon <= {limit:g}"))
    _refuse(terms, refused)
    return plan


def _refuse(terms: Terms, refused: Sequence[tuple[str, str]]) -> None:
    """Refuse a party's participation because of some requested values.

    The error lists the refused values and the values that the party accepts.
    """
    if refused:
        raise ConsentError(
            "this party does not consent to the horizontal training",
            where=terms.run if _NAME.fullmatch(terms.run) else None,
            got="; ".join(asked for asked, _ in refused),
            want="; ".join(allowed for _, allowed in refused),
            fix="use other settings, or other limits in [consent] of the party's own file",
        )


def _counted(plan: NoisePlan) -> float | None:
    """Return the epsilon that a party's ledger counts for a record: the largest stated epsilon."""
    stated = [one.epsilon or 0.0 for one in plan.statements if one.unit == "record"]
    return max(stated) if stated else None


def spend(party: PartyFile, terms: Terms, plan: NoisePlan) -> int:
    """Count one more round on disk before any result leaves the party; return the store's counter.

    Raises:
        RolledBackError: the server has seen a larger counter of this party's store, so the store
            was restored from an old copy.
        ConsentError: the training has no more rounds for one client, or this party's trainings
            together would spend more epsilon than its limit.
        DisagreementError: this training name belongs to a training with other settings.
    """
    settings = terms.settings
    if not _NAME.fullmatch(terms.run):
        raise DisagreementError("this is not a valid name of a run", want=_NAME.pattern)
    ledger = own_ledger(party)
    ledger.witness.require(terms.known, "the server")
    new = Rounds(run=terms.run, settings=_digest(settings), epsilon=_counted(plan))
    rounds_of(party).take(new, most_rounds(settings), ledger.require_epsilon)
    return ledger.witness.announce()


def _digest(settings: HorizontalSettings) -> str:
    return hashlib.sha256(settings.model_dump_json(exclude_none=True).encode()).hexdigest()
