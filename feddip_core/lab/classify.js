// The page that classifies: pictures, a slider of models, bars, and the weights that light up.
(() => {
  "use strict";

  const SIDE = 28, PIXELS = SIDE * SIDE;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const at = (id) => document.getElementById(id);
  const { pixels, labels } = read("pictures");
  const bytes = Uint8Array.from(atob(pixels), (letter) => letter.charCodeAt(0));
  const images = labels.map((_, i) => bytes.subarray(i * PIXELS, (i + 1) * PIXELS));
  const networks = read("models").map(feddip.network);
  const classes = networks.length ? networks[0].about.classes : [];

  const state = { model: 0, garment: 0, picture: Uint8Array.from(images[0]), pen: true, cursor: [14, 14], keys: false };
  const answers = networks.map(() => null); // of each model, its classes of the hundred garments

  const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 0 : 1)} %`.replace(".0 %", " %");
  const number = (n) => Math.round(n).toLocaleString("en-US");
  const stopName = (network) => (network.about.stop ? `${(100 * network.about.stop).toFixed(0)} %` : "none");
  const argmax = (values) => values.reduce((best, v, i) => (v > values[best] ? i : best), 0);

  function softmax(logits) {
    const top = Math.max(...logits), e = Array.from(logits, (v) => Math.exp(v - top));
    const sum = e.reduce((a, b) => a + b, 0);
    return e.map((v) => v / sum);
  }

  function element(kind, properties = {}, ...children) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }

  // ---- the picture ----

  const canvas = at("drawing"), ink = canvas.getContext("2d");

  function paint(context, picture, x = 0, y = 0) {
    const image = context.createImageData(SIDE, SIDE);
    picture.forEach((v, i) => image.data.set([255 - v * 0.886, 255 - v * 0.863, 255 - v * 0.831, 255], 4 * i)); // ink on paper
    context.putImageData(image, x, y);
  }

  function showPicture() {
    paint(ink, state.picture);
    if (state.keys && document.activeElement === canvas) {
      ink.fillStyle = "rgba(0, 114, 178, .75)";
      ink.fillRect(state.cursor[0], state.cursor[1], 1, 1);
    }
  }

  // A soft round brush, three pixels wide or so.
  function dab(x, y) {
    for (let row = 0; row < SIDE; row++)
      for (let column = 0; column < SIDE; column++) {
        const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y), i = row * SIDE + column;
        const ink = Math.round(215 * Math.min(1, Math.max(0, 2.3 - distance)));
        state.picture[i] = state.pen ? Math.max(state.picture[i], ink) : Math.min(state.picture[i], 255 - ink * 1.2);
      }
  }

  function stroke(from, to) {
    const steps = Math.max(1, Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1]) * 2));
    for (let i = 1; i <= steps; i++) dab(from[0] + ((to[0] - from[0]) * i) / steps, from[1] + ((to[1] - from[1]) * i) / steps);
    drawn();
  }

  function drawn() {
    select(null);
    showPicture();
    classify(false);
  }

  function clear() {
    state.picture.fill(0);
    drawn();
  }

  let last = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    state.keys = false;
    last = place(event);
    stroke(last, last);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    const here = place(event);
    stroke(last, here);
    last = here;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  let inking = false;
  canvas.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move && ![" ", "Delete", "Backspace"].includes(event.key)) return;
    event.preventDefault();
    state.keys = true;
    if (move) state.cursor = state.cursor.map((v, i) => Math.min(SIDE - 1, Math.max(0, v + move[i])));
    if (event.key === " ") inking = true;
    if (event.key === "Delete" || event.key === "Backspace") clear();
    if (inking) {
      dab(state.cursor[0] + 0.5, state.cursor[1] + 0.5);
      drawn();
    } else showPicture();
  });
  canvas.addEventListener("keyup", (event) => { inking = inking && event.key !== " "; });
  canvas.addEventListener("blur", () => { inking = false; showPicture(); });
  canvas.addEventListener("focus", showPicture);

  function tool(pen) {
    state.pen = pen;
    at("pen").setAttribute("aria-pressed", pen);
    at("eraser").setAttribute("aria-pressed", !pen);
  }
  at("pen").addEventListener("click", () => tool(true));
  at("eraser").addEventListener("click", () => tool(false));
  at("clear").addEventListener("click", () => { tool(true); clear(); });
  at("another").addEventListener("click", () => choose(((state.garment ?? 0) + 37) % images.length));

  // ---- the hundred garments ----

  const garments = at("garments"), EACH = 10;

  function makeGarments() {
    const sheet = element("canvas", { width: EACH * SIDE, height: Math.ceil(images.length / EACH) * SIDE });
    const context = sheet.getContext("2d");
    images.forEach((image, i) => paint(context, image, (i % EACH) * SIDE, Math.floor(i / EACH) * SIDE));
    const picture = `url(${sheet.toDataURL()})`, rows = sheet.height / SIDE;
    images.forEach((_, i) => {
      const button = element("button", { type: "button", title: classes[labels[i]] ?? "" });
      button.setAttribute("role", "radio");
      button.style.backgroundImage = picture;
      button.style.backgroundSize = `${EACH * 100}% ${rows * 100}%`;
      button.style.backgroundPosition = `${((i % EACH) / (EACH - 1)) * 100}% ${(Math.floor(i / EACH) / (rows - 1)) * 100}%`;
      button.addEventListener("click", () => choose(i));
      garments.append(button);
    });
    garments.addEventListener("keydown", (event) => {
      const columns = getComputedStyle(garments).gridTemplateColumns.split(" ").length;
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
      const here = [...garments.children].indexOf(document.activeElement);
      const to = event.key === "Home" ? 0 : event.key === "End" ? images.length - 1 : here + step;
      if (!(to >= 0 && to < images.length)) return;
      event.preventDefault();
      choose(to);
      garments.children[to].focus();
    });
  }

  function select(i) {
    state.garment = i;
    [...garments.children].forEach((button, k) => {
      button.setAttribute("aria-checked", k === i);
      button.tabIndex = k === (i ?? 0) ? 0 : -1;
    });
  }

  function choose(i) {
    select(i);
    state.picture.set(images[i]);
    showPicture();
    classify(true);
  }

  // Which of them a model gets wrong; once for each model, while the browser has nothing else to do.
  function score() {
    const m = state.model;
    if (!answers[m]) answers[m] = images.map((image) => argmax(networks[m].classify(image)));
    const wrong = answers[m].map((answer, i) => answer !== labels[i]);
    [...garments.children].forEach((button, i) => {
      const told = wrong[i] ? `, taken for ${classes[answers[m][i]]}` : "";
      button.setAttribute("aria-label", `${classes[labels[i]]} ${(i % EACH) + 1}${told}`);
      button.classList.toggle("wrong", wrong[i]);
    });
    const right = wrong.filter((is) => !is).length;
    at("score").textContent = `This model gets ${right} of ${images.length} right. A mark shows those it gets wrong.`;
  }

  // ---- the models ----

  const slider = at("sparsity");

  function makeSlider() {
    slider.max = networks.length - 1;
    slider.disabled = networks.length < 2;
    networks.forEach((network, m) => {
      const tick = element("span", { textContent: stopName(network) });
      tick.style.left = networks.length > 1 ? `${(m / (networks.length - 1)) * 100}%` : "0";
      at("ticks").append(tick);
    });
    slider.addEventListener("input", () => { state.model = Number(slider.value); showModel(); classify(true); });
    at("runs").textContent = `Runs: ${networks.map(({ about }) => `${about.method} ${about.run_id}`).join(", ")}.`;
  }

  function showModel() {
    const network = networks[state.model], { about } = network;
    const all = network.layers.reduce((sum, layer) => sum + layer.count, 0), zeros = 1 - network.kept / all;
    at("stop").textContent = about.stop ? `${percent(zeros)}, ${number(network.kept)} of ${number(all)} are left`
      : `none of ${number(all)}`;
    slider.setAttribute("aria-valuetext", about.stop ? `${percent(zeros)} are zero` : "none is zero");
    at("accuracy").textContent = `${(100 * about.test_accuracy).toFixed(1)} %`;
    at("size").textContent = `${(about.bytes / 1000).toFixed(about.bytes < 1e5 ? 1 : 0)} kB`;
    at("multiplications").textContent = number(network.multiplications);
    makeLayers(network);
    setTimeout(score);
  }

  // ---- the answer ----

  function makeBars() {
    for (const name of classes)
      at("bars").append(element("li", {}, element("span", { className: "name", textContent: name }),
        element("span", { className: "bar" }, element("i")), element("span", { className: "share" })));
  }

  function classify(flash) {
    const network = networks[state.model], result = network.run(state.picture), shares = softmax(result.logits);
    const best = argmax(shares), truth = state.garment === null ? null : labels[state.garment];
    [...at("bars").children].forEach((row, c) => {
      row.className = `${c === best ? "best" : ""} ${c === truth ? "truth" : ""}`;
      row.querySelector("i").style.width = `${100 * shares[c]}%`;
      row.querySelector(".share").textContent = percent(shares[c]);
    });
    const empty = state.picture.every((v) => !v);
    const told = truth === null ? "" : best === truth ? " Right." : ` Wrong: it is “${classes[truth]}”.`;
    at("said").textContent = empty ? "Nothing is drawn yet." : `“${classes[best]}”, ${percent(shares[best])} sure.${told}`;
    light(network, result, flash);
    setTimeout(() => clock(network));
  }

  function clock(network) {
    const began = performance.now();
    let runs = 0, took = 0;
    for (; runs < 50 && took < 12; runs++, took = performance.now() - began) network.classify(state.picture);
    const each = took / runs;
    at("time").textContent = each > 0 ? `${each.toFixed(each < 1 ? 2 : 1)} ms` : "under 0.1 ms";
  }

  // ---- the weights ----

  const GAP = 1, dark = [20, 26, 33];
  const RAMP = [[0, [62, 73, 87]], [0.12, [96, 62, 38]], [0.45, [213, 94, 0]], [0.8, [242, 163, 107]], [1, [255, 244, 230]]];
  const colours = Array.from({ length: 256 }, (_, i) => {
    const level = i / 255, k = Math.max(1, RAMP.findIndex(([stop]) => stop >= level));
    const [[a, from], [b, to]] = [RAMP[k - 1], RAMP[k]];
    return from.map((v, c) => v + ((to[c] - v) * (level - a)) / (b - a));
  });

  // A linear layer has a row for each output; the last one has a column, so that its inputs are the rows before it.
  // A convolution has its kernels, a column for each output; those of one input stand in a block.
  function places({ shape, positions }, isLast) {
    const [O, I, H, W] = shape;
    if (shape.length === 2 && isLast) return { width: O, height: I, of: positions.map((p) => (p % I) * O + Math.floor(p / I)) };
    if (shape.length === 2) return { width: I, height: O, of: positions };
    const across = I === 1 ? Math.ceil(Math.sqrt(O)) : O;
    const width = across * (W + GAP) - GAP, height = Math.ceil((O * I) / across) * (H + GAP) - GAP;
    const of = positions.map((p) => {
      const x = p % W, y = Math.floor(p / W) % H, i = Math.floor(p / (W * H)) % I, o = Math.floor(p / (W * H * I));
      return ((i + Math.floor(o / across)) * (H + GAP) + y) * width + (o % across) * (W + GAP) + x;
    });
    return { width, height, of };
  }

  let drawnLayers = [];

  function makeLayers(network) {
    if (!at("layers").children.length)
      network.layers.forEach((layer, i) => {
        const figure = element("figure", { className: layer.name }, element("canvas"), element("figcaption"));
        figure.style.setProperty("--turn", i);
        at("layers").append(figure);
      });
    drawnLayers = network.layers.map((layer, i) => {
      const figure = at("layers").children[i], [board, caption] = figure.children;
      const where = places(layer, i === network.layers.length - 1);
      board.width = where.width;
      board.height = where.height;
      board.setAttribute("role", "img");
      const words = `${layer.name}: ${number(layer.kept)} of ${number(layer.count)} weights`;
      board.setAttribute("aria-label", `${words}, as dots where they are`);
      caption.replaceChildren(element("b", { textContent: layer.name }), words.slice(layer.name.length + 1));
      return { layer, board, figure, where };
    });
  }

  // How much each kept weight adds to its output: |w| times the mean of what it reads.
  function contributions(network, { layer }, values, shapes) {
    const from = network.about.steps[layer.step - 1][1][0], x = values[from], [O, I] = layer.shape;
    const each = x.length / (layer.shape.length === 2 ? I : shapes[from][0]), inputs = new Float32Array(x.length / each);
    x.forEach((v, i) => { inputs[Math.floor(i / each)] += Math.abs(v) / each; });
    const block = layer.count / O / I;
    return layer.positions.length === 0 ? [] : Float32Array.from(layer.positions, (p, n) =>
      Math.abs(layer.values[n]) * inputs[Math.floor(p / block) % I]);
  }

  function light(network, { values, shapes }, flash) {
    for (const drawn of drawnLayers) {
      const added = contributions(network, drawn, values, shapes), sorted = Float32Array.from(added).sort();
      const top = sorted[Math.floor(0.995 * (sorted.length - 1))] || 1, context = drawn.board.getContext("2d");
      const image = context.createImageData(drawn.where.width, drawn.where.height);
      for (let i = 0; i < image.data.length; i += 4) image.data.set([...dark, 255], i);
      drawn.where.of.forEach((p, n) => {
        const colour = colours[Math.round(255 * Math.sqrt(Math.min(1, added[n] / top)))];
        image.data.set(colour, 4 * p);
      });
      context.putImageData(image, 0, 0);
      if (flash && drawn.board.animate && !matchMedia("(prefers-reduced-motion: reduce)").matches)
        drawn.board.animate([{ filter: "brightness(.3)" }, { filter: "brightness(1.5)", offset: 0.5 }, { filter: "none" }],
          { duration: 420, delay: 90 * drawnLayers.indexOf(drawn), fill: "backwards" });
    }
  }

  if (!networks.length) {
    at("said").textContent = "No model is here.";
    return;
  }
  makeGarments();
  makeSlider();
  makeBars();
  state.model = networks.length - 1;
  slider.value = state.model;
  showModel();
  choose(9 * EACH);
  window.classifier = { networks, images, labels };
})();
