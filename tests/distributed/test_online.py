"""strategy="auto" changes the plan of a job under way: only for a faster one, and never the numbers."""

from harness import Pools


def test_a_faster_plan_is_kept_and_the_numbers_stay(pools: Pools) -> None:
    for ranks in (2, 4):
        answers = pools(ranks).call("tune_online", builder="partitioned_all_reduce", slower=False, timeout=90)
        assert max(answer["error"] for answer in answers) <= 1e-10
        for answer in answers:
            assert answer["names"][0] != "partitioned_all_reduce"
            assert answer["names"][-1] == "partitioned_all_reduce"
            assert answer["names"] == answers[0]["names"], "every rank switches between the same two steps"


def test_a_slower_plan_is_given_up_again(pools: Pools) -> None:
    answers = pools(2).call("tune_online", builder="ps_load_balanced", slower=True, timeout=90)
    assert max(answer["error"] for answer in answers) <= 1e-10
    for answer in answers:
        assert "ps_load_balanced" in answer["names"], "it was tried"
        assert answer["names"][-1] == answer["names"][0], "and given up"
