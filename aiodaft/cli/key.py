"""`aiodaft key new`: makes the key file of a cluster."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Final

import click

from aiodaft._runtime.connections.identity import find_key_file, load_identity, write_key_file
from aiodaft.exceptions import KeyFileError
from aiodaft_transport.handshake import KEY_SIZE

from .options import Failed, Output, json_option

# A key is replaced, it does not expire: clocks of machines may be wrong. The second date means "never", see RFC 5280.
_FROM: Final = datetime(2020, 1, 1)
_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59)


@click.group()
def key() -> None:
    """Make the key of a cluster."""


@key.command("new")
@click.argument("path", required=False, type=click.Path())
@click.option("--encrypt-payloads", is_flag=True, help="Values between hosts are encrypted, too.")
@json_option
def new_key(path: str | None, encrypt_payloads: bool, as_json: bool) -> None:
    """Make a key file; every machine of the cluster needs a copy.

    PATH: by default $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key.
    """
    where = find_key_file(path)
    try:
        write_key_file(where, os.urandom(KEY_SIZE), *new_certificate(), encrypt_payloads=encrypt_payloads)
        cluster = load_identity(where).key.cluster.hex()[:12]
    except KeyFileError as error:
        raise Failed(str(error)) from error
    output = Output(as_json=as_json)
    output.document = {"path": str(where), "cluster": cluster}
    output.line(
        f"{where}: the key of cluster {cluster}\n"
        "Give every machine of the cluster a copy that only its user can read, by a safe way such as scp -p. A process "
        "that has it may run any code on all of them."
    )
    output.end()


def new_certificate() -> tuple[bytes, bytes]:
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
