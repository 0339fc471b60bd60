from dataclasses import replace

import numpy as np
import pytest

from vfl.config import Experiment
from vfl.datasets import load_bundled
from vfl.datasets.party import digest_of
from vfl.session import Terms


@pytest.fixture(scope="session")
def experiment():
    return Experiment.model_validate(
        {
            "name": "trial",
            "seed": 5,
            "codec": "topk:k=3",
            "parties": {"bank": {"width": 8, "bottom": "mlp:hidden=4"}, "shop": {"width": 6}},
            "label": {"party": "lender"},
            "train": {"epochs": 2, "batch_rows": 50},
        }
    )


@pytest.fixture
def terms(experiment):
    return Terms.of(experiment, "train", "trial-1")


@pytest.fixture(scope="session")
def data():
    """Three parties over the same 200 pictures of digits."""
    return load_bundled("digits", ["bank", "shop"], 5, "lender", flatten=True, limit=200)


@pytest.fixture
def with_ids():
    """A party's data as if its rows had these ids."""
    return lambda data, ids: replace(data, ids_digest=digest_of(np.array(ids)))
