"""What an embedding server must not lose: the same vectors alone and in company, and a sense of what is alike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from bench.quality.findings import ALIKE, Baseline, Finding, cosine, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.quality.server import Server

TEXTS: Final = ("The cat sleeps on the sofa.", "Shares fell sharply on Monday.", "Bread is made of flour and water.")
# A sentence, one that means the same in other words, and one that has its words and another meaning.
TRIPLES: Final = (
    ("The cat is asleep on the couch.", "A kitty naps on the sofa.", "The couch was sold at an auction."),
    (
        "He bought a new car last week.",
        "A week ago he purchased an automobile.",
        "He washed the new windows last week.",
    ),
    ("The film was very boring.", "The movie was dull.", "The film was shot in Canada."),
    ("How do I reset my password?", "I forgot my login and need a new one.", "How do I bake a chocolate cake?"),
    ("It will rain tomorrow.", "Tomorrow's forecast says showers.", "Tomorrow the shop will be closed."),
)


def checks(baseline: Baseline) -> Iterator[tuple[str, Callable[[Server], Finding]]]:
    """Yield the checks by name."""
    yield "embedding_determinism", determinism
    yield "embedding_batch", batch
    yield "embedding_features", features
    yield "embedding_paraphrase", paraphrase
    yield "embedding_drift", partial(drift, baseline=baseline)


def determinism(server: Server) -> Finding:
    """Check that the same text has the same vector twice."""
    least = min(cosine(*(server.embed(text)[0] for _ in range(2))) for text in TEXTS)
    return Finding("embedding_determinism", least, "least cosine of two requests", floor=ALIKE, tolerance=1 - ALIKE)


def batch(server: Server) -> Finding:
    """Check that a text has the same vector alone and among others."""
    together = server.embed(*TEXTS)
    least = min(cosine(server.embed(text)[0], vector) for text, vector in zip(TEXTS, together, strict=True))
    return Finding("embedding_batch", least, "least cosine, alone and in a batch", floor=ALIKE, tolerance=1 - ALIKE)


def features(server: Server) -> Finding:
    """Check that `num_features` cuts the older route's vector and changes nothing else."""
    whole, cut = server.features(TEXTS[0], num_features=64), server.features(TEXTS[0], num_features=16)
    kept = [len(whole) == 64, len(cut) == 16, cosine(whole[:16], cut) > ALIKE]
    return Finding("embedding_features", share(kept), f"lengths {len(whole)} and {len(cut)}", floor=1.0)


def paraphrase(server: Server) -> Finding:
    """Check that a paraphrase is nearer than a sentence with the same words."""
    margins = []
    for triple in TRIPLES:
        anchor, same, other = server.embed(*triple)
        margins.append(cosine(anchor, same) - cosine(anchor, other))
    score = share([margin > 0 for margin in margins])
    return Finding("embedding_paraphrase", score, f"least margin {min(margins):.3f}", floor=0.6, tolerance=0.2)


def drift(server: Server, *, baseline: Baseline) -> Finding:
    """Check that vectors are those of the baseline; without one there is nothing to drift from."""
    now = dict(zip(TEXTS, server.embed(*TEXTS), strict=True))
    known = [cosine(vector, baseline.vectors[text]) for text, vector in now.items() if text in baseline.vectors]
    least = min(known, default=1.0)
    detail = f"least cosine with {len(known)} of the baseline's vectors"
    return Finding("embedding_drift", least, detail, floor=ALIKE, tolerance=1 - ALIKE, vectors=now)
