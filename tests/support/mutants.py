"""Bugs to plant in a copy of the package, each of which breaks one promise; `test_mutants` sees that the tests find it.

A text that is replaced occurs once in its file. If that file changes, give the bug another text: it is still to break
the promise.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """A bug.

    Attributes:
        promise: The promise that it breaks.
        file: Its file, from the root of the project.
        old: The text that it replaces.
        new: The text that is there instead.
        tests: The files of the default suite that are to find it.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: str


_CALLS: Final = "aiodaft/_protocol/calls"
_CONNECTIONS: Final = "aiodaft/_protocol/connections"
_COORDINATION: Final = "aiodaft/_protocol/coordination"
_DIAGNOSTICS: Final = "aiodaft/_protocol/diagnostics"
_NODE: Final = "aiodaft/_protocol/node"
_OBJECTS: Final = "aiodaft/_protocol/objects"
_SUPERVISION: Final = "aiodaft/_protocol/supervision.py"
_ACTOR: Final = "aiodaft/_runtime/actors/hosted_actor.py"
_CHANNEL: Final = "aiodaft/_protocol/channels/channel.py"

MUTANTS: Final = [
    # Every call ends once.
    Mutant(
        "a call that may have run is not made again",
        f"{_CALLS}/outgoing.py",
        "or error.executed:\n",
        "and error.executed:\n",
        "tests/protocol/test_following.py tests/e2e/test_following.py",
    ),
    Mutant(
        "an overloaded actor is not called again",
        f"{_CALLS}/outgoing.py",
        "if isinstance(error, Overloaded):",
        "if False:",
        "tests/protocol/test_following.py",
    ),
    Mutant(
        "only an idempotent method has retries",
        f"{_CALLS}/outgoing.py",
        "    if not idempotent:\n        if retries is not None:",
        "    if not idempotent:\n        if False:",
        "tests/protocol/test_following.py tests/e2e/test_following.py tests/e2e/test_mistakes.py",
    ),
    Mutant(
        "a call that was cancelled before it began never begins",
        f"{_CALLS}/mailbox.py",
        "GONE: Final = frozenset({WITHDRAWN, OVER})",
        "GONE: Final = frozenset({OVER})",
        "tests/protocol/test_mailbox.py tests/protocol/test_call.py",
    ),
    Mutant(
        "a call is answered once",
        f"{_CALLS}/mailbox.py",
        "        after = NEXT[event].get(self.stage)\n",
        "        after = NEXT[event].get(self.stage, self.stage)\n",
        "tests/protocol/test_call.py tests/runtime/test_hosted_calls.py",
    ),
    # Order.
    Mutant(
        "calls of one caller start in order while an earlier one waits for its arguments",
        f"{_CALLS}/mailbox.py",
        "            and not (self._lanes or caller in self._last)",
        "            and caller not in self._last",
        "tests/protocol/test_mailbox.py tests/protocol/test_mailbox_histories.py",
    ),
    Mutant(
        "a call after one for the other thread waits until that has begun",
        f"{_CALLS}/mailbox.py",
        "            if not _has_begun(last):\n                return False\n",
        "            pass\n",
        "tests/protocol/test_mailbox.py tests/protocol/test_mailbox_histories.py",
    ),
    Mutant(
        "no caller takes every free place of a method with concurrency",
        f"{_CALLS}/mailbox.py",
        "                self._lanes[caller] = self._lanes.pop(caller)\n",
        "                pass\n",
        "tests/protocol/test_mailbox.py",
    ),
    Mutant(
        "a stopped actor gets all earlier calls",
        f"{_CONNECTIONS}/session.py",
        "            if own.message is None or own.behind:\n",
        "            if own.message is None:\n",
        "tests/protocol/test_session.py tests/protocol/test_session_histories.py",
    ),
    # Deadlines and cancellation.
    Mutant(
        "the caller of a late call waits for its cleanup",
        _ACTOR,
        "        if begun and not call.rules.on_thread:\n            call.handle(EXPIRE)",
        "        if False:\n            call.handle(EXPIRE)",
        "tests/e2e/test_deadlines.py tests/runtime/test_hosted_calls.py",
    ),
    Mutant(
        "the await of a cancelled call waits for the remote `finally`",
        _ACTOR,
        "        if call.stage is CANCELLED and call.rules.on_thread:\n",
        "        if call.stage is CANCELLED:\n",
        "tests/e2e/test_cancellation.py",
    ),
    Mutant(
        "a call with another awaiter goes on",
        f"{_OBJECTS}/value.py",
        "return waiters or self.in_use or",
        "return self.in_use or",
        "tests/protocol/test_value.py tests/e2e/test_cancellation.py",
    ),
    Mutant(
        "a call whose ref was passed on goes on",
        f"{_OBJECTS}/value.py",
        "return waiters or self.in_use or",
        "return waiters or",
        "tests/protocol/test_value.py tests/e2e/test_cancellation.py",
    ),
    Mutant(
        "calls under way get the grace time of a stop",
        _ACTOR,
        "        await self._wait_idle(grace)\n",
        "        await self._wait_idle(0)\n",
        "tests/runtime/test_hosted_calls.py",
    ),
    Mutant(
        "a stopped actor's thread has ended",
        _ACTOR,
        "        await self.thread.close_within(0 if runs else self._process.grace)\n",
        "        self.thread.close()\n",
        "tests/runtime/test_hosted_calls.py",
    ),
    # Back-pressure.
    Mutant(
        "4096 calls have no answer at most",
        f"{_CONNECTIONS}/session.py",
        "WINDOW: Final = 4096\n",
        "WINDOW: Final = 65536\n",
        "tests/protocol/test_session.py tests/e2e/test_calls.py tests/e2e/test_overload.py",
    ),
    Mutant(
        "64 MiB of arguments are on their way at most",
        f"{_CONNECTIONS}/session.py",
        "and self._bytes + cost > self._window_bytes\n",
        "and False\n",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "the window grows when no call is answered",
        f"{_CONNECTIONS}/session.py",
        "            self._window = min(2 * self._window, self._max_pending)\n",
        "",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "an accepted call is not refused later",
        f"{_CONNECTIONS}/session.py",
        "if pending >= self._max_pending and not admitted:",
        "if pending >= self._max_pending:",
        "tests/protocol/test_session.py tests/e2e/test_overload.py",
    ),
    Mutant(
        "the n-th waiting call of a method is the last one",
        f"{_CALLS}/mailbox.py",
        "waiting.count(entry.rules.name) >= of_method:",
        "waiting.count(entry.rules.name) > of_method:",
        "tests/protocol/test_mailbox.py tests/e2e/test_overload.py",
    ),
    Mutant(
        "a producer is 16 items ahead at most",
        f"{_OBJECTS}/value.py",
        "CREDIT_WINDOW: Final = 16\n",
        "CREDIT_WINDOW: Final = 32\n",
        "tests/e2e/test_streams.py",
    ),
    Mutant(
        "a channel holds as many items as its capacity",
        _CHANNEL,
        "len(self._items) < self._capacity:",
        "len(self._items) <= self._capacity:",
        "tests/protocol/test_channel.py",
    ),
    # Channels.
    Mutant(
        "an item whose receiver died goes to another one",
        _CHANNEL,
        "            self._items.appendleft(self._lent.pop(owner))\n        self._gone",
        "            self._lent.pop(owner)\n        self._gone",
        "tests/protocol/test_channel.py tests/protocol/test_channel_histories.py",
    ),
    Mutant(
        "a closed channel takes no more items",
        _CHANNEL,
        "        if self._closed:\n            self._tell(sender, Kind.OVER, message.ticket)\n            return\n",
        "",
        "tests/protocol/test_channel.py tests/protocol/test_channel_histories.py",
    ),
    # Errors that no code sees.
    Mutant(
        "a sibling of a failed await counts as seen",
        _SUPERVISION,
        "one.maker == maker and",
        "one.maker != maker and",
        "tests/protocol/test_siblings.py",
    ),
    Mutant(
        "a wait for a call that was given up does not excuse the call's own error",
        _SUPERVISION,
        "one.call != call and",
        "True and",
        "tests/protocol/test_siblings.py",
    ),
    Mutant(
        "a hundred unhandled errors are kept",
        f"{_DIAGNOSTICS}/failures.py",
        "        if len(self._kept) >= LIMIT:\n            return False\n",
        "",
        "tests/protocol/test_unhandled.py",
    ),
    Mutant(
        "an error cannot forge a line of the log",
        "aiodaft/_runtime/platform/tasks.py",
        '_MARGIN: Final = "  | "',
        '_MARGIN: Final = ""',
        "tests/runtime/test_error_log.py",
    ),
    # Deadlocks.
    Mutant(
        "only calls that have waited twice are in a deadlock",
        f"{_DIAGNOSTICS}/failures.py",
        "for call, now in answers.items() if now == self._stuck[call])",
        "for call, now in answers.items())",
        "tests/protocol/test_deadlock.py",
    ),
    Mutant(
        "of a deadlock, a call that has not begun is given up",
        f"{_DIAGNOSTICS}/failures.py",
        "return not stuck[call].begun, not stuck[call].own,",
        "return stuck[call].begun, not stuck[call].own,",
        "tests/protocol/test_deadlock.py",
    ),
    # Restarts.
    Mutant(
        "all stop before the first is started again",
        _SUPERVISION,
        "    if stopping:\n        return stopping[-1], None\n",
        "",
        "tests/e2e/test_supervision.py",
    ),
    Mutant(
        "an actor that ended as wanted is not restarted",
        _SUPERVISION,
        "if state is ChildState.UP and not wanted else",
        "if state is ChildState.UP else",
        "tests/protocol/test_supervision.py tests/runtime/test_restarts.py tests/e2e/test_supervision.py",
    ),
    Mutant(
        "each wait for a restart is longer than the one before",
        _SUPERVISION,
        "self.base * self.factor ** (count - 1)",
        "self.base",
        "tests/protocol/test_supervision.py",
    ),
    # Placement and GPUs.
    Mutant(
        "a node gives no more whole GPUs than it has",
        f"{_NODE}/resources.py",
        "return sum(free > 1 - _EPSILON for free in self.gpus)",
        "return len(self.gpus)",
        "tests/protocol/test_resources.py tests/protocol/test_placement.py",
    ),
    Mutant(
        "a GPU that is declared and not there is none of another process",
        f"{_NODE}/resources.py",
        "itertools.count(len(machine) if visible else 0)",
        "itertools.count(0)",
        "tests/protocol/test_gpu_names.py",
    ),
    Mutant(
        "a GPU that is named twice is none",
        f"{_NODE}/resources.py",
        "return visible if len(set(visible)) == len(visible) else []",
        "return visible",
        "tests/protocol/test_gpu_names.py",
    ),
    # Output.
    Mutant(
        "a bar stays below the output of others",
        f"{_DIAGNOSTICS}/printing.py",
        '(stream, f"{line}\\n"), (self._stream, self._shown)]',
        '(stream, f"{line}\\n")]',
        "tests/protocol/test_printing.py",
    ),
    # Leases and names.
    Mutant(
        "a node acts under its lease only until it may be over",
        f"{_COORDINATION}/records.py",
        "sent_at + good_for - self._skew)",
        "sent_at + good_for + self._skew)",
        "tests/protocol/test_leases.py tests/e2e/test_coordination_histories.py",
    ),
    Mutant(
        "a coordinator that was stopped ends no lease for that",
        f"{_COORDINATION}/records.py",
        "lease.deadline = max(lease.deadline, now + _STOPPED * self.ttl)",
        "pass",
        "tests/protocol/test_leases.py",
    ),
    # Death, and strangers.
    Mutant(
        "one kill of the kernel explains one death",
        f"{_NODE}/worker.py",
        "        self._seen[counter] += 1\n",
        "",
        "tests/runtime/test_postmortem.py tests/e2e/test_death.py",
    ),
    Mutant(
        "a process without the key learns nothing",
        "transport/aiodaft_transport/handshake.py",
        "return hmac.compare_digest(proof, self.mac(label, *parts))",
        "return True",
        "tests/transport/test_handshake.py",
    ),
    # Collectives.
    Mutant(
        "members that disagree all get an error that names two ranks",
        "aiodaft/_protocol/groups/meeting.py",
        "                if one != other:\n",
        "                if False:\n",
        "tests/protocol/test_meeting.py",
    ),
]
