from config_files import ARCH, broken_rules, only_problem, warnings_of


def test_the_base_of_these_tests_breaks_nothing():
    assert not broken_rules()
    assert not broken_rules(ARCH)
    assert not warnings_of()


def test_code_is_named_by_a_word_or_module_and_function():
    assert not broken_rules(workflow="my.package:run", reward="exact_match")
    for name in ("a:b:c", "a.b", "my module:f", "''", "../x:f"):
        assert only_problem(reward=name).path == "reward"


def test_a_run_name_fits_a_directory():
    assert not broken_rules(run_name="übung-1")
    for name in ("a/b", ".hidden", '"a\\nb"'):
        assert only_problem(run_name=name).path == "run_name"


def test_a_run_name_leaves_room_for_the_time():
    assert only_problem(run_name="é" * 101).path == "run_name"
    assert not broken_rules(run_name="é" * 100)
