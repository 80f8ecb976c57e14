import pytest
import yaml

from libra.config.document import MAX_DEPTH, ListNode, MapNode, Node, Scalar, parse_document
from libra.config.problems import Place, Problem


def parse(text: str) -> tuple[Node, tuple[Problem, ...]]:
    return parse_document(text, Place("a.yaml", None, "/work"))


def value_of(text: str) -> object:
    node, problems = parse(text)
    assert not problems, problems
    assert isinstance(node, Scalar)
    return node.value


def messages(text: str) -> list[str]:
    return [str(problem) for problem in parse(text)[1]]


def test_every_value_knows_the_line_of_its_key():
    node, _ = parse("a: 1\nb:\n  c: 2\n  d:\n    [3,\n     4]\n")
    assert isinstance(node, MapNode)
    b = node.entries["b"]
    assert isinstance(b, MapNode)
    assert [node.entries["a"].place.line, b.place.line] == [1, 2]
    assert [b.entries["c"].place.line, b.entries["d"].place.line] == [3, 4]
    assert isinstance(b.entries["d"], ListNode)
    assert [item.place.line for item in b.entries["d"].items] == [5, 6]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.0e-6", 1e-6),
        ("-.inf", float("-inf")),
        ("true", True),
        ("off", False),
        ("~", None),
        ("", None),
        ("'7'", "7"),
    ],
)
def test_scalars_have_their_yaml_types(text: str, value: object):
    assert value_of(f"{text}\n") == value
    assert type(value_of(f"{text}\n")) is type(value)


@pytest.mark.parametrize("text", ["1:30", "010", "2026-01-02", "1e-6", "0o17", "1.0e6", "="])
def test_what_yaml_1_1_turns_into_surprising_values_stays_text(text: str):
    assert value_of(text) == text


def test_plain_text_is_told_from_quoted_text():
    plain, _ = parse("1e-6")
    quoted, _ = parse("'1e-6'")
    assert isinstance(plain, Scalar)
    assert isinstance(quoted, Scalar)
    assert plain.is_plain
    assert not quoted.is_plain


def test_a_key_written_twice_names_both_lines():
    assert messages("a:\n  b: 1\n  c: 2\n  b: 3\n") == [
        "a.yaml:4: a.b: written twice, first on line 2"
    ]


def test_anchors_and_merges_work_and_own_keys_win():
    node, problems = parse("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [{a: 9}, *x]}\n")
    assert not problems
    assert isinstance(node, MapNode)

    def plain(name: str) -> dict[object, object]:
        entry = node.entries[name]
        assert isinstance(entry, MapNode)
        return {k: v.value for k, v in entry.entries.items() if isinstance(v, Scalar)}

    assert plain("y") == {"a": 1, "b": 3}
    assert plain("z") == {"a": 9, "b": 2}


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "a: !!python/name:os.system",
        "!thing {a: 1}",
        "!!set {a, b}",
        "!!binary aGk=",
        "!!timestamp 2026-01-02",
        "!!int seven",
        "!!int 7",
        "!!str text",
        "! text",
        "a: !!null",
        "!!map {a: 1}",
        "!!seq [1]",
        "!!int 7: a",
        "!!bool maybe",
    ],
)
def test_tags_are_refused_and_nothing_is_constructed(text: str):
    assert any("is not allowed" in message for message in messages(text))


def test_an_alias_that_contains_itself_is_a_problem():
    assert any("contains itself" in message for message in messages("a: &a [*a]"))
    assert any("contains itself" in message for message in messages("&m a: &b {c: *b}"))


def test_aliases_that_multiply_are_stopped():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert sum("once aliases are expanded" in m for m in messages("\n".join(lines))) == 1


def test_deep_nesting_is_a_problem_at_any_depth():
    assert any("levels deep" in m for m in messages("[" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5)))
    assert any("too deeply" in m for m in messages("[" * 1000 + "]" * 1000))


@pytest.mark.parametrize(
    "text",
    ["a: b: c", "a: [1", "\t- x", "a: *nobody", "%YAML 9.9\n---\na: 1", "--- 1\n--- 2", "a: 'x"],
)
def test_broken_yaml_names_its_line(text: str):
    found = parse(text)[1]
    assert len(found) == 1
    assert "not valid YAML" in found[0].what
    assert found[0].place is not None
    assert found[0].place.line is not None


@pytest.mark.parametrize(
    "text", ['"\\UFFFFFFFF"', '"\\ud800"', '"\\0"', "9" * 5000, "\x01", "{1.5: a}", "{[a]: b}"]
)
def test_what_no_value_can_be_made_of_is_a_problem(text: str):
    assert messages(text)


def test_reading_leaves_pyyaml_as_it_is_for_others():
    parse("a: 1e-6")
    assert yaml.safe_load("a: 1:30\nb: 010\nc: 1.5") == {"a": 90, "b": 8, "c": 1.5}


@pytest.mark.parametrize("text", ["!!null foo", '!!bool "yes\\n"', "!!bool maybe"])
def test_a_tag_does_not_make_a_value_of_other_text(text: str):
    assert "is not allowed on" in messages(text)[0]
