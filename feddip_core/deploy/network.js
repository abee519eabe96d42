// Runs sparse networks: products of kept weights alone. No dependencies; in pages and in Node.
const feddip = (() => {
  "use strict";

  function bytes(base64) {
    const text = atob(base64);
    const array = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
    return array;
  }

  // Sixteen bits as a number: sign, five bits of exponent, ten of fraction.
  function half(h) {
    const sign = h & 0x8000 ? -1 : 1, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  function floats(array, bits) {
    const view = new DataView(array.buffer), count = array.length / (bits / 8);
    return Float32Array.from({ length: count }, (_, i) =>
      bits === 16 ? half(view.getUint16(2 * i, true)) : view.getFloat32(4 * i, true));
  }

  // Gaps of `width` bits each; all bits set is a step to no kept weight. The last position is beyond the last weight.
  function positions(code, width, kept, count) {
    const at = new Int32Array(kept), longest = 2 ** width - 1;
    for (let bit = 0, n = 0, next = 0; n <= kept; ) {
      let gap = 0;
      for (let i = 0; i < width; i++, bit++) gap = 2 * gap + ((code[bit >> 3] >> (7 - (bit & 7))) & 1);
      next += gap;
      if (gap === longest) continue;
      if (n === kept ? next !== count : next >= count) throw new Error("positions and values do not match");
      if (n < kept) at[n] = next;
      n++;
      next++;
    }
    return at;
  }

  // Every parameter with its values; of a weight, those that are kept, and where.
  function tensorsOf(model) {
    const parts = { values: floats(bytes(model.parts.values), model.bits), rest: floats(bytes(model.parts.rest), 32) };
    const codes = bytes(model.parts.positions), start = { values: 0, rest: 0 }, tensors = {};
    let code = 0;
    for (const [name, [part, shape, kept, width, size]] of Object.entries(model.tensors)) {
      const count = shape.reduce((a, b) => a * b, 1);
      if (!width && kept !== count) throw new Error(`${name}: ${kept} values do not fill its shape`);
      const values = parts[part].subarray(start[part], start[part] + kept);
      const at = width ? positions(codes.subarray(code, code + size), width, kept, count)
        : Int32Array.from({ length: kept }, (_, i) => i);
      tensors[name] = { name, shape, count, kept, values, positions: at };
      start[part] += kept;
      code += size;
    }
    return tensors;
  }

  // The first and the last output, exclusive, that reads inside `size` when it looks `shift` away.
  function range(shift, stride, size, outputs) {
    return [Math.max(0, Math.ceil(-shift / stride)), Math.min(outputs, Math.floor((size - 1 - shift) / stride) + 1)];
  }

  const operations = {
    conv2d([x], [weight, bias], [O, Y, X], o, [[, H, W]]) {
      const out = new Float64Array(O * Y * X), [, I, KH, KW] = weight.shape;
      if (bias) for (let c = 0; c < O; c++) out.fill(bias.values[c], c * Y * X, (c + 1) * Y * X);
      for (let n = 0; n < weight.kept; n++) {
        const p = weight.positions[n], v = weight.values[n], c = Math.floor(p / (KW * KH * I));
        const input = Math.floor(c / (O / o.groups)) * I + (Math.floor(p / (KW * KH)) % I);
        const dy = (Math.floor(p / KW) % KH) * o.dilation[0] - o.padding[0], dx = (p % KW) * o.dilation[1] - o.padding[1];
        const [y0, y1] = range(dy, o.stride[0], H, Y), [x0, x1] = range(dx, o.stride[1], W, X);
        for (let y = y0; y < y1; y++) {
          const from = (input * H + y * o.stride[0] + dy) * W + dx, to = (c * Y + y) * X;
          for (let i = x0; i < x1; i++) out[to + i] += v * x[from + i * o.stride[1]];
        }
      }
      return out;
    },
    linear([x], [weight, bias], [O]) {
      const out = new Float64Array(O), I = weight.shape[1];
      if (bias) out.set(bias.values);
      for (let n = 0; n < weight.kept; n++) {
        const p = weight.positions[n];
        out[Math.floor(p / I)] += weight.values[n] * x[p % I];
      }
      return out;
    },
    batch_norm([x], [mean, variance, weight, bias], shape, o) {
      const each = x.length / shape[0];
      return x.map((v, i) => {
        const c = Math.floor(i / each), w = weight ? weight.values[c] : 1, b = bias ? bias.values[c] : 0;
        return ((v - mean.values[c]) / Math.sqrt(variance.values[c] + o.eps)) * w + b;
      });
    },
    relu: ([x]) => x.map((v) => (v > 0 ? v : 0)),
    flatten: ([x]) => x,
    add: ([a, b]) => a.map((v, i) => v + b[i]),
    max_pool2d: (values, _, shape, o, shapes) => pool(values[0], shape, o, shapes[0], -Infinity, Math.max, () => 1),
    avg_pool2d: (values, _, shape, o, shapes) =>
      pool(values[0], shape, o, shapes[0], 0, (a, b) => a + b, () => o.kernel_size[0] * o.kernel_size[1]),
    adaptive_avg_pool2d([x], _, [C, Y, X], o, [[, H, W]]) {
      const out = new Float64Array(C * Y * X);
      for (let c = 0, n = 0; c < C; c++)
        for (let y = 0; y < Y; y++)
          for (let i = 0; i < X; i++, n++) {
            const y0 = Math.floor((y * H) / Y), y1 = Math.ceil(((y + 1) * H) / Y);
            const x0 = Math.floor((i * W) / X), x1 = Math.ceil(((i + 1) * W) / X);
            for (let r = y0; r < y1; r++) for (let k = x0; k < x1; k++) out[n] += x[(c * H + r) * W + k];
            out[n] /= (y1 - y0) * (x1 - x0);
          }
      return out;
    },
  };

  function pool(x, [C, Y, X], o, [, H, W], first, join, divisor) {
    const out = new Float64Array(C * Y * X).fill(first), [sy, sx] = o.stride, [py, px] = o.padding;
    for (let c = 0, n = 0; c < C; c++)
      for (let y = 0; y < Y; y++)
        for (let i = 0; i < X; i++, n++) {
          for (let r = Math.max(0, y * sy - py); r < Math.min(H, y * sy - py + o.kernel_size[0]); r++)
            for (let k = Math.max(0, i * sx - px); k < Math.min(W, i * sx - px + o.kernel_size[1]); k++)
              out[n] = join(out[n], x[(c * H + r) * W + k]);
          out[n] /= divisor();
        }
    return out;
  }

  // A model that can classify. `model` is what its file says and holds, with arrays in base64.
  function network(model) {
    const tensors = tensorsOf(model), { shape, scale } = model.samples;
    const size = shape.reduce((a, b) => a * b, 1), each = size / shape[0];
    const of = (statistic, c) => (Array.isArray(statistic) ? statistic[c][0][0] : statistic);
    const shapes = [shape, ...model.shapes];

    // The output of every step for one raw sample; the first is the sample, normalised.
    function values(sample) {
      if (sample.length !== size) throw new Error(`a sample has ${size} numbers, not ${sample.length}`);
      const { mean, std } = model.samples;
      const all = [Float32Array.from(sample, (v, i) => {
        const c = Math.floor(i / each);
        return (Math.fround(v / scale) - of(mean, c)) / of(std, c);
      })];
      model.steps.forEach(([name, from, names, options], i) => {
        const result = operations[name](from.map((k) => all[k]), names.map((k) => tensors[k]), shapes[i + 1], options,
          from.map((k) => shapes[k]));
        all.push(new Float32Array(result));
      });
      return all;
    }

    // Of each layer its name, shape, kept weights and their positions, its step, and the products of one sample.
    const layers = model.steps.flatMap(([name, , names], i) => {
      if (name !== "conv2d" && name !== "linear") return [];
      const weight = tensors[names[0]], uses = shapes[i + 1].slice(1).reduce((a, b) => a * b, 1);
      return [{ ...weight, name: names[0].replace(/\.weight$/, ""), step: i + 1, multiplications: weight.kept * uses }];
    });

    return {
      about: model,
      layers,
      size,
      kept: layers.reduce((sum, layer) => sum + layer.kept, 0),
      multiplications: layers.reduce((sum, layer) => sum + layer.multiplications, 0),
      run(sample) {
        const all = values(sample);
        return { logits: all[all.length - 1], values: all, shapes };
      },
      classify: (sample) => values(sample).pop(),
    };
  }

  return { network };
})();
