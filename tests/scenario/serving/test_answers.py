"""What completions carry, while weights change under them. Virtual time, fake engine.

Each token of the fake engine tells which weights made it, which is what stamps are compared with.
"""

import random

import anyio
import msgspec
import pytest

from fake_engine import TOKEN_RADIX
from libra import clock

pytestmark = pytest.mark.anyio


def true_spans(token_ids):
    spans = []
    for k, token in enumerate(token_ids):
        if not spans or spans[-1][0] != token // TOKEN_RADIX:
            spans.append([token // TOKEN_RADIX, k, k])
        spans[-1][2] = k + 1
    return spans


def streamed(answer):
    """Token ids and the stamped spans by choice index."""
    tokens, spans = {}, {}
    for event in answer.events:
        for choice in event.get("choices", ()):
            index = choice["index"]
            tokens.setdefault(index, []).extend(choice["token_ids"])
            if "libra_version_spans" in choice:
                assert index not in spans, "stamped twice"
                assert choice["finish_reason"]
                spans[index] = choice["libra_version_spans"]
    return tokens, spans


async def test_an_answer_names_the_server_and_the_version(app, running):
    async with running():
        answer = await app.complete()
    assert answer.status == 200
    assert answer.headers["x-libra-instance"] == "vllm-0"
    assert answer.headers["x-libra-incarnation"] == "vllm-0-a"
    assert answer.headers["x-libra-policy-versions"] == "0"
    (choice,) = answer.json["choices"]
    assert choice["libra_version_spans"] == [[0, 0, 20]]
    assert choice["text"] == 'a "finish_reason":"x" b'
    assert answer.json["usage"] == {"n": 1}


@pytest.mark.case("T-B58")
@pytest.mark.case("R-B92")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_choice_of_every_prompt_has_the_spans_of_its_own_tokens(app, running, path):
    answers = []

    async def ask(**body):
        answers.append(await app.complete(max_tokens=100, path=path, **body))

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(prompts=[[1], [2, 3]], n=3))
        await clock.sleep(0.3)
        assert (await app.reload(1)).error is None
        await clock.sleep(0.2)
        assert (await app.reload(2)).error is None
    choices = answers[0].json["choices"]
    assert len(choices) == 6
    for choice in choices:
        assert len(choice["token_ids"]) == 100
        assert choice["libra_version_spans"] == true_spans(choice["token_ids"])
    assert [span[0] for span in choices[0]["libra_version_spans"]] == [0, 1, 2]
    assert answers[0].headers["x-libra-policy-versions"] == "0,1,2"


async def test_a_stream_has_its_spans_in_the_last_chunk_of_each_choice(app, running):
    answers = []

    async def ask():
        answers.append(await app.complete(max_tokens=60, n=2, stream=True))

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.sleep(0.2)
        assert (await app.reload(1)).error is None
    tokens, spans = streamed(answers[0])
    assert answers[0].body.endswith(b"data: [DONE]\n\n")
    assert {k: len(v) for k, v in tokens.items()} == {0: 60, 1: 60}
    for index, stamped in spans.items():
        assert stamped == true_spans(tokens[index])
        assert len(stamped) == 2


@pytest.mark.case("R-B88")
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_the_pause_mode_decides_what_becomes_of_running_requests(app, running, mode):
    answers = []

    async def ask():
        answers.append(await app.complete(max_tokens=100))

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.sleep(0.3)
        assert (await app.reload(1, pause_mode=mode)).error is None
    (choice,) = answers[0].json["choices"]
    spans = choice["libra_version_spans"]
    assert spans == true_spans(choice["token_ids"])
    expected = {"keep": ([0, 1], "length"), "wait": ([0], "length"), "abort": ([0], "abort")}
    assert ([span[0] for span in spans], choice["finish_reason"]) == expected[mode]
    assert (len(choice["token_ids"]) < 100) == (mode == "abort")


async def test_nothing_is_stamped_for_a_client_that_has_left(app, running):
    async with running():
        answer = await app.complete(client_leaves=True)
    assert (answer.status, answer.body) == (200, b"null")


async def test_errors_of_the_engine_pass_unchanged(app, running):
    async with running():
        answer = await app.complete(is_bad=True)
    assert (answer.status, answer.json) == (400, {"error": {"message": "bad"}})


class Traffic:
    """Requests and reloads at random moments, and what came of them."""

    def __init__(self, app, seed, *, by_transfer):
        self.app, self.rng, self.by_transfer = app, random.Random(seed), by_transfer
        self.answered, self.refused = [], []

    async def ask(self, how):
        answer = await self.app.complete(**how)
        (self.answered if answer.status == 200 else self.refused).append((how, answer))

    def a_request(self):
        rng = self.rng
        return {
            "max_tokens": rng.randint(1, 80),
            "n": rng.choice([1, 1, 2]),
            "stream": rng.random() < 0.3,
            "prompts": [[rng.randint(0, 9)] for _ in range(rng.choice([1, 1, 2]))],
        }

    async def reload_now_and_then(self):
        for number in range(8):
            await clock.sleep(self.rng.uniform(0.0, 1.0))
            await self.reload_once(1 + number % 3, self.rng.choice(["", "", "load", "probe"]))

    async def reload_once(self, version, fault):
        engine = self.app.engine
        engine.probe_error = fault == "probe"
        engine.load_s = self.rng.uniform(0.0, 0.3)
        mode = self.rng.choice(["keep", "keep", "wait", "abort"])
        if not self.by_transfer:
            engine.load_error = RuntimeError("torn") if fault == "load" else None
            ack = await self.app.reload(version, pause_mode=mode, force=True)
        else:
            request = self.app.transfer_for(version)
            engine.receive_error = "torn" if fault == "load" else ""
            request = msgspec.structs.replace(request, pause_mode=mode, force=True)
            ack = await self.app.receive(request)
        assert (ack.error is None) == (fault == "")
        state = await self.app.state()
        assert state["policy_version"] == (None if fault else version)
        assert fault or engine.weights == version


def check_stamps(how, answer):
    if how["stream"]:
        tokens, spans = streamed(answer)
        errors = [event["error"] for event in answer.events if "error" in event]
        assert all(error["code"] == 503 for error in errors)
        assert errors or tokens.keys() == spans.keys()
    else:
        choices = answer.json["choices"]
        tokens = {choice["index"]: choice["token_ids"] for choice in choices}
        spans = {choice["index"]: choice["libra_version_spans"] for choice in choices}
        assert tokens.keys() == spans.keys()
    for index, stamped in spans.items():
        assert stamped == true_spans(tokens[index])


@pytest.mark.case("T-B72")
@pytest.mark.parametrize("by_transfer", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_under_random_traffic_and_reloads_no_token_is_mislabelled(
    app, running, seed, by_transfer
):
    """Requests enter, wait, stream and end at any moment of good and failing reloads."""
    traffic = Traffic(app, seed, by_transfer=by_transfer)
    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(traffic.reload_now_and_then)
        for _ in range(100):
            tasks.start_soon(traffic.ask, traffic.a_request())
            app.engine.add_s = traffic.rng.choice([0.0, 0.005])
            await clock.sleep(traffic.rng.uniform(0.0, 0.08))
    assert len(traffic.answered) + len(traffic.refused) == 100
    assert len(traffic.answered) > 20
    for how, answer in traffic.answered:
        check_stamps(how, answer)
    for _, answer in traffic.refused:
        assert answer.status == 503
        assert answer.json["error"]["message"].startswith("weights unknown")


@pytest.mark.parametrize(
    ("body", "has_text"),
    [
        ({}, True),
        ({"vllm_xargs": {"another": 1}}, True),
        ({"vllm_xargs": {"libra_token_ids_only": 1}}, False),
        ({"vllm_xargs": {"libra_token_ids_only": 0}}, True),
        ({"vllm_xargs": {"libra_token_ids_only": 1}, "stop": ["x"]}, True),
    ],
)
async def test_no_text_is_made_for_who_reads_token_ids_alone(app, running, body, has_text):
    async with running():
        answer = await app.complete(**body)
    (choice,) = answer.json["choices"]
    assert bool(choice["text"]) is has_text
    assert len(choice["token_ids"]) == 20
