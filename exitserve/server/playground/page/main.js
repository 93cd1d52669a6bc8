// The page: reads what the server offers, runs a prompt twice, and shows both answers.

import { Answer } from "./answer.js";
import { keepKey, read, ServerError, stream } from "./api.js";
import { drawLegend, visible } from "./depths.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { openTrace } from "./trace-file.js";
import { hideWhy, showWhy } from "./why.js";

const EXAMPLE = "def read_lines(path):\n    with open(path";
const QUESTION = "Why is the sky blue?";
const $ = (id) => document.getElementById(id);

const early = new Answer($("early"));
const full = new Answer($("full"));
let model, settings, live, running;
let turns = []; // of the chat: what was asked, and the left answers

async function start() {
  const models = await withKey(() => read("v1/models"));
  model = models.data[0].id;
  $("model").textContent = model;
  settings = new Settings(await read("exitserve/stats"));
  $("prompt").value ||= settings.chats ? QUESTION : EXAMPLE;
  reset(settings.depths);
  live = new Live(settings.depths);
}

/** Does something with the server; asks for the API key as long as it wants another. */
async function withKey(work) {
  for (let tries = 0; ; tries++) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof ServerError) || error.status !== 401) throw error;
      await askForKey(tries > 0);
    }
  }
}

function askForKey(wasWrong) {
  const dialog = $("key");
  $("key-problem").hidden = !wasWrong;
  $("key-problem").textContent = "The server did not take this key.";
  $("key-text").value = "";
  dialog.showModal();
  return new Promise((done, failed) => {
    dialog.addEventListener("close", () => {
      const key = $("key-text").value;
      if (!key) failed(new Error("this server wants an API key; reload the page to give one."));
      keepKey(key);
      done();
    }, { once: true });
  });
}

function problem(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text;
}

async function run() {
  running?.abort();
  const own = (running = new AbortController());
  reset(settings.depths);
  $("stop").hidden = false;
  const request = settings.request(model, turns);
  const fields = settings.fields();
  const runEarly = () => answer(early, fields, request, own.signal);
  const runFull = () => answer(full, { exit_mode: "off" }, request, own.signal);
  try {
    if (!settings.hasExits) await runEarly();
    else if (settings.together) await Promise.all([runEarly(), runFull()]);
    else await runEarly().then(runFull);
    if (settings.hasExits) showParting();
    if (request.body.messages) goOn(request.body.messages);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
    own.abort(); // of two that run together, the other
  } finally {
    if (running === own) $("stop").hidden = true;
  }
}

/** Makes the left answer a turn of the chat, and asks for the next. */
function goOn(messages) {
  turns = [...messages, { role: "assistant", content: early.received }];
  if ($("prompt").value === messages.at(-1).content) $("prompt").value = "";
  $("new-chat").hidden = false;
}

function newChat() {
  running?.abort();
  $("prompt").value ||= turns[0]?.content ?? "";
  turns = [];
  $("new-chat").hidden = true;
  reset(settings.depths);
  $("prompt").focus();
}

async function answer(shown, fields, { path, prompt, body }, signal) {
  const asked = { ...body, vllm_xargs: { ...fields, exit_trace: true } };
  shown.start(prompt, body.messages);
  live.hurry();
  try {
    await withKey(async () => {
      for await (const chunk of stream(path, asked, signal)) {
        shown.take(chunk);
        shown.showFigures();
      }
    });
  } finally {
    shown.end();
  }
}

/** Empties both answers, for depths that may be those of another model. */
function reset(depths, hasDrafts = false) {
  problem("");
  $("parting").textContent = "";
  early.clear(depths);
  full.clear(depths);
  drawLegend($("legend"), depths, hasDrafts);
  hideWhy();
  document.body.classList.toggle("single", !settings.hasExits);
  $("early-title").textContent = settings.hasExits ? "This setting" : "Full depth";
}

function showParting() {
  const most = Math.min(early.ids.length, full.ids.length);
  let same = 0;
  while (same < most && early.ids[same] === full.ids[same]) same++;
  if (same === most && early.ids.length === full.ids.length) {
    $("parting").textContent = `The same text: all ${most} tokens are those of full depth.`;
    return;
  }
  const [here, there] = [early, full].map((one) => {
    const token = one.markParting(same);
    return token ? `“${visible(token.text)}”` : "the end";
  });
  $("parting").textContent =
    `The texts part after ${same} tokens: ${here} here, ${there} at full depth.`;
}

async function open(file) {
  if (!file) return;
  try {
    const trace = await openTrace(file);
    running?.abort();
    reset([...trace.exit_layers, trace.num_layers], trace.tokens.some((token) => token.drafts));
    document.body.classList.add("single");
    $("early-title").textContent = `${file.name} (${trace.model})`;
    early.start(trace.prompt);
    early.end();
    early.addText(trace.tokens.map((token) => token.text).join(""), []);
    early.ids = trace.tokens.map((token) => token.token_id);
    early.addTokens(trace.tokens);
    early.showFigures();
  } catch (error) {
    problem(error.message);
  }
}

function connect() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new-chat").addEventListener("click", newChat);
  $("file").addEventListener("change", () => {
    open($("file").files[0]);
    $("file").value = "";
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", () => document.body.classList.remove("dragging"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    open(event.dataTransfer.files[0]);
  });
  for (const [shown, other] of [[early, full], [full, early]]) {
    shown.addEventListener("choose", (event) => {
      other.unchoose();
      showWhy(shown, event.detail);
    });
    shown.addEventListener("dismiss", () => {
      shown.unchoose();
      hideWhy();
    });
  }
}

connect();
start().catch((error) => problem(`The server cannot be asked: ${error.message}`));
