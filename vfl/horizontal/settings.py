"""Settings of a horizontal training: clients have different rows of the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from vfl.config.experiment import PARTY_NAME, Spec
from vfl.config.toml import Settings, check, read_toml

Clip = Literal["none", "fixed", "percentile", "quantile"]
Noise = Literal["none", "client", "steps", "server"]


class HorizontalSettings(Settings):
    """Settings of one training: its clients, its local steps and its privacy.

    Attributes:
        name: name of the study (all trainings of the file); the names of its runs begin with it.
        seed: public seed, from which all draws except noise and sampling by a secret are derived.
        source: name of a data set; the clients of a simulation divide its training rows evenly.
        rows: number of rows of the data set to use, counted from the first row.
        classes: names of all classes in the parties' own tables, in the same order for all parties;
            used only in a project.
        model: spec of the network, written like the spec of a bottom model; the network has one
            output per class.
        clients: number of clients in a simulation; in a project, every feature party is a client.
        sampled: number of clients in a round; if the server adds noise, each client is drawn
            independently with probability sampled / clients.
        rounds: number of rounds; at the end of each round, the server averages the clients'
            updates.
        local_steps: number of gradient steps of a client in a round (E).
        batch_size: number of rows in a local step; with noise in every step, the expected number of
            rows.
        learning_rate: learning rate of a client's local steps, which are plain SGD.
        clip: rule for the norm to which gradients or updates are clipped. The rule "fixed" clips to
            `clip_norm`. The rule "percentile" clips to a percentile of the client's own gradient
            norms so far; this norm is not private, and its disclosure is not counted in the budget.
            The rule "quantile" moves the norm towards the same percentile in each round or step, by
            a noisy count whose privacy cost the budget includes.
        percentile: percentage of gradient or update norms that should stay unclipped.
        clip_norm: clip norm of the rule "fixed", and initial clip norm of the rule "quantile".
        noise: "client" adds noise to a client's upload (named ADP_FL in its paper), "steps" adds
            noise to each of the client's local steps (DP-SGD). "client" and "steps" both clip the
            gradient of each row, and protect a single row from all other parties. "server" clips
            the whole update of a client and adds noise at the server; this protects the client from
            all parties except the server.
        epsilon, delta: privacy budget (epsilon and delta) of the whole training.
        sensitivity: kind of the bound of an update's sensitivity, for noise = "client". "paper"
            assumes that a changed record changes only its own gradient; this is proven only for one
            local step. "rigorous" assumes the worst case for several local steps.
        layers: fraction of the network's layers that a client uploads: the layers that changed most
            in the round (Layer-Based FL).
        test_every: number of rounds from one test to the next.
    """

    usual_ranges: ClassVar = {
        "rounds": (1, 10_000),
        "learning_rate": (0, 10),
        "clip_norm": (1e-4, 1e4),
        "epsilon": (1e-3, 1e4),
        "delta": (1e-12, 0.01),
    }
    limited_by: ClassVar = {"batch_size": "max_batch_size"}

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = (
        "horizontal"
    )
    seed: int = Field(default=0, ge=0, lt=2**31)
    source: str = "fashion_mnist"
    rows: int | None = Field(default=None, ge=1, le=1_000_000_000)
    classes: tuple[str, ...] | None = Field(default=None, min_length=2, max_length=10_000)
    model: Spec = "mlp:hidden=256"
    clients: int = Field(default=50, ge=1, le=10_000)
    sampled: int = Field(default=10, ge=1, le=10_000)
    rounds: int = Field(default=50, ge=1, le=100_000)
    local_steps: int = Field(default=5, ge=1, le=100_000)
    batch_size: int = Field(default=256, ge=1, le=1_000_000)
    learning_rate: float = Field(default=0.1, gt=0, le=1e6)
    clip: Clip = "percentile"
    percentile: float = Field(default=50, ge=0, le=100)
    clip_norm: float = Field(default=1.0, ge=2**-60, le=1e6)
    noise: Noise = "client"
    epsilon: float | None = Field(default=None, gt=0, le=10_000)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    sensitivity: Literal["paper", "rigorous"] = "paper"
    layers: float = Field(default=1.0, gt=0, le=1)
    test_every: int = Field(default=10, ge=1, le=100_000)

    @model_validator(mode="after")
    def _consistent(self) -> HorizontalSettings:
        if self.sampled > self.clients:
            raise ValueError(f"sampled = {self.sampled} is above clients = {self.clients}")
        if mistake := self._dp_mistake():
            raise ValueError(mistake)
        return self

    def _dp_mistake(self) -> str | None:
        """Return the reason why privacy settings contradict each other; None if they do not."""
        if self.noise == "none":
            if self.epsilon is not None:
                return (
                    "noise = 'none' guarantees no epsilon: remove epsilon, or choose another noise"
                )
            return None
        if self.epsilon is None:
            return f"noise = '{self.noise}' needs epsilon, the budget of the whole training"
        if self.clip == "none":
            return (
                f"noise = '{self.noise}' needs a clip: without clipping, noise gives no guarantee"
            )
        private = self.noise != "client" or self.sensitivity == "rigorous"
        if self.clip == "percentile" and private:
            which = "sensitivity = 'rigorous'" if self.noise == "client" else f"'{self.noise}'"
            return (
                f"clip = 'percentile' uses norms without protection, but {which} promises "
                "an epsilon for all steps: use clip = 'quantile', its private form, or 'fixed'"
            )
        if self.clip == "quantile" and self.sensitivity == "paper" and self.noise == "client":
            return (
                "the budget includes clip = 'quantile', "
                "so noise = 'client' needs sensitivity = 'rigorous'"
            )
        if self.clip == "quantile" and not 0 < self.percentile < 100:
            return "clip = 'quantile' needs a percentile above 0 and below 100"
        if self.layers < 1 and self.noise in ("server", "steps"):
            return f"layers below 1 need noise = 'none' or 'client', got '{self.noise}'"
        return None


class HorizontalStudy(Settings):
    """Settings file of `vfl horizontal`, for one training or many.

    Attributes:
        horizontal: settings that all trainings of the file share.
        variants: settings in which a variant differs; the key is the variant's name.
        sweep: lists of values; the key is a setting's name, and vfl trains every combination of the
            values with each variant.
    """

    horizontal: HorizontalSettings = HorizontalSettings(epsilon=1.0)
    variants: dict[Annotated[str, StringConstraints(pattern=PARTY_NAME)], dict[str, Any]] = Field(
        default_factory=dict, max_length=64
    )
    sweep: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=8)

    def trainings(self) -> list[tuple[str, HorizontalSettings]]:
        """Return title (variant and swept values) and settings of every training of the file.

        Raises:
            ConfigError: a variant or a sweep names an unknown setting, or contradicts other
                settings.
        """
        base = self.horizontal.model_dump(mode="json", exclude_none=True)
        combinations: list[dict[str, Any]] = [{}]
        for name, values in self.sweep.items():
            combinations = [one | {name: value} for one in combinations for value in values]
        found = []
        for variant, changed in (self.variants or {"": {}}).items():
            for combination in combinations:
                title = " ".join([variant, *(f"{k}={v}" for k, v in combination.items())]).strip()
                content = base | changed | combination
                for name, value in list(content.items()):
                    if value == "unset":  # TOML has no value for None
                        del content[name]
                found.append((title, check(content, HorizontalSettings, where=title)))
        return found


def read_horizontal(path: Path, overrides: Sequence[str] = ()) -> HorizontalStudy:
    """Read a settings file of `vfl horizontal`.

    Raises:
        ConfigError: see `vfl.config.toml.read_toml`.
    """
    return read_toml(path, HorizontalStudy, overrides)
