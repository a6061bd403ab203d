// Which view is open, and the one stream of events that feeds it.

import { Refused, key, listen } from "./api.js";
import { $ } from "./dom.js";
import { Fleet } from "./fleet.js";
import { SessionPage } from "./session.js";

const RETRY = 2000;
const fleet = new Fleet();
const session = new SessionPage();
let stream = new AbortController();
let seen = null;

const chosen = () => /^#session=([0-9a-f]{16})$/.exec(location.hash)?.[1] ?? null;

function view(name) {
  for (const each of ["key", "fleet", "session"]) $(each).hidden = each !== name;
  $("forget").hidden = name === "key";
}

const say = (text) => {
  if ($("status").textContent !== text) $("status").textContent = text;
};

async function show() {
  stream.abort();
  stream = new AbortController();
  const { signal } = stream;
  if (!key.get()) {
    view("key");
    $("key-text").focus();
    return;
  }
  const open = chosen();
  view(open ? "session" : "fleet");
  const path = open ? `admin/events?session=${open}` : "admin/events";
  while (!signal.aborted) {
    try {
      say("connecting …");
      await listen(path, signal, (event, data) => {
        if (data.error) return say(data.error);
        say("live");
        if (event === "fleet") fleet.update((seen = data));
        const all = event === "fleet" && data.total === data.sessions.length;
        if (open && all && !data.sessions.some((s) => s.key === open)) say("This session has ended.");
        if (event === "session") session.update(data);
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        key.forget();
        say(error.message);
        view("key");
        return;
      }
      say(`${error.message} Trying again …`);
    }
    await new Promise((done) => setTimeout(done, RETRY));
  }
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key-text").value);
  $("key-text").value = "";
  show();
});
$("forget").addEventListener("click", () => {
  key.forget();
  location.replace(location.pathname); // nothing that was shown stays in the document
});
addEventListener("hashchange", show);
setInterval(() => seen && fleet.update(seen), 5000); // "last used" grows old without any event
addEventListener("pagehide", () => stream.abort());
show();
