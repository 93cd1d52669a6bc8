// The server's own counts, asked for while somebody looks, and seldom while nothing happens.

import { read } from "./api.js";
import { depthClass, element, nameOf } from "./depths.js";

const SOONEST = 2000;
const LATEST = 16000; // an engine that is asked stays awake for a second

export class Live {
  constructor(depths) {
    this.depths = depths;
    this.wait = SOONEST;
    this.seen = "";
    document.addEventListener("visibilitychange", () => this.hurry());
    this.hurry();
  }

  /** Asks now, and often again, unless the tab is hidden. */
  hurry() {
    clearTimeout(this.timer);
    this.wait = SOONEST;
    if (!document.hidden) this.#ask();
  }

  async #ask() {
    try {
      const stats = await read("exitserve/stats");
      const counts = JSON.stringify(stats.since_start);
      this.wait = counts === this.seen ? Math.min(2 * this.wait, LATEST) : SOONEST;
      this.seen = counts;
      this.#show(stats.since_start);
    } catch {
      this.wait = LATEST; // the server is away; the answers say so
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.#ask(), this.wait);
  }

  #show(counts) {
    const live = document.getElementById("live");
    live.hidden = false;
    const by = counts.tokens_by_exit_layer;
    const told = this.depths
      .filter((depth) => by[depth])
      .map((depth) => `${by[depth]} at ${nameOf(depth, this.depths)}`);
    const bar = document.getElementById("live-bar");
    bar.setAttribute("aria-label", `tokens of this server by depth: ${told.join(", ") || "none yet"}`);
    bar.replaceChildren(
      ...this.depths.map((depth) => {
        const part = element("span", depthClass(depth, this.depths));
        part.style.flexGrow = by[depth] ?? 0;
        part.title = `${by[depth] ?? 0} at ${nameOf(depth, this.depths)}`;
        return part;
      }),
    );
    document.getElementById("live-text").textContent = summary(counts);
  }
}

function summary(counts) {
  if (!counts.tokens) return "No tokens yet";
  const parts = [`${counts.tokens.toLocaleString("en")} tokens`];
  parts.push(`mean depth ${counts.mean_depth.toFixed(1)}`);
  if (counts.drafted_tokens) {
    const [accepted, drafted] = [counts.accepted_tokens, counts.drafted_tokens];
    parts.push(`${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")} drafts accepted`);
  }
  return parts.join(" · ");
}
