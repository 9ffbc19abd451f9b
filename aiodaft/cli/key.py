"""`aiodaft key new`: makes the key file of a cluster."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from typing import Final

from aiodaft._runtime.connections.identity import Identity, find_key_file, load_identity, write_key_file
from aiodaft.exceptions import KeyFileError
from aiodaft_transport.handshake import KEY_SIZE

# A key is replaced, it does not expire: clocks of machines may be wrong. The second date means "never", see RFC 5280.
_FROM: Final = datetime(2020, 1, 1)
_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59)


def new_key(path: str | None, *, encrypt_payloads: bool = False) -> int:
    """Make a key file, at the usual place if no path is given; returns the exit status."""
    where = find_key_file(path)
    try:
        write_key_file(where, os.urandom(KEY_SIZE), *new_certificate(), encrypt_payloads=encrypt_payloads)
        identity = load_identity(where)
    except KeyFileError as error:
        print(error, file=sys.stderr)
        return 1
    print(_advice(str(where), identity))
    return 0


def _advice(where: str, identity: Identity) -> str:
    return (
        f"{where}: the key of cluster {identity.key.cluster.hex()[:12]}\n"
        "Give every machine of the cluster a copy that only its user can read, by a safe way such as scp -p. A process "
        "that has it may run any code on all of them."
    )


def new_certificate() -> tuple[bytes, bytes]:
    """A certificate that signs itself, and its private key: PEM."""
    try:
        from cryptography import x509  # noqa: PLC0415 - optional
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - optional
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - optional
    except ImportError as error:
        raise KeyFileError(
            "`aiodaft key new` and `aiodaft run` need the package `cryptography`: pip install 'aiodaft[cluster]'. No "
            "other command needs it: a key may be made on another machine"
        ) from error
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aiodaft cluster")])
    certificate = (
        x509
        .CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
        # No other certificate can be signed by it.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    encoded = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), encoded
