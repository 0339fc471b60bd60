"""The confusional autoencoder: codes that confuse, a decoder that does not, and its state."""

import pytest
import torch

from vfl.compression import INFERENCE, StepContext
from vfl.core.seeds import Secret
from vfl.defenses import make

SECRET = Secret.of_simulation(0, "lender")
CONTEXT = StepContext(3, training=True, secret=SECRET)


def codes_of(defense, classes, context=CONTEXT):
    return defense.targets(torch.arange(classes), classes, context)


@pytest.mark.parametrize("classes", [2, 3, 10, 60])
def test_codes_shun_their_class_and_are_told_apart(classes):
    defense = make("confusion")
    codes = codes_of(defense, classes)
    own = torch.arange(classes)
    torch.testing.assert_close(codes.sum(1), torch.ones(classes))
    assert (codes.argmax(1) != own).all()
    decoded = defense.logits(codes.log(), INFERENCE)
    torch.testing.assert_close(decoded.exp().sum(1), torch.ones(classes))
    assert (decoded.argmax(1) == own).all()
    assert (decoded.exp().diagonal() > 0.9).all()


def test_entropy_makes_codes_uncertain():
    def entropy(spec):
        codes = codes_of(make(spec), 10)
        return -(codes * codes.log()).sum(1).mean().item()

    assert entropy("confusion:entropy=0") + 0.3 < entropy("confusion:entropy=0.5") < 2.31


def test_training_sees_codes_and_raw_logits():
    defense = make("confusion")
    codes = codes_of(defense, 4)
    labels = torch.tensor([2, 0, 2])
    assert torch.equal(defense.targets(labels, 4, CONTEXT), codes[labels])
    logits = torch.ones(3, 4)
    assert defense.logits(logits, CONTEXT) is logits


def test_soft_labels_become_mixtures_of_codes():
    defense = make("confusion")
    codes = codes_of(defense, 3)
    mixed = defense.targets(torch.tensor([[0.25, 0.75, 0.0]]), 3, CONTEXT)
    torch.testing.assert_close(mixed[0], 0.25 * codes[0] + 0.75 * codes[1])


def test_codes_follow_from_the_secret_and_not_from_the_step():
    first = codes_of(make("confusion"), 5)
    later = codes_of(make("confusion"), 5, StepContext(9, training=True, secret=SECRET))
    other = StepContext(3, training=True, secret=Secret.of_simulation(1, "lender"))
    assert torch.equal(first, later)
    assert not torch.equal(first, codes_of(make("confusion"), 5, other))


def test_the_decoder_is_restored_before_and_after_a_training():
    trained, restored = make("confusion"), make("confusion")
    restored.load_state_dict(trained.state_dict())
    assert restored.state_dict() == {}
    codes = codes_of(trained, 6)
    restored.load_state_dict(trained.state_dict())
    logits = codes.log()
    assert torch.equal(restored.logits(logits, INFERENCE), trained.logits(logits, INFERENCE))
    assert torch.equal(codes_of(restored, 6), codes)
    restored.load_state_dict({})
    assert restored.logits(logits, INFERENCE) is logits
