// The figures of the answer that grows, and its rounds as columns.

import { decimal, percent } from "./answer.js";

const MAX_COLUMNS = 40;

export class Figures {
  #plain = null; // tokens a second, the last time that plain decoding was measured
  #columns = [];
  #parts;

  constructor(parts) {
    this.#parts = parts; // elements: rate, length, speed, plain, speedUp, rounds
  }

  /** Begin with a new answer. */
  clear() {
    const { rate, length, speed, speedUp, rounds } = this.#parts;
    for (const element of [rate, length, speed]) element.textContent = "–";
    speedUp.textContent = "";
    rounds.replaceChildren();
    this.#columns = [];
  }

  /** Show `answer` as far as it has come. */
  show(answer) {
    const figures = answer.figures();
    this.#parts.rate.textContent = percent(figures.acceptanceRate);
    this.#parts.length.textContent = decimal(figures.acceptanceLength, 2);
    this.#parts.speed.textContent = decimal(figures.tokensPerSecond, 1);
    this.#draw(answer.rounds());
  }

  /** Plain decoding was measured: for `answer` itself, or in an answer of its own (`answer` null). */
  measured(plain, answer) {
    this.#plain = plain.figures().tokensPerSecond ?? this.#plain;
    this.#parts.plain.textContent = decimal(this.#plain, 1);
    if (answer) this.#parts.speedUp.textContent = speedUp(answer, this.#plain, "on this very answer");
  }

  /** Compare `answer` with what was measured on an earlier one, where there is that. */
  compareWithEarlier(answer) {
    if (this.#plain !== null) {
      this.#parts.speedUp.textContent = speedUp(answer, this.#plain, "on an earlier answer");
    }
  }

  #draw(rounds) {
    const most = Math.max(1, ...rounds.map(({ drafted, accepted }) => Math.max(drafted, accepted)));
    this.#parts.rounds.style.setProperty("--cells", most + 1);
    const begin = Math.max(0, this.#columns.length - 1);
    for (let number = begin; number < rounds.length; number += 1) {
      const column = this.#columns[number] ?? document.createElement("div");
      column.replaceChildren(...cells(rounds[number]));
      if (number >= this.#columns.length) {
        this.#columns.push(column);
        this.#parts.rounds.append(column);
      }
    }
    while (this.#parts.rounds.childElementCount > MAX_COLUMNS) this.#parts.rounds.firstElementChild.remove();
  }
}

function speedUp(answer, plain, where) {
  const rate = answer.figures().tokensPerSecond;
  if (!rate || !plain) return "";
  return `${(rate / plain).toFixed(2)} × plain decoding, ${where}`;
}

function cells({ drafted, accepted, own }) {
  const kinds = [...Array(accepted).fill("hit"), ...Array(Math.max(0, drafted - accepted)).fill("miss")];
  if (own) kinds.push(own);
  return kinds.map((kind) => {
    const cell = document.createElement("span");
    cell.className = kind;
    return cell;
  });
}
