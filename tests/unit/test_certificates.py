"""Certificates of a mesh: what the authority signs, what it refuses, and what stays over a renewal."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_core import certificates
from meshnet_core.certificates import Authority
from meshnet_core.errors import InvalidInputError

NOW = certificates.utc_now()
AUTHORITY_KEY = certificates.new_key()
AUTHORITY = Authority(certificates.make_authority("home", AUTHORITY_KEY, NOW), AUTHORITY_KEY)


def test_a_signed_machine_carries_its_name_and_nothing_that_it_could_sign_with() -> None:
    pem = AUTHORITY.sign(certificates.make_request(certificates.new_key(), "kitchen"), NOW)
    assert certificates.common_name(pem) == "kitchen"
    certificate = x509.load_pem_x509_certificate(pem)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(AUTHORITY.certificate_pem))
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_a_renewed_certificate_is_of_the_same_owner() -> None:
    key = certificates.new_key()
    first = AUTHORITY.sign(certificates.make_request(key, "kitchen"), NOW)
    second = AUTHORITY.sign(certificates.make_request(key, "kitchen"), NOW + timedelta(days=300))
    other = AUTHORITY.sign(certificates.make_request(certificates.new_key(), "kitchen"), NOW)
    assert first != second
    assert certificates.owner_of_pem(first) == certificates.owner_of_pem(second) != certificates.owner_of_pem(other)


@pytest.mark.parametrize(("days", "due"), [(0, False), (242, False), (245, True), (400, True)])
def test_a_certificate_is_renewed_when_a_third_of_its_life_is_left(days: int, due: bool) -> None:
    pem = AUTHORITY.sign(certificates.make_request(certificates.new_key(), "kitchen"), NOW)
    assert certificates.is_due(pem, NOW + timedelta(days=days)) is due


def test_meshes_of_one_name_have_different_subjects_and_pins() -> None:
    key = certificates.new_key()
    twin = Authority(certificates.make_authority("home", key, NOW), key)
    assert twin.name == AUTHORITY.name
    subjects = {x509.load_pem_x509_certificate(one.certificate_pem).subject for one in (twin, AUTHORITY)}
    assert len(subjects) == 2
    assert certificates.pin_of(twin.certificate_pem) != certificates.pin_of(AUTHORITY.certificate_pem)
    assert twin.secret_for("tickets") != AUTHORITY.secret_for("tickets") != AUTHORITY.secret_for("other")


def test_a_key_of_another_kind_is_refused() -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kitchen")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    with pytest.raises(InvalidInputError, match="EC P-256"):
        AUTHORITY.sign(request.public_bytes(serialization.Encoding.PEM), NOW)


def test_a_request_that_its_key_did_not_sign_is_refused() -> None:
    pem = certificates.make_request(certificates.new_key(), "kitchen")
    der = bytearray(x509.load_pem_x509_csr(pem).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    altered = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(InvalidInputError, match="signed by it"):
        AUTHORITY.sign(altered, NOW)


@given(st.binary(max_size=200))
@settings(max_examples=50)
def test_garbage_is_no_request(garbage: bytes) -> None:
    with pytest.raises(InvalidInputError):
        AUTHORITY.sign(garbage, NOW)


def test_a_foreign_key_makes_no_authority() -> None:
    with pytest.raises(InvalidInputError, match="does not belong"):
        Authority(AUTHORITY.certificate_pem, certificates.new_key())


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "../up"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        certificates.make_request(certificates.new_key(), name)
