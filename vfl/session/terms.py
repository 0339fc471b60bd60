"""The terms of a session: all settings on which the parties agree; no data and no addresses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vfl import models
from vfl.config import Experiment, TrainSettings
from vfl.config.experiment import (
    AlignmentName,
    DPSettings,
    LabelSettings,
    MiddleSettings,
    MissingRows,
    PartyName,
    Purpose,
    RunName,
    Share,
    Spec,
)
from vfl.config.toml import Settings
from vfl.config.validate import UNNAMED_ALIGNMENT, of_agreed
from vfl.core.errors import ConfigError
from vfl.core.seeds import Secret
from vfl.core.version import VERSION
from vfl.datasets import Split
from vfl.datasets.split import split_rows
from vfl.models.optimizers import NO_SCHEDULE

#: Prefixes of names that a user submits with an evaluation or a prediction: `BESIDE` precedes the
#: name of another run, `EXPLAIN` the name of a party that shall learn the contributions of its
#: columns.
BESIDE, EXPLAIN = "beside=", "explain="
Mode = Literal["train", "evaluate", "predict", "serve", "align"]
#: Settings of [train] that the digest omits if they have this value, so that the digest equals that
#: of earlier versions of vfl, which did not have these settings.
_SINCE = {
    "warm_start": None, "warmup_steps": 0, "clip_norm": 0, "measure": "loss", "local_steps": 1,
    "local_angle": 0,
}  # fmt: skip
_NAMED = 4
SHORT = 80  #: a longer setting is replaced by a digest


class PartyTerms(Settings):
    """Terms about one party with columns: width of its cut, bottom model, and branches."""

    width: int = Field(ge=1, le=65536)
    bottom: Spec
    branches: int = Field(default=1, ge=1, le=10_000)


class TaskTerms(Settings):
    """Terms about a further label party; the name of its label column is private, so it is no term.

    Attributes:
        weight: factor for this party's gradients at the feature parties; the factor of the leading
            label party is 1.
        task, top, loss, class_weight, hits, calibration: see `LabelSettings`.
    """

    weight: float = Field(gt=0, le=1e6)
    task: Literal["classification", "regression"] = "classification"
    top: Spec = "mlp:hidden=64"
    loss: Spec | None = None
    class_weight: Literal["none", "balanced"] = "none"
    hits: int = Field(default=0, ge=0, le=1_000_000)
    calibration: Literal["none", "isotonic", "platt"] = "none"

    def settings_of(self, party: str) -> LabelSettings:
        """Return these terms as label settings of the given party."""
        return LabelSettings(party=party, **self.model_dump(exclude={"weight"}))


class DPTerms(DPSettings):
    """Terms about DP-SGD.

    Attributes:
        key: key from which the rows of each batch are drawn, 32 bytes as hexadecimal digits,
            derived from the label party's secret. The key determines which rows are in each batch.
            The parties of the session receive it in the session message, which the SuperLink's
            operator can read, and store it with their parts of the run. No card contains the key.
        label_trains: whether the label party trains weights; if it does not (top "identity", and no
            columns of its own), only the other parties add noise.
    """

    label_trains: bool = True
    key: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", repr=False)


class Terms(Settings):
    """Terms on which the label party and all other parties agree before the first exchange.

    Attributes:
        mode: train, evaluate, predict or serve; with "serve", rows are predicted when clients query
            them. The mode "align" occurs only in `AlignTerms`.
        run: name of the run, under which each party stores its weights.
        parties: terms about all parties with columns, in the order in which their cuts are merged;
            the label party is included if it has columns.
        dp: settings of DP-SGD at every party; None without DP-SGD.
        alignment: name of the private alignment that determines the rows and their order at each
            party; None if the parties join rows by ids.
        middle: terms about the middle party, which has the model between bottom models and top
            model; None without a middle party.
        tasks: terms about further label parties, by party.
        missing_rows: "token" if the session may use rows that some feature parties lack.
        purpose: purpose of the session as text; empty if the experiment names none.
        serving: in a service, the label parties among `tasks` that answer their own clients.
        beside: in an evaluation, names of other runs to compare; rows on which any of the compared
            runs was trained or validated are omitted.
        explained: in a prediction or an evaluation, the parties to which the label party discloses
            the Shapley values of their columns.
        version: version of vfl at the label party.
    """

    held_to: ClassVar = (of_agreed,)

    mode: Mode
    run: RunName
    seed: int = Field(ge=0, lt=2**31)
    codec: Spec
    defense: Spec
    merge: Spec
    secure: Spec
    parties: dict[PartyName, PartyTerms] = Field(min_length=1, max_length=64)
    label_party: PartyName
    validation: Share
    test: Share
    train: TrainSettings
    dp: DPTerms | None
    alignment: AlignmentName | None
    middle: MiddleSettings | None
    tasks: dict[PartyName, TaskTerms] = Field(max_length=16)
    missing_rows: MissingRows
    serving: tuple[PartyName, ...] = Field(max_length=16)
    beside: tuple[RunName, ...] = Field(max_length=16)
    explained: tuple[PartyName, ...] = Field(max_length=64)
    purpose: Purpose
    version: str = Field(default=VERSION, max_length=32, pattern=r"^[ -~]+$")

    @model_validator(mode="after")
    def _consistent(self) -> Terms:
        """Check settings that occur in no experiment file: `serving`, `beside`, `explained`."""
        if not set(self.serving) <= set(self.tasks) or len({*self.serving}) < len(self.serving):
            raise ValueError("only further label parties can serve their tasks, each of them once")
        if self.serving and self.mode != "serve":
            raise ValueError("only a session of mode serve has serving parties")
        if self.beside and self.mode != "evaluate":
            raise ValueError("only an evaluation can compare several runs")
        if self.explained and self.mode not in ("evaluate", "predict"):
            raise ValueError("only evaluations and predictions can explain columns")
        if not set(self.explained) <= set(self.parties):
            raise ValueError("columns can be explained only to parties that have columns")
        return self

    @classmethod
    def of(cls, experiment: Experiment, mode: Mode, run: str) -> Terms:
        """Return the terms with the public part of an experiment."""
        same = ["seed", "codec", "defense", "merge", "secure", "label_party", "validation", "train"]
        same += ["middle", "purpose"]
        return cls(
            mode=mode,
            run=run,
            parties={
                name: PartyTerms(width=party.width, bottom=party.bottom, branches=party.branches)
                for name, party in experiment.parties.items()
            },
            test=experiment.data.test,
            tasks={
                task.party: TaskTerms(**task.model_dump(exclude={"party", "column", "source"}))
                for task in experiment.tasks or ()
            },
            dp=None
            if (dp := experiment.dp) is None
            else DPTerms(
                label_trains=experiment.label.top != "identity"
                or experiment.label_party in experiment.parties,
                **dp.model_dump(),
            ),
            alignment=None if experiment.has_own_tables else experiment.data.alignment,
            missing_rows=experiment.data.missing_rows,
            serving=(),
            beside=(),
            explained=(),
            **{name: getattr(experiment, name) for name in same},
        )

    @property
    def feature_parties(self) -> list[str]:
        """Names of the parties that send cuts, in merge order."""
        return [name for name in self.parties if name != self.label_party]

    @property
    def takers(self) -> list[str]:
        """Names of the parties that receive encrypted cuts through the label party.

        In a service, these are the further label parties in `serving`.
        """
        if self.middle is not None:
            return [self.middle.party]
        return list(self.serving if self.mode == "serve" else self.tasks)

    def split_of(self, rows: int) -> Split:
        """Return the split of this many rows, which every party computes in the same way.

        Raises:
            BadOptionError, TooFewRowsError: see `split_rows`.
        """
        if self.mode in ("predict", "serve"):
            return Split(test=np.arange(rows, dtype=np.int64))
        how = (self.seed, self.validation, self.test, None, self.train.split_rows)
        return split_rows(rows, *how)

    @property
    def masks_cuts(self) -> bool:
        """Whether the session's secure mode hides single cuts; each mode but "none" does."""
        return self.secure != "none"

    @property
    def merged_width(self) -> int:
        """Width of the merged cuts, which are the input of the top model.

        Raises:
            SpecError: the merger does not exist, or cannot merge cuts with these widths.
        """
        return models.make_merger(self.merge).width(self.widths)

    @property
    def merged_blocks(self) -> list[int]:
        """Return the widths of the blocks of the merged cuts, one block per party.

        See `Merger.blocks`.
        """
        return models.make_merger(self.merge).blocks(self.widths)

    @property
    def widths(self) -> list[int]:
        """Widths of all cuts, in merge order."""
        return [party.width for party in self.parties.values()]

    def at_label(self, party: str | None = None) -> Terms:
        """Return the terms as one label party sees them, with only the parties that send to it.

        The leading label party receives only from the middle party, if there is one; a further
        label party receives from the feature parties. The middle party waits for each gradient
        before it continues, so at most one of its outputs is in flight.

        Args:
            party: name of a further label party, one of `tasks`; None for the leading label party.
        """
        middle = self.middle
        if party is not None:
            parties = {name: self.parties[name] for name in self.feature_parties}
            alone = {"label_party": party, "parties": parties, "tasks": {}, "serving": ()}
            return self.model_copy(update=alone)
        if middle is None:
            return self
        changed = {
            "parties": {middle.party: PartyTerms(width=middle.width, bottom=middle.model)},
            "merge": "concat",
            "codec": middle.codec,
            "train": self.train.model_copy(update={"in_flight": 1}),
            "middle": None,
        }
        return self.model_copy(update=changed)

    def served_with(self, tasks: Sequence[str]) -> Terms:
        """Return the terms of a service in which further label parties also serve their own tasks.

        Raises:
            ConfigError: one of the parties is not a further label party of this run.
        """
        if unknown := [name for name in tasks if name not in self.tasks]:
            raise ConfigError(
                f"party '{unknown[0]}' has no task of its own in this run",
                where="vfl serve --task",
                want=", ".join(self.tasks) or "a run with [[tasks]]",
            )
        return self.model_copy(update={"serving": tuple(dict.fromkeys(tasks))})

    def asked_with(self, told: Sequence[str]) -> Terms:
        """Return these terms with names that a user requests for an evaluation or a prediction.

        Args:
            told: the requested names, each with the prefix `BESIDE` or `EXPLAIN`.

        Raises:
            ConfigError: a party to which columns shall be explained has no columns.
        """
        names = {
            "beside": [one.removeprefix(BESIDE) for one in told if one.startswith(BESIDE)],
            "explained": [one.removeprefix(EXPLAIN) for one in told if one.startswith(EXPLAIN)],
        }
        if unknown := [name for name in names["explained"] if name not in self.parties]:
            raise ConfigError(
                f"party '{unknown[0]}' has no columns in this run",
                where="--explain",
                want=f"one of {', '.join(self.parties)}",
            )
        return Terms.model_validate(self.model_dump() | names)

    def keyed(self, secret: Secret) -> Terms:
        """Return these terms with a key from which the rows of batches are drawn.

        The key is derived from the label party's secret and the run's name.
        """
        if self.dp is None:
            return self
        key = secret.key("sampling", self.run).hex()
        return self.model_copy(update={"dp": self.dp.model_copy(update={"key": key})})

    def public(self) -> dict[str, Any]:
        """Return the terms for a run card, without values that only the parties may know."""
        return self.model_dump(mode="json", exclude={"dp": {"key"}} if self.dp else None)

    def digest(self, *without: str) -> str:
        """Return the SHA-256 of the terms, which is equal at parties with equal terms.

        Args:
            without: names of settings that the digest leaves out.
        """
        left_out: dict[str, Any] = dict.fromkeys(without, True)
        # so that the digest equals the one of vfl versions that did not have [dp]
        left_out |= {} if self.dp else {"dp": True}
        left_out |= {"missing_rows": True} if self.missing_rows == "intersection" else {}
        left_out |= {} if self.serving else {"serving": True}
        left_out |= {} if self.beside else {"beside": True}
        left_out |= {} if self.explained else {"explained": True}
        left_out |= {} if self.purpose else {"purpose": True}
        unsaid: set[str] = set()  # as above, for later settings
        if self.train.shuffle == "full":
            unsaid |= {"shuffle", "block_rows", "window_blocks"}
        if self.train.schedule == NO_SCHEDULE:
            unsaid |= {"schedule"}
        unsaid |= {one for one, usual in _SINCE.items() if getattr(self.train, one) == usual}
        if unsaid:
            left_out.setdefault("train", unsaid)
        if all(party.branches == 1 for party in self.parties.values()):
            left_out.setdefault("parties", {name: {"branches"} for name in self.parties})
        if plain := [name for name, task in self.tasks.items() if task.loss is None]:
            left_out.setdefault("tasks", {name: {"loss"} for name in plain})
        return hashlib.sha256(self.model_dump_json(exclude=left_out).encode()).hexdigest()

    def settings(self) -> dict[str, str]:
        """Return each setting as a short text for reports.

        A long setting is replaced by a digest.
        """
        content = self.model_dump(mode="json")
        train = content.pop("train")
        flat = content | {f"train.{name}": value for name, value in train.items()}
        if self.dp is None:
            del flat["dp"]
        else:
            del flat["dp"]["key"]
        return {name: _short(value) for name, value in flat.items()}


class AlignTerms(Terms):
    """Terms of an alignment, which has no settings for training.

    Attributes:
        rules, protocol, table: see `DataSettings.id_rules` and `AlignSettings`.
        alignment: name of the new alignment.
    """

    mode: Literal["align"] = "align"
    rules: Spec
    protocol: Spec
    alignment: AlignmentName
    table: Literal["source", "predict"]

    @classmethod
    def asked(cls, experiment: Experiment, run: str) -> AlignTerms:
        """Return the terms with those settings of an experiment that an alignment needs.

        All label parties of the experiment get the same terms.
        """
        further = (task.party for task in experiment.tasks or ())
        everybody = [*experiment.parties, *further]
        parties = {name: PartyTerms(width=1, bottom="linear") for name in everybody}
        data, align = experiment.data, experiment.align
        return cls(
            run=run,
            seed=experiment.seed,
            codec="none",
            defense="none",
            merge="concat",
            secure="none",
            parties=parties,
            label_party=experiment.label.party,
            validation=0,
            test=0,
            middle=None,
            tasks={},
            train=TrainSettings(),
            dp=None,
            rules=data.id_rules,
            protocol=align.protocol,
            alignment=data.alignment or UNNAMED_ALIGNMENT,
            table=align.table,
            missing_rows=data.missing_rows,
            serving=(),
            beside=(),
            explained=(),
            purpose=experiment.purpose,
        )

    @property
    def everybody(self) -> tuple[str, ...]:
        """Names of all parties with ids, in an order that is the same at every party."""
        return (*self.feature_parties, self.label_party)


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, str]:
    """Return the differing settings as texts: the other party's, then this party's."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""

    def told(settings: Mapping[str, str]) -> str:
        return (
            ", ".join(f"{name} {settings.get(name, 'not set')}" for name in names[:_NAMED]) + more
        )

    return told(theirs), told(ours)


def _short(value: Any) -> str:
    text = json.dumps(value).strip('"')  # printable ASCII only, whatever a setting contains
    if len(text) <= SHORT:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]}..."
