"""
Figures of an evaluation, with their definitions.

* A *round* is one target forward after the prefill. The token that the prefill yields belongs to no
  round and is never counted in τ.
* τ (`accepted_length`): tokens committed per round, bonus token included, as a ratio of sums over
  all rounds of a set: long answers weigh more. At most γ + 1. `accepted_length_without_bonus`
  counts accepted draft tokens only. A stop token inside an accepted run ends the round: it counts,
  nothing behind it does, and there is no bonus token. A bonus token that is a stop token counts.
* `verify_rate`: committed tokens over positions the target scored, Σ τ_i / (Σ ℓ_i + rounds).
  `acceptance_rate`: accepted over verified draft tokens.
* `prefix_acceptance[k]`: rounds that accepted draft tokens 0…k, of those that verified token k.
  `conditional_acceptance[k]`: the same, of those that also accepted 0…k-1 (paper figure 2).
* `tokens_per_second`: new tokens over seconds of `generate`, prefill and first token included, as
  a ratio of sums; `speedup` is that over the same ratio of plain decoding on the same prompts,
  which took turns with it.
* *Macro* figures are plain means over sets (the paper's average); *pooled* ones are ratios of sums
  over all sets, used for positions and confidences, where single sets are thin.
* `accepted_length_error` is the standard error of τ, prompts being the independent samples (delta
  method for a ratio of sums); NaN with one prompt.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..generation.statistics import Statistics
from .confidence import confidence_figures
from .records import PLAIN, Record

# Figures whose macro average means something.
_AVERAGED = (
    "accepted_length",
    "accepted_length_without_bonus",
    "verify_rate",
    "acceptance_rate",
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
)


def summarise(
    records: Sequence[Record], drafters: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """
    Everything a report shows, ready for JSON (unknown figures are NaN here).

    Args:
        records (`Sequence[Record]`): the calls, plain ones among them or not.
        drafters (`Sequence[dict]`): facts, with the `id` that records carry and a `name`.
        settings (`dict`): copied into the result.

    Returns:
        `settings`, `drafters`, and `results`: per temperature and drafter `sets`, `macro` and
        `pooled`.
    """
    results = []
    for temperature in dict.fromkeys(record.temperature for record in records):
        here = [record for record in records if record.temperature == temperature]
        plain = [record for record in here if record.drafter == PLAIN]
        for drafter in drafters:
            drafted = [record for record in here if record.drafter == drafter["id"]]
            names = dict.fromkeys(record.set_name for record in drafted)
            sets = [
                figures(name, _of_set(drafted, name), _of_set(plain, name), temperature)
                for name in names
            ]
            results.append(
                {
                    "drafter": drafter["name"],
                    "temperature": temperature,
                    "sets": sets,
                    "macro": macro_average(sets),
                    "pooled": figures("all", drafted, plain, temperature),
                }
            )
    return {"settings": settings, "drafters": list(drafters), "results": results}


def figures(
    name: str, drafted: Sequence[Record], plain: Sequence[Record], temperature: float
) -> dict[str, Any]:
    """Figures of one drafter on one set, or on all of them together."""
    total = Statistics()
    for record in drafted:
        total.merge(record.statistics())
    speed, plain_speed = tokens_per_second(drafted), tokens_per_second(plain)
    rounds = [round_ for record in drafted for round_ in record.round_records()]
    return {
        "name": name,
        "num_prompts": len(drafted),
        "rounds": total.rounds,
        "new_tokens": total.new_tokens,
        "accepted_length": total.accepted_length,
        "accepted_length_error": ratio_error(
            [(sum(r[0] for r in record.rounds), len(record.rounds)) for record in drafted]
        ),
        "accepted_length_without_bonus": total.accepted_length_without_bonus,
        "verify_rate": total.verify_rate,
        "acceptance_rate": _ratio(total.accepted, total.verified),
        "verified_at": total.verified_at,
        "reached_at": total.reached_at,
        "accepted_at": total.accepted_at,
        "prefix_acceptance": total.prefix_acceptance,
        "conditional_acceptance": total.conditional_acceptance,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed,
        "draft_share": _ratio(total.draft_seconds, total.total_seconds),
        "same_text_as_plain": _same_texts(drafted, plain) if temperature == 0 else None,
        "confidence": confidence_figures(rounds),
    }


def macro_average(sets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Plain means over sets, and the standard error of τ's."""
    average: dict[str, Any] = {
        name: _ratio(sum(figures_[name] for figures_ in sets), len(sets)) for name in _AVERAGED
    }
    squares = sum(figures_["accepted_length_error"] ** 2 for figures_ in sets)
    average["accepted_length_error"] = _ratio(math.sqrt(squares), len(sets))
    return {"num_sets": len(sets), **average}


def tokens_per_second(records: Iterable[Record]) -> float:
    """New tokens over seconds. NaN without records."""
    records = list(records)
    return _ratio(sum(len(r.tokens) for r in records), sum(r.seconds for r in records))


def ratio_error(samples: Sequence[tuple[float, float]]) -> float:
    """
    Standard error of Σ numerators / Σ denominators over independent samples (delta method).

    NaN below two samples.
    """
    n, below = len(samples), sum(sample[1] for sample in samples)
    if n < 2 or not below:
        return math.nan
    ratio = sum(sample[0] for sample in samples) / below
    squares = sum((above - ratio * under) ** 2 for above, under in samples)
    return math.sqrt(squares * n / (n - 1)) / below


def _of_set(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record.set_name == name]


def _same_texts(drafted: Sequence[Record], plain: Sequence[Record]) -> int | None:
    """Greedy answers equal to plain decoding's, token for token; in float32 that is all of them."""
    texts = {(record.set_name, record.index): record.tokens for record in plain}
    if not texts:
        return None
    return sum(texts[record.set_name, record.index] == record.tokens for record in drafted)


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan
