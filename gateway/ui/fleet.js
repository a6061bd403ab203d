// The fleet: which workers there are, how they do, and which sessions they hold.

import { $, Table, ago, count, element } from "./dom.js";

function health(worker) {
  if (!worker.healthy) return "down";
  if (worker.draining) return "draining";
  return worker.breaker === "closed" ? "up" : `breaker ${worker.breaker}`;
}

export class Fleet {
  constructor() {
    this.workers = new Table($("workers"), [
      { title: "Worker", show: (w) => w.id },
      { title: "State", show: health, look: (w) => (health(w) === "up" ? "good" : "bad") },
      { title: "Running turns", number: true, show: (w) => count(w.inflight) },
      { title: "Sessions", number: true, show: (w) => count(w.sessions) },
      { title: "KV tokens", number: true, show: (w) => count(w.kv_tokens) },
      { title: "Models", show: (w) => w.models.join(", ") || "–" },
      { title: "Address", show: (w) => w.url },
    ], (w) => w.id);
    this.sessions = new Table($("sessions"), [
      { title: "Session", show: (s) => element("a", { href: `#session=${s.key}` }, s.key) },
      { title: "State", show: (s) => (s.running ? "running" : "idle"), look: (s) => (s.running ? "good" : "") },
      { title: "Turns", number: true, show: (s) => count(s.turns) },
      { title: "KV tokens", number: true, show: (s) => count(s.kv_tokens) },
      { title: "Budget", number: true, show: (s) => s.budget ?? "default" },
      { title: "Worker", show: (s) => s.worker },
      { title: "Tenant", show: (s) => s.tenant },
      { title: "Model", show: (s) => s.model },
      { title: "Last used", show: (s) => ago(s.used) },
    ], (s) => s.key);
  }

  update(fleet) {
    this.workers.update(fleet.workers);
    this.sessions.update(fleet.sessions);
    const shown = fleet.sessions.length;
    const note = shown < fleet.total ? `The ${count(shown)} used last of ${count(fleet.total)}.` : "";
    $("sessions-note").textContent = fleet.total ? note : "No session yet: send a chat request to this gateway.";
  }
}
