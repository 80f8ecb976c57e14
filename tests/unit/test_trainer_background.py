import threading

from libra.trainer.background import BackgroundWork


def test_work_goes_on_behind_whoever_began_it_until_it_is_waited_for():
    gate, done = threading.Event(), []
    work = BackgroundWork(on_error=done.append)
    work.start(lambda: done.append(gate.wait()), name="held")
    assert done == []
    gate.set()
    work.wait()
    assert done == [True]


def test_the_next_piece_of_work_waits_for_the_one_before():
    gate, done = threading.Event(), []
    work = BackgroundWork(on_error=done.append)

    def first() -> None:
        gate.wait()
        done.append("first")

    work.start(first, name="first")
    # Whoever begins the second piece is held until the first has ended.
    beginner = threading.Thread(
        target=lambda: work.start(lambda: done.append("second"), name="second")
    )
    beginner.start()
    gate.set()
    beginner.join()
    work.wait()
    assert done == ["first", "second"]


def test_an_error_is_handed_on_and_ends_nothing_else():
    errors = []
    work = BackgroundWork(on_error=errors.append)
    work.start(lambda: open("/nowhere/at/all"), name="fails")  # noqa: SIM115, PTH123
    work.wait()
    assert [type(error) for error in errors] == [FileNotFoundError]
    work.start(lambda: errors.append("went on"), name="next")
    work.wait()
    assert errors[1] == "went on"
