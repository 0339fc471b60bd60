"""Three parties with rows of their own, on the platform's own SuperLink and SuperNodes."""

from contextlib import ExitStack

import pandas as pd
import pytest
from ports import free_ports
from sklearn.datasets import load_digits

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.core.errors import PeerError
from vfl.core.storage import read_json, write_bytes
from vfl.federation import deployment
from vfl.federation.project import write_project
from vfl.horizontal.settings import HorizontalSettings
from vfl.horizontal.study import train_project

pytestmark = pytest.mark.net
NORTH, SOUTH, WEST, OFFICE = "north", "south", "west", "office"


@pytest.fixture(scope="module")
def office(tmp_path_factory):
    """The office's folder of a project with three branches, everything running."""
    folder = tmp_path_factory.mktemp("branches") / "project"
    superlink, stream, *ports = free_ports(5)
    address = f"127.0.0.1:{superlink}"
    experiment = Experiment.model_validate(
        {
            "name": "branches",
            "parties": {NORTH: {}, SOUTH: {}, WEST: {}},
            "label": {"party": OFFICE, "column": "digit"},
            "federation": {
                "superlink": address,
                "stream_port": stream,
                "join_timeout_s": 120.0,
            },
        }
    )
    table = {"source": "digits.parquet", "id": "id", "label": "digit"}
    parties = {OFFICE: PartyFile(party=OFFICE, data=table)}
    for name, port in zip((NORTH, SOUTH, WEST), ports, strict=True):
        parties[name] = PartyFile.model_validate(
            {
                "party": name,
                "data": table,
                "node": {"superlink": address, "api_port": port},
                "consent": {"modes": ["horizontal"], "max_epsilon": 20.0},
            }
        )
    label = write_project(folder, experiment, parties, "127.0.0.1")
    digits = load_digits()
    rows = pd.DataFrame(digits.data, columns=[f"p{pixel:02}" for pixel in range(64)])
    rows = rows.assign(digit=digits.target, id=[f"r{row:04}" for row in range(len(rows))])
    owners = {"label": rows[::4], NORTH: rows[1::4], SOUTH: rows[2::4], WEST: rows[3::4]}
    for name, own in owners.items():
        write_bytes(folder / name / "digits.parquet", own.to_parquet(index=False))
    with ExitStack() as services:
        services.callback(deployment.start_superlink(label).stop)
        deployment.register_nodes(label)
        for name in (NORTH, SOUTH, WEST):
            file = folder / name / "party.toml"
            service = deployment.start_supernode(read_party_file(file), file)
            services.callback(service.stop)
        yield label


def settings(**changed):
    return HorizontalSettings(
        **{
            "name": "branches",
            "model": "mlp:hidden=none",
            "classes": [str(digit) for digit in range(10)],
            "sampled": 3,
            "clients": 3,
            "rounds": 3,
            "local_steps": 20,
            "batch_size": 128,
            "learning_rate": 0.5,
            "epsilon": 12.0,
            "noise": "steps",
            "clip": "fixed",
            "sensitivity": "rigorous",
        }
        | changed
    )


def test_three_branches_train_one_network_with_noise_of_their_own(office):
    said = []
    record = read_json(train_project(settings(), office, said.append) / "horizontal.json")
    # every party draws its noise and rows from fresh secrets: 20 simulations reach .900 to .913
    assert record["accuracy"] > 0.88, record["accuracy"]
    assert record["privacy"][0]["epsilon"] <= 12.0
    assert any("3 clients: north, south, west" in line for line in said)
    spent = sorted(office.path.parent.glob("*/store/sessions/horizontal/*.json"))
    assert [path.parents[3].name for path in spent] == [NORTH, SOUTH, WEST]
    assert {read_json(path)["rounds"] for path in spent} == {3}


def test_a_branch_that_gives_no_more_epsilon_ends_the_training(office):
    with pytest.raises(PeerError, match="does not consent to spend more"):
        train_project(settings(epsilon=15.0), office)
