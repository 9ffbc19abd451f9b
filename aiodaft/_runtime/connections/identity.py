"""The credentials of a member of a cluster: the cluster key, and the certificate that all members have; TLS with them.

Both lie in one file, which `aiodaft key new` makes and only its owner can read. Workers get its content over the socket
they inherit.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import hashlib
import os
import re
import select
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, TypeVar, cast

from aiodaft._runtime.platform.tasks import private_file
from aiodaft.exceptions import DaftError, KeyFileError, NotAuthenticated, PeerLost
from aiodaft_transport import Key
from aiodaft_transport.handshake import KEY_SIZE
from aiodaft_transport.system import start_thread

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


VARIABLE: Final = "AIODAFT_KEY_FILE"
_MAX_SIZE: Final = 8 << 10
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL.
_NO_CHECK_TIME: Final = 0x200000
_ENCRYPTED: Final = b"Payloads: encrypted\n"
_FORM: Final = re.compile(
    rb"(" + _ENCRYPTED + rb")?"
    rb"-----BEGIN AIODAFT KEY-----\n([A-Za-z0-9+/=]+)\n-----END AIODAFT KEY-----\n"
    rb"(-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n)"
    rb"(-----BEGIN PRIVATE KEY-----\n[A-Za-z0-9+/=\n]+-----END PRIVATE KEY-----\n)"
)

_LAST_LINE: Final = b"-----END PRIVATE KEY-----\n"


class Identity:
    """The cluster key and the certificate of a cluster; never shown, never pickled.

    Args:
        content: The content of the key file, or `packed()` of another process of the cluster.

    Raises:
        KeyFileError: It is something else.
    """

    def __init__(self, content: bytes) -> None:
        found = _FORM.fullmatch(content)
        if found is None:
            raise KeyFileError(f"it is none that `aiodaft key new` made, or not all of it ({len(content)} bytes)")
        try:
            secret = base64.b64decode(found[2], validate=True)
        except binascii.Error:
            secret = b""
        if len(secret) != KEY_SIZE:
            raise KeyFileError(f"its key has {len(secret)} bytes, not {KEY_SIZE}")
        self.key: Final = Key(secret)
        self._content = content
        self._pair = found[3] + found[4]
        self.encrypts_payloads: Final = found[1] is not None
        try:
            self.certificate: Final = ssl.PEM_cert_to_DER_cert(found[3].decode("ascii"))
            _ = self.server_context
        except (ValueError, ssl.SSLError):
            # The cause may quote the damaged part.
            raise KeyFileError("its certificate or private key is damaged") from None

    def __repr__(self) -> str:
        return f"Identity(cluster {self.key.cluster.hex()[:12]})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the identity of a cluster is not pickled")

    @property
    def name(self) -> str:
        return f"cluster-{self.key.cluster.hex()[:12]}"

    def packed(self) -> bytes:
        return self._content

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # All members have one certificate, which names none of them.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # The key does not expire, and the clock of a machine may say any year.
        context.verify_flags |= _NO_CHECK_TIME
        if side is ssl.PROTOCOL_TLS_SERVER:
            # No session is resumed: tickets would only be more to read.
            context.num_tickets = 0
        context.load_verify_locations(cadata=self.certificate)
        # OpenSSL reads files only.
        with private_file("aiodaft-identity", self._pair) as path:
            context.load_cert_chain(path)
        return context


def find_key_file(key_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Path:
    given = os.fspath(key_file) if key_file is not None else environ.get(VARIABLE)
    return Path(given) if given else Path.home() / ".config" / "aiodaft" / "key"


def load_identity(key_file: str | os.PathLike[str] | None = None) -> Identity:
    """Read the key file that `find_key_file` finds.

    Raises:
        KeyFileError: There is none, others can read it, or it is damaged. Says how to mend it.
    """
    path = find_key_file(key_file)
    try:
        return Identity(read_private(path))
    except OSError as error:
        raise KeyFileError(
            f"the key file {path} cannot be read: {error.strerror}. `aiodaft key new {path}` makes one; every machine "
            f"of a cluster needs a copy. Another place is given by `key_file=` or ${VARIABLE}"
        ) from error
    except KeyFileError as error:
        raise KeyFileError(f"the key file {path} is refused: {error}") from error.__cause__


def receive_identity(stream: BinaryIO) -> Identity:
    """Read the result of `packed()` from a pipe that stays open; blocks.

    Raises:
        KeyFileError: Something else came, or the pipe ended.
    """
    content = b""
    while not content.endswith(_LAST_LINE) and (line := stream.readline(_MAX_SIZE)) and len(content) <= _MAX_SIZE:
        content += line
    try:
        return Identity(content)
    except KeyFileError as error:
        raise KeyFileError(f"the key that came by standard input is refused: {error}") from error.__cause__


def read_private(path: Path) -> bytes:
    # Judges the open file, not its name, which may lead elsewhere by then. A pipe must not block.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_private(os.fstat(fd))
        # All of it, or a part that is refused.
        return os.read(fd, _MAX_SIZE)
    finally:
        os.close(fd)


def _check_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError("it is no regular file")
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"it belongs to user {found.st_uid}, and this process is of user {os.geteuid()}: use a copy of your own"
        )
    if found.st_mode & 0o077:
        raise KeyFileError(f"others may read or write it (mode {found.st_mode & 0o777:04o}): `chmod 600` it")
    if found.st_size > _MAX_SIZE:
        raise KeyFileError(f"it has {found.st_size} bytes, a key file has about 1,000")


def write_key_file(
    path: Path, secret: bytes, certificate: bytes, private_key: bytes, *, encrypt_payloads: bool = False
) -> None:
    """Write a new key file that only this user can read.

    Args:
        path: Nothing may be there. Its folder is made.
        private_key: As PEM, PKCS 8, without a password.
        encrypt_payloads: Whether the members encrypt the payloads between hosts, too.

    Raises:
        KeyFileError: It cannot be made. Nothing is left of it.
    """
    write_private(path, key_content(secret, certificate, private_key, encrypt_payloads=encrypt_payloads))


def key_content(secret: bytes, certificate: bytes, private_key: bytes, *, encrypt_payloads: bool = False) -> bytes:
    lines = [b"-----BEGIN AIODAFT KEY-----", base64.b64encode(secret), b"-----END AIODAFT KEY-----", b""]
    return encrypt_payloads * _ENCRYPTED + b"\n".join(lines) + certificate + private_key


def write_private(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A link at this place is not followed.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.EEXIST and os.path.lexists(path):
            raise KeyFileError(f"{path} exists: a key is never overwritten, since members may use it") from error
        raise KeyFileError(f"{path} cannot be made: {error.strerror}") from error
    try:
        with open(fd, "wb") as file:
            # Also where the umask leaves less.
            os.fchmod(fd, 0o600)
            file.write(content)
            file.flush()
            os.fsync(fd)
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error


T = TypeVar("T")

# TLS 1.3 on a connection between hosts: a socket for `Connection` and its `SendQueue`.
#
# It ends in the two processes themselves. Both show the certificate of the cluster, which is in the key file. First,
# each side sends a MAC of it under the session key of the handshake: so the other end of TLS is the process that has
# proved the cluster key on this connection, and not another one.

DEADLINE: Final = 5.0
RECORD: Final = 16 << 10
_LABELS: Final = {True: b"tls server", False: b"tls client"}
_PROOF_SIZE: Final = 32


class SecureSocket(ssl.SSLSocket):
    """A socket with TLS that behaves like one without: it is never blocking, and nothing waits in it.

    When `send` has raised BlockingIOError, the next one must be of the same data. Descriptors cannot be sent.
    """

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        try:
            return self.write(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]  # SSLSocket has none
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """The first buffer has room for a record, so no byte stays where the event loop does not see it.

        Raises:
            BlockingIOError: No record is complete.
            ValueError: The buffer is too small.
        """
        buffer = memoryview(next(iter(buffers)))
        if len(buffer) < RECORD:
            raise ValueError(f"a buffer for TLS has at least {RECORD} bytes, not {len(buffer)}")
        try:
            return cast("int", self.read(len(buffer), buffer)), [], 0, None
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


async def secure(sock: socket.socket, identity: Identity, session: Key, *, server: bool) -> SecureSocket:
    """Use TLS on a connection that both ends have authenticated.

    Cancellation: closes the socket.

    Args:
        sock: It is closed on failure.
        server: Whether this is the end that was connected to.

    Raises:
        NotAuthenticated: The other end is not the process that has proved the cluster key.
        PeerLost: The connection ended, or the other end did not finish within `DEADLINE`. `.executed` is False.
    """
    context = identity.server_context if server else identity.client_context
    context.sslsocket_class = SecureSocket
    try:
        async with asyncio.timeout(DEADLINE):
            sock.setblocking(False)
            # A socket that was reset meanwhile would be lost, open, in an error of `wrap_socket`.
            sock.getpeername()
            sock = secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
            assert isinstance(secured, SecureSocket)
            await _complete(secured, secured.do_handshake)
            await _exchange_proofs(secured, identity, session, server=server)
    except OSError as error:
        sock.close()
        raise _plainly(error) from error
    except BaseException:
        sock.close()
        raise
    return secured


async def _exchange_proofs(secured: SecureSocket, identity: Identity, session: Key, *, server: bool) -> None:
    if secured.getpeercert(binary_form=True) != identity.certificate:
        raise NotAuthenticated("the other end of a connection shows another certificate than that of the cluster")
    bound = hashlib.sha256(identity.certificate).digest()
    await _complete(secured, lambda: secured.write(session.mac(_LABELS[server], bound)))
    proof = await _complete(secured, lambda: secured.read(_PROOF_SIZE))
    if not proof:
        raise ssl.SSLEOFError("the other end closed it")
    # The proof is a record of its own: nothing that came with it waits where the event loop does not see it.
    if secured.pending() or not session.made(proof, _LABELS[not server], bound):
        raise NotAuthenticated("the other end of a connection is not the process that has proved the cluster key")


async def _complete(secured: SecureSocket, step: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    fd = secured.fileno()
    while True:
        ready = loop.create_future()
        try:
            return step()
        except ssl.SSLWantReadError:
            loop.add_reader(fd, _wake, ready)
            stop = loop.remove_reader
        except ssl.SSLWantWriteError:
            loop.add_writer(fd, _wake, ready)
            stop = loop.remove_writer
        try:
            await ready
        finally:
            stop(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _plainly(error: OSError) -> DaftError:
    if isinstance(error, TimeoutError):
        return PeerLost(f"the other end of a connection did not finish TLS in {DEADLINE:g} s", executed=False)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return NotAuthenticated(f"TLS with the other end of a connection failed: {error.reason}")
    return PeerLost(f"the connection ended before TLS was set up: {error}", executed=False)


# TLS on a stream for payload. Transports use a plain socket, with calls that TLS has not. So they get one end of a
# socketpair, and a thread copies between the other end and the connection with TLS.

_BUFFER: Final = 256 << 10


async def protect(stream: socket.socket, identity: Identity, session: Key, *, server: bool) -> socket.socket:
    """A socket for payload over an authenticated connection, encrypted if the key file says so.

    Cancellation: closes the connection.

    Args:
        server: Whether this is the end that was connected to.

    Raises:
        NotAuthenticated: The other end is not the process that has proved the cluster key.
        PeerLost: The connection ended.
        OSError: There is no descriptor or thread for it.
    """
    if not identity.encrypts_payloads:
        return stream
    secured = await secure(stream, identity, session, server=server)
    with ExitStack() as opened:
        opened.enter_context(secured)
        ours, theirs = map(opened.enter_context, socket.socketpair())
        ours.setblocking(False)
        theirs.setblocking(False)
        start_thread(_copy, secured, theirs, name="aiodaft encrypts")
        opened.pop_all()
    return ours


def _copy(secured: SecureSocket, plain: socket.socket) -> None:
    with secured, plain:
        arriving, leaving = _Direction(secured, plain, RECORD), _Direction(plain, secured, _BUFFER)
        # A connection that breaks is the end of the stream, as without TLS.
        with suppress(OSError):
            while not (arriving.over or leaving.over):
                _wait_until_ready(secured, plain, arriving, leaving)
                arriving.go_on()
                leaving.go_on()


def _wait_until_ready(secured: socket.socket, plain: socket.socket, arriving: _Direction, leaving: _Direction) -> None:
    poller = select.poll()
    for sock, has_left, gets_left in ((secured, arriving.left, leaving.left), (plain, leaving.left, arriving.left)):
        # The end of a socket that none waits for would be told of again and again.
        events = 0 if has_left else select.POLLIN
        events |= select.POLLOUT if gets_left else 0
        if events:
            poller.register(sock, events)
    poller.poll()


class _Direction:
    def __init__(self, source: socket.socket, target: socket.socket, size: int) -> None:
        self._source = source
        self._target = target
        self._buffer = memoryview(bytearray(size))
        self.left = self._buffer[:0]
        self.over = False

    def go_on(self) -> None:
        with suppress(BlockingIOError):
            if not self.left:
                count = self._source.recvmsg_into([self._buffer])[0]
                self.left = self._buffer[:count]
                self.over = not count
            while self.left:
                self.left = self.left[self._target.send(self.left) :]
