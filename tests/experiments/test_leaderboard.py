"""Locations and verdicts on tables whose answer is known."""

from dataclasses import replace

import pytest
from made_records import attacked, utility

from vfl.experiments import leaderboard as room
from vfl.experiments.attack_tables import access_table
from vfl.experiments.leaderboard import fitting_measure

NOISE = (-0.002, 0.0, 0.002)


def row(defense, attack, k, seed, value, *, scratch=0.6, **baselines):
    measure = "accuracy" if k else "matched_accuracy"
    known = {"scratch": scratch + NOISE[seed] / 2} | baselines
    return attacked(defense, attack, k, seed, value + NOISE[seed], measure=measure, baselines=known)


def rows(values, defense="none", attack="logistic", **options):
    """One row a seed for each k."""
    return [
        row(defense, attack, k, seed, value, **options)
        for k, value in values.items()
        for seed in range(3)
    ]


def with_utility(table, **accuracy):
    """The rows, and how good their victims are."""
    victims = dict.fromkeys((one.training, int(one.repeat)) for one in table)
    return table + [
        utility(training, seed, accuracy.get(training, 0.95) + NOISE[seed])
        for training, seed in victims
    ]


def leaderboard(table, margin, measure="accuracy", **accuracy):
    return room.leaderboard(with_utility(table, **accuracy), margin, measure)


def verdicts(table, margin=0.5):
    return {
        place.defense: [one.verdict for one in place.standings]
        for place in leaderboard(table, margin)
    }


def test_a_defense_protects_only_where_an_attack_succeeds_without_it():
    table = rows({1: 0.6, 5: 0.9}) + rows({1: 0.3, 5: 0.3}, "good")
    assert verdicts(table) == {
        "good": ["inconclusive", "protected"],
        "none": ["inconclusive", "leaks"],
    }


def test_one_attack_that_wins_is_enough_to_leak():
    table = rows({5: 0.9}) + rows({5: 0.9}, attack="svm")
    table += rows({5: 0.3}, "half") + rows({5: 0.8}, "half", "svm")
    ranked = leaderboard(table, 0.5)
    assert [(place.defense, place.worst.attack) for place in ranked] == [
        ("half", "svm"),
        ("none", "logistic"),
    ]
    assert ranked[0].worst.advantage.mean == pytest.approx(0.2)
    assert ranked[0].worst.verdict == "leaks"


def test_clusters_count_at_every_number_of_leaked_labels():
    table = rows({5: 0.7, 10: 0.95}) + rows({0: 0.9}, attack="kmeans", scratch=0.5)
    (place,) = leaderboard(table, 0.5)
    assert [one.attack for one in place.standings] == ["kmeans", "logistic"]
    assert [one.k for one in place.standings] == [5, 10]
    over = [one.over_scratch.mean for one in place.standings]
    assert over == pytest.approx([0.9 - 0.5, 0.95 - 0.6])  # clusters of the inputs, then training


def test_an_attack_below_the_highest_can_be_the_one_that_leaks():
    """The highest varies too much to say anything; the next one is surely above its baseline."""
    wild = [replace(one, value=one.value + (int(one.repeat) - 1) / 2) for one in rows({5: 0.72})]
    (place,) = leaderboard(wild + rows({5: 0.7}, attack="svm"), 0.5)
    (one,) = place.standings
    assert one.attack == "logistic"
    assert one.advantage.low < 0
    assert one.verdict == "leaks"


def test_the_highest_of_many_attacks_is_above_what_they_are_worth():
    """An interval that ends just above the baseline is a leak of one attack, not of one in ten."""
    close = rows({5: 0.6052})
    many = [
        replace(one, subject=f"svm:strength={name}", value=one.value + (-0.04, 0.0, 0.04)[turn])
        for name in range(9)
        for one, turn in zip(close, (name % 3, (name + 1) % 3, (name + 2) % 3), strict=True)
    ]
    assert verdicts(close)["none"] == ["leaks"]
    assert verdicts(close + many)["none"] == ["inconclusive"]


def test_the_best_baseline_is_chosen_over_all_attacks():
    table = rows({5: 0.9}, raw=0.65) + rows({5: 0.8}, attack="svm", raw=0.85)
    (place,) = leaderboard(table, 0.5)
    (one,) = place.standings
    assert (one.attack, one.baseline) == ("logistic", "svm on raw")
    assert one.advantage.mean == pytest.approx(0.05)
    assert one.over_scratch.mean == pytest.approx(0.3)


def test_nothing_is_decided_by_one_victim():
    table = [one for one in rows({5: 0.9}) + rows({5: 0.1}, "good") if one.repeat == "0"]
    assert verdicts(table) == {"good": ["undecided"], "none": ["undecided"]}


def test_protection_is_adjusted_for_the_number_of_leaks():
    """A p-value of 0.018 is below 0.025, but not twice it."""
    undefended = rows({1: 0.9, 5: 0.9})
    close = rows({1: 0.597, 5: 0.597}, "close")
    each = leaderboard([one for one in undefended + close if one.k == 1], 0.5)
    both = leaderboard(undefended + close, 0.5)
    single = next(place for place in each if place.defense == "close").standings[0]
    paired = next(place for place in both if place.defense == "close").standings[0]
    assert paired.chance == pytest.approx(2 * single.chance)
    assert single.verdict == "protected"
    assert paired.verdict == "undecided"


@pytest.mark.parametrize(
    ("accuracy", "affordable"),
    [(0.951, "yes"), (0.9455, "undecided"), (0.9405, "no")],
)
def test_what_a_defense_costs_beside_the_margin(accuracy, affordable):
    table = rows({5: 0.9}) + rows({5: 0.9}, "other")
    good = [utility("none", seed, 0.95 + NOISE[seed]) for seed in range(3)]
    good += [
        utility("other", seed, accuracy + shift)
        for seed, shift in enumerate((0.0005, -0.0005, 0.0))
    ]
    ranked = {place.defense: place for place in room.leaderboard(table + good, 0.5)}
    assert ranked["none"].difference is None
    assert ranked["other"].difference.mean == pytest.approx(accuracy - 0.95)
    assert ranked["other"].affordable == affordable


def test_an_attack_without_baselines_stands_beside_the_guess_and_those_of_others():
    """Of training rows nothing is known without the training; the guess always is."""
    table = rows({5: 0.7}) + rows({5: 0.9}, attack="gradient_similarity")
    alone = [replace(one, baselines={}) for one in table if one.subject == "gradient_similarity"]
    (place,) = leaderboard(table[:3] + alone, 0.5)
    assert (place.worst.attack, place.worst.baseline) == ("gradient_similarity", "scratch")
    (place,) = leaderboard(alone, 0.5)
    assert (place.worst.baseline, place.worst.baseline_value.mean) == ("guess", pytest.approx(0.1))


@pytest.mark.parametrize(
    ("classes", "largest", "asked", "expected"),
    [
        (2, 0.5, "auto", "auc"),
        (10, 0.1, "auto", "accuracy"),
        (3, 0.7, "auto", "auc"),
        (3, 0.65, "auto", "accuracy"),
        (2, 0.9, "balanced_accuracy", "balanced_accuracy"),
    ],
)
def test_the_measure_follows_the_labels(classes, largest, asked, expected):
    guesses = {"accuracy": largest, "balanced_accuracy": 1 / classes, "auc": 0.5}
    one = row("none", "logistic", 5, 0, 0.9)
    found = [replace(one, measure=name, guess=guess) for name, guess in guesses.items()]
    assert fitting_measure(found, asked) == expected


def test_each_measure_has_a_leaderboard_and_a_utility_of_its_own():
    table = rows({5: 0.7})
    table += [replace(one, measure="auc", value=0.9) for one in table]
    table += [utility("none", seed, 0.8, measure="auc") for seed in range(3)]
    assert leaderboard(table, 0.5)[0].utility.mean == pytest.approx(0.95)
    (place,) = leaderboard(table, 0.5, "auc")
    assert (place.utility.mean, place.worst.value.mean) == (pytest.approx(0.8), pytest.approx(0.9))


def test_each_attacker_has_what_those_before_it_have():
    table = [replace(one, access="cut") for one in rows({5: 0.7})]
    table += [replace(one, access="gradients") for one in rows({5: 0.9}, attack="norm")]
    table += [replace(one, access="gradients") for one in rows({5: 0.65}, "good", "norm")]
    found = access_table(with_utility(table), 0.5, "accuracy")
    assert found.head == ["defense", "cuts alone", "and gradients"]
    lines = {line[0]: line[1:] for line in found.rows}
    assert lines["none"][0].startswith("+10.0")
    assert lines["none"][1].startswith("+30.0")
    assert lines["good"][0] == ""  # nobody attacked it by its cuts alone
    assert access_table(with_utility(table[:3]), 0.5, "accuracy") is None


def test_attacks_after_an_adversary_are_attackers_of_their_own():
    honest = rows({5: 0.7})
    table = honest + [replace(one, adversary="eager", value=0.9) for one in honest]
    table += [utility("none", seed, 0.2, adversary="eager") for seed in range(3)]
    (place,) = leaderboard(table, 0.5)
    assert place.worst.attack == "logistic after eager"
    assert place.worst.value.mean == pytest.approx(0.9)
    assert place.utility.mean == pytest.approx(0.95)


def test_claims_about_many_defenses_are_corrected_for_their_number():
    """Of one defense a gain of 10 ± 9 points is a leak; among twenty, of which none leaks, not."""
    base = {"scratch": 0.5}
    lucky = [
        replace(one, value=0.6 + by)
        for one, by in zip(rows({5: 0.6}, "lucky", **base), (-0.03, 0.0, 0.035), strict=True)
    ]
    others = [
        replace(one, value=0.5 + by)
        for name in range(20)
        for one, by in zip(rows({5: 0.5}, f"other{name}", **base), (-0.03, 0.0, 0.03), strict=True)
    ]
    plain = rows({5: 0.9}, **base)
    assert verdicts(plain + lucky)["lucky"] == ["leaks"]
    assert verdicts(plain + lucky + others)["lucky"] == ["undecided"]
