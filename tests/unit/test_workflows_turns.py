import json
import threading

import anyio
import msgspec
import pytest
import trio.testing
from anyio import to_thread

import user_workflows
from libra import clock
from libra.data.task import Task
from libra.data.tokenizer import PromptTokenizer
from libra.errors import ConfigError
from libra.ids import PolicyVersion, PromptId
from libra.rollouts.trajectory import alignment_error
from libra.rollouts.transcript import AlignmentBrokenError, PrefixBrokenError, Transcript
from libra.wire.instance import VersionSpan
from libra.workflows.loading import check_tokenizer, load_workflow, warning_of
from libra.workflows.multi_turn import multi_turn
from libra.workflows.single_turn import single_turn
from libra.workflows.tools import MalformedCall, Toolbox, ToolCall, calls_in
from scripted_engine import ScriptedClient
from tokenizer_dirs import CHATML, write_tokenizer
from trajectories import admitted, completion, trajectory

pytestmark = pytest.mark.anyio
TOOLS = ["user_workflows:slow", "user_workflows:add", "user_workflows:broken"]
USER = ({"role": "user", "content": "go"},)


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.05)}


@pytest.fixture
def tokenizer(tmp_path):
    return PromptTokenizer(write_tokenizer(tmp_path))


def task(tokenizer):
    return Task(
        prompt_id=PromptId("row-0"),
        prompt_token_ids=tuple(tokenizer.encode_chat(USER)),
        messages=USER,
        prompt_text="go",
        answer="",
        extras={},
    )


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(tokenizer, text, *, end=True):
    ids = tokenizer.encode_fragment(text)
    return [*ids, tokenizer.eos_token_id] if end else ids


async def test_one_turn_keeps_prompt_and_answer_as_they_were(tokenizer):
    the_task = task(tokenizer)
    client = ScriptedClient(tokenizer, [said(tokenizer, "HAVING")])
    result = await single_turn(the_task, client)
    assert client.prompts == [the_task.prompt_token_ids]
    assert result.token_ids == (*the_task.prompt_token_ids, *said(tokenizer, "HAVING"))
    assert (result.response_text, result.num_turns, result.finish_reason) == ("HAVING", 1, "stop")
    assert (result.trajectory_id, result.sample_index) == (admitted(0).trajectory_id(1), 1)
    assert alignment_error(result) is None


@pytest.mark.case("T-B32")
async def test_the_end_token_is_trained_wherever_it_was_sampled(tokenizer):
    end = tokenizer.eos_token_id
    client = ScriptedClient(tokenizer, [said(tokenizer, call("add", a=1)), said(tokenizer, "done")])
    result = await multi_turn(task(tokenizer), client, tools=TOOLS)
    masks = [m for t, m in zip(result.token_ids, result.loss_mask, strict=True) if t == end]
    # The prompt's own end of the user's turn, the call's, the tool's, the last answer's.
    assert masks == [0, 1, 0, 1]
    assert result.loss_mask[-1] == 1


@pytest.mark.case("T-B34")
async def test_nothing_is_appended_to_an_answer_that_ended_without_its_end_token(tokenizer):
    answer = said(tokenizer, "HA", end=False)
    result = await single_turn(task(tokenizer), ScriptedClient(tokenizer, [answer]))
    assert result.token_ids[-len(answer) :] == tuple(answer)
    assert len(result.token_ids) == len(result.loss_mask) == len(result.rollout_logprobs)


@pytest.mark.case("T-B30")
async def test_sampled_ids_are_never_tokenised_again(tokenizer):
    # HAV + ING and a split of spaces that the tokenizer itself would never produce.
    odd = [
        *tokenizer.encode_fragment("HAV"),
        *tokenizer.encode_fragment("ING"),
        *tokenizer.encode_fragment(" "),
        *tokenizer.encode_fragment("\n\n"),
    ]
    assert tokenizer.encode_fragment(tokenizer.decode(odd)) != odd
    first = [*odd, *said(tokenizer, call("add", a=2))]
    client = ScriptedClient(tokenizer, [first, said(tokenizer, "3")])
    result = await multi_turn(task(tokenizer), client, tools=TOOLS)
    first_prompt, second_prompt = client.prompts
    assert second_prompt[: len(first_prompt) + len(first)] == (*first_prompt, *first)
    assert result.token_ids == (*second_prompt, *said(tokenizer, "3"))


@pytest.mark.case("T-B37", "T-B24")
async def test_tool_text_is_not_trained_and_comes_in_the_order_of_the_calls(tokenizer):
    calls = call("slow", text="x") + call("add", a=1, b=2) + call("broken") + call("nothing")
    client = ScriptedClient(tokenizer, [said(tokenizer, calls), said(tokenizer, "ok")])
    result = await multi_turn(task(tokenizer), client, tools=TOOLS)
    added = client.prompts[1][len(client.prompts[0]) + len(said(tokenizer, calls)) :]
    assert tokenizer.decode(added) == (
        "\ntool\nslow x\ntool\n3\ntool\nerror: RuntimeError: no such page\n"
        "tool\nerror: no tool 'nothing'; there are slow, add, broken\nassistant\n"
    )
    start = len(client.prompts[1]) - len(added)
    assert set(result.loss_mask[start : len(client.prompts[1])]) == {0}
    assert sum(result.loss_mask) == len(said(tokenizer, calls)) + len(said(tokenizer, "ok"))
    assert (result.num_turns, result.response_text) == (2, "ok")
    assert alignment_error(result) is None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_whatever_a_tool_does_is_an_answer_in_words(anyio_backend):
    names = ("leaves", "leaves_async", "waits_in_vain", "scrapes", "add")
    toolbox = Toolbox([getattr(user_workflows, name) for name in names], timeout_s=30)
    calls = [ToolCall(name, {"a": 1} if name == "add" else {}) for name in names]
    assert await toolbox.answers(calls) == [
        "error: SystemExit: 3",
        "error: SystemExit: 4",
        "error: it waited for something that was cancelled",
        "half ?",
        "2",
    ]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_slow_tools_leave_threads_to_everybody_else(anyio_backend):
    is_over = threading.Event()

    def slow():
        is_over.wait()
        return "at last"

    calls = [ToolCall("slow")] * (to_thread.current_default_thread_limiter().total_tokens + 1)
    answers = []

    async def ask():
        answers.extend(await Toolbox([slow], timeout_s=600).answers(calls))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        try:
            with anyio.fail_after(30):
                assert await to_thread.run_sync(str, 7) == "7"
        finally:
            is_over.set()
    assert answers == ["at last"] * len(calls)


async def test_a_tool_that_takes_too_long_answers_with_that(tokenizer):
    client = ScriptedClient(tokenizer, [said(tokenizer, call("endless")), said(tokenizer, "ok")])
    began_at = clock.now()
    await multi_turn(task(tokenizer), client, tools=["user_workflows:endless"], tool_timeout_s=30)
    assert "error: endless took longer than 30 s" in tokenizer.decode(client.prompts[1])
    assert clock.now() - began_at == pytest.approx(30, abs=1)


async def test_a_conversation_ends_at_its_last_turn_or_when_the_model_is_full(tokenizer):
    script = [said(tokenizer, call("add", a=1))] * 5
    client = ScriptedClient(tokenizer, script)
    assert (await multi_turn(task(tokenizer), client, tools=TOOLS, max_turns=3)).num_turns == 3
    client = ScriptedClient(tokenizer, script, max_model_len=len(client.prompts[1]))
    assert (await multi_turn(task(tokenizer), client, tools=TOOLS)).num_turns == 1


async def test_a_cut_answer_is_not_searched_for_calls(tokenizer):
    cut = completion(said(tokenizer, call("add", a=1)), finish_reason="length")
    result = await multi_turn(task(tokenizer), ScriptedClient(tokenizer, [cut]), tools=TOOLS)
    assert (result.num_turns, result.finish_reason) == (1, "length")


async def test_the_tools_are_shown_to_templates_that_ask_for_them(tmp_path):
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path, template=template))
    client = ScriptedClient(tokenizer, [said(tokenizer, "ok")])
    await multi_turn(task(tokenizer), client, tools=TOOLS[:2])
    shown, _ = json.JSONDecoder().raw_decode(tokenizer.decode(client.prompts[0]))
    assert [s["function"]["name"] for s in shown] == ["slow", "add"]
    assert shown[0]["function"]["description"] == "Echo after a while."
    assert shown[1]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    }


async def test_a_prompt_that_is_plain_text_is_sent_as_it_is_and_tools_answer_in_the_template(
    tokenizer,
):
    plain = msgspec.structs.replace(
        task(tokenizer), messages=(), prompt_token_ids=tuple(tokenizer.encode_text("HAVING: "))
    )
    answer = said(tokenizer, call("add", a=1))
    client = ScriptedClient(tokenizer, [answer, said(tokenizer, "2")])
    result = await multi_turn(plain, client, tools=TOOLS)
    assert client.prompts[0] == plain.prompt_token_ids
    assert tokenizer.decode(client.prompts[1][len(client.prompts[0]) + len(answer) :]) == (
        "\ntool\n2\nassistant\n"
    )
    assert (result.num_turns, result.num_prompt_tokens) == (2, len(plain.prompt_token_ids))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "workflow: .*the tokenizer has none: add chat_template.jinja"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "workflow: .*by token"),
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages %}{% if m['role'] == "
            "'tool' %}{{ raise_exception('no tools') }}{% endif %}"),
            "workflow: .*no tools",
        ),
    ],
)  # fmt: skip
def test_a_template_that_cannot_give_a_tools_answer_is_an_error_before_the_start(
    tmp_path, template, message
):
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(ConfigError, match=message):
        check_tokenizer("multi_turn", tokenizer)
    check_tokenizer("single_turn", tokenizer)


@pytest.mark.case("T-B30")
def test_a_turn_that_does_not_repeat_the_turns_before_is_refused():
    transcript = Transcript()
    transcript.add_turn((1, 2), completion([10, 11]))
    for prompt in ((1, 2, 10), (1, 2, 10, 12, 5), (9, 2, 10, 11)):
        with pytest.raises(PrefixBrokenError, match="turn 2 has a prompt of"):
            transcript.add_turn(prompt, completion([12]))
    transcript.add_turn((1, 2, 10, 11, 5), completion([12]))
    assert transcript.token_ids == (1, 2, 10, 11, 5, 12)


def test_tokens_of_two_policy_versions_at_once_are_refused():
    spans = (VersionSpan(PolicyVersion(0), 2, 4), VersionSpan(PolicyVersion(1), 3, 4))
    twice = msgspec.structs.replace(trajectory(admitted()), version_spans=spans)
    assert alignment_error(twice) == "version span [3, 4) after position 4"


@pytest.mark.case("T-B34")
def test_an_answer_whose_lengths_disagree_is_refused():
    broken_answer = completion([10, 11])
    for change in ({"logprobs": (-0.5,)}, {"version_spans": ()}, {"finish_reason": "error"}):
        with pytest.raises(AlignmentBrokenError, match="vllm-0 answered with"):
            Transcript().add_turn((1,), msgspec.structs.replace(broken_answer, **change))


async def test_long_texts_are_the_same_when_a_thread_works_on_them(tokenizer):
    long = "x" * 10_000
    answer = said(tokenizer, call("slow", text=long))
    script = [answer, said(tokenizer, long)]
    client = ScriptedClient(tokenizer, script, max_model_len=10**6)
    result = await multi_turn(task(tokenizer), client, tools=TOOLS, tool_timeout_s=10)
    assert f"tool\nslow {long}\n" in tokenizer.decode(client.prompts[1])
    assert result.response_text == long


async def test_what_is_no_call_is_answered_with_the_reason(tokenizer):
    text = "<tool_call>add(1)</tool_call>"
    client = ScriptedClient(tokenizer, [said(tokenizer, text), said(tokenizer, "ok")])
    await multi_turn(task(tokenizer), client, tools=TOOLS)
    assert "tool\nerror: not a tool call: " in tokenizer.decode(client.prompts[1])


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="the same function name"):
        Toolbox([user_workflows.add, user_workflows.add], timeout_s=1.0)


def test_calls_are_found_in_the_order_in_which_they_were_written():
    text = 'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"nme": 1}</tool_call><tool_call>{'
    first, second, third = calls_in(text)
    assert first == ToolCall("f")
    assert isinstance(second, MalformedCall)
    assert third == MalformedCall("no </tool_call>")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("none", {}, "no 'none'; use one of single_turn, multi_turn"),
        ("single_turn", {"x": 1}, "workflow_args: single_turn.*'x'"),
        ("multi_turn", {}, "workflow_args: multi_turn.*'tools'"),
        ("multi_turn", {"tools": ["nothing"]}, "not of the form module:function"),
        ("user_workflows:add", {}, "is not an `async def`"),
        ("no_such_module_:f", {}, "importing no_such_module_ failed"),
        ("multi_turn", {"tools": "user_workflows:add"}, "it is a list of module:function"),
        ("multi_turn", {"tools": [3]}, "it is a list of module:function"),
        ("multi_turn", {"tools": TOOLS, "max_turns": 0}, "max_turns is 0; it is a number from 1"),
        ("multi_turn", {"tools": TOOLS, "tool_timeout_s": 0}, "tool_timeout_s is 0; it is above"),
        ("multi_turn", {"tools": [TOOLS[0]] * 2}, "two tools have the same function name"),
        ("multi_turn", {"tools": ["user_workflows:unknown_type"]}, "cannot be shown.*Nowhere"),
        ("leaves_when_imported:f", {}, "importing leaves_when_imported failed: SystemExit: 3"),
    ],
)
def test_a_workflow_that_cannot_be_used_is_a_configuration_error(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_workflow(name, arguments)


def test_a_template_that_does_not_show_tools_is_said(tokenizer, tmp_path):
    warning = warning_of("multi_turn", {"tools": TOOLS}, tokenizer)
    assert "the policy is not told of user_workflows:slow, user_workflows:add" in warning
    shows = CHATML.replace("{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for", 1)
    showing = PromptTokenizer(write_tokenizer(tmp_path / "showing", template=shows))
    assert warning_of("multi_turn", {"tools": TOOLS}, showing) is None
    assert "only where they describe them" in warning_of(
        "multi_turn", {"tools": TOOLS}, showing, is_plain=True
    )
    assert warning_of("multi_turn", {"tools": []}, tokenizer) is None
    assert warning_of("single_turn", {}, tokenizer) is None


async def test_user_code_is_found_by_name_with_its_arguments(tokenizer):
    workflow = load_workflow("user_workflows:workflow", {"times": 3})
    assert await workflow("task", None) == ("task", 3)
    assert await load_workflow("single_turn", {})(task(tokenizer), ScriptedClient(tokenizer, [[5]]))
