// An answer's text, token by token: coloured by origin, and explained under the pointer or the keyboard.
// Model output goes into text nodes, and nowhere else.

import { probability } from "./answer.js";

const KINDS = { accepted: "accepted draft", recovered: "recovered", bonus: "bonus", plain: "plain" };

/** What there is to say of `token`, one of `tokens`: label and value, in the order in which it is read. */
export function facts(token, tokens) {
  const mates = tokens.filter((other) => other.round === token.round);
  const accepted = mates.filter((other) => other.origin === "accepted").length;
  const draft = token.drafted > 0 ? `${accepted} of ${token.drafted} drafted accepted` : "nothing drafted";
  return [
    ["Origin", KINDS[token.origin] ?? token.origin],
    ["Position", String(token.position)],
    ["Probability", token.logprob === null ? "not known" : probability(token.logprob)],
    ["Round", `${token.round}, ${draft}`],
  ];
}

/** The small card that explains a token. There is one for the whole page. */
export class Card {
  #element;

  constructor(element) {
    this.#element = element;
  }

  get element() {
    return this.#element;
  }

  show(token, tokens, anchor) {
    const title = document.createElement("p");
    title.className = "card-token";
    title.textContent = visible(token.text);
    const list = document.createElement("dl");
    for (const [label, value] of facts(token, tokens)) {
      const row = document.createElement("div");
      row.append(withText("dt", label), withText("dd", value));
      list.append(row);
    }
    this.#element.replaceChildren(title, list);
    this.#element.dataset.origin = token.origin;
    this.#element.hidden = false;
    this.#place(anchor.getClientRects()[0] ?? anchor.getBoundingClientRect());
  }

  hide() {
    this.#element.hidden = true;
  }

  /** Below the token, or above it where there is no room; never over the window's edge. */
  #place(token) {
    const { width, height } = this.#element.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - 8;
    const below = token.bottom + 6;
    const top = below + height > window.innerHeight ? token.top - height - 6 : below;
    this.#element.style.left = `${Math.max(8, Math.min(token.left - 12, right)) + window.scrollX}px`;
    this.#element.style.top = `${Math.max(4, top) + window.scrollY}px`;
  }
}

/** The text. One stop of the Tab key; arrow keys go from token to token, up and down from round to round. */
export class TokenText {
  #tokens = [];
  #spans = [];
  #current = -1;
  #card;
  #announce;
  #name;

  constructor({ name, card, announce }) {
    this.#name = name;
    this.#card = card;
    this.#announce = announce;
    this.element = document.createElement("div");
    this.element.className = "tokens";
    this.element.setAttribute("role", "group");
    this.element.tabIndex = 0;
    this.#label();
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("pointerleave", (event) => {
      if (event.relatedTarget !== this.#card.element) this.leave();
    });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.leave());
  }

  append(tokens) {
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = `t ${token.origin}`;
      span.textContent = token.text;
      span.dataset.index = this.#tokens.length;
      this.#tokens.push(token);
      this.#spans.push(span);
      this.element.append(span);
    }
    this.#label();
  }

  clear() {
    this.leave();
    this.#tokens = [];
    this.#spans = [];
    this.element.replaceChildren();
    this.#label();
  }

  /** No token is explained any more. */
  leave() {
    if (this.#current < 0) return;
    for (const span of this.#spans) span.classList.remove("current", "mate");
    this.#current = -1;
    this.#card.hide();
  }

  #label() {
    this.element.setAttribute(
      "aria-label",
      `${this.#name}, ${this.#tokens.length} tokens. Arrow keys explain them one by one.`,
    );
  }

  #point(target) {
    const index = Number(target.dataset?.index ?? NaN);
    if (!Number.isNaN(index) && index !== this.#current) this.#explain(index);
  }

  #explain(index) {
    this.leave();
    this.#current = index;
    const token = this.#tokens[index];
    this.#tokens.forEach((other, at) => this.#spans[at].classList.toggle("mate", other.round === token.round));
    this.#spans[index].classList.add("current");
    this.#card.show(token, this.#tokens, this.#spans[index]);
  }

  #key(event) {
    if (event.key === "Escape" && this.#current >= 0) {
      event.stopPropagation();
      this.leave();
      return;
    }
    const next = this.#next(event.key);
    if (next === null || this.#tokens.length === 0) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(next, this.#tokens.length - 1));
    this.#spans[index].scrollIntoView({ block: "nearest" });
    this.#explain(index);
    const said = facts(this.#tokens[index], this.#tokens).map(([label, value]) => `${label} ${value}`);
    this.#announce(`${visible(this.#tokens[index].text)}. ${said.join(". ")}.`);
  }

  #next(key) {
    const round = this.#tokens[this.#current]?.round ?? -1;
    const first = (number) => this.#tokens.findIndex((token) => token.round === number);
    const last = this.#tokens.length - 1;
    switch (key) {
      case "ArrowRight":
        return this.#current + 1;
      case "ArrowLeft":
        return this.#current - 1;
      case "ArrowDown":
        return first(round + 1) < 0 ? last : first(round + 1);
      case "ArrowUp":
        return round > 0 ? first(round - 1) : 0;
      case "Home":
        return 0;
      case "End":
        return last;
      default:
        return null;
    }
  }
}

/** A table of an answer's tokens, made when it is first opened. */
export function tokenTable(answer) {
  const details = document.createElement("details");
  details.className = "table";
  details.append(withText("summary", "Tokens as a table"));
  const frame = document.createElement("div");
  frame.className = "table-frame";
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Tokens as a table");
  details.append(frame);
  details.addEventListener("toggle", () => {
    if (details.open && frame.childElementCount === 0) frame.append(filledTable(answer.tokens));
  });
  return details;
}

function filledTable(tokens) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["Position", "Token", "Origin", "Probability", "Round"]) {
    const cell = withText("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const token of tokens) {
    const row = body.insertRow();
    const kind = withText("span", KINDS[token.origin] ?? token.origin);
    kind.className = `t ${token.origin}`;
    row.insertCell().textContent = token.position;
    row.insertCell().append(withText("code", visible(token.text)));
    row.insertCell().append(kind);
    row.insertCell().textContent = token.logprob === null ? "–" : probability(token.logprob);
    row.insertCell().textContent = token.round;
  }
  return table;
}

/** A token's text where blanks and line ends can be seen. */
export function visible(text) {
  return text === "" ? "(no text)" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export function withText(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}
