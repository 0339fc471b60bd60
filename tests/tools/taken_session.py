"""Sessions over real streams in which a third party takes the cuts: a middle, or another label."""

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession
from stand_in_flower import Flower

from vfl.config import Experiment
from vfl.core.errors import VFLError
from vfl.core.seeds import Secret
from vfl.session.store.identity import Identity
from vfl.session.store.party_folder import INJECTED_SECRET
from vfl.training.run import load_data, session_of

FEATURES, ROWS, WIDTH = ("bank", "shop"), 200, 4
IDS = [f"Zq8id{row:03}" for row in range(ROWS)]
SHARED = {
    "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=8"} for name in FEATURES},
    "train": {"epochs": 2, "batch_size": 32, "checkpoint_every": 4},
    "federation": {"step_timeout_s": 60.0, "rejoin_window_s": 1.0, "join_timeout_s": 90.0},
}


class TakenSession(PlayedSession):
    """Two feature parties, a lender that leads, and a third party that takes cuts as well.

    Args:
        folder: folder of the parties' folders.
        content: settings of the experiment, beside `SHARED`.
        third: party that takes cuts.
        words: settings of the third party's file.
        tables: columns by party, of those with a table.
        consent: consent settings of the feature parties.
    """

    def __init__(self, folder, content, third, words, tables, consent):
        everybody = (*FEATURES, third)
        super().__init__(folder, Flower(everybody, tells=True), SHARED | content)
        self.third = third
        identities = {name: Identity.fresh() for name in everybody}
        for name in (*everybody, "lender"):
            own = folder / name
            own.mkdir(exist_ok=True)
            Secret.of_simulation(0, name).keep_at(own / "store" / INJECTED_SECRET)
            for other in identities.keys() - {name} if name in identities else ():
                identities[name].keep_at(own / "identity.key")
                identities[name].public.keep_at(folder / other / "peers" / f"{name}.pub")
            text = f'party = "{name}"\n'
            if name in tables:
                pd.DataFrame({"id": IDS, **tables[name]}).to_csv(own / "data.csv", index=False)
                text += '[data]\nsource = "data.csv"\nid = "id"\n'
            lead = f'label = "{next(iter(tables[name]))}"\n' if name == "lender" else ""
            more = {third: words, "lender": lead}
            self.write(name, text + more.get(name, consent))

    def joined(self, **changes):
        """The experiment of one process over the same parties' files."""
        content = self._content | changes
        file = {name: str(self.folder / name / "party.toml") for name in self.flower.files}
        column = self.flower.files["lender"].table.label
        content |= {
            "data": {"source": file["lender"]},
            "label": content["label"] | {"column": column},
            "parties": {
                name: own | {"source": file[name]} for name, own in content["parties"].items()
            },
        }
        for task in content.get("tasks", ()):
            column = self.flower.files[task["party"]].table.label
            content["tasks"] = [task | {"column": column, "source": file[task["party"]]}]
        return Experiment.model_validate(content)

    def alone(self, **changes):
        """The same training in one process."""
        experiment = self.joined(**changes)
        return session_of(experiment, load_data(experiment), "train").run()

    def refuses(self, name, text, match):
        """Whether a party that consents to something else takes no part, and why is told."""
        path = self.folder / name / "party.toml"
        self.write(name, path.read_text().partition("[consent]")[0] + text)
        with pytest.raises(VFLError, match="stopped with V403"):
            self.play("train")
        return any(match in str(failure) for failure in self.flower.failures)


def with_middle(folder):
    """A session with a middle; the label's bytes are of numbers that nothing else is near."""
    draw = np.random.default_rng(0)
    tables = {name: {"a": draw.normal(size=ROWS), "b": draw.normal(size=ROWS)} for name in FEATURES}
    tables["lender"] = {"cost": 71_000.0 + 1000 * draw.normal(size=ROWS)}
    content = {
        "name": "between",
        "label": {"party": "lender", "top": "linear", "task": "regression"},
        "middle": {"party": "compute", "width": 6, "model": "mlp:hidden=8,last=relu"},
    }
    consent = '[consent]\nmiddle = ["compute"]\n'
    return TakenSession(folder, content, "compute", 'role = "middle"\n', tables, consent)


def with_insurer(folder):
    """A session with a further label party, whose numbers nothing else is near."""
    draw = np.random.default_rng(0)
    cells = {name: draw.normal(size=(ROWS, 2)) for name in FEATURES}
    tables = {name: {"a": own[:, 0], "b": own[:, 1]} for name, own in cells.items()}
    tables["lender"] = {"ill": np.where(cells["bank"][:, 0] + cells["shop"][:, 0] > 0, "y", "n")}
    tables["insurer"] = {"cost": 71_000.0 + 1000 * cells["bank"][:, 1] - 500 * cells["shop"][:, 1]}
    task = {"party": "insurer", "task": "regression", "top": "mlp:hidden=7", "weight": 0.3}
    content = {"name": "shared", "label": {"party": "lender", "top": "linear"}, "tasks": [task]}
    consent = '[consent]\nlabel_parties = ["insurer"]\n'
    return TakenSession(folder, content, "insurer", 'label = "cost"\n', tables, consent)
