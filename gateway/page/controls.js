// The settings: what a request carries, and what the gateway lets one choose.

const NAMES = {
  temperature: "The temperature",
  seed: "The seed",
  "max-tokens": "The longest answer",
};

/** A setting that cannot be sent, in words. */
export class SettingError extends Error {}

export class Controls {
  #form;

  constructor(form) {
    this.#form = form;
    form.addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get key() {
    return this.#value("api-key");
  }

  get speculates() {
    return this.#form.elements.enabled.checked;
  }

  get compares() {
    return this.#form.elements.compare.checked;
  }

  /** The request for the answer to `messages`. Throws SettingError, and marks the field. */
  body(messages) {
    for (const id of Object.keys(NAMES)) this.#check(id);
    const seed = this.#value("seed");
    const maxTokens = this.#value("max-tokens");
    const draftTokens = this.#value("draft-tokens");
    return {
      model: "tandem",
      messages,
      temperature: Number(this.#value("temperature")),
      ...(seed && { seed: Number(seed) }),
      ...(maxTokens && { max_tokens: Number(maxTokens) }),
      logprobs: true,
      speculation: {
        enabled: this.speculates,
        num_draft_tokens: draftTokens === "auto" ? "auto" : Number(draftTokens),
        drafter: this.#value("drafter"),
        trace: true,
      },
    };
  }

  /** Offer what the model's card says can be chosen; a choice that is still there stays. */
  offer(card) {
    const { drafters, max_num_draft_tokens: most } = card.speculation;
    const numbers = Array.from({ length: most }, (_, index) => String(index + 1));
    this.#choices("draft-tokens", ["auto", ...numbers]);
    this.#choices("drafter", drafters.length > 0 ? drafters : ["auto"]);
    this.#form.elements["max-tokens"].max = card.max_model_len;
  }

  /** Mark the field that the gateway found fault with; nothing where it is none of these. */
  blame(param) {
    for (const field of this.#form.elements) {
      if (param && field.dataset.param === param) field.setAttribute("aria-invalid", "true");
    }
  }

  #value(id) {
    return this.#form.elements[id].value.trim();
  }

  #choices(id, values) {
    const select = this.#form.elements[id];
    const options = [...select.options].map((option) => option.value);
    if (options.join() === values.join()) return;
    const chosen = values.includes(select.value) ? select.value : values[0];
    select.replaceChildren(...values.map((value) => new Option(value, value, false, value === chosen)));
  }

  #check(id) {
    const field = this.#form.elements[id];
    const { badInput, rangeOverflow, rangeUnderflow, stepMismatch, valueMissing } = field.validity;
    const isWhole = id !== "temperature";
    if (!(badInput || rangeOverflow || rangeUnderflow || valueMissing || (stepMismatch && isWhole))) return;
    field.setAttribute("aria-invalid", "true");
    const range = field.max ? `from ${field.min} to ${field.max}` : `at least ${field.min}`;
    throw new SettingError(`${NAMES[id]} must be ${isWhole ? "a whole number" : "a number"}, ${range}.`);
  }
}
