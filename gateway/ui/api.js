// The admin API: one key for this tab, JSON, and server-sent events (EventSource cannot send a key).

const NAME = "agentkv-admin-key";

export class Refused extends Error {}

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (text) => sessionStorage.setItem(NAME, text),
  forget: () => sessionStorage.removeItem(NAME),
};

async function open(path, signal) {
  const reply = await fetch(new URL(path, document.baseURI), {
    headers: { authorization: `Bearer ${key.get()}` },
    signal,
  });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  const message = body.error?.message ?? `The gateway answered ${reply.status}.`;
  throw reply.status === 401 ? new Refused(message) : new Error(message);
}

export async function read(path, signal) {
  return (await open(path, signal)).json();
}

/** Calls `heard(event, data)` for every event of a stream until it ends or `signal` aborts. */
export async function listen(path, signal, heard) {
  const reader = (await open(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => {
        const at = line.indexOf(": ");
        return [line.slice(0, at), line.slice(at + 2)];
      }));
      if (fields.data) heard(fields.event, JSON.parse(fields.data));
    }
  }
}
