import sys
from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from random import Random

import numpy as np
import pytest

from libra.errors import ConfigError, SiteError
from libra.rewards.case import RewardCase
from libra.rewards.character_class import character_class
from libra.rewards.coercion import RewardFailed, coerced
from libra.rewards.exact_match import exact_match, number_match
from libra.rewards.loading import answer_error, check_reward_name, load_reward
from libra.rewards.math import math
from libra.rewards.messages import Scored
from libra.rewards.worker import score


def case(response_text, answer):
    return RewardCase(
        prompt_id="row-0",
        prompt_text="",
        response_text=response_text,
        answer=answer,
        extras={},
        finish_reason="stop",
        num_response_tokens=1,
        num_turns=1,
    )


class Tensor:
    """What torch and jax arrays have in common."""

    def __init__(self, *values):
        self.values = values

    def item(self):
        if len(self.values) != 1:
            raise RuntimeError("only one element tensors can be converted")
        return self.values[0]


@pytest.mark.case("T-B13")
@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (2, 2.0),
        (True, 1.0),
        (False, 0.0),
        ("0.5", 0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array([0.5]), 0.5),
        (Tensor(0.75), 0.75),
        (Fraction(1, 4), 0.25),
        (Decimal("0.125"), 0.125),
        (-1e30, -1e30),
    ],
)
def test_what_stands_for_a_number_is_that_number(value, number):
    result = coerced(value)
    assert (result, type(result)) == (number, float)


@pytest.mark.case("T-B13")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "returned None"),
        (nan, "returned nan"),
        (-inf, "returned -inf"),
        ("inf", "returned inf"),
        ("yes", "returned 'yes', not a number"),
        (10**400, "returned 1000"),
        (np.float64("nan"), "returned nan"),
        (Decimal("sNaN"), "returned Decimal('sNaN'), not a number"),
        (1.1e30, "returned 1.1e+30; rewards go up to 1e+30"),
        (-1e300, "returned -1e+300; rewards go up to"),
        (1j, "returned a complex, not a number"),
        (Tensor(nan), "returned nan"),
        (Tensor(1.0, 2.0), "returned a Tensor: only one element"),
        (np.array([1.0, 2.0]), "returned a ndarray"),
        ({"score": 1}, "returned a dict, not a number"),
        ([1.0], "returned a list, not a number"),
    ],
)
def test_what_is_no_finite_number_is_a_failure_with_its_reason(value, reason):
    result = coerced(value)
    assert isinstance(result, RewardFailed)
    assert result.reason.startswith(reason)


def test_exact_match_compares_what_is_left_without_spaces_around():
    assert exact_match(case(" 12\n", 12)) == 1.0
    assert exact_match(case("12", " 12 ")) == 1.0
    assert exact_match(case("12.", "12")) == 0.0
    assert exact_match(case("Yes", "yes")) == 0.0
    assert exact_match(case("Yes", "yes"), ignore_case=True) == 1.0


def test_exact_match_can_look_for_the_last_answer_in_a_longer_text():
    text = "first #### 3\nno, #### 4"
    assert exact_match(case(text, "4"), pattern=r"#### (.+)") == 1.0
    assert exact_match(case(text, "3"), pattern=r"#### (.+)") == 0.0
    assert exact_match(case("4", "4"), pattern=r"#### (.+)") == 0.0


def test_number_match_takes_the_last_number_as_a_number():
    assert number_match(case("1 + 1 makes 2.0!", "2")) == 1.0
    assert number_match(case("it is 1,234", 1234)) == 1.0
    assert number_match(case("-3", "3")) == 0.0
    assert number_match(case("none", "3")) == 0.0
    with pytest.raises(ValueError, match="x"):
        number_match(case("3", "x"))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (".5", "0.5"), ("1e3", 1000), ("x = 5-3", "3"), ("it is \u22123", -3), ("-3", "\u22123"),
        ("(x)-3", 3), ("y=-3", -3), ("1,2,3", 3), ("12,34,567", 1234567), ("50%", "50%"),
        ("0.5", "50%"), ("50%", "0.5"), ("50 \\%", 50), ("3/4", "3/4"), ("0.75", "3/4"),
        ("3 / 4", 0.75), ("on 5/10/2024", 2024), ("6/2", 3), ("0.3333333333333333", "1/3"),
        ("1e400", "1e400"), ("-.5", -0.5), ("9007199254740993", 9007199254740993),
        ("7.", 7), ("+5", "+5"),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(response, answer):
    assert number_match(case(response, answer)) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("x = 5-3", -3), ("1,2,3", 123), ("3/4", 4), ("0.5%", "50%"), ("50", "50%"), ("3/0", 0),
        ("1e3", 3), (".5", 5), ("9007199254740993", 9007199254740992), ("1e9999", "1e9998"),
    ],
)  # fmt: skip
def test_numbers_that_only_look_alike_are_not_the_answer(response, answer):
    assert number_match(case(response, answer)) == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (1.0, ["1", "1.0"], ["true"]), (2.5, ["2.5"], ["2"]), (7, ["7"], ["7.0"]),
        (True, ["true", "True"], ["1"]), ([1, "a"], ["[1, 'a']", '[1, "a"]'], ["1"]),
    ],
)  # fmt: skip
def test_answers_that_are_no_text_are_written_as_in_json_or_python(answer, right, wrong):
    assert [exact_match(case(text, answer)) for text in right] == [1.0] * len(right)
    assert [exact_match(case(text, answer)) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("exact_match", None, "null"),
        ("number_match", "ten", "'ten' is not a number"),
        ("number_match", "3/0", "not a number"),
        ("number_match", None, "None is not a number"),
        ("number_match", True, "True is not a number"),
        ("character_class", ["digits"], "is none of digits"),
        ("math", "  ", "math-verify cannot read the answer"),
        ("math", None, "math-verify cannot read the answer"),
    ],
)
def test_an_answer_that_no_response_can_be_scored_against_is_told_without_one(name, answer, reason):
    assert reason in answer_error(name, answer)
    result = score(load_reward(name, {}), case("None", answer))
    assert isinstance(result, RewardFailed)
    assert reason in result.reason


def test_of_good_answers_and_other_peoples_rewards_there_is_nothing_to_say():
    good = {"exact_match": "", "number_match": "50%", "character_class": "digits", "math": 7}
    for name, answer in {**good, "my_rewards:f": None, "code": None}.items():
        assert answer_error(name, answer) is None


def test_character_class_pays_for_the_wanted_number_of_characters_of_the_class():
    assert character_class(case("12345678", "digits")) == 1.0
    assert character_class(case("1234", "digits")) == 0.5
    assert character_class(case("1234abcd", "digits")) == 0.5
    assert character_class(case("12345678" * 2, "digits")) == 0.5
    assert character_class(case("", "digits")) == 0.0
    assert character_class(case("AB", "capitals"), length=2) == 1.0
    assert character_class(case("ab", "letters"), length=2) == 1.0
    assert character_class(case("+-", "symbols"), length=2) == 1.0
    with pytest.raises(ValueError, match="'vowels' is none of digits, capitals"):
        character_class(case("", "vowels"))


def test_random_characters_score_under_0_3_on_average():
    rng = Random(0)
    text = ["".join(chr(rng.randrange(33, 127)) for _ in range(8)) for _ in range(2000)]
    names = ("digits", "capitals", "letters", "symbols")
    scores = [character_class(case(t, name)) for t in text for name in names]
    assert 0.2 < sum(scores) / len(scores) < 0.3


def interrupted(_case):
    raise KeyboardInterrupt


@pytest.mark.case("T-B76")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda c: sys.exit(2), "called sys.exit(2)"),
        (interrupted, "KeyboardInterrupt"),
        (lambda c: "x" * 10**6, "returned 'xxx"),
        (lambda c: object(), "returned a object, not a number"),
    ],
)
def test_whatever_a_reward_raises_or_returns_becomes_a_short_reason(function, reason):
    result = score(function, case("", ""))
    assert isinstance(result, RewardFailed)
    assert result.reason.startswith(reason)
    assert len(result.reason) <= 500


def test_a_reward_is_found_by_name_with_its_arguments():
    reward = load_reward("character_class", {"length": 2})
    assert score(reward, case("12", "digits")) == Scored(1.0)
    reward = load_reward("hostile_rewards:length", {})
    assert score(reward, case("123", None)) == Scored(3.0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("exact", {}, "no 'exact'; use one of exact_match"),
        ("exact_match", {"patern": "x"}, "reward_args: exact_match.*patern"),
        ("exact_match", {"pattern": "(a"}, r"pattern '\(a': missing \)"),
        ("exact_match", {"pattern": "(a)(b)"}, r"pattern '\(a\)\(b\)' has 2 groups, not one"),
        ("exact_match", {"pattern": 5}, "pattern 5: first argument must be string"),
        ("no_such_module_:f", {}, "importing no_such_module_ failed: ModuleNotFoundError"),
        ("json:nothing", {}, "module json has no function nothing"),
        ("json:", {}, "not of the form module:function"),
        ("anyio:sleep", {}, "anyio:sleep is an `async def`"),
    ],
)
def test_a_reward_that_cannot_be_used_is_a_configuration_error(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(name, arguments)


def test_a_name_can_be_checked_without_importing_user_code():
    check_reward_name("no_such_module_:f")
    with pytest.raises(ConfigError, match="no 'exact'"):
        check_reward_name("exact")


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (r"\frac{1}{2}", "so it is $0.5$", 1.0),
        ("x^2+1", "the answer is $1+x^2$", 1.0),
        ("$7$", "I get 6, no, 7.", 1.0),
        (12, r"\boxed{12}", 1.0),
        ("12", r"\boxed{13}", 0.0),
        ("12", "I do not know", 0.0),
    ],
)
def test_the_math_reward_takes_an_answer_in_any_form(answer, response, reward):
    assert math(case(response, answer)) == reward


def test_the_math_reward_refuses_a_row_without_an_answer_that_can_be_read():
    with pytest.raises(ValueError, match="math-verify cannot read the answer ''"):
        math(case("7", ""))


def test_the_math_reward_names_the_extra_it_needs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(SiteError, match=r"pip install 'libra-rl\[math\]'"):
        load_reward("math", {})
