"""Who is turned away at a server's door and why: told in the log, counted by reason. And how often a peer may knock.

Knows no HTTP and no socket; `secure_site` and the servers tell it what happens.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter, OrderedDict

from meshnet_core.certificates import owner_of
from meshnet_core.clock import Clock
from meshnet_core.errors import RateLimitedError
from meshnet_core.rate_limit import PeerRates

REASONS = {
    "no_certificate": "came without a certificate",
    "other_mesh": "a certificate of another mesh, or of none",
    "expired": "a certificate that has ended",
    "not_yet_valid": "a certificate that has not begun: one of the two clocks is wrong",
    "altered": "bytes that were altered on their way, or sent a second time",
    "not_tls": "bytes that are no TLS",
    "old_tls": "no TLS 1.3",
    "refused_us": "the caller does not accept this machine's certificate",
    "broken_off": "the connection ended, or stood still, within the handshake",
    "too_many": "too many connections at once that have not shown who they are",
    "no_key": "a request without an API key",
    "wrong_key": "a request with an API key that is not taken",
    "rate": "more requests than a peer may make",
    "not_its_own": "a node that another machine registered",
    "ticket": "a join ticket that is not valid",
    "other": "a connection that failed otherwise",
}
_BY_LIBRARY_REASON = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "HTTP_REQUEST": "not_tls",
    "HTTPS_PROXY_REQUEST": "not_tls",
    "WRONG_VERSION_NUMBER": "not_tls",
    "BAD_PACKET": "not_tls",
    "UNSUPPORTED_PROTOCOL": "old_tls",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "altered",
    "BAD_RECORD_TYPE": "altered",
    "DIGEST_CHECK_FAILED": "altered",
    "BAD_SIGNATURE": "altered",
    "TLSV1_ALERT_UNKNOWN_CA": "refused_us",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused_us",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused_us",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused_us",
    "UNEXPECTED_EOF_WHILE_READING": "broken_off",
}
_BY_VERIFY_CODE = {10: "expired", 9: "not_yet_valid"}  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
QUIET_S = 60.0  # the same reason of the same peer is in the log once within this
_LOGGED_KEPT = 1000

logger = logging.getLogger(__name__)


class Doorkeeper:
    """One server's; ``turned_away`` counts by the keys of `REASONS`.

    Args:
        clock: tells the time, for rates and for the log.
        per_s, burst: requests of one peer, see `PeerRates`.
    """

    def __init__(self, clock: Clock, *, per_s: float, burst: float) -> None:
        self._clock = clock
        self._rates = PeerRates(clock, per_s, burst)
        self._logged: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.turned_away: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def turn_away(self, reason: str, peer: str, detail: str = "") -> None:
        """Count one that was refused, and say so in the log, unless that was said a moment ago."""
        self.turned_away[reason] += 1
        now, key = self._clock.now(), (reason, peer)
        if now - self._logged.get(key, float("-inf")) >= QUIET_S:
            self._logged[key] = now
            self._logged.move_to_end(key)
            while len(self._logged) > _LOGGED_KEPT:
                self._logged.popitem(last=False)
            logger.warning("turned %s away (%s): %s%s", peer, reason, REASONS[reason], f" ({detail})" if detail else "")

    def admit(self, owner: str | None, address: str) -> None:
        """Let a request in, of the machine ``owner``, or where that is not known of whoever is at ``address``.

        Raises:
            RateLimitedError: it makes too many.
        """
        wait_s = self._rates.take(owner or address)
        if wait_s > 0:
            self.turn_away("rate", address)
            raise RateLimitedError(
                f"more requests than one peer may make; try again in {wait_s:.2f} s", retry_after_s=wait_s
            )


def reason_of(error: BaseException) -> str:
    """The key of `REASONS` for what ended a handshake, or a connection after it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _BY_VERIFY_CODE.get(error.verify_code, "other_mesh")
    if isinstance(error, ssl.SSLError):
        return _BY_LIBRARY_REASON.get(error.reason or "", "other")
    return "broken_off"


def owner_in(ssl_object: ssl.SSLObject | None) -> str | None:
    """The owner id of a connection's peer; None where it showed no certificate."""
    shown = ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None
    return owner_of(shown) if shown else None
