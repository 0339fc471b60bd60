"""Noise for a privacy budget: the sensitivity of an update, the noise, and its guarantees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from vfl.core import seeds
from vfl.horizontal.settings import HorizontalSettings
from vfl.privacy import PrivacyStatement
from vfl.privacy.accountants import (
    ANALYTIC,
    GaussianSteps,
    epsilon_of,
    gaussian_epsilon,
    noise_for,
)
from vfl.privacy.statement import EMPTY_PLACE

#: Noise multiplier of the counts for a quantile, divided by the noise multiplier of clipped sums.
_COUNTS_NOISE = 2.0
_PUBLIC_NORMS = "clip norms were public, while they are percentiles of the client's own norms"


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """Standard deviations of all noise, in units of the sensitivity to one record or one client.

    Attributes:
        multiplier: noise multiplier of gradients or updates; 0 means no noise.
        counts: noise multiplier of the counts by which a clip norm follows a quantile; 0 means
            exact counts.
        statements: privacy guarantees; the first guarantee is the one whose epsilon is in the
            settings.
    """

    multiplier: float = 0.0
    counts: float = 0.0
    statements: tuple[PrivacyStatement, ...] = ()


def participants(settings: HorizontalSettings, round_number: int) -> list[int]:
    """Return the clients of a round, unless the server adds noise; every party can compute them.

    If the server adds noise, the server draws the clients by its secret instead.
    """
    order = seeds.permutation(settings.seed, settings.clients, "clients", round_number)
    return sorted(int(one) for one in order[: settings.sampled])


def most_rounds(settings: HorizontalSettings) -> int:
    """Return the largest number of rounds in which any single client takes part.

    If the server adds noise, it draws the clients in secret, so that may be all rounds.
    """
    if settings.noise == "server":
        return settings.rounds
    taken: Counter[int] = Counter()
    for number in range(1, settings.rounds + 1):
        taken.update(participants(settings, number))
    return max(taken.values())


def update_sensitivity(
    norms: Sequence[float],
    learning_rate: float,
    batch_rows: int,
    kind: Literal["paper", "rigorous"],
) -> float:
    """Return the sensitivity of a client's local steps: how much one row can change their result.

    The change is measured in the 2-norm. The kind "paper" assumes that only this row's own gradient
    changes in each of the E steps: 2 eta E C / B, if all steps have the clip norm C. From the
    second step on, this value is no upper bound, because the gradient of every row is then computed
    at weights that the changed row has influenced. The kind "rigorous" assumes that in each later
    step all gradients change by as much as clipping allows.

    Args:
        norms: clip norm of each local step (C).
        learning_rate: learning rate of the local steps (eta).
        batch_rows: number of rows in a local step (B).
        kind: kind of the bound, "paper" or "rigorous".

    >>> update_sensitivity([1.0] * 5, 0.1, 100, "paper")  # 2 * 0.1 * 5 / 100
    0.01
    >>> round(update_sensitivity([1.0] * 5, 0.1, 100, "rigorous"), 3)  # 0.2 / 100 + 0.2 * 4
    0.802
    """
    if kind == "paper":
        return 2 * learning_rate * math.fsum(norms) / batch_rows
    return 2 * learning_rate * (norms[0] / batch_rows + math.fsum(norms[1:]))


def classic_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Return the noise multiplier that the classic Gaussian formula gives for each round.

    Every round gets an equal part of the privacy budget: with T rounds, e = epsilon / T and d =
    delta / T.

    For e up to 1, the formula is sqrt(2 ln(1.25 / d)) / e. Source: Dwork and Roth 2014, theorem
    A.1. For a larger e, the function returns the larger of the formula's value and the exact noise
    multiplier that the Gaussian mechanism needs.

    >>> round(classic_multiplier(0.5, 1e-5, rounds=50), 1)
    559.4
    """
    once, share = epsilon / rounds, delta / rounds
    classic = math.sqrt(2 * math.log(1.25 / share)) / once
    return classic if once <= 1 else max(classic, noise_for(once, share, 1))


@lru_cache(maxsize=32)
def plan_noise(settings: HorizontalSettings, rows: int) -> NoisePlan:
    """Return the noise plan of a training: the noise of its steps and the resulting guarantees.

    Args:
        settings: settings with a privacy budget, or with noise = "none".
        rows: number of rows of the client that has the fewest rows of all clients.

    Raises:
        PrivacyError: no noise multiplier is large enough for the budget.
    """
    if settings.noise == "none":
        return NoisePlan()
    assert settings.epsilon is not None, "the settings were checked"
    if settings.noise == "client" and settings.sensitivity == "paper":
        return _of_the_paper(settings, rows, settings.epsilon)
    rate, steps = 1.0, most_rounds(settings)
    if settings.noise == "steps":
        rate, steps = min(1.0, settings.batch_size / rows), steps * settings.local_steps
    elif settings.noise == "server":
        rate = settings.sampled / settings.clients
    multiplier = noise_for(settings.epsilon, settings.delta, steps, rate)
    spent = epsilon_of(GaussianSteps(multiplier, steps, rate), settings.delta)
    statement = _statement(settings, spent, ANALYTIC if rate == 1 else "rdp")
    if settings.clip != "quantile":
        return NoisePlan(multiplier, 0.0, (statement,))
    # The noisy sums and the noisy counts together are one Gaussian mechanism with noise
    # `multiplier`: the sum of their 1/s^2 equals 1 / multiplier^2, where s is a noise multiplier.
    counts = _COUNTS_NOISE * multiplier
    return NoisePlan(multiplier / math.sqrt(1 - _COUNTS_NOISE**-2), counts, (statement,))


def _of_the_paper(settings: HorizontalSettings, rows: int, epsilon: float) -> NoisePlan:
    """Return the noise by the paper's formula.

    The plan states the guarantee that the paper claims, and the guarantee that is proven.
    """
    multiplier = classic_multiplier(epsilon, settings.delta, settings.rounds)
    one = [1.0] * settings.local_steps
    batch = min(settings.batch_size, rows)
    claimed = update_sensitivity(one, settings.learning_rate, batch, "paper")
    proven = update_sensitivity(one, settings.learning_rate, batch, "rigorous")
    moved = proven / claimed * math.sqrt(most_rounds(settings))
    holds = gaussian_epsilon(multiplier, moved, settings.delta)
    data_norms = (_PUBLIC_NORMS,) if settings.clip == "percentile" else ()
    chosen = ("layers were chosen without using the data",) if settings.layers < 1 else ()
    several = (
        ("one record moves an update by 2 eta E C / B at most, proven for one local step alone",)
        if settings.local_steps > 1
        else ()
    )
    claim = _statement(
        settings,
        epsilon,
        "basic composition of the classic Gaussian formula",
        several + data_norms + chosen,
    )
    proof = _statement(settings, holds, ANALYTIC, data_norms + chosen)
    return NoisePlan(multiplier, 0.0, (claim, proof))


def _statement(
    settings: HorizontalSettings, epsilon: float, accountant: str, assumes: tuple[str, ...] = ()
) -> PrivacyStatement:
    if settings.noise == "server":
        return PrivacyStatement(
            protects="model",
            against="an owner of the model that is neither the server nor a client",
            epsilon=epsilon,
            delta=settings.delta,
            unit="client",
            relation="add or remove",
            adversary="outsider with the model",
            accountant=accountant,
            assumes=(
                "the server adds the noise, and is trusted with every update",
                "no other party knows which clients took part in a round",
                *assumes,
            ),
        )
    return PrivacyStatement(
        protects="records",
        against="the server, other clients and any owner of the model",
        epsilon=epsilon,
        delta=settings.delta,
        unit="record",
        relation="add or remove" if settings.noise == "steps" else "replace",
        adversary="partner",
        accountant=accountant,
        assumes=(
            "a person has one record at one client",
            *((EMPTY_PLACE,) if settings.noise == "steps" else ()),
            *(("means and deviations of columns were public",) if settings.classes else ()),
            *assumes,
        ),
    )
