"""Active attacks: adversaries that tamper with a training while it runs.

>>> make_adversary("noisy_labels:share=0.3").who
'label party'

To add an adversary, write one file with a subclass of `ActiveAdversary`, add one line to the
registry below, and run the tests of `vfl.testing.AdversaryContract`. Another package registers its
adversary by an entry point in the group ``vfl.adversaries``.
"""

from __future__ import annotations

from vfl.attacks.active.base import ActiveAdversary, Backdoor, Triggering
from vfl.core.registry import Registry

ADVERSARIES: Registry[ActiveAdversary] = Registry(
    kind="adversary",
    contract=ActiveAdversary,
    members={
        "malicious_optimizer": "vfl.attacks.active.malicious_optimizer:MaliciousOptimizer",
        "tuned_optimizer": "vfl.attacks.active.tuned_optimizer:TunedOptimizer",
        "replacement": "vfl.attacks.active.replacement:Replacement",
        "villain": "vfl.attacks.active.villain:Villain",
        "badvfl": "vfl.attacks.active.badvfl:InferredReplacement",
        "lfba": "vfl.attacks.active.lfba:LabelFree",
        "hijacking": "vfl.attacks.active.hijacking:Hijacking",
        "splitspy": "vfl.attacks.active.splitspy:SplitSpy",
        "urvfl": "vfl.attacks.active.urvfl:URVFL",
        "noisy_labels": "vfl.attacks.active.noisy_labels:NoisyLabels",
    },
    group="vfl.adversaries",
    aliases={"fsha": "hijacking", "amc": "malicious_optimizer"},
    former_options={"rate": "learning_rate"},
)


def make_adversary(spec: str) -> ActiveAdversary:
    """Return the adversary that a spec names, such as ``malicious_optimizer:gain=1``.

    Raises:
        SpecError: the name or an option is unknown; the error suggests the most similar known name.
    """
    return ADVERSARIES.make(spec)


__all__ = ["ADVERSARIES", "ActiveAdversary", "Backdoor", "Triggering", "make_adversary"]
