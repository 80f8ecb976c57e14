import json
import logging
import os

import pytest

from libra.tracing.log import EventLog, get_log, set_up_logging


@pytest.fixture
def events(tmp_path, own_logging):
    shown = []
    event_log = set_up_logging(
        tmp_path / "logs" / "control.jsonl", show=shown.append, run_id="run-1"
    )

    def read():
        text = (tmp_path / "logs" / "control.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    read.shown = shown
    yield read
    event_log.close()


def test_an_event_is_one_json_line_with_its_fields(events):
    get_log(child_id="vllm-0").warning("child_exited", exit_code=0, reason="exited with code 0")
    (event,) = events()
    moment = event.pop("at")
    assert moment.endswith("Z")
    assert "T" in moment
    assert event == {
        "level": "warning",
        "event": "child_exited",
        "run_id": "run-1",
        "child_id": "vllm-0",
        "exit_code": 0,
        "reason": "exited with code 0",
    }


def test_the_human_line_quotes_sentences_and_leaves_out_what_never_changes(events):
    get_log().warning("child_exited", child_id="vllm-0", reason="exited with code 0")
    get_log().info("step_trained", step=3)
    first, second = events.shown
    assert first[9:] == 'WARNING child_exited child_id=vllm-0 reason="exited with code 0"'
    assert second[9:] == "step_trained step=3"


def test_a_sentence_is_kept_as_a_message_not_as_a_name(events):
    get_log().info("Something went by")
    (event,) = events()
    assert (event["event"], event["message"]) == ("remark", "Something went by")


def test_a_newline_in_a_field_stays_inside_its_line(events):
    get_log().info("child_printed", line="a\nb")
    assert [event["line"] for event in events()] == ["a\nb"]


def test_debug_events_are_left_out_by_default(events):
    get_log().debug("probe_sent")
    assert events() == []


def test_warnings_of_libraries_arrive_with_their_logger(events):
    logging.getLogger("aiohttp.server").warning("slow %s", "client")
    logging.getLogger("aiohttp.server").info("noise")
    (event,) = events()
    assert event["event"] == "library_log"
    assert (event["logger"], event["message"]) == ("aiohttp.server", "slow client")


def test_an_exception_of_a_library_keeps_its_traceback(events):
    try:
        int("torn")
    except ValueError:
        logging.getLogger("lib").exception("failed")
    (event,) = events()
    assert event["level"] == "error"
    assert "ValueError: invalid literal" in event["exception"]


def test_a_full_disk_costs_lines_and_is_counted():
    event_log = EventLog(None, None)
    event_log._fd = os.open("/dev/full", os.O_WRONLY)
    event_log.write({"event": "x"})
    event_log.close()
    assert event_log.num_lost == 1


def test_values_that_are_not_json_are_shown_as_text(events, tmp_path):
    get_log().info("file_written", path=tmp_path)
    assert events()[0]["path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("value", "logged"),
    [
        ("caf\udce9", "caf\\udce9"),
        ({"name": "\ud800"}, "{'name': '\\ud800'}"),
        (10**40, 10**40),
    ],
)
def test_what_is_no_text_is_logged_all_the_same(events, value, logged):
    get_log().warning("sample_failed", why=value)
    assert [event["why"] for event in events()] == [logged]
