from __future__ import annotations

from instep.runtime.backoff import Backoff


def calls_with_a_check(backoff: Backoff, calls: int) -> list[int]:
    due = []
    for call in range(1, calls + 1):
        backoff.advance()
        if backoff.is_due:
            backoff.record()
            due.append(call)
    return due


def test_checks_are_due_when_the_number_of_calls_has_doubled() -> None:
    assert calls_with_a_check(Backoff(limit=6), 100) == [1, 2, 4, 8, 16, 32]


def test_eager_checks_follow_at_every_call() -> None:
    assert calls_with_a_check(Backoff(limit=3, eager=3), 100) == [1, 2, 3]
    assert calls_with_a_check(Backoff(limit=5, eager=3), 100) == [1, 2, 3, 6, 12]


def test_asking_changes_nothing() -> None:
    backoff = Backoff(limit=2)
    backoff.advance()
    assert all(backoff.is_due for _ in range(5))
    assert backoff == Backoff(limit=2, calls=1)


def test_a_look_that_found_nothing_counts_as_no_check() -> None:
    backoff = Backoff(limit=1, eager=1)
    looked = []
    for call in range(1, 41):
        backoff.advance()
        if backoff.is_due:
            backoff.reschedule()
            looked.append(call)
    assert looked == [*range(1, 17), 21, 27, 34]
    assert backoff.count == 0


def test_a_stopped_schedule_can_be_started_again() -> None:
    backoff = Backoff(limit=9, eager=9)
    backoff.advance()
    backoff.stop()
    backoff.advance()
    assert not backoff.is_due
    backoff.reschedule()
    backoff.advance()
    assert backoff.is_due
