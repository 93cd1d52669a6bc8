// Depths and confidences as steps of two ordered scales, whose colours are in style.css.

const STEPS = 8;

/** Which of the eight colours a depth has: the shallowest exit the first, full depth the last. */
function depthStep(depth, depths) {
  const rank = depths.indexOf(depth);
  const last = depths.length - 1;
  return rank < 0 || last < 1 ? STEPS - 1 : Math.round((rank / last) * (STEPS - 1));
}

/** The classes of a depth: its colour, and a line under every other, so that neighbours differ. */
export function depthClass(depth, depths) {
  const below = depths.length - 1 - depths.indexOf(depth);
  return `depth-${depthStep(depth, depths)}${below % 2 && below < depths.length ? " lined" : ""}`;
}

/** Which of the eight colours a confidence from 0 to 1 has. */
export function confidenceStep(confidence) {
  return Math.min(STEPS - 1, Math.max(0, Math.floor(confidence * STEPS)));
}

/** A background that shows several depths side by side, each as wide. */
export function stripes(several, depths) {
  const width = 100 / several.length;
  const colours = several.map((depth, at) =>
    `var(--depth-${depthStep(depth, depths)}) ${at * width}% ${(at + 1) * width}%`);
  return `linear-gradient(to right, ${colours.join(", ")})`;
}

export function nameOf(depth, depths) {
  return depth === depths.at(-1) ? `full depth (${depth})` : `layer ${depth}`;
}

/** Where a token stopped; of a piece with several tokens, where these did. */
export function whereOf({ depth, several = [depth] }, depths) {
  return [...new Set(several)].map((one) => nameOf(one, depths)).join(", ");
}

/** An element with a class and text; text is never read as HTML. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** A token's text with its blanks to be seen. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** A token's own draft, if full depth accepted it, and those that it rejected for the token. */
export function draftsOf(token) {
  const drafts = token.drafts ?? [];
  return {
    accepted: drafts.find((one) => one.accepted),
    rejected: drafts.filter((one) => !one.accepted),
  };
}

export function drawLegend(place, depths, hasDrafts = false) {
  const entry = (mark, text) => {
    const item = element("li");
    item.append(mark, ` ${text}`);
    return item;
  };
  const drafted = element("span", `${depthClass(depths.at(-1), depths)} drafted`, "ab");
  place.replaceChildren(
    ...depths.map((depth) =>
      entry(element("span", `swatch ${depthClass(depth, depths)}`), nameOf(depth, depths))),
    ...(hasDrafts ? [entry(drafted, "drafted, and full depth agreed")] : []),
  );
}
