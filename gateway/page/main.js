// Wires the page together: elements, keys, tabs, and what happens when something goes wrong.

import { ApiError, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { Controls, SettingError } from "./controls.js";
import { Figures } from "./figures.js";
import { Race } from "./race.js";
import { Card } from "./tokens.js";

const READINESS_INTERVAL_MS = 10_000;

const byId = (id) => document.getElementById(id);
const announce = (text) => (byId("announce").textContent = text);
const card = new Card(byId("card"));
const controls = new Controls(byId("controls"));
const figures = new Figures({
  rate: byId("figure-rate"),
  length: byId("figure-length"),
  speed: byId("figure-speed"),
  plain: byId("figure-plain"),
  speedUp: byId("speed-up"),
  rounds: byId("rounds"),
});
const chat = new Chat({ thread: byId("thread"), controls, figures, card, announce });
const race = new Race({
  parts: {
    order: byId("race-order"),
    state: byId("race-state"),
    lanes: byId("lanes"),
    on: byId("lane-on"),
    off: byId("lane-off"),
    result: byId("race-result"),
    verdict: byId("race-verdict"),
    chart: byId("race-chart"),
    replay: byId("replay"),
  },
  controls,
  figures,
  card,
  announce,
});
const views = { chat: { send: "Send", act: chat.send.bind(chat) }, race: { send: "Race", act: race.run.bind(race) } };
let view = "chat";
let running = null; // the AbortController of what runs

// --- one question -----------------------------------------------------------------------------------------------

async function submit() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (running) return;
  if (!text) {
    fail("Write a message first.");
    prompt.focus();
    return;
  }
  running = new AbortController();
  byId("error").hidden = true;
  byId("welcome").hidden = true;
  if (view === "chat") prompt.value = "";
  showRunning();
  try {
    await views[view].act(text, running.signal);
  } catch (error) {
    if (error.name === "AbortError") announce("Stopped.");
    else explain(error);
    if (view === "chat" && !chat.holds(text)) prompt.value ||= text;
  } finally {
    running = null;
    showRunning();
    prompt.focus({ preventScroll: true });
    refresh();
  }
}

/** Send and Stop take turns in one place; the focus goes with them. */
function showRunning() {
  const [shown, other] = running ? ["stop", "send"] : ["send", "stop"];
  const hadFocus = document.activeElement === byId(other);
  byId(shown).hidden = false;
  byId(other).hidden = true;
  if (hadFocus) byId(shown).focus();
  byId("new-chat").hidden = view !== "chat" || byId("thread").childElementCount === 0 || running !== null;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.disabled = running !== null;
}

function explain(error) {
  if (error instanceof ApiError) controls.blame(error.param);
  else if (!(error instanceof SettingError)) console.error(error);
  if (error instanceof SettingError || error.param) byId("settings").open = true;
  const isOurs = error instanceof ApiError || error instanceof SettingError;
  fail(isOurs ? error.message : `This page failed: ${error.message}`);
}

function fail(message) {
  byId("error").textContent = message;
  byId("error").hidden = false;
}

// --- what the gateway says of itself ----------------------------------------------------------------------------

async function refresh() {
  const health = byId("health");
  try {
    const { body } = await getJson("health/ready");
    say(health, body.status, body.reasons.join("; "));
    if (body.status !== "unavailable") await refreshModel();
  } catch (error) {
    say(health, "unreachable", error.message);
  }
}

async function refreshModel() {
  const { status, body } = await getJson("v1/models", { key: controls.key });
  if (status === 401) byId("model").textContent = "The gateway wants an API key";
  if (status !== 200) return;
  const model = body.data[0];
  const draft = model.speculation.draft_model;
  byId("model").textContent = draft ? `${model.id}, drafted by ${draft}` : model.id;
  controls.offer(model);
}

/** A live region: written only when it changes, or it would be read out again and again. */
function say(element, state, reasons) {
  element.dataset.state = state;
  element.title = reasons;
  const text = state === "degraded" ? "no draft: plain decoding" : state;
  if (element.textContent !== text) element.textContent = text;
}

// --- keys, tabs, buttons ----------------------------------------------------------------------------------------

function openTab(name) {
  view = name;
  for (const other of Object.keys(views)) {
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    byId(`panel-${other}`).hidden = other !== name;
  }
  document.body.dataset.view = name;
  byId("send").textContent = views[name].send;
  byId("error").hidden = true;
  showRunning();
}

for (const name of Object.keys(views)) {
  byId(`tab-${name}`).addEventListener("click", () => openTab(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "race" : "chat";
    openTab(other);
    byId(`tab-${other}`).focus();
  });
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
for (const sample of document.querySelectorAll(".samples button")) {
  sample.addEventListener("click", () => {
    byId("prompt").value = sample.textContent.replace(/\s+/g, " ");
    submit();
  });
}
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  byId("welcome").hidden = false;
  showRunning();
  byId("prompt").focus();
});
byId("api-key").addEventListener("change", refresh);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.abort();
    card.hide();
  }
});

const isWide = matchMedia("(min-width: 960px)");
byId("settings").open = isWide.matches;
openTab("chat");
refresh();
setInterval(() => document.hidden || running || refresh(), READINESS_INTERVAL_MS);
