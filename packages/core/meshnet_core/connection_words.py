"""Why a connection failed, in words that say what to do about it."""

from __future__ import annotations

import os
import ssl


def connection_words(error: Exception) -> str:
    """Why a connection failed, in the system's own words, such as "Connection refused", without any wrapping."""
    for cause in (error, getattr(error, "certificate_error", None), getattr(error, "os_error", None)):
        if isinstance(cause, ssl.SSLCertVerificationError) and (said := getattr(cause, "verify_message", None)):
            where = "" if cause.verify_code in _TIME_CODES else " is not of this mesh"
            return f"its certificate{where}: {said}"
        if isinstance(cause, ssl.SSLError) and (reason := getattr(cause, "reason", None)):
            return f"TLS: {reason.replace('_', ' ').lower()}{_TLS_HINTS.get(reason, '')}"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


_TIME_CODES = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED: of any mesh
_TLS_HINTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": ", this machine shows none",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": ", this machine's has ended: join again with a new ticket",
    "TLSV1_ALERT_UNKNOWN_CA": ", this machine is in another mesh",
    "WRONG_VERSION_NUMBER": ", what answers there speaks no TLS",
}
