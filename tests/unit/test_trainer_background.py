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


def test_one_piece_of_work_waits_for_another_and_holds_nobody():
    gate, done = threading.Event(), []
    work = BackgroundWork(on_error=done.append)

    def first() -> None:
        gate.wait()
        done.append("first")

    work.start(first, name="first")
    work.start(lambda: done.append("second"), name="second")
    assert done == []
    gate.set()
    work.wait()
    assert done == ["first", "second"]


def test_who_begins_a_third_piece_is_held_until_the_first_has_ended():
    gates, done = [threading.Event(), threading.Event()], []
    work = BackgroundWork(on_error=done.append)

    def piece(number: int) -> None:
        gates[number].wait()
        done.append(number)

    work.start(lambda: piece(0), name="first")
    work.start(lambda: piece(1), name="second")
    begun = threading.Event()

    def begin() -> None:
        work.start(lambda: done.append(2), name="third")
        begun.set()

    beginner = threading.Thread(target=begin)
    beginner.start()
    assert not begun.wait(0.05)
    gates[0].set()
    assert begun.wait(10)
    # The second goes on, and the third waits for it.
    assert done == [0]
    gates[1].set()
    beginner.join()
    work.wait()
    assert done == [0, 1, 2]


def test_room_is_made_before_a_third_piece_takes_memory():
    gate, done = threading.Event(), []
    work = BackgroundWork(on_error=done.append)
    work.start(gate.wait, name="first")
    work.make_room()
    work.start(lambda: done.append("second"), name="second")
    waiter = threading.Thread(target=lambda: (work.make_room(), done.append("room")))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    gate.set()
    waiter.join(10)
    work.wait()
    assert sorted(done) == ["room", "second"]


def test_an_error_is_handed_on_and_ends_nothing_else():
    errors = []
    work = BackgroundWork(on_error=errors.append)
    work.start(lambda: open("/nowhere/at/all"), name="fails")  # noqa: SIM115, PTH123
    work.wait()
    assert [type(error) for error in errors] == [FileNotFoundError]
    work.start(lambda: errors.append("went on"), name="next")
    work.wait()
    assert errors[1] == "went on"
