// Cross-entropy of LeNet-5 and its gradient, for one batch, in single precision.
//
// LANES samples stand side by side as the innermost axis: every multiply-add is a vector of samples times one weight.
// Convolution, bias, ReLU and max-pool are one pass, which keeps the arg-max for the backward pass. A layer visits only
// its nonzero weights, forward and backward, so a sparse model is cheaper. With a mask, gradients are computed only for
// the weights that it keeps; error feedback needs all of them. What is skipped would only add zeros, so the sums are
// the same, to the bit.
//
// Shapes come as macros: CHANNELS, SIZE (of a square image), C1, C2 (channels), H1, H2 (hidden units), CLASSES.

#include "tiles.hpp"

constexpr int P0 = SIZE + 4, S1 = SIZE / 2, S2 = S1 - 4, S3 = S2 / 2, FEATURES = C2 * S3 * S3;

constexpr int share(int n, int most, int step = 1) {  // how many of n to compute at once: a divisor of n
    int best = step;
    for (int d = step; d <= most; d += step) if (n % d == 0) best = d;
    return best;
}

// The gradient of two rows before the ReLU and the max-pool, from one row after them.
template <int N>
static void unpool(const V *grad, const V *pooled, const I *where, V *rows) {
    for (int x = 0; x < N; x++) {
        const V g = pooled[x] > 0 ? grad[x] : V{};
        EACH(k, 4) rows[k / 2 * 2 * N + 2 * x + k % 2] = where[x] == k ? g : V{};
    }
}

// A 5×5 convolution without padding, on W×W images.
template <int CIN, int COUT, int W>
struct Conv {
    static constexpr int K = CIN * 25, N = W - 4, X = share(N, 14, 2), B = share(COUT, BLOCK);
    Tap taps[COUT][K + GROUP], back[K][COUT];  // by output channel; by input channel, ky and kx
    int which[COUT][K + GROUP], count[COUT], backs[K];
    bool sparse;  // whether only the taps get a gradient
    V dw[COUT][K + 1], db[COUT];  // gradients, summed over the batch's tiles but not yet over the lanes

    void read(const float *w, const float *wanted) {
        int all = 0;
        std::memset(backs, 0, sizeof backs);
        for (int c = 0; c < COUT; c++) {
            int n = 0;
            for (int k = 0; k < K; k++) {
                const float value = w[c * K + k];
                taps[c][n] = {(k / 25 * W + k % 25 / 5) * W + k % 5, value};
                which[c][n] = k;
                n += value != 0 || (wanted && wanted[c * K + k] != 0);
            }
            for (int t = 0; t < n; t++) {
                const int k = which[c][t];
                back[k][backs[k]++] = {(c * N - k % 25 / 5) * N, taps[c][t].w};
            }
            all += count[c] = n;
            for (; n % GROUP; n++) taps[c][n] = {0, 0}, which[c][n] = K;  // a sum that nobody reads
        }
        sparse = wanted && all < COUT * K * 9 / 20;  // with more the dense way is faster
        std::memset(dw, 0, sizeof dw);
        std::memset(db, 0, sizeof db);
    }

    // pooled[c][y][x] = max over 2×2 of ReLU(b[c] + Σ w[c][i][ky][kx] · in[i][y+ky][x+kx]); where: the first largest, 0–3
    void forward(const V *in, const float *b, V *pooled, I *where) const {
        for (int y = 0; y < N; y += 2)
            for (int x = 0; x < N; x += X)
                for (int c = 0; c < COUT; c++) {
                    V z[2][X];
                    row(in + y * W + x, c, b[c], z[0]);
                    row(in + (y + 1) * W + x, c, b[c], z[1]);
                    const int to = ((c * N + y) * N / 2 + x) / 2;
                    #pragma GCC unroll 16
                    for (int j = 0; j < X; j += 2) {
                        const V rest[3] = {z[0][j + 1], z[1][j], z[1][j + 1]};
                        V best = z[0][j];
                        I at = {};
                        for (int k = 0; k < 3; k++) {
                            at = rest[k] > best ? I{} + k + 1 : at;
                            best = rest[k] > best ? rest[k] : best;
                        }
                        pooled[to + j / 2] = best < 0 ? V{} : best;  // in this form a NaN stays NaN
                        where[to + j / 2] = at;
                    }
                }
    }

    void row(const V *in, int c, float b, V *z) const {
        V sums[X];
        EACH(j, X) sums[j] = b - V{};
        for (int t = 0; t < count[c]; t++) {
            const V *from = in + taps[c][t].at;
            const V value = taps[c][t].w - V{};
            EACH(j, X) sums[j] += from[j] * value;
        }
        EACH(j, X) z[j] = sums[j];
    }

    // dw[c][i][ky][kx] += Σ dz[c][y][x] · in[i][y+ky][x+kx] over some rows y
    void gradient(const V *in, const V *dz, int channel, int rows) {
        if (sparse)
            for (int c = 0; c < COUT; c++) of_taps(in, dz + c * channel, c, rows);
        else
            for (int c = 0; c < COUT; c += B) of_all(in, dz + c * channel, channel, c, rows);
        for (int c = 0; c < COUT; c += GROUP) {
            V sums[GROUP];
            const V *from[GROUP];
            EACH(j, GROUP) sums[j] = db[last(c + j)], from[j] = dz + last(c + j) * channel;
            for (int x = 0; x < rows * N; x++) EACH(j, GROUP) sums[j] += from[j][x];
            EACH(j, GROUP) db[last(c + j)] = sums[j];
        }
    }

    static int last(int c) { return c < COUT ? c : COUT - 1; }  // what is computed twice is the same twice

    void of_all(const V *in, const V *dz, int channel, int first, int rows) {
        for (int i = 0; i < CIN; i++)
            for (int ky = 0; ky < 5; ky++) {
                V sums[B][5];
                EACH(c, B) EACH(k, 5) sums[c][k] = dw[first + c][i * 25 + ky * 5 + k];
                for (int y = 0; y < rows; y++) {
                    const V *row = in + (i * W + y + ky) * W;
                    for (int x = 0; x < N; x++)
                        EACH(c, B) {
                            const V d = dz[c * channel + y * N + x];
                            EACH(k, 5) sums[c][k] += d * row[x + k];
                        }
                }
                EACH(c, B) EACH(k, 5) dw[first + c][i * 25 + ky * 5 + k] = sums[c][k];
            }
    }

    void of_taps(const V *in, const V *dz, int c, int rows) {
        for (int t = 0; t < count[c]; t += GROUP) {
            V sums[GROUP];
            const V *from[GROUP];
            EACH(j, GROUP) sums[j] = dw[c][which[c][t + j]], from[j] = in + taps[c][t + j].at;
            for (int y = 0; y < rows; y++)
                for (int x = 0; x < N; x++) {
                    const V d = dz[y * N + x];
                    EACH(j, GROUP) sums[j] += d * from[j][y * W + x];
                }
            EACH(j, GROUP) dw[c][which[c][t + j]] = sums[j];
        }
    }

    // din[i][y+ky][x+kx] = Σ dz[c][y][x] · w[c][i][ky][kx]
    void input_gradient(const V *dz, V *din) const {
        for (int y = 0; y < W; y++)
            for (int i = 0; i < CIN; i++) {
                V sums[W] = {};
                for (int ky = y < N ? 0 : y - N + 1; ky < 5 && ky <= y; ky++)
                    #pragma GCC unroll 5
                    for (int kx = 0; kx < 5; kx++) {
                        const int k = i * 25 + ky * 5 + kx;
                        for (int t = 0; t < backs[k]; t++) {
                            const V *row = dz + back[k][t].at + y * N;
                            const V value = back[k][t].w - V{};
                            EACH(x, N) sums[x + kx] += row[x] * value;
                        }
                    }
                EACH(x, W) din[(i * W + y) * W + x] = sums[x];
            }
    }

    void write(float *to_dw, float *to_db) const {
        for (int c = 0; c < COUT; c++) {
            for (int k = 0; k < K; k++) to_dw[c * K + k] = sum(dw[c][k]);
            to_db[c] = sum(db[c]);
        }
    }
};

// A linear layer.
template <int O, int K>
struct Linear {
    static constexpr int MOST = O * K / 4;  // with more taps the dense way is faster
    Tap taps[MOST + 1];
    int pieces[O * (K / LANES) + 1];  // runs of LANES inputs that hold a tap
    int tap[O + 1], piece[O + 1];  // where those of each output begin
    bool sparse, sparse_gradient;

    void read(const float *w, const float *wanted) {
        const float *also = wanted ? wanted : w;
        int all = 0, n = 0, p = 0;
        for (int k = 0; k < O * K; k++) all += (w[k] != 0) | (also[k] != 0);
        sparse = all <= MOST, sparse_gradient = sparse && wanted;
        for (int o = 0; sparse && o < O; o++, w += K, also += K) {
            tap[o] = n, piece[o] = p;
            int from = 0;
            for (; from + LANES <= K; from += LANES) {
                uint32_t found = nonzeros(w + from) | nonzeros(also + from);
                pieces[p] = from;
                p += found != 0;
                for (; found; found &= found - 1) {
                    const int k = from + __builtin_ctz(found);
                    taps[n++] = {k, w[k]};
                }
            }
            for (; from < K; from++) {
                taps[n] = {from, w[from]};
                n += (w[from] != 0) | (also[from] != 0);
            }
            tap[o + 1] = n, piece[o + 1] = p;
        }
    }

    // out[o] = b[o] + Σ w[o][k] · in[k]
    void forward(const V *in, const float *w, const float *b, V *out) const {
        if (!sparse) return dense(in, w, b, out);
        for (int o = 0; o < O; o++) {
            V s = b[o] - V{};
            for (int t = tap[o]; t < tap[o + 1]; t++) s += in[taps[t].at] * taps[t].w;
            out[o] = s;
        }
    }

    static void dense(const V *in, const float *w, const float *b, V *out) {
        constexpr int B = share(O, GROUP);
        for (int o = 0; o < O; o += B) {
            V sums[B];
            EACH(j, B) sums[j] = b[o + j] - V{};
            for (int k = 0; k < K; k++) EACH(j, B) sums[j] += in[k] * w[(o + j) * K + k];
            EACH(j, B) out[o + j] = sums[j];
        }
    }

    // din[k] = Σ d[o] · w[o][k]
    void input_gradient(const V *d, const float *w, V *din) const {
        if (!sparse) return dense_input_gradient(d, w, din);
        std::memset(din, 0, K * sizeof(V));
        for (int o = 0; o < O; o++)
            for (int t = tap[o]; t < tap[o + 1]; t++) din[taps[t].at] += d[o] * taps[t].w;
    }

    static void dense_input_gradient(const V *d, const float *w, V *din) {
        constexpr int B = share(K, GROUP);
        for (int k = 0; k < K; k += B) {
            V sums[B] = {};
            for (int o = 0; o < O; o++) EACH(j, B) sums[j] += d[o] * w[o * K + k + j];
            EACH(j, B) din[k + j] = sums[j];
        }
    }

    // dw[o][k] += Σ over the samples of d[o] · in[k]: here k is innermost, so the inputs are transposed first
    void gradient(const V *in, const V *d, float *dw, float *db, float *x) const {
        constexpr int WHOLE = K / LANES * LANES;
        for (int k = 0; k < WHOLE; k += LANES) {
            V v[LANES];
            EACH(j, LANES) v[j] = in[k + j];
            transpose(v);
            EACH(l, LANES) *(Unaligned *)(x + l * K + k) = v[l];
        }
        for (int k = WHOLE; k < K; k++)
            for (int l = 0; l < LANES; l++) x[l * K + k] = in[k][l];
        for (int o = 0; o < O; o++) {
            db[o] += sum(d[o]);
            for (int k = WHOLE; k < K; k++)
                for (int l = 0; l < LANES; l++) dw[o * K + k] += x[l * K + k] * d[o][l];
        }
        constexpr int B = share(O, BLOCK);
        for (int o = 0; o < O; o++)
            if (sparse_gradient) {
                int p = piece[o];
                for (; p + 4 <= piece[o + 1]; p += 4)
                    add<1, 4>(x, d + o, dw + o * K, [&](int j) { return pieces[p + j]; });
                for (; p < piece[o + 1]; p++) add<1, 1>(x, d + o, dw + o * K, [&](int) { return pieces[p]; });
            } else if (o % B == 0) {
                int k = 0;
                for (; k + 4 * LANES <= K; k += 4 * LANES)
                    add<B, 4>(x, d + o, dw + o * K, [&](int j) { return k + j * LANES; });
                for (; k + LANES <= K; k += LANES) add<B, 1>(x, d + o, dw + o * K, [&](int) { return k; });
            }
    }

    // to P runs of LANES weights of B outputs
    template <int B, int P, class F>
    static INLINE inline void add(const float *x, const V *d, float *dw, F at) {
        V sums[B][P];
        EACH(o, B) EACH(p, P) sums[o][p] = *(const Unaligned *)(dw + o * K + at(p));
        EACH(l, LANES) EACH(p, P) {
            const V in = *(const Unaligned *)(x + l * K + at(p));
            EACH(o, B) sums[o][p] += in * d[o][l];
        }
        EACH(o, B) EACH(p, P) *(Unaligned *)(dw + o * K + at(p)) = sums[o][p];
    }
};

template <int N>
static void relu_gradient(V *d, const V *out) {
    for (int i = 0; i < N; i++) d[i] = out[i] > 0 ? d[i] : V{};
}

struct Sizes {
    static constexpr int w1 = 0, b1 = w1 + C1 * CHANNELS * 25, w2 = b1 + C1, b2 = w2 + C2 * C1 * 25, w3 = b2 + C2,
        b3 = w3 + H1 * FEATURES, w4 = b3 + H1, b4 = w4 + H2 * H1, w5 = b4 + H2, b5 = w5 + CLASSES * H2,
        all = b5 + CLASSES;
};

struct Layers {
    Conv<CHANNELS, C1, P0> conv1;
    Conv<C1, C2, S1> conv2;
    Linear<H1, FEATURES> fc1;
    Linear<H2, H1> fc2;
    Linear<CLASSES, H2> fc3;

    void read(const float *u, const float *mask) {
        const auto read = [&](auto &layer, int at) { layer.read(u + at, mask ? mask + at : nullptr); };
        read(conv1, Sizes::w1), read(conv2, Sizes::w2), read(fc1, Sizes::w3), read(fc2, Sizes::w4), read(fc3, Sizes::w5);
    }
};

struct Tile {
    V image[CHANNELS * P0 * P0], a1[C1 * S1 * S1], a2[FEATURES], a3[H1], a4[H2], logits[CLASSES];
    V d1[C1 * S1 * S1], z2[C2 * S2 * S2], d2[FEATURES], d3[H1], d4[H2], d5[CLASSES], z1[C1 * 2 * SIZE];
    I where1[C1 * S1 * S1], where2[FEATURES];
    float x[LANES * (FEATURES + H1 + H2)];  // room to transpose the inputs of any linear layer
};

struct Workspace { Tile tile; Layers layers; };

static void forward(Tile &tile, const Layers &layers, const float *u, const float *x, int samples) {
    for (int i = 0; i < CHANNELS; i++)
        for (int y = 0; y < SIZE; y++)
            for (int z = 0; z < SIZE; z++) {
                V &to = tile.image[(i * P0 + y + 2) * P0 + z + 2];
                for (int l = 0; l < LANES; l++) to[l] = l < samples ? x[((l * CHANNELS + i) * SIZE + y) * SIZE + z] : 0;
            }
    layers.conv1.forward(tile.image, u + Sizes::b1, tile.a1, tile.where1);
    layers.conv2.forward(tile.a1, u + Sizes::b2, tile.a2, tile.where2);
    layers.fc1.forward(tile.a2, u + Sizes::w3, u + Sizes::b3, tile.a3);
    relu<H1>(tile.a3);
    layers.fc2.forward(tile.a3, u + Sizes::w4, u + Sizes::b4, tile.a4);
    relu<H2>(tile.a4);
    layers.fc3.forward(tile.a4, u + Sizes::w5, u + Sizes::b5, tile.logits);
}

static void backward(Tile &tile, Layers &layers, const float *u, float *g) {
    layers.fc3.gradient(tile.a4, tile.d5, g + Sizes::w5, g + Sizes::b5, tile.x);
    layers.fc3.input_gradient(tile.d5, u + Sizes::w5, tile.d4);
    relu_gradient<H2>(tile.d4, tile.a4);
    layers.fc2.gradient(tile.a3, tile.d4, g + Sizes::w4, g + Sizes::b4, tile.x);
    layers.fc2.input_gradient(tile.d4, u + Sizes::w4, tile.d3);
    relu_gradient<H1>(tile.d3, tile.a3);
    layers.fc1.gradient(tile.a2, tile.d3, g + Sizes::w3, g + Sizes::b3, tile.x);
    layers.fc1.input_gradient(tile.d3, u + Sizes::w3, tile.d2);

    for (int c = 0; c < C2; c++)
        for (int y = 0, at = c * S3 * S3; y < S3; y++, at += S3)
            unpool<S3>(tile.d2 + at, tile.a2 + at, tile.where2 + at, tile.z2 + (c * S2 + 2 * y) * S2);
    layers.conv2.gradient(tile.a1, tile.z2, S2 * S2, S2);
    layers.conv2.input_gradient(tile.z2, tile.d1);
    for (int y = 0; y < S1; y++) {
        for (int c = 0, at = y * S1; c < C1; c++, at += S1 * S1)
            unpool<S1>(tile.d1 + at, tile.a1 + at, tile.where1 + at, tile.z1 + c * 2 * SIZE);
        layers.conv1.gradient(tile.image + 2 * y * P0, tile.z1, 2 * SIZE, 2);
    }
}

extern "C" {

int64_t workspace_bytes() { return sizeof(Workspace); }
int parameters() { return Sizes::all; }

// The mean cross-entropy; −1 if a label is no class. The mask says which weights get a gradient; no mask: all of them.
float gradient(Workspace *workspace, const float *u, const float *mask, const float *x, const int64_t *y, float *g,
               int samples) {
    auto &[tile, layers] = *workspace;
    double loss = 0;
    for (int s = 0; s < samples; s++) if (y[s] < 0 || y[s] >= CLASSES) return -1;
    std::memset(g, 0, sizeof(float) * Sizes::all);
    layers.read(u, mask);
    for (int s = 0; s < samples; s += LANES) {
        forward(tile, layers, u, x + s * CHANNELS * SIZE * SIZE, samples - s);
        loss += cross_entropy<CLASSES, 1>(tile.logits, tile.d5, y + s, samples - s, 1.0f / samples);
        backward(tile, layers, u, g);
    }
    layers.conv1.write(g + Sizes::w1, g + Sizes::b1);
    layers.conv2.write(g + Sizes::w2, g + Sizes::b2);
    return loss / samples;
}

void logits(Workspace *workspace, const float *u, const float *x, float *out, int samples) {
    auto &[tile, layers] = *workspace;
    layers.read(u, nullptr);
    for (int s = 0; s < samples; s += LANES) {
        forward(tile, layers, u, x + s * CHANNELS * SIZE * SIZE, samples - s);
        for (int l = 0; l < LANES && s + l < samples; l++)
            for (int k = 0; k < CLASSES; k++) out[(s + l) * CLASSES + k] = tile.logits[k][l];
    }
}
}
