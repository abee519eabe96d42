// A film of masks, the sawtooth of one pruned weight, and the schedules. No dependencies, no network.
// JupyterLab shows it in an <iframe srcdoc>, the gallery in its pages: every element with data-play is filled.
"use strict";
const play = (() => {
  // The paper's equations, as in feddip_core/schedules.py and masks.py.

  const sparsityAt = (t, T, s0, sp) => sp + (s0 - sp) * (1 - t / T) ** 3; // Eq. 11
  const lambdaAt = (t, T, lambdaMax, Q) => lambdaMax * Math.min(Math.floor(t * Q / T), Q - 1) / Q; // Eq. 9

  /** The sparsity of the mask in each round, and after the last: a new mask every R rounds. */
  function staircase(T, R, s0, sp) {
    const stairs = [s0];
    for (let t = 1; t <= T; t++) stairs.push(t % R ? stairs[t - 1] : sparsityAt(t, T, s0, sp));
    return stairs;
  }

  /** A kept weight at home at `kept`, and a pruned one that wants to be 1: the pruned one, step by step. */
  function sawtooth(rule, steps, eta, kept, rounds) {
    const w = [kept, 0], goal = [kept, 1], path = [];
    let m = [1, 0], back = null;
    for (let tau = 1; tau <= rounds; tau++) {
      path.push(w[1]);
      for (let k = 0; k < steps; k++) {
        for (const i of [0, 1]) w[i] -= eta * (m[i] * w[i] - goal[i]); // the gradient at the pruned point
        path.push(w[1]);
      }
      const size = w.map((v, i) => rule === "released" && !m[i] ? -1 : Math.abs(v));
      m = size[1] >= size[0] ? [0, 1] : [1, 0];
      if (m[1] && back === null) back = tau;
      if (rule !== "dense_memory") for (const i of [0, 1]) w[i] *= m[i];
    }
    return { path, back };
  }

  // Parts of a page.

  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const number = (v, digits = 3) => String(Number(v.toPrecision(digits)));
  const count = v => v.toLocaleString("en");

  function slider(text, range, redraw) {
    const shown = h("output"), note = h("span", { class: "note", role: "alert" });
    const input = h("input", { type: "range", "aria-label": text, ...range });
    const say = () => { shown.textContent = input.value; };
    input.addEventListener("input", () => { say(); redraw(input); });
    say();
    return { input, note, row: h("label", {}, h("span", {}, text), input, shown, note), get value() { return Number(input.value); } };
  }

  /** The end of an axis with four round steps that reaches at least this high. */
  const rounded = high => { const step = 10 ** Math.floor(Math.log10(high / 4)); return 4 * step * Math.ceil(high / 4 / step - 1e-9); };

  /** Lines from x = 0 as SVG text; both axes begin at 0. */
  function chart(title, xlabel, xmax, ymax, lines, { width = 300, height = 170, marks = "" } = {}) {
    const left = 38, bottom = height - 30, top = 26, wide = width - left - 10, X = x => left + wide * x / xmax;
    const Y = y => bottom - (bottom - top) * y / ymax, out = [];
    for (let i = 0; i <= 4; i++) {
      const y = ymax * i / 4;
      out.push(`<path d="M${left} ${Y(y)}h${wide}" stroke="${i ? "#ddd" : "#888"}"/>`);
      out.push(`<text x="${left - 5}" y="${Y(y) + 4}" text-anchor="end">${number(y, 2)}</text>`);
    }
    for (const x of [0, xmax / 2, xmax]) out.push(`<text x="${X(x)}" y="${bottom + 14}" text-anchor="middle">${number(x)}</text>`);
    for (const { points, colour, dash = "", step } of lines) {
      const d = points.map(([x, y], i) => i === 0 ? `M${X(x)} ${Y(y)}` : step ? `H${X(x)}V${Y(y)}` : `L${X(x)} ${Y(y)}`);
      out.push(`<path d="${d.join("")}" fill="none" stroke="${colour}" stroke-width="2" stroke-dasharray="${dash}"/>`);
    }
    const words = `<text x="${left}" y="14" class="title">${title}</text><text x="${left + wide / 2}" y="${height - 2}" text-anchor="middle">${xlabel}</text>`;
    return `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${title}">${words}${out.join("")}${typeof marks === "function" ? marks(X, Y) : marks}</svg>`;
  }

  const legend = parts => h("p", { class: "legend" }, ...parts.flatMap(([colour, text]) => [
    h("span", { class: "swatch", style: `background: ${colour}`, "aria-hidden": "true" }), text]));

  // The film of a layer's mask, of one run or of two side by side.

  const PRUNED = [242, 242, 242], KEPT = [122, 139, 153], BACK = [213, 94, 0], FLASH = [255, 225, 0];
  const css = ([r, g, b]) => `rgb(${r}, ${g}, ${b})`, INKS = ["#0072B2", "#009E73"];
  const FRAME = 700, FADE = 450; // milliseconds of a frame, and of its change

  const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

  /** What the numbers of a run mean: the value and the state of weight i after round r. */
  function decoded(run) {
    const size = run.rows * run.columns, values = new Int16Array(bytes(run.values).buffer), bits = bytes(run.kept);
    const kept = (r, i) => (bits[(r * size + i) >> 3] >> (7 - ((r * size + i) & 7))) & 1;
    const value = (r, i) => values[r * size + i] * run.scale, first = new Int32Array(size).fill(run.frames), last = run.frames - 1;
    for (let i = 0; i < size; i++) for (let r = last; r >= 0; r--) if (!kept(r, i)) first[i] = r;
    const back = (r, i) => kept(r, i) && first[i] < r;
    return { ...run, size, kept, value, back, last };
  }

  function paint(run, canvas, r, p) {
    const context = canvas.getContext("2d"), image = context.createImageData(run.columns, run.rows);
    const steady = (r, i) => !run.kept(r, i) ? PRUNED : run.back(r, i) ? BACK : KEPT;
    for (let i = 0; i < run.size; i++) {
      const now = steady(r, i), returned = r && run.kept(r, i) && !run.kept(r - 1, i);
      const before = returned ? FLASH : r ? steady(r - 1, i) : now;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = before[c] + (now[c] - before[c]) * p;
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  }

  function film(root, data) {
    const runs = data.runs.map(decoded), last = Math.max(...runs.map(run => run.last));
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let round = last, chosen = runs[0].interesting, playing = false, began = 0;
    const status = h("p", { role: "status", class: "counts" }), told = h("p", { role: "status", class: "weight" });
    const history = h("div"), shown = h("output"), button = h("button", { type: "button", onclick: toggle }, "Play");
    const scrub = h("input", { type: "range", min: 0, max: last, "aria-label": "Round of the film", oninput: () => { pause(); go(Number(scrub.value)); } });
    const screens = runs.map((run, k) => {
      const canvas = h("canvas", { width: run.columns, height: run.rows, tabindex: 0, role: "application",
        "aria-label": `Weights of ${data.layer}, ${run.name}: arrow keys choose one`, onkeydown: move, onpointermove: point, onpointerdown: point });
      const cursor = h("span", { class: "cursor", "aria-hidden": "true" });
      const name = h("figcaption", {}, h("span", { class: "swatch", style: `background: ${INKS[k]}`, "aria-hidden": "true" }), run.name);
      return { run, canvas, cursor, figure: h("figure", {}, name, h("div", { class: "screen" }, canvas, cursor)) };
    });
    root.replaceChildren(h("div", { class: "controls" }, button, scrub, shown), h("div", { class: "screens" }, ...screens.map(s => s.figure)),
      legend([[css(PRUNED), "pruned"], [css(KEPT), "kept all along"], [css(BACK), "returned"]]), status, history, told, h("p", { class: "why" }, data.why));
    go(last);

    function toggle() {
      if (playing) return pause();
      playing = true;
      button.textContent = "Pause";
      status.setAttribute("aria-live", "off"); // a line per round would drown everything else
      go(round === last ? 0 : round);
      began = performance.now();
      requestAnimationFrame(tick);
    }
    function pause() {
      playing = false;
      button.textContent = "Play";
      status.setAttribute("aria-live", "polite");
      draw(1);
    }
    function tick(now) {
      if (!playing) return;
      if (now - began >= FRAME) {
        if (round === last) return pause();
        began = now;
        go(round + 1, still ? 1 : 0);
      } else draw(still ? 1 : Math.min(1, (now - began) / FADE));
      requestAnimationFrame(tick);
    }
    function go(r, p = 1) {
      round = r;
      scrub.value = r;
      scrub.setAttribute("aria-valuetext", shown.textContent = `round ${r} of ${last}`);
      status.textContent = runs.map(run => {
        const [pruned, kept, back] = run.counts[Math.min(r, run.last)];
        return `${runs.length > 1 ? run.name + ": " : ""}${count(pruned)} pruned, ${count(kept)} kept all along, ${count(back)} returned`;
      }).join("; ") + ".";
      draw(p);
      tell();
    }
    function draw(p) {
      for (const { run, canvas } of screens) paint(run, canvas, Math.min(round, run.last), p);
    }
    function point(event) {
      const { run, canvas } = screens.find(s => s.canvas === event.currentTarget), box = canvas.getBoundingClientRect();
      const place = (at, wide, n) => Math.max(0, Math.min(n - 1, Math.floor(at / wide * n)));
      choose(place(event.clientY - box.top, box.height, run.rows), place(event.clientX - box.left, box.width, run.columns));
    }
    function move(event) {
      const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!by) return;
      event.preventDefault();
      const { rows, columns } = runs[0];
      choose((Math.floor(chosen / columns) + by[0] + rows) % rows, (chosen % columns + by[1] + columns) % columns);
    }
    function choose(row, column) {
      chosen = row * runs[0].columns + column;
      tell();
    }
    function tell() {
      const { rows, columns } = runs[0], row = Math.floor(chosen / columns), column = chosen % columns;
      for (const { cursor } of screens) {
        cursor.style.cssText = `left: ${100 * column / columns}%; top: ${100 * row / rows}%; width: ${100 / columns}%; height: ${100 / rows}%`;
      }
      const said = runs.map(run => {
        const r = Math.min(round, run.last), bar = run.thresholds[r];
        const state = !run.kept(r, chosen) ? "pruned" : run.back(r, chosen) ? "kept again" : "kept";
        return `${runs.length > 1 ? run.name + ": " : ""}${number(run.value(r, chosen), 2)}, ${state}` +
          (bar === null ? ", no new mask in this round" : `, threshold ${number(bar, 2)}`);
      });
      told.textContent = `Output ${row}, input ${column}, after round ${round}: ${said.join("; ")}.`;
      history.innerHTML = past();
    }
    function past() {
      const heights = runs.flatMap(run => [...run.thresholds, ...run.thresholds.map((_, r) => Math.abs(run.value(r, chosen)))]);
      const top = rounded(Math.max(...heights) || 1), lines = runs.map((run, k) => ({ colour: INKS[k],
        points: run.thresholds.map((_, r) => [r, Math.abs(run.value(r, chosen))]) }));
      const marks = (X, Y) => runs.map((run, k) => run.thresholds.map((bar, r) => {
        const inside = run.kept(r, chosen) ? INKS[k] : "#fff";
        return `<circle cx="${X(r)}" cy="${Y(Math.abs(run.value(r, chosen)))}" r="3" stroke="${INKS[k]}" fill="${inside}"/>` +
          (bar === null ? "" : `<path d="M${X(r) - 6} ${Y(bar)}h12" stroke="${runs.length > 1 ? INKS[k] : "#222"}" stroke-width="2"/>`);
      }).join("")).join("") + `<path d="M${X(round)} 26V${Y(0)}" stroke="#999" stroke-dasharray="2 3"/>`;
      return chart("|weight| at the end of each round; hollow: pruned, bar: threshold", "round", Math.max(last, 1), top, lines, { width: 560, height: 130, marks });
    }
  }

  // The figures of two notebooks, with sliders.

  const RULES = { paper: "paper", released: "released code", dense_memory: "dense memory" };

  function sawtoothPage(root) {
    const controls = { steps: slider("Local steps per round", { min: 1, max: 16, value: 4 }, draw),
      eta: slider("Step size η", { min: 0.01, max: 0.3, step: 0.01, value: 0.1 }, draw),
      kept: slider("The kept weight", { min: 0.1, max: 0.95, step: 0.05, value: 0.85 }, draw),
      rounds: slider("Rounds", { min: 2, max: 12, value: 4 }, draw) };
    const charts = h("div", { class: "charts" }), words = h("p", { role: "status" });
    root.replaceChildren(...Object.values(controls).map(c => c.row), charts, words);
    draw();

    function draw() {
      const [steps, eta, kept, rounds] = ["steps", "eta", "kept", "rounds"].map(name => controls[name].value);
      const found = Object.keys(RULES).map(rule => sawtooth(rule, steps, eta, kept, rounds));
      const top = rounded(Math.max(1, ...found.flatMap(f => f.path))), last = steps * rounds;
      charts.innerHTML = found.map(({ path }, k) => chart(Object.values(RULES)[k], "local step", last, top, [
        { points: [[0, kept], [last, kept]], colour: "#0072B2", dash: "6 3" },
        { points: path.map((v, i) => [i - Math.floor(i / (steps + 1)), v]), colour: "#D55E00" }])).join("");
      words.textContent = found.map(({ back }, k) => `${Object.values(RULES)[k]}: ${back === null ? `not within ${rounds} rounds` : `returns after round ${back}`}`).join("; ") + ".";
    }
  }

  function schedulesPage(root) {
    const controls = { s0: slider("First sparsity s_0", { min: 0, max: 0.99, step: 0.01, value: 0.5 }, draw),
      sp: slider("Target sparsity s_p", { min: 0, max: 0.99, step: 0.01, value: 0.9 }, draw),
      T: slider("Rounds T", { min: 1, max: 200, value: 100 }, draw), R: slider("New mask every R", { min: 1, max: 60, value: 20 }, draw),
      Q: slider("Penalty steps Q", { min: 1, max: 20, value: 10 }, draw) };
    const charts = h("div", { class: "charts" }), words = h("p", { role: "status" });
    root.replaceChildren(...Object.values(controls).map(c => c.row), charts, words);
    draw();

    function draw(moved) {
      const [s0, sp, T, R, Q] = ["s0", "sp", "T", "R", "Q"].map(name => controls[name].value);
      for (const { note } of Object.values(controls)) note.textContent = "";
      for (const part of [charts, words]) part.classList.toggle("stale", s0 > sp);
      if (s0 > sp) {
        const beside = moved === controls.sp.input ? controls.sp : controls.s0;
        beside.note.textContent = `First sparsity ${s0} must not exceed the target ${sp}`;
        return;
      }
      if (R > T) controls.R.note.textContent = `More than T = ${T}: the first mask stays`;
      if (Q === 1) controls.Q.note.textContent = "One step means no penalty";
      const rounds = [...Array(T + 1).keys()], stairs = staircase(T, R, s0, sp);
      charts.innerHTML = chart("Sparsity: Eq. 11 and the mask", "round", T, 1, [
        { points: rounds.map(t => [t, sparsityAt(t, T, s0, sp)]), colour: "#555", dash: "2 3" },
        { points: rounds.map(t => [t, stairs[t]]), colour: "#D55E00", step: true }]) +
        chart("Penalty λ_t / λ_max", "round", T, 1, [{ points: rounds.map(t => [t, lambdaAt(t, T, 1, Q)]), colour: "#0072B2", step: true }]);
      const mean = stairs.slice(0, T).reduce((a, b) => a + b) / T;
      words.textContent = `The run ends at sparsity ${stairs[T].toFixed(3)}. Its mean sparsity is ${mean.toFixed(3)}: the weights of all downloads ` +
        `cost ${(100 * (1 - mean)).toFixed(1)} % of a dense model's. The penalty ends at ${number(lambdaAt(T - 1, T, 1, Q))} of λ_max.`;
    }
  }

  return { sparsityAt, lambdaAt, staircase, sawtooth, film, pages: { film, sawtooth: sawtoothPage, schedules: schedulesPage } };
})();

for (const root of document.querySelectorAll("[data-play]")) {
  const data = root.querySelector("script[type='application/json']");
  play.pages[root.dataset.play](root, data && JSON.parse(data.textContent));
}
