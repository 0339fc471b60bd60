"""Private alignment of ids in one process; each party has a separate file, keys and positions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vfl.config import Experiment, check_one_process
from vfl.config.validate import UNNAMED_ALIGNMENT
from vfl.core.errors import ConfigError, MisalignedError, MissingDataError, RunFolderError
from vfl.datasets.alignment.gaps import Found, role_of
from vfl.datasets.alignment.ids import OwnIds, normalise, prefixes, read_own_ids
from vfl.datasets.alignment.join import MIN_OVERLAP
from vfl.datasets.alignment.positions import Agreed, Alignment, last_version
from vfl.datasets.alignment.protocols import (
    PROTOCOLS,
    Bounds,
    Message,
    Own,
    Traffic,
    play,
    run_roles,
)
from vfl.datasets.on_disk import scratch
from vfl.datasets.table import OwnTable, spaced
from vfl.session.progress import AlignmentProgress, Tell
from vfl.training.run import own_tables

_ANY = Bounds(min_ids=0, min_common=0)


@dataclass(frozen=True)
class Aligned:
    """Result of an alignment of the parties' rows, as counts.

    Attributes:
        common: number of rows that all parties have.
        ids: number of rows of each party, by party.
        reused: whether the parties' last alignment is still valid, so that no message was sent.
        versions: version of each party's alignment, by party.
        traffic: messages of the alignment protocol; None if no messages were needed.
    """

    common: int
    ids: Mapping[str, int]
    reused: bool
    versions: Mapping[str, int]
    traffic: Traffic | None


@dataclass(frozen=True)
class Gain:
    """Number of common ids that an id rule adds, with the counts of changed and repeated ids.

    Attributes:
        rules: spec of this id rule together with the id rules before it.
        common: number of distinct ids that all parties have.
        gained: number of common ids that this id rule adds.
        changed: number of ids that the id rules change, by party.
        repeated: number of rows whose id an earlier row has, by party.
    """

    rules: str
    common: int
    gained: int
    changed: Mapping[str, int]
    repeated: Mapping[str, int]


def align(
    experiment: Experiment, protocol: str, folder: Path, tell: Tell = lambda report: None
) -> Aligned:
    """Find the common rows of the parties' own files, and store each party's row positions.

    Args:
        experiment: experiment whose parties have separate files; the settings `data.id` and
            `data.id_rules` are used.
        protocol: spec of an alignment protocol; see `vfl.datasets.alignment.protocols.PROTOCOLS`.
        folder: folder that gets one subfolder per party.
        tell: callback that receives the number of bytes sent so far.

    Raises:
        ConfigError: a party has no separate file.
        MisalignedError: ids are missing or repeated, or very few ids are common; the error contains
            only counts.
        DataError, SpecError: see `vfl.datasets` and `Registry.make`.
    """
    rules, place = experiment.data.id_rules, scratch()
    ids = {
        party: OwnIds.read(own.source, own.id_column, own.form, f"party '{party}'", rules, place)
        for party, own in _tables(experiment).items()
    }
    rows, label = experiment.data.missing_rows, experiment.label.party
    agreed = Agreed(UNNAMED_ALIGNMENT, tuple(ids), rules, protocol, rows)
    if kept := _still_good(ids, agreed, folder):
        common = next(iter(kept.values())).common
        return _aligned(common, ids, {party: one.version for party, one in kept.items()}, None)
    owns = [Own(party, own.keys, _ANY, place) for party, own in ids.items()]
    progress = AlignmentProgress(tell)

    def observe(sender: str, to: str, payload: Message) -> None:
        progress.add(len(payload))

    if rows == "intersection":
        positions, traffic = play(protocol, owns, label, observe)
        found = {party: Found(own) for party, own in positions.items()}
    else:
        parts = [PROTOCOLS.make(protocol) for _ in owns]
        roles = {
            own.party: role_of(part, own, tuple(ids), label, rows)
            for part, own in zip(parts, owns, strict=True)
        }
        found, traffic = run_roles(roles, observe)
    one = found[label]
    common = len(one.positions) if one.complete is None else one.complete
    if not common or common < MIN_OVERLAP * min(map(len, ids.values())):
        raise MisalignedError(
            f"{'only ' if common else ''}{spaced(common) if common else 'no'} ids are common",
            where=f"id rules {rules}",
            got=", ".join(f"'{party}': {spaced(len(own))} ids" for party, own in ids.items()),
            want="ids that the rules make equal at all parties",
            fix="vfl align FILE --preview counts how many common ids each rule would add",
        )
    session, versions = secrets.token_hex(16), {}
    for party, its in found.items():
        versions[party] = last_version(folder / party) + 1
        made = Alignment.of(party, agreed, versions[party], session, ids[party], its)
        made.keep(folder / party)
    return _aligned(common, ids, versions, traffic)


def preview(experiment: Experiment, protocol: str, rules: str) -> list[Gain]:
    """Return, for each id rule, how many common ids it adds; the protocol computes the counts.

    Raises:
        ConfigError, MisalignedError, DataError, SpecError: see `align`.
    """
    ids = {
        party: read_own_ids(own.source, own.id_column, own.form, f"party '{party}'")
        for party, own in _tables(experiment).items()
    }
    gains = list[Gain]()
    for spec in prefixes(rules):
        keys = {party: normalise(own, spec) for party, own in ids.items()}
        owns = [Own(party, list(dict.fromkeys(each)), _ANY) for party, each in keys.items()]
        found, _ = play(protocol, owns, experiment.label.party)
        common = len(found[owns[0].party])
        plain = {party: normalise(own, "plain") for party, own in ids.items()}
        gains.append(
            Gain(
                rules=spec,
                common=common,
                gained=common - gains[-1].common if gains else common,
                changed={
                    party: sum(a != b for a, b in zip(each, plain[party], strict=True))
                    for party, each in keys.items()
                },
                repeated={party: len(each) - len(set(each)) for party, each in keys.items()},
            )
        )
    return gains


def _tables(experiment: Experiment) -> dict[str, OwnTable]:
    """Return each party's table; feature parties in the merger's order, then label parties."""
    check_one_process(experiment)
    tables = own_tables(experiment)
    if not tables:
        raise ConfigError(
            "only parties with separate files can be aligned",
            fix='source = "FILE" in the [parties.NAME] of each',
        )
    return tables


def _still_good(ids: Mapping[str, OwnIds], agreed: Agreed, folder: Path) -> dict[str, Alignment]:
    """Return each party's last alignment, if these belong together and no ids have changed."""
    try:
        kept = {party: Alignment.newest(folder / party, party) for party in ids}
    except (MissingDataError, RunFolderError):
        return {}
    same = len({one.key for one in kept.values()}) == 1
    good = all(one.agreed == agreed and one.holds(ids[party]) for party, one in kept.items())
    return kept if same and good else {}


def _aligned(
    common: int,
    ids: Mapping[str, OwnIds],
    versions: Mapping[str, int],
    traffic: Traffic | None,
) -> Aligned:
    sizes = {party: len(own) for party, own in ids.items()}
    return Aligned(common, sizes, traffic is None, versions, traffic)
