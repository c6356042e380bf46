// The explorer of non-zeros: three panels for one run and one layer, drawn as SVG from the data in the page.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const run = document.getElementById("explorer-run");
  const layer = document.getElementById("explorer-layer");
  const W = 300, H = 210, LEFT = 46, BOTTOM = 36, TOP = 8, RIGHT = 8;
  const BLUE = "#0072b2", ORANGE = "#e69f00";

  function element(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function short(value) {
    return value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }
  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (v) => v, a = f(low), b = f(high);
    return (value) => (b === a ? (from + to) / 2 : from + ((f(value) - a) / (b - a)) * (to - from));
  }
  function ticks(low, high, log) {
    if (log) {
      const found = [], most = high / low > 80 ? [1] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const m of most) { const v = m * 10 ** e; if (v >= low * 0.999 && v <= high * 1.001) found.push(v); }
      return found;
    }
    const raw = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const found = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(v);
    return found;
  }
  function frame(svg, x, y, xTicks, yTicks, xName, yName) {
    for (const v of yTicks) {
      svg.append(element("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }));
      svg.append(element("text", { x: LEFT - 5, y: y(v) + 4, "text-anchor": "end" }, short(v)));
    }
    for (const v of xTicks) svg.append(element("text", { x: x(v), y: H - BOTTOM + 15, "text-anchor": "middle" }, short(v)));
    svg.append(element("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }));
    svg.append(element("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, xName));
    const middle = (TOP + H - BOTTOM) / 2;
    svg.append(element("text", { x: 9, y: middle, "text-anchor": "middle", transform: `rotate(-90 9 ${middle})` }, yName));
  }
  function blank(id, label) {
    const svg = document.getElementById(id);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.setAttribute("aria-label", label);
    return svg;
  }
  function histogram(points, label) {
    const svg = blank("explorer-histogram", `${label}: share of tokens by number of non-zeros`);
    const most = Math.max(...points.map((p) => p[1])) * 100, end = points[points.length - 1][0];
    const x = scale(0, end + 1, LEFT, W - RIGHT), y = scale(0, most, H - BOTTOM, TOP);
    frame(svg, x, y, ticks(0, end, false), ticks(0, most, false), "non-zeros (neurons/token)", "tokens (%)");
    let before = -1;
    for (const [upper, share] of points) {
      const left = x(before + 1), width = Math.max(1, x(upper + 1) - left - 0.7);
      const bar = element("rect", { x: left, y: y(share * 100), width: width, height: H - BOTTOM - y(share * 100), fill: BLUE });
      bar.append(element("title", {}, `${before + 1} to ${upper}: ${short(share * 100)}% of the tokens`));
      svg.append(bar);
      before = upper;
    }
  }
  function positions(points, label) {
    const svg = blank("explorer-positions", `${label}: mean non-zeros by position`);
    const values = points.map((p) => p[1]), log = Math.min(...values) > 0;
    const low = log ? Math.min(...values) * 0.9 : 0, high = Math.max(...values) * 1.1 || 1;
    const last = points[points.length - 1][0] + 1;
    const x = scale(1, last, LEFT, W - RIGHT, true), y = scale(low, high, H - BOTTOM, TOP, log);
    frame(svg, x, y, ticks(1, last, true), ticks(low, high, log), "position (tokens)", "mean non-zeros");
    const path = points.map(([p, v], i) => `${i ? "L" : "M"}${x(p + 1).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    svg.append(element("path", { d: path, fill: "none", stroke: BLUE, "stroke-width": 2 }));
  }
  function tokens(points, label) {
    const svg = blank("explorer-tokens", `${label}: tokens with the fewest and the most non-zeros`);
    const left = 96, row = (H - TOP) / points.length, most = Math.max(...points.map((p) => p[1])) || 1;
    [...points].reverse().forEach(([text, value], i) => {
      const top = TOP + i * row, width = (value / most) * (W - RIGHT - left - 40);
      const colour = i < points.length / 2 ? ORANGE : BLUE;
      svg.append(element("text", { x: left - 5, y: top + row * 0.78, "text-anchor": "end", style: "font-size:9px" }, text));
      svg.append(element("rect", { x: left, y: top + 1, width: Math.max(width, 0.5), height: row - 2, fill: colour }));
      svg.append(element("text", { x: left + width + 4, y: top + row * 0.78, style: "font-size:9px" }, short(value)));
    });
  }
  function fill(select, names) {
    const kept = Math.min(Math.max(select.selectedIndex, 0), names.length - 1);
    select.replaceChildren(...names.map((name) => { const o = document.createElement("option"); o.textContent = name; return o; }));
    select.selectedIndex = kept;
  }
  function draw() {
    fill(layer, data[run.selectedIndex].layers.map((l) => l.name));
    const chosen = data[run.selectedIndex].layers[layer.selectedIndex];
    const label = `${data[run.selectedIndex].label}, ${chosen.name}`;
    histogram(chosen.histogram, label);
    positions(chosen.positions, label);
    tokens(chosen.tokens, label);
  }
  fill(run, data.map((d) => d.label));
  run.addEventListener("change", draw);
  layer.addEventListener("change", draw);
  draw();
})();
