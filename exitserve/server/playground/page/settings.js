// The form: what this server offers, and the fields that a request sends for what was chosen.

import { element } from "./depths.js";

const $ = (id) => document.getElementById(id);
const percent = (share) => `${+(100 * share).toFixed(2)} %`;

const WAYS = {
  promise: "quality",
  threshold: "a raw threshold",
  layer: "one exit layer",
  server: "the server’s default",
};

export class Settings {
  /** @param stats `GET /exitserve/stats` */
  constructor(stats) {
    this.depths = [...stats.exit_layers, stats.num_layers];
    this.hasExits = stats.exit_layers.length > 0;
    this.offers = stats.offers;
    this.lossless = stats.offers.modes.includes("verify") ? "verify" : "off";
    const served = stats.offers.modes.includes(stats.offers.calibrated_mode);
    this.promises = served ? stats.offers.promises : [];
    this.judges = stats.default.mode === "verify"; // by default, full depth judges every token
    this.#fill();
    for (const id of ["promise", "by", "threshold", "mode", "layer", "order", "kind"]) {
      $(id).addEventListener("input", () => this.show());
    }
    this.show();
  }

  #fill() {
    const modes = this.offers.modes.filter((mode) => mode === "confidence" || mode === "defer");
    const ways = [
      ["promise", this.promises.length > 0 || this.lossless === "verify"],
      ["threshold", this.hasExits && modes.length > 0],
      ["layer", this.hasExits && this.offers.modes.includes("fixed")],
      ["server", true],
    ];
    options("by", ways.filter(([, offered]) => offered).map(([way]) => [way, WAYS[way]]));
    options("mode", modes.map((mode) => [mode, mode]));
    options("layer", this.depths.slice(0, -1).map((layer) => [layer, `layer ${layer}`]));
    $("as").hidden = !this.offers.chat;
    $("kind").value = this.offers.chat ? "chat" : "completion";
    $("promise").max = this.promises.length;
    $("promise").value = this.judges ? this.promises.length : Math.max(0, this.promises.length - 1);
    options("promises", [...this.promises.keys(), this.promises.length].map((at) => [at, ""]));
    $("advanced").open = this.hasExits && $("by").value !== "promise";
  }

  /** The promise that the slider is at; undefined at its end, where nothing is lost. */
  #promise() {
    return this.promises[Number($("promise").value)];
  }

  /** Shows the controls of the chosen way, and what they mean. */
  show() {
    const way = $("by").value;
    $("by-promise").hidden = way !== "promise" || this.promises.length === 0;
    $("by-threshold").hidden = way !== "threshold";
    $("by-mode").hidden = way !== "threshold";
    $("by-layer").hidden = way !== "layer";
    $("threshold-shown").textContent = Number($("threshold").value).toFixed(2);
    $("prompt-label").textContent = this.chats ? "Message" : "Prompt";
    $("order-says").textContent = !this.hasExits ? "" : this.together
      ? "Both at once, and each slows the other."
      : "This setting first, then full depth, so that neither slows the other.";
    const meaning = this.#meaning(way);
    $("meaning").textContent = meaning;
    $("promise").setAttribute("aria-valuetext", meaning);
  }

  /** Whether both answers run at once. */
  get together() {
    return $("order").value === "together";
  }

  /** Whether a prompt is the next turn of a chat. */
  get chats() {
    return this.offers.chat && $("kind").value === "chat";
  }

  #meaning(way) {
    if (!this.hasExits) {
      return `This checkpoint has no exits: every token runs all ${this.depths.at(-1)} layers. ` +
        "exitserve plan says what exits could gain, exitserve train trains them.";
    }
    if (way === "promise") {
      const point = this.#promise();
      if (point) {
        const depth = point.found.mean_depth;
        const cost = depth ? `; mean depth ${depth.toFixed(1)} of ${this.depths.at(-1)} there` : "";
        return `At least ${percent(point.agreement)} of the tokens are those of full depth ` +
          `(by the checkpoint’s calibration${cost}).`;
      }
      return this.lossless === "verify"
        ? "Lossless: exits draft, and full depth judges every token."
        : "Lossless: every token runs all layers.";
    }
    const nothing = this.promises.length ? "" :
      " This checkpoint is not calibrated (exitserve calibrate), so no quality can be promised.";
    if (way === "threshold") {
      return `A token stops at the first exit layer that is surer than ` +
        `${Number($("threshold").value).toFixed(2)}.${nothing}`;
    }
    if (way === "layer") return `Every token stops at layer ${$("layer").value}.${nothing}`;
    return "What a request gets that asks for nothing.";
  }

  /** The `exit_*` fields of the left answer. */
  fields() {
    const way = $("by").value;
    if (way === "promise") {
      const point = this.#promise();
      return point ? { exit_target: point.agreement } : { exit_mode: this.lossless };
    }
    if (way === "threshold") {
      return { exit_threshold: Number($("threshold").value), exit_mode: $("mode").value };
    }
    return way === "layer" ? { exit_layer: Number($("layer").value) } : {};
  }

  /** What else a request says: the prompt, or message behind a chat's turns; length, sampling. */
  request(model, turns) {
    const prompt = $("prompt").value;
    const body = {
      model,
      max_tokens: Number($("max-tokens").value),
      temperature: Number($("temperature").value),
      return_token_ids: true,
    };
    if ($("seed").value !== "") body.seed = Number($("seed").value);
    if (this.chats) body.messages = [...turns, { role: "user", content: prompt }];
    else body.prompt = prompt;
    return { path: this.chats ? "v1/chat/completions" : "v1/completions", prompt, body };
  }
}

function options(id, pairs) {
  $(id).replaceChildren(
    ...pairs.map(([value, text]) => {
      const option = element("option", "", text);
      option.value = value;
      return option;
    }),
  );
}
