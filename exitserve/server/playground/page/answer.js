// One answer: text that streams in, then each token in the colour of its depth.

import { depthClass, draftsOf, element, stripes, visible, whereOf } from "./depths.js";
import { hideTip, showTip } from "./tip.js";

const LONGEST_PROMPT = 240; // characters of it that are shown before the answer

export class Answer extends EventTarget {
  /** @param pane the section that shows it */
  constructor(pane) {
    super();
    this.figures = pane.querySelector(".figures");
    this.text = pane.querySelector(".text");
    this.text.addEventListener("keydown", (event) => this.#onKey(event));
    this.text.addEventListener("focusin", (event) => this.#onFocus(event));
    this.text.addEventListener("focusout", hideTip);
    this.text.addEventListener("mouseover", (event) => this.#tipFor(event.target));
    this.text.addEventListener("mouseleave", hideTip);
    this.text.addEventListener("click", (event) => {
      const index = this.#indexOf(event.target);
      if (index >= 0) this.choose(index);
    });
    this.clear([]);
  }

  clear(depths) {
    this.depths = depths; // exit layers and full depth, ascending
    this.tokens = []; // those whose depth is known: TokenTrace of docs/playground.md
    this.shown = []; // the element of each
    this.received = ""; // all text so far
    this.coloured = 0; // characters of it that belong to `tokens`
    this.began = this.newest = undefined; // milliseconds: of the request, of the newest token
    this.ids = [];
    this.layers = []; // the depth of each, where the server tells
    this.pieces = []; // [text, token ids] of each chunk
    this.chosen = -1;
    this.prompt = element("span", "prompt");
    this.list = element("span", "tokens");
    this.tail = element("span", "tail");
    this.text.replaceChildren(this.prompt, this.list, this.tail);
    this.figures.textContent = "";
  }

  /** Shows the end of a prompt, or all turns of a chat. */
  start(prompt, messages) {
    this.began = performance.now();
    const cut = prompt.length > LONGEST_PROMPT ? `…${prompt.slice(-LONGEST_PROMPT)}` : prompt;
    const turns = messages?.map(({ role, content }) =>
      role === "user" ? `› ${content}\n` : `${content}\n\n`);
    this.prompt.textContent = turns?.join("") ?? cut;
    this.tail.classList.add("waiting");
  }

  end() {
    this.tail.classList.remove("waiting");
  }

  /** Takes a chunk of a stream. */
  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.addText(choice.text ?? choice.delta?.content ?? "", choice.token_ids ?? []);
    if (choice.exit_layers) this.#addDepths(choice.exit_layers);
  }

  addText(text, ids) {
    this.received += text;
    if (ids.length) {
      this.ids.push(...ids);
      this.newest = performance.now();
      this.pieces.push([text, ids]);
    }
    this.tail.textContent = this.received.slice(this.coloured);
  }

  /** Servers tell depths at the end: then the pieces of text get them. */
  #addDepths(exitLayers) {
    this.layers.push(...exitLayers);
    let at = 0;
    const tokens = this.pieces.map(([text, ids]) => {
      const index = at;
      at += ids.length;
      const several = exitLayers.slice(index, at); // of a piece; where their texts part is not told
      return { index, token_id: ids[0], text, depth: Math.max(...several), several, layers: [] };
    });
    this.addTokens(tokens);
  }

  addTokens(tokens) {
    for (const token of tokens) {
      const place = this.tokens.push(token) - 1;
      const shown = element("span", `token ${depthClass(token.depth, this.depths)}`, token.text);
      if (token.several?.length > 1) shown.style.background = stripes(token.several, this.depths);
      shown.id = `${this.text.parentElement.id}-${place}`;
      shown.setAttribute("role", "option");
      shown.setAttribute("aria-selected", "false");
      shown.setAttribute("aria-label", this.describe(token));
      shown.tabIndex = place === 0 ? 0 : -1;
      if (draftsOf(token).accepted) shown.classList.add("drafted");
      this.shown.push(shown);
      this.list.append(shown);
      this.coloured += token.text.length;
    }
    if (this.tokens.length) {
      this.list.setAttribute("role", "listbox");
      this.list.setAttribute("aria-label", "tokens; arrows move, Enter says why");
      this.list.setAttribute("aria-orientation", "horizontal");
    }
    this.tail.textContent = this.received.slice(this.coloured);
  }

  describe(token) {
    const there = token.layers.find((layer) => layer.layer === token.depth);
    const sure = there?.confidence === undefined ? "" : `, confidence ${there.confidence.toFixed(2)}`;
    const { accepted, rejected } = draftsOf(token);
    const drafted = accepted ? `, drafted by layer ${accepted.layer}` : "";
    const instead = rejected.length
      ? `, instead of “${visible(rejected[0].text)}” by layer ${rejected[0].layer}` : "";
    return `${visible(token.text)}: ${whereOf(token, this.depths)}${sure}${drafted}${instead}`;
  }

  /** Tokens per second from the request on; a busy browser may read many tokens at once. */
  speed() {
    return this.newest && (1000 * this.ids.length) / (this.newest - this.began);
  }

  meanDepth() {
    const all = this.layers.length ? this.layers : this.tokens.map((token) => token.depth);
    return all.length ? all.reduce((total, depth) => total + depth, 0) / all.length : undefined;
  }

  showFigures() {
    const parts = [];
    if (this.speed() !== undefined) parts.push(`${this.speed().toFixed(1)} tokens/s`);
    if (this.ids.length) parts.push(`${this.ids.length} tokens`);
    const depth = this.meanDepth();
    if (depth !== undefined) parts.push(`mean depth ${depth.toFixed(1)} of ${this.depths.at(-1)}`);
    const drafts = this.tokens.flatMap((token) => token.drafts ?? []);
    if (drafts.length) {
      const accepted = drafts.filter((one) => one.accepted).length;
      parts.push(`${accepted} of ${drafts.length} drafts accepted`);
    }
    this.figures.textContent = parts.join(" · ");
  }

  /** Marks the piece with the token at which two answers part; returns it. */
  markParting(index) {
    if (index >= this.ids.length) return undefined;
    const place = this.tokens.findLastIndex((token) => token.index <= index);
    this.shown[place]?.classList.add("parts");
    return this.tokens[place];
  }

  choose(index) {
    const token = this.shown[index];
    if (!token) return;
    this.shown[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = index;
    token.setAttribute("aria-selected", "true");
    this.dispatchEvent(new CustomEvent("choose", { detail: index }));
  }

  unchoose() {
    this.shown[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = -1;
  }

  focusToken(index) {
    const token = this.shown[index];
    if (!token) return;
    for (const one of this.list.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  }

  #indexOf(node) {
    return this.shown.indexOf(node);
  }

  #onFocus(event) {
    this.#tipFor(event.target);
    const index = this.#indexOf(event.target);
    if (index >= 0 && this.chosen >= 0 && index !== this.chosen) this.choose(index);
  }

  #onKey(event) {
    const index = this.#indexOf(event.target);
    if (index < 0) return;
    const last = this.shown.length - 1;
    const to = {
      ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1,
      Home: 0, End: last,
    }[event.key];
    if (to !== undefined) this.focusToken(Math.min(last, Math.max(0, to)));
    else if (event.key === "Enter" || event.key === " ") this.choose(index);
    else if (event.key === "Escape") this.dispatchEvent(new Event("dismiss"));
    else return;
    event.preventDefault();
  }

  #tipFor(node) {
    const index = this.#indexOf(node);
    if (index < 0) hideTip();
    else showTip(node, this.describe(this.tokens[index]));
  }
}
