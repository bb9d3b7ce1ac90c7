"""The certificate of `--ssl-self-signed`: made once, kept in the home folder, made anew before it ends.

It proves nothing about who we are; a browser asks once whether to trust it, and what goes over the wire is secret.
"""

import ipaddress
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

_LASTS = timedelta(days=397)  # browsers take no longer ones
_RENEWED_BEFORE = timedelta(days=30)


def self_signed(folder: Path, host: str) -> tuple[Path, Path]:
    """(certificate, private key) for this machine's names and addresses, PEM. Takes half a second where it makes them.

    Raises OSError where the folder cannot be written.
    """
    certfile, keyfile = folder / "certificate.pem", folder / "key.pem"
    names = _lasting_names(host)
    if not _is_good(certfile, keyfile, names):
        folder.mkdir(parents=True, exist_ok=True)
        _make(certfile, keyfile, names | _addresses())
    return certfile, keyfile


def _lasting_names(host: str) -> set[str]:
    """Those that must be in a certificate: addresses come and go with the network."""
    own = socket.gethostname().lower()
    return {"localhost", "127.0.0.1", "::1", own, f"{own}.local", host} - {"0.0.0.0", "::"}


def _addresses() -> set[str]:
    import psutil

    found = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    families = (socket.AF_INET, socket.AF_INET6)
    return {address.address for address in found if address.family in families and "%" not in address.address}


def _is_good(certfile: Path, keyfile: Path, names: set[str]) -> bool:
    from cryptography import x509

    if not certfile.is_file() or not keyfile.is_file():
        return False
    certificate = x509.load_pem_x509_certificate(certfile.read_bytes())
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {str(name.value) for name in held}
    return certificate.not_valid_after_utc > datetime.now(UTC) + _RENEWED_BEFORE and known >= names


def _make(certfile: Path, keyfile: Path, names: set[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Fireside on this machine")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + _LASTS)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in sorted(names)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    keyfile.unlink(missing_ok=True)
    with os.fdopen(os.open(keyfile, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _general_name(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
