import math

from hypothesis import given
from hypothesis import strategies as st

from libra.tracing.prometheus import Sample, largest, read_samples, total

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
