// One session: what the cache keeps of it, turn by turn.

import { read } from "./api.js";
import { chart } from "./chart.js";
import { $, Table, count, element, percent, save } from "./dom.js";
import { Strip, spread, unpack } from "./strip.js";

const PHASES = ["think", "act", "tool", "others"];
const AROUND = 24;

const budget = (turn) => (turn.budget ? count(turn.budget) : "full");

export class SessionPage {
  constructor() {
    this.layer = "";
    this.strip = new Strip($("strip"), $("detail"), (token) => this.read(token));
    for (const [text, value] of [["auto", 0], ["1", 1], ["4", 4], ["16", 16], ["64", 64]]) {
      $("zoom").append(element("option", { value }, text));
    }
    $("zoom").addEventListener("change", () => {
      this.strip.zoom = Number($("zoom").value);
      this.strip.draw();
    });
    $("layer").addEventListener("change", () => this.choose($("layer").value));
    $("json").addEventListener("click", () => {
      save(`${this.view.key}.json`, new Blob([JSON.stringify(this.view, null, 1)], { type: "application/json" }));
    });
    $("png").addEventListener("click", async () => {
      save(`${this.view.key}.png`, await this.strip.picture(`${this.view.key}: ${$("detail").textContent}`));
    });
    this.turns = new Table($("turns"), [
      { title: "Turn", number: true, show: (t) => count(t.epoch + 1) },
      { title: "State", show: (t) => (t.reason ? `${t.state}: ${t.reason}` : t.state) },
      { title: "Tokens", number: true, show: (t) => count(t.logical) },
      { title: "Held", number: true, show: (t) => count(t.held) },
      { title: "Evicted", number: true, show: (t) => count(t.evicted) },
      { title: "Prefilled", number: true, show: (t) => count(t.prefill) },
      { title: "Budget", number: true, show: budget },
      { title: "Policy", show: (t) => t.policy },
      { title: "Compactions", number: true, show: (t) => count(t.compactions) },
      ...PHASES.map((phase) => ({ title: phase, number: true, show: (t) => count(Math.round(t.phases[phase])) })),
    ], (t) => t.epoch);
    this.compactions = new Table($("compactions"), [
      { title: "Turn", number: true, show: (c) => count(c.epoch + 1) },
      { title: "At token", number: true, show: (c) => count(c.length) },
      { title: "Held before", number: true, show: (c) => count(c.before) },
      { title: "Kept", number: true, show: (c) => count(c.after) },
    ], (c) => `${c.epoch}-${c.length}`);
    this.phases = new Table($("phases"), [
      { title: "Phase", show: (p) => element("span", {}, element("span", { class: `swatch ${p.name}` }), p.name) },
      { title: "Tokens", number: true, show: (p) => count(p.tokens) },
      { title: "Held", number: true, show: (p) => count(Math.round(p.held)) },
      { title: "Share held", number: true, show: (p) => (p.tokens ? percent(p.held / p.tokens) : "–") },
    ], (p) => p.name);
  }

  update(view) {
    if (this.view?.key !== view.key) this.strip.at = 0;
    this.whole = this.view = view;
    const { engine } = view;
    $("session-title").textContent = `Session ${view.key}`;
    $("engine-note").textContent = engine.error ?? "";
    this.facts(view);
    if ($("layer").options.length !== (engine.layers ?? 0) + 1) this.offer(engine.layers ?? 0);
    const turns = engine.turns ?? [];
    const compactions = engine.compactions ?? [];
    this.turns.update(turns);
    this.compactions.update(compactions);
    chart($("chart"), turns, compactions);
    this.phases.update(this.byPhase(view));
    if (this.layer === "") this.strip.show(view);
    else this.choose(this.layer);
  }

  facts(view) {
    const { engine } = view;
    const last = engine.turns?.at(-1);
    const facts = {
      State: view.running ? "running" : engine.state ?? "unknown",
      Tokens: count(view.tokens),
      "Held per layer and head": count(engine.held),
      Evicted: count(engine.evicted),
      Budget: last ? budget(last) : view.budget ?? "default",
      Policy: last?.policy ?? "–",
      Worker: view.worker,
      Tenant: view.tenant,
      Model: view.model,
    };
    $("facts").replaceChildren(...Object.entries(facts).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  byPhase(view) {
    const labels = spread(view.runs, view.tokens);
    const kept = view.engine.kept ? unpack(view.engine.kept) : [];
    const rows = Object.fromEntries(PHASES.map((name) => [name, { name, tokens: 0, held: 0 }]));
    labels.forEach((label, token) => {
      const row = rows[view.phases[label]];
      row.tokens += 1;
      if (token < kept.length) row.held += kept[token] / view.engine.levels;
    });
    return Object.values(rows);
  }

  offer(layers) {
    const names = Array.from({ length: layers }, (_, i) => element("option", { value: i }, `${i}`));
    $("layer").replaceChildren(element("option", { value: "" }, "all"), ...names);
  }

  async choose(layer) {
    this.layer = layer;
    const query = layer === "" ? "" : `?layer=${layer}`;
    try {
      const view = await read(`admin/sessions/${this.whole.key}${query}`);
      if (this.layer === layer && view.key === this.whole.key) this.strip.show((this.view = view));
    } catch (error) {
      $("engine-note").textContent = error.message;
    }
  }

  /** Shows the text around a token, if the gateway is set to show content. */
  read(token) {
    if (!this.whole.content) return;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(async () => {
      const start = Math.max(0, token - AROUND);
      const end = Math.min(this.whole.tokens, token + AROUND + 1);
      const { texts } = await read(`admin/sessions/${this.whole.key}/texts?start=${start}&end=${end}`);
      const here = token - start;
      $("text").replaceChildren(
        texts.slice(0, here).join(""), element("mark", {}, texts[here] ?? ""), texts.slice(here + 1).join(""));
    }, 120);
  }
}
