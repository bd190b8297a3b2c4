"""The certificates of a mesh: its authority, and one for each machine that the authority signed.

Pure functions over PEM bytes; which files they lie in is `mesh_folder`'s, how connections use them `credentials`'.
Keys are EC P-256: small, quick on small machines, spoken by every TLS library.

A machine is known by its *owner id*, the SHA-256 of its public key: a renewed certificate keeps the key and so the id.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshnet_core.errors import InvalidInputError, MeshnetError
from meshnet_core.ids import check_id

AUTHORITY_LIFETIME = timedelta(days=3650)
MACHINE_LIFETIME = timedelta(days=365)
RENEWED_WHEN_LEFT = 1 / 3  # of a lifetime: a machine that is on for one day in four months never runs out
BACKDATED = timedelta(hours=1)  # clocks at home differ


def new_key() -> bytes:
    """A new private key, PEM, not encrypted: whoever can read the file is the machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_request(key_pem: bytes, name: str) -> bytes:
    """A request, PEM, for a certificate of this key under ``name``."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_id(name, "a machine's name"))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_key(key_pem), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def make_authority(name: str, key_pem: bytes, now: datetime) -> bytes:
    """The certificate, PEM, of a new mesh's authority, signed by itself."""
    key = _key(key_pem)
    public = key.public_key()
    # The name holds the key's id, so that two meshes of one name are told apart by every TLS library.
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, check_id(name, "a mesh's name")),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, _owner_id(public)[:32]),
        ]
    )
    built = (
        _builder(subject, subject, public, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Authority:
    """Signs certificates of machines.

    Args:
        certificate_pem, key_pem: as made by :func:`make_authority` and :func:`new_key`.

    Raises:
        InvalidInputError: they are unreadable or do not belong together.
    """

    def __init__(self, certificate_pem: bytes, key_pem: bytes) -> None:
        self._certificate = _certificate(certificate_pem)
        self._key = _key(key_pem)
        if _owner_id(self._certificate.public_key()) != _owner_id(self._key.public_key()):
            raise InvalidInputError("the authority's key does not belong to its certificate")
        self.certificate_pem = certificate_pem

    @property
    def name(self) -> str:
        return common_name(self.certificate_pem)

    def secret_for(self, purpose: str) -> bytes:
        """32 bytes that only the holder of the authority's key can make, other ones for each purpose."""
        number = self._key.private_numbers().private_value.to_bytes(32, "big")
        return hmac.new(number, f"meshnet {purpose}".encode(), hashlib.sha256).digest()

    def sign(self, request_pem: bytes, now: datetime, lifetime: timedelta = MACHINE_LIFETIME) -> bytes:
        """A machine's certificate, PEM, for a request; only the name and the key are taken from it.

        Raises:
            InvalidInputError: no request, one that its own key did not sign, another kind of key, or a name that is
                none.
        """
        asked, public = _request(request_pem)
        name = check_id(_common_name(asked), "a machine's name")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = (
            _builder(subject, self._certificate.subject, public, now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def pin_of(certificate_pem: bytes) -> str:
    """The SHA-256, in hex, of a certificate: what a join ticket pins."""
    return _certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def common_name(certificate_pem: bytes) -> str:
    """The name that a certificate was made for."""
    return _common_name(_certificate(certificate_pem).subject)


def expires_at(certificate_pem: bytes) -> datetime:
    """When a certificate ends, in UTC."""
    return _certificate(certificate_pem).not_valid_after_utc


def is_due(certificate_pem: bytes, now: datetime) -> bool:
    """Whether a certificate should be renewed now: less than a third of its life is left."""
    certificate = _certificate(certificate_pem)
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now < lifetime * RENEWED_WHEN_LEFT


@functools.lru_cache(maxsize=4096)
def owner_of(certificate_der: bytes) -> str:
    """The owner id, 64 hex digits, of whoever presented this certificate in a handshake."""
    return _owner_id(x509.load_der_x509_certificate(certificate_der).public_key())


def owner_of_pem(certificate_pem: bytes) -> str:
    """As :func:`owner_of`."""
    return _owner_id(_certificate(certificate_pem).public_key())


def request_owner(request_pem: bytes) -> str:
    """The owner id of whoever made a request.

    Raises:
        InvalidInputError: as `Authority.sign`.
    """
    return _owner_id(_request(request_pem)[1])


def utc_now() -> datetime:
    """The wall clock; certificates are the one thing here whose time machines must agree on."""
    return datetime.now(UTC)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise InvalidInputError("this is no private key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise InvalidInputError("a key of a mesh is an EC P-256 key")
    return key


def _request(pem: bytes) -> tuple[x509.Name, ec.EllipticCurvePublicKey]:
    """The subject and the key of a request that is signed by that key."""
    try:
        request = x509.load_pem_x509_csr(pem)
        whole = request.is_signature_valid
        public = request.public_key()
    except (ValueError, InvalidSignature) as error:
        raise InvalidInputError(f"this is no certificate request: {error}") from error
    if not whole or not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
        raise InvalidInputError("a certificate request must be for an EC P-256 key and signed by it")
    return request.subject, public


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise InvalidInputError("this is no certificate in PEM") from error


def _common_name(name: x509.Name) -> str:
    names = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise InvalidInputError("a certificate of a mesh, or a request for one, has exactly one common name")
    return names[0].value


def _owner_id(public: object) -> str:
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise MeshnetError("a certificate of a mesh has an EC key")
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()
