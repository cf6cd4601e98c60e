// One answer as it grows out of a stream's chunks, and its figures. Knows nothing of the page.

/** An answer. Its tokens are `{text, origin, round, position, id, drafted, logprob, seconds}`, in their order. */
export class Answer {
  tokens = [];
  finishReason = null; // "stop", "length", or null while it grows or where it was cut off
  report = null; // the gateway's own figures, which come with the end
  lastSeconds = 0;
  #numFirst = 0; // tokens that came with the first

  /** Take a chunk that came `seconds` after the request; the tokens that it brought. */
  take(chunk, seconds) {
    const begin = this.tokens.length;
    for (const choice of chunk.choices ?? []) {
      const scores = choice.logprobs?.content ?? [];
      (choice.trace ?? []).forEach((token, index) => {
        this.tokens.push({
          text: token.text,
          origin: token.origin,
          round: token.round,
          position: token.position,
          id: token.token_id,
          drafted: token.drafted,
          logprob: scores[index]?.logprob ?? null,
          seconds,
        });
      });
      this.finishReason = choice.finish_reason ?? this.finishReason;
    }
    this.report = chunk.speculation ?? this.report;
    const fresh = this.tokens.slice(begin);
    if (fresh.length > 0) {
      this.#numFirst ||= fresh.length;
      this.lastSeconds = seconds;
    }
    return fresh;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** The rounds so far, as `{drafted, accepted, own}`: `own` is the origin of the target's token, if it has come. */
  rounds() {
    return roundsOf(this.tokens);
  }

  /**
   * Figures so far; null where there is nothing to divide. At the end they are the gateway's own, which also count
   * tokens that the target accepted behind the answer's end. Tokens a second run from the first token to the last.
   */
  figures() {
    const rounds = this.rounds();
    const drafted = this.report?.drafted ?? sum(rounds, (round) => round.drafted);
    const accepted = this.report?.accepted ?? sum(rounds, (round) => round.accepted);
    const seconds = this.lastSeconds - (this.tokens[0]?.seconds ?? 0);
    const num = this.tokens.length;
    return {
      tokens: num,
      drafted,
      accepted,
      acceptanceRate: drafted ? accepted / drafted : null,
      acceptanceLength: this.report?.acceptance_length ?? (rounds.length ? num / rounds.length : null),
      tokensPerSecond: seconds > 0 ? (num - this.#numFirst) / seconds : null,
      firstSeconds: this.tokens[0]?.seconds ?? null,
      seed: this.report?.seed ?? null,
    };
  }
}

export function roundsOf(tokens) {
  const rounds = [];
  for (const token of tokens) {
    const round = (rounds[token.round] ??= { drafted: token.drafted, accepted: 0, own: null });
    if (token.origin === "accepted") round.accepted += 1;
    else round.own = token.origin;
  }
  return rounds.filter(Boolean);
}

/** The number of tokens that two answers have in common from their beginning. */
export function commonTokens(one, other) {
  let common = 0;
  while (common < Math.min(one.tokens.length, other.tokens.length) && one.tokens[common].id === other.tokens[common].id) {
    common += 1;
  }
  return common;
}

export const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)} %`);
export const decimal = (number, digits) => (number === null ? "–" : number.toFixed(digits));

/** A log-probability as a probability, with as many digits as say something. */
export function probability(logprob) {
  const share = Math.exp(logprob);
  if (share >= 0.9995) return "over 99.9 %";
  if (share < 0.0005) return "under 0.1 %";
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);
