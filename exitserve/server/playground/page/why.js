// "Why here?": what each layer said to a token, and a map of the tokens before it.

import { confidenceStep, draftsOf, element, nameOf, visible, whereOf } from "./depths.js";

const MOST_TOKENS = 40;
const $ = (id) => document.getElementById(id);

/** What became of a token at a layer. */
export const OUTCOMES = {
  stopped: "stopped here",
  went_on: "went on: not sure enough",
  drafted: "sure enough, and drafted",
  unchecked: "passed by, unchecked",
  not_reached: "not reached",
};

/** Shows a token of an answer. */
export function showWhy(answer, index) {
  const token = answer.tokens[index];
  if (!token) return;
  $("why").hidden = false;
  $("why-says").textContent = says(token, answer.depths);
  const told = token.layers.length > 0;
  $("why-layers").replaceChildren(...(told ? [layerTable(token, answer.depths)] : []));
  $("why-map").parentElement.hidden = !told;
  if (told) showMap(answer, index);
}

export function hideWhy() {
  $("why").hidden = true;
}

function says(token, depths) {
  const text = `“${visible(token.text)}”`;
  if (!token.layers.length) {
    return `${text} stopped at ${whereOf(token, depths)}. exitserve eval --prompt tells why.`;
  }
  const there = token.layers.find((layer) => layer.layer === token.depth);
  const where = nameOf(token.depth, depths);
  const { accepted, rejected } = draftsOf(token);
  if (accepted) return `${text} was drafted by layer ${accepted.layer}, and full depth agreed.`;
  if (rejected.length) return `${text} is full depth’s. ${rejection(rejected)}`;
  if (token.depth === depths.at(-1)) {
    if (token.index === 0) return `${text} ran all layers, as every first token does.`;
    const sawAny = token.layers.some((layer) => layer.outcome === "went_on");
    return sawAny
      ? `${text} ran all layers: no exit was sure enough.`
      : `${text} ran all layers: no exit was asked.`;
  }
  if (there.threshold === undefined) return `${text} stopped at ${where}, as it was told to.`;
  return `${text} stopped at ${where}: its confidence of ${there.confidence.toFixed(2)} is above ` +
    `${there.threshold.toFixed(2)}.`;
}

function rejection([first, ...behind]) {
  const text = behind.map((one) => visible(one.text)).join("");
  const others = text && `, and had gone on to “${text}”`;
  return `Layer ${first.layer} had drafted “${visible(first.text)}” here${others}.`;
}

/** The layers of one token, the deepest first, as in the map. */
function layerTable(token, depths) {
  const table = element("table", "layers");
  table.append(element("caption", "", "This token, layer by layer"));
  const head = table.createTHead().insertRow();
  for (const name of ["Layer", "Would say", "Confidence", "Needed", "What happened"]) {
    const cell = element("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const layer of token.layers.toReversed()) {
    const row = body.insertRow();
    row.className = layer.outcome;
    const name = element("th", "", nameOf(layer.layer, depths));
    name.scope = "row";
    row.append(name);
    row.insertCell().append(layer.text === undefined ? "–" : element("code", "", visible(layer.text)));
    row.insertCell().append(bar(layer.confidence));
    row.insertCell().textContent = layer.threshold?.toFixed(2) ?? "–";
    row.insertCell().textContent = OUTCOMES[layer.outcome];
  }
  return table;
}

function bar(confidence) {
  if (confidence === undefined) return "–";
  const made = element("span", "bar");
  const meter = element("span", `bar-fill confidence-${confidenceStep(confidence)}`);
  meter.style.inlineSize = `${Math.round(100 * confidence)}%`;
  made.append(meter, element("span", "bar-text", confidence.toFixed(2)));
  return made;
}

/** A table of tokens across and layers up; confidence is the colour. */
function showMap(answer, index) {
  const first = Math.max(0, index - MOST_TOKENS + 1);
  const shown = answer.tokens.slice(first, Math.max(index + 1, first + MOST_TOKENS));
  const table = element("table");
  const head = table.createTHead().insertRow();
  head.append(element("td"));
  for (const token of shown) {
    const cell = element("th", "", visible(token.text));
    cell.scope = "col";
    cell.classList.toggle("chosen", token.index === index);
    head.append(cell);
  }
  const body = table.createTBody();
  for (const depth of answer.depths.toReversed()) {
    const row = body.insertRow();
    const name = element("th", "", depth === answer.depths.at(-1) ? `full ${depth}` : `${depth}`);
    name.scope = "row";
    row.append(name);
    for (const token of shown) row.append(mapCell(token, depth, token.index === index));
  }
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("td, th");
    const column = cell ? cell.cellIndex - 1 : -1;
    if (column >= 0 && shown[column]) answer.choose(first + column);
  });
  $("why-map").replaceChildren(table);
  drawKey();
  scrollTo(table.querySelector(".chosen"));
}

function mapCell(token, depth, isChosen) {
  const layer = token.layers.find((one) => one.layer === depth) ?? { layer: depth, outcome: "unchecked" };
  const cell = element("td", layer.outcome, layer.text === undefined ? "" : visible(layer.text));
  cell.classList.toggle("chosen", isChosen);
  if (layer.confidence !== undefined) cell.classList.add(`confidence-${confidenceStep(layer.confidence)}`);
  if (layer.text !== undefined && layer.text !== token.text) cell.classList.add("differs");
  const sure = layer.confidence === undefined ? "" : `, confidence ${layer.confidence.toFixed(2)}`;
  cell.title = `layer ${layer.layer}: ${layer.text === undefined ? "" : `${visible(layer.text)}, `}` +
    `${OUTCOMES[layer.outcome]}${sure}`;
  return cell;
}

function drawKey() {
  const low = element("span", "swatch confidence-0");
  const high = element("span", "swatch confidence-7");
  const stopped = element("span", "swatch stopped");
  $("map-key").replaceChildren(
    low, " unsure to ", high, " sure · ", stopped, " sent from here · ",
    element("em", "differs", "another token"), " than was sent · empty: nobody looked",
  );
}

/** Brings the chosen column into view, without moving the page. */
function scrollTo(cell) {
  if (!cell) return;
  const place = $("why-map");
  place.scrollLeft = cell.offsetLeft - place.clientWidth / 2;
}
