// Turns as bars by phase, with the budget and the compactions.

import { count, svg } from "./dom.js";

const HEIGHT = 180;
const LEFT = 52;
const BELOW = 34;
const PHASES = ["others", "think", "act", "tool"];

export function chart(box, turns, compactions) {
  if (!turns.length) {
    box.replaceChildren("No finished turn on this worker yet.");
    return;
  }
  const slot = Math.max(22, Math.min(64, Math.floor((box.clientWidth - LEFT) / Math.max(1, turns.length))));
  const width = LEFT + slot * turns.length + 8;
  const tops = [...turns.flatMap((t) => [t.held, t.budget]), ...compactions.map((c) => c.before), 1];
  const top = Math.max(...tops) * 1.08;
  const y = (tokens) => HEIGHT - (HEIGHT - 8) * (tokens / top);
  const picture = svg("svg", { width, height: HEIGHT + BELOW, viewBox: `0 0 ${width} ${HEIGHT + BELOW}` });
  for (const share of [0, 0.5, 1]) {
    const value = Math.round(top * share);
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, count(value)));
  }
  turns.forEach((turn, i) => {
    const x = LEFT + slot * i;
    let base = 0;
    for (const phase of PHASES) {
      const tokens = turn.phases[phase] ?? 0;
      const height = y(base) - y(base + tokens);
      picture.append(svg("rect", { class: `bar-${phase}`, x: x + 4, width: slot - 10, y: y(base + tokens), height }));
      base += tokens;
    }
    if (turn.budget) {
      picture.append(svg("line", { class: "budget", x1: x, x2: x + slot, y1: y(turn.budget), y2: y(turn.budget) }));
    }
    compactions.filter((c) => c.epoch === turn.epoch).forEach((event, n, all) => {
      const at = x + ((n + 1) * slot) / (all.length + 1);
      const tip = y(event.after);
      picture.append(svg("path", { class: "event", d: `M${at} ${y(event.before)}V${tip}m-3 -5l3 5l3 -5` }));
    });
    const centre = x + slot / 2;
    picture.append(svg("text", { x: centre, y: HEIGHT + 14, "text-anchor": "middle" }, String(turn.epoch + 1)));
    picture.append(svg("text", { x: centre, y: HEIGHT + 28, "text-anchor": "middle" }, turn.state.slice(0, 3)));
  });
  box.replaceChildren(picture);
}
