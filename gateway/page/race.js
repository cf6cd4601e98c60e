// The race: one request with speculation and without, under one seed. The text is the same, the time is not.

import { Answer, commonTokens } from "./answer.js";
import { ask, drawSeed, plainly } from "./ask.js";
import { drawTimeline } from "./chart.js";
import { Painter } from "./chat.js";
import { TokenText } from "./tokens.js";

export class Race {
  #parts;
  #controls;
  #figures;
  #announce;
  #lanes;
  #number = 0;
  #skip = null; // ends the replay that runs

  /** `parts`: elements by name (order, state, lanes, on, off, result, verdict, chart, replay). */
  constructor({ parts, controls, figures, card, announce }) {
    this.#parts = parts;
    this.#controls = controls;
    this.#figures = figures;
    this.#announce = announce;
    this.#lanes = {
      on: new Lane(parts.on, { name: "with speculation", kind: "on", card, announce }),
      off: new Lane(parts.off, { name: "plain decoding", kind: "off", card, announce }),
    };
    parts.replay.addEventListener("click", () => (this.#skip ? this.#skip() : this.replay()));
    new ResizeObserver(() => this.#skip || this.#draw(Infinity)).observe(parts.chart);
  }

  /** Run both, replay them side by side, and say how it went. Throws what `ask` throws, and SettingError. */
  async run(text, signal) {
    const body = this.#controls.body([{ role: "user", content: text }]);
    body.seed ??= drawSeed();
    const key = this.#controls.key;
    const { on, off } = this.#lanes;
    const bodies = new Map([
      [on, { ...body, speculation: { ...body.speculation, enabled: true } }],
      [off, plainly(body)],
    ]);
    this.#skip?.();
    this.#skip = null;
    this.#parts.result.hidden = true;
    this.#parts.lanes.hidden = false;
    for (const lane of [on, off]) lane.begin();
    this.#figures.clear();
    this.#parts.lanes.scrollIntoView({ block: "nearest" });
    try {
      this.#say("Reading the message…");
      await ask({ ...plainly(body), max_tokens: 1 }, { key, signal });
      if (this.#parts.order.value === "together") {
        this.#say("Both at once…");
        await bothOrNeither([on, off].map((lane) => (stop) => lane.ask(bodies.get(lane), { key, signal: stop })), signal);
      } else {
        this.#number += 1;
        for (const lane of this.#number % 2 ? [off, on] : [on, off]) {
          this.#say(`Measuring ${lane.name}…`);
          await lane.ask(bodies.get(lane), { key, signal });
        }
      }
    } catch (error) {
      this.#say(error.name === "AbortError" ? "Stopped." : "");
      throw error;
    }
    this.#say("");
    this.#announce(verdict(on.answer, off.answer));
    this.#figures.show(on.answer);
    this.#figures.measured(off.answer, on.answer);
    const wantsRest = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (wantsRest || this.#parts.order.value === "together") this.#finish();
    else await this.replay(signal);
  }

  /** Show both runs side by side, at the speed at which they came. */
  async replay(signal = null) {
    const { on, off } = this.#lanes;
    const lanes = [on, off];
    const end = Math.max(...lanes.map((lane) => lane.answer.lastSeconds));
    const began = performance.now();
    let isSkipped = false;
    const skip = () => (isSkipped = true);
    this.#skip = skip;
    for (const lane of lanes) lane.rewind();
    this.#parts.result.hidden = false;
    this.#parts.verdict.textContent = "";
    this.#parts.replay.textContent = "Skip the replay";
    for (;;) {
      const seconds = (performance.now() - began) / 1000;
      if (isSkipped || signal?.aborted || seconds >= end) break;
      for (const lane of lanes) lane.showUntil(seconds);
      this.#draw(seconds);
      await new Promise(requestAnimationFrame);
    }
    if (this.#skip === skip) this.#finish(); // else another race has begun
  }

  #finish() {
    const { on, off } = this.#lanes;
    this.#skip = null;
    for (const lane of [on, off]) lane.showUntil(Infinity);
    this.#parts.result.hidden = false;
    this.#parts.replay.textContent = "Replay";
    this.#parts.verdict.textContent = verdict(on.answer, off.answer);
    this.#draw(Infinity);
    this.#parts.chart.setAttribute("aria-label", `Tokens over time. ${verdict(on.answer, off.answer)}`);
  }

  #draw(seconds) {
    drawTimeline(this.#parts.chart, Object.values(this.#lanes).map((lane) => lane.run), seconds);
  }

  #say(text) {
    this.#parts.state.textContent = text;
    if (text) this.#announce(text);
  }
}

/** How a race went, in words. */
export function verdict(on, off) {
  const ratio = off.lastSeconds / on.lastSeconds;
  const common = commonTokens(on, off);
  const isSame = on.text === off.text && common === on.tokens.length && common === off.tokens.length;
  const times = `${on.lastSeconds.toFixed(2)} s with speculation, ${off.lastSeconds.toFixed(2)} s without`;
  const speed =
    ratio >= 1.03 ? `${ratio.toFixed(2)} times as fast`
    : ratio <= 0.97 ? `speculation took ${(1 / ratio).toFixed(2)} times as long`
    : "no difference to speak of";
  const text = isSame
    ? `The same text, token for token: ${on.tokens.length} tokens.`
    : `The texts part at token ${common}, where two logits were equal up to rounding.`;
  return `${text} ${times}: ${speed}.`;
}

/** One runner: its answer, and its text as far as it is shown. */
class Lane {
  #text;
  #seconds;
  #rate;
  #element;
  #shown = 0;
  answer = new Answer();

  constructor(element, { name, kind, card, announce }) {
    this.name = name;
    this.kind = kind;
    this.#element = element;
    this.#seconds = element.querySelector("[data-part=seconds]");
    this.#rate = element.querySelector("[data-part=rate]");
    this.#text = new TokenText({ name: `Answer ${name}`, card, announce });
    element.querySelector("[data-part=text]").append(this.#text.element);
  }

  /** What the chart needs. */
  get run() {
    return { name: this.name, kind: this.kind, tokens: this.answer.tokens };
  }

  begin() {
    this.answer = new Answer();
    this.rewind();
  }

  rewind() {
    this.#shown = 0;
    this.#text.clear();
    this.#clock(0);
  }

  async ask(body, options) {
    const { answer } = this;
    const painter = new Painter(() => this.showUntil(Infinity));
    this.#element.classList.add("growing");
    try {
      await ask(body, { ...options, answer, onTokens: (fresh) => painter.add(fresh) });
    } finally {
      painter.flush();
      this.#element.classList.remove("growing");
    }
  }

  showUntil(seconds) {
    const fresh = [];
    const { tokens } = this.answer;
    while (this.#shown < tokens.length && tokens[this.#shown].seconds <= seconds) fresh.push(tokens[this.#shown++]);
    if (fresh.length > 0) this.#text.append(fresh);
    this.#clock(Math.min(seconds, this.answer.lastSeconds));
  }

  #clock(seconds) {
    const { tokensPerSecond } = this.answer.figures();
    const isOver = this.#shown === this.answer.tokens.length && this.answer.finishReason !== null;
    this.#seconds.textContent = `${seconds.toFixed(2)} s`;
    this.#rate.textContent =
      `${this.#shown} tokens` + (isOver && tokensPerSecond ? ` · ${tokensPerSecond.toFixed(1)} tokens/s` : "");
    this.#element.classList.toggle("over", isOver);
  }
}

/** All of `tasks`, each given a signal; when one fails, or `signal` says so, the others are stopped. */
async function bothOrNeither(tasks, signal) {
  const failed = new AbortController();
  const stop = AbortSignal.any([signal, failed.signal]);
  const results = await Promise.allSettled(
    tasks.map((task) =>
      task(stop).catch((error) => {
        failed.abort();
        throw error;
      }),
    ),
  );
  const reasons = results.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
  const reason = reasons.find((error) => error.name !== "AbortError") ?? reasons[0];
  if (reason) throw reason;
}
