// One question to the gateway, timed.

import { streamChat } from "./api.js";
import { Answer } from "./answer.js";

/**
 * Ask, and return the answer when it is complete. `onTokens(fresh, answer)` hears of tokens as they come; what has come
 * is in `answer` also when this throws: ApiError, or AbortError where `signal` stopped it.
 */
export async function ask(body, { key = "", signal, answer = new Answer(), onTokens = () => {} } = {}) {
  const began = performance.now();
  for await (const chunk of streamChat(body, { key, signal })) {
    const fresh = answer.take(chunk, (performance.now() - began) / 1000);
    if (fresh.length > 0) onTokens(fresh, answer);
  }
  return answer;
}

/** A seed that JSON and JavaScript hold exactly: 53 bits. */
export function drawSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high >>> 11) * 2 ** 32 + low;
}

/** `body` for plain decoding. */
export function plainly(body) {
  return { ...body, speculation: { ...body.speculation, enabled: false } };
}
