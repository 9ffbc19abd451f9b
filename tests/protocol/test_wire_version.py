"""A recorded conversation of each wire version that is still spoken: it has to mean the same for ever.

If a test here fails, the wire has changed: raise `WIRE_VERSION`, keep these recordings for as long as their version is
spoken, and add a new one. A recording is never edited.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import FrameDecoder, FrameEncoder, pack, unpack
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import CallId, PeerId

# Numbers, not names: a name may come to mean another number.
_CONTROLLER_1: Final[list[tuple[str, Message]]] = [
    ("95000101aa636f6e74726f6c6c6572cd0fa0", (0, 1, 1, "controller", 4000)),
    (
        "95010110a36164649701fecb4004000000000000a378c3a9c40200ffc0c3",
        (1, 1, 16, "add", (1, -2, 2.5, "x\xe9", b"\x00\xff", None, True)),
    ),
    ("95010210a3616464c403039080", (1, 2, 16, "add", b"\x03\x90\x80")),
    ("9b020210a375736500c0c4020090c0909000", (2, 2, 16, "use", 0, None, b"\x00\x90", None, (), (), 0)),
    # Grants, descriptors of refs, a deadline, a second attempt.
    (
        "9b020310a5747261696e01cd09c4c40301910593c4056772616e7407ce400000009194aa636f6e74726f6c6c657209a877"
        "6f726b65722d32aa4d6f64656c2e6d616b659293c4020005c09094aa636f6e74726f6c6c657208a8776f726b65722d32aa4d6f64656c2e7374657001",
        (
            2,
            3,
            16,
            "train",
            1,
            2500,
            b"\x01\x91\x05",
            (b"grant", 7, 1073741824),
            (("controller", 9, "worker-2", "Model.make"),),
            ((b"\x00\x05", None, ()), ("controller", 8, "worker-2", "Model.step")),
            1,
        ),
    ),
    (
        "9b020402a36c6f670200c40300a178c406696e6c696e65909000",
        (2, 4, 2, "log", 2, 0, b"\x00\xa1x", b"inline", (), (), 0),
    ),
    ("920702", (7, 2)),
    ("93090310", (9, 3, 16)),
    ("930aa8776f726b65722d31cf0000010000000000", (10, "worker-1", 1099511627776)),
    ("920f03", (15, 3)),
    ("920e9201ce00011170", (14, (1, 70000))),
    ("9410a373686dc405006e6f746502", (16, "shm", b"\x00note", 2)),
    ("9211a8776f726b65722d32", (17, "worker-2")),
    ("9321a8776f726b65722d32c404006b6579", (33, "worker-2", b"\x00key")),
    ("9422a8776f726b65722d3207c400", (34, "worker-2", 7, b"")),
    ("922391a3756378", (35, ("ucx",))),
    ("921601", (22, 1)),
    (
        "971707cd012ccd012acd09c49129929200019501c4020090c09090",
        (23, 7, 300, 298, 2500, (41,), ((0, 1), (1, b"\x00\x90", None, (), ()))),
    ),
    ("971707cd012dcd012cc09090", (23, 7, 301, 300, None, (), ())),
    ("931a07cd012d", (26, 7, 301)),
    (
        "961b0510a36164649201c0919501aa636f6e74726f6c6c657202a8776f726b65722d32aa4d6f64656c2e6d616b65",
        (27, 5, 16, "add", (1, None), ((1, "controller", 2, "worker-2", "Model.make"),)),
    ),
    ("931c02a8776f726b65722d32", (28, 2, "worker-2")),
    ("921d02", (29, 2)),
    ("931fc405006e616d65c40780736f75726365", (31, b"\x00name", b"\x80source")),
    ("9220c405006e616d65", (32, b"\x00name")),
    ("95240410a36c6f679201a178", (36, 4, 16, "log", (1, "x"))),
    ("95240510a36c6f67c403039080", (36, 5, 16, "log", b"\x03\x90\x80")),
    ("9212b67468652072756e74696d652077617320636c6f736564", (18, "the runtime was closed")),
]
_WORKER_1: Final[list[tuple[str, Message]]] = [
    ("95000101a8776f726b65722d31cd0fa1", (0, 1, 1, "worker-1", 4001)),
    ("930301c0", (3, 1, None)),
    ("930301c2", (3, 1, False)),
    ("9225920203", (37, (2, 3))),
    ("9226ac697420776173207265736574", (38, "it was reset")),
    ("930301d38000000000000000", (3, 1, -9223372036854775808)),
    ("930301cfffffffffffffffff", (3, 1, 18446744073709551615)),
    ("930301cb3fb999999999999a", (3, 1, 0.1)),
    ("930301a8eda08020f09f9880", (3, 1, "\ud800 \U0001f600")),
    ("930301c400", (3, 1, b"")),
    (
        "950402c4020093c404626c6f629194a8776f726b65722d3105a8776f726b65722d31a3707574",
        (4, 2, b"\x00\x93", b"blob", (("worker-1", 5, "worker-1", "put"),)),
    ),
    ("940502ce04000000b3666c6f617433325b343039362c20343039365d", (5, 2, 67108864, "float32[4096, 4096]")),
    ("940602c40195c0", (6, 2, b"\x95", None)),
    ("940602c40195c3", (6, 2, b"\x95", True)),
    ("950803c4020007c090", (8, 3, b"\x00\x07", None, ())),
    ("960baa636f6e74726f6c6c657208c402000791c4056772616e7490", (11, "controller", 8, b"\x00\x07", (b"grant",), ())),
    ("940caa636f6e74726f6c6c657208a8776f726b65722d32", (12, "controller", 8, "worker-2")),
    ("940daa636f6e74726f6c6c657208c40195", (13, "controller", 8, b"\x95")),
    ("941eaa636f6e74726f6c6c657208cb4004000000000000", (30, "controller", 8, 2.5)),
    ("921307", (19, 7)),
    ("9414aa636f6e74726f6c6c657208c3", (20, "controller", 8, True)),
    ("9415aa636f6e74726f6c6c657208a8776f726b65722d32", (21, "controller", 8, "worker-2")),
    ("921602", (22, 2)),
    (
        "9518aa636f6e74726f6c6c657207cd012c929203cb3fe00000000000009304c40195c2",
        (24, "controller", 7, 300, ((3, 0.5), (4, b"\x95", False))),
    ),
    ("941907cd012c9291059506c4020093c404626c6f629090", (25, 7, 300, ((5,), (6, b"\x00\x93", b"blob", (), ())))),
]

# The contents of payloads, in the codec's own terms.
_VALUES_1: Final[list[tuple[str, Any]]] = [
    (
        "99c0c3c200ff7fcc80cf0000010000000000d38000000000000000",
        [None, True, False, 0, -1, 127, 128, 1099511627776, -9223372036854775808],
    ),
    ("93cb0000000000000000cbbfe0000000000000cb7ff0000000000000", [0.0, -0.5, float("inf")]),
    ("93a0a2c3a9a3eda080", ["", "\xe9", "\ud800"]),
    ("92c400c40200ff", [b"", b"\x00\xff"]),
    ("83a161900180c0c400", {"a": [], 1: {}, None: b""}),
    ("92c70302920102d609d502a178", [(2, [1, 2]), (9, (2, "x"))]),
]

_RECORDED: Final = {1: (_CONTROLLER_1, _WORKER_1)}

_SIDES: Final = [
    pytest.param(*side, id=f"{side[0]} at version {version}")
    for version, (controller, worker) in _RECORDED.items()
    for side in (("controller", "worker-1", controller), ("worker-1", "controller", worker))
]


def stream(recording: list[tuple[str, Message]]) -> bytes:
    return bytes.fromhex("".join(text for text, _ in recording))


def test_every_version_that_is_spoken_is_recorded() -> None:
    assert list(_RECORDED) == list(range(m.OLDEST_WIRE_VERSION, m.WIRE_VERSION + 1))


def test_every_kind_of_message_is_recorded() -> None:
    kinds = {message[0] for side in _RECORDED[m.WIRE_VERSION] for _, message in side}
    assert kinds == set(range(m.KINDS))


@pytest.mark.parametrize(("sender", "receiver", "recording"), _SIDES)
def test_a_recorded_conversation_decodes_to_the_same_messages(
    sender: str, receiver: str, recording: list[tuple[str, Message]]
) -> None:
    session: Session[None] = Session(PeerId(receiver), 1, remote=PeerId(sender), max_pending=10)
    messages = session.receive_data(stream(recording))
    assert repr(messages) == repr([message for _, message in recording[1:]])
    assert (session.version, session.remote_pid) == (recording[0][1][2], recording[0][1][4])


def test_the_newest_version_is_sent_as_it_was_recorded() -> None:
    for side in _RECORDED[m.WIRE_VERSION]:
        for text, message in side:
            encoder = FrameEncoder()
            encoder.pack(message)
            assert encoder.take().hex() == text
            assert list(FrameDecoder().feed(bytes.fromhex(text))) == [message]


def test_a_session_opens_with_the_recorded_greeting_and_call() -> None:
    (greeting, hello), (text, call), *_ = _CONTROLLER_1
    _, _, _, me, pid = hello
    session: Session[None] = Session(PeerId(me), pid, remote=PeerId("worker-1"), max_pending=10)
    session.submit(CallId(call[1]), None, call)
    assert session.data_to_send().hex() == greeting + text


@pytest.mark.parametrize(("text", "value"), _VALUES_1, ids=[text for text, _ in _VALUES_1])
def test_recorded_values_mean_the_same(text: str, value: Any) -> None:
    def extension(code: int, content: bytes) -> Any:
        return code, unpack(content, extension)

    assert repr(unpack(bytes.fromhex(text), extension)) == repr(value)
    if "(" not in repr(value):
        assert pack(value).hex() == text
