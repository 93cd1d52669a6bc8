// The server's public API: nothing here that any other client could not do.

const KEY = "exitserve-api-key";
const root = new URL("../", location.href); // the page is <root>/exitserve/playground

/** An answer that is an error; `message` is the server's own line. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(answer) {
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    const body = await answer.json();
    message = body.error?.message ?? body.error ?? message;
  } catch {
    // not JSON: the status must do
  }
  throw new ServerError(answer.status, String(message));
}

/** A page of the server, as JSON. */
export async function read(path) {
  return (await checked(await fetch(new URL(path, root), { headers: headers() }))).json();
}

/** The chunks of a streamed answer. */
export async function* stream(path, body, signal) {
  const answer = await checked(
    await fetch(new URL(path, root), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    }),
  );
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue;
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new ServerError(chunk.error.code, chunk.error.message);
      yield chunk;
    }
  }
}
