"""Attack a training: one party infers labels from gradients, another pictures from cuts.

Set the constant SOURCE to "mnist", and CODEC to "topk:k=3" or "randtopk:k=3,alpha=0.1", to see how
they change the attacks.
"""

import torch

from vfl.attacks import make
from vfl.attacks.cases import TrainedParts, decoded, received_case, training_case
from vfl.attacks.scoring import attempt_all
from vfl.config import Experiment
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

SOURCE, ROWS, CODEC = "digits", 1000, "none"

torch.set_num_threads(1)
data = load_bundled(SOURCE, ["bank"], "lender", Dealing(0, validation=0.2, limit=ROWS))
experiment = Experiment.model_validate(
    {
        "codec": CODEC,
        "parties": {"bank": {"width": 32, "bottom": "mlp:hidden=128"}},
        "label": {"party": "lender", "top": "mlp:hidden=64"},
        "train": {"epochs": 3, "batch_size": 64, "learning_rate": 0.003},
    }
)
trace = Trace()
session = LocalSession(experiment, data, outputs=10, observers=[trace]).run()
frames = list(decoded(trace, session.terms, data["lender"].split))

draw = generator(0, "leak")
heard = training_case(experiment, data, frames, "bank", 1, draw)
network = TrainedParts(experiment, data, session.weights())
received = received_case(network, frames, "bank", 200, draw)
for case, specs in (
    (heard, ["gradient_similarity", "surrogate"]),
    (received, ["inversion:steps=200", "white_box_inversion"]),
):
    print(case.view.threat.sentence())
    for spec in specs:
        for score in attempt_all(case, make(spec), generator(0, spec)):
            print(f"  {spec:22} {score.measure:17} {score.value:7.3f}  guess {score.guess:7.3f}")
