"""Tables of n-grams of toy models' answers, made as `tandem distill` makes them."""

from __future__ import annotations

import numpy as np

from tandem.distill.asked import Asked
from tandem.distill.dataset import Example
from tandem.distill.ngrams import learn
from tandem.ngram_table import NgramTable, Origin
from tandem.types import SamplingParams
from tests.toy_models import ToyModel

_ASKED = Asked(key="0", category="toy", messages=(), validation=False, temperature=1.0, max_tokens=9)


def example(prompt: list[int], answer: list[int], laws: list[dict[int, float]] | None = None) -> Example:
    """An answer whose laws are `laws`, or one-hot at its tokens."""
    given = laws or [{token: 1.0} for token in answer]
    top_ids = [[*law, *(40 + i for i in range(4 - len(law)))] for law in given]
    probs = [[*law.values(), *([1e-6] * (4 - len(law)))] for law in given]
    return Example(
        asked=_ASKED,
        token_ids=np.array(prompt + answer, dtype=np.int32),
        prompt_length=len(prompt),
        top_ids=np.array(top_ids, dtype=np.int32),
        top_log_probs=np.log(np.array(probs)).astype(np.float16),
    )


def table_of(model: ToyModel, *, num_answers: int, longest: int) -> NgramTable:
    """Of sampled answers of 12 tokens; of a vocabulary of four tokens at least."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(num_answers):
        tokens = rng.integers(0, model.vocab_size, 3).tolist()
        laws = []
        for _ in range(12):
            law = model.law(tokens, SamplingParams(), prompt_length=3)
            laws.append({token: float(p) for token, p in enumerate(law) if p > 0.0})
            tokens.append(int(rng.choice(model.vocab_size, p=law)))
        examples.append(example(tokens[:3], tokens[3:], laws))
    origin = Origin(
        model_id="toy",
        tokenizer_fingerprint="f" * 64,
        vocab_size=model.vocab_size,
        num_answer_tokens=12 * num_answers,
    )
    return learn(examples, origin=origin, longest=longest)
