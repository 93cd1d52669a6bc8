// Trace files: docs/playground.md says what is in them, `exitserve eval --prompt` writes them.

import { OUTCOMES } from "./why.js";

const VERSION = 2;

/** Reads a file; throws an `Error` with one line if it is no trace. */
export async function openTrace(file) {
  let trace;
  try {
    trace = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON; open a file that exitserve eval --prompt wrote.`);
  }
  if (trace?.version !== VERSION || !isTrace(trace)) {
    throw new Error(
      `${file.name} is no trace of version ${VERSION}; open a file that exitserve eval --prompt wrote.`,
    );
  }
  return trace;
}

function isTrace(trace) {
  return Array.isArray(trace.tokens) && Array.isArray(trace.exit_layers) &&
    Number.isInteger(trace.num_layers) && typeof trace.prompt === "string" &&
    trace.tokens.every(isToken);
}

function isToken(token) {
  return typeof token.text === "string" && Number.isInteger(token.depth) &&
    Array.isArray(token.layers) && token.layers.every(isLayer) &&
    (token.drafts === undefined || (Array.isArray(token.drafts) && token.drafts.every(isDraft)));
}

function isDraft(draft) {
  return Number.isInteger(draft.layer) && typeof draft.text === "string" &&
    typeof draft.accepted === "boolean";
}

function isLayer(layer) {
  const numbers = [layer.confidence ?? 0, layer.threshold ?? 0];
  return Number.isInteger(layer.layer) && layer.outcome in OUTCOMES &&
    typeof (layer.text ?? "") === "string" && numbers.every(Number.isFinite);
}
