// Cross-entropy of LeNet-5 and its gradient, for one batch, in single precision.
//
// LANES samples stand side by side as the innermost axis, so that every multiply-add is a vector of samples times one
// weight. Convolution, bias, ReLU and max-pool are one pass, with the arg-max kept for the way back. A convolution runs
// over its weights that are not zero: a sparse model is cheaper on the way forward, and from layer to layer on the way
// back. The gradient of the weights is dense, since error feedback needs that of a pruned weight too.
//
// Shapes come as macros: CHANNELS, SIZE (of a square image), C1, C2 (channels), H1, H2 (hidden units), CLASSES.

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16, BLOCK = 4;
#else
constexpr int LANES = 8, BLOCK = 2;
#endif

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

constexpr int P0 = SIZE + 4, S1 = SIZE / 2, S2 = S1 - 4, S3 = S2 / 2, FEATURES = C2 * S3 * S3;

struct Tap { int at; float w; };

static float sum(V v) {
    float s = 0;
    for (int l = 0; l < LANES; l++) s += v[l];
    return s;
}

constexpr int stretch(int n) {  // how much of a row is computed at once: its largest divisor with registers for it
    int best = 1;
    for (int d = 1; d <= 14; d++) if (n % d == 0 && d % 2 == 0) best = d;
    return best;
}

// pooled[c][y][x] = max over 2×2 of ReLU(b[c] + Σ w[c][i][ky][kx] · in[i][y+ky][x+kx]); where: 0 to 3, the first largest
template <int CIN, int COUT, int W>
static void conv_pool(const V *in, const float *w, const float *b, V *pooled, I *where) {
    constexpr int N = W - 4, X = stretch(N);
    Tap taps[COUT][CIN * 25];
    int count[COUT] = {};
    for (int c = 0; c < COUT; c++)
        for (int k = 0; k < CIN * 25; k++) {
            const float value = w[c * CIN * 25 + k];
            taps[c][count[c]] = {(k / 25 * W + k % 25 / 5) * W + k % 5, value};
            count[c] += value != 0;
        }
    for (int y = 0; y < N; y += 2)
        for (int x = 0; x < N; x += X)
            for (int c = 0; c < COUT; c++) {
                V z[2][X];
                #pragma GCC unroll 16
                for (int j = 0; j < X; j++) z[0][j] = z[1][j] = b[c] - V{};
                for (int t = 0; t < count[c]; t++) {
                    const V *row = in + y * W + x + taps[c][t].at;
                    const V value = taps[c][t].w - V{};
                    #pragma GCC unroll 16
                    for (int j = 0; j < X; j++) z[0][j] += row[j] * value, z[1][j] += row[W + j] * value;
                }
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
                    pooled[to + j / 2] = best < 0 ? V{} : best;  // so written, a NaN stays one
                    where[to + j / 2] = at;
                }
            }
}

// What reaches the two rows before the ReLU and the max-pool, from one row behind them.
template <int N>
static void unpool(const V *grad, const V *pooled, const I *where, V *rows) {
    for (int x = 0; x < N; x++) {
        const V g = pooled[x] > 0 ? grad[x] : V{};
        for (int k = 0; k < 4; k++) rows[k / 2 * 2 * N + 2 * x + k % 2] = where[x] == k ? g : V{};
    }
}

// dw[c][i][ky][kx] += Σ dz[c][y][x] · in[i][y+ky][x+kx] over two rows y, for B channels c
template <int CIN, int W, int B>
static void weights_gradient(const V *in, const V *dz, int channel, V *dw) {
    constexpr int N = W - 4;
    for (int i = 0; i < CIN; i++)
        for (int ky = 0; ky < 5; ky++) {
            V sums[B][5];
            #pragma GCC unroll 8
            for (int c = 0; c < B; c++)
                #pragma GCC unroll 5
                for (int k = 0; k < 5; k++) sums[c][k] = dw[(c * CIN + i) * 25 + ky * 5 + k];
            for (int y = 0; y < 2; y++) {
                const V *row = in + (i * W + y + ky) * W;
                for (int x = 0; x < N; x++)
                    #pragma GCC unroll 8
                    for (int c = 0; c < B; c++) {
                        const V d = dz[c * channel + y * N + x];
                        #pragma GCC unroll 5
                        for (int k = 0; k < 5; k++) sums[c][k] += d * row[x + k];
                    }
            }
            #pragma GCC unroll 8
            for (int c = 0; c < B; c++)
                #pragma GCC unroll 5
                for (int k = 0; k < 5; k++) dw[(c * CIN + i) * 25 + ky * 5 + k] = sums[c][k];
        }
}

template <int CIN, int COUT, int W>
static void conv_gradient(const V *in, const V *dz, int channel, V *dw, V *db) {
    constexpr int blocks = COUT / BLOCK * BLOCK;
    for (int c = 0; c < blocks; c += BLOCK)
        weights_gradient<CIN, W, BLOCK>(in, dz + c * channel, channel, dw + c * CIN * 25);
    for (int c = blocks; c < COUT; c++) weights_gradient<CIN, W, 1>(in, dz + c * channel, channel, dw + c * CIN * 25);
    for (int c = 0; c < COUT; c++)
        for (int x = 0; x < 2 * (W - 4); x++) db[c] += dz[c * channel + x];
}

// din[i][y+ky][x+kx] = Σ dz[c][y][x] · w[c][i][ky][kx]
template <int CIN, int COUT, int W>
static void conv_input_gradient(const V *dz, const float *w, V *din) {
    constexpr int N = W - 4;
    Tap taps[CIN][5][5][COUT];  // by input channel, ky and kx
    int count[CIN][5][5] = {};
    for (int k = 0; k < COUT * CIN * 25; k++) {
        const int c = k / (CIN * 25), i = k / 25 % CIN, ky = k % 25 / 5, kx = k % 5;
        int &n = count[i][ky][kx];
        taps[i][ky][kx][n] = {(c * N - ky) * N, w[k]};
        n += w[k] != 0;
    }
    for (int y = 0; y < W; y++)
        for (int i = 0; i < CIN; i++) {
            V sums[W] = {};
            for (int ky = y < N ? 0 : y - N + 1; ky < 5 && ky <= y; ky++)
                #pragma GCC unroll 5
                for (int kx = 0; kx < 5; kx++)
                    for (int t = 0; t < count[i][ky][kx]; t++) {
                        const V *row = dz + taps[i][ky][kx][t].at + y * N;
                        const V value = taps[i][ky][kx][t].w - V{};
                        #pragma GCC unroll 32
                        for (int x = 0; x < N; x++) sums[x + kx] += row[x] * value;
                    }
            #pragma GCC unroll 32
            for (int x = 0; x < W; x++) din[(i * W + y) * W + x] = sums[x];
        }
}

// out[o] = b[o] + Σ w[o][k] · in[k], with ReLU or without, B outputs at a time
template <int O, int K, int B = 8, int FROM = 0>
static void linear(const V *in, const float *w, const float *b, V *out, bool relu) {
    constexpr int TO = FROM + (O - FROM) / B * B;
    for (int o = FROM; o < TO; o += B) {
        V sums[B];
        #pragma GCC unroll 8
        for (int j = 0; j < B; j++) sums[j] = b[o + j] - V{};
        for (int k = 0; k < K; k++)
            #pragma GCC unroll 8
            for (int j = 0; j < B; j++) sums[j] += in[k] * w[(o + j) * K + k];
        for (int j = 0; j < B; j++) out[o + j] = relu ? (sums[j] < 0 ? V{} : sums[j]) : sums[j];
    }
    if constexpr (TO < O) linear<O, K, 1, TO>(in, w, b, out, relu);
}

// din[k] = Σ d[o] · w[o][k], B inputs at a time
template <int O, int K, int B = 8, int FROM = 0>
static void linear_input_gradient(const V *d, const float *w, V *din) {
    constexpr int TO = FROM + (K - FROM) / B * B;
    for (int k = FROM; k < TO; k += B) {
        V sums[B] = {};
        for (int o = 0; o < O; o++)
            #pragma GCC unroll 8
            for (int j = 0; j < B; j++) sums[j] += d[o] * w[o * K + k + j];
        for (int j = 0; j < B; j++) din[k + j] = sums[j];
    }
    if constexpr (TO < K) linear_input_gradient<O, K, 1, TO>(d, w, din);
}

// dw[o][k] += Σ over the samples of d[o] · in[k]: here k is innermost, so the inputs are transposed first
template <int O, int K>
static void linear_gradient(const V *in, const V *d, float *dw, float *db, float *x) {
    for (int k = 0; k < K; k++)
        for (int l = 0; l < LANES; l++) x[l * K + k] = in[k][l];
    for (int o = 0; o < O; o++) {
        db[o] += sum(d[o]);
        float *row = dw + o * K;
        int k = 0;
        for (; k + 4 * LANES <= K; k += 4 * LANES) {
            Unaligned *at = (Unaligned *)(row + k);
            V a = at[0], b = at[1], c = at[2], e = at[3];
            #pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) {
                const Unaligned *from = (const Unaligned *)(x + l * K + k);
                const V v = d[o][l] - V{};
                a += from[0] * v; b += from[1] * v; c += from[2] * v; e += from[3] * v;
            }
            at[0] = a; at[1] = b; at[2] = c; at[3] = e;
        }
        for (; k < K; k++)
            for (int l = 0; l < LANES; l++) row[k] += x[l * K + k] * d[o][l];
    }
}

template <int N>
static void relu_gradient(V *d, const V *out) {
    for (int i = 0; i < N; i++) d[i] = out[i] > 0 ? d[i] : V{};
}

struct Sizes {
    static constexpr int w1 = 0, b1 = w1 + C1 * CHANNELS * 25, w2 = b1 + C1, b2 = w2 + C2 * C1 * 25, w3 = b2 + C2,
        b3 = w3 + H1 * FEATURES, w4 = b3 + H1, b4 = w4 + H2 * H1, w5 = b4 + H2, b5 = w5 + CLASSES * H2,
        all = b5 + CLASSES;
};

struct Tile {
    V image[CHANNELS * P0 * P0], a1[C1 * S1 * S1], a2[FEATURES], a3[H1], a4[H2], logits[CLASSES];
    V d1[C1 * S1 * S1], z2[C2 * S2 * S2], d2[FEATURES], d3[H1], d4[H2], d5[CLASSES], z1[C1 * 2 * SIZE];
    I where1[C1 * S1 * S1], where2[FEATURES];
    float x[LANES * (FEATURES + H1 + H2)];  // room to transpose the inputs of any of the linear layers
};

struct Sums {  // gradients of the convolutions, over the batch's tiles but not yet over the lanes
    V dw1[C1 * CHANNELS * 25], db1[C1], dw2[C2 * C1 * 25], db2[C2];
};

struct Workspace { Tile tile; Sums sums; };

static void forward(Tile &tile, const float *u, const float *x, int samples) {
    for (int i = 0; i < CHANNELS; i++)
        for (int y = 0; y < SIZE; y++)
            for (int z = 0; z < SIZE; z++) {
                V &to = tile.image[(i * P0 + y + 2) * P0 + z + 2];
                for (int l = 0; l < LANES; l++) to[l] = l < samples ? x[((l * CHANNELS + i) * SIZE + y) * SIZE + z] : 0;
            }
    conv_pool<CHANNELS, C1, P0>(tile.image, u + Sizes::w1, u + Sizes::b1, tile.a1, tile.where1);
    conv_pool<C1, C2, S1>(tile.a1, u + Sizes::w2, u + Sizes::b2, tile.a2, tile.where2);
    linear<H1, FEATURES>(tile.a2, u + Sizes::w3, u + Sizes::b3, tile.a3, true);
    linear<H2, H1>(tile.a3, u + Sizes::w4, u + Sizes::b4, tile.a4, true);
    linear<CLASSES, H2>(tile.a4, u + Sizes::w5, u + Sizes::b5, tile.logits, false);
}

// The summed cross-entropy of the tile; d5 = (softmax − one-hot) · scale, and 0 for lanes without a sample.
static double loss_and_gradient(Tile &tile, const int64_t *y, int samples, float scale) {
    double loss = 0;
    for (int l = 0; l < LANES; l++) {
        float top = tile.logits[0][l], total = 0, p[CLASSES];
        for (int k = 1; k < CLASSES; k++) top = std::fmax(top, tile.logits[k][l]);
        for (int k = 0; k < CLASSES; k++) total += p[k] = std::exp(tile.logits[k][l] - top);
        const bool real = l < samples;
        for (int k = 0; k < CLASSES; k++) tile.d5[k][l] = real ? (p[k] / total - (k == y[l])) * scale : 0;
        if (real) loss += std::log(total) + top - tile.logits[y[l]][l];
    }
    return loss;
}

static void backward(Tile &tile, Sums &sums, const float *u, float *g) {
    linear_gradient<CLASSES, H2>(tile.a4, tile.d5, g + Sizes::w5, g + Sizes::b5, tile.x);
    linear_input_gradient<CLASSES, H2>(tile.d5, u + Sizes::w5, tile.d4);
    relu_gradient<H2>(tile.d4, tile.a4);
    linear_gradient<H2, H1>(tile.a3, tile.d4, g + Sizes::w4, g + Sizes::b4, tile.x);
    linear_input_gradient<H2, H1>(tile.d4, u + Sizes::w4, tile.d3);
    relu_gradient<H1>(tile.d3, tile.a3);
    linear_gradient<H1, FEATURES>(tile.a2, tile.d3, g + Sizes::w3, g + Sizes::b3, tile.x);
    linear_input_gradient<H1, FEATURES>(tile.d3, u + Sizes::w3, tile.d2);

    for (int c = 0; c < C2; c++)
        for (int y = 0, at = c * S3 * S3; y < S3; y++, at += S3)
            unpool<S3>(tile.d2 + at, tile.a2 + at, tile.where2 + at, tile.z2 + (c * S2 + 2 * y) * S2);
    for (int y = 0; y < S2; y += 2)
        conv_gradient<C1, C2, S1>(tile.a1 + y * S1, tile.z2 + y * S2, S2 * S2, sums.dw2, sums.db2);
    conv_input_gradient<C1, C2, S1>(tile.z2, u + Sizes::w2, tile.d1);
    for (int y = 0; y < S1; y++) {
        for (int c = 0, at = y * S1; c < C1; c++, at += S1 * S1)
            unpool<S1>(tile.d1 + at, tile.a1 + at, tile.where1 + at, tile.z1 + c * 2 * SIZE);
        conv_gradient<CHANNELS, C1, P0>(tile.image + 2 * y * P0, tile.z1, 2 * SIZE, sums.dw1, sums.db1);
    }
}

extern "C" {

int workspace_bytes() { return sizeof(Workspace); }

float gradient(Workspace *workspace, const float *u, const float *x, const int64_t *y, int samples, float *g) {
    auto &[tile, sums] = *workspace;
    double loss = 0;
    std::memset(g, 0, sizeof(float) * Sizes::all);
    std::memset(&sums, 0, sizeof sums);
    for (int s = 0; s < samples; s += LANES) {
        forward(tile, u, x + s * CHANNELS * SIZE * SIZE, samples - s);
        loss += loss_and_gradient(tile, y + s, samples - s, 1.0f / samples);
        backward(tile, sums, u, g);
    }
    for (int k = 0; k < C1 * CHANNELS * 25; k++) g[Sizes::w1 + k] = sum(sums.dw1[k]);
    for (int k = 0; k < C1; k++) g[Sizes::b1 + k] = sum(sums.db1[k]);
    for (int k = 0; k < C2 * C1 * 25; k++) g[Sizes::w2 + k] = sum(sums.dw2[k]);
    for (int k = 0; k < C2; k++) g[Sizes::b2 + k] = sum(sums.db2[k]);
    return loss / samples;
}

void logits(Workspace *workspace, const float *u, const float *x, int samples, float *out) {
    Tile &tile = workspace->tile;
    for (int s = 0; s < samples; s += LANES) {
        forward(tile, u, x + s * CHANNELS * SIZE * SIZE, samples - s);
        for (int l = 0; l < LANES && s + l < samples; l++)
            for (int k = 0; k < CLASSES; k++) out[(s + l) * CLASSES + k] = tile.logits[k][l];
    }
}
}
