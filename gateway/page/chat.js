// The chat: questions, answers as they come, and what plain decoding would have taken.

import { Answer, commonTokens, decimal, percent } from "./answer.js";
import { ask, drawSeed, plainly } from "./ask.js";
import { TokenText, tokenTable, withText } from "./tokens.js";

export class Chat {
  #messages = [];
  #thread;
  #controls;
  #figures;
  #card;
  #announce;

  constructor({ thread, controls, figures, card, announce }) {
    this.#thread = thread;
    this.#controls = controls;
    this.#figures = figures;
    this.#card = card;
    this.#announce = announce;
  }

  clear() {
    this.#messages = [];
    this.#thread.replaceChildren();
    this.#card.hide();
    this.#figures.clear();
  }

  /** Whether `text` is the last question that is part of the chat. */
  holds(text) {
    return this.#messages.at(-2)?.content === text;
  }

  /**
   * Ask `text` and show the answer. Throws SettingError before anything is shown, else what `ask` throws; what had
   * come by then stays, and without a single token the question is taken back.
   */
  async send(text, signal) {
    const messages = [...this.#messages, { role: "user", content: text }];
    const body = this.#controls.body(messages);
    const key = this.#controls.key;
    const compares = this.#controls.compares && body.speculation.enabled;
    // Only under a seed does plain decoding give the same text, so that like is compared with like.
    if (compares) body.seed ??= drawSeed();
    const view = new AnswerView(text, this.#card, this.#announce);
    this.#thread.append(...view.elements);
    this.#figures.clear();
    this.#announce("Answering…");
    const answer = new Answer();
    const painter = new Painter((fresh) => {
      view.text.append(fresh);
      this.#figures.show(answer);
      followBottom(this.#thread);
    });
    try {
      await ask(body, { key, signal, answer, onTokens: (fresh) => painter.add(fresh) });
    } catch (error) {
      view.end(answer, error.name === "AbortError" ? "stopped" : "broken off");
      throw error;
    } finally {
      painter.flush();
      if (answer.tokens.length > 0) {
        this.#messages = [...messages, { role: "assistant", content: answer.text }];
      } else if (answer.finishReason === null) {
        view.remove();
      }
    }
    view.end(answer);
    this.#announce(`The answer: ${answer.text}`);
    if (!body.speculation.enabled) {
      this.#figures.measured(answer, null);
    } else if (compares) {
      view.compare("Measuring plain decoding…");
      await this.#compare(answer, plainly(body), { key, signal, view });
    } else {
      this.#figures.compareWithEarlier(answer);
    }
    followBottom(this.#thread);
  }

  async #compare(answer, body, { key, signal, view }) {
    try {
      const plain = await ask(body, { key, signal });
      this.#figures.measured(plain, answer);
      view.compare(comparison(answer, plain));
    } catch (error) {
      view.compare("Plain decoding was not measured to its end.");
      throw error;
    }
  }
}

/** What two runs of the same request had in common, in a sentence. */
function comparison(answer, plain) {
  const rate = plain.figures().tokensPerSecond;
  const speed = `Plain decoding: ${decimal(rate, 1)} tokens/s`;
  if (answer.text === plain.text) return `${speed}, the same text.`;
  return `${speed}. The texts part at token ${commonTokens(answer, plain)}: two logits were equal up to rounding.`;
}

class AnswerView {
  #question = document.createElement("article");
  #answer = document.createElement("article");
  #meta = withText("p", "");
  #comparison = withText("p", "");

  constructor(question, card, announce) {
    this.#question.className = "question";
    this.#question.append(unseen("You"), withText("p", question));
    this.text = new TokenText({ name: "Answer", card, announce });
    this.#answer.className = "answer growing";
    this.#meta.className = "meta";
    this.#comparison.className = "meta";
    this.#comparison.hidden = true;
    this.#answer.append(unseen("The model"), this.text.element, this.#meta, this.#comparison);
    this.elements = [this.#question, this.#answer];
  }

  /** The answer has ended: `why` where it was not by itself. */
  end(answer, why = null) {
    const figures = answer.figures();
    const ended = why ?? (answer.finishReason === "length" ? "cut off by the length limit" : null);
    const drafts = figures.drafted > 0 ? `${percent(figures.acceptanceRate)} of ${figures.drafted} drafted accepted` : null;
    const parts = [
      `${figures.tokens} ${figures.tokens === 1 ? "token" : "tokens"}`,
      figures.tokensPerSecond === null ? null : `${figures.tokensPerSecond.toFixed(1)} tokens/s`,
      drafts ?? (answer.report ? "nothing drafted" : null),
      figures.seed === null ? null : `seed ${figures.seed}`,
      ended,
    ];
    this.#meta.textContent = parts.filter(Boolean).join(" · ");
    this.#answer.classList.remove("growing");
    this.#answer.append(tokenTable(answer));
  }

  compare(sentence) {
    this.#comparison.textContent = sentence;
    this.#comparison.hidden = false;
  }

  remove() {
    for (const element of this.elements) element.remove();
  }
}

/** Collects tokens and hands them over once a frame, however fast they come. */
export class Painter {
  #fresh = [];
  #frame = null;
  #paint;

  constructor(paint) {
    this.#paint = paint;
  }

  add(tokens) {
    this.#fresh.push(...tokens);
    this.#frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    if (this.#fresh.length > 0) this.#paint(this.#fresh.splice(0));
  }
}

function unseen(text) {
  const heading = withText("h3", text);
  heading.className = "unseen";
  return heading;
}

/** Stay at the end of a growing text, unless the reader has scrolled away from it. */
function followBottom(element) {
  const gap = element.getBoundingClientRect().bottom - window.innerHeight;
  if (gap > -200 && gap < 160) window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}
