import json

import pytest

from libra.data.chat_template import ChatTemplate
from libra.data.dataset import PromptDataset, PromptRules
from libra.data.formats import open_source
from libra.data.task import PromptFields
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DataError, TokenizerError
from tokenizer_dirs import CHATML, write_tokenizer

USER = [{"role": "user", "content": "HAVING"}]


@pytest.fixture
def tokenizer(tmp_path):
    return PromptTokenizer(write_tokenizer(tmp_path / "tokenizer"))


def dataset(tmp_path, tokenizer, rows, *, fields=None, **rules):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return PromptDataset(
        open_source(path),
        tokenizer,
        fields=fields or PromptFields(),
        rules=PromptRules(**{"max_prompt_tokens": 100, **rules}),
    )


def test_a_string_prompt_is_one_user_message(tmp_path, tokenizer):
    row = {"prompt": "HAVING", "answer": 7, "level": "easy"}
    task = dataset(tmp_path, tokenizer, [row]).task(0)
    assert list(task.prompt_token_ids) == tokenizer.encode_chat(USER)
    assert (task.prompt_text, task.answer, task.extras) == ("HAVING", 7, {"level": "easy"})


def test_messages_are_rendered_as_they_are(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "S"}, *USER]
    task = dataset(tmp_path, tokenizer, [{"prompt": messages, "answer": "x"}]).task(0)
    assert tokenizer.decode(task.prompt_token_ids) == "system\nS\nuser\nHAVING\nassistant\n"
    assert task.prompt_text == "HAVING"
    parts = [{"role": "user", "content": [{"type": "text", "text": "HAVING"}]}]
    assert (
        dataset(tmp_path, tokenizer, [{"prompt": parts, "answer": "x"}]).task(0).prompt_text == ""
    )


def test_without_a_chat_template_the_text_is_the_prompt(tmp_path, tokenizer):
    fields = PromptFields(apply_chat_template=False, answer="")
    task = dataset(tmp_path, tokenizer, [{"prompt": "HAVING"}], fields=fields).task(0)
    assert list(task.prompt_token_ids) == tokenizer.encode_text("HAVING")
    assert (task.messages, task.answer) == ((), None)


@pytest.mark.case("T-B39")
def test_every_bad_row_is_named_at_once(tmp_path, tokenizer):
    rows = [
        {"prompt": "ok", "answer": ""},
        '{"prompt":\n',
        {"answer": ""},
        {"prompt": "  ", "answer": ""},
        {"prompt": 5, "answer": ""},
        {"prompt": [], "answer": ""},
        {"prompt": ["x"], "answer": ""},
        {"prompt": "no answer"},
        {"prompt": [{"role": 5, "content": "x"}], "answer": ""},
    ]
    with pytest.raises(DataError) as raised:
        dataset(tmp_path, tokenizer, rows)
    message = str(raised.value)
    assert message.startswith("8 rows cannot be used (fix them, or leave them out with on_bad_row")
    for line in (
        "x.jsonl:2:11: Expecting value",
        "x.jsonl:3:1: no field 'prompt' (fields here: answer)",
        "x.jsonl:4:1: 'prompt' is empty",
        "x.jsonl:5:1: 'prompt' is 5; expected a string or a list of messages",
        "x.jsonl:6:1: 'prompt' is []; expected",
        "x.jsonl:7:1: prompt[0] is not a message with a role",
        "x.jsonl:8:1: no field 'answer' (fields here: prompt)",
        "x.jsonl:9:1: prompt[0] is not a message with a role",
    ):
        assert line in message


@pytest.mark.case("T-B39")
def test_bad_rows_can_be_left_out_and_are_counted(tmp_path, tokenizer):
    rows = ["{\n", {"prompt": "ok", "answer": ""}, "null\n"]
    found = dataset(tmp_path, tokenizer, rows, on_bad_row="skip")
    assert found.rows.tolist() == [1]
    assert [row.location.rpartition("/")[2] for row in found.bad_rows] == [
        "x.jsonl:1:2",
        "x.jsonl:3:1",
    ]


# As published templates do it: texts are added up, which fails for anything else.
ADDING = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
)

CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.case("T-B39")
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {**CALLS, "role": "user"},
    ],
)
def test_a_message_without_content_is_a_bad_row_unless_it_calls_tools(tmp_path, tokenizer, message):
    rows = [{"prompt": [*USER, message], "answer": ""}, {"prompt": [*USER, CALLS], "answer": ""}]
    with pytest.raises(DataError, match=r"1 rows(?s:.*)x\.jsonl:1:1: prompt\[1\] has no content"):
        dataset(tmp_path, tokenizer, rows)
    assert dataset(tmp_path, tokenizer, rows, on_bad_row="skip").rows.tolist() == [1]


@pytest.mark.case("T-B39")
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": 5}, 'TypeError: can only concatenate str (not "int")'),
        ({**CALLS, "content": None}, 'TypeError: can only concatenate str (not "NoneType")'),
        (CALLS, "has no attribute 'content'"),
        ({"role": "robot", "content": "x"}, "no robots"),
    ],
)
def test_a_row_that_the_template_refuses_is_a_bad_row(tmp_path, message, reason):
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path / "tokenizer", template=ADDING))
    rows = [{"prompt": "ok", "answer": ""}, {"prompt": [message], "answer": ""}]
    with pytest.raises(DataError) as raised:
        dataset(tmp_path, tokenizer, rows)
    assert "x.jsonl:2:1: " in str(raised.value)
    assert reason in str(raised.value)
    assert dataset(tmp_path, tokenizer, rows, on_bad_row="skip").rows.tolist() == [0]


def test_a_tokenizer_without_a_template_is_not_the_rows_fault(tmp_path):
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path / "tokenizer", template=None))
    with pytest.raises(TokenizerError, match="has no chat template"):
        dataset(tmp_path, tokenizer, [{"prompt": "x", "answer": ""}], on_bad_row="skip")


@pytest.mark.parametrize("field", ["answer", "level"])
def test_a_value_that_no_reward_could_be_given_is_a_bad_row(tmp_path, tokenizer, field):
    rows = [{"prompt": "ok", "answer": ""}, {"prompt": "ok", "answer": "", field: 10**30}]
    with pytest.raises(DataError, match=rf"x\.jsonl:2:1: '{field}' cannot be handed to a reward"):
        dataset(tmp_path, tokenizer, rows)
    assert dataset(tmp_path, tokenizer, rows, on_bad_row="skip").rows.tolist() == [0]


def test_many_bad_rows_are_counted_rather_than_listed(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"12 rows(?s:.*)and 2 more") as raised:
        dataset(tmp_path, tokenizer, ["[]\n"] * 12)
    assert str(raised.value).count("x.jsonl:") == 10


def test_long_prompts_are_found_before_the_start_and_never_cut(tmp_path, tokenizer):
    rows = [{"prompt": "x" * n, "answer": ""} for n in (1, 50, 2)]
    with pytest.raises(
        DataError, match=r"1 rows are too long .*on_long_prompt(?s:.*)tokens, the most"
    ):
        dataset(tmp_path, tokenizer, rows, max_prompt_tokens=40)
    found = dataset(tmp_path, tokenizer, rows, max_prompt_tokens=40, on_long_prompt="skip")
    assert found.rows.tolist() == [0, 2]
    assert len(found.long_rows) == 1
    longest = len(found.task(2).prompt_token_ids)
    assert len(dataset(tmp_path, tokenizer, rows[2:], max_prompt_tokens=longest)) == 1


def test_the_fingerprint_tells_which_rows_are_used(tmp_path, tokenizer):
    rows = [{"prompt": "x" * n, "answer": ""} for n in (1, 50, 2)]
    whole = dataset(tmp_path, tokenizer, rows)
    assert whole.fingerprint == dataset(tmp_path, tokenizer, rows).fingerprint
    rules = {"max_prompt_tokens": 40, "on_long_prompt": "skip"}
    short = dataset(tmp_path, tokenizer, rows, **rules)
    # A template that spells out the roles, of which there is one more in the first row.
    template = CHATML.replace(
        "{% endfor %}", "{% if m['content'] == 'x' %}" + "z" * 80 + "{% endif %}{% endfor %}"
    )
    longer = PromptTokenizer(write_tokenizer(tmp_path / "longer", template=template))
    other = dataset(tmp_path, longer, rows, **{**rules, "max_prompt_tokens": 80})
    assert (short.rows.tolist(), other.rows.tolist()) == ([0, 2], [1, 2])
    assert len({whole.fingerprint, short.fingerprint, other.fingerprint}) == 3


@pytest.mark.case("T-B41")
def test_data_without_a_usable_row_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match="the data holds no rows"):
        dataset(tmp_path, tokenizer, ["\n"])
    with pytest.raises(DataError, match="no row is left to train on: 1 are bad, 0 are too long"):
        dataset(tmp_path, tokenizer, ["[]\n"], on_bad_row="skip")


def test_a_file_that_changes_under_the_run_is_a_data_error(tmp_path, tokenizer):
    found = dataset(tmp_path, tokenizer, [{"prompt": "ok", "answer": ""}])
    (tmp_path / "x.jsonl").write_text("x" * 100)
    with pytest.raises(DataError, match=r"x\.jsonl:1:1.*changed while the run was using it"):
        found.task(0)


@pytest.mark.case("T-B31")
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_prompt_begins_with_exactly_one_bos(tmp_path, adds_bos):
    directory = write_tokenizer(tmp_path, template="<s>" + CHATML, adds_bos=adds_bos)
    tokenizer = PromptTokenizer(directory)
    assert tokenizer.encode_chat(USER).count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode_text("<s>x").count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode_text("x").count(tokenizer.bos_token_id) == int(adds_bos)
    assert tokenizer.encode_fragment("x").count(tokenizer.bos_token_id) == 0


def test_the_text_after_an_answer_does_not_repeat_an_end_that_was_sampled(tokenizer):
    tool = [{"role": "tool", "content": "42"}]
    end = tokenizer.eos_token_id
    ended = tokenizer.encode_after_answer(tool, answer_token_ids=[50, end])
    cut = tokenizer.encode_after_answer(tool, answer_token_ids=[50])
    assert cut == [end, *ended]
    assert tokenizer.decode(ended) == "\ntool\n42\nassistant\n"


def test_a_sampled_newline_is_not_taken_for_the_end_of_a_turn(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path, template=template))
    newline = tokenizer.encode_fragment("\n")
    after = tokenizer.encode_after_answer(USER, answer_token_ids=newline)
    assert tokenizer.decode(after) == "\nuser: HAVING\nassistant: "


def test_a_template_that_rewrites_answers_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}", {}, origin="tokenizer")
    with pytest.raises(DataError, match="does not keep an assistant's text"):
        template.render_after_answer(USER)


def test_templates_may_use_what_published_ones_use():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, origin="tokenizer")
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "<é>"}]
    assert template.render(messages, tools=[{"name": "<é>"}]) == '<s><é>[{"name": "<é>"}]4'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "é", "a": [1]}'),
        ("(indent=1)", '{\n "b": "é",\n "a": [\n  1\n ]\n}'),
        ("(ensure_ascii=true)", '{"b": "\\u00e9", "a": [1]}'),
        ("(sort_keys=true, separators=(',', ':'))", '{"a":[1],"b":"é"}'),
        ("(true, 1)", '{\n "b": "\\u00e9",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_in_templates_takes_the_options_of_transformers(options, text):
    template = ChatTemplate(f"{{{{ tools | tojson{options} }}}}", {}, origin="tokenizer")
    assert template.render([], tools={"b": "é", "a": [1]}) == text


def test_lines_of_a_template_that_hold_only_a_statement_leave_nothing():
    # What templates published with models are written for.
    source = "  {% if true %}\nx\n  {% endif %}\ny"
    assert ChatTemplate(source, {}, origin="tokenizer").render([]) == "x\ny"


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_of_somebody_else_reaches_nothing(source):
    with pytest.raises(DataError, match=r"is unsafe|is not safely callable"):
        ChatTemplate(source, {}, origin="tokenizer").render(USER)


def test_a_template_that_refuses_says_so_in_a_data_error():
    template = ChatTemplate("{{ raise_exception('no system') }}", {}, origin="tokenizer")
    with pytest.raises(DataError, match="tokenizer: the chat template failed: no system"):
        template.render(USER)
    with pytest.raises(DataError, match="does not compile"):
        ChatTemplate("{% if %}", {}, origin="tokenizer")


def test_the_template_is_found_where_older_files_keep_it(tmp_path):
    for number, template in enumerate(
        (
            "T{{ messages[0].content }}",
            [
                {"name": "tool_use", "template": "another"},
                {"name": "default", "template": "T{{ messages[0].content }}"},
            ],
        )
    ):
        directory = write_tokenizer(
            tmp_path / str(number), template=None, config={"chat_template": template}
        )
        tokenizer = PromptTokenizer(directory)
        assert tokenizer.decode(tokenizer.encode_chat(USER)) == "THAVING"


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        PromptTokenizer(tmp_path)
    directory = write_tokenizer(tmp_path / "x", template=None)
    with pytest.raises(DataError, match="no chat template; set apply_chat_template: false"):
        PromptTokenizer(directory).encode_chat(USER)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        PromptTokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        PromptTokenizer(directory)
