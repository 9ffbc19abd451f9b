"""A process polls while answers come soon, and leaves the processor to others when it is not alone."""

from __future__ import annotations

from aiodaft._protocol.connections.session import ALONE, POLL, SLICE, SWITCH, Idle, Pace


def paced(gap: float, count: int = 100) -> tuple[Pace, float]:
    """A process that answers after so many seconds, and the time of its last answer."""
    pace, now = Pace(may_poll=True), 0.0
    for _ in range(count):
        pace.since = now
        now += gap
        pace.came(now)
    return pace, now


def test_polling_pays_while_answers_come_soon_and_ends_when_none_comes() -> None:
    pace, now = paced(POLL / 10)
    assert pace.idle(now) is Idle.LOOK
    assert pace.idle(now + 0.9 * POLL) is Idle.YIELD
    assert pace.idle(now + 1.1 * POLL) is Idle.SLEEP


def test_polling_does_not_pay_where_answers_take_long() -> None:
    pace, now = paced(2 * POLL)
    assert pace.idle(now) is Idle.SLEEP


def test_one_long_pause_does_not_end_the_polling_and_some_quick_answers_begin_it_again() -> None:
    pace, now = paced(POLL / 10)
    pace.came(now + 3600)
    assert pace.idle(now + 3600) is Idle.LOOK
    slow, now = paced(3600)
    assert slow.idle(now) is Idle.SLEEP
    for _ in range(20):
        now += POLL / 10
        slow.came(now)
    assert slow.idle(now) is Idle.LOOK


def test_a_process_with_one_processor_or_a_working_thread_does_not_poll() -> None:
    assert Pace(may_poll=False).idle(0.0) is Idle.SLEEP
    pace, now = paced(POLL / 10)
    pace.threads = 1
    assert pace.idle(now) is Idle.SLEEP


def test_a_process_yields_when_an_answer_takes_its_time_or_others_want_the_processor() -> None:
    pace, now = paced(POLL / 10)
    assert pace.idle(now + ALONE / 2) is Idle.LOOK
    assert pace.idle(now + 2 * ALONE) is Idle.YIELD
    pace.yielded(2 * SWITCH)
    assert pace.idle(now) is Idle.YIELD
    pace.yielded(SWITCH / 2)
    assert pace.idle(now) is Idle.LOOK


def test_a_process_sleeps_when_others_use_up_their_time_slices_until_a_message_comes() -> None:
    pace, now = paced(POLL / 10)
    pace.yielded(2 * SLICE)
    assert pace.idle(now) is Idle.SLEEP
    pace.came(now)
    pace.yielded(SWITCH / 2)
    assert pace.idle(now) is Idle.LOOK
