import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.tracing.prometheus import MAX_REMEMBERED_CHARS, Sample, largest, read_samples, total

PAGE = """\
# HELP running Requests.
# TYPE running gauge
running{engine="0",model_name="m"} 3.0
running{engine="1",model_name="m"} 4.0
running_created{engine="0"} 1.7e9
plain 5
plain_total 6 1700000000000
quoted{text="a \\"b\\", {c}\\\\ \\n"} 1
broken{engine="0" 7
empty{engine="0"}
word{engine="0"} many
missing{engine="0"} NaN
mixed{engine="0"} NaN
mixed{engine="1"} 2
infinite +Inf
"""


def read(*names):
    return read_samples(PAGE, set(names))


def test_only_what_is_asked_for_is_read_and_names_are_whole():
    assert read("running", "nothing") == {
        "running": [
            Sample({"engine": "0", "model_name": "m"}, 3.0),
            Sample({"engine": "1", "model_name": "m"}, 4.0),
        ]
    }
    assert read("plain")["plain"] == [Sample({}, 5.0)]
    assert read("plain_total")["plain_total"] == [Sample({}, 6.0)]


def test_series_of_several_engines_are_summed_or_compared():
    samples = read("running")
    assert total(samples, "running") == 7.0
    assert total(samples, "running", engine="1") == 4.0
    assert largest(samples, "running") == 4.0


def test_unknown_is_not_zero():
    samples = read("missing", "broken", "empty", "word", "absent")
    assert samples == {}
    assert total(samples, "absent") is None
    assert largest(samples, "missing") is None
    assert total(read("running"), "running", engine="9") is None


def test_a_line_that_comes_twice_counts_once_and_a_tab_separates_too():
    page = 'a{x="1",y="2"} 3\na{y="2",x="1"} 4\na{x="2"} 5\nb\t6\n'
    samples = read_samples(page, {"a", "b"})
    assert (total(samples, "a"), total(samples, "b")) == (9.0, 6.0)


def test_one_engine_without_a_value_leaves_the_others():
    assert total(read("mixed"), "mixed") == 2.0


def test_infinity_is_a_value():
    assert total(read("infinite"), "infinite") == math.inf


def test_lines_of_one_name_may_lie_apart_and_end_as_on_windows():
    page = 'a{x="1"} 1\r\nb 7\r\nx:a{x="2"} 9\r\na{x="2"} 2'
    samples = read_samples(page, {"a", "x:b", "b"})
    assert samples == {
        "a": [Sample({"x": "1"}, 1.0), Sample({"x": "2"}, 2.0)],
        "b": [Sample({}, 7)],
    }


def test_names_with_and_without_a_family_are_told_apart():
    page = "vllm:up 1\nup 2\nother:up 3\nvllm:up_total 4\nvllm: 5\n"
    samples = read_samples(page, {"vllm:up", "up", "vllm:"})
    assert {name: found[0].value for name, found in samples.items()} == {
        "vllm:up": 1.0,
        "up": 2.0,
        "vllm:": 5.0,
    }
    assert read_samples(page, set()) == {}


def test_a_name_is_no_pattern():
    assert read_samples("a.b 1\naxb 2\n", {"a.b"}) == {"a.b": [Sample({}, 1.0)]}


@pytest.mark.parametrize(
    ("rest", "labels"),
    [
        ('{x="} 7 {"} 1', {"x": "} 7 {"}),
        ('{x="a} b",y="c} d"} 1', {"x": "a} b", "y": "c} d"}),
        ('{x="1"}1', {"x": "1"}),
        ('{x="1"}\t1', {"x": "1"}),
        ('{x="1"} 1 # {trace="} "} 0.3', {"x": "1"}),
        ("{} 1", {}),
        (" 1 # {} 2", {}),
        ('{x="' + "long" * MAX_REMEMBERED_CHARS + '"} 1', {"x": "long" * MAX_REMEMBERED_CHARS}),
    ],
)
def test_labels_end_where_they_end_however_often_they_are_read(rest, labels):
    for _ in range(2):
        assert read_samples(f"a{rest}\n", {"a"}) == {"a": [Sample(labels, 1.0)]}


def test_a_series_keeps_its_labels_and_changes_its_value():
    values = [read_samples(f'a{{x="1"}} {k}\n', {"a"})["a"][0] for k in range(3)]
    assert [(dict(s.labels), s.value) for s in values] == [({"x": "1"}, float(k)) for k in range(3)]
    with pytest.raises(TypeError):
        values[0].labels["x"] = "2"


def test_escapes_in_labels_are_resolved():
    assert read("quoted")["quoted"] == [Sample({"text": 'a "b", {c}\\ \n'}, 1.0)]


@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text):
    read_samples(text, {"a", "vllm:x", ""})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.dictionaries(st.sampled_from(["k", "m"]), st.text(max_size=8)),
            st.floats(allow_nan=False),
        )
    )
)
def test_whatever_is_written_in_the_format_is_read_back_once_for_each_series(rows):
    def escaped(text):
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    # The page is cut at line ends only; other separators stay inside a label.
    lines = []
    for name, labels, value in rows:
        clean = {
            k: "".join(c for c in v if c.isprintable() or c == "\n") for k, v in labels.items()
        }
        inner = ",".join(f'{k}="{escaped(v)}"' for k, v in clean.items())
        lines.append((name, clean, value, f"{name}{{{inner}}} {value!r}"))
    samples = read_samples("\n".join(line for *_, line in lines), {"a", "b"})
    for wanted in "ab":
        expected = [(labels, value) for name, labels, value, _ in lines if name == wanted]
        last = {frozenset(labels.items()): value for labels, value in expected}
        found = samples.get(wanted, [])
        assert len(found) == len(last)
        assert {frozenset(s.labels.items()): s.value for s in found} == last
