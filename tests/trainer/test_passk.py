"""pass@k and majority@k against counting every choice."""

import itertools
import random
from fractions import Fraction

import pytest

from trainer.passk import Tries, accuracy, ks, majority, majority_at_k, pass_at_k


def counted_pass(correct: list[bool], k: int) -> float:
    choices = list(itertools.combinations(correct, k))
    return float(Fraction(sum(any(choice) for choice in choices), len(choices)))


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(samples):
    for correct in range(samples + 1):
        verdicts = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            assert pass_at_k(samples, correct, k) == counted_pass(verdicts, k)


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(1000, 1, 100) == 0.1
    assert pass_at_k(2000, 0, 1000) == 0.0


def test_one_minus_the_share_of_wrong_ones_to_the_k_would_be_biased():
    assert pass_at_k(4, 2, 2) == 5 / 6
    assert pass_at_k(4, 2, 2) != 1 - 0.5**2


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_what_cannot_be_is_an_error(samples, correct, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, correct, k)


def tries(answers: str, right: str = "a") -> Tries:
    """A letter a sample; `-` gives no answer."""
    return Tries(tuple(letter == right for letter in answers), tuple(None if x == "-" else x for x in answers))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("aab", True),
        ("abb", False),
        ("ab", True),
        ("ba", False),
        ("baba", False),
        ("---a", True),
        ("--", False),
        ("bcaa", True),
    ],
)
def test_the_most_frequent_answer_wins_and_the_first_at_a_tie(answers, expected):
    assert majority(tries(answers)) is expected


def counted_majority(answers: str) -> bool:
    votes = [x for x in answers if x != "-"]
    if not votes:
        return False
    most = max(votes.count(x) for x in votes)
    return next(x for x in votes if votes.count(x) == most) == "a"


def test_majority_agrees_with_counting_on_random_votes():
    draw = random.Random(0)
    for _ in range(300):
        answers = "".join(draw.choice("abc-") for _ in range(draw.randint(1, 9)))
        assert majority(tries(answers)) == counted_majority(answers)


def test_majority_at_k_is_the_mean_over_blocks_and_leaves_the_rest_out():
    assert majority_at_k(tries("aabbb"), 2) == 0.5  # aa, bb
    assert majority_at_k(tries("aabbb"), 5) == 0.0
    assert majority_at_k(tries("aabbb"), 1) == 2 / 5
    with pytest.raises(ValueError, match="k must be 1 to 5"):
        majority_at_k(tries("aabbb"), 6)


def test_an_answer_is_as_right_as_the_first_sample_that_gives_it():
    assert majority(Tries((True, False), ("x", "x")))
    assert not majority(Tries((False, True), ("x", "x")))


def test_the_reported_k():
    assert [ks(n) for n in (1, 2, 3, 4, 6, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16]]


def test_means_are_over_prompts_and_do_not_depend_on_their_order():
    prompts = [tries("aabb"), tries("bbbb"), tries("aaaa"), tries("abbb")]
    found = accuracy(prompts, 4)
    assert found == accuracy(prompts[::-1], 4)
    assert set(found) == {"pass@1", "pass@2", "maj@2", "pass@4", "maj@4"}
    assert found["pass@1"] == (0.5 + 0 + 1 + 0.25) / 4
    assert found["pass@4"] == 0.75
    assert found["maj@4"] == 0.5


def test_prompts_with_unscored_samples_count_where_they_have_enough():
    found = accuracy([tries("aa"), tries("bbbb")], 4)
    assert found["pass@2"] == 0.5
    assert found["pass@4"] == 0.0
    assert "pass@4" not in accuracy([tries("aa")], 4)
    assert accuracy([tries("")], 4) == {}


def test_verdicts_and_answers_go_in_pairs():
    with pytest.raises(ValueError, match="2 verdicts but 1 answers"):
        Tries((True, False), ("a",))
