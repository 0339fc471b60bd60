"""Cases: attackers' data from a trained victim or a recorded training, with the true values.

Each function builds a `Case` from the experiment, the aligned rows, and either recorded messages or
trained weights. A case consists of the attacker's view under a threat model, and of the true
values. Each kind of attacker has a file:

    feature_party   labels, from the party's own bottom, or from recorded gradients
    label_party     columns or an attribute, from a feature party's cuts
    outsider        membership in the training, from predictions
    adversary       knowledge of an active adversary before the training

`recorded` reads messages, and `rows` draws leaked rows.
"""

from __future__ import annotations

from vfl.attacks.cases.adversary import begin, held
from vfl.attacks.cases.feature_party import (
    INFERENCE,
    TRAINING,
    Part,
    Setting,
    Victim,
    training_case,
)
from vfl.attacks.cases.label_party import (
    ATTRIBUTE,
    OWN_COLUMNS,
    RECALLING,
    RECEIVING,
    SERVING,
    SUMMING,
    TrainedParts,
    attribute_case,
    recalled_case,
    received_case,
    require_column,
    served_case,
    summed_case,
)
from vfl.attacks.cases.outsider import QUERYING, Queried, queried_case
from vfl.attacks.cases.recorded import Frames, decoded, last_cuts, recorded_exchanges
from vfl.attacks.cases.rows import (
    bottom_recipe,
    codes_of,
    draw_columns,
    draw_leak,
    labels_of,
    top_recipe,
)

__all__ = [
    "ATTRIBUTE",
    "INFERENCE",
    "OWN_COLUMNS",
    "QUERYING",
    "RECALLING",
    "RECEIVING",
    "SERVING",
    "SUMMING",
    "TRAINING",
    "Frames",
    "Part",
    "Queried",
    "Setting",
    "TrainedParts",
    "Victim",
    "attribute_case",
    "begin",
    "bottom_recipe",
    "codes_of",
    "decoded",
    "draw_columns",
    "draw_leak",
    "held",
    "labels_of",
    "last_cuts",
    "queried_case",
    "recalled_case",
    "received_case",
    "recorded_exchanges",
    "require_column",
    "served_case",
    "summed_case",
    "top_recipe",
    "training_case",
]
