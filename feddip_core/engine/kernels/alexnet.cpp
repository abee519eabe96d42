// Cross-entropy of AlexNet and its gradient, for one batch, in single precision.
//
// As in LeNet-5, samples stand side by side as the innermost axis, LANES to a tile. Up to TILES tiles pass a layer
// together, so that the sums of a weight's gradient stay in registers. Of a 3×3 kernel's nine places each has its own
// loop, which knows at compile time where the image ends: the zeros around it are never multiplied. A layer visits only
// its nonzero weights, forward and backward. With a mask, gradients are computed only for the weights that it keeps.
// Whether a layer counts as sparse never changes the order of a sum, so the bits are the same.
//
// Shapes come as macros: CHANNELS (of a 32×32 image), C1 to C4 (channels), H (hidden units), CLASSES.

#include <utility>
#include "common.hpp"

constexpr int SIZE = 32, TILES = 128 / LANES, ROOM = LANES == 16 ? 16 : 8;  // ROOM: sums that fit the registers
constexpr int W1 = SIZE + 1, FEATURES = C4 * 4;

#define INLINE __attribute__((always_inline))

template <class F, int... K>
static INLINE inline void each(F f, std::integer_sequence<int, K...>) { (f(std::integral_constant<int, K>{}), ...); }
#define PLACES(...) each(__VA_ARGS__, std::make_integer_sequence<int, 9>{})  // ky and kx as constants

// f(tiles at once, first tile) for all tiles: as many at once as possible
template <int MOST, class F>
static inline void blocks(int tiles, F f, int from = 0) {
    for (; from + MOST <= tiles; from += MOST) f(std::integral_constant<int, MOST>{}, from);
    if constexpr (MOST > 1) if (from < tiles) blocks<MOST / 2>(tiles, f, from);
}

// Every run of 2h lanes becomes the first halves of a's and b's run, or the second ones.
static INLINE inline V halves(V a, V b, int h, bool second) {
    I from;
    for (int l = 0; l < LANES; l++) from[l] = (l & h ? LANES + l - h : l) + (second ? h : 0);
#ifdef __clang__
    V both;
    for (int l = 0; l < LANES; l++) both[l] = l & h ? b[from[l] - LANES] : a[from[l]];
    return both;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

template <int HALF>
static INLINE inline void add_halves(V *v) {
    EACH(j, HALF) v[j] = halves(v[j], v[j + HALF], HALF, false) + halves(v[j], v[j + HALF], HALF, true);
    if constexpr (HALF > 1) add_halves<HALF / 2>(v);
}

// The sums over the lanes of LANES vectors, as one vector.
static INLINE inline V sums_of(V *v) {
    add_halves<LANES / 2>(v);
    return v[0];
}

template <int HALF = LANES / 2>
static INLINE inline void transpose(V *v) {
    EACH(j, LANES) if (!(j & HALF)) {
        const V a = v[j], b = v[j + HALF];
        v[j] = halves(a, b, HALF, false), v[j + HALF] = halves(a, b, HALF, true);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(v);
}

// put(k, the k-th number of all samples, side by side) for k < n; a sample's numbers are contiguous, `step` apart.
template <class F>
static INLINE inline void each_number(const float *from, int step, int samples, int n, F put) {
    for (int k = 0; k < n; k += LANES) {
        const int here = n - k < LANES ? n - k : LANES;
        V v[LANES] = {};
        for (int l = 0; l < LANES && l < samples; l++) std::memcpy(&v[l], from + l * step + k, here * sizeof(float));
        transpose(v);
        for (int j = 0; j < here; j++) put(k + j, v[j]);
    }
}

// to[k] += the sum over the lanes of v[k]; v has room for a multiple of LANES
static void add_sums(V *v, int n, float *to) {
    for (int k = 0; k < n; k += LANES) {
        const V s = sums_of(v + k);
        for (int l = 0; l < LANES && k + l < n; l++) to[k + l] += s[l];
    }
}

// A 3×3 convolution to N×N outputs. With stride 1 the image has no margin; with stride 2 it has one above and left.
template <int CIN, int COUT, int N, int STRIDE = 1>
struct Conv {
    static constexpr int K = CIN * 9, W = STRIDE == 2 ? W1 : N, IN = W * W, OUT = N * N, B = ROOM / 4;
    static constexpr int X = N < ROOM ? N : ROOM, R = STRIDE == 2 ? 1 : ROOM / X < N ? ROOM / X : N;

    // The weights by output, then by group of inputs that fits the L1 cache, then by place, then by input.
    template <int TO, int FROM>
    struct Taps {
        static constexpr int PARTS = STRIDE == 2 ? 1 : (FROM * OUT - 1) / 512 + 1, PART = (FROM - 1) / PARTS + 1;
        Tap list[TO][FROM * 9];
        int end[TO][PARTS][9];
    };

    Taps<COUT, CIN> taps;
    Taps<CIN, COUT> back;
    int all;
    bool sparse;  // whether only the taps get a gradient
    V sums[B][K + LANES];

    struct Taken { float w; bool taken; };

    template <int TO, int FROM, class F>
    static int sort(Taps<TO, FROM> &taps, int to, int size, F weight) {
        int n = 0;
        for (int part = 0; part < taps.PARTS; part++)
            for (int p = 0; p < 9; taps.end[to][part][p++] = n)
                for (int i = part * taps.PART; i < FROM && i < (part + 1) * taps.PART; i++) {
                    const Taken one = weight(i, p);
                    taps.list[to][n] = {i * size, one.w};
                    n += one.taken;
                }
        return n;
    }

    void read(const float *w, const float *wanted) {
        all = 0;
        for (int c = 0; c < COUT; c++)
            all += sort(taps, c, IN, [&](int i, int p) {
                const int k = c * K + i * 9 + p;
                return Taken{w[k], w[k] != 0 || (wanted && wanted[k] != 0)};
            });
        // The gradient of the input is a convolution with the kernel turned round.
        for (int i = 0; i < CIN && STRIDE == 1; i++)
            sort(back, i, OUT, [&](int c, int p) {
                const float value = w[c * K + i * 9 + 8 - p];
                return Taken{value, value != 0};
            });
        sparse = wanted && all < COUT * K * 3 / 4;
    }

    static constexpr bool inside(int at, int k, bool first = true, bool last = true, int n = N) {
        return STRIDE == 2 || !((first && at + k < 1) || (last && at + k > n));
    }

    static constexpr int from(int y, int x, int p) {
        return STRIDE == 2 ? (2 * y + p / 3) * W + 2 * x + p % 3 : (y + p / 3 - 1) * W + x + p % 3 - 1;
    }

    template <bool FIRST, bool LAST>
    static INLINE inline void rows(const Tap *list, const int (*end)[9], int parts, const V *in, V b, V *out,
                                   bool relu) {
        V sums[R * X];
        EACH(j, R * X) sums[j] = b;
        const Tap *tap = list;
        for (int part = 0; part < parts; part++) PLACES([&](auto place) INLINE {
            constexpr int P = place;
            for (; tap < list + end[part][P]; tap++) {
                const V *at = in + tap->at, w = tap->w - V{};
                EACH(j, R * X)
                    if (inside(j / X, P / 3, FIRST, LAST, R) && inside(j % X, P % 3))
                        sums[j] += at[from(j / X, j % X, P)] * w;
            }
        });
        EACH(j, R * X) out[j / X * N + j % X] = relu && sums[j] < 0 ? V{} : sums[j];
    }

    // out[c][y][x] = b[c] + Σ w[c][i][ky][kx] · in[i][y+ky][x+kx]
    template <class T>
    static void apply(const T &taps, int outputs, const V *in, const float *b, V *out, bool relu) {
        for (int c = 0; c < outputs; c++)
            for (int y = 0; y < N; y += R)
                for (int x = 0; x < N; x += X) {
                    const V *corner = in + STRIDE * (y * W + x), bias = (b ? b[c] : 0) - V{};
                    V *to = out + (c * N + y) * N + x;
                    const Tap *list = taps.list[c];
                    const auto end = taps.end[c];
                    if (STRIDE == 2) rows<false, false>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (R == N) rows<true, true>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (y == 0) rows<true, false>(list, end, taps.PARTS, corner, bias, to, relu);
                    else if (y == N - R) rows<false, true>(list, end, taps.PARTS, corner, bias, to, relu);
                    else rows<false, false>(list, end, taps.PARTS, corner, bias, to, relu);
                }
    }

    void forward(const V *in, const float *b, V *out, bool relu) const { apply(taps, COUT, in, b, out, relu); }
    void input_gradient(const V *dz, V *din) const { apply(back, CIN, dz, nullptr, din, false); }

    // dw[c][i][ky][kx] += Σ dz[c][y][x] · in[i][y+ky][x+kx] over all tiles, which are `step` vectors apart
    void gradient(const V *in, const V *dz, int step, int tiles, float *dw, float *db) {
        for (int c = 0; c < COUT; c++) {
            V s = {};
            for (int t = 0; t < tiles; t++) for (int x = 0; x < OUT; x++) s += dz[t * step + c * OUT + x];
            db[c] += sum(s);
        }
        if (sparse)
            for (int c = 0; c < COUT; c++) of_taps(in, dz + c * OUT, step, tiles, c, dw + c * K);
        else
            for (int c = 0; c < COUT; c += B) of_all(in, dz, step, tiles, c, dw);
    }

    void of_all(const V *in, const V *dz, int step, int tiles, int first, float *dw) {
        const V *own[B];
        EACH(c, B) own[c] = dz + (first + c < COUT ? first + c : COUT - 1) * OUT;
        for (int i = 0; i < CIN; i++)
            each([&](auto row) INLINE {
                constexpr int KY = row, FROM = STRIDE == 1 && KY == 0, TO = STRIDE == 1 && KY == 2 ? N - 1 : N;
                V s[B][3] = {};
                for (int t = 0; t < tiles; t++)
                    for (int y = FROM; y < TO; y++) {
                        const V *at = in + t * step + i * IN + from(y, 0, KY * 3 + 1);
                        EACH(x, N) EACH(c, B) {
                            const V d = own[c][t * step + y * N + x];
                            EACH(k, 3) if (inside(x, k)) s[c][k] += d * at[STRIDE * x + k - 1];
                        }
                    }
                EACH(c, B) EACH(k, 3) sums[c][i * 9 + KY * 3 + k] = s[c][k];
            }, std::make_integer_sequence<int, 3>{});
        for (int c = 0; c < B && first + c < COUT; c++) add_sums(sums[c], K, dw + (first + c) * K);
    }

    void of_taps(const V *in, const V *dz, int step, int tiles, int c, float *dw) {
        constexpr int G = 4;
        int which[K + LANES], n = 0, begin = 0;
        for (int part = 0; part < taps.PARTS; part++) PLACES([&](auto place) INLINE {
            constexpr int P = place, KY = P / 3, KX = P % 3;
            constexpr int FROM = STRIDE == 1 && KY == 0, TO = STRIDE == 1 && KY == 2 ? N - 1 : N;
            const int end = taps.end[c][part][P];
            for (int t = begin; t < end; t += G) {
                V s[G] = {};
                const V *own[G];
                EACH(j, G) own[j] = in + taps.list[c][t + j < end ? t + j : t].at;
                for (int tile = 0; tile < tiles; tile++)
                    for (int y = FROM; y < TO; y++)
                        EACH(x, N) if (inside(x, KX)) {
                            const V d = dz[tile * step + y * N + x];
                            EACH(j, G) s[j] += d * own[j][tile * step + from(y, x, P)];
                        }
                for (int j = 0; j < G && t + j < end; j++) {
                    which[n] = taps.list[c][t + j].at / IN * 9 + P;
                    sums[0][n++] = s[j];
                }
            }
            begin = end;
        });
        float found[K + LANES] = {};
        add_sums(sums[0], n, found);
        for (int j = 0; j < n; j++) dw[which[j]] += found[j];
    }
};

// A linear layer, on vectors of TILES tiles per unit.
template <int O, int K>
struct Linear {
    static constexpr int MOST = O * K / 3, B = ROOM / 4, G = LANES / 4;  // with more taps the dense way is faster
    Tap taps[MOST + 1], back[MOST + 1];
    int tap[O + 1], backs[K + 2];  // where those of each output, and of each input, begin
    bool sparse, sparse_gradient;

    void read(const float *w, const float *wanted) {
        const float *also = wanted ? wanted : w;
        int all = 0, n = 0;
        for (int k = 0; k < O * K; k++) all += any(w + k, also + k);
        sparse = all <= MOST, sparse_gradient = sparse && wanted;
        if (!sparse) return;
        std::memset(backs, 0, sizeof backs);
        for (int o = 0; o < O; o++) {
            tap[o] = n;
            for (int k = 0; k < K; k++) {
                taps[n] = {k, w[o * K + k]};
                n += any(w + o * K + k, also + o * K + k);
            }
        }
        tap[O] = n;
        for (int t = 0; t < n; t++) backs[taps[t].at + 2]++;
        for (int k = 1; k <= K; k++) backs[k + 1] += backs[k];
        for (int o = 0; o < O; o++)
            for (int t = tap[o]; t < tap[o + 1]; t++) back[backs[taps[t].at + 1]++] = {o, taps[t].w};
    }

    // Whether one of two is not zero; a zero may have a sign.
    static bool any(const float *one, const float *other) {
        uint32_t bits[2];
        std::memcpy(bits, one, 4), std::memcpy(bits + 1, other, 4);
        return (bits[0] | bits[1]) << 1;
    }

    // out[o] = b[o] + Σ w[o][k] · in[k]
    void forward(const V *in, const float *w, const float *b, V *out, int tiles) const {
        if (sparse)
            blocks<ROOM / 2>(tiles, [&](auto n, int t) { gather<n, O>(taps, tap, in + t, b, out + t); });
        else
            blocks<B>(tiles, [&](auto n, int t) { dense<n, O, K, K, 1>(in + t, w, b, out + t); });
    }

    // din[k] = Σ d[o] · w[o][k]
    void input_gradient(const V *d, const float *w, V *din, int tiles) const {
        if (sparse)
            blocks<ROOM / 2>(tiles, [&](auto n, int t) { gather<n, K>(back, backs, d + t, nullptr, din + t); });
        else
            blocks<B>(tiles, [&](auto n, int t) { dense<n, K, O, 1, K>(d + t, w, nullptr, din + t); });
    }

    template <int T, int TO>
    static void gather(const Tap *taps, const int *begin, const V *in, const float *b, V *out) {
        for (int o = 0; o < TO; o++) {
            V sums[T];
            EACH(t, T) sums[t] = (b ? b[o] : 0) - V{};
            for (const Tap *tap = taps + begin[o]; tap < taps + begin[o + 1]; tap++) {
                const V *from = in + tap->at * TILES, w = tap->w - V{};
                EACH(t, T) sums[t] += from[t] * w;
            }
            EACH(t, T) out[o * TILES + t] = sums[t];
        }
    }

    template <int T, int TO, int FROM, int ROW, int COLUMN>
    static void dense(const V *in, const float *w, const float *b, V *out) {
        constexpr int AT_ONCE = ROOM / T < 8 ? ROOM / T : 8;
        for (int o = 0; o < TO; o += AT_ONCE) {
            V sums[AT_ONCE][T];
            const float *row[AT_ONCE];
            EACH(j, AT_ONCE) row[j] = w + (o + j < TO ? o + j : TO - 1) * ROW;
            EACH(j, AT_ONCE) EACH(t, T) sums[j][t] = (b ? b[o + j < TO ? o + j : TO - 1] : 0) - V{};
            for (int k = 0; k < FROM; k++)
                EACH(j, AT_ONCE) EACH(t, T) sums[j][t] += in[k * TILES + t] * row[j][k * COLUMN];
            EACH(j, AT_ONCE) if (o + j < TO) EACH(t, T) out[(o + j) * TILES + t] = sums[j][t];
        }
    }

    // dw[o][k] += Σ over the samples of d[o] · in[k]
    void gradient(const V *in, const V *d, int tiles, float *dw, float *db) const {
        for (int o = 0; o < O; o++) {
            V s = {};
            for (int t = 0; t < tiles; t++) s += d[o * TILES + t];
            db[o] += sum(s);
            if (sparse_gradient) of_taps(in, d + o * TILES, tiles, o, dw + o * K);
        }
        for (int o = 0; o < O && !sparse_gradient; o += G)
            for (int k = 0; k < K; k += 4) {
                V s[LANES] = {};
                const V *left[G], *right[4];
                EACH(j, G) left[j] = d + (o + j < O ? o + j : O - 1) * TILES;
                EACH(i, 4) right[i] = in + (k + i < K ? k + i : K - 1) * TILES;
                for (int t = 0; t < tiles; t++) EACH(j, G) EACH(i, 4) s[j * 4 + i] += left[j][t] * right[i][t];
                const V found = sums_of(s);
                float four[G][4];
                std::memcpy(four, &found, sizeof four);
                if (o + G <= O && k + 4 <= K)
                    EACH(j, G) EACH(i, 4) dw[(o + j) * K + k + i] += four[j][i];
                else
                    for (int j = 0; j < G && o + j < O; j++)
                        for (int i = 0; i < 4 && k + i < K; i++) dw[(o + j) * K + k + i] += four[j][i];
            }
    }

    void of_taps(const V *in, const V *d, int tiles, int o, float *dw) const {
        for (int first = tap[o]; first < tap[o + 1]; first += LANES) {
            V s[LANES] = {};
            const V *own[LANES];
            const int n = tap[o + 1] - first < LANES ? tap[o + 1] - first : LANES;
            EACH(j, LANES) own[j] = in + taps[j < n ? first + j : first].at * TILES;
            for (int t = 0; t < tiles; t++) EACH(j, LANES) s[j] += d[t] * own[j][t];
            const V found = sums_of(s);
            for (int j = 0; j < n; j++) dw[taps[first + j].at] += found[j];
        }
    }
};

// The largest of each 2×2 of ReLU(z), and which one it was, for C channels.
template <int C, int N>
static void pool(const V *z, V *out, I *where, int step = 1) {
    for (int y = 0; y < C * N; y += 2)
        for (int x = 0; x < N; x += 2, out += step) {
            const V *at = z + y * N + x;
            V best = *at;
            I which = {};
            EACH(k, 3) {
                const V other = at[(k + 1) / 2 * N + (k + 1) % 2];
                which = other > best ? I{} + k + 1 : which;
                best = other > best ? other : best;
            }
            *out = best < 0 ? V{} : best;  // in this form a NaN stays NaN
            *where++ = which;
        }
}

// The gradient before the ReLU and the max-pool, from the one after them.
template <int C, int N>
static void unpool(const V *grad, const V *pooled, const I *where, V *dz, int step = 1) {
    for (int y = 0; y < C * N; y += 2)
        for (int x = 0; x < N; x += 2, grad += step, pooled += step, where++) {
            const V g = *pooled > 0 ? *grad : V{};
            EACH(k, 4) dz[(y + k / 2) * N + x + k % 2] = *where == k ? g : V{};
        }
}

static void relu_gradient(V *d, const V *out, int n, float scale = 1) {
    for (int i = 0; i < n; i++) d[i] = out[i] > 0 ? d[i] * scale : V{};
}

struct Sizes {
    static constexpr int w1 = 0, b1 = w1 + C1 * CHANNELS * 9, w2 = b1 + C1, b2 = w2 + C2 * C1 * 9, w3 = b2 + C2,
        b3 = w3 + C3 * C2 * 9, w4 = b3 + C3, b4 = w4 + C4 * C3 * 9, w5 = b4 + C4, b5 = w5 + C4 * C4 * 9,
        w6 = b5 + C4, b6 = w6 + H * FEATURES, w7 = b6 + H, b7 = w7 + H * H, w8 = b7 + H, b8 = w8 + CLASSES * H,
        all = b8 + CLASSES;
};

struct Layers {
    Conv<CHANNELS, C1, 16, 2> conv1;
    Conv<C1, C2, 8> conv2;
    Conv<C2, C3, 4> conv3;
    Conv<C3, C4, 4> conv4;
    Conv<C4, C4, 4> conv5;
    Linear<H, FEATURES> fc1;
    Linear<H, H> fc2;
    Linear<CLASSES, H> fc3;

    void read(const float *u, const float *mask) {
        const auto read = [&](auto &layer, int at) { layer.read(u + at, mask ? mask + at : nullptr); };
        read(conv1, Sizes::w1), read(conv2, Sizes::w2), read(conv3, Sizes::w3), read(conv4, Sizes::w4);
        read(conv5, Sizes::w5), read(fc1, Sizes::w6), read(fc2, Sizes::w7), read(fc3, Sizes::w8);
    }
};

struct Tile {
    V image[CHANNELS * W1 * W1], a1[C1 * 64], a2[C2 * 16], a3[C3 * 16], a4[C4 * 16];
    V z1[C1 * 256], z2[C2 * 64], z3[C3 * 16], z4[C4 * 16], z5[C4 * 16], d1[C1 * 64], d2[C2 * 16];
    I where1[C1 * 64], where2[C2 * 16], where5[FEATURES];
};
constexpr int STEP = sizeof(Tile) / sizeof(V);

struct Workspace {
    Tile tiles[TILES];
    V a5[FEATURES * TILES], a6[H * TILES], a7[H * TILES], logits[CLASSES * TILES];
    V d5[FEATURES * TILES], d6[H * TILES], d7[H * TILES], d8[CLASSES * TILES];
    Layers layers;
};

// What a dropout keeps, times 2; without one, everything.
static void drop(V *v, int units, const float *kept, int samples) {
    for (int s = 0, t = 0; kept && s < samples; s += LANES, t++)
        each_number(kept + s * units, units, samples - s, units, [&](int k, V times) { v[k * TILES + t] *= times; });
}

static void forward(Workspace &space, const float *u, const float *x, const float *kept5, const float *kept6,
                    int samples) {
    auto &layers = space.layers;
    const int tiles = (samples + LANES - 1) / LANES;
    for (int t = 0; t < tiles; t++, x += LANES * CHANNELS * SIZE * SIZE) {
        Tile &tile = space.tiles[t];
        for (int row = 0; row < CHANNELS * SIZE; row++) {
            V *to = tile.image + (row / SIZE * W1 + row % SIZE + 1) * W1 + 1;
            each_number(x + row * SIZE, CHANNELS * SIZE * SIZE, samples - t * LANES, SIZE, [&](int k, V v) { to[k] = v; });
        }
        layers.conv1.forward(tile.image, u + Sizes::b1, tile.z1, false);
        pool<C1, 16>(tile.z1, tile.a1, tile.where1);
        layers.conv2.forward(tile.a1, u + Sizes::b2, tile.z2, false);
        pool<C2, 8>(tile.z2, tile.a2, tile.where2);
        layers.conv3.forward(tile.a2, u + Sizes::b3, tile.a3, true);
        layers.conv4.forward(tile.a3, u + Sizes::b4, tile.a4, true);
        layers.conv5.forward(tile.a4, u + Sizes::b5, tile.z5, false);
        pool<C4, 4>(tile.z5, space.a5 + t, tile.where5, TILES);
    }
    drop(space.a5, FEATURES, kept5, samples);
    layers.fc1.forward(space.a5, u + Sizes::w6, u + Sizes::b6, space.a6, tiles);
    relu<H * TILES>(space.a6);
    drop(space.a6, H, kept6, samples);
    layers.fc2.forward(space.a6, u + Sizes::w7, u + Sizes::b7, space.a7, tiles);
    relu<H * TILES>(space.a7);
    layers.fc3.forward(space.a7, u + Sizes::w8, u + Sizes::b8, space.logits, tiles);
}

static void backward(Workspace &space, const float *u, float *g, float scale, int tiles) {
    auto &layers = space.layers;
    Tile &first = space.tiles[0];
    layers.fc3.gradient(space.a7, space.d8, tiles, g + Sizes::w8, g + Sizes::b8);
    layers.fc3.input_gradient(space.d8, u + Sizes::w8, space.d7, tiles);
    relu_gradient(space.d7, space.a7, H * TILES);
    layers.fc2.gradient(space.a6, space.d7, tiles, g + Sizes::w7, g + Sizes::b7);
    layers.fc2.input_gradient(space.d7, u + Sizes::w7, space.d6, tiles);
    relu_gradient(space.d6, space.a6, H * TILES, scale);  // what was dropped is 0, like what ReLU made 0
    layers.fc1.gradient(space.a5, space.d6, tiles, g + Sizes::w6, g + Sizes::b6);
    layers.fc1.input_gradient(space.d6, u + Sizes::w6, space.d5, tiles);
    relu_gradient(space.d5, space.a5, FEATURES * TILES, scale);
    for (int t = 0; t < tiles; t++) {
        Tile &tile = space.tiles[t];
        unpool<C4, 4>(space.d5 + t, space.a5 + t, tile.where5, tile.z5, TILES);
        layers.conv5.input_gradient(tile.z5, tile.z4);
        relu_gradient(tile.z4, tile.a4, C4 * 16);
        layers.conv4.input_gradient(tile.z4, tile.z3);
        relu_gradient(tile.z3, tile.a3, C3 * 16);
        layers.conv3.input_gradient(tile.z3, tile.d2);
        unpool<C2, 8>(tile.d2, tile.a2, tile.where2, tile.z2);
        layers.conv2.input_gradient(tile.z2, tile.d1);
        unpool<C1, 16>(tile.d1, tile.a1, tile.where1, tile.z1);
    }
    layers.conv5.gradient(first.a4, first.z5, STEP, tiles, g + Sizes::w5, g + Sizes::b5);
    layers.conv4.gradient(first.a3, first.z4, STEP, tiles, g + Sizes::w4, g + Sizes::b4);
    layers.conv3.gradient(first.a2, first.z3, STEP, tiles, g + Sizes::w3, g + Sizes::b3);
    layers.conv2.gradient(first.a1, first.z2, STEP, tiles, g + Sizes::w2, g + Sizes::b2);
    layers.conv1.gradient(first.image, first.z1, STEP, tiles, g + Sizes::w1, g + Sizes::b1);
}

extern "C" {

int64_t workspace_bytes() { return sizeof(Workspace); }
int parameters() { return Sizes::all; }

// The mean cross-entropy; −1 if a label is no class. The mask says which weights get a gradient; no mask: all of them.
// kept5 and kept6: what the dropouts before fc1 and fc2 multiply by, 0 or 2.
float gradient(Workspace *workspace, const float *u, const float *mask, const float *x, const int64_t *y, float *g,
               const float *kept5, const float *kept6, int samples) {
    Workspace &space = *workspace;
    double loss = 0;
    for (int s = 0; s < samples; s++) if (y[s] < 0 || y[s] >= CLASSES) return -1;
    std::memset(g, 0, sizeof(float) * Sizes::all);
    space.layers.read(u, mask);
    for (int s = 0; s < samples; s += TILES * LANES) {
        const int here = samples - s < TILES * LANES ? samples - s : TILES * LANES, tiles = (here + LANES - 1) / LANES;
        forward(space, u, x + s * CHANNELS * SIZE * SIZE, kept5 + s * FEATURES, kept6 + s * H, here);
        for (int t = 0; t < tiles; t++)
            loss += cross_entropy<CLASSES, TILES>(space.logits + t, space.d8 + t, y + s + t * LANES, here - t * LANES,
                                                  1.0f / samples);
        backward(space, u, g, 2, tiles);
    }
    return loss / samples;
}

void logits(Workspace *workspace, const float *u, const float *x, float *out, const float *kept5, const float *kept6,
            int samples) {
    Workspace &space = *workspace;
    space.layers.read(u, nullptr);
    for (int s = 0; s < samples; s += TILES * LANES) {
        const int here = samples - s < TILES * LANES ? samples - s : TILES * LANES;
        forward(space, u, x + s * CHANNELS * SIZE * SIZE, kept5 ? kept5 + s * FEATURES : nullptr,
                kept6 ? kept6 + s * H : nullptr, here);
        for (int l = 0; l < here; l++)
            for (int k = 0, t = l / LANES; k < CLASSES; k++)
                out[(s + l) * CLASSES + k] = space.logits[k * TILES + t][l % LANES];
    }
}
}
