"""`vfl advise`: who sees what, and an exit code that a script can read."""

import json


def test_an_undefended_experiment_is_told_what_to_try(vfl, breast_cancer):
    done = vfl("advise", breast_cancer)
    assert done.code == 1
    assert "OPEN      labels of pathology, from radiology" in done.out
    assert 'defense = "label_free"' in done.out
    assert "5 of 6 exposures have no defense to rely on" in done.out


def test_one_fear_with_a_defense_is_well(vfl, breast_cancer):
    words = ("-s", "defense=label_free", "--fear", "labels", "--json")
    done = vfl("advise", breast_cancer, *words)
    assert done.code == 0
    told = json.loads(done.out)
    assert told["unprotected"] == 0
    (found,) = told["findings"]
    assert (found["asset"], found["status"], found["has"]) == ("labels", "proven", ["label_free"])
    assert found["statements"]


def test_a_defense_that_fell_is_not_enough(vfl, breast_cancer):
    done = vfl("advise", breast_cancer, "-s", "defense=marvell", "--fear", "labels")
    assert done.code == 1
    assert done.out.startswith("WEAK ")
    assert "keeps the gradients of all epochs" in done.out


def test_a_project_is_advised(vfl, bank_project):
    done = vfl("advise", bank_project / "label", "--fear", "columns", "--json")
    assert done.code == 1
    assert [one["owner"] for one in json.loads(done.out)["findings"]] == ["bank"]


def test_unknown_fears_are_refused(refused, breast_cancer):
    assert "labels, columns" in refused("advise", breast_cancer, "--fear", "sharks").err
