"""Who calls: where a key may be, whose it is, and which tier the request runs at. Pure.

A key that is shown is always judged, also where nobody needs one: a wrong key is a mistake that its owner wants to hear of.
Times are seconds since 1970.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import unquote

from services.admission.core.model import Tier
from services.kit.errors import Reason
from services.kit.keyring import Key, digest

ANONYMOUS: Final = "anonymous"
OPERATOR: Final = "operator"
SHARED: Final = "shared"
"""Clients that are no key's name: nobody known, the owner of the box, whoever has the shared secret."""

SECRET_PARAMETER: Final = "secret"  # noqa: S105 - the name of a query parameter
KEY_HEADERS: Final = ("authorization", "x-api-key", "x-rapid-api-key", "secret")
"""Headers that may hold a key, in order of precedence; the query parameter comes last."""
PLACES: Final = (
    "Authorization: Bearer KEY, X-API-Key, X-Rapid-API-Key, the header `secret` or the query parameter `secret`"
)

_WORDS: Final[Mapping[str, Tier]] = MappingProxyType({tier.name.lower(): tier for tier in Tier})
_DEFAULT: Final = Tier.FREE


class Allowed(NamedTuple):
    """The request may go on, for this client and at this tier."""

    client: str
    tier: Tier


class Denied(NamedTuple):
    """The request is refused; `message` is for the caller."""

    reason: Reason
    message: str


Verdict = Allowed | Denied


@dataclass(frozen=True, slots=True)
class Book:
    """Every key by the digest of its text. `any_tier`: digests whose holders get only the tier that they ask for."""

    keys: Mapping[str, Key] = field(default_factory=lambda: MappingProxyType({}))
    any_tier: frozenset[str] = frozenset()

    @classmethod
    def of(cls, keys: Iterable[Key], secret: str = "") -> "Book":
        """Return the book of these keys and the shared secret, which may ask for any tier.

        A text that is there twice is revoked if it is revoked once; otherwise the first one wins.
        """
        book: dict[str, Key] = {}
        if secret:
            book[digest(secret)] = Key(SHARED, digest(secret), Tier.PAID.name.lower())
        for key in sorted(keys, key=lambda each: each.revoked is None):
            book.setdefault(key.sha256, key)
        return cls(MappingProxyType(book), frozenset({digest(secret)} if secret else ()))


@dataclass(frozen=True, slots=True)
class Policy:
    """What the settings say about callers without a key, and the operator's token ("" wants none).

    `anonymous_tier`: the best tier of callers without a key, or "auto": any for one who has the box to himself
    (`on_loopback`, and no key was ever made), else free. `allow_anonymous` lets them in although others are about.
    """

    anonymous_tier: str = "auto"
    allow_anonymous: bool = False
    on_loopback: bool = True
    operator_token: str = field(default="", repr=False)

    def anonymous(self, *, has_keys: bool) -> Tier | None:
        """Return the best tier of a caller without a key, None when it is not let in.

        `has_keys` counts revoked and expired keys too: who revokes his last key does not open the door.
        """
        alone = self.on_loopback and not has_keys
        if not alone and not self.allow_anonymous:
            return None
        if self.anonymous_tier != "auto":
            return _WORDS[self.anonymous_tier]
        return Tier.PAID if alone else Tier.FREE


def shown_key(headers: Mapping[str, str], path: str) -> str | None:
    """Return the key in the first place that holds one, or None.

    A header that came twice arrives as one value with a comma, which is no key. An empty value is no key either, nor is
    an Authorization of another scheme.
    """
    for name in KEY_HEADERS:
        value = headers.get(name)
        if value is not None and (key := bearer(value) if name == "authorization" else value.strip()):
            return key
    values = query_secrets(path)
    return ",".join(values) or None


def bearer(authorization: str) -> str:
    """Return the token of an Authorization header, "" when there is none or the scheme is another."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def query_secrets(path: str) -> list[str]:
    """Return the values of the query parameter `secret`, decoded, in their order."""
    _, mark, query = path.partition("?")
    if not mark or SECRET_PARAMETER not in query:
        return []
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [unquote(value) for name, _, value in pairs if name == SECRET_PARAMETER]


def judge_public(sha256: str, asked: str, book: Book, anonymous: Tier | None, now: float) -> Verdict:
    """Return who shows the key of that digest ("": none) on the public listener.

    `asked`: the wanted tier, "" when it is not said; the key's own is the best one. `anonymous`: that of callers without a
    key, None where they are not let in.
    """
    if not sha256:
        if anonymous is None:
            return Denied(Reason.UNAUTHENTICATED, f"this server wants an API key: {PLACES}")
        return _at_most(ANONYMOUS, anonymous, asked, default=_DEFAULT)
    known = book.keys.get(sha256)
    if known is None:
        return Denied(Reason.UNAUTHENTICATED, "this API key is not known here")
    if known.revoked is not None:
        return Denied(Reason.UNAUTHENTICATED, f"the API key {known.name!r} has been revoked")
    if not known.is_active(now):
        return Denied(Reason.UNAUTHENTICATED, f"the API key {known.name!r} has expired")
    cap = _WORDS[known.tier]
    return _at_most(known.name, cap, asked, default=_DEFAULT if sha256 in book.any_tier else cap)


def judge_operator(sha256: str, asked: str, wanted_sha256: str) -> Verdict:
    """Return the owner of the box, who may ask for any tier. The digests: of the token shown, and of the one wanted; "" is none."""
    if wanted_sha256 and sha256 != wanted_sha256:
        wanted = "this listener wants the operator's token: Authorization: Bearer TOKEN"
        return Denied(Reason.UNAUTHENTICATED, f"{wanted}; the one shown is another" if sha256 else wanted)
    return _at_most(OPERATOR, Tier.PAID, asked, default=_DEFAULT)


def judge_mesh(service: str, asked: str, outsiders: frozenset[str], client: str = "") -> Verdict:
    """Return the service whose token came along ("": no token, or nobody's), or whom it works for ("": itself).

    `outsiders` have a token but are no services.
    """
    if not service:
        return Denied(Reason.UNAUTHENTICATED, "this listener wants a service token: X-Omniserve-Service-Token")
    if service in outsiders:
        return Denied(Reason.FORBIDDEN, f"this listener is for services of the mesh, and {service} is none")
    return _at_most(client or service, Tier.PAID, asked, default=_DEFAULT)


def _at_most(client: str, cap: Tier, asked: str, *, default: Tier) -> Verdict:
    word = asked.strip().lower()
    tier = _WORDS.get(word) if word else default
    if tier is None:
        known = ", ".join(sorted(_WORDS, key=lambda name: -_WORDS[name]))
        return Denied(Reason.INVALID_REQUEST, f"tier {word[:40]!r} is none of {known}")
    return Allowed(client, min(tier, cap))
